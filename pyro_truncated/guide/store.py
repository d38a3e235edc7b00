"""Storage of a guide's populations.

Buffers are created, written after checks, saved and loaded. What is saved says whose data points they belong to: one process's
populations must not become those of another. More data points than fit into memory have theirs in files.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import Portion, release
from pyro_truncated.guide.data_fingerprint import SeenData
from pyro_truncated.guide.given_states import Init, check_possible, flaw, given_population
from pyro_truncated.program.inspection import ordinary_tensors
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.product_layout import NodeGroup
from pyro_truncated.states.population import Population, initial_population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.budget import row_slices, rows_per_block
from pyro_truncated.utils.console import note_once

PORTION = "portion"


def load_portion(state_dict: Mapping[str, Any], prefix: str) -> Portion | None:
    """The data points that saved populations are of, if not all."""
    numbers = state_dict.get(prefix + PORTION)
    return None if numbers is None else Portion(*numbers.tolist())


def other_rows(stored: Portion | None, here: Portion | None) -> str | None:
    """Returns why saved populations belong to other data points, if known."""
    if stored is None or here is None or stored == here:
        return None
    ranges = [f"{portion.first} .. {portion.first + portion.size - 1} of {portion.total}" for portion in (stored, here)]
    return (
        f"the saved populations are those of data points {ranges[0]}, here are {ranges[1]}; checkpoints of fit hold those of all "
        "processes, whatever their number"
    )


_STREAM = "stream"


class PopulationStore(torch.nn.Module):
    """The states and log joints of a guide's data points.

    They are buffers of a module.

    The buffers are made when the guide first meets its model, or when populations are loaded.

    Attributes:
        words: the packed states of all data points, ``(N, S, num_words)``.
        log_joint: their log joints ``(N, S)`` of when they were last scored; NaN if never.
        cardinalities: number of values of each latent, by which populations are recognised when they are loaded.
        num_states: states per data point, ``S``; once there are populations not more than there are in the space.
        revision: counts the changes of the populations and their log joints.
        portion: which of all data points these are. All, unless the model was first called with a shard of them.
        is_part: whether other processes hold the populations of other data points.
        seen: what was observed of the data points that the populations belong to.
        seed: seed of all random numbers of the populations, except those of searches with their own
            generators. It is drawn from torch's generator when the guide first sees its model,
            ``None`` before.
        num_searches: how often the populations were searched: where in the random numbers they are.
        first_position: position of the first data point among all data, where those of other processes come before it.
        STORED: names of the buffers.
        ROWS: names of those with a row per data point, which checkpoints of several processes keep apart.
    """

    STORED: ClassVar[tuple[str, ...]] = ("words", "log_joint", "cardinalities")
    ROWS: ClassVar[tuple[str, ...]] = ("words", "log_joint")

    words: Tensor
    log_joint: Tensor
    cardinalities: Tensor

    def __init__(self, num_states: int) -> None:
        super().__init__()
        self.num_states = num_states
        self.revision = 0
        self.portion: Portion | None = None
        self.is_part = False
        self.seed: int | None = None
        self.num_searches = 0
        self.first_position = 0
        self.seen = SeenData()
        self._space: StateSpace | None = None
        self._sites: list[str] = []
        self._loaded_portion: Portion | None = None  # which data points populations were loaded of
        # As of which revision the stored log joints of which data points are averages over draws of other guides.
        self._averages: tuple[int, Tensor] | None = None
        # As of which words all data points have the same, or not.
        self._alike: tuple[tuple[int, int], bool] | None = None
        # The words as they were written here, or checked.
        self._own_words: tuple[int, int] | None = None

    # --- random numbers ---

    def seed_(self) -> None:
        """Draws a seed if there is none."""
        if self.seed is None:
            self.seed = ops.draw_seed()

    def stream(self, number: int) -> ops.Stream:
        """The seeds of a search, or, number zero, of the initial populations."""
        self.seed_()
        assert self.seed is not None
        return ops.Stream(ops.mix_bits(self.seed, number))

    def next_search_(self) -> ops.Stream:
        """Begins a search; returns its seeds."""
        self.num_searches += 1
        return self.stream(self.num_searches)

    # --- populations that begin: created, or loaded ---

    @property
    def stores(self) -> list[PopulationStore]:
        """This one: whole states have one store, sets of states several."""
        return [self]

    @property
    def is_filled(self) -> bool:
        """Whether there are populations."""
        return "words" in self._buffers

    def global_rows(self, rows: Tensor) -> Tensor:
        """Returns where rows are among those of all processes."""
        # The rows of a guide on sets are those of several nodes, one after the other.
        portion = self.portion
        num_skipped = 0 if portion is None else rows // portion.size * (portion.total - portion.size)
        return self.first_position + rows + num_skipped

    def start_(self, layout: Layout | NodeGroup, init: Init, device: torch.device, portion: Portion | None = None) -> None:
        """Creates populations for a model's sites, or checks loaded ones."""
        if portion is not None:
            self.portion, self.first_position, self.is_part = portion, portion.first, portion.is_part
        if self.is_part:
            self.seed = collectives.agree(self.seed)
        if not self.is_filled:
            self._create(layout, init, device)
        elif self._space is None:  # loaded before they met the model
            self.move_(device)
        if problem := other_rows(self._loaded_portion, self.portion) or self._problem(self.words, self.cardinalities, layout.space):
            raise ValueError(problem)
        self._space, self._sites = layout.space, list(layout.sites)

    def _create(self, layout: Layout | NodeGroup, init: Init, device: torch.device) -> None:
        size = min(self.num_states, layout.space.size)
        words, log_joint = self.first_states(layout, init, size, device)
        if size < self.num_states:
            states, option = "the only state" if size == 1 else f"all {size} joint states", f"num_states={self.num_states}"
            left_out = layout.left_out if isinstance(layout, Layout) else ""
            note_once(f"AutoTruncated keeps {states} of {list(layout.sites)} (fewer than {option}): {left_out or 'nothing is truncated'}")
            self.num_states = size
        self.register_buffer("words", words)
        self._own_words = self._words_key
        self.register_buffer("log_joint", log_joint)
        self.register_buffer("cardinalities", torch.tensor(layout.space.cardinalities, device=device))

    def first_states(self, layout: Layout | NodeGroup, init: Init, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Returns initial states ``(N, S, num_words)`` and log joints ``(N, S)``.

        NaN means that they have never been scored.
        """
        if isinstance(layout, Layout) and init is not None:
            words = given_population(layout, init, size).to(device)
        elif size == layout.space.size and init is None:
            words = layout.space.enumerate(device).repeat(layout.num_data, 1, 1)
        else:
            rows = self.global_rows(torch.arange(layout.num_data, device="cpu"))
            words = initial_population(layout.space, layout.num_data, size, self.stream(0), device, rows=rows)
            if isinstance(init, Tensor):
                words = torch.cat([init.to(words.device), words], 1)
                words = ops.gather_states(words, ops.find_duplicates(words).byte().argsort(dim=1, stable=True)[:, :size])
        return words, torch.full(words.shape[:2], math.nan, device=device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves the buffers; log joints stay beyond the range of half precision."""
        log_joint = self._buffers.get("log_joint")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if log_joint is not None and self.log_joint.dtype.itemsize < 4:
            self.log_joint = log_joint.to(self.log_joint.device)
        return self

    def move_(self, device: torch.device) -> None:
        """Brings populations to where their model is."""
        self.to(device)

    def begin_(self, indices: Tensor | None = None) -> None:
        """Initialises populations of all or the given data points.

        Populations that something else has written must be states, and distinct ones.
        """
        if self._own_words != self._words_key:
            if problem := flaw(self.words, None, self.cardinalities):
                reason = problem.partition(": ")[2]
                raise ValueError(f"something else has written into the populations, such as an average with use_buffers=True: {reason}")
            self._own_words = self._words_key

    @property
    def _words_key(self) -> tuple[int, int]:
        return self.words.data_ptr(), 0 if self.words.is_inference() else self.words._version

    def allocate(self, name: str, like: Tensor) -> Tensor:
        """Allocates a buffer of that name, like the loaded one."""
        return torch.empty_like(like)

    def fill_(self, name: str, value: Tensor) -> Tensor:
        """Returns the buffer of that name with loaded content."""
        return self.get_buffer(name).copy_(value)

    def change_type_(self, dtype: torch.dtype) -> None:
        """Keeps the log joints in another type from now on."""
        self.log_joint = self.log_joint.to(dtype)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.is_filled:
            self.seed_()
            destination[prefix + _STREAM] = torch.tensor([self.seed, self.num_searches, *[1] * self.seen.is_new], device="cpu")
            if self.portion is not None and self.portion.is_part:
                numbers = self.portion.first, self.portion.size, self.portion.total
                destination[prefix + PORTION] = torch.tensor(numbers, device="cpu")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        tensors = {name: state_dict.get(prefix + name) for name in self.STORED}
        if problem := self.mismatch(state_dict, prefix) or flaw(**tensors):
            args[-1].append(problem)
            return
        stream = state_dict.get(prefix + _STREAM)
        if stream is not None:
            self.seed, self.num_searches = stream[:2].tolist()
        self._loaded_portion = load_portion(state_dict, prefix)
        state_dict = {name: value for name, value in state_dict.items() if name not in (prefix + _STREAM, prefix + PORTION)}
        strict, missing_keys = args[1], args[2]
        missing = [prefix + name for name, value in tensors.items() if value is None and name not in self._buffers]
        if strict and len(missing) < len(tensors):
            missing_keys.extend(missing)
        # A fresh guide has no buffers yet: make them in the shapes that come in.
        for name, value in tensors.items():
            buffer = self._buffers.get(name)
            if value is not None and (buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype):
                value = value if buffer is None else value.to(buffer.device)
                self.register_buffer(name, torch.empty_like(value) if name == "cardinalities" else self.allocate(name, value))
            if value is not None:
                state_dict[prefix + name] = self.fill_(name, value)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if tensors["words"] is not None:
            self.num_states, self._own_words = tensors["words"].shape[1], self._words_key
        self.revision += 1
        # Populations that were saved may be of other data than the last ones here.
        self.seen = SeenData(is_new=stream is not None and len(stream) > 2)

    def mismatch(self, state_dict: Mapping[str, Any], prefix: str = "") -> str | None:
        """Returns why saved populations do not fit here."""
        other = other_rows(load_portion(state_dict, prefix), self.portion)
        return other or self._problem(state_dict.get(prefix + "words"), state_dict.get(prefix + "cardinalities"), self._space)

    def _problem(self, words: Tensor | None, cardinalities: Tensor | None, space: StateSpace | None) -> str | None:
        # A guide that was asked for more states than there are has all of them.
        size = math.inf if cardinalities is None else math.prod(cardinalities.tolist())
        if words is not None and words.shape[1] != self.num_states and not words.shape[1] == size < self.num_states:
            return f"the saved populations hold {words.shape[1]} states per data point, this guide num_states={self.num_states}"
        if cardinalities is not None and space is not None and tuple(cardinalities.tolist()) != space.cardinalities:
            return (
                f"the loaded populations are of {len(cardinalities)} latents with {int(cardinalities.sum())} values in all, "
                f"the model's discrete sites have {space.num_latents} with {sum(space.cardinalities)}"
            )
        return None

    # --- reading ---

    @property
    def space(self) -> StateSpace:
        """The space of one data point's states."""
        if self._space is None:
            raise RuntimeError("the guide has not seen the model yet; call it (or svi.step) once with the model's arguments")
        return self._space

    def check_indices(self, indices: Tensor | None) -> None:
        """Checks positions of data points."""
        number = len(self.words)
        if indices is None:
            return
        if not isinstance(indices, Tensor) or indices.dim() != 1 or indices.dtype not in (torch.int64, torch.int32):
            kind = f"{indices.dtype} of shape {tuple(indices.shape)}" if isinstance(indices, Tensor) else type(indices).__name__
            raise TypeError(f"indices of data points must be a tensor (n,) of integers; got {kind}")
        if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < number:
            raise ValueError(f"subsample indices must lie in 0 .. {number - 1}; got {int(indices.min())} .. {int(indices.max())}")

    def population(self, indices: Tensor | None = None) -> Population:
        """Returns the stored populations of all or the given data points."""
        if not self.is_filled:
            raise RuntimeError("the guide has no populations yet; call it (or svi.step) once with the model's arguments")
        self.check_indices(indices)
        return self.take(indices)

    def scored_population(self, indices: Tensor | None = None) -> Population:
        """Returns stored populations, which must have been scored."""
        population = self.population(indices)
        if number := int(population.log_joint.isnan().any(-1).sum()):
            raise RuntimeError(
                f"{number} of {len(population)} populations have never been scored under the model: train first, or call "
                "guide.refresh_(*args) with the model's arguments"
            )
        return population

    def take(self, indices: Tensor | None = None) -> Population:
        """Returns the stored populations at valid positions."""
        self.begin_(indices)
        if indices is None:
            return Population(self.space, self.words, self.log_joint)
        # Of whole rows this takes a quarter of the time that indexing does.
        return Population(self.space, self.words.index_select(0, indices), self.log_joint.index_select(0, indices), indices)

    @property
    def are_alike(self) -> bool:
        """Whether all data points have all states, in the same order."""
        if self.words.shape[1] < self.space.size or type(self) is not PopulationStore:
            return False
        if self._alike is None or self._alike[0] != self._words_key:
            self._alike = self._words_key, bool((self.words == self.words[:1]).all())
        return self._alike[1]

    # --- writing ---

    def store_(self, log_joint: Tensor, indices: Tensor | None, words: Tensor | None = None) -> Population:
        """Stores new log joints ``(N, S)`` with their populations."""
        self.keep_(log_joint, slice(None) if indices is None else indices, words)
        words = self.take(indices).words if words is None else words
        return Population(self.space, words, log_joint, indices)

    def keep_(self, log_joint: Tensor, where: slice | Tensor, words: Tensor | None = None) -> None:
        """Writes log joints, and states if they are new.

        The data are first checked to be possible, so that the two always agree.
        """
        expected = self.words.shape[1]
        for name, own in (("log_joint", log_joint), ("words", words)):
            if own is not None and own.shape[1] != expected:
                raise ValueError(f"{name} must be of {expected} states of each data point; got shape {tuple(own.shape)}")
        check_possible(log_joint, self._sites)
        ops.on_success(lambda: self._write_(log_joint, where, words))

    def _write_(self, log_joint: Tensor, index: slice | Tensor, words: Tensor | None) -> None:
        if self.log_joint.dtype != log_joint.dtype:
            with ordinary_tensors():
                self.change_type_(log_joint.dtype)
        self.log_joint[index] = log_joint
        if words is not None:
            self.words[index] = words
            self._own_words = self._words_key
        self.revision += 1

    # --- averages over draws of other guides ---

    @property
    def average_mask(self) -> Tensor:
        """Returns whose stored log joints are averages over draws, ``(N,)``."""
        if self._averages is None or self._averages[0] != self.revision:
            return torch.zeros(len(self.words), dtype=torch.bool)
        return self._averages[1].clone()

    def store_averages_(self, averages: Population) -> Population:
        """Keeps averaged log joints, and remembers that they are."""
        mask = self.average_mask
        mask[slice(None) if averages.indices is None else averages.indices.to(mask.device)] = True
        population = self.store_(averages.log_joint, averages.indices)
        self._averages = self.revision, mask
        return population


_TYPES: dict[torch.dtype, Any] = {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


class FileStore(PopulationStore):
    """Populations and log joints in memory-mapped ``.npy`` files.

    Every process has one of each.

    A population begins when its data point is first visited, with the very states that it would have begun with in memory. Until then it
    takes no room on the disk, where the file system knows holes. The files are scratch space: a new guide replaces those of an earlier one.
    """

    def __init__(self, num_states: int, folder: str | Path) -> None:
        super().__init__(num_states)
        self.folder = Path(folder)
        # Which populations have begun; ``None`` if all have.
        self._is_started: Tensor | None = None
        self._files: dict[str, mmap.mmap] = {}
        self._num_rows_in_memory = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def allocate(self, name: str, like: Tensor, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """Creates a new file; whoever has an old one open keeps it."""
        _refuse_elsewhere(like.device)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{name}-{self.first_position:012d}.npy"
        file.unlink(missing_ok=True)
        self._files[name], array = _map(file, _TYPES[like.dtype], tuple(like.shape if shape is None else shape))
        return torch.from_numpy(array)

    def fill_(self, name: str, value: Tensor) -> Tensor:
        """Returns the file of that name with loaded content."""
        if name not in self._files:
            return super().fill_(name, value)
        buffer = self.get_buffer(name)
        for rows in row_slices(len(value), value[0].nbytes):
            buffer[rows] = value[rows]
            release(self._files[name])
        return buffer

    def first_states(self, layout: Layout | NodeGroup, init: Init, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for states and log joints of which none has begun."""
        if init is not None:
            raise ValueError("a guide with a store takes no init: populations in files start from random states")
        self._is_started = torch.zeros(layout.num_data, dtype=torch.bool)
        shape = layout.num_data, size, layout.space.num_words
        words = self.allocate("words", torch.empty(0, dtype=torch.int64, device=device), shape=shape)
        return words, self.allocate("log_joint", torch.empty(0, dtype=torch.float32, device=device), shape=shape[:2])

    def move_(self, device: torch.device) -> None:
        """Files stay where they are."""
        _refuse_elsewhere(device)

    def begin_(self, indices: Tensor | None = None) -> None:
        """Initialises populations of all or the given data points if needed."""
        self._let_go(len(self.words) if indices is None else len(indices))
        if self._is_started is None:
            return
        new = (~self._is_started).nonzero().squeeze(-1) if indices is None else indices[~self._is_started[indices]].unique()
        for rows in new.split(rows_per_block(32 * self.words[0].numel())):
            self.words[rows] = initial_population(self.space, len(rows), self.num_states, self.stream(0), rows=self.global_rows(rows))
            self.log_joint[rows] = math.nan
            self._is_started[rows] = True

    def _let_go(self, number: int) -> None:
        """Frees the memory of earlier minibatches' populations, from 128 MiB on."""
        self._num_rows_in_memory += number
        if self._num_rows_in_memory * self.words[0].nbytes > 2**27:
            self._num_rows_in_memory = 0
            for memory in self._files.values():
                release(memory)

    def change_type_(self, dtype: torch.dtype) -> None:
        """Keeps the log joints in another type from now on."""
        old = self.log_joint
        self.log_joint = self.allocate("log_joint", old.new_empty(0, dtype=dtype), shape=tuple(old.shape))
        positions = torch.arange(len(old)) if self._is_started is None else self._is_started.nonzero().squeeze(-1)
        for rows in positions.split(rows_per_block(16 * self.num_states)):
            self.log_joint[rows] = old[rows].to(dtype)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.begin_()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.is_filled:
            self._is_started = None


def _refuse_elsewhere(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError(f"populations in files need a model on the CPU; got one on {device}")


def _map(file: Path, dtype: Any, shape: tuple[int, ...]) -> tuple[mmap.mmap, np.ndarray]:
    """Creates an array of zeros in a file, with its memory map."""
    np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
    with file.open("r+b") as stream:
        memory = mmap.mmap(stream.fileno(), 0)
    if hasattr(memory, "madvise"):
        # Megabytes around every page, otherwise.
        memory.madvise(mmap.MADV_RANDOM)
    number = math.prod(shape)
    return memory, np.frombuffer(memory, dtype, number, len(memory) - number * np.dtype(dtype).itemsize).reshape(shape)


def populations_in(folder: str | Path | None, num_states: int) -> PopulationStore:
    """A store in a folder, or in memory."""
    return PopulationStore(num_states) if folder is None else FileStore(num_states, folder)
