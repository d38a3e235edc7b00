"""Atomic files with a checksum, and files of one process's rows."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import Portion

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None  # type: ignore[assignment]

_logger = logging.getLogger(__name__)
_MARK = b"\npyro_truncated sha256 "
_TRAILER = len(_MARK) + 64
_BLOCK_BYTES = 2**20


def write(path: Path, content: Any) -> None:
    """Writes tensors and plain values with a checksum.

    The file appears under its name once it is complete and on the disk. After an error the last one is as it was.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write_whole(temporary, content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        # The new name, too, must survive a loss of power. Not every file system can be asked.
        with suppress(OSError):
            descriptor = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
    except OSError as error:
        raise OSError(error.errno, f"the checkpoint cannot be written: {error.strerror or error}", str(path)) from error


def read(path: Path) -> Any:
    """Reads what :func:`write` wrote, and verifies its checksum.

    Tensors are mapped: what is not used never comes into memory, and what was used can leave it again. They stay as they are when another
    file takes the name of theirs.
    """
    with path.open("rb") as file:
        try:
            _verify(file, path)
            # Windows replaces no file that is mapped.
            return torch.load(path, map_location="cpu", weights_only=True, mmap=os.name != "nt")
        except OSError as error:
            raise OSError(error.errno, f"the checkpoint cannot be read: {error.strerror or error}", str(path)) from error
        except (ValueError, MemoryError):
            raise
        except Exception as error:
            # Of a file that holds more than tensors and plain values torch says so in as many ways as there are files.
            raise ValueError(f"{path} is not a checkpoint written by save_checkpoint: torch cannot read it ({error})") from error


@contextmanager
def claim_path(path: Path) -> Iterator[None]:
    """A context in which only this run writes to a path.

    Remains of killed runs are removed.
    """
    path = Path(os.path.realpath(path))
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "checkpoint must name a file, and this is a folder", str(path))
    if path.exists() and not path.is_file():
        raise ValueError(f"checkpoint must name a file; {path} is a device, a pipe or a socket")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"the checkpoint's folder cannot be made: {error.strerror}", str(path.parent)) from error
    lock = path.with_name(f"{path.name}.lock")
    descriptor = _lock(lock, path)
    try:
        for file in path.parent.iterdir():
            if re.fullmatch(re.escape(path.name) + r"\.\d+\.tmp", file.name):
                file.unlink(missing_ok=True)
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


class _HashingFile:
    """A file that keeps a checksum and the first error of writing."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file, self.digest = file, hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        """Writes and hashes; after an error, raises that error again."""
        if self.error is not None:
            raise self.error
        try:
            self.digest.update(data)
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()


def _write_whole(path: Path, content: Any) -> None:
    with path.open("wb") as file:
        stream = _HashingFile(file)
        try:
            torch.save(content, stream)  # type: ignore[arg-type]
        except RuntimeError:
            # Torch speaks of positions in its archive, not of the disk.
            if stream.error is not None:
                raise stream.error from None
            raise
        file.write(_MARK + stream.digest.hexdigest().encode())
        file.flush()
        os.fsync(file.fileno())


def _verify(file: IO[bytes], path: Path) -> None:
    size = file.seek(0, os.SEEK_END) - _TRAILER
    file.seek(max(0, size))
    trailer = file.read()
    if size < 0 or not trailer.startswith(_MARK):
        raise ValueError(f"{path} is not a checkpoint written by save_checkpoint, or it was cut short: there is no checksum at its end")
    file.seek(0)
    digest = hashlib.sha256()
    while size > 0:
        block = file.read(min(_BLOCK_BYTES, size))
        digest.update(block)
        size -= len(block)
    if trailer != _MARK + digest.hexdigest().encode():
        raise ValueError(f"{path} is damaged: its content does not have the checksum that it was written with. Take a copy or start over")


def _lock(lock: Path, path: Path) -> int:
    """Locks a file beside the checkpoint until the process ends."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise OSError(error.errno, f"checkpoints cannot be written here: {error.strerror}", str(path)) from error
        try:
            if fcntl is not None:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever held it before may have removed it in between.
            if os.fstat(descriptor).st_nlink > 0:
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise RuntimeError(
                f"another run is writing checkpoints to {path}: each would overwrite the other's. Give this run a file of its own, or wait"
            ) from None
        except OSError as error:
            # Some network file systems have no locks.
            _logger.warning("%s cannot be locked (%s): make sure that no other run writes to it", path, error)
            return descriptor
        os.close(descriptor)


def rows_folder(path: Path) -> Path:
    """Where the files that belong to a checkpoint lie."""
    return path.with_name(f"{path.name}.rows")


def write_rows(folder: Path, values: Mapping[str, Tensor], portion: Portion) -> dict[str, Any]:
    """Writes tensors of this process's rows as ``.npy`` files; returns which."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for name, value in values.items():
        file = folder / _file_name(name, portion.first, portion.size)
        with file.open("wb") as stream:
            np.save(stream, value.detach().cpu().numpy(), allow_pickle=False)
            stream.flush()
            os.fsync(stream.fileno())
        sums[name] = _checksum(file)
    return {"first": portion.first, "size": portion.size, "sums": sums}


def read_rows(folder: Path, pieces: list[dict[str, Any]], name: str, portion: Portion) -> Tensor:
    """Reads a process's rows of one tensor from the files of all."""
    last, parts, position = portion.first + portion.size, [], portion.first
    for piece in sorted(pieces, key=lambda piece: int(piece["first"])):
        first, end = piece["first"], piece["first"] + piece["size"]
        if end <= position or first >= last:
            continue
        file = folder / _file_name(name, first, piece["size"])
        if _checksum(file) != piece["sums"][name]:
            raise ValueError(f"{file} is damaged: its content does not have the checksum that it was written with")
        # Mapped: only requested rows are read.
        rows = np.load(file, mmap_mode="r", allow_pickle=False)[position - first : min(end, last) - first]
        parts.append(torch.from_numpy(np.array(rows)))
        position = min(end, last)
    if position < last or not parts:
        raise ValueError(f"{folder} must hold rows up to {last - 1}; got none from {position} on")
    return torch.cat(parts)


def remove_others(folder: Path, name: str) -> None:
    """Removes rows of earlier and of unfinished checkpoints."""
    for other in folder.iterdir():
        if other.name != name:
            with suppress(OSError):
                shutil.rmtree(other)


def _file_name(name: str, first: int, size: int) -> str:
    return f"{name}-{first:012d}-{first + size - 1:012d}.npy"


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum
