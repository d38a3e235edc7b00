"""Posteriors of states averaged over draws of other latents.

Other guides or a conditional draw these latents.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.guide.batch import Batch
from pyro_truncated.guide.whole_model import WholeModelGuide
from pyro_truncated.program.call import Call
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arrays import rounding_tolerance
from pyro_truncated.utils.parameter_store import spare_random_numbers


class OneDrawWarning(UserWarning):
    """The posterior is given one draw of other latents, not averaged.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=8).infer(y, ExhaustiveSearch(), steps=1)
        >>> with warnings.catch_warnings(action="error", category=OneDrawWarning):  # such a reading would be an error here
        ...     marginals = guide.marginals()["s"]
    """


class _GivenSubsamples(Messenger):
    """Effect handler that records plates with subsamples of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        if site_is_subsample(msg) and msg["value"] is not None:
            self.names.add(msg["name"])


def draw_batches(
    guide: WholeModelGuide, call: Call, values: Mapping[str, Tensor], subsamples: Mapping[str, Tensor] | None = None
) -> Iterator[Any]:
    """Yields batches under draws of the latents of other guides."""
    for _ in range(guide.num_draws if values else 1):
        batch = guide.batch(call, {**values, **(subsamples or {})})
        yield batch
        subsamples = batch.scorer.subsamples
        next_values = guide.other_values(call, subsamples=subsamples)
        if all(torch.equal(values[name], next_values[name]) for name in values):
            return
        values = next_values


@torch.no_grad()
def average_over_draws(guide: WholeModelGuide, call: Call, subsamples: Mapping[str, Tensor] | None = None) -> Population | None:
    r"""Returns populations of the selected data points under averaged weights.

    The average is over ``guide.num_draws`` draws.

    With draws :math:`z_1, \dots, z_M` of the other latents these are

    .. math:: \bar q_n(s) = \frac1M \sum_m q_n(s \mid z_m), \qquad
              \log \bar q_n(s) + \frac1M \sum_m \log \sum_{s' \in K_n} p(s', y_n, z_m) \text{ in the place of log joints,}

    so that their free energy is the mean one. No random numbers are used up. Where the others' draws do not differ (``AutoDelta``) one is
    enough.

    A ``conditional`` that is not exact makes draws as well. Each is a state's importance weight
    :math:`w_m(s) = p(y_n, z_m, s) / q(z_m \mid s)`, whose mean is :math:`p(y_n, s)`. Log joints are
    then :math:`\log \frac1M \sum_m w_m(s)`.

    Returns:
        The populations, or ``None`` where nothing makes draws that differ.
    """
    with spare_random_numbers(), poutine.block():
        values = guide.other_values(call, subsamples=subsamples)
        if not values:
            has_draws = guide.conditional is not None and not guide.is_conditional_exact
            return _average_weights(guide, guide.batch(call, subsamples)) if has_draws else None
        num_draws, weights, free_energy = 0, torch.zeros(()), torch.zeros(())
        for batch in draw_batches(guide, call, values, subsamples):
            population: Population = batch.rescore()
            weights = weights + population.weights().double()
            free_energy = free_energy + population.free_energy()
            num_draws += 1
        log_joint = (weights / num_draws).log() + (free_energy / num_draws).unsqueeze(-1)
    return dataclasses.replace(population, log_joint=log_joint.to(population.log_joint.dtype))


def rescore_over_draws(guide: WholeModelGuide, batch: Batch) -> Population:
    """Returns populations with log joints, averaged over a conditional's draws."""
    population = _average_weights(guide, batch)
    return batch.rescore() if population is None else population


def _average_weights(guide: WholeModelGuide, batch: Batch) -> Population | None:
    """Returns populations with averaged log joints, or ``None``.

    ``None`` means that the draws of a conditional do not differ.

    There are ``guide.num_draws`` of them, and up to eight times as many until the posteriors of two halves agree to a hundredth.
    """
    if guide.conditional is None or guide.is_conditional_exact:
        return None
    population = batch.rescore()
    one, other = population.log_joint.double(), batch.rescore().log_joint.double()
    if guide.is_conditional_exact is None:
        tolerance = rounding_tolerance(one, population.log_joint.dtype)
        guide.is_conditional_exact = torch.allclose(one, other, rtol=0.0, atol=tolerance)
    if guide.is_conditional_exact:
        return None
    num_draws = 2
    # Where draws differ much, up to eight times as many are made.
    while num_draws < guide.num_draws or (num_draws < 8 * guide.num_draws and _distance(one, other) > 0.01):
        one, other = (torch.logaddexp(half, batch.rescore().log_joint.double()) for half in (one, other))
        num_draws += 2
    mean = torch.logaddexp(one, other) - math.log(num_draws)
    return dataclasses.replace(population, log_joint=mean.to(population.log_joint.dtype))


