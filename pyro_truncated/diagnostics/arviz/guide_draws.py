"""Draws from guides without an ``AutoTruncated`` part: Pyro's autoguides, functions, effects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_truncated.diagnostics.arviz.drawn import (
    Collector,
    Draws,
    joint_name,
    latents_of_data,
    likelihoods_given_all,
    plates_of_data,
    refuse_subsamples,
)
from pyro_truncated.diagnostics.arviz.enumeration import Enumeration
from pyro_truncated.diagnostics.arviz.roles import is_latent, leaves
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.utils.isolation import Assign, isolated, spare_random_numbers


def guide_trace_of(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> poutine.Trace:
    """Runs a guide: a callable, or an effect around the model.

    An example of the latter is ``AutoNormalMessenger``.
    """
    effect: Any = poutine.unwrap(guide)
    is_effect = isinstance(effect, Messenger)
    if is_effect:
        guide(*args, **kwargs)
    trace: poutine.Trace = effect.get_traces()[1] if is_effect else poutine.trace(guide).get_trace(*args, **kwargs)
    return trace


def draw_from_guide(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_draws: int) -> Draws:
    """Draws latents of the guide, enumerated latents and missing data."""
    program: _Program | None = None
    for _ in range(num_draws):
        guide_trace = guide_trace_of(model, guide, args, kwargs)
        if program is None:
            program = _Program(model, guide_trace, args, kwargs)
        program.add(guide_trace)
    assert program is not None
    return program.result()


class _Program:
    """A model whose latents come from guide, enumeration, or the model.

    The last are missing data.
    """

    def __init__(self, model: Callable[..., Any], guide_trace: poutine.Trace, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.model, self.args, self.kwargs = model, args, kwargs
        with spare_random_numbers():
            self.nodes = sample_nodes(self._run({name: node["value"] for name, node in sample_nodes(guide_trace).items()}))
        refuse_subsamples(self.nodes)
        missing = [name for name, node in self.nodes.items() if is_latent(node) and name not in guide_trace]
        summed = [name for name in missing if self.nodes[name]["fn"].support.is_discrete and self.nodes[name]["fn"].has_enumerate_support]
        self.drawn_anew = frozenset(missing) - set(summed)
        self._refuse_prior_draws()
        self.enumeration = Enumeration(model, args, kwargs, self.nodes, summed, self.drawn_anew) if summed else None
        inside = frozenset() if self.enumeration is None else frozenset(self.enumeration.inside)
        self.local = latents_of_data(self.nodes) | {name for name in inside if is_latent(self.nodes[name])}
        self.leaves = leaves(model, self.nodes, self.local - set(summed), args, kwargs)
        self.collector = Collector(self.local)

    def _refuse_prior_draws(self) -> None:
        unknown = sorted(self.drawn_anew - leaves(self.model, self.nodes, self.drawn_anew, self.args, self.kwargs))
        if unknown:
            raise ValueError(
                f"the guide has no distribution for the latents {unknown}, and they would be drawn from their prior, not from a posterior. "
                "Give to_arviz the guide that was trained with this model; for discrete latents, AutoTruncated or enumeration."
            )

    def _run(self, values: Mapping[str, Any]) -> poutine.Trace:
        with isolated(), Assign(values):
            return poutine.trace(self.model).get_trace(*self.args, **self.kwargs)

    def add(self, guide_trace: poutine.Trace) -> None:
        """Completes a draw of the guide and takes it in."""
        values = {name: node["value"] for name, node in sample_nodes(guide_trace).items() if name in self.nodes}
        if self.enumeration is not None:
            values |= self.enumeration.draw(values)
        trace = self._run(values)
        trace.compute_log_prob()
        nodes = sample_nodes(trace)
        lp = torch.as_tensor(trace.log_prob_sum()).double()
        evidence = lp - sum(nodes[name]["log_prob_sum"] for name in self.drawn_anew)
        likelihoods = likelihoods_given_all(nodes)
        if self.enumeration is not None:
            evidence = self.enumeration.log_evidence(values)
            likelihoods = self._with_marginal(likelihoods, values)
        guide_trace.compute_log_prob()
        log_weight = evidence - torch.as_tensor(guide_trace.log_prob_sum()).double()
        self.collector.add(nodes, lp, lp - log_weight, likelihoods)

    def _with_marginal(self, likelihoods: dict[str, Tensor], values: Mapping[str, Any]) -> dict[str, Tensor]:
        """Replaces likelihoods given discrete draws by one with them summed out."""
        assert self.enumeration is not None
        if not self.enumeration.plates:
            return likelihoods
        marginal = self.enumeration.log_likelihood(values, self.leaves)
        others = {name: value for name, value in likelihoods.items() if name not in self.enumeration.inside}
        return {joint_name(self.nodes, self.enumeration.inside): marginal, **others}

    def result(self) -> Draws:
        """All draws stacked."""
        plates = self.enumeration.plates if self.enumeration is not None else {}
        summed = self.enumeration.local if self.enumeration is not None else frozenset()
        return Draws(
            nodes=self.nodes,
            **self.collector.stacked(),
            local=self.local,
            given=self.local - summed - self.leaves,
            plates=plates or plates_of_data(self.nodes),
            joint=joint_name(self.nodes, self.enumeration.inside) if self.enumeration is not None and plates else "",
        )
