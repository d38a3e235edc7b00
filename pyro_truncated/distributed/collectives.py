"""Collective messages between processes: sum, broadcast, gather, failure.

Each begins with a header of eight numbers, by which processes notice that one has failed, or that they make different calls.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")

_FAILED, _ADD, _AGREE, _GATHER, _COLLECT = range(5)
_PAYLOAD = 4
_NUMBERS = (bool, int, float)
_is_watched: ContextVar[bool] = ContextVar("pyro_truncated_watched", default=False)


class OtherProcessError(RuntimeError):
    """Another process of the run has failed.

    Example:
        >>> try:  # what a process can do before it goes
        ...     total = add([torch.ones(3)])
        ... except OtherProcessError as error:
        ...     print(f"process {rank()} stops: {error}")
    """


def rank() -> int:
    """The number of this process, from zero; 0 without a process group.

    Example:
        >>> rank()  # the last of four says 3
        0
    """
    return dist.get_rank() if size() > 1 else 0


def size() -> int:
    """The number of processes; 1 without a process group.

    Example:
        >>> size()  # under torchrun --nproc_per_node=4 it is 4
        1
    """
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def add(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Sums over all processes, with the same bits, in float64.

    Example:
        >>> (total,) = add([torch.tensor(2.0)])
        >>> total == 2.0 * size()
        tensor(True)

    Args:
        tensors: as many on every process. Shapes may differ where they broadcast: a matrix that is common to all dimensions, say, and
            one for each of them.

    Returns:
        Sums in the types of the tensors; the tensors themselves where there is one process.

    Raises:
        OtherProcessError: if another process has failed.
        ValueError: if the processes hold other shapes, which do not broadcast.
    """
    if size() == 1 or not tensors:
        return list(tensors)
    shapes = [tuple(tensor.shape) for tensor in tensors]
    flat = _flat(tensors)
    is_small = flat.numel() <= _PAYLOAD
    header = _exchange(_ADD, flat.numel(), zlib.crc32(repr(shapes).encode()), flat if is_small else None)
    if bool((header[:, 1:3] != header[0, 1:3]).any()):
        shapes = _common_shapes(gather(shapes))
        flat = _flat([tensor.expand(shape) for tensor, shape in zip(tensors, shapes, strict=True)])
        _all_reduce(flat)
    elif is_small:
        flat = header[:, 4 : 4 + flat.numel()].sum(0)
    else:
        _all_reduce(flat)
    lengths = [torch.Size(shape).numel() for shape in shapes]
    return [part.reshape(shape).to(tensor) for part, shape, tensor in zip(flat.split(lengths), shapes, tensors, strict=True)]


def agree(value: T) -> T:
    """Broadcasts an object of the first process; it must be picklable.

    Example:
        >>> seed = agree(torch.seed())  # the same on all processes

    Raises:
        OtherProcessError: if another process has failed.
    """
    if size() == 1:
        return value
    # The first process decides whether its value fits into the header; values of the others may be of another size or kind.
    kind = next((kind for kind in _NUMBERS if isinstance(value, kind)), None) if rank() == 0 else None
    if kind is not None and not abs(value) < 2**53:  # type: ignore[arg-type]
        kind = None
    # What cannot be pickled fails here, before others wait for it.
    packed = _pack(value) if rank() == 0 and kind is None else torch.empty(0, dtype=torch.uint8)
    number = None if kind is None else torch.tensor([float(value), _NUMBERS.index(kind)], dtype=torch.float64)  # type: ignore[arg-type]
    header = _exchange(_AGREE, len(packed), 0, number)
    if not header[0, 1]:
        return _NUMBERS[int(header[0, 5])](header[0, 4].item())  # type: ignore[return-value]
    message = torch.empty(int(header[0, 1]), dtype=torch.uint8) if rank() else packed
    message = message.to(_device())
    with _explain_lost_process():
        dist.broadcast(message, src=0)
    return value if rank() == 0 else _unpack(message)


