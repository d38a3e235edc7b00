"""What is drawn from a guide, gathered draw by draw."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import infer_discrete
from pyro.infer.autoguide import AutoGuideList
from pyro.ops import packed
from pyro.ops.contract import contract_tensor_tree
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor

from pyro_truncated.diagnostics.truncation.coverage import MOST_MOVES, certificate
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import sum_block
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.sites import family, sample_nodes, unwrap
from pyro_truncated.search.conditional import Moves
from pyro_truncated.states.population import Population
from pyro_truncated.utils.parameter_store import Assign, isolate, spare_random_numbers

Node = Mapping[str, Any]


def role(node: Node) -> Literal["data", "factor", "deterministic", "latent"]:
    """What a site is: data, a density without value, computed, or latent.

    Computed are ``pyro.deterministic``, an unobserved ``Delta``, a latent that a reparametrisation has replaced, and the completed values
    of a site with an ``obs_mask``.
    """
    fn, is_observed = node["fn"], bool(node["is_observed"] or node["infer"].get("was_observed"))
    if family(fn) == "Unit":
        return "factor"
    if family(fn) == "Delta":
        if not is_observed or node["infer"].get("_deterministic") or getattr(fn, "_mask", None) is False:
            return "deterministic"
        # Some reparametrisations carry a density: they observe the very tensor that the point mass lies at.
        while hasattr(fn, "base_dist"):
            fn = fn.base_dist
        if torch.is_tensor(node["value"]) and node["value"].data_ptr() == fn.v.data_ptr():
            return "deterministic"
    return "data" if is_observed else "latent"


def site_plates(node: Node) -> frozenset[str]:
    """Names of the vectorised plates around a site."""
    return frozenset(frame.name for frame in node["cond_indep_stack"] if frame.vectorized)


def hidden_entries(node: Node) -> Tensor | None:
    """Returns where masks hide entries of a site's value, ``None`` if nowhere."""
    fn, hidden = node["fn"], torch.zeros((), dtype=torch.bool)
    for mask, event_dim in [(node["mask"], node["fn"].event_dim), *unwrap(fn)[1]]:
        if mask is not None:
            own = ~torch.as_tensor(mask, dtype=torch.bool)
            hidden = hidden.to(own.device) | own.reshape((*own.shape, *(1,) * event_dim))
    return hidden.expand(fn.shape()) if bool(hidden.any()) else None


class FreeData(Messenger):
    """Draws data instead of observing them; computed values stay."""

    def _pyro_sample(self, msg: Any) -> None:
        if msg["is_observed"] and role(msg) == "data":
            msg["is_observed"], msg["done"] = False, False
            msg["infer"]["was_observed"] = True
            msg["value"] = None


def leaves(call: Call, nodes: Mapping[str, Node], names: Collection[str]) -> frozenset[str]:
    """Named latents on which only computed values depend, as missing data."""
    if not names:
        return frozenset()
    dependencies = Dependencies(call)
    return frozenset(
        name for name in names if all(role(nodes[site]) == "deterministic" for site in dependencies.dependents({name}) if site in nodes)
    )


