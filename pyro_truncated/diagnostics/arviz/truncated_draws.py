"""Draws from guides with an ``AutoTruncated`` part."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.diagnostics.arviz.drawn import (
    Collector,
    Draws,
    Sites,
    States,
    joint_name,
    latents_of_data,
    likelihoods_given_all,
    plates_of_data,
    refuse_subsamples,
)
from pyro_truncated.diagnostics.arviz.roles import is_computed, leaves
from pyro_truncated.diagnostics.truncation.coverage import MOST_MOVES, certificate
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.candidate_runs import sum_block
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import sample_nodes
from pyro_truncated.search.moves import Moves
from pyro_truncated.states.population import Population
from pyro_truncated.utils.isolation import Assign, isolated

_CERTIFIED_DRAWS = 8
_CERTIFIED_STATES = 2**22


def draw_states(model: Callable[..., Any], guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_draws: int) -> Draws:
    """Draws states where data points have no other latents.

    The populations are scored once.
    """
    with poutine.block():
        log_joint = guide.log_joint_of(*args, **kwargs)
    refuse_subsamples(log_joint.nodes)
    population = guide.rescored(log_joint)
    free_energy = population.free_energy()
    index = torch.multinomial(population.weights(), num_draws, replacement=True).mT
    drawn = population.log_joint.double().gather(1, index.mT).mT
    log_q = (drawn - free_energy).sum(1)
    name = _likelihood_name(log_joint)
    likelihood = {name: free_energy.expand(num_draws, -1)} if name else {}
    states = States(guide, log_joint, population, _covered(log_joint, population), index)
    lp = drawn.sum(1) + log_joint.outside()
    draws = Draws(
        log_joint.nodes, {}, {}, lp, log_q, likelihood, {}, frozenset(guide.layout.sites), frozenset(), _plates(log_joint), name, states
    )
    if any(is_computed(node) for node in log_joint.nodes.values()):
        draws.computed = _computed(model, draws, args, kwargs)
    return draws


def _computed(model: Callable[..., Any], draws: Draws, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Sites:
    """Values that the model computes from each draw of the states."""
    found: dict[str, list[Tensor]] = {}
    for position in range(len(draws.lp)):
        with isolated(), Assign(draws.values(position)):
            nodes = sample_nodes(poutine.trace(model).get_trace(*args, **kwargs))
        for name, node in nodes.items():
            if is_computed(node):
                found.setdefault(name, []).append(node["value"])
    return {name: torch.stack(values) for name, values in found.items()}


def _covered(log_joint: LogJoint, population: Population) -> Tensor:
    """Returns the certificate of covered mass from affordable states."""
    per_parent = len(population) * max(1, Moves(population.space, population.words.device, MOST_MOVES).count)
    return certificate(log_joint, population, max(1, min(population.num_states, _CERTIFIED_STATES // per_parent)))


def _plates(log_joint: LogJoint) -> dict[str, int]:
    return dict(zip(log_joint.layout.plates, log_joint.sizes, strict=True)) or plates_of_data(log_joint.nodes)


def _likelihood_name(log_joint: LogJoint) -> str:
    return joint_name(log_joint.nodes, [name for name, node in log_joint.nodes.items() if log_joint.is_inside(node)])


def draw_jointly(
    model: Callable[..., Any], guide: Any, part: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_draws: int
) -> Draws:
    """Draws states and other latents; populations are scored for each draw."""
    gathered: _Gathered | None = None
    for _ in range(num_draws):
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        log_joint = part.log_joint_of(*args, values=_given(part, guide_trace), **kwargs)
        refuse_subsamples(log_joint.nodes)
        if gathered is None:
            gathered = _Gathered(model, part, log_joint, args, kwargs, num_draws)
        gathered.add(log_joint, guide_trace, poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs))
    assert gathered is not None
    return gathered.result()


def _given(part: AutoTruncated, guide_trace: poutine.Trace) -> dict[str, Any]:
    """What the guide drew beside the states."""
    own = {*part.layout.sites, part.index_name}
    return {name: node["value"] for name, node in guide_trace.nodes.items() if node["type"] == "sample" and name not in own}


class _Gathered:
    """Results gathered draw by draw; probabilities and free energies are averaged."""

    def __init__(
        self,
        model: Callable[..., Any],
        part: AutoTruncated,
        log_joint: LogJoint,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        num_draws: int,
    ) -> None:
        self.part, self.log_joint, self.num_draws = part, log_joint, num_draws
        nodes = log_joint.nodes
        self.is_global = not part.layout.plates
        inside = frozenset(name for name, node in nodes.items() if log_joint.is_inside(node))
        self.local = latents_of_data(nodes) - frozenset(part.layout.sites) if self.is_global else inside
        self.leaves = leaves(model, nodes, self.local & set(part.layout.other_latents), args, kwargs)
        self.collector = Collector(self.local, part.layout.sites)
        self.index: list[Tensor] = []
        self.covered: list[Tensor] = []
        self.weights, self.free_energy = torch.zeros(()), torch.zeros(())
        self.has_likelihood = True
        self.given: frozenset[str] = frozenset()

    def add(self, log_joint: LogJoint, guide_trace: poutine.Trace, model_trace: poutine.Trace) -> None:
        """Adds a draw of the global sites: its populations and traces.

        Of the first draws also the covered mass.
        """
        population = self.part.rescored(log_joint)
        self.weights = self.weights + population.weights().double() / self.num_draws
        self.free_energy = self.free_energy + population.free_energy() / self.num_draws
        if len(self.covered) < _CERTIFIED_DRAWS:
            self.covered.append(_covered(log_joint, population))
        self.index.append(torch.as_tensor(guide_trace.nodes[self.part.index_name]["value"]).reshape(-1))
        model_trace.compute_log_prob()
        nodes = sample_nodes(model_trace)
        # What no guide draws comes from its conditional prior, the density of which cancels.
        missing = [
            node["log_prob_sum"] for name, node in nodes.items() if name in self.part.layout.other_latents and name not in guide_trace
        ]
        log_q = torch.as_tensor(guide_trace.log_prob_sum()).double() + sum(missing)
        self.collector.add(
            nodes, torch.as_tensor(model_trace.log_prob_sum()).double(), log_q, self._likelihoods(log_joint, population, nodes)
        )

    def _likelihoods(self, log_joint: LogJoint, population: Population, nodes: Mapping[str, Any]) -> Sites:
        """Returns log likelihoods with the states of data points summed out.

        Global states are given.
        """
        if self.is_global:
            self.given = self.local - self.leaves
            return likelihoods_given_all(nodes)
        value = self._marginal_likelihood(log_joint, population) if self.has_likelihood else None
        self.has_likelihood = value is not None
        name = _likelihood_name(log_joint)
        return {} if value is None or not name else {name: value}

    def _marginal_likelihood(self, log_joint: LogJoint, population: Population) -> Tensor | None:
        r"""Returns each data point's log likelihood given the other latents.

        It is the free energy less the log prior of the point's other own latents.

        Only latents that another guide draws count: for those of a ``conditional`` the free energy holds :math:`\log p - \log q` already.
        Leaves, on which no observation depends, are left out of the sum.
        """
        local = [name for name in log_joint.layout.other_latents if name in self.local]
        if not local:
            return population.free_energy()
        terms = log_joint.site_log_probs(population.words[:, :2])
        scored = [name for name in local if name in terms and f"conditional of {name}" not in terms]
        self.given = frozenset(scored) - self.leaves if log_joint.conditional is None else frozenset()
        self.given |= (log_joint.uncovered & self.local) - self.leaves - set(terms)
        free_energy = population.free_energy()
        if self.leaves & set(scored):
            free_energy = _free_energy_without(log_joint, population, self.leaves)
        for name in self.given & set(scored):
            # A term that varies with the states has one entry for either of them.
            if terms[name].shape[0] > 1:
                return None
            free_energy = free_energy - terms[name].reshape(-1)
        return free_energy

    def result(self) -> Draws:
        """Stacks the draws and averages probabilities and free energies."""
        # Log joints that give back both means.
        population = self.part.rescored(self.log_joint)
        population = dataclasses.replace(population, log_joint=self.weights.log() + self.free_energy.unsqueeze(-1))
        states = States(self.part, self.log_joint, population, torch.stack(self.covered).mean(0), torch.stack(self.index))
        local = self.local | (frozenset() if self.is_global else frozenset(self.part.layout.sites))
        return Draws(
            nodes=self.log_joint.nodes,
            **self.collector.stacked(),
            local=local,
            given=self.given,
            plates=_plates(self.log_joint),
            joint="" if self.is_global else _likelihood_name(self.log_joint),
            states=states,
        )


def _free_energy_without(log_joint: LogJoint, population: Population, names: frozenset[str]) -> Tensor:
    """Returns free energies ``(N,)`` of log joints without some sites."""
    scores = []
    for _, states in log_joint.gradient_blocks(population.num_states):
        terms = log_joint.site_log_probs(population.words[:, states])
        scores.append(sum_block({name: term for name, term in terms.items() if name not in names}))
    return torch.cat(scores).double().logsumexp(0)
