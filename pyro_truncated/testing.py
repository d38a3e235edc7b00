"""Checks to run against a model of one's own.

They look at its log joints one state at a time, and at whether a guide keeps its promises.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.guide.product_posterior import ProductPosterior
from pyro_truncated.program.call import Call
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.supports import log_prob_on_support
from pyro_truncated.utils.arrays import rounding_tolerance

__all__ = ["check_guide", "enumerate_log_joint"]


@torch.no_grad()
def enumerate_log_joint(
    guide: AutoTruncated, *args: Any, max_states: int = 4096, values: Mapping[str, Any] | None = None, **kwargs: Any
) -> Tensor:
    r"""Returns log joints :math:`\log p(s, y_n)` of *all* states.

    Each needs one plain run of the model, which is slow but independent of vectorisation.

    Nothing is vectorised over states here, so this also shows whether a model copes with the additional left-most dimension in which
    :class:`~pyro_truncated.AutoTruncated` puts them. The log evidence of the data points is ``enumerate_log_joint(...).logsumexp(-1)``.

    Example:
        >>> y = linear_bars(5, 3, mean_active=2.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=8).infer(y, ExhaustiveSearch(), steps=1)
        >>> evidence = enumerate_log_joint(guide, y).logsumexp(-1)
        >>> bool((guide.population().free_energy() <= evidence + 1e-4).all())
        True

    Args:
        guide: the guide, trained or not, with ``num_states=1`` if need be.
        *args: the model's positional arguments.
        max_states: largest space that is enumerated.
        values: other latents by site name. Default: drawn once, as the guide draws them.
        **kwargs: the model's keyword arguments.

    Returns:
        ``(N, T)`` for the ``T`` states of one data point, in the order of ``guide.space.enumerate()``.

    Raises:
        ValueError: if the space has more than ``max_states`` states.
        NotImplementedError: for a guide with a ``conditional``, whose log joints depend on its draws.
    """
    log_joint = _scorer(guide, args, kwargs, values)
    if guide.space.size > max_states:
        raise ValueError(f"the space has {guide.space.readable_size} states per data point, more than max_states={max_states}")
    words = guide.space.enumerate(log_joint.device)
    return _one_by_one(log_joint, words.expand(log_joint.num_data, *words.shape[-2:]))


@torch.no_grad()
def check_guide(guide: AutoTruncated, *args: Any, max_states: int = 1024, **kwargs: Any) -> None:
    r"""Asserts what an :class:`~pyro_truncated.AutoTruncated` guide promises, on the model's own arguments.

    * The states of each data point are distinct.
    * Their log joints, scored together, equal those of plain runs of the model, one state at a
      time. Otherwise the model does not vectorise over a left-most dimension, or is random beyond
      its sample sites (dropout).
    * No free energy :math:`\log \sum_{s \in K_n} p(s, y_n)` exceeds the exact log evidence, in spaces of up to ``max_states`` states.
    * A new guide that loads the ``state_dict`` holds the same populations.

    Example:
        >>> y = linear_bars(5, 3, mean_active=2.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> check_guide(AutoTruncated(model, num_states=8).infer(y, ExhaustiveSearch(), steps=1), y)

    Args:
        guide: the guide, alone or in an :class:`~pyro.infer.autoguide.AutoGuideList` (others are drawn once).
        *args: the model's positional arguments.
        max_states: largest space whose evidence is computed.
        **kwargs: the model's keyword arguments.

    Raises:
        AssertionError: saying what does not hold.
        ValueError: if states repeat, which guides check themselves.
        NotImplementedError: for a guide with a ``conditional``.
    """
    guide.setup(*args, **kwargs)
    if guide.product is not None:
        _check_product(guide, args, kwargs, max_states)
        return
    log_joint = _scorer(guide, args, kwargs, None)
    population = guide.population(log_joint.indices)

    together, single = log_joint.score(population.words), _one_by_one(log_joint, population.words)
    _assert_equal(together, single)
    if guide.space.size <= max_states:
        words = guide.space.enumerate(guide.words.device).expand(log_joint.num_data, -1, -1)
        evidence = _one_by_one(log_joint, words).double().logsumexp(-1)
        excess = together.double().logsumexp(-1) - evidence
        assert bool((excess <= rounding_tolerance(single)).all()), (
            f"the free energy of data point {int(excess.argmax())} of the batch exceeds its log evidence by {float(excess.max()):.3g}"
        )

    _check_state_dict(guide)


def _check_product(guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any], max_states: int) -> None:
    """The contract of a guide with sets of states for each node."""
    call = Call(guide.model, args, kwargs)
    batch = guide.batch(call, guide.other_values(call))
    for population in batch.rescore():
        assert not len(population.find_duplicates()), f"states repeat within {len(population.find_duplicates())} sets"
    assert batch.scorer.takes_sets(), "the densities of the model on sets of states differ from those on single states"
    if guide.space.size <= max_states:
        evidence = enumerate_log_joint(guide, *args, max_states=max_states, values=batch.scorer.values, **kwargs).double().logsumexp(-1)
        excess = float((ProductPosterior([batch]).free_energy() - evidence).max())
        assert excess <= 1e-6 * (1.0 + float(evidence.abs().max())), f"a free energy exceeds its log evidence by {excess:.3g}"
    _check_state_dict(guide)


def _check_state_dict(guide: AutoTruncated) -> None:
    fresh = AutoTruncated(guide.model, guide.num_states, max_count=guide.max_count)
    fresh.load_state_dict(guide.state_dict())
    for name, value in guide.state_dict().items():
        assert torch.equal(fresh.state_dict()[name].nan_to_num(), value.nan_to_num()), f"'{name}' does not survive saving and loading"


def _scorer(guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any], values: Mapping[str, Any] | None) -> LogJoint:
    if guide.conditional is not None:
        raise NotImplementedError(
            "with a conditional, log joints depend on its draws; compare free energies with a collapsed model instead"
        )
    guide.setup(*args, **kwargs)
    if guide.product is not None:
        values = {**guide.other_values(Call(guide.model, args, kwargs)), **(values or {})}
        guide = AutoTruncated(guide.model, 1, max_count=guide.max_count, whole_states=True)
        guide.setup(*args, **kwargs)
    return guide.make_scorer(*args, values={**guide.other_values(Call(guide.model, args, kwargs)), **(values or {})}, **kwargs)


def _one_by_one(log_joint: LogJoint, words: Tensor) -> Tensor:
    """Returns log joints ``(N, C)`` of packed states ``(N, C, num_words)``."""
    layout = log_joint.layout
    columns = []
    for column in layout.space.unpack(words).unbind(1):
        states = layout.site_values(column, log_joint.sizes, log_joint.dtypes)
        states = {name: value for name, value in states.items() if name not in log_joint.observed_sites}
        # A state outside the support of an observation has probability zero: to the model it is no mistake.
        with poutine.block(), pyro.validation_enabled(False):
            trace = log_joint.call.with_program(poutine.condition(log_joint.call.model, data={**log_joint.values, **states})).trace()
        columns.append(_per_data_point(trace, log_joint))
    scores = torch.stack(columns, -1)
    levels = log_joint.known_levels
    return scores if levels is None else scores.masked_fill(levels.contradicts(words), -torch.inf)


def _per_data_point(trace: poutine.Trace, log_joint: LogJoint) -> Tensor:
    """Log probability ``(N,)`` of everything inside the data plates."""
    layout = log_joint.layout
    total = torch.zeros(log_joint.num_data, device=log_joint.device)
    nodes: list[Any] = list(trace.nodes.values())
    for node in nodes:
        plates = {frame.name for frame in node["cond_indep_stack"]} if node["type"] == "sample" else set()
        if node["type"] != "sample" or site_is_subsample(node) or not plates >= set(layout.plates):
            continue
        # A latent that is summed out has a distribution whether masked or not.
        mask = None if node["name"] in layout.sites and not (node["is_observed"] or node["name"] in log_joint.idle) else node["mask"]
        log_prob = scale_and_mask(log_prob_on_support(node["fn"], node["value"]), node["scale"] / log_joint.scale, mask)
        log_prob = log_prob.movedim(layout.dims, tuple(range(len(layout.dims)))) if layout.dims else log_prob
        total = total + log_prob.reshape(log_joint.num_data, -1).sum(-1)
    return total


def _assert_equal(together: Tensor, single: Tensor) -> None:
    difference = torch.where(together == single, 0.0, together.double() - single.double()).abs()
    wrong = (~(difference <= rounding_tolerance(single))).nonzero()
    if len(wrong):
        row, column = wrong[0].tolist()
        raise AssertionError(
            f"the log joints of {len(wrong)} of {single.numel()} states differ from those of plain runs of the model (first: data point "
            f"{row}, {float(together[row, column]):.6g} instead of {float(single[row, column]):.6g}). "
            "The model must take a new left-most dimension of its discrete sites for a batch, and be random nowhere else."
        )
