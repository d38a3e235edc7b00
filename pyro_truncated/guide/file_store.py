"""Populations of more data points than fit into memory.

They lie in files, of which only the rows in use are read and written.
"""

from __future__ import annotations

import math
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import release
from pyro_truncated.guide.given_states import Init
from pyro_truncated.guide.store import PopulationStore
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.product_layout import NodeGroup
from pyro_truncated.states.population import initial_population
from pyro_truncated.utils.budget import row_slices, rows_per_block

_KEPT_IN_MEMORY = 2**27
_TYPES: dict[torch.dtype, Any] = {torch.int64: np.int64, torch.float32: np.float32, torch.float64: np.float64}


class FileStore(PopulationStore):
    """Populations and log joints in memory-mapped ``.npy`` files.

    Every process has one of each.

    A population begins when its data point is first visited, with the very states that it would have begun with in memory. Until then it
    takes no room on the disk, where the file system knows holes. The files are scratch space: a new guide replaces those of an earlier one.

    Args:
        num_states: states per data point that are asked for.
        folder: where the files are.
    """

    def __init__(self, num_states: int, folder: str | Path) -> None:
        super().__init__(num_states)
        self.folder = Path(folder)
        # Which populations have begun; ``None`` if all have.
        self._begun: Tensor | None = None
        self._files: dict[str, mmap.mmap] = {}
        self._num_touched = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def room(self, name: str, like: Tensor, *, shape: tuple[int, ...] | None = None) -> Tensor:
        """Creates a new file.

        Whoever has an old one of that name open keeps it.

        Raises:
            ValueError: if the model is not on the CPU.
            OSError: if the file cannot be made.
        """
        _refuse_elsewhere(like.device)
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / f"{name}-{self.first_position:012d}.npy"
        file.unlink(missing_ok=True)
        self._files[name], array = _map(file, _TYPES[like.dtype], tuple(like.shape if shape is None else shape))
        return torch.from_numpy(array)

    def filled_(self, name: str, value: Tensor) -> Tensor:
        """Returns the file of that name with loaded content.

        No more than a block of it lies in memory.
        """
        if name not in self._files:
            return super().filled_(name, value)
        buffer = self.get_buffer(name)
        for rows in row_slices(len(value), value[0].nbytes):
            buffer[rows] = value[rows]
            release(self._files[name])
        return buffer

    def first_states(self, layout: Layout | NodeGroup, init: Init, size: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Room for states and log joints of which none has begun.

        Raises:
            ValueError: if initial states are given.
        """
        if init is not None:
            raise ValueError("populations in files begin with random states: a guide with a store takes no init")
        self._begun = torch.zeros(layout.num_data, dtype=torch.bool)
        shape = layout.num_data, size, layout.space.num_words
        words = self.room("words", torch.empty(0, dtype=torch.int64, device=device), shape=shape)
        return words, self.room("log_joint", torch.empty(0, dtype=torch.float32, device=device), shape=shape[:2])

    def bring_(self, device: torch.device) -> None:
        """Files stay where they are.

        Raises:
            ValueError: if the model is not on the CPU.
        """
        _refuse_elsewhere(device)

    def begin_(self, indices: Tensor | None = None) -> None:
        """Initialises populations of all or the given data points if needed."""
        self._let_go(len(self.words) if indices is None else len(indices))
        if self._begun is None:
            return
        new = (~self._begun).nonzero().squeeze(-1) if indices is None else indices[~self._begun[indices]].unique()
        for rows in new.split(rows_per_block(32 * self.words[0].numel())):
            positions = self.first_position + rows
            self.words[rows] = initial_population(self.space, len(rows), self.num_states, self.stream(0), rows=positions)
            self.log_joint[rows] = math.nan
            self._begun[rows] = True

    def _let_go(self, number: int) -> None:
        """Frees the memory of earlier minibatches' populations, once they are many.

        Files keep them.
        """
        self._num_touched += number
        if self._num_touched * self.words[0].nbytes > _KEPT_IN_MEMORY:
            self._num_touched = 0
            for memory in self._files.values():
                release(memory)

    def change_type_(self, dtype: torch.dtype) -> None:
        """Keeps the log joints in another type from now on."""
        old = self.log_joint
        self.log_joint = self.room("log_joint", old.new_empty(0, dtype=dtype), shape=tuple(old.shape))
        begun = torch.arange(len(old)) if self._begun is None else self._begun.nonzero().squeeze(-1)
        for rows in begun.split(rows_per_block(16 * self.num_states)):
            self.log_joint[rows] = old[rows].to(dtype)

    def _save_to_state_dict(self, *args: Any) -> None:
        self.begin_()
        super()._save_to_state_dict(*args)

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        if self.is_filled:
            self._begun = None


def _refuse_elsewhere(device: torch.device) -> None:
    if device.type != "cpu":
        raise ValueError(f"populations in files are those of models on the CPU; this one is on {device}")


def _map(file: Path, dtype: Any, shape: tuple[int, ...]) -> tuple[mmap.mmap, np.ndarray]:
    """Creates an array of zeros in a file, with its memory map.

    No more of it is read than is asked for.
    """
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
