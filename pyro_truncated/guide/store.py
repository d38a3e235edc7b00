"""Where the populations of a guide are kept: buffers that are created, written after checks, saved and loaded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.guide.seen_data import SeenData
from pyro_truncated.program.inspection import ordinary_tensors
from pyro_truncated.program.layout import Layout
from pyro_truncated.states.population import Population, States, initial_population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arrays import as_tensors
from pyro_truncated.utils.notes import note_once

# Values that are looked at together when states are loaded.
_BLOCK_ENTRIES = 2**22

Init = States | Callable[[], States] | None


class PopulationStore(torch.nn.Module):
    """The states of all data points of a guide and their log joints, as buffers of a module.

    Attributes:
        words: the packed states of all data points, ``(N, S, num_words)``.
        log_joint: their log joints ``(N, S)`` of when they were last scored; NaN if never.
        cardinalities: number of values of each latent, by which populations are recognised when they are loaded.
        num_states: states per data point, ``S``; from the first call on not more than there are in the space.
        STORED: names of the buffers.
        revision: counts the changes of the populations and their log joints.
    """

    STORED: ClassVar[tuple[str, ...]] = ("words", "log_joint", "cardinalities")

    words: Tensor
    log_joint: Tensor
    cardinalities: Tensor
    num_states: int
    revision: int
    _init: Init
    _layout: Layout | None
    _seen: SeenData

    @property
    def layout(self) -> Layout:
        """The discrete sites and the data plates."""
        if self._layout is None:
            raise RuntimeError("the guide has not seen the model yet; call it (or svi.step) once with the model's arguments")
        return self._layout

    @property
    def space(self) -> StateSpace:
        """The space of one data point's states."""
        return self.layout.space

    def _create_populations(self, device: torch.device) -> None:
        layout, size = self.layout, min(self.num_states, self.space.size)
        if self._init is None:
            words = initial_population(layout.space, layout.num_data, size, device=device)
        else:
            init = self._init() if callable(self._init) else self._init
            words = given_population(layout, init, size).to(device)
        if size < self.num_states:
            states = "the only state" if size == 1 else f"all {size} joint states"
            note_once(f"AutoTruncated keeps {states} of {list(layout.sites)} (fewer than num_states={self.num_states}): inference is exact")
            self.num_states = size
        self.register_buffer("words", words)
        # NaN marks populations that have never been scored.
        self.register_buffer("log_joint", torch.full(words.shape[:2], math.nan, device=device))
        self.register_buffer("cardinalities", torch.tensor(layout.space.cardinalities, device=device))

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        words, cardinalities = state_dict.get(prefix + "words"), state_dict.get(prefix + "cardinalities")
        problem = self._mismatch(words, cardinalities) or _flaw(words, state_dict.get(prefix + "log_joint"), cardinalities)
        if problem is not None:
            error_msgs = args[-1]
            error_msgs.append(problem)
            return
        names = self.STORED
        strict, missing_keys = args[1], args[2]
        missing = [prefix + name for name in names if prefix + name not in state_dict and name not in self._buffers]
        if strict and len(missing) < len(names):
            missing_keys.extend(missing)
        # A fresh guide has no buffers yet: make them in the shapes that come in.
        for name in names:
            value = state_dict.get(prefix + name)
            held = self._buffers.get(name)
            if value is not None and (held is None or held.shape != value.shape or held.dtype != value.dtype):
                self.register_buffer(name, torch.empty_like(value, device=None if held is None else held.device))
        super()._load_from_state_dict(state_dict, prefix, *args)
        if words is not None:
            self.num_states = words.shape[1]
        self.revision += 1
        # Populations that were saved may be of other data than the last ones here.
        self._seen = SeenData()

    def _mismatch(self, words: Tensor | None, cardinalities: Tensor | None) -> str | None:
        """Why populations that were saved do not fit this guide; of a guide that has not seen its model, as far as can be told."""
        if words is not None and words.shape[1] != self.num_states and not self._holds_all(words, cardinalities):
            return f"the saved populations hold {words.shape[1]} states per data point, this guide num_states={self.num_states}"
        if cardinalities is not None and self._layout is not None and tuple(cardinalities.tolist()) != self.space.cardinalities:
            return (
                f"the loaded populations are of {len(cardinalities)} latents with {int(cardinalities.sum())} values in all, "
                f"the model's discrete sites have {self.space.num_latents} with {sum(self.space.cardinalities)}"
            )
        return None

    def _holds_all(self, words: Tensor, cardinalities: Tensor | None) -> bool:
        """Whether populations hold every state there is, as those of a guide do that was asked for more."""
        size = words.shape[1]
        return cardinalities is not None and size == math.prod(cardinalities.tolist()) and size < self.num_states

    def _check_loaded(self) -> None:
        problem = self._mismatch(self.words, self.cardinalities)
        if problem is not None:
            raise ValueError(problem)

    def _check_indices(self, indices: Tensor | None) -> None:
        if indices is None:
            return
        if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
            given = f"{indices.dtype} of shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"indices of data points must be a tensor (n,) of integers; got {given}")
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < self.words.shape[0]:
            raise ValueError(
                f"subsample indices must lie in 0 .. {self.words.shape[0] - 1}; got {int(indices.min())} .. {int(indices.max())}"
            )

    def population(self, indices: Tensor | None = None) -> Population:
        """The stored populations of all or the given data points, with the log joints of when they were last scored."""
        if "words" not in self._buffers:
            raise RuntimeError("the guide has no populations yet; call it (or svi.step) once with the model's arguments")
        self._check_indices(indices)
        if indices is None:
            return Population(self.space, self.words, self.log_joint)
        return Population(self.space, self.words[indices], self.log_joint[indices], indices)

    def store_(self, log_joint: Tensor, indices: Tensor | None, words: Tensor | None = None) -> Population:
        """Keeps freshly computed log joints ``(N, S)`` with the populations they belong to, or with new ones, and returns these.

        Raises:
            ValueError: if a data point's states all have probability zero.
        """
        self._keep_(log_joint, slice(None) if indices is None else indices, words)
        self.revision += 1
        return self.population(indices)

    def _keep_(self, log_joint: Tensor, where: slice | Tensor, words: Tensor | None = None) -> None:
        """Writes log joints, and states if they are new, after checking that the data are possible: the two never fall out of step."""
        impossible = (log_joint.amax(-1) == -math.inf).nonzero()
        if len(impossible):
            raise ValueError(
                f"the model gives probability zero to every state in the populations of {len(impossible)} data points "
                f"(first: {int(impossible[0])} of the batch). Start from parameters under which the data are possible, or give the "
                "likelihood a floor (a leak, a noise term)."
            )
        if self.log_joint.dtype != log_joint.dtype:
            with ordinary_tensors():
                self.log_joint = self.log_joint.to(log_joint.dtype)
        self.log_joint[where] = log_joint
        if words is not None:
            self.words[where] = words


