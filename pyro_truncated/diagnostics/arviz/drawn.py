"""What is drawn from a guide, gathered draw by draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.diagnostics.arviz.roles import hidden_entries, is_computed, is_data, is_factor, is_latent, plates_of
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.states.population import Population

Sites = dict[str, Tensor]

_MOST_NAMED = 4


@dataclasses.dataclass
class States:
    """What a truncated guide knows of the states beside their draws.

    Attributes:
        part: the truncated guide.
        log_joint: a scorer.
        population: populations whose weights and free energies are means over the draws.
        covered_mass: upper bound on the posterior mass of the populations, ``(N,)``; a mean over draws of the other latents.
        index: indices of the states drawn, ``(draws, N)``.
    """

    part: AutoTruncated
    log_joint: LogJoint
    population: Population
    covered_mass: Tensor
    index: Tensor

    def values(self, draw: int) -> Sites:
        """The states of one draw, in the model's own shapes."""
        rows = torch.arange(len(self.population), device=self.index.device)
        levels = self.part.space.unpack(self.population.words[rows, self.index[draw]])
        return self.part.layout.site_values(levels, self.log_joint.sizes, self.log_joint.dtypes)


@dataclasses.dataclass
class Draws:
    """Draws from guide and model.

    Attributes:
        nodes: the sites of one run of the model.
        latents: draws of the latents, without those of ``states``, by site name, ``(draws, *shape)``.
        computed: values that follow from the latents (``pyro.deterministic``, reparametrised latents), likewise.
        lp: log joint density of each draw.
        log_q: log density of each draw under the guide.
        log_likelihood: by name, log likelihoods of the observations, ``(draws, *shape)``; empty where they do not exist.
        log_prior: log prior density of each latent that belongs to no data point, ``(draws,)`` by site name.
        local: names of the latents of data points.
        given: those of them that ``log_likelihood`` is conditional on.
        plates: plates whose members are the data points, by dimension from left to right, with their sizes.
        joint: name of the variable of ``log_likelihood`` that has one entry per data point; others have the shapes of their sites.
        states: of a truncated guide.
    """

    nodes: dict[str, Any]
    latents: Sites
    computed: Sites
    lp: Tensor
    log_q: Tensor
    log_likelihood: Sites
    log_prior: Sites
    local: frozenset[str]
    given: frozenset[str]
    plates: dict[str, int]
    joint: str = ""
    states: States | None = None

    def observed(self) -> Tensor | None:
        """Returns which data points have an unmasked observation, ``(N,)``.

        ``None`` if all have, or they lie in several plates.
        """
        if len(self.plates) != 1:
            return None
        ((plate, size),) = self.plates.items()
        seen = torch.zeros(size, dtype=torch.bool)
        for node in self.nodes.values():
            dims = [frame.dim for frame in node["cond_indep_stack"] if frame.name == plate]
            if not dims or not (is_data(node) or is_factor(node)):
                continue
            hidden = hidden_entries(node)
            if hidden is None:
                return None
            hidden = hidden.cpu().expand(torch.broadcast_shapes(hidden.shape, node["fn"].batch_shape)).movedim(dims[0], 0)
            seen |= ~hidden.reshape(size, -1).all(1)
        return seen if seen.any() and not seen.all() else None

    def values(self, draw: int) -> Sites:
        """All latents of one draw, in the model's own shapes."""
        return {name: values[draw] for name, values in self.latents.items()} | ({} if self.states is None else self.states.values(draw))


class Collector:
    """Gathers draws; values of ``states`` are not kept, but their index."""

    def __init__(self, local: Collection[str], states: Collection[str] = ()) -> None:
        self.local, self.states = local, states
        self.lp: list[Tensor] = []
        self.log_q: list[Tensor] = []
        self.groups: dict[str, dict[str, list[Tensor]]] = {"latents": {}, "computed": {}, "log_likelihood": {}, "log_prior": {}}

    def add(self, nodes: Mapping[str, Any], lp: Tensor, log_q: Tensor, log_likelihood: Mapping[str, Tensor]) -> None:
        """Adds a draw: sites of a run with log probabilities."""
        self.lp.append(lp)
        self.log_q.append(log_q)
        latents = [name for name, node in nodes.items() if is_latent(node)]
        self._extend("latents", {name: nodes[name]["value"] for name in latents if name not in self.states})
        self._extend("computed", {name: node["value"] for name, node in nodes.items() if is_computed(node)})
        self._extend("log_likelihood", log_likelihood)
        self._extend("log_prior", {name: nodes[name]["log_prob_sum"].double() for name in latents if name not in self.local})

    def _extend(self, group: str, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.groups[group].setdefault(name, []).append(torch.as_tensor(value).detach())

    def stacked(self) -> dict[str, Any]:
        """All draws, by field of :class:`Draws`."""
        groups = {group: {name: torch.stack(values) for name, values in sites.items()} for group, sites in self.groups.items()}
        return {"lp": torch.stack(self.lp), "log_q": torch.stack(self.log_q), **groups}


def latents_of_data(nodes: Mapping[str, Any]) -> frozenset[str]:
    """Returns latents that lie in all plates of some data.

    Each belongs to a single observation. Other latents are parameters.
    """
    data = [plates_of(node) for node in nodes.values() if is_data(node) or is_factor(node)]
    return frozenset(name for name, node in nodes.items() if is_latent(node) and any(p and p <= plates_of(node) for p in data))


def plates_of_data(nodes: Mapping[str, Any]) -> dict[str, int]:
    """Returns sizes of the plates of all data, from left to right."""
    data = [node for node in nodes.values() if is_data(node)] or [node for node in nodes.values() if is_factor(node)]
    shared = frozenset.intersection(*map(plates_of, data)) if data else frozenset()
    frames = {frame.name: frame for node in data for frame in node["cond_indep_stack"] if frame.name in shared}
    return {frame.name: int(frame.size) for frame in sorted(frames.values(), key=lambda frame: frame.dim)}


def joint_name(nodes: Mapping[str, Any], names: Collection[str]) -> str:
    """Names the likelihood of several sites by its data or factors."""
    found = [name for name in names if is_data(nodes[name])] or [name for name in names if is_factor(nodes[name])]
    # The observations of a long sequence would make a name that files cannot hold.
    return "_".join(found) if len(found) <= _MOST_NAMED else f"{found[0]}_to_{found[-1]}"


def likelihoods_given_all(nodes: Mapping[str, Any]) -> Sites:
    """Log probabilities of the observations given everything else, by site.

    The density of a ``pyro.factor`` joins that of data in the same plates. A factor in plates without data stands for
    itself.
    """
    found = {name: node["log_prob"].double() for name, node in nodes.items() if is_data(node)}
    for name, node in nodes.items():
        if not is_factor(node):
            continue
        host = next((other for other in found if plates_of(nodes[other]) == plates_of(node)), None)
        if host is not None:
            found[host] = found[host] + node["log_prob"].double()
        elif plates_of(node):
            found[name] = node["log_prob"].double()
    return found


def refuse_subsamples(nodes: Mapping[str, Any]) -> None:
    """Checks that the model takes all data.

    Raises:
        ValueError: naming the plate of which it takes some.
    """
    for node in nodes.values():
        for frame in node["cond_indep_stack"]:
            if frame.vectorized and frame.size != (frame.full_size or frame.size):
                raise ValueError(
                    f"to_arviz needs all {frame.full_size} data points; the model subsampled {frame.size} of them in {frame.name}. Pass "
                    "arguments with which it, and a create_plates of the guide, take the full data: subsample_size=None."
                )
