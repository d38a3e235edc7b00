"""Whose data are whose: rows, minibatches, values that follow them."""

from __future__ import annotations

import dataclasses
import itertools
import mmap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar, Token
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pyro_truncated.distributed import collectives
from pyro_truncated.utils.arguments import Renamed, check_counts
from pyro_truncated.utils.arrays import as_data, as_tensors
from pyro_truncated.utils.devices import generator_device

# Methods of a tensor that move it or change its type, but not its rows.
_KEEP_ROWS = {"to", "cpu", "cuda", "double", "float", "half", "bfloat16", "contiguous", "detach", "pin_memory", "clone"}


@dataclasses.dataclass(frozen=True)
class Portion:
    """Successive data points among all.

    Example:
        >>> Portion(first=0, size=6, total=10).is_part
        True

    Attributes:
        first: position of the first of them.
        size: how many they are.
        total: how many there are in all processes.
    """

    first: int
    size: int
    total: int

    @property
    def is_part(self) -> bool:
        """Whether other processes hold more."""
        return self.size < self.total

    def times(self, number: int) -> Portion:
        """That of units of which every data point has so many."""
        return Portion(self.first * number, self.size * number, self.total * number)

    def holds(self, positions: Tensor) -> Tensor:
        """Which global positions are of these data points."""
        return (positions >= self.first) & (positions < self.first + self.size)


class Shard(Tensor):
    """A tensor of data that knows its rows; results are plain tensors.

    Example:
        >>> y: Shard = shard(torch.randn(10, 4))
        >>> y.portion
        Portion(first=0, size=10, total=10)
        >>> type(y + 1) is torch.Tensor
        True

    Attributes:
        portion: the rows.
        file: the memory map that they lie in, if they do.
    """

    portion: Portion
    file: mmap.mmap | None

    @classmethod
    def from_rows(cls, rows: Tensor, portion: Portion, file: mmap.mmap | None = None) -> Shard:
        """The same memory, as a shard."""
        shard: Shard = rows.as_subclass(cls)
        shard.portion, shard.file = portion, file
        return shard

    of = Renamed("from_rows")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **(kwargs or {}))
        is_kept = getattr(func, "__name__", "") in _KEEP_ROWS and args and isinstance(args[0], Shard) and isinstance(value, Tensor)
        return Shard.from_rows(value, args[0].portion) if is_kept else value

    def __deepcopy__(self, memo: dict[int, Any]) -> Shard:
        return Shard.from_rows(self.as_subclass(Tensor).__deepcopy__(memo), self.portion)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return Shard.from_rows, (self.as_subclass(Tensor), self.portion)


def shard(array: Any, *, split: bool = True) -> Shard:
    """Returns this process's rows of the data as a :class:`Shard`.

    Every process gets successive rows, as many as the others or one more. Nothing is copied, and of memory maps only rows which are used
    are read.

    Example:
        >>> import numpy as np
        >>> np.save("y.npy", np.ones((10, 4)))
        >>> y = shard(np.load("y.npy", mmap_mode="r"))  # on two processes five rows each
        >>> y.shape
        torch.Size([10, 4])

    Args:
        array: data with a row per data point: an array, a memory map, a tensor, or anything else with a length and slices. Of arrays of
            xarray, zarr or HDF5 only the slice is read. What is masked or null becomes NaN.
        split: ``False`` if every process has been given its own rows only, in the order of the processes.

    Returns:
        The rows.

    Raises:
        TypeError: if the data have no length or cannot be sliced.
        ValueError: if the processes hold data of different lengths, or there are fewer data points than processes.
    """
    if not hasattr(array, "__len__") or not hasattr(array, "__getitem__"):
        raise TypeError(f"data must have a row per data point, a length and slices; got {type(array).__name__}")
    lengths = collectives.gather(len(array))
    number = collectives.rank()
    if split:
        total = lengths[0]
        if set(lengths) != {total}:
            raise ValueError(f"every process must be given all data (or split=False and its own rows); their lengths are {lengths}")
        first, last = number * total // collectives.size(), (number + 1) * total // collectives.size()
        array = array if collectives.size() == 1 and isinstance(array, (np.ndarray, Tensor)) else array[first:last]
    else:
        total, first = sum(lengths), sum(lengths[:number])
    portion = Portion(first, len(array), total)
    if min(total, *lengths) < 1 or total < collectives.size():
        raise ValueError(f"there must be at least one data point per process; got {total} for {collectives.size()} processes")
    rows = _tensor(array)
    # Integers are real numbers on a process that lacks some.
    for dtype in collectives.gather(rows.dtype):
        rows = rows.to(torch.promote_types(rows.dtype, dtype))
    return Shard.from_rows(rows, portion, find_memory_map(array))