class Enumeration:
    """The discrete latents that :class:`~pyro.infer.TraceEnum_ELBO` sums out of a model.

    Latents inside the plates of the data that depend on them (``plates``) are summed out of the log likelihood of each data point. Others
    are parameters, and keep the values drawn. Densities of ``silent`` latents, on which nothing depends, are left out.

    Attributes:
        plates: the plates from left to right, with their sizes. Empty if no data point has such latents of its own.
        local: the latents inside them.
        inside: the sites inside them.
    """

    def __init__(self, call: Call, nodes: Mapping[str, Any], names: Collection[str], silent: Collection[str] = ()) -> None:
        self.call = call
        self.names, self.silent = frozenset(names), frozenset(silent)
        self.first_dim = -1 - max(len(node["fn"].batch_shape) for node in nodes.values())
        self._find_plates({name: node["value"] for name, node in nodes.items() if role(node) == "latent" and name not in names})

    def draw(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Draws the discrete latents from their posterior given the others."""
        program = self._prepare(values, self.names)
        with isolate():
            trace = poutine.trace(infer_discrete(program, first_available_dim=self.first_dim)).get_trace()
        return {name: trace.nodes[name]["value"] for name in self.names}

    def log_evidence(self, values: Mapping[str, Any]) -> Tensor:
        """Log density of the data and the other latents."""
        trace = self._enumerate(values, self.names)
        sites = [name for name in sample_nodes(trace) if name not in self.silent]
        return sum((term.double().sum() for term in _contract(trace, sites, self.names)), torch.zeros(()).double())

    def log_likelihood(self, values: Mapping[str, Any], leaves: Collection[str]) -> Tensor:
        """The log likelihood of each data point, of shape :attr:`plates`.

        Discrete latents are summed out, others given. ``leaves`` are latents on which nothing depends, such as missing data; their
        densities are left out.
        """
        trace = self._enumerate(values, self.local)
        inside = [name for name in self.inside if name not in leaves]
        latent = [name for name in inside if role(trace.nodes[name]) == "latent"]
        joint, prior = (self._per_datum(_contract(trace, names, self.local), trace) for names in (inside, latent))
        return joint - prior

    def _prepare(self, values: Mapping[str, Any], names: Collection[str]) -> Callable[[], Any]:
        """The call with other latents fixed, marked for enumeration."""
        other_values = {name: value for name, value in values.items() if name not in names}
        marks: Any = {True: {"enumerate": "parallel"}, False: {"enumerate": None}}
        marked_call = poutine.infer_config(self.call, lambda site: marks[site["name"] in names])

        def program() -> Any:
            with Assign(other_values), _Silence(self.silent):
                return marked_call()

        return program

    def _enumerate(self, values: Mapping[str, Any], names: Collection[str]) -> poutine.Trace:
        program = self._prepare(values, names)
        with isolate():
            trace = poutine.trace(poutine.enum(program, first_available_dim=self.first_dim)).get_trace()
        trace = prune_subsample_sites(trace)
        trace.compute_log_prob()
        trace.pack_tensors()
        return trace

    def _find_plates(self, values: Mapping[str, Any]) -> None:
        """Finds the plates of data that depend on the discrete latents."""
        trace = self._enumerate(values, self.names)
        nodes, sum_dims = sample_nodes(trace), _sum_dims(trace, self.names)
        below = [node for node in nodes.values() if role(node) in ("data", "factor")]
        below = [node for node in below if sum_dims.intersection(node["packed"]["unscaled_log_prob"]._pyro_dims)]
        shared = frozenset.intersection(*map(site_plates, below)) if below else frozenset()
        self.local = frozenset(name for name in self.names if site_plates(nodes[name]) & shared)
        shared = shared.intersection(*(site_plates(nodes[name]) for name in self.local)) if self.local else frozenset()
        frames = {frame.name: frame for node in nodes.values() for frame in node["cond_indep_stack"] if frame.name in shared}
        self.plates = {frame.name: int(frame.size) for frame in sorted(frames.values(), key=lambda frame: frame.dim)}
        self.local = self.local if self.plates else frozenset()
        self.inside = [name for name, node in nodes.items() if self.plates and set(self.plates) <= site_plates(node)]

    def _per_datum(self, terms: list[Tensor], trace: poutine.Trace) -> Tensor:
        """Sums terms over all plates but those of the data points."""
        total = torch.zeros(tuple(self.plates.values()), dtype=torch.float64)
        symbols = [trace.plate_to_symbol[name] for name in self.plates]
        for term in terms:
            dims: str = term._pyro_dims  # type: ignore[attr-defined]
            extra = [position for position, symbol in enumerate(dims) if symbol not in symbols]
            sums = term.double().sum(extra) if extra else term.double()
            plates = [symbol for symbol in dims if symbol in symbols]
            sums = sums.permute([plates.index(symbol) for symbol in symbols if symbol in plates])
            shape = [size if symbol in plates else 1 for symbol, size in zip(symbols, self.plates.values(), strict=True)]
            total = total.to(sums.device) + sums.reshape(shape)
        return total


class _Silence(Messenger):
    """Effect handler that takes the density of the named sites away."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names:
            msg["mask"] = False


def _sum_dims(trace: poutine.Trace, names: Collection[str]) -> set[str]:
    """Symbols of the dimensions along which the named sites are enumerated."""
    marks: list[Any] = [trace.nodes[name]["infer"] for name in names]
    return {mark["_dim_to_symbol"][mark["_enumerate_dim"]] for mark in marks if mark.get("_enumerate_dim") in mark["_dim_to_symbol"]}


def _contract(trace: poutine.Trace, sites: Collection[str], names: Collection[str]) -> list[Tensor]:
    """Sums sites out of log densities; returns a tensor per connected part."""
    tree: OrderedDict[frozenset[str], list[Tensor]] = OrderedDict()
    for name in sites:
        node = trace.nodes[name]
        ordinal = frozenset(trace.plate_to_symbol[frame.name] for frame in node["cond_indep_stack"] if frame.vectorized and frame.size > 1)
        # What is summed out has a distribution whether masked or not, as in TraceEnum_ELBO.
        mask = None if name in names else node["packed"]["mask"]
        tree.setdefault(ordinal, []).append(packed.scale_and_mask(node["packed"]["unscaled_log_prob"], mask=mask))
    terms_by_plates = contract_tensor_tree(tree, _sum_dims(trace, names))
    return [term for terms in terms_by_plates.values() for term in terms]


Sites = dict[str, Tensor]


@dataclasses.dataclass
class States:
    """What a truncated guide knows of the states beside their draws."""

    part: AutoTruncated
    log_joint: LogJoint
    population: Population  # weights and free energies are means over the draws
    covered_mass: Tensor  # upper bound on the posterior mass of the populations, (N,). A mean over draws of the other latents.
    index: Tensor  # indices of the states drawn, (draws, N)

    def values(self, draw: int) -> Sites:
        """The states of one draw, in the model's own shapes."""
        rows = torch.arange(len(self.population), device=self.index.device)
        levels = self.part.space.unpack(self.population.words[rows, self.index[draw]])
        return self.part.layout.site_values(levels, self.log_joint.sizes, self.log_joint.dtypes)


@dataclasses.dataclass
class Draws:
    """Draws from guide and model."""

    nodes: dict[str, Any]  # the sites of one run of the model
    latents: Sites  # draws of the latents, without those of states, by site name, (draws, *shape)
    deterministic: Sites  # values that follow from the latents (pyro.deterministic, reparametrised latents), likewise
    lp: Tensor  # log joint density of each draw
    log_q: Tensor  # log density of each draw under the guide
    log_likelihood: Sites  # by name, log likelihoods of the observations, (draws, *shape). Empty where they do not exist.
    log_prior: Sites  # log prior density of each latent that belongs to no data point, (draws,) by site name
    local: frozenset[str]  # names of the latents of data points
    conditional_on: frozenset[str]  # those of them that log_likelihood depends on
    plates: dict[str, int]  # plates whose members are the data points, by dimension from left to right, with their sizes
    joint: str = ""  # name of the variable of log_likelihood that has one entry per data point. Others have the shapes of their sites.
    states: States | None = None  # those of a truncated guide

    def observed_rows(self) -> Tensor | None:
        """Which data points have an unmasked observation, ``(N,)``, or ``None``."""
        if len(self.plates) != 1:
            return None
        ((plate, size),) = self.plates.items()
        seen = torch.zeros(size, dtype=torch.bool)
        for node in self.nodes.values():
            dims = [frame.dim for frame in node["cond_indep_stack"] if frame.name == plate]
            if not dims or role(node) not in ("data", "factor"):
                continue
            hidden = hidden_entries(node)
            if hidden is None:
                return None
            hidden = hidden.cpu().movedim(dims[0] - node["fn"].event_dim, 0)
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
        self.groups: dict[str, list[Mapping[str, Tensor]]] = {"latents": [], "deterministic": [], "log_likelihood": [], "log_prior": []}

    def add(self, nodes: Mapping[str, Any], lp: Tensor, log_q: Tensor, log_likelihood: Mapping[str, Tensor]) -> None:
        """Adds a draw: sites of a run with log probabilities."""
        self.lp.append(lp)
        self.log_q.append(log_q)
        latents = [name for name, node in nodes.items() if role(node) == "latent"]
        self.groups["latents"].append({name: nodes[name]["value"] for name in latents if name not in self.states})
        self.groups["deterministic"].append({name: node["value"] for name, node in nodes.items() if role(node) == "deterministic"})
        self.groups["log_likelihood"].append(log_likelihood)
        self.groups["log_prior"].append({name: nodes[name]["log_prob_sum"].double() for name in latents if name not in self.local})

    def stack(self) -> dict[str, Any]:
        """All draws, by field of :class:`Draws`."""
        groups = {group: _stack(draws) for group, draws in self.groups.items()}
        return {"lp": torch.stack(self.lp), "log_q": torch.stack(self.log_q), **groups}


def _stack(draws: Iterable[Mapping[str, Any]]) -> Sites:
    """Values of all draws by name."""
    stacks: dict[str, list[Tensor]] = {}
    for values in draws:
        for name, value in values.items():
            stacks.setdefault(name, []).append(torch.as_tensor(value).detach())
    return {name: torch.stack(values) for name, values in stacks.items()}


def data_latents(nodes: Mapping[str, Any]) -> frozenset[str]:
    """Latents that lie in all plates of some data; others are parameters."""
    data = [site_plates(node) for node in nodes.values() if role(node) in ("data", "factor")]
    return frozenset(name for name, node in nodes.items() if role(node) == "latent" and any(p and p <= site_plates(node) for p in data))


def data_plate_sizes(nodes: Mapping[str, Any]) -> dict[str, int]:
    """Returns sizes of the plates of all data, from left to right."""
    data = [node for node in nodes.values() if role(node) == "data"] or [node for node in nodes.values() if role(node) == "factor"]
    shared = frozenset.intersection(*map(site_plates, data)) if data else frozenset()
    frames = {frame.name: frame for node in data for frame in node["cond_indep_stack"] if frame.name in shared}
    return {frame.name: int(frame.size) for frame in sorted(frames.values(), key=lambda frame: frame.dim)}


def joint_name(nodes: Mapping[str, Any], names: Collection[str]) -> str:
    """Names the likelihood of several sites by its data or factors."""
    members = [name for name in names if role(nodes[name]) == "data"] or [name for name in names if role(nodes[name]) == "factor"]
    # The observations of a long sequence would make a name that files cannot hold.
    return "_".join(members) if len(members) <= 4 else f"{members[0]}_to_{members[-1]}"


def likelihoods_given_all(nodes: Mapping[str, Any]) -> Sites:
    """Log probabilities of the observations given everything else, by site.

    The density of a ``pyro.factor`` joins that of data in the same plates.
    """
    log_probs = {name: node["log_prob"].double() for name, node in nodes.items() if role(node) == "data"}
    for name, node in nodes.items():
        if role(node) != "factor":
            continue
        host = next((other for other in log_probs if site_plates(nodes[other]) == site_plates(node)), None)
        if host is not None:
            log_probs[host] = log_probs[host] + node["log_prob"].double()
        elif site_plates(node):
            log_probs[name] = node["log_prob"].double()
    return log_probs


def refuse_subsamples(nodes: Mapping[str, Any]) -> None:
    """Checks that the model takes all data."""
    for node in nodes.values():
        for frame in node["cond_indep_stack"]:
            if frame.vectorized and frame.size != (frame.full_size or frame.size):
                raise ValueError(
                    f"to_arviz needs all {frame.full_size} data points; the model subsampled {frame.size} of them in {frame.name}. Pass "
                    "arguments with which it, and a create_plates of the guide, take the full data: subsample_size=None."
                )


def draw(call: Call, guide: Any, num_draws: int) -> Draws:
    """Draws latents from a guide of the model that is called."""
    if not callable(guide):
        raise TypeError(f"guide must be a Pyro guide: an autoguide, a list of them, or a function; got {type(guide).__name__}")
    if isinstance(guide, AutoTruncated) and guide.master is None:
        guide.setup(*call.args, **call.kwargs)
        if not guide.layout.other_latents and guide.layout.plates and guide.product is None:
            return draw_states(call, guide, num_draws)
    program: _Program | None = None
    accumulator: _Accumulator | None = None
    with _plates_like_the_model(guide, call):
        part = _find_truncated_guide(call, guide)
        for _ in range(num_draws):
            guide_trace = trace_guide(call, guide)
            if part is None or part.product is not None:
                program = program or _Program(call, guide_trace, part)
                program.add(guide_trace)
                continue
            log_joint = part.make_scorer(*call.args, values=_values_of_others(part, guide_trace), **call.kwargs)
            refuse_subsamples(log_joint.nodes)
            accumulator = accumulator or _Accumulator(call, part, log_joint, num_draws)
            accumulator.add(log_joint, guide_trace, call.with_program(poutine.replay(call.model, trace=guide_trace)).trace())
        gathered = program or accumulator
        assert gathered is not None
        return gathered.result()


def _find_truncated_guide(call: Call, guide: Any) -> AutoTruncated | None:
    """The truncated guide that takes part when a guide runs."""
    with spare_random_numbers():
        nodes = sample_nodes(trace_guide(call, guide)).values()
    marks: list[Any] = [mark for node in nodes if (mark := node["infer"].get("truncated")) is not None]
    parts: list[AutoTruncated] = list(dict.fromkeys(mark["guide"]() for mark in marks))
    if len(parts) > 1:
        raise ValueError(f"to_arviz converts guides with one AutoTruncated part; this one has {len(parts)}")
    return parts[0] if parts else None


@contextlib.contextmanager
def _plates_like_the_model(guide: Any, call: Call) -> Iterator[None]:
    """A context in which a guide list takes all data."""
    if not isinstance(guide, AutoGuideList) or guide.prototype_trace is None or guide.create_plates is not None:
        yield
        return
    with spare_random_numbers(), poutine.block():
        nodes = poutine.trace(call).get_trace().nodes.values()
    frames = [frame for node in nodes if node["type"] == "sample" for frame in node["cond_indep_stack"] if frame.vectorized]
    full = {frame.name: frame for frame in frames if frame.size == (frame.full_size or frame.size)}
    guide.create_plates = lambda *_, **__: [pyro.plate(name, frame.size, dim=frame.dim) for name, frame in full.items()]
    try:
        yield
    finally:
        guide.create_plates = None


def trace_guide(call: Call, guide: Any) -> poutine.Trace:
    """Runs a guide: a callable, or an effect around the model."""
    effect: Any = poutine.unwrap(guide)
    is_effect = isinstance(effect, Messenger)
    if is_effect:
        guide(*call.args, **call.kwargs)
    return effect.get_traces()[1] if is_effect else poutine.trace(call.with_program(guide)).get_trace()


class _Program:
    """A model whose latents come from guide, enumeration, or the model."""

    def __init__(self, call: Call, guide_trace: poutine.Trace, part: AutoTruncated | None) -> None:
        self.call = call
        with spare_random_numbers():
            self.nodes = sample_nodes(self._run({name: node["value"] for name, node in sample_nodes(guide_trace).items()}))
        refuse_subsamples(self.nodes)
        missing = [name for name, node in self.nodes.items() if role(node) == "latent" and name not in guide_trace]
        enumerable = [
            name for name in missing if self.nodes[name]["fn"].support.is_discrete and self.nodes[name]["fn"].has_enumerate_support
        ]
        self.drawn_anew = frozenset(missing) - set(enumerable)
        self._refuse_prior_draws()
        self.enumeration = Enumeration(call, self.nodes, enumerable, self.drawn_anew) if enumerable else None
        inside = frozenset() if self.enumeration is None else frozenset(self.enumeration.inside)
        self.local = data_latents(self.nodes) | {name for name in inside if role(self.nodes[name]) == "latent"}
        self.leaves = leaves(call, self.nodes, self.local - set(enumerable))
        self.collector = Collector(self.local)
        self.part = part if part is not None and part.layout.plates and self.enumeration is None else None
        if self.part is not None and self.local - self.leaves - self.part.discrete_sites:
            # What other guides draw for each data point is not summed out.
            self.part = None
        self.inside = [] if self.enumeration is None else self.enumeration.inside
        # What other guides drew last, and the evidence given it.
        self.others: Mapping[str, Any] | None = None
        self.marginal = torch.empty(())
        if self.part is not None:
            scorer = self.part.batch(call, _values_of_others(self.part, guide_trace)).scorer
            self.inside = [name for name, node in self.nodes.items() if scorer.is_inside(node)]

    def _refuse_prior_draws(self) -> None:
        unknown = sorted(self.drawn_anew - leaves(self.call, self.nodes, self.drawn_anew))
        if unknown:
            raise ValueError(
                f"the guide has no distribution for the latents {unknown}, and they would be drawn from their prior, not from a posterior. "
                "Give to_arviz the guide that was trained with this model; for discrete latents, AutoTruncated or enumeration."
            )

    def _run(self, values: Mapping[str, Any]) -> poutine.Trace:
        with isolate(), Assign(values):
            return self.call.trace()

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
            if self.enumeration.plates:
                likelihoods = self._with_marginal(likelihoods, self.enumeration.log_likelihood(values, self.leaves))
        if self.part is not None:
            others = _values_of_others(self.part, guide_trace)
            if self.others is None or not _are_equal(others, self.others):
                with torch.no_grad(), poutine.block():
                    batch: Any = self.part.batch(self.call, others)
                    self.marginal, self.others = batch.evidence().reshape(batch.scorer.sizes), others
            likelihoods = self._with_marginal(likelihoods, self.marginal)
        guide_trace.compute_log_prob()
        log_weight = evidence - torch.as_tensor(guide_trace.log_prob_sum()).double()
        self.collector.add(nodes, lp, lp - log_weight, likelihoods)

    def _with_marginal(self, likelihoods: dict[str, Tensor], marginal: Tensor) -> dict[str, Tensor]:
        """Replaces likelihoods given discrete draws by one with them summed out."""
        others = {name: value for name, value in likelihoods.items() if name not in self.inside}
        return {joint_name(self.nodes, self.inside): marginal, **others}

    def result(self) -> Draws:
        plates, summed_out = {}, frozenset[str]()
        if self.enumeration is not None:
            plates, summed_out = self.enumeration.plates, self.enumeration.local
        if self.part is not None:
            frames = {frame.name: int(frame.size) for node in self.nodes.values() for frame in node["cond_indep_stack"]}
            plates, summed_out = {name: frames[name] for name in self.part.layout.plates}, frozenset(self.part.discrete_sites)
        return Draws(
            nodes=self.nodes,
            **self.collector.stack(),
            local=self.local,
            conditional_on=self.local - summed_out - self.leaves,
            plates=plates or data_plate_sizes(self.nodes),
            joint=joint_name(self.nodes, self.inside) if plates else "",
        )


def _values_of_others(part: AutoTruncated, guide_trace: poutine.Trace) -> dict[str, Any]:
    """What a run of a guide has drawn beside one part."""
    own = {*part.discrete_sites, *part.index_names}
    return {name: node["value"] for name, node in guide_trace.nodes.items() if node["type"] == "sample" and name not in own}


def _are_equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(torch.as_tensor(first[name]), torch.as_tensor(second[name])) for name in first)


