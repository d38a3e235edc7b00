"""How the states of a model are scored.

They are scored together in a new left-most dimension, by ``torch.func.vmap``, or one after the
other.
"""

from __future__ import annotations

import contextlib
import linecache
import re
import sysconfig
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_truncated.program.candidate_runs import CandidateRuns, RunMode, sum_block
from pyro_truncated.program.changing_sites import ChangingSitesError
from pyro_truncated.program.densities import coarsest_dtype
from pyro_truncated.program.linear_sites import linear_superpositions
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.operations import BROADCASTS, recognisable_size
from pyro_truncated.program.packed_scoring import PackedModel
from pyro_truncated.program.provenance import FollowLatents
from pyro_truncated.program.zero_probabilities import certain_values, impossible_entries
from pyro_truncated.utils.arrays import rounding_tolerance
from pyro_truncated.utils.budget import memory_budget as within_budget
from pyro_truncated.utils.parameter_store import isolate, spare_random_numbers

_HERE = str(Path(__file__).parents[1])
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(pyro.__file__).parent), str(Path(torch.__file__).parent), _HERE)
_REDUCTIONS = "(sum|mean|prod|max|min|amax|amin|all|any|cumsum|cumprod|logsumexp|softmax)"
# What is slow, by how it looks, and what to write in its place.
_IDIOMS = (
    (r"\bif\b|\bwhile\b", "torch.where(condition, this, that)"),
    (r"\.item\(\)|\bint\(|\bfloat\(|\brange\(", "tensors throughout, Vindex(table)[..., z] for look-ups"),
    (
        r"@|\bmatmul\b|\bmv\b|\bmm\b|\beinsum\b",
        "(X * coefficients).sum(-1) (for X @ coefficients), s @ W.mT (for s in the data plate)",
    ),
    (r"\[\s*:\s*,", "s[..., 0] (for s[:, 0])"),
    (r"\[[^\]:.]+\]", "Vindex(table)[..., z] (for table[z]) and s[..., 0] (for s[0])"),
    (rf"{_REDUCTIONS}\(\s*(dim=)?-\d\s*\)", "a reduction over a plate that keeps its dimension, s.sum(-1, keepdim=True)"),
    (
        rf"{_REDUCTIONS}\(\s*(dim=)?[01]?\s*[,)]",
        "reductions that count from the right: s.sum(-1) over an event, s.sum(-1, keepdim=True) over a plate",
    ),
    (r"\b(cat|stack)\(", "torch.cat and torch.stack along a dimension counted from the right, dim=-1"),
    (r"\b(reshape|view|flatten|unsqueeze|squeeze|expand)\(", "shapes counted from the right, s.unsqueeze(-1)"),
)
_ANY_IDIOM = (
    "dimensions addressed from the right: s[..., 0], s.sum(-1) over an event, s.sum(-1, keepdim=True) over a plate, "
    "(X * coefficients).sum(-1), s @ W.mT, Vindex(table)[..., z]"
)


class VectorizationWarning(UserWarning):
    """A model cannot score states together; a slower way is used.

    Example:
        >>> def model(y):
        ...     s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.5)).to_event(1))
        ...     pyro.sample("y", dist.Normal(torch.ones(4, 3) @ s, 1.0).to_event(1), obs=y)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     loss = Truncated_ELBO().loss(model, AutoTruncated(model, num_states=8), torch.randn(4))
        >>> [warning.category.__name__ for warning in caught]
        ['VectorizationWarning']
    """


