"""A guide on a site of binary chains.

Its free energy and gradient, its search, what is read from it, and the program it is.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.guide.batch import mean_active
from pyro_truncated.guide.given_states import excess_density
from pyro_truncated.guide.product_batch import SetBatch
from pyro_truncated.guide.product_posterior import SetReadings
from pyro_truncated.guide.program import ProgramRun
from pyro_truncated.ops import binary_chains as chains
from pyro_truncated.ops.binary_chains import Transitions
from pyro_truncated.program.chain_scorer import ChainScorer
from pyro_truncated.program.linear_sites import linear_steps
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search, check_search
from pyro_truncated.sequences import BlockSearch, ChainPosterior, LinearGaussianSteps
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import goes_with
from pyro_truncated.utils.parameter_store import isolate


@dataclasses.dataclass(frozen=True)
class ChainBatch(SetBatch[ChainScorer]):
    """The sets of all steps of the selected sequences."""

    def check(self) -> None:
        """Checks that the sets are of these data."""
        (store,) = self.populations.stores
        self._check_device()
        if self.scorer.full_size * self.scorer.product.num_steps != len(store.words):
            raise ValueError(
                f"the guide has sets for {len(store.words)} steps, the model now has {self.scorer.full_size} sequences of "
                f"{self.scorer.product.num_steps} steps. Make a guide for these data: guide.infer(...), or a new AutoTruncated."
            )
        self.populations.seen.compare(self.scorer)

    # --- the sets ---

    def words(self) -> Tensor:
        """The sets ``(N, T, S, W)``."""
        shape = self.scorer.num_data, self.scorer.product.num_steps
        return self.populations.stores[0].take(self.scorer.rows).words.unflatten(0, shape)

    def posterior(self, words: Tensor | None = None) -> ChainPosterior:
        """Returns the posterior on the stored sets, or on others."""
        words = self.words() if words is None else words
        return self._posterior(words.shape[2], words)

    @torch.no_grad()
    def _posterior(self, num_states: int, words: Tensor | None = None) -> ChainPosterior:
        moves = self.scorer.transitions()
        likelihood = _linear_steps(self.scorer) or self.scorer
        posterior = ChainPosterior(likelihood, Transitions(moves.log_prob.detach(), moves.kind), num_states, words=words)
        posterior.indices, (store,) = self.scorer.plate_indices, self.populations.stores
        own = posterior.positions if posterior.indices is None else posterior.indices.to(moves.kind.device)
        posterior.positions = own + store.first_position // self.scorer.product.num_steps
        return posterior

    def rescore(self) -> list[Population]:
        """Returns the sets, scored in this run of the model."""
        return self._populations(self.posterior())

    def _populations(self, posterior: ChainPosterior) -> list[Population]:
        return [dataclasses.replace(posterior.population(), indices=self.scorer.rows)]

    # --- the free energy and its gradient ---

    def evidence(self) -> Tensor:
        """Returns the evidence of each sequence in this run, ``(N,)``."""
        return self.posterior().free_energy()

    def free_energy(self) -> Tensor:
        """The scaled free energy, differentiable in whatever the model is."""
        if self.is_idle:
            return self.outside()
        words = self.words()
        is_repeated = ops.find_duplicates(words.flatten(0, 1)).view(words.shape[:3])
        unary = self.scorer.log_likelihood(words).masked_fill(is_repeated, -math.inf)
        return self.scorer.scale * chains.free_energy(words, unary, self.scorer.transitions()).sum() + self.outside()

    def backward_(self, temperature: float = 1.0, particles: int = 1) -> float:
        """See :meth:`Batch.backward_`; the temperature must be one."""
        if temperature != 1.0:
            raise NotImplementedError(f"temperature must be 1 for sites of chains, whose sets are not annealed; got {temperature}")
        number, total = self.num_draws(particles), 0.0
        for batch in self.draws(particles):
            with torch.enable_grad():
                bound = batch.free_energy()
                if bound.requires_grad:
                    (-bound / number).backward()
            total -= float(bound.detach()) / number
        self.rescore_()
        return total

    # --- the search ---

    @torch.no_grad()
    def search_(self, search: Search, steps: int = 1, *, is_new: bool = False) -> list[Population]:
        """Improves the sets in place, and returns them with their log joints."""
        return self._populations(self.improve_(search, steps, is_new=is_new))

    @torch.no_grad()
    def improve_(self, search: Search, steps: int = 1, *, is_new: bool = False) -> ChainPosterior:
        """Improves the sets in place, and returns the posterior on them.

        A step sweeps over flips of the members, forward and backward. Then a block of chains takes all its configurations at all
        steps, which mends what is wrong over a stretch of time; by default nothing else proposes. Any other search proposes for each step.
        """
        check_search(search)
        self.populations.seen.is_new |= is_new
        (store,) = self.populations.stores
        random = store.next_search_()
        # Chains whose joint configurations are scored by runs of the model.
        blocks = BlockSearch(4, generator=random)
        with isolate():
            populations = store.take(self.scorer.rows)
            is_scored = not bool(populations.log_joint.isnan().any())
            is_given = is_scored or self.populations.is_given
            posterior = self.posterior() if is_given else self._posterior(populations.num_states)
            if not is_scored and is_given:
                start = self._posterior(populations.num_states)
                posterior.look_ahead_(start.words, start.unary, forward=True)
            for _ in range(steps):
                posterior.improve_(2).search_(blocks)
                if not isinstance(search, AutomaticSearch):
                    keys = dict[str, Any](is_new=is_new, random=random)
                    if self.populations.is_part:
                        keys |= {"is_spread": True, "mean_active": None}
                        if search.takes_activity:
                            keys["mean_active"] = mean_active(posterior.population(), is_idle=self.is_idle, is_part=True)
                    posterior.search_(search, **keys)
            self.keep_(self._populations(posterior))
        return posterior


def _linear_steps(scorer: ChainScorer) -> LinearGaussianSteps | None:
    """Returns kernels that score the states of a linear Gaussian program.

    Its one observed site is a :class:`.LinearSuperposition` of the very chains, or normal around a linear function of them;
    ``None`` stands for other programs.
    """
    site = scorer.product.site.name
    names = (scorer.layout.dependents - {site} - scorer.uncovered_latents) & scorer.nodes.keys()
    if len(names) != 1:
        return None
    node, states = scorer.nodes[next(iter(names))], scorer.nodes[site]["value"]
    fn, value = getattr(node["fn"], "base_dist", None), node["value"]
    if node["mask"] is not None or not bool(torch.as_tensor(node["scale"] == scorer.scale).all()):
        return None
    if isinstance(fn, LinearSuperposition):
        is_shared = fn.weight.dim() == 2 and fn.scale.dim() <= 1 and fn.bias.dim() == 1
        is_own = fn.states is states and node["fn"].reinterpreted_batch_ndims == 1 and goes_with(fn, "packed_log_prob", "log_prob")
        likelihood = fn if is_shared and is_own and value.shape[:-1] == states.shape[:-1] else None
    else:
        likelihood = linear_steps(scorer, node["name"])
    if likelihood is None:
        return None
    return LinearGaussianSteps(value.reshape(scorer.num_data, *value.shape[-2:]), likelihood.weight, likelihood.scale, likelihood.bias)


@dataclasses.dataclass(frozen=True)
class ChainReadings(SetReadings):
    """What can be read from sets of all steps.

    Every result has the plates of the site in front, then steps and chains.
    """

    # The sets with a run of the model, for each draw of the latents of other guides; what is read
    # is an average over them.
    batches: Sequence[ChainBatch]

    @cached_property
    def posteriors(self) -> list[ChainPosterior]:
        """The posterior of each batch."""
        return [batch.posterior() for batch in self.batches]

    @property
    def populations(self) -> list[Population]:
        """The sets of all steps, scored under the first draw."""
        return [self.posteriors[0].population()]

    def free_energy(self) -> Tensor:
        """The bound of each sequence, ``(N,)`` in float64."""
        return torch.stack([posterior.free_energy() for posterior in self.posteriors]).mean(0)

    def marginals(self) -> dict[str, Tensor]:
        """The probability that each chain is on, ``(*plates, T, M)``."""
        return self._reshape_as_site(torch.stack([posterior.marginals() for posterior in self.posteriors]).mean(0))

    def pairwise_marginals(self, first: str, second: str) -> Tensor:
        """Joint probabilities of pairs of entries, ``(*plates, T, M, T, M, 2, 2)``."""
        product = self.batches[0].scorer.product
        for argument, name in (("first", first), ("second", second)):
            if name != product.site.name:
                raise ValueError(f"{argument} must be the name of the site of chains, '{product.site.name}'; got '{name}'")
        number = product.num_steps * product.groups[0].space.num_latents
        if self.batches[0].scorer.num_data * number**2 > 2**24:
            raise NotImplementedError(
                f"{number} entries of '{first}' have too many pairs. Estimate joint probabilities from guide.sample_posterior(num_samples)"
            )
        pairs = torch.stack([posterior.pairwise_marginals() for posterior in self.posteriors]).mean(0)
        return pairs.reshape(*self.batches[0].scorer.sizes, *pairs.shape[1:])

    def mode(self) -> dict[str, Tensor]:
        """Returns the best path of each sequence, ``(*plates, T, M)``."""
        return self._reshape_as_site(self.posteriors[0].mode())

    def median(self) -> dict[str, Tensor]:
        """The best path, shaped as the model's site."""
        scorer = self.batches[0].scorer
        (value,) = self.mode().values()
        return {scorer.product.site.name: value.reshape(*scorer.layout.spread(scorer.sizes), *value.shape[-2:])}

    def sample(self, num_samples: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Independent paths, ``(num_samples, *plates, T, M)``."""
        pairs = zip(self.posteriors, self._share_out(num_samples, generator), strict=True)
        paths = torch.cat([posterior.sample(count, generator) for posterior, count in pairs if count])
        return self._reshape_as_site(paths, 1)

    def _reshape_as_site(self, values: Tensor, start: int = 0) -> dict[str, Tensor]:
        scorer = self.batches[0].scorer
        site = scorer.product.site
        return {site.name: values.reshape(*values.shape[:start], *scorer.sizes, *values.shape[start + 1 :]).to(site.dtype)}


class ChainProgramRun(ProgramRun):
    r"""One run of a guide on a site of chains.

    Messages draw a path, with its log probability :math:`\log q`.

    Since :math:`\log p(s, y) - \log q(s) = \mathcal F` for every path, any ELBO of Pyro's returns the free energy without noise.
    """

    def _sample_batch(self, batch: ChainBatch, plates: Mapping[str, Any], found: Any) -> dict[str, Tensor]:
        layout, scorer = self._layout, batch.scorer
        site = scorer.product.site
        with torch.no_grad():
            posterior = batch.posterior()
            path, log_prob = posterior.draw_with_log_prob()
            excess = excess_density(posterior.free_energy(), [site.name])
            log_prob = torch.where(excess > 0, excess, log_prob)
        shape, scale = layout.spread(scorer.sizes), scorer.scale_beyond_subsamples(site.name)
        value, log_prob = path.to(site.dtype).reshape(*shape, *path.shape[1:]), log_prob.to(site.dtype).reshape(shape)
        # The auxiliary site has the log probability of the path.
        self._sample_index(layout, torch.zeros_like(log_prob, dtype=torch.int64), log_prob, plates, scorer)
        return {site.name: self._sample_site(site, value, plates, log_prob.new_zeros(()), scale=scale)}