def _distance(one: Tensor, other: Tensor) -> float:
    """Returns the mean total variation between posteriors of log joints ``(N, S)``."""
    return 0.5 * float((one.softmax(-1) - other.softmax(-1)).abs().sum(-1).nan_to_num(0.0).mean())


@torch.no_grad()
def readable(guide: WholeModelGuide, indices: Tensor | None, call: Call | None) -> Population:
    """Returns the posterior of all or the given data points.

    It has their populations when last scored, with log joints averaged over draws of other guides.

    An ELBO that knows nothing of populations (the stock :class:`~pyro.infer.TraceEnum_ELBO`) scores them and stores nothing. Where
    nothing is stored of any data point they are therefore scored here, under the model as it is now; nothing is stored. Log joints are
    NaN where the model's last call does not reach.
    """
    store = guide.populations
    is_new = call is not None and bool(store.log_joint.isnan().all())
    population: Population = store.population(indices) if is_new else store.scored_population(indices)
    has_draws = _makes_draws(guide, call)
    is_done = store.average_mask.to(store.words.device)
    positions = torch.arange(len(is_done), device=is_done.device) if population.indices is None else population.indices.long()
    if not is_new and (not has_draws or bool(is_done[positions].all())):
        return population
    log_joint = store.log_joint.clone()
    if call is not None:
        with spare_random_numbers(), poutine.block():
            for subsamples in _batches(guide, call, positions):
                batch = average_over_draws(guide, call, subsamples) if has_draws else guide.batch(call, subsamples).rescore()
                assert batch is not None
                where = slice(None) if batch.indices is None else batch.indices
                # Where nothing is stored, the store does not have the type of the model's numbers yet.
                log_joint = log_joint.to(batch.log_joint.dtype)
                log_joint[where], is_done[where] = batch.log_joint, True
    num_missed = int((~is_done[positions]).sum())
    if num_missed and has_draws:
        warnings.warn(
            f"the posteriors of {num_missed} data points are those given one draw of the latents {guide.layout.other_latents}: "
            "the last call of the model did not reach them. Call guide.refresh_(*args) with the arguments of each minibatch, which "
            "averages over draws.",
            OneDrawWarning,
            stacklevel=3,
        )
    return dataclasses.replace(population, log_joint=log_joint[positions])


def _makes_draws(guide: WholeModelGuide, call: Call | None) -> bool:
    """Whether the posterior of the states differs for every draw."""
    if call is None:
        return guide.companions is not None or guide.is_conditional_exact is False
    with spare_random_numbers():
        if guide.other_values(call):
            return True
    if guide.conditional is not None and guide.is_conditional_exact is None:
        average_over_draws(guide, call)
    return guide.conditional is not None and not guide.is_conditional_exact


def _batches(guide: WholeModelGuide, call: Call, indices: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yields subsamples that together hold the wanted data points."""
    handler = _GivenSubsamples()
    with spare_random_numbers(), poutine.block():
        nodes = call.with_program(handler(call.model)).trace().nodes
    frames = {f.name: f for f in nodes[next(iter(guide.layout.sites))]["cond_indep_stack"] if f.name in guide.layout.plates}
    chunks: list[list[tuple[str, Tensor]]] = []
    for name, frame in frames.items():
        if name not in handler.names and frame.size != (frame.full_size or frame.size):
            positions = indices.unique() if len(frames) == 1 else torch.arange(int(frame.full_size or frame.size), device=indices.device)
            # All as large as the model's own: the last is filled up with positions that have had their turn.
            cycle = positions[torch.arange(-(-len(positions) // frame.size) * frame.size, device=indices.device) % len(positions)]
            chunks.append([(name, chunk) for chunk in cycle.split(frame.size)])
    yield from (dict(combination) for combination in itertools.product(*chunks))
