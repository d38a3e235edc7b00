"""Which latents a tensor is computed from.

Torch's operations tell it, those inside of scripts and ``vmap``, too. It ends where values leave tensors, as numbers of Python do.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pyro_truncated.program.operations import FACTORIES, tensors_in
from pyro_truncated.utils.parameter_store import reads_count

# Methods that tell Python values by no operation, and functions that take sizes.
_EXPORTS = {"numpy", "tolist", "data_ptr", "__array__", "__dlpack__", "__deepcopy__"}
_SIZED = {"ones", "zeros", "full"}
# Operations of which only a number that may be given says how many results there are.
_SIZED_BY_NUMBERS = {"one_hot", "linalg_lstsq", "_ctc_loss"}
# What overwrites all that it writes to.
_OVERWRITES = {"copy_", "fill_", "zero_"}


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
        entries[index] = len(self._names) - 1

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


class FollowLatents(TorchDispatchMode):
    """Follows the values that a program samples.

    Attributes:
        names: the latents whose values have left tensors so far.
        read: those of them whose values Python code has looked at.
        seen: by sample site, the latents that had left tensors when it was reached.
        stack: where Python has looked first; empty if nowhere.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: frozenset[str] = frozenset()
        self.read: frozenset[str] = frozenset()
        self.seen: dict[str, frozenset[str]] = {}
        self.stack: Sequence[traceback.FrameSummary] = ()
        self._sources: Any = WeakIdKeyDictionary()
        self._written = WrittenMemory()
        # The latents that a function of torch has taken numbers of, if one is called.
        self._numbers: frozenset[str] | None = None
        self._others = ExitStack()

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch asks, as it would import its compiler for every mode that it skips: for a second.
        return False

    def __enter__(self) -> Self:
        if "torch._dynamo" in sys.modules:
            # What is compiled shows no operations.
            self._others.enter_context(torch.compiler.set_stance("force_eager"))
        self._others.enter_context(_Functions(self))
        self._others.enter_context(_Samples(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._others.close()

    def note_sample(self, name: str, value: Any, is_observed: bool) -> None:
        """Notes what a sample statement returns."""
        self.seen[name] = self.names
        for tensor in () if is_observed else tensors_in(value):
            self._sources[tensor] = frozenset({name})

    def note_leak(self, names: frozenset[str], is_read: bool = True) -> None:
        """Notes that values of latents leave tensors."""
        self.names |= names
        if names and is_read and reads_count.get():
            self.stack = self.stack or traceback.extract_stack()
            self.read |= names

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch.

        It may take numbers out of tensors, such as an index, and put them into others: then Python does not look at them.
        """
        name, self._numbers = getattr(func, "__name__", ""), frozenset()
        before = self.names, self.read, self.stack
        try:
            result = func(*args, **kwargs)
        finally:
            numbers, self._numbers = self._numbers, None
        if isinstance(result, str):
            # What is printed changes nothing.
            self.names, self.read, self.stack = before
            return result
        if name in _EXPORTS:
            numbers = self.sources(args)
        if numbers and name == "__setitem__":
            self._written.write(args[0], ..., self.sources(args[0]) | numbers)
        elif numbers:
            tensors = list(tensors_in(result))
            if not tensors or name in _SIZED:
                self.note_leak(numbers, is_read=not tensors)
            for tensor in tensors:
                self._sources[tensor] = self._direct([tensor]) | numbers
        return result

    def sources(self, value: Any) -> frozenset[str]:
        """Returns the sites that a value is computed from."""
        tensors = list(tensors_in(value))
        return self._direct(tensors).union(*map(self._written.read, tensors))

    def _direct(self, tensors: Sequence[Tensor]) -> frozenset[str]:
        return frozenset().union(*(self._sources.get(tensor, ()) for tensor in tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = list(tensors_in((args, kwargs)))
        direct, sources = self._direct(given), self.sources(given)
        result = func(*args, **kwargs)
        # Those that call functions, such as torch.cond, have no tags.
        name, tags = func.__name__.partition(".")[0], getattr(func, "tags", ())
        if not sources and not self._written:
            return result
        if torch.Tag.data_dependent_output in tags and self._numbers is not None:
            self._numbers |= sources
        elif self._tells_values(tags, name, args):
            self.note_leak(sources)
        is_in_place = name.endswith("_") and (name.startswith("__i") or not name.endswith("__"))
        target = args[0] if is_in_place else kwargs.get("out")
        if target is not None:
            self._note_write(name, target, args, sources)
        elif name not in FACTORIES:
            for tensor in tensors_in(result):
                # Of memory that a view shares, its own entries count.
                self._sources[tensor] = direct if self._written and self._written.shares(tensor) else sources
        return result

    def _tells_values(self, tags: Collection[Any], name: str, args: Any) -> bool:
        """Whether Python sees values, or a size that they say."""
        if name in ("index", "masked_select"):
            # What is taken by a mask is as much as the mask says.
            return any(tensor.dtype in (torch.bool, torch.uint8) and bool(self.sources(tensor)) for tensor in tensors_in(args[1:]))
        is_sized = torch.Tag.dynamic_output_shape in tags and name not in _SIZED_BY_NUMBERS
        return is_sized or torch.Tag.data_dependent_output in tags

    def _note_write(self, name: str, target: Any, args: Any, sources: frozenset[str]) -> None:
        """Notes what an operation has written into one of its arguments."""
        index: Any = ...
        if name in _OVERWRITES:
            sources = self.sources(args[1:])
        elif name == "index_put_" and not (any(args[3:]) or self.sources(args[1])):
            sources, index = self.sources(args[2]), tuple(slice(None) if part is None else part for part in args[1])
        for tensor in tensors_in(target):
            self._written.write(tensor, index, sources)


class _Functions(TorchFunctionMode):
    """Tells which functions of torch are called."""

    def __init__(self, latents: FollowLatents) -> None:
        super().__init__()
        self._latents = latents

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._latents.call(func, args, kwargs or {})


class _Samples(Messenger):
    """Tells what is sampled."""

    def __init__(self, latents: FollowLatents) -> None:
        super().__init__()
        self._latents = latents

    def _pyro_post_sample(self, msg: Any) -> None:
        if not site_is_subsample(msg):
            self._latents.note_sample(msg["name"], msg["value"], msg["is_observed"])