# Types of arrays whose memory torch shares.
_SHARED = "?bBhHiIlLqQefd"


def _tensor(array: Any) -> Tensor:
    if isinstance(array, Tensor):
        return array.as_subclass(Tensor)
    is_plain = isinstance(array, np.ndarray) and not isinstance(array, np.ma.MaskedArray)
    if not is_plain or not array.dtype.isnative or array.dtype.char not in _SHARED or any(stride < 0 for stride in array.strides):
        return as_data("data", array)
    with warnings.catch_warnings():
        # Data are never written to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        return torch.from_numpy(array)


def release_pages(y: Any) -> None:
    """Releases memory of a file that has been read."""
    if isinstance(y, Shard):
        release(y.file)


def refuse_shards(y: Any, reason: str) -> None:
    """Refuses shards of data of which other processes hold the rest."""
    if find_part(y) is not None:
        raise NotImplementedError(f"{reason}; pass the whole data in one process")


def find_portion(arguments: Any) -> Portion | None:
    """Returns the rows held by shards among a model's arguments, or ``None``."""
    portions = {leaf.portion for leaf in tree_leaves(arguments) if isinstance(leaf, Shard)}
    if len(portions) > 1:
        raise ValueError(f"the model's arguments are shards of different rows: {sorted(map(str, portions))}")
    return next(iter(portions), None)


def find_part(*arguments: Any) -> Portion | None:
    """Returns the rows held by shards, ``None`` where no process has others."""
    portion = find_portion(arguments)
    return portion if portion is not None and portion.is_part else None


def total_rows(y: Any) -> int:
    """The number of data points that all processes have.

    Example:
        >>> total_rows(shard(torch.randn(10, 4)))  # on any number of processes
        10
    """
    return y.portion.total if isinstance(y, Shard) else len(y)


def global_positions(y: Tensor, indices: Tensor | None = None) -> Tensor:
    """Positions ``(n,)`` of data points among those of all processes.

    Example:
        >>> global_positions(torch.zeros(3, 2))
        tensor([0, 1, 2])

    Args:
        y: data, or a shard of them.
        indices: which of these. Default: all.
    """
    first = y.portion.first if isinstance(y, Shard) else 0
    return first + (torch.arange(len(y)) if indices is None else indices.cpu())


def shard_sum(y: Any) -> Callable[[Sequence[Tensor]], list[Tensor]]:
    """Returns a function that sums results over shards, if there are any.

    Example:
        >>> y = torch.arange(6.0).reshape(3, 2)
        >>> shard_sum(y)([y.sum(), y.square().sum()])
        [tensor(15.), tensor(55.)]

    Args:
        y: data, or a shard of them.

    Returns:
        A function from tensors to their sums over all processes; for data that are no shard, to a list of the tensors themselves.
    """
    return list if find_part(y) is None else collectives.add


def rows_at(y: Tensor, positions: Tensor) -> Tensor:
    """Returns data points at global positions, on every process.

    Example:
        >>> rows_at(shard(torch.arange(10)), torch.tensor([7, 2]))
        tensor([7, 2])

    Args:
        y: data, or a shard of them.
        positions: ``(n,)``, the same on every process.
    """
    portion = find_part(y)
    if portion is None:
        return _rows_here(y, positions.to(y.device))
    positions = positions.to(y.device)
    is_mine = portion.holds(positions)
    rows = y.new_zeros(len(positions), *y.shape[1:])
    rows[is_mine] = _rows_here(y, positions[is_mine] - portion.first)
    return collectives.add([rows])[0]


