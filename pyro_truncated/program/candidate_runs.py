"""Runs of a model on candidate states, with each site's log probability.

The same run gives the means and variances of observations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_truncated.program.changing_sites import ChangingSitesError, describe_changes
from pyro_truncated.program.densities import site_log_density
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.operations import Operations
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.sites import latent_nodes, sample_nodes, scale_beyond_subsamples, unwrap
from pyro_truncated.program.supports import log_prob_on_support
from pyro_truncated.program.zero_probabilities import exact_log_prob, impossible_entries, without_impossible
from pyro_truncated.states.population import Moments
from pyro_truncated.utils.parameter_store import Assign, isolate, spare_random_numbers

Conditional = Callable[..., Any]
RunMode = Literal["together", "vmap", "singly"]
# From the fastest to the slowest.
RUN_MODES: tuple[RunMode, ...] = ("together", "vmap", "singly")


class AsInModel(Messenger):
    """Gives a conditional's sites the model's masks and its scale.

    What the model masks it does not count, and the density of its proposal neither. A scale or mask of a conditional's own stays.
    A mask that depends on discrete latents is that of one run, so the conditional has its own.
    """

    def __init__(self, nodes: Mapping[str, Any], layout: Layout) -> None:
        super().__init__()
        self._nodes, self._scale = nodes, scale_beyond_subsamples(nodes[next(iter(layout.sites))])
        self._varying = layout.varying_masks

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] not in self._nodes:
            return
        node = self._nodes[msg["name"]]
        if isinstance(msg["scale"], (int, float)) and msg["scale"] == 1:
            msg["scale"] = self._scale
        if msg["name"] in self._varying or msg["mask"] is not None or unwrap(msg["fn"])[1]:
            return
        for mask in (node["mask"], *(mask for mask, event_dim in unwrap(node["fn"])[1] if event_dim == node["fn"].event_dim)):
            if mask is not None:
                msg["mask"] = mask if msg["mask"] is None else msg["mask"] & mask


@dataclasses.dataclass
class CandidateRuns:
    """Runs of a model with its discrete sites set to candidate states."""

    probe: Probe  # the data points
    conditional: Conditional | None  # samples continuous latents given the states, or None
    run_mode: RunMode  # how the candidates are run: together, in a new left-most dimension; by torch.func.vmap; or one after the other
    uncovered_latents: Collection[str]  # latents that nobody proposes, so that their density is left out
    # Values that the conditional's sites take in place of draws, for looking at how it computes.
    fixed_values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # The most dimensions that a site's log probability has had: more than plates and candidates
    # need, and Pyro cannot enumerate.
    most_dims: int = 0

    def log_probs(self, words: Tensor) -> dict[str, Tensor]:
        """Returns each site's log probability inside the data plates, ``(C, ..., N)``."""
        if self.run_mode == "together":
            try:
                return self._terms(self._stack_candidates(words))
            except Exception:  # whatever a program raises, as by an assertion
                if not self.probe.layout.takes_shared_states:
                    raise
                # In this call the program needs a state for each data point.
                self.probe.layout.takes_shared_states = False
                return self._terms(self._stack_candidates(words))
        values = self._list_candidates(words)
        if self.run_mode == "vmap":
            terms = torch.func.vmap(self._terms, randomness="different")(values)
            return {name: term.squeeze(1) for name, term in terms.items()}
        columns = [self._terms(states) for states in _unbind(values)]
        return {name: torch.cat([column[name] for column in columns]) for name in columns[0]}

    def recorded_log_probs(self, words: Tensor) -> tuple[dict[str, Tensor], str | None]:
        """Returns :meth:`log_probs`, and a site that depends on several candidates.

        Candidates are ``(N, C, num_words)``. A site depends on several if a sum, maximum or the like over them reaches its density,
        whatever their values. ``None`` stands for no such site. A single candidate is run as it is, and the site depends on several data
        points.
        """
        is_single = self.run_mode == "singly"
        values = next(_unbind(self._list_candidates(words))) if is_single else self._stack_candidates(words)
        operations = Operations([(len(words) if is_single else words.shape[1], values.values())])
        with operations:
            nodes = sample_nodes(self._trace({**self.probe.values, **values}))
        return self._add_sites({}, nodes), operations.reduced_site(nodes, 0)

    def clamped_sites(self, words: Tensor) -> set[str]:
        """Returns observed sites with probability zero in some candidates."""
        names = set()
        for states in _unbind(self._list_candidates(words)):
            nodes = sample_nodes(self._trace({**self.probe.values, **states}))
            for name, node in nodes.items():
                impossible = impossible_entries(node["fn"], node["value"]) if node["is_observed"] else None
                if impossible is not None and bool(impossible.any()):
                    names.add(name)
        return names

    def log_probs_and_moments(self, words: Tensor, rows: slice) -> tuple[dict[str, Tensor], Moments | None]:
        """Returns :meth:`log_probs` and the moments of observations, where known."""
        if self.run_mode != "together" or self.conditional is not None:
            return self.log_probs(words), None
        nodes = sample_nodes(self._trace({**self.probe.values, **self._stack_candidates(words)}))
        return self._add_sites({}, nodes), run_moments(nodes, self.probe, words, rows)

    def hidden_log_probs(self, words: Tensor) -> dict[str, Tensor]:
        """Returns log probabilities ``(C, *batch)`` of discrete sites that masks hide."""
        if not self.probe.masked_sites:
            return {}
        if self.run_mode == "together":
            return self._hidden_values(self._stack_candidates(words))
        columns = [self._hidden_values(states) for states in _unbind(self._list_candidates(words))]
        return {name: torch.stack([column[name] for column in columns]) for name in columns[0]}

    # --- the candidates as values of the model's sites ---

    def _stack_candidates(self, words: Tensor) -> dict[str, Tensor]:
        """Returns site values of candidates ``(N, C, num_words)``, left of all plates."""
        is_shared = self.probe.layout.takes_shared_states and len(words) > 1 and words.stride(0) == 0
        return self._decode(
            words[:1] if is_shared else words, self.probe.depth, [1] * len(self.probe.sizes) if is_shared else self.probe.sizes
        )

    def _list_candidates(self, words: Tensor) -> dict[str, Tensor]:
        """Returns the same, candidates in front, in the shapes of the sites."""
        layout = self.probe.layout
        values = self._decode(words, layout.depth, self.probe.sizes)
        return {name: values[name].flatten(0, -1 - site.depth - site.event_dim) for name, site in layout.sites.items()}

    def _decode(self, words: Tensor, depth: int, sizes: Sequence[int]) -> dict[str, Tensor]:
        layout = self.probe.layout
        levels = layout.space.unpack(words).transpose(0, 1)
        batch = layout.spread(sizes, depth)
        return layout.decode(levels.reshape(levels.shape[0], *batch, levels.shape[-1]), depth, self.probe.dtypes)

    # --- one run ---

    def _terms(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns each site's log probability in one run of the model."""
        values = {**self.probe.values, **states}
        terms: dict[str, Tensor] = {}
        if self.conditional is not None:
            own = latent_nodes(self._conditional_trace(self.conditional, states))
            self._check_conditional(own)
            for node in own:
                values[node["name"]] = node["value"]
                # What the model observes in this call, it does not take.
                if not self.probe.nodes.get(node["name"], {}).get("is_observed", False):
                    terms[f"conditional of {node['name']}"] = -self._reduce(node)
        nodes = sample_nodes(self._trace(values))
        sites = sorted(set(nodes) ^ set(self.probe.nodes)) if self.run_mode == "singly" else []
        if sites:
            # Only Python code that reads values can choose between sites.
            raise ChangingSitesError(describe_changes(sites, sorted(self.probe.layout.read - set(sites))))
        return self._add_sites(terms, nodes)

    def _add_sites(self, terms: dict[str, Tensor], nodes: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the terms of a conditional, and those of a run."""
        for name, node in nodes.items():
            # A latent that nobody proposes is drawn from its prior: its density cancels that of its own proposal.
            if self.probe.is_inside(node) and (name not in self.uncovered_latents or f"conditional of {name}" in terms):
                terms[name] = self._reduce(node)
        return terms

    def _hidden_values(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        nodes = sample_nodes(self._trace({**self.probe.values, **states}))
        hidden = {}
        for name in self.probe.masked_sites:
            node = nodes[name]
            if not node["is_observed"]:
                log_prob = self._log_prob(node) * (node["scale"] / self.probe.scale)
                hidden[name] = torch.where(torch.as_tensor(node["mask"], device=log_prob.device), 0.0, log_prob)
        return hidden

    def _trace(self, values: Mapping[str, Any]) -> poutine.Trace:
        try:
            # The candidates lie in the support by construction, and what may be wrong with the data the probe has shown.
            with pyro.validation_enabled(False):
                return self.probe.run(values)
        except Exception as error:
            if self.run_mode != "together":
                raise
            shapes = ", ".join(f"'{name}' of shape {tuple(values[name].shape)}" for name in self.probe.layout.sites)
            error.add_note(
                f"This happened when the model ran on many states at once, in a new left-most dimension: {shapes}. Address dimensions "
                "from the right (sum(-1), s @ W.mT, Vindex), or score one state after the other: AutoTruncated(..., vectorize=False)."
            )
            raise

    def auxiliary_values(self) -> dict[str, Tensor]:
        """Repeatable draws of the conditional's auxiliary sites, given one state."""
        if self.conditional is None:
            return {}
        states = {name: self.probe.nodes[name]["value"] for name in self.probe.layout.sites}
        with spare_random_numbers():
            torch.manual_seed(0)
            nodes = latent_nodes(self._conditional_trace(self.conditional, states))
        return {node["name"]: node["value"] for node in nodes if node["infer"].get("is_auxiliary", False)}

    def _conditional_trace(self, conditional: Conditional, states: Mapping[str, Tensor]) -> poutine.Trace:
        with isolate(), Assign(self.fixed_values), ExitStack() as stack:
            for frame in self.probe.frames:
                subsample = self.probe.values[frame.name]
                stack.enter_context(pyro.plate(frame.name, frame.full_size or frame.size, subsample=subsample, dim=frame.dim))
            stack.enter_context(AsInModel(self.probe.nodes, self.probe.layout))
            try:
                return self.probe.call.with_program(functools.partial(conditional, dict(states))).trace()
            except ValueError as error:
                if "duplicate plate" in str(error):
                    error.add_note(f"A conditional runs inside of the data plates {list(self.probe.layout.plates)}: it opens none of them.")
                raise

    def _check_conditional(self, nodes: Iterable[Any]) -> None:
        """Checks that a conditional samples the model's other latents, and no more."""
        latents = set(self.probe.layout.other_latents)
        names = {node["name"] for node in nodes}
        bare = [node["name"] for node in nodes if node["mask"] is None and not unwrap(node["fn"])[1]]
        if unmasked := sorted(self.probe.layout.varying_masks.intersection(bare)):
            raise ValueError(f"the model masks {unmasked} by its discrete latents: mask them in the conditional, too.")
        others = [node["name"] for node in nodes if node["name"] not in latents and not node["infer"].get("is_auxiliary", False)]
        if others:
            raise ValueError(
                f"the conditional samples {others}, but the model's other latents are {sorted(latents)}. Sample these, under their names."
            )
        if missing := sorted(set(self.uncovered_latents) - names):
            warnings.warn(f"the conditional does not sample the latents {missing}: they are drawn from the prior.", stacklevel=2)

    # --- one site ---

    def _log_prob(self, node: Any) -> Tensor:
        if node["name"] in self.probe.layout.sites_to_check:
            return log_prob_on_support(node["fn"], node["value"])
        is_latent = node["name"] in self.probe.layout.sites and not node["is_observed"]
        is_looked_at = self.probe.device.type == "cpu" or node["name"] in self.probe.layout.clamped_sites
        if is_latent and is_looked_at:
            return exact_log_prob(node["fn"], node["value"], lambda: self._usual_log_prob(node))
        log_prob = self._usual_log_prob(node)
        return without_impossible(node["fn"], node["value"], log_prob) if node["is_observed"] and is_looked_at else log_prob

    def _usual_log_prob(self, node: Any) -> Tensor:
        if self.run_mode == "vmap":
            return node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"])
        return site_log_density(node)

    def _reduce(self, node: Any) -> Tensor:
        """Returns a site's log probability ``(C, ..., N)``, summed over other plates."""
        dims, depth = self.probe.layout.dims, self.probe.depth
        log_prob: Any = self._log_prob(node)
        self.most_dims = max(self.most_dims, log_prob.dim())
        # A latent that is summed out has a distribution even if masked, unless its scale is zero.
        is_summed_out = node["name"] in self.probe.layout.sites and not node["is_observed"] and node["name"] not in self.probe.idle
        log_prob = scale_and_mask(log_prob, node["scale"] / self.probe.scale, None if is_summed_out else node["mask"])
        log_prob = log_prob.reshape((1,) * (depth + 1 - log_prob.dim()) + tuple(log_prob.shape))
        inner = {frame.dim for frame in node["cond_indep_stack"] if frame.vectorized} - set(dims)
        if inner:
            log_prob = log_prob.sum(sorted(inner), keepdim=True)
        # What is left are candidates, dimensions of other latents' draws (vectorised particles) and the data.
        log_prob = log_prob.movedim(dims, tuple(range(-len(dims), 0))) if dims else log_prob.unsqueeze(-1)
        # Of states that all data points share, log probabilities may be theirs, too.
        log_prob = log_prob.expand(*log_prob.shape[: log_prob.dim() - len(dims)], *self.probe.sizes)
        middle = log_prob.shape[1 : log_prob.dim() - max(1, len(dims))]
        sums: Tensor = log_prob.reshape(log_prob.shape[0], *(size for size in middle if size != 1), self.probe.num_data)
        return sums


def _unbind(values: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The values of one candidate after the other."""
    for column in zip(*(value.unbind(0) for value in values.values()), strict=True):
        yield dict(zip(values, column, strict=True))


def sum_block(terms: Mapping[str, Tensor]) -> Tensor:
    """Sum of the sites' log probabilities ``(C, ..., N)``, broadcast against each other."""
    total: Tensor | None = None
    for term in terms.values():
        # Sites that do not vary with the draws of other latents lack the dimensions in the middle.
        if total is not None and term.dim() != total.dim():
            short, long = sorted((term, total), key=Tensor.dim)
            short = short.reshape(short.shape[0], *(1,) * (long.dim() - short.dim()), *short.shape[1:])
            term, total = short, long
        total = term if total is None else total + term
    assert total is not None
    return total


def run_moments(nodes: Mapping[str, Any], probe: Probe, words: Tensor, rows: slice) -> Moments | None:
    """Returns moments of some data points in a run, or ``None``.

    States are ``(N, C, num_words)``. ``None`` means that moments do not determine how likely
    observations are.

    They do if a data point is a row of one plate and everything observed inside it is known and
    neither masked nor scaled by itself. Its distributions must have finite means and positive
    variances, of the observations' shape up to dimensions of one.
    """
    if probe.layout.dims != (-1,) or probe.depth != 1:
        return None
    parts = [_site_moments(nodes[name], value, probe, words, rows) for name, value in probe.observations(nodes).items()]
    moments = [part for part in parts if part is not None]
    if not moments or len(moments) < len(parts):
        return None
    mean, variance = (torch.cat(values, -1) for values in zip(*moments, strict=True))
    if rows.step not in (None, 1):
        # Lest parts of a tensor keep all of it in memory.
        mean, variance = mean.clone(), variance.clone()
    is_proper = mean.isfinite() & variance.isfinite() & (variance > 0)
    return Moments(words[rows].transpose(0, 1).flatten(0, 1), mean, variance) if bool(is_proper.all()) else None


def _site_moments(node: Mapping[str, Any], value: Tensor, probe: Probe, words: Tensor, rows: slice) -> tuple[Tensor, Tensor] | None:
    is_alone = len(node["cond_indep_stack"]) == 1 and len(value) == probe.num_data
    if not is_alone or node["mask"] is not None or bool((torch.as_tensor(node["scale"]) != torch.as_tensor(probe.scale)).any()):
        return None
    fn = node["fn"]
    if unwrap(fn)[1] or value.is_complex() or bool(value.isnan().any()):
        return None
    shape = words.shape[1], *value.shape
    try:
        moments = [moment.detach().expand(shape)[:, rows].reshape(-1, math.prod(value.shape[1:])) for moment in (fn.mean, fn.variance)]
    except Exception:  # of a distribution of the user: whatever it is, the model can be scored without
        return None
    return None if any(moment.is_complex() for moment in moments) else (moments[0], moments[1])
