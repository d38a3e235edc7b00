"""A device that is none: tensors that say they are elsewhere, lie on the CPU, and count what a real device would be asked.

What runs here has been through every line that runs on a GPU. An operation that would wait for the device (a *sync*: a value that the host
looks at, a shape that depends on values, a copy to or from the host) is noted with the line that asked for it; every other operation that
computes is a *launch*. Tensors of different devices in one operation are an error, as they are on a GPU.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

DEVICE = torch.device("meta")
_ROOT = Path(__file__).parent.parent
_OURS = (str(_ROOT / "pyro_truncated"), str(_ROOT / "models"))

# What looks at values to know what to do next, or how large its result is.
_LOOKS = {
    "_linalg_check_errors",
    "_linalg_eigh",
    "_linalg_svd",
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "masked_select",
    "multinomial",
    "nonzero",
    "unique_consecutive",
    "unique_dim",
}
_INDEXING = {"_index_put_impl_", "_unsafe_index", "index", "index_put", "index_put_"}
_FREE = {"_unsafe_view", "empty", "empty_like", "empty_strided", "lift_fresh", "new_empty", "new_empty_strided"}


# The state of the generator on the device.
_drawing = [torch.Generator().manual_seed(1).get_state()]


class Pretender(torch.Tensor):
    """A tensor on the pretended device.

    Attributes:
        inner: where its values are.
    """

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretender:
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.size(), dtype=inner.dtype, device=DEVICE, **layout)
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pretender({self.inner})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """The tensor without its history."""
        return Pretender(self.inner)

    @data.setter
    def data(self, value: Pretender) -> None:
        self.inner = value.inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What is saved of a device's tensor is read on the CPU.
        return self.inner.__reduce_ex__(protocol)

    def data_ptr(self) -> int:
        """Where the values are."""
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes without counting, outside of a :class:`PretendedDevice`."""
        return _Call(func, args, kwargs or {}).result()


class PretendedDevice(TorchDispatchMode):
    """A context in which :data:`DEVICE` is such a device.

    Attributes:
        launches: how often each operation was launched, by its name.
        launched_by: how often each line has launched something.
        syncs: how often each line waited, by file, line, function and operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self._numbers = _Numbers()
        self.launches: Counter[str] = Counter()
        self.launched_by: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._numbers.__enter__()
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._numbers.__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes and counts."""
        call = _Call(func, args, kwargs or {})
        if call.is_on_device:
            if call.waits:
                self.syncs[f"{_asking_line()} {call.name}"] += 1
            elif not call.is_free:
                self.launches[call.name] += 1
                self.launched_by[_asking_line()] += 1
        return call.result()

    def forget(self) -> None:
        """Begins to count anew."""
        for counter in (self.launches, self.launched_by, self.syncs):
            counter.clear()


