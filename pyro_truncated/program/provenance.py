"""Which latents a tensor is computed from, where Pyro's provenance ends.

It ends in numbers of Python, and in memory that is written into.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any

import torch
from pyro.infer.inspect import TrackProvenance
from pyro.ops.provenance import extract_provenance, track_provenance
from torch import Tensor
from torch.overrides import TorchFunctionMode

_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__"}
_LEAKS = _READS | {"ones", "zeros", "full"}
# Functions whose results have as many entries as values say; what tells shapes, types and memory, and no values.
_SIZES = {"nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "bincount"}
_SHAPES = {
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "__len__",
    "stride",
    "storage_offset",
    "element_size",
    "get_device",
    "data_ptr",
}
_SHAPES |= {"__get__", "__hash__"}
# Functions that take of their other arguments the shape or type alone: a distribution's parameters are broadcast against each other.
_KEEP_OWN_VALUES = {"broadcast_tensors", "type_as", "expand_as", "view_as", "reshape_as"}
# What writes into its first argument, beside methods that end with an underscore; and what overwrites all that it writes to.
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = {"__setitem__"} | {f"__i{name}__" for name in _OPERATORS}
_OVERWRITES = {"__setitem__", "copy_", "fill_", "zero_"}


class FollowLatents(TrackProvenance):
    """Marks what is sampled, not parameters, which handlers around may keep."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def _pyro_post_param(self, msg: Any) -> None:
        pass


class WrittenMemory:
    """Remembers which latents were written into which entries of tensors.

    While memory is remembered nothing else gets its address.
    """

    def __init__(self) -> None:
        self._names: list[frozenset[str]] = [frozenset()]
        self._memory: dict[int, tuple[torch.UntypedStorage, Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._memory)

    def write(self, target: Tensor, index: Any, names: frozenset[str]) -> None:
        """Notes that values of these latents were written into a tensor."""
        entries = self._entries(target, is_new=bool(names))
        if entries is None:
            return
        if entries.shape != target.shape:
            names, index = names.union(*self._names), ...
        self._names.append(names)
        number = len(self._names) - 1
        try:
            entries[index] = number
        except (IndexError, RuntimeError, TypeError):
            entries.fill_(number)

    def read(self, tensor: Tensor) -> frozenset[str]:
        """Returns the latents that were written into a tensor's entries."""
        entries = self._entries(tensor, is_new=False) if self._memory else None
        if entries is None:
            return frozenset()
        # Of larger tensors all names of their memory count.
        numbers = entries.unique().tolist() if entries.numel() <= 10**6 else range(len(self._names))
        return frozenset().union(*(self._names[number] for number in numbers))

    def shares(self, tensor: Tensor) -> bool:
        """Whether latents were written into the memory of a tensor."""
        return self._entries(tensor, is_new=False) is not None

    def _entries(self, tensor: Tensor, is_new: bool) -> Tensor | None:
        """Returns numbers of a tensor's entries, in memory of their own."""
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes() // tensor.element_size()
        except (NotImplementedError, RuntimeError):
            # Sparse tensors, and those inside of `vmap`, have no memory to be seen.
            return None
        if not address or (address not in self._memory and not is_new):
            return None
        _, numbers = self._memory.setdefault(address, (storage, torch.zeros(size, dtype=torch.int64)))
        # Under another type an entry is no entry: then all of the memory counts.
        return numbers.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()) if len(numbers) == size else numbers


