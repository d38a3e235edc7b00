"""Log joints of many discrete states at once under any vectorised Pyro model."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Literal

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions.utils import probs_to_logits

from pyro_truncated.ops import repeated
from pyro_truncated.program.call import Call
from pyro_truncated.program.sites import Layout, is_delta, latent_nodes, sample_nodes
from pyro_truncated.program.supports import supported_log_prob
from pyro_truncated.utils.isolation import Assign, isolated

Conditional = Callable[..., Any]
Scoring = Literal["together", "vmap", "singly"]


class ChangingSitesError(NotImplementedError):
    """A model samples other sites for some states than for others."""


class AllObservedError(ValueError):
    """The model observes all discrete sites that the guide was set up for, so that there is no posterior of them.

    Attributes:
        values: the observed values by site name.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(f"the model observes all its discrete sites {list(values)} with these arguments: there is nothing to infer")
        self.values = dict(values)


class LogJoint:
    r"""Scores states of the data points of one (sub)batch: :math:`\log p(y_n, z, s)` with everything but the states ``s`` held fixed.

    The model is run once as a probe when this object is made: that fixes the subsamples of plates and shows whether the states can be
    scored packed (see :meth:`packed`); made under enabled gradients, it serves searches and gradients alike. Otherwise :meth:`score` runs
    the model with the discrete sites set to a tensor of candidate states in a new left-most dimension, and sums the log probabilities of
    the sites inside the data plates over every other plate. Masks are kept, except at the discrete sites: a latent that is summed out has
    a distribution whether masked or not, otherwise each of its values would count as a whole (Pyro's enumeration does the same). Of the
    scales only the ratio to that of the discrete sites is kept, so that :attr:`scale` times the sum over data points is the scaled
    objective.

    With a ``conditional`` the continuous latents it samples are drawn given the states, and their log density is subtracted:
    :math:`\log p(y_n, z, s) - \log q(z \mid s)`, which is :math:`\log p(y_n, s)` for every ``z`` when the conditional is exact.

    Args:
        call: the Pyro model and its arguments.
        layout: its discrete sites.
        values: fixed values by site name: other latents, subsamples of plates.
        conditional: samples continuous latents given the states, or ``None``.
        memory_budget: bytes that one run of the model on candidates may take, roughly.
        scoring: whether the states are scored together, in a new left-most dimension; by ``torch.func.vmap``, for models that do not take
            such a dimension; or one after the other, for models whose Python code looks at values.
    """

    def __init__(
        self,
        call: Call,
        layout: Layout,
        *,
        values: Mapping[str, Any] | None = None,
        conditional: Conditional | None = None,
        memory_budget: int = 2**28,
        scoring: Scoring = "together",
    ) -> None:
        self.scoring = scoring
        # Values that the conditional's sites take in place of draws, for looking at how it computes.
        self.held: dict[str, Any] = {}
        # The most dimensions that a site's log probability has had: more than plates and candidates need, and Pyro cannot enumerate.
        self.most_dims = 0
        self.call, self.layout = call, layout
        self.values = dict(values or {})
        self.conditional = conditional
        self.memory_budget = memory_budget
        self.takes_gradients = torch.is_grad_enabled()
        self.probe = self.run(self.values)
        self.nodes = sample_nodes(self.probe)
        self.subsamples: dict[str, Any] = {name: node["value"] for name, node in self.probe.nodes.items() if site_is_subsample(node)}
        self._check_structure()
        # Whatever is not scored stays as the probe drew it: subsamples, and latents that no guide has given a value.
        self.values |= self.subsamples | {name: self.nodes[name]["value"] for name in layout.other_latents if name in self.nodes}
        self._first = self.nodes[next(iter(layout.sites))]
        self.dtypes: dict[str, torch.dtype] = {name: self.nodes[name]["value"].dtype for name in layout.sites}
        self.device: torch.device = self._first["value"].device
        self.scale: float | Tensor = self._first["scale"]
        if torch.as_tensor(self.scale).numel() != 1 or float(self.scale) <= 0:
            raise ValueError(f"discrete sites must have one positive scale for all data points (poutine.scale); got {self.scale}")
        given = values or {}
        self.uncovered = {name for name in layout.other_latents if name not in given and not self._is_observed(name)}
        extra = (self.values[name].dim() - node["fn"].event_dim for name, node in self.nodes.items() if name in self.values)
        self.depth: int = max([layout.depth, *extra])
        # Vectorised particles: scores gain dimensions for the draws of other latents.
        self.is_vectorized = self.depth > layout.depth
        self.observed = [name for name in layout.sites if self._is_observed(name)]
        self._known = self._known_levels() if self.observed else None

    def run(self, values: Mapping[str, Any]) -> poutine.Trace:
        """A run of the model with the given values of sample sites and subsamples of plates, seen by nobody outside but for parameters."""
        return self.call.run(values)

    def _trace_candidates(self, values: Mapping[str, Any]) -> poutine.Trace:
        try:
            # The candidates lie in the support by construction, and what may be wrong with the data the probe has shown.
            with pyro.validation_enabled(False):
                return self.run(values)
        except (RuntimeError, IndexError, ValueError) as error:
            shapes = ", ".join(f"'{name}' of shape {tuple(values[name].shape)}" for name in self.layout.sites)
            if self.scoring != "together":
                raise
            error.add_note(
                f"This happened when the model was run on many states at once: {shapes}. AutoTruncated puts them in a new left-most "
                "dimension, as parallel enumeration does: address dimensions from the right (sum(-1), s @ W.mT, Vindex), or score "
                "one state after the other: AutoTruncated(..., vectorize=False)."
            )
            raise

    def _check_structure(self) -> None:
        missing = [name for name in self.layout.sites if name not in self.nodes]
        if missing:
            raise ValueError(f"the model no longer samples the discrete sites {missing} that the guide was set up for")
        known = {*self.layout.sites, *self.layout.other_latents}
        new = [name for name, node in self.nodes.items() if not node["is_observed"] and name not in known and not is_delta(node)]
        if new:
            raise ValueError(
                f"the model now has the latents {new}, which it had not (or observed) when the guide was set up. Set the guide up with "
                "arguments for which the model observes none of its latents: call guide.setup(*args), or the guide list, with them first"
            )
        if all(self._is_observed(name) for name in self.layout.sites):
            raise AllObservedError({name: self.nodes[name]["value"] for name in self.layout.sites})

    def _is_observed(self, name: str) -> bool:
        return name in self.nodes and bool(self.nodes[name]["is_observed"])

    # --- discrete sites that are observed in this call ---

    def _known_levels(self) -> Tensor:
        """What is observed of the states, ``(N, 1, L)``; -1 where nothing is."""
        given = self.observations() if self.layout.dims else {name: self.nodes[name]["value"].unsqueeze(0) for name in self.observed}
        parts = []
        for name, site in self.layout.sites.items():
            if name in self.observed:
                shape = (self.num_data, *site.shape, *([site.cardinalities[0]] if site.kind == "one_hot" else []))
                parts.append(site.to_levels(given[name].reshape(shape)).reshape(self.num_data, site.num_latents))
            else:
                parts.append(torch.full((self.num_data, site.num_latents), -1, device=self.device))
        return torch.cat(parts, -1).unsqueeze(1)

    def contradicted(self, words: Tensor) -> Tensor:
        """Which of the states ``(N, C, num_words)`` are not what the model observes of them."""
        assert self._known is not None
        return ((self.layout.space.unpack(words).long() != self._known) & (self._known >= 0)).any(-1)

    def fitted(self, words: Tensor) -> Tensor:
        """Distinct states ``(N, S, num_words)`` with what the model observes put in; those that would repeat others stay as they are."""
        if self._known is None:
            return words
        space = self.layout.space
        put_in = space.pack(torch.where(self._known >= 0, self._known, space.unpack(words).long()))
        # States that have it already count as the first of their kind: they repeat none of each other.
        order = self.contradicted(words).byte().argsort(dim=-1, stable=True)
        ordered = put_in.gather(1, order.unsqueeze(-1).expand_as(put_in))
        repeats = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, repeated(ordered))
        return torch.where(repeats.unsqueeze(-1), words, put_in)

    @property
    def indices(self) -> Tensor | None:
        """Positions ``(N,)`` of this batch's data points among all of them, or ``None`` if it holds all in order.

        Raises:
            ValueError: if a plate's subsample is out of range.
        """
        positions: Tensor | None = None
        whole = True
        for frame in self._frames:
            size = int(frame.full_size or frame.size)
            chosen = torch.as_tensor(self.values[frame.name])
            if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < size:
                raise ValueError(
                    f"subsample indices of plate '{frame.name}' must lie in 0 .. {size - 1}; got {int(chosen.min())} .. {int(chosen.max())}"
                )
            whole &= len(chosen) == size and torch.equal(chosen, torch.arange(size, device=chosen.device))
            positions = chosen if positions is None else (positions.unsqueeze(-1) * size + chosen).flatten()
        return None if whole else positions

    @property
    def num_data(self) -> int:
        """Number of data points in this batch, ``N``."""
        return math.prod(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of the data plates in this batch."""
        return tuple(int(frame.size) for frame in self._frames)

    @property
    def full_size(self) -> int:
        """Number of data points in the full data set."""
        return math.prod(int(frame.full_size or frame.size) for frame in self._frames)

    @property
    def scale_beyond_plates(self) -> float | Tensor:
        """The part of :attr:`scale` that does not come from subsampled plates."""
        stack = self._first["cond_indep_stack"]
        share: float = math.prod(frame.size / (frame.full_size or frame.size) for frame in stack)
        return self.scale * share

    @property
    def _frames(self) -> list[Any]:
        stack = self._first["cond_indep_stack"]
        return sorted((frame for frame in stack if frame.name in self.layout.plates), key=lambda frame: frame.dim)

    def outside(self) -> Tensor:
        """Scaled log probability of what is observed outside the data plates: the same for all states, but a part of the objective."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for node in self.nodes.values():
            if not self.is_inside(node) and (node["is_observed"] or is_delta(node)):
                total = total + scale_and_mask(node["fn"].log_prob(node["value"]), node["scale"], node["mask"]).sum()
        return total

    # --- scoring ---

    def score(self, words: Tensor, rows: slice | None = None) -> Tensor:
        """Log joints ``(N, C)`` of packed states ``(N, C, num_words)``; differentiable in whatever the model is.

        ``rows`` restricts the data points to a slice of the batch; only possible where :meth:`row_blocks` offers more than one.

        Raises:
            ValueError: if a log joint is NaN or ``+inf``; the message names the site.
        """
        if rows is not None and self.packed is None and words.shape[0] != self.num_data:
            raise ValueError("this model can only be scored on all data points of the batch at once")
        log_joint = self._score_packed(words, rows) if self.packed is not None else self._score_dense(words)
        if self._known is not None:
            log_joint = log_joint.masked_fill(self.contradicted(words), -math.inf)
        self._check_finite(log_joint, words)
        return log_joint

    def row_blocks(self, states_per_row: int) -> list[slice]:
        """Slices of the batch's data points that can be scored on their own, each within the memory budget."""
        if self.packed is None:
            return [slice(0, self.num_data)]
        # Words and log joints of the candidates, about three copies of each.
        per_row = max(1, 3 * states_per_row * 8 * (self.layout.space.num_words + 1))
        step = max(1, self.memory_budget // per_row)
        return [slice(start, min(start + step, self.num_data)) for start in range(0, self.num_data, step)]

    def gradient_blocks(self, num_states: int) -> Iterator[tuple[slice, slice]]:
        """Blocks of data points and states (all: ``slice(None)``) to differentiate one by one, each within the memory budget."""
        step = self.candidates_per_run()
        if self.packed is not None or step >= num_states:
            yield from ((rows, slice(None)) for rows in self.row_blocks(num_states))
            return
        yield from ((slice(0, self.num_data), slice(start, start + step)) for start in range(0, num_states, step))

    @property
    def packed(self) -> _PackedModel | None:
        """How to score packed states directly, or ``None`` if the model does not have the shape for it.

        The shape: in the data plate one vector ``Bernoulli`` site, and observations whose distributions evaluate packed states (those of
        :mod:`pyro_truncated.distributions`) with that very site as their ``states``; no masks, no inner plates, no conditional.
        """
        if not hasattr(self, "_packed"):
            # First needed by a search, perhaps, but kept for the gradient.
            with torch.set_grad_enabled(self.takes_gradients):
                self._packed = None if self.conditional is not None else _packed_model(self)
        return self._packed

    def _score_packed(self, words: Tensor, rows: slice | None) -> Tensor:
        model = self.packed
        assert model is not None
        chosen = slice(None) if rows is None else rows
        logits: Tensor | None = model.logits if model.logits.dim() == 1 else model.logits[chosen]
        total: Tensor | float = 0.0
        for fn, value in model.observations:
            total = total + fn.packed_log_prob(words, value[chosen], logits)
            logits = None
        constant = model.constant if model.constant.dim() == 0 else model.constant[chosen].unsqueeze(-1)
        return total + constant

    def _score_dense(self, words: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._score_possible(words) if self.layout.checked else self._score_block(words)
        return torch.cat([self._score_block(block) for block in words.split(self.candidates_per_run(), 1)], 1)

    def _score_possible(self, words: Tensor) -> Tensor:
        """Scores with the best state in place of impossible ones, whose densities may be anything and would spoil gradients."""
        with torch.no_grad():
            known = self._score_dense(words)
        impossible = known == -math.inf
        if known.dim() != 2 or not bool(impossible.any()):
            return self._score_block(words)
        best = known.argmax(-1).reshape(-1, 1, 1).expand(-1, 1, words.shape[-1])
        scores = self._score_block(torch.where(impossible.unsqueeze(-1), words.gather(1, best), words))
        return scores.masked_fill(impossible, -math.inf)

    def candidates_per_run(self) -> int:
        """How many candidates per data point one run of the model may hold: each allocates a few copies of its largest site."""
        largest: int = max(math.prod((*node["fn"].batch_shape, *node["fn"].event_shape)) for node in self.nodes.values())
        return max(1, self.memory_budget // (32 * max(largest, self.num_data * self.layout.space.num_latents)))

    def _score_block(self, words: Tensor) -> Tensor:
        terms = self.site_log_probs(words)
        total = sum_block(terms)
        for name in self.layout.checked & terms.keys():
            # What depends on an impossible value may be anything, NaN too.
            impossible = sum_block({"": torch.zeros_like(total), name: terms[name].detach()}) == -math.inf
            total = total.masked_fill(impossible, -math.inf)
        return total.movedim(0, -1)

    def scorer(self, rows: slice) -> Callable[[Tensor], Tensor]:
        """Scores ``(N, C)`` of the states of some data points; under several draws of other latents at once their mean."""

        def score(words: Tensor) -> Tensor:
            """Log joints ``(N, C)`` of packed states of these rows."""
            scores = self.score(words, rows)
            return scores if scores.dim() == 2 else scores.flatten(0, -3).mean(0)

        return score

    def assigned_values(self, words: Tensor) -> dict[str, Tensor]:
        """Site values of candidates ``(N, C, num_words)``, with the candidates in the dimension left of all plates."""
        levels = self.layout.space.unpack(words).transpose(0, 1)
        batch = self.layout.spread(self.sizes, self.depth)
        return self.layout.decode(levels.reshape(levels.shape[0], *batch, levels.shape[-1]), self.depth, self.dtypes)

    def single_values(self, words: Tensor) -> dict[str, Tensor]:
        """Site values of candidates ``(N, C, num_words)``: the candidates in front, then exactly the shapes of the model's sites."""
        levels = self.layout.space.unpack(words).transpose(0, 1)
        batch = self.layout.spread(self.sizes, self.layout.depth)
        values = self.layout.decode(levels.reshape(levels.shape[0], *batch, levels.shape[-1]), self.layout.depth, self.dtypes)
        return {name: values[name].flatten(0, -1 - site.depth - site.event_dim) for name, site in self.layout.sites.items()}

    def site_log_probs(self, words: Tensor) -> dict[str, Tensor]:
        """Log probability of each site inside the data plate, ``(C, ..., N)``, for candidates ``(N, C, num_words)``."""
        if self.scoring == "together":
            return self._terms(self.assigned_values(words))
        values = self.single_values(words)
        if self.scoring == "vmap":
            terms = torch.func.vmap(self._terms, randomness="different")(values)
            return {name: term.squeeze(1) for name, term in terms.items()}
        columns = [self._terms(states) for states in _unbind(values)]
        return {name: torch.cat([column[name] for column in columns]) for name in columns[0]}

    def _terms(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Log probability of each site inside the data plate in one run of the model."""
        values = {**self.values, **states}
        terms: dict[str, Tensor] = {}
        if self.conditional is not None:
            for node in latent_nodes(self._conditional_trace(states)):
                values[node["name"]] = node["value"]
                terms[f"conditional of {node['name']}"] = -self._reduce(node)
        nodes = sample_nodes(self._trace_candidates(values))
        if self.scoring == "singly":
            self._check_sites(nodes)
        for name, node in nodes.items():
            # A latent that nobody proposes is drawn from its prior: its density cancels that of its own proposal.
            if self.is_inside(node) and (name not in self.uncovered or f"conditional of {name}" in terms):
                terms[name] = self._reduce(node)
        return terms

    def _check_sites(self, nodes: Mapping[str, Any]) -> None:
        changed = sorted(set(nodes) ^ set(self.nodes))
        if changed:
            raise ChangingSitesError(
                f"the sites {changed} are sampled for some states of {list(self.layout.sites)} only. Sample the same sites for every "
                "state: mask an observation (poutine.mask) where it shall not count, and let a latent have no influence where it is not "
                "needed."
            )

    def hidden_log_probs(self, words: Tensor) -> dict[str, Tensor]:
        """What masks hide of the log probabilities of discrete sites: ``(C, *batch)`` by name of the masked, for ``(N, C, num_words)``."""
        if all(self.nodes[name]["mask"] is None for name in self.layout.sites):
            return {}
        if self.scoring == "together":
            return self._hidden(self.assigned_values(words))
        columns = [self._hidden(states) for states in _unbind(self.single_values(words))]
        return {name: torch.stack([column[name] for column in columns]) for name in columns[0]}

    def _hidden(self, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
        nodes = sample_nodes(self._trace_candidates({**self.values, **states}))
        hidden = {}
        for name in self.layout.sites:
            node = nodes[name]
            if node["mask"] is not None and not node["is_observed"]:
                log_prob = self._log_prob(node) * (node["scale"] / self.scale)
                hidden[name] = torch.where(torch.as_tensor(node["mask"], device=log_prob.device), 0.0, log_prob)
        return hidden

    def _conditional_trace(self, states: Mapping[str, Tensor]) -> poutine.Trace:
        assert self.conditional is not None
        with isolated(), Assign(self.held), ExitStack() as stack:
            for frame in self._frames:
                stack.enter_context(pyro.plate(frame.name, frame.full_size or frame.size, subsample=self.values[frame.name], dim=frame.dim))
            return self.call.of(functools.partial(self.conditional, dict(states))).trace()

    def is_inside(self, node: Any) -> bool:
        """Whether a site lies in all data plates."""
        return set(self.layout.plates) <= {frame.name for frame in node["cond_indep_stack"]}

    def _log_prob(self, node: Any) -> Tensor:
        fn: Any = node["fn"]
        log_prob: Tensor = (
            supported_log_prob(fn, node["value"])
            if node["name"] in self.layout.checked
            else fn.log_prob(node["value"], *node["args"], **node["kwargs"])
        )
        return log_prob

    def _mask(self, node: Any) -> Any:
        return None if node["name"] in self.layout.sites and not node["is_observed"] else node["mask"]

    def _reduce(self, node: Any) -> Tensor:
        """A site's log probability ``(C, ..., N)``, summed over all plates but the data plates."""
        log_prob: Any = self._log_prob(node)
        self.most_dims = max(self.most_dims, log_prob.dim())
        log_prob = scale_and_mask(log_prob, node["scale"] / self.scale, self._mask(node))
        log_prob = log_prob.reshape((1,) * (self.depth + 1 - log_prob.dim()) + tuple(log_prob.shape))
        inner = {frame.dim for frame in node["cond_indep_stack"] if frame.vectorized} - set(self.layout.dims)
        if inner:
            log_prob = log_prob.sum(sorted(inner), keepdim=True)
        # What is left are candidates, dimensions of other latents' draws (vectorised particles) and the data.
        dims = self.layout.dims
        log_prob = log_prob.movedim(dims, tuple(range(-len(dims), 0))) if dims else log_prob.unsqueeze(-1)
        middle = log_prob.shape[1 : log_prob.dim() - max(1, len(dims))]
        reduced: Tensor = log_prob.reshape(log_prob.shape[0], *(size for size in middle if size != 1), self.num_data)
        return reduced

    def _check_finite(self, log_joint: Tensor, words: Tensor) -> None:
        if not log_joint.numel():
            return
        top = log_joint.detach().max()
        if bool(top < math.inf):
            return
        kind = "NaN" if bool(log_joint.isnan().any()) else "+inf"
        flat = (log_joint.isnan() | (log_joint == math.inf)).reshape(-1, log_joint.shape[-1]).nonzero()[0]
        culprits = ""
        if words.shape[0] == self.num_data:
            with torch.no_grad():
                terms = self.site_log_probs(words[:, flat[1] : flat[1] + 1])
            bad = [name for name, term in terms.items() if not bool((term < math.inf).all())]
            culprits = f" at site {', '.join(repr(name) for name in bad)}" if bad else ""
        raise ValueError(
            f"the log joint is {kind}{culprits} for a state of data point {int(flat[0])} of the batch. "
            "Check the model's parameters and data (missing values need a distribution that allows them)."
        )

    def observations(self, nodes: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Observed values inside the data plate by site name, data points first, inner plates next, then the event.

        They are those of the probe, or of the sample sites of another run of the model on the same data points.
        """
        found = {}
        dims = self.layout.dims
        for name, node in (self.nodes if nodes is None else nodes).items():
            if node["is_observed"] and torch.is_tensor(node["value"]) and self.is_inside(node):
                value, event_dim = node["value"], node["fn"].event_dim
                if dims and value.dim() >= event_dim - dims[0]:
                    value = value.movedim(tuple(dim - event_dim for dim in dims), tuple(range(len(dims))))
                    found[name] = value.flatten(0, len(dims) - 1) if value.shape[: len(dims)] == self.sizes else value
        return found


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


@dataclasses.dataclass(frozen=True)
class _PackedModel:
    """A model whose states are scored packed: Bernoulli logits ``(H,)`` or ``(N, H)``, their constant, and the observations."""

    logits: Tensor
    constant: Tensor
    observations: list[tuple[Any, Tensor]]


def _packed_model(log_joint: LogJoint) -> _PackedModel | None:
    layout = log_joint.layout
    if layout.dims != (-1,) or len(layout.sites) != 1 or not layout.space.is_binary:
        return None
    (site,) = layout.sites.values()
    nodes = [node for node in log_joint.nodes.values() if log_joint.is_inside(node)]
    state = log_joint.nodes[site.name]
    if site.kind != "boolean" or site.plates or len(site.event_shape) != 1:
        return None
    observed = [node for node in nodes if node["name"] != site.name]
    if not observed or any(node["mask"] is not None or len(node["cond_indep_stack"]) != 1 for node in nodes):
        return None
    for node in observed:
        fn = node["fn"]
        if not (
            node["is_observed"]
            and getattr(fn, "has_packed_log_prob", False)
            and fn.states is state["value"]
            and node["scale"] == state["scale"]
        ):
            return None
        if node["value"].shape[:1] != (log_joint.num_data,):
            return None
    logits = _bernoulli_logits(state["fn"], log_joint.num_data, layout.space.num_latents)
    if logits is None:
        return None
    return _PackedModel(logits, -torch.nn.functional.softplus(logits).sum(-1), [(node["fn"], node["value"]) for node in observed])


def _bernoulli_logits(fn: Any, num_data: int, num_latents: int) -> Tensor | None:
    """Logits ``(H,)`` or ``(N, H)`` of a vector Bernoulli distribution; ``None`` if it is anything else."""
    while type(fn).__name__ in ("Independent", "ExpandedDistribution") and hasattr(fn, "base_dist"):
        fn = fn.base_dist
    if not isinstance(fn, torch.distributions.Bernoulli):
        return None
    is_given = "logits" in fn.__dict__
    parameter: Tensor = fn.logits if is_given else fn.probs
    # An expanded parameter must not be turned into logits once per data point.
    if parameter.dim() == 2 and parameter.shape[0] == num_data and parameter.stride(0) == 0:
        parameter = parameter[0]
    if parameter.dim() > 2:
        return None
    logits = parameter if is_given else probs_to_logits(parameter, is_binary=True)
    return logits.expand(num_latents) if logits.dim() <= 1 else logits.expand(num_data, num_latents)
