"""Affinities: scores by which a preselection ranks latents."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.search.base import Search, SearchBatch, forget, set_state, state_of
from pyro_truncated.search.options import options_of
from pyro_truncated.utils.arguments import names_arguments

Affinity = Callable[[SearchBatch], Tensor]


class AffinitySearch(Search):
    """A search that ranks by an affinity, which may learn from data.

    What it has learned is forgotten, saved and restored with the search.

    Attributes:
        affinity: what ranks.
    """

    affinity: Any

    @property
    def learns(self) -> bool:
        """Whether the affinity does."""
        return getattr(self.affinity, "learns", False)

    def meet(self, batch: SearchBatch) -> None:
        """Lets the affinity learn."""
        if self.learns:
            self.affinity.meet(batch)

    def forget(self) -> None:
        """Lets the affinity forget what it has learned of data."""
        forget(self.affinity)

    def state_dict(self) -> dict[str, Any]:
        """Returns the generator's state and what the affinity has learned."""
        return {**super().state_dict(), "affinity": state_of(self.affinity)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from where a search has been."""
        super().load_state_dict(state)
        set_state(self.affinity, state["affinity"])


class Singletons:
    r"""Log joint of single active latents: :math:`f_{nh} = \log p(s = e_h, y_n)`.

    For latents of several values it is that of the state with this value alone. For a mixture it is the log joint of
    every class. It works for every model and costs the evaluation of one state per option.

    Example:
        >>> search = Preselection(Singletons(), 4)  # for any model of binary latents
    """

    def __call__(self, batch: SearchBatch) -> Tensor:
        """Scores ``(N, P)`` of the options of the batch's data points."""
        words = options_of(batch.space, batch.population.words.device).words
        return batch.score(words.expand(len(batch.population), -1, -1).contiguous())


class _Dictionary(abc.ABC):
    """An affinity that compares observations with the columns of a dictionary."""

    @names_arguments
    def __init__(self, weight: Callable[[], Tensor], site: str | None = None) -> None:
        if not callable(weight):
            raise TypeError(
                f"weight must be a function that returns the current dictionary, such as lambda: model.weight; got {type(weight).__name__}"
            )
        self.weight = weight
        self.site = site

    def __call__(self, batch: SearchBatch) -> Tensor:
        """Scores ``(N, H)`` of the data points of a batch.

        Raises:
            ValueError: if the observations are not those of one site, or do not fit the dictionary.
        """
        observed, weight = self._observations(batch), self.weight().detach()
        if weight.dim() != 2 or observed.dim() != 2 or weight.shape[0] != observed.shape[1]:
            raise ValueError(
                f"{type(self).__name__} compares observations (N, D) with a dictionary (D, H); "
                f"got shapes {tuple(observed.shape)} and {tuple(weight.shape)}"
            )
        return self._compare(observed, weight.to(observed))

    @abc.abstractmethod
    def _compare(self, observed: Tensor, weight: Tensor) -> Tensor:
        """Scores ``(N, H)`` of observations ``(N, D)``."""

    def _observations(self, batch: SearchBatch) -> Tensor:
        names = list(batch.observations)
        if self.site is None and len(names) != 1:
            raise ValueError(f"{type(self).__name__} needs the name of one observed site (site=...); the model has {names}")
        if self.site is not None and self.site not in names:
            raise ValueError(f"{type(self).__name__} found no observed site {self.site!r}; the model has {names}")
        found = batch.observations[names[0] if self.site is None else self.site]
        return found if found.is_floating_point() else found.to(torch.get_default_dtype())


class Projection(_Dictionary):
    r"""Projection of the observation on the dictionary, :math:`f_{nh} = W_h^\top y_n`.

    Missing (NaN) entries are left out.

    Example:
        >>> model = BinarySparseCoding(16, 8)
        >>> search = Preselection(Projection(lambda: model.weight), 4)

    Args:
        weight: returns the current dictionary :math:`W`, ``(D, H)``.
        site: name of the observed site; needed only where there are several.
    """

    def _compare(self, observed: Tensor, weight: Tensor) -> Tensor:
        return observed.nan_to_num(nan=0.0) @ weight


class Cosine(_Dictionary):
    r"""Cosine of observation and dictionary element, times the observation's norm.

    The norm does not change ranks.

    .. math:: f_{nh} = W_h^\top y_n / \|W_h\|

    Sums and norms run over the observed entries of :math:`y_n`; an element without length there has the score zero.

    Example:
        >>> model = BinarySparseCoding(16, 8)
        >>> search = Preselection(Cosine(lambda: model.weight), 4)

    Args:
        weight: returns the current dictionary :math:`W`, ``(D, H)``.
        site: name of the observed site; needed only where there are several.
    """

    def _compare(self, observed: Tensor, weight: Tensor) -> Tensor:
        missing = observed.isnan()
        if not bool(missing.any()):
            direction: Tensor = weight / _or_one(weight.norm(dim=0))
            return observed @ direction
        norm = ((~missing).to(weight) @ weight.square()).sqrt()
        projection: Tensor = observed.nan_to_num(nan=0.0) @ weight
        return projection / _or_one(norm)


def _or_one(norm: Tensor) -> Tensor:
    return torch.where(norm > 0, norm, 1.0)
