"""Compiles kernels to disk in another process of low priority.

``python -m pyro_truncated.ops.compiled.background FOLDER`` is that process, which reads kernels from its standard input, one a line.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import importlib
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import numba

from pyro_truncated.ops import backend

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

VARIABLE = "PYRO_TRUNCATED_BACKGROUND"
# Seconds that the process waits for another kernel before it ends.
_IDLE_SECONDS = 10.0

_asked: set[tuple[str, str, Any]] = set()
_worker: subprocess.Popen[bytes] | None = None


def is_on() -> bool:
    """Whether kernels may be compiled in the background."""
    return (
        os.environ.get(VARIABLE, "1") != "0"
        and not backend.compiles_first()
        and not backend.is_forked
        and multiprocessing.parent_process() is None
        and "python" in Path(sys.executable or "").name.lower()
    )


def compile_later(function: FunctionType, signature: Any, folder: str) -> bool:
    """Asks for a kernel in the background; returns whether it is taken."""
    global _worker
    if not is_on():
        return False
    kernel = function.__module__, function.__name__, signature
    is_running = _worker is not None and _worker.poll() is None
    if kernel in _asked:
        return is_running
    try:
        if not is_running:
            _worker = _start(folder)
        requests: Any = _worker.stdin  # type: ignore[union-attr]
        requests.write(base64.b64encode(pickle.dumps(kernel)) + b"\n")
        requests.flush()
    except OSError:
        return False
    _asked.add(kernel)
    return True


def _start(folder: str) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        VARIABLE: "0",
        "NUMBA_CACHE_DIR": numba.config.CACHE_DIR,  # type: ignore[attr-defined]
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    # On Windows; elsewhere the process lowers its own priority.
    flags = (getattr(subprocess, name, 0) for name in ("IDLE_PRIORITY_CLASS", "CREATE_NO_WINDOW"))
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, folder],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # An interrupt at the terminal is not for this process.
        start_new_session=True,
        creationflags=sum(flags),
    )
    atexit.register(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if not backend.is_forked:
        # Files are written under another name first, so nothing is left half written.
        process.kill()
        # Closes the pipe to it as well.
        process.communicate()


def _read_requests(requests: queue.SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        requests.put(line)
    os._exit(0)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Waits until no other process compiles into the folder, by locks."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / "compiling.lock").open("w"))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> None:
    """Compiles what is asked for."""
    if hasattr(os, "nice"):
        os.nice(19)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(requests,), daemon=True).start()
    with contextlib.suppress(queue.Empty):
        while True:
            module, name, signature = pickle.loads(base64.b64decode(requests.get(timeout=_IDLE_SECONDS)))
            with _lock_folder(Path(sys.argv[1])):
                # What another process has compiled in the meantime is read from disk.
                kernel = getattr(importlib.import_module(module), name)
                getattr(kernel, "compiled", kernel).compile(signature)


if __name__ == "__main__":
    main()
