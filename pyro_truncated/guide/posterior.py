"""The truncated posterior of a guide as numbers: weights, marginals, expectations, draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.guide.store import PopulationStore
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.states.population import Population

_ROUNDING = 1e-6


class TruncatedPosterior(PopulationStore):
    """What can be read from the populations that :class:`~pyro_truncated.AutoTruncated` stores; none of it changes them.

    Beside guides of other latents (in an :class:`~pyro.infer.autoguide.AutoGuideList`) the posterior of the states is different for every
    draw that these make. What is read is then the average over :attr:`num_draws` of them, under the model as it is now and the arguments
    it was last called with.

    Attributes:
        memory_budget: bytes that the temporaries of one operation may take, roughly.
        num_draws: how many draws of the latents of other guides are averaged over, where there are any; 1 for a single one.
    """

    memory_budget: int
    num_draws: int = 50

    def log_joint_of(self, *args: Any, values: Mapping[str, Any] | None = None, **kwargs: Any) -> LogJoint:
        """A scorer of states for the data points that the model selects when called with these arguments; left to the guide."""
        raise NotImplementedError

    def _values_from_trace(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Draws of the model's other latents, from the trace that is being recorded where there is one; left to the guide."""
        raise NotImplementedError

    def _values_from_siblings(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], median: bool = False, subsamples: Mapping[str, Tensor] | None = None
    ) -> dict[str, Any]:
        """Draws (or medians) of the model's other latents; left to the guide."""
        raise NotImplementedError

    def _averaged(self, population: Population) -> Population:
        """Stored populations with log joints averaged over draws of the model's other latents; left to the guide."""
        raise NotImplementedError

    @property
    def index_name(self) -> str:
        """Name of the auxiliary index site."""
        return "_".join([*self.layout.sites, "index"])

    def posterior(self, *args: Any, **kwargs: Any) -> Population:
        """The populations with log joints under the model as it is now, for the data points the model selects; stores nothing."""
        with torch.no_grad():
            log_joint = self.log_joint_of(*args, values=self._values_from_trace(args, kwargs), **kwargs)
            return self.rescored(log_joint)

    def population_of(self, log_joint: LogJoint) -> Population:
        """The stored populations of a scorer's data points, with what the model observes of their states put in."""
        population = self.population(log_joint.indices)
        return dataclasses.replace(population, words=log_joint.fitted(population.words))

    def rescored(self, log_joint: LogJoint) -> Population:
        """The stored populations of a scorer's data points with their log joints under it; stores nothing."""
        population = self.population_of(log_joint)
        blocks = [log_joint.score(population.words[rows], rows) for rows in log_joint.row_blocks(self.num_states)]
        return dataclasses.replace(population, log_joint=torch.cat(blocks))

    def weights(self, indices: Tensor | None = None) -> Tensor:
        """Posterior weights of the states, ``(N, S)``, as of when they were last scored (by a training step, say).

        Beside other guides they are averages over draws, see :class:`TruncatedPosterior`; so are those of the methods below.
        """
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
        """The most probable state, shaped as the model's sites: what stands in for the median of a discrete posterior.

        Without the arguments that the model takes, those of all data points as they were last scored (in training, say).
        """
        population, sizes = self._given_medians(args, kwargs)
        return self.layout.site_values(self.space.unpack(population.mode()), sizes)

    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        r"""Quantiles of the marginal posterior of every latent.

        The ``q``-quantile is the smallest value :math:`v` of positive probability with :math:`P(s \le v) \ge q`. The other latents of the
        model have their medians, as in :meth:`median`. Classes are taken for the numbers they have. Without the arguments that the model
        takes, they are those of all data points as they were last scored.

        Args:
            quantiles: numbers from 0 to 1.
            *args: the model's positional arguments.
            **kwargs: the model's keyword arguments.

        Returns:
            By site, the quantiles in a new left-most dimension in front of the site's shape in the model.

        Raises:
            ValueError: if a number does not lie in 0 .. 1.
            NotImplementedError: for one-hot sites, whose values have no order.
        """
        wanted = torch.as_tensor(quantiles, dtype=torch.float64).flatten()
        if not bool(((wanted >= 0) & (wanted <= 1)).all()):
            raise ValueError(f"quantiles must lie in 0 .. 1; got {wanted.tolist()}")
        population, sizes = self._given_medians(args, kwargs)
        one_hot = [name for name, site in self.layout.sites.items() if site.kind == "one_hot"]
        if one_hot:
            raise NotImplementedError(f"the values of the one-hot sites {one_hot} have no order; use mode(), median() or marginals()")
        below = population.value_probabilities().double().cumsum(-1)
        # A value counts as reached in spite of rounding, and the smallest one only if it has any probability.
        levels = [(below < max(q - _ROUNDING, _ROUNDING)).sum(-1).clamp(max=below.shape[-1] - 1) for q in wanted.tolist()]
        values = [self.layout.site_values(level, sizes) for level in levels]
        return {name: torch.stack([value[name] for value in values]) for name in self.layout.sites}

    def expectation(self, f: Callable[[dict[str, Tensor]], Tensor], indices: Tensor | None = None) -> Tensor:
        """Posterior expectation ``(N, ...)`` of a function that maps site values ``(N, S, *site shape)`` to ``(N, S, ...)``."""
        return self._scored(indices).expectation(lambda levels: f(self.layout.split(levels)), memory_budget=self.memory_budget)

    def sample_posterior(
        self, num_samples: int, indices: Tensor | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Independent draws from the truncated posterior by site, ``(num_samples, N, *site shape)``."""
        words = self._scored(indices).sample(num_samples, generator)
        return self.layout.split(self.space.unpack(words))

    def _given_medians(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Population, tuple[int, ...]]:
        """Populations given the medians of other latents, and the sizes of their data plates.

        Those of all data points as they were last scored, where the model's arguments are left out.
        """
        if self._layout is not None and not (args or kwargs) and self._takes_arguments():
            return self._scored(None), self.layout.full_sizes
        with torch.no_grad():
            log_joint = self.log_joint_of(*args, values=self._values_from_siblings(args, kwargs, median=True), **kwargs)
            return self.rescored(log_joint), log_joint.sizes

    def _takes_arguments(self) -> bool:
        """Whether the model takes arguments, left to the guide."""
        raise NotImplementedError

    def _scored(self, indices: Tensor | None) -> Population:
        population = self.population(indices)
        if bool(population.log_joint.isnan().any()):
            raise RuntimeError(
                "some of these populations have never been scored under the model; train first, or refresh them with "
                "guide.refresh_(*args) (with the model's arguments)"
            )
        return self._averaged(population)