def gather(value: T) -> list[T]:
    """Gathers picklable objects of all processes on every process, in order.

    Example:
        >>> gather(f"I am {rank()}")
        ['I am 0']

    Raises:
        OtherProcessError: if another process has failed.
    """
    if size() == 1:
        return [value]
    own, lengths = _pad(_GATHER, value)
    messages = [torch.empty_like(own) for _ in lengths]
    with _explain_lost_process():
        dist.all_gather(messages, own)
    return [_unpack(message[:length]) for message, length in zip(messages, lengths, strict=True)]


def _pad(kind: int, value: Any) -> tuple[Tensor, list[int]]:
    """Returns a message, padded to the longest one, and all lengths."""
    packed = _pack(value)
    lengths = _exchange(kind, len(packed), 0)[:, 1].long().tolist()
    return torch.nn.functional.pad(packed, (0, max(lengths) - len(packed))).to(_device()), lengths


def collect(value: T) -> list[T] | None:
    """Gathers picklable objects on the first process; others get ``None``."""
    if size() == 1:
        return [value]
    own, lengths = _pad(_COLLECT, value)
    messages = [torch.empty_like(own) for _ in lengths] if rank() == 0 else None
    with _explain_lost_process():
        dist.gather(own, messages)
    return None if messages is None else [_unpack(message[:length]) for message, length in zip(messages, lengths, strict=True)]


@contextmanager
def propagate_errors() -> Iterator[None]:
    """A context whose error ends all processes at their next message."""
    if size() == 1 or _is_watched.get():
        yield
        return
    token = _is_watched.set(True)
    try:
        yield
    except OtherProcessError:
        raise
    except Exception as error:
        # The others may have ended already.
        with suppress(RuntimeError):
            _exchange(_FAILED, 0, 0, error=error)
        raise
    finally:
        _is_watched.reset(token)


# --- the messages ---


def _exchange(verb: int, length: int, fingerprint: int, payload: Tensor | None = None, error: Exception | None = None) -> Tensor:
    """The headers ``(K, 8)`` of all processes."""
    own = torch.zeros(4 + _PAYLOAD, dtype=torch.float64)
    own[:4] = torch.tensor([verb, length, fingerprint, error is not None])
    if payload is not None:
        own[4 : 4 + payload.numel()] = payload.cpu()
    device = _device()
    headers = [torch.empty_like(own, device=device) for _ in range(size())]
    with _explain_lost_process():
        dist.all_gather(headers, own.to(device))
    header = torch.stack(headers).cpu()
    if bool(header[:, 3].any()):
        messages: list[Any] = [None] * size()
        with _explain_lost_process():
            dist.all_gather_object(messages, None if error is None else f"{type(error).__name__}: {error}")
        failures = [f"process {number} failed with {message}" for number, message in enumerate(messages) if message is not None]
        raise OtherProcessError("; ".join(failures))
    if bool((header[:, 0] != verb).any()):
        raise OtherProcessError(
            "the processes of this run take different steps: each must make the same calls, in the same order, with the same model"
        )
    return header


def _all_reduce(flat: Tensor) -> None:
    with _explain_lost_process():
        dist.all_reduce(flat)


@contextmanager
def _explain_lost_process() -> Iterator[None]:
    """Says in words of ours that another process is gone."""
    try:
        yield
    except RuntimeError as error:
        raise OtherProcessError(f"another process of this run has ended, or cannot be reached: {error}") from error


def _pack(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpack(message: Tensor) -> Any:
    return pickle.loads(message.cpu().numpy().tobytes())


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1).to(_device(), torch.float64) for tensor in tensors])


def _common_shapes(shapes: list[list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    if len({len(own) for own in shapes}) > 1:
        raise ValueError(f"the processes sum different numbers of tensors: {[len(own) for own in shapes]}")
    try:
        return [tuple(torch.broadcast_shapes(*column)) for column in zip(*shapes, strict=True)]
    except RuntimeError as error:
        differing = sorted({str(column) for column in zip(*shapes, strict=True) if len(set(column)) > 1})
        raise ValueError(f"the processes sum tensors of different shapes: {', '.join(differing)}") from error


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
