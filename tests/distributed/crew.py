"""Processes that wait for functions to run together, each time as a process group of as many of them as are asked for."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


class CrewError(AssertionError):
    """A member has failed where it should not."""


class Crew:
    """Processes that are started once and run many functions; after one has hung, all are started anew.

    Args:
        number: how many.
        limit: seconds after which one that has not answered hangs. The first function may have to wait until kernels are compiled.
    """

    def __init__(self, number: int, limit: float = 180.0) -> None:
        self.number, self.limit = number, limit
        self.folder = tempfile.TemporaryDirectory()
        self._groups = 0
        self._start()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        pairs = [context.Pipe() for _ in range(self.number)]
        self._pipes = [pair[0] for pair in pairs]
        self._members = [context.Process(target=_serve, args=(pair[1],), daemon=True) for pair in pairs]
        for member in self._members:
            member.start()

    def run(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What so many processes return, by rank; errors that they raise are returned, too."""
        self._groups += 1
        store = str(Path(self.folder.name) / f"group-{self._groups}")
        for rank, pipe in enumerate(self._pipes[:number]):
            pipe.send((rank, number, store, function, args, kwargs))
        for pipe in self._pipes[:number]:
            if not pipe.poll(self.limit):
                # Its answer would be taken for that to the next question.
                self._stop(0.0)
                self._start()
                raise CrewError("a process hangs")
        return [pipe.recv() for pipe in self._pipes[:number]]

    def results(self, number: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What so many processes return, by rank.

        Raises:
            CrewError: if one of them fails.
        """
        found = self.run(number, function, *args, **kwargs)
        for value in found:
            if isinstance(value, BaseException):
                raise CrewError("\n".join(map(str, found))) from value
        return found

    def end(self) -> None:
        """Ends the processes."""
        self._stop(5.0)
        self.folder.cleanup()

    def _stop(self, patience: float) -> None:
        for pipe, member in zip(self._pipes, self._members, strict=True):
            pipe.close()
            member.join(patience)
            member.kill()


def _serve(pipe: Connection) -> None:
    import faulthandler
    import signal
    import warnings

    import pyro
    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    while True:
        try:
            rank, number, store, function, args, kwargs = pipe.recv()
        except EOFError:
            return
        pyro.clear_param_store()
        pyro.set_rng_seed(rank)
        pyro.enable_validation(True)
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=number)
            result = function(*args, **kwargs)
        except Exception as error:
            error.add_note(traceback.format_exc())
            result = error
        if dist.is_initialized():
            dist.destroy_process_group()
        pipe.send(result)