def _flaw(words: Tensor | None, log_joint: Tensor | None, cardinalities: Tensor | None) -> str | None:
    """What is wrong with populations that were saved, such that no guide could have saved them."""
    if words is None or cardinalities is None:
        return None
    try:
        space = StateSpace(cardinalities.tolist())
        ops.check_words("words", words)
        if words.shape[2] != space.num_words or (log_joint is not None and log_joint.shape != words.shape[:2]):
            shape = None if log_joint is None else tuple(log_joint.shape)
            return f"the saved populations have the shape {tuple(words.shape)}, their log joints {shape}; {space} cannot have either"
        _check_within(words, space)
        Population(space, words, words[..., 0]).assert_distinct()
    except (TypeError, ValueError) as error:
        return f"the saved populations are not those of a guide: {error}"
    return None


def _check_within(words: Tensor, space: StateSpace) -> None:
    if space.is_binary:
        ops.check_bits(words, space.num_latents)
        return
    for rows in words.split(max(1, _BLOCK_ENTRIES // (words.shape[1] * space.num_latents))):
        if not torch.equal(space.pack(space.unpack(rows)), rows):
            raise ValueError("states have bits set beyond the fields of their latents; they belong to another state space")


def given_population(layout: Layout, states: States, num_states: int) -> Tensor:
    """Packs and checks states given by the user.

    Args:
        layout: the discrete sites.
        states: site values ``(N, S, *site shape)``, by name or of the only site.
        num_states: number of states per data point ``S``.

    Returns:
        Packed states ``(N, S, num_words)``.

    Raises:
        TypeError: if they are neither a tensor nor a dictionary.
        ValueError: if the states are misshapen, repeat, or lie outside the sites' supports.
    """
    states = as_tensors(states)
    if not isinstance(states, (Tensor, Mapping)):
        raise TypeError(
            f"init must be a tensor, a dictionary of tensors by site name, or a callable that returns one; got {type(states).__name__}"
        )
    if isinstance(states, Tensor):
        if len(layout.sites) != 1:
            raise ValueError(f"init must be a dictionary of tensors by site name: the model has the discrete sites {list(layout.sites)}")
        states = {next(iter(layout.sites)): states}
    levels = layout.encode(states)
    expected = (layout.num_data, num_states)
    if levels.shape[:-1] != expected:
        raise ValueError(
            f"initial states must start with the dimensions (num_data, num_states) = {expected}; got {tuple(levels.shape[:-1])}"
        )
    words = layout.space.pack(levels)
    rows = Population(layout.space, words, torch.zeros(words.shape[:2], device=words.device)).find_duplicates()
    if len(rows):
        raise ValueError(
            f"initial states repeat within {len(rows)} of {words.shape[0]} data points (first: data point {int(rows[0])}). "
            "A repeated state would be counted twice and the bound could exceed the evidence."
        )
    return words
