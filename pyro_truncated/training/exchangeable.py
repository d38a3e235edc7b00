"""Exchangeable latents or values, and their parameters.

The program itself shows which parameters belong to which latent.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.states.population import Population
from pyro_truncated.training.model_parameters import Medians
from pyro_truncated.utils.devices import device_of
from pyro_truncated.utils.parameter_store import spare_random_numbers

_NUM_STATES = 4
_MOST_TRIED = 64
_RELATIVE, _ABSOLUTE = 1e-4, 1e-3


class Exchangeable(NamedTuple):
    """Exchangeable latents of a site, or values of a single latent.

    Their parameters change places with them. Components of a mixture are an example.

    Attributes:
        latents: positions of theirs among the latents of a data point.
        axes: the axis along which the latents lie, by name of the parameters that have one.
        num_values: how many values the latent has, if these are what is exchanged, else zero.
    """

    latents: slice
    axes: dict[str, int]
    num_values: int = 0

    def replace_latents(self, state: dict[str, Tensor], here: Tensor, other: dict[str, Tensor], there: Tensor) -> dict[str, Tensor]:
        """Returns parameters with latents ``here`` replaced by ``there`` of ``other``."""
        moved = {}
        for name, axis in self.axes.items():
            to, origin = (index.to(state[name].device) for index in (here, there))
            moved[name] = state[name].index_copy(axis, to, other[name].index_select(axis, origin))
        return {**state, **moved}

    def perturb(self, state: dict[str, Tensor], here: Tensor, size: float, generator: torch.Generator | None) -> dict[str, Tensor]:
        """Adds noise to parameters of the latents ``here``.

        Its unit is the root mean square of the whole parameter.
        """
        moved = {}
        for name, axis in self.axes.items():
            value, to = state[name], here.to(state[name].device)
            chosen = value.index_select(axis, to)
            noise = torch.randn(chosen.shape, generator=generator, dtype=value.dtype, device=device_of(generator)).to(value.device)
            moved[name] = value.index_copy(axis, to, chosen + size * value.square().mean().sqrt() * noise)
        return {**state, **moved}

    def sums(self, state: dict[str, Tensor], here: int, other: int) -> list[dict[str, Tensor]]:
        """Returns parameters in which ``here`` shows itself plus ``other``.

        Vectors of latents are added. Of single numbers per latent, such as log odds, ``here`` keeps its own. Numbers may be part of
        what a latent shows too. So parameters in which everything is added come second, or alone if there is nothing else.
        """
        vectors = [name for name in self.axes if state[name].ndim > 1]
        chosen = [vectors, list(self.axes)] if 0 < len(vectors) < len(self.axes) else [list(self.axes)]
        return [{**state, **{name: self._add(state[name], self.axes[name], here, other) for name in names}} for names in chosen]

    @staticmethod
    def _add(value: Tensor, axis: int, here: int, other: int) -> Tensor:
        index = torch.tensor([here, other], device=value.device)
        return value.index_add(axis, index[:1], value.index_select(axis, index[1:]))

    def permute(self, levels: Tensor, order: Tensor) -> Tensor:
        """Permutes latents or values of unpacked states ``(..., L)`` by ``order``."""
        moved = levels.clone()
        chosen = levels[..., self.latents]
        moved[..., self.latents] = order.argsort()[chosen] if self.num_values else chosen[..., order]
        return moved

    def probabilities(self, population: Population) -> Tensor:
        """Returns posterior probabilities of latents or values, ``(N, H)``."""
        if self.num_values:
            return population.value_probabilities()[:, self.latents.start, : self.num_values]
        return population.marginals()[:, self.latents]

    def num_parameters(self, state: dict[str, Tensor]) -> int:
        """How many parameters each of the latents has."""
        return sum(state[name].numel() // state[name].shape[axis] for name, axis in self.axes.items())

    def distances(self, one: dict[str, Tensor], other: dict[str, Tensor], there: Tensor) -> Tensor:
        """Returns distances ``(H,)`` of parameters to those of ``there`` in ``other``.

        A root mean square in units of that of the whole parameter, of the parameter that differs most.
        """
        differences = []
        for name, axis in self.axes.items():
            value = one[name].movedim(axis, 0).reshape(len(there), -1)
            unit = value.square().mean().clamp(min=torch.finfo(value.dtype).tiny).sqrt()
            difference = value - other[name].movedim(axis, 0).reshape(value.shape)[there]
            differences.append(difference.square().mean(1).sqrt() / unit)
        return torch.stack([value.double() for value in differences]).amax(0)


def exchangeable_latents(learned: Medians, state: dict[str, Tensor]) -> list[Exchangeable]:
    r"""Finds the groups of latents that a program treats alike.

    They are exchangeable if :math:`p(P s, y \mid P \theta) = p(s, y \mid \theta)` for all permutations :math:`P`. These move the
    latents of the states, and the entries of the parameters along one axis each. It is tested with random states for two permutations
    that generate all others, and for axes as long as there are latents. Values of latents that are alone in their site are tested
    likewise.

    Args:
        learned: scores states; the populations of its guide stay as they are.
        state: parameters and medians, which must differ between latents, or anything seems exchangeable.

    Returns:
        Such groups of latents or values that have parameters of their own, the largest first.
    """
    with torch.no_grad(), spare_random_numbers():
        if any(frame.size < (frame.full_size or frame.size) for frame in learned.guide.frames.values()):
            return []
        groups = [_exchangeable(learned, state, *alike) for alike in _alike(learned.guide)]
        learned.load_snapshot(state)
        return [group for group in groups if group is not None]


def _alike(guide: AutoTruncated) -> list[tuple[slice, int]]:
    """Returns candidate groups: vectors of one cardinality, values of single latents.

    The longest come first.
    """
    start, found = 0, []
    for site in guide.layout.sites.values():
        latents = slice(start, start + site.num_latents)
        start = latents.stop
        if len(site.shape) == 1 and site.num_latents > 1 and len(set(site.cardinalities)) == 1:
            found.append((latents, 0))
        if site.num_latents == 1 and site.cardinalities[0] > 2:
            found.append((latents, site.cardinalities[0]))
    return sorted(found, key=lambda one: -max(one[0].stop - one[0].start, one[1]))


def _exchangeable(learned: Medians, state: dict[str, Tensor], latents: slice, num_values: int) -> Exchangeable | None:
    levels = _random_levels(learned.guide)
    words = learned.guide.space.pack
    expected = learned.scorer(state).score(words(levels))
    if not bool(expected.isfinite().all()):
        return None

    def is_same(group: Exchangeable, order: Tensor) -> bool:
        """Whether permuted latents and parameters have the same log joints."""
        permuted = learned.scorer(group.replace_latents(state, torch.arange(len(order)), state, order))
        return torch.allclose(permuted.score(words(group.permute(levels, order))), expected, rtol=_RELATIVE, atol=_ABSOLUTE)

    number = num_values or latents.stop - latents.start
    groups = (Exchangeable(latents, axes, num_values) for axes in _possible_axes(learned.learned(state), number))
    return next((group for group in groups if all(is_same(group, order) for order in _orders(number))), None)


def _possible_axes(parameters: dict[str, Tensor], number: int) -> Iterator[dict[str, int]]:
    """Yields axes by name, as many as possible first.

    There are at most some dozens of combinations.
    """
    choices = [[axis for axis, size in enumerate(value.shape) if size == number] + [None] for value in parameters.values()]
    for chosen in itertools.islice(itertools.product(*choices), _MOST_TRIED):
        axes = {name: axis for name, axis in zip(parameters, chosen, strict=True) if axis is not None}
        if axes:
            yield axes


def _orders(num_latents: int) -> list[Tensor]:
    """Returns a cycle and a transposition, which generate all permutations."""
    positions = torch.arange(num_latents)
    return [positions.roll(1), torch.cat([positions[:2].flip(0), positions[2:]])]


def _random_levels(guide: AutoTruncated) -> Tensor:
    """Unpacked states ``(N, C, L)`` of all data points."""
    generator = torch.Generator().manual_seed(0)
    cardinality = guide.space.cardinality
    uniform = torch.rand(guide.layout.num_data, _NUM_STATES, len(cardinality), generator=generator)
    return (uniform * cardinality).long().to(guide.words.device)
