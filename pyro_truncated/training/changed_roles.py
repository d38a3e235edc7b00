"""Moves that swap categorical values and binary latents."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from pyro_truncated.states.population import Population
from pyro_truncated.training.exchangeable import Exchangeable

# Latents are exclusive below this share of the coincidences expected by chance, if these are ten or more.
_TOGETHER, _FEWEST = 0.2, 10
# Most sets of latents and changes that are tried; most changes proposed.
_MOST_SEEN, _MOST = 1000, 3


def changed_roles(values: Exchangeable, latents: Exchangeable, population: Population) -> list[Population]:
    r"""Returns states in which exclusive binary latents and values change places.

    Each data point may have one type :math:`z` and any of several causes. A model may learn the reverse: two
    exclusive latents tell the types apart, and the values of :math:`z` stand for causes. Which latents exclude each other shows.
    The most frequent value :math:`u` stands for none of them. A latent :math:`h` and a value :math:`v` change places by

    .. math:: z' = \begin{cases} v & h = 1 \\ u & h = 0,\ z = v \\ z & \text{else,} \end{cases} \qquad h' = [z = v].

    Of two categorical latents one with more values may stand for one with fewer, and that one for the most frequent of its values. They
    change places. For its other values the smaller latent stays undetermined.

    Args:
        values: the values of a categorical latent.
        latents: latents of a site, if these are binary, or the values of another latent, if these are fewer; of others nothing changes.
        population: the states, ranked by their log joints.

    Returns:
        At most three populations with such states, ranked as they were, the ones with the clearest exclusions first. Their log joints are
        those of before, and states may repeat.
    """
    if latents.num_values < values.num_values and latents.num_values:
        return [_swapped(population, values, latents)]
    if not values.num_values or latents.num_values or population.space.cardinalities[latents.latents.start] != 2:
        return []
    shares = [group.probabilities(population).double().cpu() for group in (values, latents)]
    base, joint = int(shares[0].mean(0).argmax()), torch.cat(shares, 1)
    expected = torch.outer(joint.sum(0), joint.sum(0)) / len(joint)
    together = joint.mT @ joint
    lacking = (expected - together).where((together < _TOGETHER * expected) & (expected >= _FEWEST), 0.0)
    found = sorted(itertools.islice(_changes(lacking, values.num_values, base), _MOST_SEEN), key=lambda one: -one[0])
    return [_changed(population, values, latents, base, *change) for _, *change in found[:_MOST]]


def _changes(lacking: Tensor, number: int, base: int) -> Iterator[tuple[float, list[int], list[int]]]:
    """Returns exclusive sets with remaining values, replaced values and latents."""
    others = [value for value in range(number) if value != base]
    for chosen in itertools.islice(_excluding(lacking > 0, number, len(others)), _MOST_SEEN):
        fit = [value for value in others if bool((lacking[chosen, value] > 0).all())]
        for stay in itertools.combinations(fit, len(others) - len(chosen)):
            pairs = [lacking[one, two] for one, two in itertools.combinations((*stay, *chosen), 2) if two >= number]
            # A single latent excludes nothing.
            if pairs:
                yield float(sum(pairs)), [value for value in others if value not in stay], [latent - number for latent in chosen]


def _excluding(excludes: Tensor, number: int, most: int) -> Iterator[list[int]]:
    """Returns sets of mutually exclusive latents, bounded in number.

    Latents come after the values.
    """
    waiting = [[latent] for latent in range(len(excludes) - 1, number - 1, -1)]
    while waiting:
        chosen = waiting.pop()
        yield chosen
        if len(chosen) < most:
            waiting += [[*chosen, latent] for latent in range(chosen[-1] + 1, len(excludes)) if bool(excludes[chosen, latent].all())]


def _changed(
    population: Population, values: Exchangeable, latents: Exchangeable, base: int, gone: list[int], chosen: list[int]
) -> Population:
    states = population.states()
    value, causes = values.latents.start, [latents.latents.start + latent for latent in chosen]
    before, is_on = states[..., value].clone(), states[..., causes] > 0
    goes = torch.isin(before, torch.tensor(gone, device=before.device, dtype=before.dtype))
    states[..., value] = before.masked_fill(goes, base)
    for place, (old, cause) in enumerate(zip(gone, causes, strict=True)):
        states[..., value] = states[..., value].masked_fill(is_on[..., place], old)
        states[..., cause] = (before == old).to(states)
    return dataclasses.replace(population, words=population.space.pack(states))


def _swapped(population: Population, larger: Exchangeable, smaller: Exchangeable) -> Population:
    states, one, two = population.states(), larger.latents.start, smaller.latents.start
    rank = larger.probabilities(population).mean(0).argsort(descending=True).argsort()[states[..., one].long()]
    fits = rank < smaller.num_values
    states[..., one] = states[..., two].where(fits, rank.to(states))
    states[..., two] = rank.to(states).where(fits, 0)
    return dataclasses.replace(population, words=population.space.pack(states))
