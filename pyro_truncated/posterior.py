"""The truncated posterior of a guide as numbers: weights, marginals, expectations, draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.log_joint import LogJoint
from pyro_truncated.population import Population
from pyro_truncated.sites import Layout
from pyro_truncated.states import StateSpace


class TruncatedPosterior:
    """What can be read from the populations that :class:`~pyro_truncated.AutoTruncated` stores; none of it changes them.

    Attributes:
        words: the packed states of all data points, ``(N, S, num_words)``.
        log_joint: their log joints ``(N, S)`` of when they were last scored; NaN if never.
        num_states: states per data point, ``S``.
        memory_budget: bytes that the temporaries of one operation may take, roughly.
    """

    words: Tensor
    log_joint: Tensor
    num_states: int
    memory_budget: int
    _layout: Layout | None
    _buffers: dict[str, Tensor | None]

    def log_joint_of(self, *args: Any, values: Mapping[str, Any] | None = None, **kwargs: Any) -> LogJoint:
        """A scorer of states for the data points that the model selects when called with these arguments; left to the guide."""
        raise NotImplementedError

    def _values_from_trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Draws of the model's other latents, from the trace that is being recorded where there is one; left to the guide."""
        raise NotImplementedError

    def _values_from_siblings(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], median: bool = False) -> dict[str, Any]:
        """Draws (or medians) of the model's other latents; left to the guide."""
        raise NotImplementedError

    @property
    def layout(self) -> Layout:
        """The discrete sites and the data plates."""
        if self._layout is None:
            raise RuntimeError("the guide has not seen the model yet; call it (or svi.step) once with the model's arguments")
        return self._layout

    @property
    def space(self) -> StateSpace:
        """The space of one data point's states."""
        return self.layout.space

    @property
    def index_name(self) -> str:
        """Name of the auxiliary index site."""
        return "_".join([*self.layout.sites, "index"])

    def _check_indices(self, indices: Tensor | None) -> None:
        if indices is not None and len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.words.shape[0]:
            raise ValueError(
                f"subsample indices must lie in 0 .. {self.words.shape[0] - 1}; got {int(indices.min())} .. {int(indices.max())}"
            )

    def population(self, indices: Tensor | None = None) -> Population:
        """The stored populations of all or the given data points, with the log joints of when they were last scored."""
        if "words" not in self._buffers:
            raise RuntimeError("the guide has no populations yet; call it (or svi.step) once with the model's arguments")
        self._check_indices(indices)
        if indices is None:
            return Population(self.space, self.words, self.log_joint)
        return Population(self.space, self.words[indices], self.log_joint[indices], indices)

    def posterior(self, *args: Any, **kwargs: Any) -> Population:
        """The populations with log joints under the model as it is now, for the data points the model selects; stores nothing."""
        with torch.no_grad():
            log_joint = self.log_joint_of(*args, values=self._values_from_trace(args, kwargs), **kwargs)
            return self.rescored(log_joint)

    def rescored(self, log_joint: LogJoint) -> Population:
        """The stored populations of a scorer's data points with their log joints under it; stores nothing."""
        population = self.population(log_joint.indices)
        blocks = [log_joint.score(population.words[rows], rows) for rows in log_joint.row_blocks(self.num_states)]
        return dataclasses.replace(population, log_joint=torch.cat(blocks))

    def weights(self, indices: Tensor | None = None) -> Tensor:
        """Posterior weights of the states, ``(N, S)``, as of when they were last scored (by a training step, say)."""
        return self._scored(indices).weights()

    def states(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """The populations as site values ``(N, S, *site shape)`` by site name, nested plates in front of the event."""
        population = self.population(indices)
        return self.layout.split(population.states())

    def marginals(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """Posterior marginals by site.

        The probability of 1, ``(N, *site shape)``, at Boolean sites; of each value, ``(N, *site shape, V)``, at others.
        """
        population = self._scored(indices)
        probabilities = population.value_probabilities()
        result, start = {}, 0
        for name, site in self.layout.sites.items():
            own = probabilities[:, start : start + site.num_latents, : max(site.cardinalities)]
            start += site.num_latents
            result[name] = own[..., 1].reshape(-1, *site.shape) if site.kind == "boolean" else own.reshape(-1, *site.shape, own.shape[-1])
        return result

    def mode(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """The most probable joint state by site, ``(N, *site shape)``."""
        return self.layout.split(self.space.unpack(self._scored(indices).mode()))

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The most probable state, shaped as the model's sites: what stands in for the median of a discrete posterior."""
        with torch.no_grad():
            log_joint = self.log_joint_of(*args, values=self._values_from_siblings(args, kwargs, median=True), **kwargs)
            population = self.rescored(log_joint)
        return self.layout.site_values(self.space.unpack(population.mode()), log_joint.sizes)

    def expectation(self, f: Callable[[dict[str, Tensor]], Tensor], indices: Tensor | None = None) -> Tensor:
        """Posterior expectation ``(N, ...)`` of a function that maps site values ``(N, S, *site shape)`` to ``(N, S, ...)``."""
        return self._scored(indices).expectation(lambda levels: f(self.layout.split(levels)), memory_budget=self.memory_budget)

    def sample_posterior(
        self, num_samples: int, indices: Tensor | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Independent draws from the truncated posterior by site, ``(num_samples, N, *site shape)``."""
        words = self._scored(indices).sample(num_samples, generator)
        return self.layout.split(self.space.unpack(words))

    def _scored(self, indices: Tensor | None) -> Population:
        population = self.population(indices)
        if bool(population.log_joint.isnan().any()):
            raise RuntimeError(
                "some of these populations have never been scored under the model; train first, or refresh them with "
                "guide.refresh_(*args) (with the model's arguments)"
            )
        return population