class PythonReads(TorchFunctionMode):
    """Records latents whose values leave tensors, where provenance ends.

    It also keeps the provenance correct there, and in tensors that are written into (``x[..., 0] = z``).

    Attributes:
        names: the latents that have left it so far.
        read: those of them whose values Python code has looked at.
        stack: where that was so first; empty if nowhere.
        written: the memory that they were written into.
    """

    def __init__(self, written: WrittenMemory | None = None) -> None:
        super().__init__()
        self.written = WrittenMemory() if written is None else written
        self.names: frozenset[str] = frozenset()
        self.read: frozenset[str] = frozenset()
        self.stack: Sequence[traceback.FrameSummary] = ()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        sources: set[str] = set()
        tensors: list[Tensor] = []
        plain, keywords = (_strip_provenance(one, sources, tensors) for one in (args, kwargs or {}))
        shown = frozenset(sources)
        if self.written:
            sources.update(*map(self.written.read, tensors))
        if name in _LEAKS:
            self._note(frozenset(sources), name in _READS)
        results = func(*plain, **keywords)
        # What is taken by a mask is as much as the mask says.
        sized_by = self.sources(args[1:]) if name in ("__getitem__", "masked_select") else sources
        if sources and sized_by and _tells_values(name, plain, results):
            self._note(frozenset(sources), is_read=True)
        if sources or self.written:
            self._note_write(name, plain, keywords, args, frozenset(sources))
        if name == "new" or (isinstance(results, Tensor) and results.layout is not torch.strided):
            # Sparse tensors cannot carry a provenance.
            return results
        if name not in _KEEP_OWN_VALUES:
            if self.written and isinstance(results, Tensor) and self.written.shares(results):
                # Of memory that a view shares, its own entries count.
                sources = {*shown, *self.written.read(results)}
            return track_provenance(results, frozenset(sources)) if sources else results
        if isinstance(results, (tuple, list)):
            own = args[0] if isinstance(args[0], (tuple, list)) else args
            return type(results)(track_provenance(value, self.sources(one)) for value, one in zip(results, own, strict=True))
        return track_provenance(results, self.sources(args[0]))

    def _note(self, names: frozenset[str], is_read: bool) -> None:
        self.names |= names
        if is_read and names:
            self.stack = self.stack or traceback.extract_stack()
            self.read |= names

    def _note_write(self, name: str, plain: Sequence[Any], keywords: dict[str, Any], args: Sequence[Any], sources: frozenset[str]) -> None:
        """Notes what a function has written into one of its arguments."""
        target, index = keywords.get("out"), ...
        if name in _WRITES or (name.endswith("_") and not name.endswith("__")):
            target = plain[0] if plain else keywords.get("tensor", keywords.get("input"))
        if name in _OVERWRITES and isinstance(target, Tensor):
            # Of an index that depends on latents, entries that are not written depend on them, too.
            is_certain = name != "__setitem__" or not self.sources(args[1])
            sources = self.sources(args[1:]) if is_certain else sources
            index = plain[1] if is_certain and name == "__setitem__" else ...
        for tensor in target if isinstance(target, (tuple, list)) else [target]:
            if isinstance(tensor, Tensor):
                self.written.write(tensor, index, sources)

    def sources(self, value: Any) -> frozenset[str]:
        """Returns the sites that a value is computed from."""
        names: set[str] = set()
        tensors: list[Tensor] = []
        _strip_provenance(value, names, tensors)
        return frozenset(names).union(*map(self.written.read, tensors))


def _tells_values(name: str, args: Sequence[Any], results: Any) -> bool:
    """Whether a function tells Python values of its arguments.

    That is by its result, as ``torch.equal`` does, or by its size, as ``torch.unique`` does.
    """
    if name == "__getitem__":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in index)
    is_property = name in _SHAPES or (name.startswith("is_") and name != "is_nonzero")
    is_number = isinstance(results, (bool, int, float, complex)) and not is_property
    return is_number or name in _SIZES or (name == "where" and len(args) == 1)


def _strip_provenance(value: Any, sources: set[str], tensors: list[Tensor]) -> Any:
    """Strips provenance, noted in ``sources``, of arguments, whose tensors are listed."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([_strip_provenance(part, sources, tensors) for part in value])
    if kind is dict:
        return {key: _strip_provenance(part, sources, tensors) for key, part in value.items()}
    # A shape stays one: torch takes a tuple in its place for numbers.
    if kind is torch.Size or not isinstance(value, (Tensor, tuple, list, dict, set, frozenset)):
        return value
    plain, names = (value, frozenset()) if kind is Tensor else extract_provenance(value)
    sources |= names
    if isinstance(plain, Tensor):
        tensors.append(plain)
    return plain
