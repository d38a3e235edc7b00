"""Draws from a fitted guide, with everything that a conversion needs to know about each of them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuideList
from torch import Tensor

from pyro_truncated.diagnostics.coverage import Moves, certificate
from pyro_truncated.elbo import truncated_parts
from pyro_truncated.guide import AutoTruncated
from pyro_truncated.inspection import spare_random_numbers
from pyro_truncated.log_joint import LogJoint
from pyro_truncated.population import Population
from pyro_truncated.sites import is_delta, sample_nodes

_CERTIFIED_DRAWS = 8
_CERTIFIED_STATES = 2**22


@dataclasses.dataclass
class Draws:
    """Draws from guide and model.

    Attributes:
        part: the truncated guide.
        log_joint: a scorer; its probe shows the model's sites.
        population: populations whose weights and free energies are means over the draws.
        covered_mass: upper bound on the posterior mass of the populations, ``(N,)``; a mean over draws of the other latents.
        index: indices of the states drawn, ``(draws, N)``.
        others: draws of the other latents by site name, ``(draws, *shape)``.
        lp: log joint density of each draw.
        log_q: log density of each draw under the guide.
        log_likelihood: by name, log likelihoods of the observations, ``(draws, *shape)``; empty where they do not exist.
        log_prior: log prior density of each global latent, ``(draws,)`` by site name.
        is_global: whether the states belong to no data point; the log likelihoods are then given the states drawn.
    """

    part: AutoTruncated
    log_joint: LogJoint
    population: Population
    covered_mass: Tensor
    index: Tensor
    others: dict[str, Tensor]
    lp: Tensor
    log_q: Tensor
    log_likelihood: dict[str, Tensor]
    log_prior: dict[str, Tensor]

    @property
    def is_global(self) -> bool:
        """Whether all discrete latents are global."""
        return not self.part.layout.plates

    def latents(self, draw: int) -> dict[str, Tensor]:
        """All latent sites of one draw, in the model's own shapes."""
        rows = torch.arange(len(self.population), device=self.index.device)
        levels = self.part.space.unpack(self.population.words[rows, self.index[draw]])
        states = self.part.layout.site_values(levels, self.log_joint.sizes, self.log_joint.dtypes)
        return {name: values[draw] for name, values in self.others.items()} | states


def draw(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int) -> Draws:
    """Draws latents from a guide.

    Raises:
        TypeError: if the guide has no ``AutoTruncated`` part.
        ValueError: if the model subsamples, or the guide has several such parts.
    """
    if not callable(guide):
        raise TypeError(f"guide must be an AutoTruncated, or an AutoGuideList that holds one; got {type(guide).__name__}")
    if isinstance(guide, AutoTruncated) and guide.master is None:
        guide.setup(*args, **kwargs)
        if not guide.layout.other_latents and guide.layout.plates:
            return _draw_states(guide, args, kwargs, num_samples)
    return _draw_jointly(model, guide, args, kwargs, num_samples)


def observed_names(log_joint: LogJoint) -> list[str]:
    """The observed sites in the data plates."""
    return [name for name, node in log_joint.nodes.items() if node["is_observed"] and log_joint.is_inside(node)]


def _draw_states(guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int) -> Draws:
    """Draws where there is nothing but states of data points: the populations are scored once."""
    with poutine.block():
        log_joint = guide.log_joint_of(*args, **kwargs)
    _refuse_subsample(log_joint)
    population = guide.rescored(log_joint)
    free_energy = population.free_energy()
    index = torch.multinomial(population.weights(), num_samples, replacement=True).mT
    drawn = population.log_joint.double().gather(1, index.mT).mT
    log_q = (drawn - free_energy).sum(1)
    name = "_".join(observed_names(log_joint))
    likelihood = {name: free_energy.expand(num_samples, -1)} if name else {}
    lp = drawn.sum(1) + _outside(log_joint)
    return Draws(guide, log_joint, population, _covered(log_joint, population), index, {}, lp, log_q, likelihood, {})


def _outside(log_joint: LogJoint) -> Tensor | float:
    """Log probability of what lies outside the data plate; it does not depend on the states."""
    log_joint.probe.compute_log_prob()
    return sum((node["log_prob_sum"].double() for node in log_joint.nodes.values() if not log_joint.is_inside(node)), 0.0)