def _rows_here(y: Tensor, positions: Tensor) -> Tensor:
    """Copies this process's rows, of a file a few at a time."""
    plain = y.as_subclass(Tensor)
    if not isinstance(y, Shard) or y.file is None:
        return plain[positions]
    rows = plain.new_empty(len(positions), *plain.shape[1:])
    # Rows of a file at once.
    for part in torch.arange(len(positions), device=positions.device).split(1000):
        rows[part] = plain[positions[part]]
        release_pages(y)
    return rows


def some_rows(y: Tensor, number: int, generator: torch.Generator | None = None) -> Tensor:
    """Returns all data points or a random sample, on every process.

    Example:
        >>> some_rows(torch.arange(10.0), 3).shape
        torch.Size([3])

    Args:
        y: data, or a shard of them.
        number: how many at most.
        generator: source of randomness, which from now on is in the same state on every process.
    """
    total = total_rows(y)
    if find_part(y) is not None:
        synchronize_generator(generator)
    if total <= number:
        return y if len(y) == total else whole(rows_at(y, torch.arange(total)))
    return rows_at(y, _draw_positions(total, number, generator).sort().values)


def drawn_rows(y: Tensor, number: int, generator: torch.Generator | None = None) -> Shard:
    """Random data points in random order, the same on every process.

    ``generator`` is in the same state on every process from now on.
    """
    if find_part(y) is not None:
        synchronize_generator(generator)
    return whole(rows_at(y, _draw_positions(total_rows(y), number, generator)))


def _draw_positions(total: int, number: int, generator: torch.Generator | None) -> Tensor:
    return torch.randperm(total, generator=generator, device=generator_device(generator))[:number]


def synchronize_generator(generator: torch.Generator | None) -> None:
    """Gives a generator the state that it has in the first process."""
    generator = torch.default_generator if generator is None else generator
    generator.set_state(collectives.agree(generator.get_state()))


def own_rows(values: Tensor, y: Tensor) -> Tensor:
    """Selects this process's rows of values ``(N, ...)`` of all data points."""
    return values[y.portion.first : y.portion.first + y.portion.size] if isinstance(y, Shard) else values


def whole(rows: Tensor) -> Shard:
    """Data that every process holds whole, to do the same with them."""
    return Shard.from_rows(as_tensors(rows), Portion(0, len(rows), len(rows)))


def find_memory_map(array: Any) -> mmap.mmap | None:
    """Returns the shared memory map that an array lies in, or ``None``."""
    while isinstance(array, np.ndarray):
        if isinstance(array, np.memmap) and array.mode == "c":
            return None
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def release(file: mmap.mmap | None) -> None:
    """Returns pages that have been read or written to the system."""
    if file is not None and hasattr(file, "madvise"):
        file.madvise(mmap.MADV_DONTNEED)