class _Numbers(TorchFunctionMode):
    """Python numbers become tensors on the host, and are copied from there, and back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and not isinstance(args[0], Tensor):
            device = kwargs.pop("device", None)
            return func(*args, **kwargs) if device is None else func(*args, **kwargs).to(device)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            return func(args[0], _with_tensors(args[1]), *args[2:])
        if func is Tensor.tolist:
            return func(args[0].to("cpu"))
        if func is Tensor.new_tensor:
            device = kwargs.pop("device", args[0].device)
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(device)
        return func(*args, **kwargs)


def _with_tensors(index: Any) -> Any:
    """An index whose lists are tensors on the host."""
    if isinstance(index, tuple):
        return tuple(map(_with_tensors, index))
    return torch.tensor(index) if isinstance(index, list) else index


class _Call:
    """One operation, with what it is given."""

    def __init__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.name: str = func._schema.name.removeprefix("aten::")
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self.theirs = [tensor for tensor in tensors if isinstance(tensor, Pretender)]
        self.from_host = [tensor for tensor in tensors if not isinstance(tensor, Pretender)]
        self.target = kwargs.get("device")
        self.is_on_device = bool(self.theirs) or self._makes_there

    @property
    def _makes_there(self) -> bool:
        return self.target is not None and torch.device(self.target) == DEVICE

    @property
    def is_free(self) -> bool:
        """Whether nothing is computed: views, and memory that is asked for."""
        is_view = any(value.alias_info is not None and not value.alias_info.is_write for value in self.func._schema.returns)
        return is_view or self.name in _FREE

    @property
    def waits(self) -> bool:
        """Whether the host waits for the device."""
        return self.name in _LOOKS or self._travels or self._indexes_by_values or self._repeats_unknown

    @property
    def _travels(self) -> bool:
        """Whether values go from host to device or back."""
        if self.name == "_to_copy":
            # The driver takes what comes from the host into memory of its own; nobody waits unless asked to.
            is_upload = self._makes_there and not self.theirs
            return self.target is not None and (
                (is_upload and not self.kwargs.get("non_blocking")) or (bool(self.theirs) and not self._makes_there)
            )
        return self.name == "copy_" and bool(self.from_host) and bool(self.theirs)

    @property
    def _indexes_by_values(self) -> bool:
        """Whether a mask is an index, whose number of entries must be known, or an index comes from the host."""
        if self.name not in _INDEXING:
            return False
        indices = [index for index in self.args[1] if index is not None]
        if any(not isinstance(index, Pretender) for index in indices):
            return True
        masks = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
        # One number for all entries of a mask is filled in.
        return masks and not (self.name != "index" and self.args[2].numel() == 1)

    @property
    def _repeats_unknown(self) -> bool:
        return self.func is torch.ops.aten.repeat_interleave.Tensor and self.kwargs.get("output_size") is None

    def result(self) -> Any:
        """What comes of it, on the device unless it is copied from there."""
        if not self.is_on_device:
            return self.func(*self.args, **self.kwargs)
        self._check_devices()
        wrappers = {id(tensor.inner): tensor for tensor in self.theirs}
        args, kwargs = tree_map_only(Pretender, lambda tensor: tensor.inner, (self.args, self.kwargs))
        leaves_device = self.target is not None and not self._makes_there
        if self.target is not None:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        out = self._drawn_there(args, kwargs) if torch.Tag.nondeterministic_seeded in self.func.tags else self.func(*args, **kwargs)
        if leaves_device:
            return out
        leaves, spec = tree_flatten(out)
        wrapped = [wrappers[id(leaf)] if id(leaf) in wrappers else _wrapped(leaf) for leaf in leaves]
        return tree_unflatten(wrapped, spec)

    def _drawn_there(self, args: Any, kwargs: Any) -> Any:
        """Random numbers of the device's own generator: the one on the host is not asked."""
        if kwargs.get("generator") is not None:
            return self.func(*args, **kwargs)
        host = torch.get_rng_state()
        torch.set_rng_state(_drawing[-1])
        try:
            return self.func(*args, **kwargs)
        finally:
            _drawing[-1] = torch.get_rng_state()
            torch.set_rng_state(host)

    def _check_devices(self) -> None:
        if self.name in ("copy_", "_to_copy", "lift_fresh") or self.name in _INDEXING:
            return
        # A number on the host may take part in arithmetic, but not be put beside others.
        strangers = [tensor for tensor in self.from_host if tensor.dim() > 0 or self.name in ("cat", "stack")]
        if self.theirs and strangers:
            raise RuntimeError(f"{self.name}: tensors on different devices at {_asking_line()}: {[tuple(t.shape) for t in strangers]}")


def _wrapped(leaf: Any) -> Any:
    return Pretender(leaf) if isinstance(leaf, Tensor) else leaf


def there(thing: Any) -> Any:
    """A tensor on the pretended device, or a module whose parameters and buffers are moved there."""
    if isinstance(thing, Tensor):
        return Pretender(thing.detach().clone()).requires_grad_(thing.requires_grad)
    for module in thing.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(Pretender(parameter.detach().clone()))
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = Pretender(buffer.detach().clone())
    return thing


def here(tensor: Tensor) -> Tensor:
    """The values of a tensor, wherever it is."""
    return tensor.inner if isinstance(tensor, Pretender) else tensor


def _asking_line() -> str:
    """The innermost line of the project that is being run."""
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    path = Path(frame.f_code.co_filename).relative_to(_ROOT)
    return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