def draw_states(call: Call, guide: AutoTruncated, num_draws: int) -> Draws:
    """Draws states where data points have no other latents."""
    with poutine.block():
        log_joint = guide.make_scorer(*call.args, **call.kwargs)
    refuse_subsamples(log_joint.nodes)
    population = guide.rescore(log_joint)
    free_energy = population.free_energy()
    index = torch.multinomial(population.weights(), num_draws, replacement=True).mT
    scores = population.log_joint.double().gather(1, index.mT).mT
    log_q = (scores - free_energy).sum(1)
    name = _likelihood_name(log_joint)
    likelihood = {name: free_energy.expand(num_draws, -1)} if name else {}
    states = States(guide, log_joint, population, _certify_covered_mass(log_joint, population), index)
    lp = scores.sum(1) + log_joint.outside()
    draws = Draws(
        log_joint.nodes, {}, {}, lp, log_q, likelihood, {}, frozenset(guide.layout.sites), frozenset(), _plates(log_joint), name, states
    )
    if any(role(node) == "deterministic" for node in log_joint.nodes.values()):
        runs = (sample_nodes(trace).items() for trace in _trace_draws(call, draws))
        draws.deterministic = _stack({name: node["value"] for name, node in run if role(node) == "deterministic"} for run in runs)
    return draws


