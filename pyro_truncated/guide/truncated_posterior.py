"""A truncated posterior as numbers, by site of the model.

It has marginals, modes, quantiles, expectations and draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_truncated.guide.pairwise_marginals import population_pairs
from pyro_truncated.program.layout import Layout
from pyro_truncated.states.population import Population

_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class TruncatedPosterior:
    """What can be read from scored populations.

    Attributes:
        population: the populations of ``N`` data points.
        layout: the sites that their states are values of.
        sizes: sizes of the data plates, whose product is ``N``.
    """

    population: Population
    layout: Layout
    sizes: tuple[int, ...]

    def marginals(self) -> dict[str, Tensor]:
        """Returns marginal probabilities.

        At Boolean sites they are those of 1, ``(N, *site shape)``, at others those of each value,
        ``(N, *site shape, V)``.
        """
        probabilities = self.population.value_probabilities()
        result, start = {}, 0
        for name, site in self.layout.sites.items():
            own = probabilities[:, start : start + site.num_latents, : max(site.cardinalities)]
            start += site.num_latents
            result[name] = own[..., 1].reshape(-1, *site.shape) if site.kind == "boolean" else own.reshape(-1, *site.shape, own.shape[-1])
        return result

    def pairwise_marginals(self, first: str, second: str) -> Tensor:
        """Joint marginals of two sites, see :meth:`AutoTruncated.pairwise_marginals`."""
        return population_pairs(self.population, self.layout, first, second)

    def mode(self) -> dict[str, Tensor]:
        """The most probable joint state, ``(N, *site shape)``."""
        return self._split(self.population.mode())

    def median(self) -> dict[str, Tensor]:
        """The most probable joint state, shaped as the model's sites."""
        return self.layout.site_values(self.population.space.unpack(self.population.mode()), self.sizes)

    def quantiles(self, quantiles: Sequence[float] | Tensor) -> dict[str, Tensor]:
        r"""Returns quantiles, shaped ``(Q, ...)`` as the model's sites.

        They are the smallest values :math:`v` of positive probability with :math:`P(s \le v) \ge
        q`.

        Raises:
            ValueError: if a number does not lie in 0 .. 1.
            NotImplementedError: for one-hot sites, whose values have no order.
        """
        wanted = torch.as_tensor(quantiles, dtype=torch.float64).flatten()
        if not bool(((wanted >= 0) & (wanted <= 1)).all()):
            raise ValueError(f"quantiles must lie in 0 .. 1; got {wanted.tolist()}")
        one_hot = [name for name, site in self.layout.sites.items() if site.kind == "one_hot"]
        if one_hot:
            raise NotImplementedError(f"the values of the one-hot sites {one_hot} have no order; use mode(), median() or marginals()")
        below = self.population.value_probabilities().double().cumsum(-1)
        # A value counts as reached in spite of rounding, and the smallest one only if it has any probability.
        levels = [(below < max(q - _ROUNDING, _ROUNDING)).sum(-1).clamp(max=below.shape[-1] - 1) for q in wanted.tolist()]
        values = [self.layout.site_values(level, self.sizes) for level in levels]
        return {name: torch.stack([value[name] for value in values]) for name in self.layout.sites}

    def expectation(self, f: Callable[[dict[str, Tensor]], Tensor], memory_budget: int | None) -> Tensor:
        """Expectation ``(N, ...)`` of a function that maps site values ``(N, S, *site shape)`` to ``(N, S, ...)``."""
        return self.population.expectation(lambda levels: f(self.layout.split(levels)), memory_budget=memory_budget)

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Independent draws, ``(num_samples, N, *site shape)``."""
        return self._split(self.population.sample(num_samples, generator))

    def _split(self, words: Tensor) -> dict[str, Tensor]:
        return self.layout.split(self.population.space.unpack(words))