# The constants of splitmix64.
_STEP, _FIRST, _SECOND = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def fingerprint(shard: Shard) -> int:
    """A 64-bit hash of all data and their positions, however shared."""
    width = max(1, shard[:1].numel())
    rows = max(1, 2**22 // width)
    total = 0
    for start in range(0, len(shard), rows):
        total += _hash_rows(shard[start : start + rows], shard.portion.first + start)
    parts = collectives.gather(total) if shard.portion.is_part else [total]
    return sum(parts) % 2**64


def _hash_rows(rows: torch.Tensor, first: int) -> int:
    entries = rows.detach().cpu().contiguous().reshape(len(rows), -1).numpy()
    bits = entries.view(f"u{entries.itemsize}").astype(np.uint64)
    # Of every entry, mixed with its column; of every data point, mixed with its position.
    columns = _mix(bits + np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * _STEP).sum(1, dtype=np.uint64)
    positions = np.arange(first + 1, first + 1 + len(rows), dtype=np.uint64)
    return int(_mix(columns + positions * _STEP).sum(dtype=np.uint64))


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * _FIRST
    x = (x ^ (x >> np.uint64(27))) * _SECOND
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


_current: ContextVar[RowBatch | None] = ContextVar("pyro_truncated_batch", default=None)


@dataclasses.dataclass(eq=False)
class RowBatch:
    """A minibatch: a context in which the data plate takes these rows.

    Example:
        >>> batch: RowBatch = next(iter(Batches(torch.randn(10, 4), 5, block=1)))
        >>> len(batch.rows), batch.scale
        (5, 2.0)

    Attributes:
        rows: positions ``(n,)`` among the data points of this process. The first one, where none of the minibatch is here.
        num_rows: number of data points of this process.
        scale: number of data points of all processes per one in the minibatch.
        is_idle: whether none of the minibatch is here.
        weight: what the scale of the data plate lacks, where other processes hold other parts of the minibatch; one in a single process.
        data: what it is a minibatch of; what was read of it stays in memory only as long as the minibatch.
    """

    rows: Tensor
    num_rows: int
    scale: float
    is_idle: bool
    weight: float = 1.0
    data: Any = None
    _token: Token[RowBatch | None] | None = None

    def __enter__(self) -> RowBatch:
        self._token = _current.set(self)
        return self

    def __exit__(self, *_: Any) -> None:
        assert self._token is not None
        _current.reset(self._token)
        release_pages(self.data)


def current_batch() -> RowBatch | None:
    """The minibatch that the program is in."""
    return _current.get()


class Batches:
    """Minibatches that hold every data point once per epoch.

    They are made of blocks of successive rows in random order, which depend on the seed and the number of the minibatch. Within a minibatch
    call the model with all data, and without a size for its plate::

        for batch in itertools.islice(distributed.Batches(y, 1000), 30):
            with batch:
                svi.step(y)

    :func:`~pyro_truncated.fit` takes them as ``fit(svi, y, steps=500, batches=distributed.Batches(y, 1000))``.

    Args:
        y: data, or a shard of them.
        size: data points per minibatch, in all processes together. The last one of an epoch may have fewer.
        block: successive rows that stay together; 1 for minibatches of single rows. Data that are sorted want small blocks.
        seed: decides the order.

    Raises:
        ValueError: if a number is no positive integer.
    """

    def __init__(self, y: Any, size: int, *, block: int = 64, seed: int = 0) -> None:
        size, block = check_counts(size=size, block=block)
        self._y = y if isinstance(y, Shard) else None
        self._portion = find_portion(y) or Portion(0, len(y), len(y))
        self.size, self.block, self.seed = size, min(block, size), seed
        if isinstance(y, Shard) and y.file is not None and hasattr(y.file, "madvise"):
            # Blocks are read as they are; otherwise the system reads megabytes around each of them.
            y.file.madvise(mmap.MADV_RANDOM)
        self._blocks_each = size // self.block
        self._num_blocks = -(-self._portion.total // self.block)
        self._order: tuple[int, Tensor] | None = None

    def __len__(self) -> int:
        """The number of minibatches in an epoch."""
        return -(-self._num_blocks // self._blocks_each)

    def __iter__(self) -> Iterator[RowBatch]:
        """All minibatches from the first on, epoch after epoch, without an end."""
        return map(self.at, itertools.count())

    def at(self, step: int) -> RowBatch:
        """The minibatch of a step, counted from zero."""
        epoch, number = divmod(step, len(self))
        starts = self._shuffle(epoch)[number * self._blocks_each : (number + 1) * self._blocks_each] * self.block
        rows = (starts.sort().values.unsqueeze(-1) + torch.arange(self.block)).flatten()
        rows = rows[rows < self._portion.total]
        scale, size = self._portion.total / len(rows), self._portion.size
        own = own_positions(rows, self._portion)
        weight = self._portion.total * len(own) / (len(rows) * size)
        is_idle = not len(own)
        return RowBatch(own.new_zeros(1) if is_idle else own, size, scale, is_idle, 1.0 if is_idle else weight, self._y)

    def _shuffle(self, epoch: int) -> Tensor:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(hash((self.seed, epoch)) % 2**63)
            self._order = epoch, torch.randperm(self._num_blocks, generator=generator)
        return self._order[1]


# Parameters whose rows belong to the data points of each process.
owned_parameters: Any = WeakIdKeyDictionary()


def gather_owned_rows(own: Tensor, portion: Portion, positions: Tensor) -> Tensor:
    """Rows at global positions ``(n,)``, whose gradients go to the owners.

    ``own (m, ...)`` are those of this process. Every process must ask for them, and take the gradient if one of them does.
    """
    rows: Tensor = _OwnerRows.apply(own, portion, positions)  # type: ignore[no-untyped-call]
    return rows


def gather_all_rows(own: Tensor, y: Any) -> Tensor:
    """Gathers rows of all processes in order, unless data are whole."""
    return own if find_part(y) is None else torch.cat(collectives.gather(own.detach().clone()))


def as_shard_like(values: Tensor, y: Any) -> Tensor:
    """Returns rows computed from a shard as such a shard."""
    return Shard.from_rows(values, y.portion) if isinstance(y, Shard) else values


def own_positions(positions: Tensor, portion: Portion | None) -> Tensor:
    """This process's data points among global positions, and their places."""
    return positions if portion is None else positions[portion.holds(positions)] - portion.first


def propagate_shard_errors(arguments: Any) -> AbstractContextManager[None]:
    """A context whose errors end all processes, if arguments hold shards."""
    return nullcontext() if find_part(arguments) is None else collectives.propagate_errors()


class _OwnerRows(Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, portion: Portion, positions: Tensor) -> Tensor:
        """Sends what is here, and zeros for what is elsewhere."""
        ctx.is_mine = portion.holds(positions)
        ctx.places, ctx.shape = positions[ctx.is_mine] - portion.first, own.shape
        rows = own.new_zeros(len(positions), *own.shape[1:])
        rows[ctx.is_mine] = own[ctx.places]
        return collectives.add([rows])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        """The sum over all processes of the gradients of what is here."""
        total = collectives.add([gradients[0]])[0]
        return total.new_zeros(ctx.shape).index_add_(0, ctx.places, total[ctx.is_mine]), None, None


def collect_rows(state: Any) -> dict[str, Tensor]:
    """Returns all tensors of rows in a nested state, by their path.

    A state with rows is a dictionary. ``rows`` are tensors with a row for each of the first data points of this process, zeros where
    unknown. ``first_position`` is that of the first row among all data; ``is_spread`` says whether other processes have the rest.
    """
    rows: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> Tensor:
        rows[name] = tensor
        return tensor

    _map(state, note, {}, "")
    return rows


def without_rows(state: Any) -> Any:
    """The state with empty tensors in their places."""
    # No view: what is saved of one is all that it is a view of.
    return _map(state, lambda _, tensor: tensor[:0].clone(), {}, "")


def with_rows(state: Any, rows: Mapping[str, Tensor], portion: Portion) -> Any:
    """Returns the state with these rows of this process's data points."""
    placement = {"first_position": portion.first, "is_spread": portion.is_part}
    return _map(state, lambda name, tensor: rows.get(name, tensor), placement, "")


def _map(state: Any, change: Callable[[str, Tensor], Tensor], placement: Mapping[str, Any], name: str) -> Any:
    if isinstance(state, list):
        return [_map(value, change, placement, f"{name}.{number}") for number, value in enumerate(state)]
    if not isinstance(state, Mapping):
        return state
    if "rows" in state:
        return {**state, **placement, "rows": {key: change(f"{name}.{key}", tensor) for key, tensor in state["rows"].items()}}
    return {key: _map(value, change, placement, f"{name}.{key}") for key, value in state.items()}