def _trace_draws(call: Call, draws: Draws) -> Iterator[poutine.Trace]:
    """The model's run on each draw of the latents."""
    for position in range(len(draws.lp)):
        with isolate(), Assign(draws.values(position)):
            trace = call.trace()
        yield trace


def _certify_covered_mass(log_joint: LogJoint, population: Population, max_states: int = 2**22) -> Tensor:
    """Returns the certificate of covered mass from affordable states."""
    per_parent = len(population) * max(1, Moves(population.space, population.words.device, MOST_MOVES).count)
    return certificate(log_joint, population, max(1, min(population.num_states, max_states // per_parent)))


def _plates(log_joint: LogJoint) -> dict[str, int]:
    return dict(zip(log_joint.layout.plates, log_joint.sizes, strict=True)) or data_plate_sizes(log_joint.nodes)


def _likelihood_name(log_joint: LogJoint) -> str:
    return joint_name(log_joint.nodes, [name for name, node in log_joint.nodes.items() if log_joint.is_inside(node)])


class _Accumulator:
    """States and other latents, with populations averaged over draws."""

    def __init__(self, call: Call, part: AutoTruncated, log_joint: LogJoint, num_draws: int) -> None:
        self.part, self.log_joint, self.num_draws = part, log_joint, num_draws
        nodes = log_joint.nodes
        self.is_global = not part.layout.plates
        inside = frozenset(name for name, node in nodes.items() if log_joint.is_inside(node))
        self.local = data_latents(nodes) if self.is_global else inside
        self.leaves = leaves(call, nodes, self.local & set(part.layout.other_latents))
        self.collector = Collector(self.local, part.layout.sites)
        self.index: list[Tensor] = []
        self.covered_mass: list[Tensor] = []
        self.weights, self.free_energy = torch.zeros(()), torch.zeros(())
        self.has_likelihood = True
        self.conditional_on: frozenset[str] = frozenset()

    def add(self, log_joint: LogJoint, guide_trace: poutine.Trace, model_trace: poutine.Trace) -> None:
        """Adds a draw of the global sites: its populations and traces."""
        population = self.part.rescore(log_joint)
        self.weights = self.weights + population.weights().double() / self.num_draws
        self.free_energy = self.free_energy + population.free_energy() / self.num_draws
        # The certificate scores all neighbours of states: it is the mean over the first eight draws.
        if len(self.covered_mass) < 8:
            self.covered_mass.append(_certify_covered_mass(log_joint, population))
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
        """Log likelihoods with the states of data points summed out."""
        if self.is_global:
            self.conditional_on = self.local - self.leaves
            return likelihoods_given_all(nodes)
        value = self._marginal_likelihood(log_joint, population) if self.has_likelihood else None
        self.has_likelihood = value is not None
        name = _likelihood_name(log_joint)
        return {} if value is None or not name else {name: value}

    def _marginal_likelihood(self, log_joint: LogJoint, population: Population) -> Tensor | None:
        r"""Each data point's log likelihood given the other latents.

        It is the free energy less the log prior of the point's own latents that another guide draws. For those of a ``conditional`` the
        free energy holds :math:`\log p - \log q` already. Leaves are left out of the sum.
        """
        local = [name for name in log_joint.layout.other_latents if name in self.local]
        if not local:
            return population.free_energy()
        terms = log_joint.runs.log_probs(population.words[:, :2])
        own_sites = [name for name in local if name in terms and f"conditional of {name}" not in terms]
        self.conditional_on = frozenset(own_sites) - self.leaves if log_joint.conditional is None else frozenset()
        self.conditional_on |= (log_joint.uncovered_latents & self.local) - self.leaves - set(terms)
        free_energy = population.free_energy()
        if self.leaves & set(own_sites):
            free_energy = _free_energy_without(log_joint, population, self.leaves)
        for name in self.conditional_on & set(own_sites):
            # A term that varies with the states has one entry for either of them.
            if terms[name].shape[0] > 1:
                return None
            free_energy = free_energy - terms[name].reshape(-1)
        return free_energy

    def result(self) -> Draws:
        # Log joints that give back both means.
        population = self.part.rescore(self.log_joint)
        population = dataclasses.replace(population, log_joint=self.weights.log() + self.free_energy.unsqueeze(-1))
        states = States(self.part, self.log_joint, population, torch.stack(self.covered_mass).mean(0), torch.stack(self.index))
        local = self.local | (frozenset() if self.is_global else frozenset(self.part.layout.sites))
        return Draws(
            nodes=self.log_joint.nodes,
            **self.collector.stack(),
            local=local,
            conditional_on=self.conditional_on,
            plates=_plates(self.log_joint),
            joint="" if self.is_global else _likelihood_name(self.log_joint),
            states=states,
        )


def _free_energy_without(log_joint: LogJoint, population: Population, names: frozenset[str]) -> Tensor:
    """Returns free energies ``(N,)`` of log joints without some sites."""
    scores = []
    for _, states in log_joint.gradient_blocks(population.num_states):
        terms = log_joint.runs.log_probs(population.words[:, states])
        scores.append(sum_block({name: term for name, term in terms.items() if name not in names}))
    return torch.cat(scores).double().logsumexp(0)


def prior_draws(call: Call, num_samples: int) -> tuple[Sites, Sites]:
    """Draws latents, computed values and observations ``(draws, *shape)`` from the prior."""
    latents, observed = zip(*(_split_sites(_free_run(call, {})) for _ in range(num_samples)), strict=True)
    return _stack(latents), _stack(observed)


def posterior_draws(call: Call, draws: Draws, positions: Sequence[int], *, new_latents: bool) -> Sites:
    """Observations drawn given draws of the latents, ``(draws, *shape)`` by site.

    With ``new_latents`` the latents of data points are drawn from their prior: predictions of unseen data points. Otherwise the data
    points that were inferred are repeated, which favours the model.
    """
    left_out = draws.local if new_latents else frozenset()
    latents = ({name: value for name, value in draws.values(position).items() if name not in left_out} for position in positions)
    return _stack(_split_sites(_free_run(call, values))[1] for values in latents)


def conditional_likelihoods(call: Call, draws: Draws) -> Sites:
    """Log likelihoods of the observations given all drawn latents, ``(draws, *batch shape)`` by site."""
    log_probs = []
    for trace in _trace_draws(call, draws):
        trace.compute_log_prob()
        log_probs.append({name: value.cpu() for name, value in likelihoods_given_all(sample_nodes(trace)).items()})
    return _stack(log_probs)


def _free_run(call: Call, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Runs the model without observations, with some latents given."""
    with isolate(), Assign(values), FreeData():
        return sample_nodes(poutine.trace(call).get_trace())


def _split_sites(nodes: Mapping[str, Any]) -> tuple[Sites, Sites]:
    """Values of latents, and of observations."""
    latents: Sites = {}
    observed: Sites = {}
    for name, node in nodes.items():
        if role(node) != "factor":
            (observed if role(node) == "data" else latents)[name] = torch.as_tensor(node["value"]).cpu()
    return latents, observed
