"""Checks given or loaded states before they become populations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.program.layout import Layout
from pyro_truncated.states.population import Population, States
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.console import shorten_names

Init = States | Callable[[], States] | None


def flaw(words: Tensor | None, log_joint: Tensor | None, cardinalities: Tensor | None) -> str | None:
    """Returns what is wrong with saved populations."""
    if words is None or cardinalities is None:
        return None
    try:
        space = StateSpace(cardinalities.tolist())
        ops.check_words("words", words)
        if words.shape[2] != space.num_words or (log_joint is not None and log_joint.shape != words.shape[:2]):
            shape = None if log_joint is None else tuple(log_joint.shape)
            return f"the saved populations have the shape {tuple(words.shape)}, their log joints {shape}; {space} cannot have either"
        space.check(words)
        Population(space, words, words[..., 0]).assert_distinct()
    except (TypeError, ValueError) as error:
        return f"the saved populations are not those of a guide: {error}"
    return None


def given_levels(layout: Layout, init: States | Callable[[], States], num_states: int) -> Tensor:
    """Returns unpacked states ``(N, S, L)`` given by the user."""
    states = as_tensors(init() if callable(init) else init)
    if not isinstance(states, (Tensor, Mapping)):
        raise TypeError(
            f"init must be a tensor, a dictionary of tensors by site name, or a callable that returns one; got {type(states).__name__}"
        )
    if isinstance(states, Tensor):
        if len(layout.sites) != 1:
            raise ValueError(
                f"init must be a dictionary of tensors by site name: the model has the discrete sites {list(layout.sites)}; got one tensor"
            )
        states = {next(iter(layout.sites)): states}
    levels = layout.encode(states)
    expected = (layout.num_data, num_states)
    if levels.shape[:-1] != expected:
        raise ValueError(
            f"initial states must start with the dimensions (num_data, num_states) = {expected}; got {tuple(levels.shape[:-1])}"
        )
    return levels


def given_population(layout: Layout, init: States | Callable[[], States], num_states: int) -> Tensor:
    """Returns packed states ``(N, S, num_words)`` given by the user."""
    words = layout.space.pack(given_levels(layout, init, num_states))
    rows = Population(layout.space, words, torch.zeros(words.shape[:2], device=words.device)).find_duplicates()
    if len(rows):
        raise ValueError(
            f"initial states repeat within {len(rows)} of {words.shape[0]} data points (first: data point {int(rows[0])}). "
            "A repeated state would be counted twice and the bound could exceed the evidence."
        )
    return words


def old_layout(state_dict: Mapping[str, Any], prefix: str) -> str | None:
    """Why a state with populations as the guide's buffers is refused."""
    if f"{prefix}words" not in state_dict:
        return None
    return (
        f"'{prefix}words' is of an earlier version, which kept populations in the guide itself. Rename 'words', 'log_joint' and "
        f"'cardinalities' to '{prefix}populations.words' and so on, or train anew."
    )


def check_possible(log_joint: Tensor, sites: Sequence[str]) -> None:
    """Refuses log joints ``(N, S)`` with data points of probability zero."""
    ops.raise_if((log_joint.amax(-1) == -math.inf).any(), lambda: _refuse_impossible(log_joint, sites))


def warn_impossible(sites: Sequence[str]) -> None:
    """Says that all states of these sites have probability zero."""
    warnings.warn(
        f"the loss is infinite: the model gives probability zero to all joint states that the guide keeps of {shorten_names(sites)}. "
        "A search may find possible ones: take a training step or guide.infer, if need be with a larger num_states.",
        stacklevel=4,
    )


def excess_density(evidence: Tensor, sites: Sequence[str]) -> Tensor:
    """Returns what makes losses infinite where the evidence is zero."""
    is_impossible = evidence == -math.inf
    if bool(is_impossible.any()):
        warn_impossible(sites)
    return torch.zeros_like(evidence).masked_fill(is_impossible, math.inf)


def _refuse_impossible(log_joint: Tensor, sites: Sequence[str]) -> None:
    impossible = (log_joint.amax(-1) == -math.inf).nonzero()
    raise ValueError(
        f"the model gives probability zero to every state in the populations of {len(impossible)} data points "
        f"(first: {int(impossible[0])} of the batch) of {shorten_names(sites)}. Search first, keep more states (num_states), start from "
        "parameters under which the data are possible, or give the likelihood a floor (a leak, a noise term)."
    )