def _covered(log_joint: LogJoint, population: Population) -> Tensor:
    """The certificate, from as many of the best states as can be had for the price of some millions of log joints."""
    per_parent = len(population) * max(1, Moves(population.space, population.words.device).count)
    return certificate(log_joint, population, max(1, min(population.num_states, _CERTIFIED_STATES // per_parent)))


class _Collector:
    """What is gathered draw by draw; states' probabilities and free energies become means."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples
        self.rows: dict[str, list[Tensor]] = {"index": [], "lp": [], "log_q": []}
        self.groups: dict[str, dict[str, list[Tensor]]] = {"others": {}, "log_likelihood": {}, "log_prior": {}}
        self.covered: list[Tensor] = []
        self.weights, self.free_energy = torch.zeros(()), torch.zeros(())

    def add(self, log_joint: LogJoint, population: Population, guide_trace: poutine.Trace, model_trace: poutine.Trace) -> None:
        """Takes in a draw of the global sites: its populations, its traces, and for the first draws the mass covered."""
        part = _the_part(guide_trace)
        self.weights = self.weights + population.weights().double() / self.num_samples
        self.free_energy = self.free_energy + population.free_energy() / self.num_samples
        if len(self.covered) < _CERTIFIED_DRAWS:
            self.covered.append(_covered(log_joint, population))
        self.rows["index"].append(torch.as_tensor(guide_trace.nodes[part.index_name]["value"]).reshape(-1))
        self.rows["lp"].append(torch.as_tensor(model_trace.log_prob_sum()).double())
        self.rows["log_q"].append(torch.as_tensor(guide_trace.log_prob_sum()).double())
        model_trace.compute_log_prob()
        nodes = sample_nodes(model_trace)
        self._extend("others", {name: nodes[name]["value"] for name in part.layout.other_latents})
        self._extend("log_likelihood", _likelihoods(log_joint, population, nodes))
        outside = [name for name in part.layout.other_latents if not nodes[name]["cond_indep_stack"]]
        self._extend("log_prior", {name: nodes[name]["log_prob_sum"].double() for name in outside})

    def _extend(self, group: str, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            self.groups[group].setdefault(name, []).append(value)

    def result(self, part: AutoTruncated, log_joint: LogJoint, population: Population) -> Draws:
        """All draws stacked, with posterior probabilities and free energies that are means over them."""
        # Log joints that give back both means.
        population = dataclasses.replace(population, log_joint=self.weights.log() + self.free_energy.unsqueeze(-1))
        index, lp, log_q = (torch.stack(values) for values in self.rows.values())
        covered = torch.stack(self.covered).mean(0)
        others, likelihood, prior = ({name: torch.stack(values) for name, values in sites.items()} for sites in self.groups.values())
        return Draws(part, log_joint, population, covered, index, others, lp, log_q, likelihood, prior)


def _draw_jointly(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int) -> Draws:
    """Draws where the weights depend on other latents: the populations are scored anew for each draw of these."""
    collector = _Collector(num_samples)
    with _plates_like_the_model(guide, model, args, kwargs):
        for _ in range(num_samples):
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
            part = _the_part(guide_trace)
            log_joint = part.log_joint_of(*args, values=_given(part, guide_trace), **kwargs)
            _refuse_subsample(log_joint)
            model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
            population = part.rescored(log_joint)
            collector.add(log_joint, population, guide_trace, model_trace)
    return collector.result(part, log_joint, population)


@contextlib.contextmanager
def _plates_like_the_model(guide: Any, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """A guide list remembers the minibatches it was set up with; meanwhile it takes all data of those plates of which the model does."""
    if not isinstance(guide, AutoGuideList) or guide.prototype_trace is None or guide.create_plates is not None:
        yield
        return
    with spare_random_numbers(), poutine.block():
        nodes = poutine.trace(model).get_trace(*args, **kwargs).nodes.values()
    full = {frame.name: frame for node in nodes if node["type"] == "sample" for frame in node["cond_indep_stack"] if _takes_all(frame)}
    guide.create_plates = lambda *_, **__: [pyro.plate(name, frame.size, dim=frame.dim) for name, frame in full.items()]
    try:
        yield
    finally:
        guide.create_plates = None


def _takes_all(frame: Any) -> bool:
    return bool(frame.vectorized and frame.size == (frame.full_size or frame.size))


def _given(part: AutoTruncated, guide_trace: poutine.Trace) -> dict[str, Any]:
    """What the guide drew beside the states."""
    own = {*part.layout.sites, part.index_name}
    return {name: node["value"] for name, node in guide_trace.nodes.items() if node["type"] == "sample" and name not in own}


def _the_part(guide_trace: poutine.Trace) -> AutoTruncated:
    parts = truncated_parts(guide_trace)
    if len(parts) != 1:
        raise ValueError(f"to_arviz converts guides with one AutoTruncated part; this one has {len(parts)}")
    return parts[0]


def _refuse_subsample(log_joint: LogJoint) -> None:
    if log_joint.num_data != log_joint.full_size:
        raise ValueError(
            f"to_arviz needs all {log_joint.full_size} data points; the model subsampled {log_joint.num_data} of them in "
            f"{' x '.join(log_joint.layout.plates)}. Pass arguments with which it, and a create_plates of the guide, take the full data."
        )


def _likelihoods(log_joint: LogJoint, population: Population, nodes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Log likelihoods of the observations given the global latents, those of data points summed out."""
    if not log_joint.layout.plates:
        return _likelihoods_given_all(log_joint, nodes)
    value = _marginal_likelihood(log_joint, population)
    name = "_".join(observed_names(log_joint))
    return {} if value is None or not name else {name: value}


def _likelihoods_given_all(log_joint: LogJoint, nodes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Where the states are global like parameters: observations in plates given them, unless these have latents of their own."""
    result = {}
    latents = [node for node in nodes.values() if not node["is_observed"] and not is_delta(node)]
    for name, node in nodes.items():
        plates = {frame.name for frame in node["cond_indep_stack"]}
        has_own = any({frame.name for frame in latent["cond_indep_stack"]} & plates for latent in latents)
        if node["is_observed"] and plates and not has_own:
            result[name] = node["log_prob"].double()
    return result


def _marginal_likelihood(log_joint: LogJoint, population: Population) -> Tensor | None:
    r"""Each data point's log likelihood given the global latents: the free energy less the log prior of the point's other own latents.

    Only latents that another guide draws count: for those of a ``conditional`` the free energy holds :math:`\log p - \log q` already.
    """
    free_energy = population.free_energy()
    local = [name for name in log_joint.layout.other_latents if log_joint.is_inside(log_joint.nodes[name])]
    if not local:
        return free_energy
    terms = log_joint.site_log_probs(population.words[:, :2])
    for name in local:
        if f"conditional of {name}" in terms:
            continue
        # A term that varies with the states has one entry for either of them.
        if terms[name].shape[0] > 1:
            return None
        free_energy = free_energy - terms[name].reshape(-1)
    return free_energy
