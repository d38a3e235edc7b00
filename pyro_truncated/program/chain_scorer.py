"""One site of binary chains in a program.

It has log likelihoods of states of each step, and the transitions between them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_truncated.distributions.chains import BinaryChains
from pyro_truncated.ops.binary_chains import Transitions
from pyro_truncated.program.call import Call
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.sites import sample_nodes, strip_events
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import goes_with
from pyro_truncated.utils.budget import rows_per_block


class ChainLayout:
    """A program with one discrete site, of binary chains.

    Every step of a sequence has a set of states.

    Attributes:
        layout: the discrete sites of the program.
        site: the site of chains.
        node_layouts: that of the program: the site is one node.
        groups: the steps of all sequences, whose sets are rows of one population.
        num_steps: steps of each sequence, ``T``.
    """

    def __init__(self, layout: Layout, chains: BinaryChains) -> None:
        self.layout = layout
        (self.site,) = layout.sites.values()
        self.num_steps, num_chains = chains.num_steps, chains.num_chains
        self.node_layouts = (layout,)
        self.groups = (_Steps([self.site.name], StateSpace([2] * num_chains), layout.num_data * self.num_steps),)

    @classmethod
    def from_trace(cls, trace: poutine.Trace, layout: Layout) -> ChainLayout | None:
        """Returns the layout of a program whose only discrete site has chains."""
        (name, site), *others = layout.sites.items()
        fn = trace.nodes[name]["fn"]
        if others or site.plates or not isinstance(fn, BinaryChains) or not goes_with(fn, "transitions", "log_prob"):
            return None
        return cls(layout, fn)

    def pack(self, levels: Tensor) -> list[Tensor]:
        """Returns whole states ``(N, S, T * M)`` as states of steps, ``(N * T, S, num_words)``."""
        space = self.groups[0].space
        steps = levels.unflatten(2, (self.num_steps, space.num_latents)).transpose(1, 2)
        return [space.pack(steps.flatten(0, 1))]

    def count_inner(self, number: int) -> int:
        """Returns how many successive rows belong to one sequence."""
        return self.num_steps

    def summary(self, num_states: int) -> list[str]:
        """One line: how many sets there are, and how large they are."""
        (steps,) = self.groups
        size = min(num_states, steps.space.size)
        kind = "all" if size == steps.space.size else f"{size} of"
        exact = " (exact)" if size == steps.space.size else ""
        number = f"{self.layout.num_data} sequence{'s' * (self.layout.num_data > 1)} of {self.num_steps} steps"
        return [f"{self.site.name}: {number}, {kind} {steps.space.readable_size} states of each step{exact}"]


class _Steps(NamedTuple):
    """Rows of a population: the steps of all sequences."""

    sites: list[str]
    space: StateSpace
    num_data: int


class CoupledStepsError(NotImplementedError):
    """The density of a step depends on other steps of its chains."""


class ChainScorer(Probe):
    """Log likelihoods of states of all steps in a run.

    They come with the chains' transitions.

    The i-th candidates of all steps make the i-th path, so that one run of the model on ``C`` paths scores all candidates.
    """

    def __init__(self, call: Call, product: ChainLayout, values: Mapping[str, Any] | None = None) -> None:
        super().__init__(call, product.layout, values)
        self.product, self.inside = product, {*product.layout.dependents, product.site.name}
        if self.is_vectorized:
            raise NotImplementedError("binary chains take one draw of the other latents at a time: use num_particles one after the other")

    @property
    def rows(self) -> Tensor | None:
        """The population's rows that this run selects, ``None`` for all."""
        if self.plate_indices is None:
            return None
        steps = torch.arange(self.product.num_steps)
        return (self.plate_indices.cpu().unsqueeze(-1) * self.product.num_steps + steps).flatten().to(self.device)

    def transitions(self) -> Transitions:
        """The transitions in this run, with a row for each sequence; differentiable."""
        chains: BinaryChains = self.nodes[self.product.site.name]["fn"]
        if chains.batch_shape.numel() != self.num_data:
            chains = chains.expand(self.layout.spread(self.sizes))
        return chains.flatten().transitions()

    @torch.no_grad()
    def __call__(self, words: Tensor) -> Tensor:
        """Log likelihoods of candidates, within the memory budget."""
        num_data, num_steps, num_candidates, _ = words.shape
        if not num_candidates:
            return torch.zeros(words.shape[:3], dtype=torch.float64, device=words.device)
        size = rows_per_block(32 * num_data * num_steps * self.product.groups[0].space.num_latents)
        return torch.cat([self.log_likelihood(part) for part in words.split(size, 2)], 2)

    def log_likelihood(self, words: Tensor) -> Tensor:
        """Returns differentiable log likelihoods ``(N, T, C)`` of states ``(N, T, C, W)``, in float64."""
        site, (num_data, num_steps, num_candidates, _) = self.product.site, words.shape
        states = self.product.groups[0].space.unpack(words, self.dtypes[site.name]).movedim(2, 0)
        plates = self.layout.spread(self.sizes)
        value = states.reshape(num_candidates, *plates, *states.shape[2:])
        with pyro.validation_enabled(False):
            nodes = sample_nodes(self.run({**self.values, site.name: value}))
        total = torch.zeros(num_candidates, num_data, num_steps, dtype=torch.float64, device=words.device)
        for name in sorted(self.layout.dependents & nodes.keys() - {site.name} - self.uncovered_latents):
            total = total + self._step_log_prob(nodes[name], num_candidates)
        return total.movedim(0, 2)

    def _step_log_prob(self, node: Any, num_candidates: int) -> Tensor:
        """The log density of a site, ``(C, N, T)``."""
        (fn, num_event), plates = strip_events(node["fn"]), self.layout.spread(self.sizes)
        log_prob = fn.log_prob(node["value"], *node["args"], **node["kwargs"])
        shape = log_prob.shape[log_prob.dim() - num_event :]
        if not num_event or shape[0] != self.product.num_steps:
            raise CoupledStepsError(
                f"the density of site '{node['name']}' has no dimension for the {self.product.num_steps} steps of "
                f"'{self.product.site.name}'. Make them the left-most dimension of its event, as in "
                "dist.Normal(s @ weight, 1.0).to_event(2), or use AutoTruncated(..., whole_states=True)."
            )
        log_prob = log_prob.flatten(log_prob.dim() - num_event + 1).sum(-1) if num_event > 1 else log_prob
        if not bool((log_prob.detach() < math.inf).all()):
            kind = "NaN" if bool(log_prob.isnan().any()) else "+inf"
            number = int((~(log_prob.detach() < math.inf)).sum())
            raise ValueError(
                f"the log density of site '{node['name']}' must be finite or -inf; got {kind} for {number} of {log_prob.numel()} steps of "
                "states. Check the model's parameters and data (missing values need a distribution that allows them)."
            )
        mask = node["mask"]
        mask = mask.unsqueeze(-1) if isinstance(mask, Tensor) else mask
        log_prob = scale_and_mask(log_prob, node["scale"] / self.scale, mask).double()
        log_prob = log_prob.expand(num_candidates, *plates, self.product.num_steps)
        return log_prob.reshape(num_candidates, self.num_data, self.product.num_steps)

    @torch.no_grad()
    def refuse_coupled_steps(self) -> None:
        """Checks that a step's likelihood depends on its own state alone."""
        generator = torch.Generator().manual_seed(0)
        space, num_steps = self.product.groups[0].space, self.product.num_steps
        words = space.random((self.num_data, num_steps, 2), 0.5, generator).to(self.device)
        is_odd = (torch.arange(num_steps, device=self.device) % 2 == 1).view(1, -1, 1)
        mixture = torch.where(is_odd, words[:, :, 1], words[:, :, 0])
        scores = self.log_likelihood(torch.cat([words, mixture.unsqueeze(2)], 2))
        expected = torch.where(is_odd.squeeze(-1), scores[..., 1], scores[..., 0])
        dtype = torch.float32 if torch.float32 in self.dtypes.values() else torch.float64
        if not torch.allclose(scores[..., 2], expected, rtol=1e3 * torch.finfo(dtype).eps, atol=1e-3 if dtype == torch.float32 else 1e-9):
            names = sorted(self.layout.dependents - {self.product.site.name})
            raise CoupledStepsError(
                f"the densities of {names} at a step depend on other steps of '{self.product.site.name}' too. Make the previous step "
                "a part of the state, or use AutoTruncated(..., whole_states=True)"
            )