def choose_run_mode(log_joint: LogJoint) -> tuple[RunMode, bool]:
    """Chooses the fastest correct scoring by tests on a few states.

    States scored together are compared with states one by one. A slower way comes with a warning.

    Python code that looks at the values of discrete sites (``if (z > 1).any()``) may treat many
    states otherwise than each of them, whatever the tests show. Such states are scored one by one.

    Where a likelihood scores packed states, the model is not run on them, and nothing is slow; only Pyro's own ELBOs run it.

    Returns:
        How to score, and whether Pyro's own ELBOs can enumerate the states in parallel.
    """
    if log_joint.layout.space.size == 1:
        return "together", True
    if log_joint.packed_model is not None:
        is_enumerable = _try_many_states(log_joint, log_joint.packed_model)
        return ("together" if is_enumerable else "singly"), is_enumerable
    with torch.no_grad(), spare_random_numbers(), isolate():
        # Few data points may have states by chance that hide a difference. Many take a prime number of candidates: each of them beside
        # each of the next data point, of the one after it, and so on.
        space = log_joint.layout.space
        number = next(prime for prime in (2, 3, 5, 7, 11) if prime >= min(11, max(space.cardinalities) + (space.num_latents > 1)))
        words = _candidates(log_joint, max(number, 12 // max(1, log_joint.num_data)))
        single, _ = _terms(log_joint, words, "singly")
        if isinstance(single, ChangingSitesError):
            raise single
        if isinstance(single, Exception):
            # Whatever this is, it is no matter of dimensions: let the first use of the guide say it.
            return "together", True
        together, most_dims, reduced, is_random = _terms_together(log_joint, words, single)
        culprit, read = _difference(log_joint, together, single), log_joint.layout.read
        is_enumerable = most_dims <= log_joint.depth + 1 and not log_joint.layout.broadcasts_parts
        if is_random or (culprit is None and not read and reduced is None):
            return "together", is_enumerable
        # The draws of a conditional are no matter for vmap.
        is_mapped = log_joint.conditional is None and _difference(log_joint, _terms(log_joint, words, "vmap")[0], single) is None
        run_mode: RunMode = "vmap" if is_mapped else "singly"
        if isinstance(together, Exception):
            where, problem = _error_line(together), f"{type(together).__name__}: {next(iter(str(together).splitlines()), '')}"
        elif culprit is not None:
            where = _site_line(log_joint, culprit)
            problem = f"no error, but site '{culprit}' gets other log probabilities than for one state at a time"
        elif reduced is not None:
            where, problem = _site_line(log_joint, reduced), f"a sum, maximum or the like over all states at once reaches site '{reduced}'"
        else:
            where, problem = _read_line(log_joint), f"Python looks at values of {sorted(read)}, of all states at once"
    # In a later call the user knows it already.
    if log_joint.run_mode == "together":
        _warn(run_mode, where, problem)
    return run_mode, False


def _terms_together(
    log_joint: LogJoint, words: Tensor, single: dict[str, Tensor]
) -> tuple[dict[str, Tensor] | Exception, int, str | None, bool]:
    """Scores of states together or an error, and their most dimensions.

    They come with a site that depends on several states by its operations, and with whether scores are random. It warns of sites that
    depend on the states of other data points.
    """
    order = _orders(log_joint, words.shape[1], log_joint.candidates_per_run())
    mixed, most_dims, reduced = _recorded_terms(log_joint, _take(words, order))
    site, read = _difference(log_joint, mixed, _reorder_candidates(single, order, words.shape[1])), log_joint.layout.read
    crossing = _crossing_site(log_joint, words)
    if site is None and not read:
        if crossing is not None:
            _warn_across_data(log_joint, crossing)
        return single, most_dims, reduced, False
    together, most_dims = _terms(log_joint, words, "together")
    if isinstance(together, Exception):
        together, most_dims = _with_broadcasts(log_joint, words, single, together, most_dims)
    # Where states together are scored as single ones, those of other data points are what differs.
    is_alike = not read and _difference(log_joint, together, single) is None
    return together, most_dims, reduced, _warn_if_unlike(log_joint, words, single, crossing or (site if is_alike else None))


def _crossing_site(log_joint: LogJoint, words: Tensor) -> str | None:
    """A site that depends on several data points by its operations."""
    if log_joint.conditional is not None or log_joint.num_data < 2:
        return None
    try:
        # In a run of one state of each data point nothing else can be reduced.
        return CandidateRuns(log_joint, None, "singly", ()).recorded_log_probs(words[:, :1])[1]
    except Exception:  # whatever a program raises where operations are recorded, such as torch of loops
        return None


def _with_broadcasts(
    log_joint: LogJoint, words: Tensor, single: dict[str, Tensor], error: Exception, most_dims: int
) -> tuple[dict[str, Tensor] | Exception, int]:
    """Scores of a model whose parts are broadcast, or the error."""
    for log_joint.layout.broadcasts_parts in BROADCASTS[1:]:
        terms, dims = _terms(log_joint, words, "together")
        if _difference(log_joint, terms, single) is None:
            return terms, dims
    log_joint.layout.broadcasts_parts = ""
    return error, most_dims


def _orders(log_joint: LogJoint, number: int, most: int) -> Tensor:
    """Which of its candidates each data point takes beside others, ``(N, M)``.

    They are digits of its position: those of two data points differ in one at least. The first base is the number of candidates that
    differ in all latents. The second is that of all, with digits plus one, two, and so on. There are as many as a run holds.
    """
    space, num_data = log_joint.layout.space, log_joint.num_data
    rows = torch.arange(num_data, device=log_joint.device)
    apart = min(number, 2 if space.num_latents > 1 else 3)
    digits: dict[int, list[Tensor]] = {}
    for base in (apart, number):
        digits[base], power = [rows % base], base
        while power < num_data:
            digits[base].append(rows // power % base)
            power *= base
    columns = [*digits[apart], *((digit + turn) % number for turn in range(number) for digit in digits[number])]
    return torch.stack(columns, 1)[:, : max(len(digits[apart]), most)]


def _take(words: Tensor, order: Tensor) -> Tensor:
    return words.gather(1, order.unsqueeze(-1).expand(-1, -1, words.shape[2]))


def _recorded_terms(log_joint: LogJoint, words: Tensor) -> tuple[dict[str, Tensor] | Exception, int, str | None]:
    """Scores of states together, their most dimensions, and a site.

    By its operations, the site depends on several candidates.
    """
    per_run, number, site = log_joint.candidates_per_run(), words.shape[1], None
    size = recognisable_size(log_joint.nodes, max(3, min(63, per_run)), number) if log_joint.conditional is None else None
    blocks, runs = [], CandidateRuns(log_joint, None, "together", ())
    try:
        if size is not None:
            terms, site = runs.recorded_log_probs(words[:, torch.arange(size, device=words.device) % number])
            blocks.append({name: term.expand(size, *term.shape[1:]) for name, term in terms.items()})
        for part in words[:, size or 0 :].split(per_run, 1) if number > (size or 0) else ():
            more, most_dims = _terms(log_joint, part, "together")
            if isinstance(more, Exception):
                return more, most_dims, None
            runs.most_dims = max(runs.most_dims, most_dims)
            blocks.append({name: term.expand(part.shape[1], *term.shape[1:]) for name, term in more.items()})
    except Exception as error:
        return error, runs.most_dims, None
    return {name: torch.cat([block[name] for block in blocks])[:number] for name in blocks[0]}, runs.most_dims, site


def _warn_if_unlike(log_joint: LogJoint, words: Tensor, single: dict[str, Tensor], name: str | None = None) -> bool:
    """Whether repeated scores of single states differ; warns of it.

    They are repeated beside other states of the other data points, so it also warns of sites that depend on those, if none is known.
    """
    for turn in () if name else _orders(log_joint, words.shape[1], 12).split(1, 1):
        terms, _ = _terms(log_joint, _take(words, turn), "singly")
        name = _difference(log_joint, terms, _reorder_candidates(single, turn, words.shape[1]))
        if name is not None:
            break
    if not name:
        return False
    random_site = _difference(log_joint, _terms(log_joint, words, "singly")[0], single)
    if random_site:
        warnings.warn(
            f"site '{random_site}' gets other log probabilities whenever the same states are scored: the model draws random numbers "
            "outside of sample sites (dropout, torch.randn, torch.randperm). Call .eval() of modules with dropout, draw noise by "
            "pyro.sample, and rows outside of the model or by subsample_size.",
            UserWarning,
            stacklevel=2,
        )
    else:
        _warn_across_data(log_joint, name)
    return random_site is not None


def _warn_across_data(log_joint: LogJoint, name: str) -> None:
    log_joint.layout.coupled_site = name
    warnings.warn(
        f"site '{name}' of a data point depends on the states of other data points: the model computes across the plates "
        f"{sorted(log_joint.layout.plates)} (a sum or mean over them, BatchNorm). Compute within data points, which the posterior "
        "takes to be independent, or make the plate an event.",
        UserWarning,
        stacklevel=2,
    )


def _reorder_candidates(terms: Mapping[str, Tensor], order: Tensor, number: int) -> dict[str, Tensor]:
    """Returns log probabilities ``(C, ..., N)`` with candidates in an order ``(N, K)``."""
    ordered_terms = {}
    for name, term in terms.items():
        index = order.mT.reshape(order.shape[1], *(1,) * (term.dim() - 2), len(order))
        ordered_terms[name] = torch.take_along_dim(term.expand(number, *term.shape[1:]), index, 0)
    return ordered_terms


def _try_many_states(log_joint: LogJoint, model: PackedModel, most: int = 2) -> bool:
    """Whether Pyro's own ELBOs could run the model on many states.

    Its scores must be those of the packed states. The model is not run if its states are scored packed.

    Where two states of every data point would not fit into the memory budget, it is taken for granted.
    """
    if log_joint.layout.read:
        return False
    if log_joint.candidates_per_run() < 2:
        return True
    with torch.no_grad(), spare_random_numbers(), isolate(), within_budget(log_joint.memory_budget):
        words = _candidates(log_joint, min(most, log_joint.candidates_per_run()))
        terms, most_dims = _terms(log_joint, words, "together")
        if isinstance(terms, Exception) or most_dims > log_joint.depth + 1:
            return False
        return _agree(sum_block(terms).movedim(0, -1), model.score(words))


def _candidates(log_joint: LogJoint, number: int) -> Tensor:
    """A draw from the prior, states near it, and random ones.

    Those near it lie in equal steps. The second differs in all latents, so that each shows, and the third in one, so that sums do. Latents
    of few values take each of them.
    """
    space, layout = log_joint.layout.space, log_joint.layout
    random = space.random((log_joint.num_data, number), 0.5, torch.Generator().manual_seed(0)).to(log_joint.device)
    try:
        levels = layout.encode_values({name: log_joint.nodes[name]["value"] for name in layout.sites}, log_joint.sizes)
    except ValueError:
        # A draw of a count beyond its bound.
        levels = space.unpack(random[:, 0], torch.int64)
    cardinalities = torch.tensor(space.cardinalities, device=levels.device)
    steps = [turn * cardinalities.clamp(min=number) // number for turn in range(min(number, max(space.cardinalities)))]
    if space.num_latents > 1:
        latents = torch.arange(space.num_latents, device=levels.device)
        rows = torch.arange(len(levels), device=levels.device).unsqueeze(-1)
        steps.insert(2, (latents == rows % space.num_latents).long())
    near = torch.stack([space.pack((levels + step) % cardinalities) for step in steps[:number]], 1)
    return torch.cat([near, random[:, near.shape[1] :]], 1)


def _terms(log_joint: LogJoint, words: Tensor, run_mode: RunMode) -> tuple[dict[str, Tensor] | Exception, int]:
    """Returns sites' log probabilities or an error, and their most dimensions."""
    # Latents of other guides are held fixed here: they count like data.
    runs = CandidateRuns(log_joint, log_joint.conditional, run_mode, uncovered_latents=(), fixed_values=log_joint.values)
    try:
        runs.fixed_values = {**runs.fixed_values, **runs.auxiliary_values()}
        return runs.log_probs(words), runs.most_dims
    except Exception as error:
        return error, runs.most_dims


def _difference(log_joint: LogJoint, actual: Mapping[str, Tensor] | Exception, expected: Mapping[str, Tensor] | Exception) -> str | None:
    """Returns the first site with differing log probabilities."""
    if isinstance(actual, Exception) or isinstance(expected, Exception):
        return ""
    for name, value in expected.items():
        # Those of a conditional have names of their own.
        dtypes = [coarsest_dtype(log_joint.nodes[name])] if name in log_joint.nodes else []
        other = actual.get(name)
        if other is None or not _agree(other, value, *dtypes):
            return name
    return None


def _agree(actual: Tensor, expected: Tensor, *dtypes: torch.dtype) -> bool:
    if actual.dim() != expected.dim() or any(one not in (1, size) for one, size in zip(actual.shape, expected.shape, strict=True)):
        return False
    # One state, without dimensions, adapts to the type of other tensors; many states do not.
    tolerance = rounding_tolerance(expected, actual.dtype, expected.dtype, *dtypes)
    return torch.allclose(actual.expand(expected.shape).double(), expected.double(), rtol=0.0, atol=tolerance, equal_nan=True)


# --- saying where ---


class _SiteLines(Messenger):
    """Notes the line of the user's code that samples each site."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, traceback.FrameSummary | None] = {}

    def _pyro_sample(self, msg: Any) -> None:
        self.lines[msg["name"]] = _user_frame(traceback.extract_stack())


def _site_line(log_joint: LogJoint, name: str) -> traceback.FrameSummary | None:
    with _SiteLines() as where:
        log_joint.call()
    return where.lines.get(name)


def _read_line(log_joint: LogJoint) -> traceback.FrameSummary | None:
    """Where Python first looks at the value of a latent."""
    with isolate(), pyro.validation_enabled(False), FollowLatents() as latents:
        log_joint.call.trace()
    return _user_frame(latents.stack)


def _error_line(error: Exception) -> traceback.FrameSummary | None:
    while error.__traceback__ is None and error.__cause__ is not None:
        error = error.__cause__  # type: ignore[assignment]
    return _user_frame(traceback.extract_tb(error.__traceback__))


def _user_frame(frames: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    """The innermost frame outside of libraries."""
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES) and not frame.filename.startswith("<frozen")]
    return own[-1] if own else None


def _warn(run_mode: RunMode, where: traceback.FrameSummary | None, problem: str) -> None:
    place = f"{where.filename}:{where.lineno}" if where is not None else "a line that cannot be told"
    source = linecache.getline(where.filename, where.lineno).strip() if where is not None and where.lineno is not None else ""
    idioms = [idiom for pattern, idiom in _IDIOMS if re.search(pattern, source)]
    way = "by torch.func.vmap" if run_mode == "vmap" else "one after the other"
    warnings.warn(
        f"the model does not take many states at once, so AutoTruncated scores them {way}, which is slower: at {place}"
        f"{f' ({source})' if source else ''}, {problem}. Fast would be {idioms[0] if idioms else _ANY_IDIOM}; "
        "AutoTruncated(..., vectorize=False) scores one state after the other without this warning.",
        VectorizationWarning,
        stacklevel=2,
    )


def run_mode_for(vectorize: bool | None, scorer: LogJoint, num_states: int) -> tuple[RunMode, bool]:
    """What the user chose, or what the model allows; see :func:`choose_run_mode`.

    Also looks for what makes scores cheap: linear means, and, where populations hold all states, that data points can share them.
    """
    layout = scorer.layout
    if scorer.device.type != "cpu":
        layout.clamped_sites |= _clamped_sites(scorer)
    if vectorize is not None:
        choice: tuple[RunMode, bool] = ("together", True) if vectorize else ("singly", False)
    else:
        choice = choose_run_mode(scorer)
    if choice[0] == "together" and layout.space.size <= num_states:
        layout.takes_shared_states = _takes_shared_states(scorer)
    if scorer.packed_model is not None:
        _refuse_other_scores(scorer, scorer.packed_model)
    is_plain = choice[0] == "together" and scorer.packed_model is None and scorer.conditional is None
    if is_plain and linear_superpositions(scorer, is_first=True):
        layout.is_linear = True
        again = LogJoint(scorer.call, layout, values=scorer.subsamples, memory_budget=scorer.memory_budget)
        layout.is_linear = again.packed_model is not None and _try_many_states(again, again.packed_model, 16)
    return choice


def _refuse_other_scores(log_joint: LogJoint, model: PackedModel) -> None:
    """Refuses a user's likelihood that scores packed states otherwise than states."""
    own = [fn for fn, _ in model.observations if not str(type(fn).packed_log_prob.__module__).startswith("pyro_truncated.")]
    if not own:
        return
    with torch.no_grad(), spare_random_numbers(), isolate(), within_budget(log_joint.memory_budget):
        words = _candidates(log_joint, 8)
        single, _ = _terms(log_joint, words, "singly")
        if isinstance(single, Exception) or _agree(model.score(words), sum_block(single).movedim(0, -1)):
            return
        if not _warn_if_unlike(log_joint, words, single):
            name = type(own[0]).__name__
            raise ValueError(
                f"{name}.packed_log_prob must be {name}.log_prob of the unpacked states, plus (states * state_logits).sum(-1) where "
                "state_logits are given; their log joints differ"
            )


def _takes_shared_states(log_joint: LogJoint) -> bool:
    """Whether the model takes states that all data points share in memory."""
    with torch.no_grad(), spare_random_numbers(), isolate():
        words = _candidates(log_joint, min(3, log_joint.candidates_per_run()))[:1].expand(log_joint.num_data, -1, -1)
        apart, _ = _terms(log_joint, words.contiguous(), "together")
        log_joint.layout.takes_shared_states = True
        shared, _ = _terms(log_joint, words, "together")
    return _difference(log_joint, shared, apart) is None


def _clamped_sites(log_joint: LogJoint) -> set[str]:
    """Returns sites with probabilities of zero, on a device.

    They are latents with probabilities of exactly zero or one, and observed sites that some states make impossible. All states of a
    small space are tested, and 16 of a large one.
    """
    space, nodes, most = log_joint.layout.space, log_joint.nodes, 16
    certain = {name: certain_values(nodes[name]["fn"]) for name in log_joint.layout.sites}
    names = {name for name, flags in certain.items() if flags is not None and bool((flags[0] | flags[1]).any())}
    # What is wrong with the data, their own check shall say.
    with torch.no_grad(), spare_random_numbers(), isolate(), contextlib.suppress(Exception):
        if any(node["is_observed"] and impossible_entries(node["fn"], node["value"]) is not None for node in nodes.values()):
            every = space.enumerate(log_joint.device).expand(log_joint.num_data, -1, -1) if space.size <= most else None
            names |= CandidateRuns(log_joint, None, "singly", ()).clamped_sites(_candidates(log_joint, most) if every is None else every)
    return names
