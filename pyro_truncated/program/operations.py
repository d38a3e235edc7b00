"""What is computed from tensors, and which of it is reduced."""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions.constraints import Constraint
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from pyro_truncated.program.sites import recorded_names

# Functions that take shape and type of their arguments, and not their values; and those that take some entries.
FACTORIES = {"new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "full_like", "empty_like"}
_INDEXING = {"index", "index_select", "gather", "take"}


class Operations(TorchDispatchMode):
    """Follows what is computed from tensors.

    Scripts, compiled functions and ``vmap`` show their operations, where they do not show their functions.

    A tensor with a dimension of some size has a multiple of that many entries. What is computed from it and has no such number is reduced
    over the dimension. Some entries of it are not, nor is what has a size that depends on values.
    """

    def __init__(self, dimensions: Sequence[tuple[int, Iterable[Tensor]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # By identity, while a tensor lives: bits of the sizes that it has a multiple of, and of those that it has lost.
        self._marks: Any = WeakIdKeyDictionary()
        self._sizes = [size for size, _ in dimensions]
        for place, (size, own) in enumerate(dimensions):
            for source in own:
                self._mark(source, (source.numel() % size == 0) << place, 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch asks, as it would import its compiler for every mode that it skips: for a second.
        return False

    def __contains__(self, tensor: Tensor) -> bool:
        return tensor in self._marks

    def _mark(self, tensor: Tensor, whole: int, reduced: int) -> None:
        known = self._marks.get(tensor, (0, 0))
        self._marks[tensor] = known[0] | whole, known[1] | reduced

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        given = [self._marks[tensor] for tensor in tensors_in((args, kwargs)) if tensor in self]
        if given and name not in FACTORIES:
            # One entry of a dimension may be one of all in turn. Distinct entries are as many as values say. Which of them an entry is may
            # serve to look up what was computed once for each. But how often each occurs depends on all.
            is_dynamic = torch.Tag.dynamic_output_shape in func.tags
            is_sum = not func.is_view and name not in _INDEXING and (not is_dynamic or name == "bincount")
            dimensions = functools.reduce(operator.or_, (whole for whole, _ in given))
            lost = functools.reduce(operator.or_, (reduced for _, reduced in given))
            for place, tensor in enumerate(tensors_in(result)):
                if is_dynamic and place == 2:
                    self._mark(tensor, 0, lost | dimensions)
                    continue
                sizes = [tensor.numel()] if name not in _INDEXING else _untouched_sizes(name, args, kwargs)
                kept = sum(any(own % size == 0 for own in sizes) << bit for bit, size in enumerate(self._sizes))
                reduced = lost | (dimensions & ~kept if is_sum else 0)
                self._mark(tensor, dimensions & kept & ~reduced, reduced)
        return result

    def reduced_site(self, nodes: Mapping[str, Any], number: int) -> str | None:
        """Returns a sample site that depends on what has lost a dimension."""
        recorded = recorded_names(nodes)
        for name, node in nodes.items():
            parts = [node["fn"], node["mask"], node["scale"], *([node["value"]] if node["is_observed"] else [])]
            if name not in recorded and any(tensor in self and self._marks[tensor][1] >> number & 1 for tensor in tensors_in(parts)):
                return name
        return None


class Shape(NamedTuple):
    """The dimensions of a tensor behind those of states."""

    plain: int  # how many there are in a plain run
    padded: int  # how many there are on sets of states, with ones left of the plain ones


def _untouched_sizes(name: str, args: Any, kwargs: Any) -> list[int]:
    """Sizes of the dimensions that an index leaves as they are."""
    shape, rest = args[0].shape, [*args[1:], *(kwargs or {}).values()]
    if name == "index":
        # A mask stands for as many dimensions as it has.
        indices = [index for index in rest[0] for _ in range(index.dim() if index is not None and index.dtype == torch.bool else 1)]
        indices += [None] * len(shape)
        return [size for size, index in zip(shape, indices, strict=False) if index is None]
    dim = next((part for part in rest if isinstance(part, int)), None)
    return [] if dim is None else [size for place, size in enumerate(shape) if place != dim % max(1, len(shape))]


# How what a model puts together is broadcast: not at all, or with stacks of latents outside of plates as events, or as plates.
BROADCASTS = ("", "events", "plates")


class BroadcastParts(TorchFunctionMode):
    """Broadcasts what ``torch.stack``, ``torch.cat``, ``torch.gather`` and the like put together.

    States lie in dimensions left of all others, those of several nodes in dimensions of their own. So latents with one shape in a plain
    run have different ones, or more dimensions than ``torch.einsum`` or ``torch.bmm`` are told of. What torch takes as it is stays so.

    But an index of a latent, ``z[group]``, and a stack of several count the dimensions of a plain run. So do those of what has their shape.
    """

    def __init__(self, latents: Iterable[tuple[Tensor, Shape]] = (), *, fills_plates: bool = False) -> None:
        super().__init__()
        self._fills_plates = fills_plates
        # By identity, while a tensor lives.
        self._shapes: dict[int, tuple[weakref.ref[Tensor], Shape]] = {}
        for latent, shape in latents:
            if latent.dim() > shape.plain:
                self._note(latent, shape)

    def _note(self, tensor: Tensor, shape: Shape) -> None:
        shapes, key = self._shapes, id(tensor)
        shapes[key] = weakref.ref(tensor, lambda _: shapes.pop(key, None)), shape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__getitem__" and id(args[0]) in self._shapes:
            args = args[0], _behind_states(args[1], self._shapes[id(args[0])][1].plain)
        if name == "stack" and (stack := self._stack_latents(*args, **(kwargs or {}))) is not None:
            return stack
        try:
            result = func(*args, **(kwargs or {}))
        except (RuntimeError, IndexError, ValueError):
            broadcast = _BROADCAST.get(name)
            if broadcast is None:
                raise
            return broadcast(*args, **(kwargs or {}))
        if self._shapes and isinstance(result, Tensor) and result.dim() and id(result) not in self._shapes:
            self._note_broadcast(result, list(tensors_in(args)))
        return result

    def _note_broadcast(self, result: Tensor, parts: Sequence[Tensor]) -> None:
        """Notes the dimensions of what has the shape of its arguments."""
        noted = [(part, self._shapes[id(part)][1]) for part in parts if id(part) in self._shapes]
        for part, shape in noted:
            if part.shape == result.shape:
                self._note(result, shape)
                return
        plain = max((shape.plain for _, shape in noted), default=0)
        if len({shape.padded for _, shape in noted}) == 1 and all(part.dim() <= plain for part in parts if id(part) not in self._shapes):
            with contextlib.suppress(ValueError):
                if broadcast_shape(*(part.shape for part in parts)) == result.shape:
                    self._note(result, Shape(plain, noted[0][1].padded))

    def _stack_latents(self, tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
        shapes = {self._shapes[id(tensor)][1] if id(tensor) in self._shapes else None for tensor in tensors}
        shape = shapes.pop() if len(shapes) == 1 else None
        # In front of all plates there is no place for it but left of the states.
        if shape is None or (shape.padded == shape.plain and dim == 0):
            return None
        has_room = self._fills_plates and shape.padded > shape.plain
        if has_room:
            tensors = [tensor.squeeze(-1 - shape.plain) for tensor in tensors]
        result = _stack(tensors, dim - shape.plain - 1 if dim >= 0 else dim)
        self._note(result, Shape(shape.plain + 1, shape.padded if has_room else shape.padded + 1))
        return result


def _behind_states(index: Any, num_dims: int) -> Any:
    """Returns an index of the last dimensions, given one of the first."""
    parts = index if isinstance(index, tuple) else (index,)
    if any(part is Ellipsis for part in parts):
        return index
    counted = (part.dim() if isinstance(part, Tensor) and part.dtype == torch.bool else 1 for part in parts if part is not None)
    rest = num_dims - sum(counted)
    return (Ellipsis, *parts, *[slice(None)] * rest) if rest >= 0 else index


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.stack(torch.broadcast_tensors(*tensors), dim)


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    return torch.cat(_broadcast_beyond(tensors, dim), dim)


def _gather(input: Tensor, dim: int, index: Tensor, **options: Any) -> Tensor:
    dim = dim - input.dim() if dim >= 0 else dim
    values, places = _broadcast_beyond([input, index], dim)
    return torch.gather(values, dim, places, **options)


def _take_along_dim(input: Tensor, indices: Tensor, dim: int | None = None) -> Tensor:
    if dim is None:
        raise RuntimeError("take_along_dim without dim mixes states that lie in dimensions of their own")
    return _gather(input, dim, indices)


def _einsum(equation: str, *operands: Any) -> Tensor:
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow or "..." in equation:
        raise RuntimeError(f"einsum('{equation}') does not say which dimensions are left of those of a plain run")
    return torch.einsum(",".join(f"...{part}" for part in inputs.split(",")) + f"->...{output}", *operands)


def _index_select(input: Tensor, dim: int, index: Tensor) -> Tensor:
    if dim not in (0, -input.dim()):
        raise RuntimeError("index_select mixes states with the dimensions left of the one that it selects from")
    return input[index]


def _broadcast_beyond(tensors: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Returns tensors of one shape, but for a dimension from the right."""
    moved = [tensor.movedim(dim, -1) for tensor in tensors]
    shape = broadcast_shape(*(tensor.shape[:-1] for tensor in moved))
    return [tensor.expand(*shape, -1).movedim(-1, dim) for tensor in moved]


_BROADCAST: dict[str, Callable[..., Tensor]] = {
    "stack": _stack,
    "cat": _cat,
    "concat": _cat,
    "gather": _gather,
    "take_along_dim": _take_along_dim,
    "einsum": _einsum,
    "index_select": _index_select,
    "bmm": torch.matmul,
    "mm": torch.matmul,
}


def recognisable_size(nodes: Mapping[str, Any], most: int = 63, least: int = 3) -> int | None:
    """Returns a size that divides no dimension of some sample sites.

    Values of so many states are recognised by their number of entries. It is larger than the number of sites where possible, which may be
    stacked, and then at least as large as given, or nearly. ``None`` if there is none up to ``most``.
    """
    sizes = {size for node in nodes.values() for size in (*node["fn"].shape(), *torch.as_tensor(node["value"]).shape)}
    primes = [number for number in range(3, most + 1) if all(number % divisor for divisor in range(2, number))]
    primes.sort(key=lambda prime: (prime <= len(nodes), prime < least, abs(prime - least)))
    return next((prime for prime in primes if all(size % prime for size in sizes if size)), None)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in nested containers, distributions, transforms and constraints."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from tensors_in(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, (torch.distributions.Distribution, torch.distributions.Transform, Constraint)):
        # A transform and its inverse hold each other.
        yield from tensors_in({name: part for name, part in vars(value).items() if name != "_inv"})
