"""Start of a process: the process group, its threads, and equal parameters."""

from __future__ import annotations

import atexit
import datetime
import os
import sys
from typing import Any

import pyro
import torch
import torch.distributed as dist

from pyro_truncated.distributed import world
from pyro_truncated.distributed.all_reduced import local_names
from pyro_truncated.distributed.owned_rows import rows_of
from pyro_truncated.distributed.shards import draw_alike
from pyro_truncated.distributed.world import agree


class UnsharedDataWarning(UserWarning):
    """Several processes train, each on all data: independent copies of one model.

    Example:
        >>> device = start()
        >>> warnings.simplefilter("error", UnsharedDataWarning)  # stop rather than train several times what shard() has not split
    """


def start(timeout: float = 600.0) -> torch.device:
    """Joins the processes of a launcher such as ``torchrun``, if any.

    It opens torch's default process group, unless that is open. The backend is ``nccl`` where every process of the
    machine has a GPU of its own, else ``gloo``. Torch and numba get ``cores / processes on this machine`` threads,
    numba unless ``NUMBA_NUM_THREADS`` is set. Torch's global generator gets the state of the first process's, so that
    all draw alike. At the end of the program the group is closed.

    Example:
        >>> device = start()  # alone, and under torchrun --nproc_per_node=4 script.py
        >>> rank(), size()
        (0, 1)

    Args:
        timeout: seconds after which a process that waits for others gives up.

    Returns:
        The device of this process: its GPU, or the CPU.

    Raises:
        ValueError: if the timeout is not positive.
    """
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds; got {timeout}")
    if launched_processes() <= 1:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    number, local = int(os.environ.get("LOCAL_RANK", os.environ["RANK"])), _on_this_machine()
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= local
    device = torch.device("cuda", number) if has_gpus else torch.device("cpu")
    if has_gpus:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if has_gpus else "gloo", timeout=datetime.timedelta(seconds=timeout))
        atexit.register(_stop)
    _share_cores(local)
    torch.set_rng_state(agree(torch.get_rng_state()))
    return device


def launched_processes() -> int:
    """How many processes the launcher says that it has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def _share_cores(processes: int) -> None:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = max(1, cores // processes)
    torch.set_num_threads(threads)
    if "NUMBA_NUM_THREADS" in os.environ:
        return
    if "numba" in sys.modules:
        import numba

        numba.set_num_threads(min(threads, numba.get_num_threads()))
    else:
        os.environ["NUMBA_NUM_THREADS"] = str(threads)


def _stop() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def start_as_first(model: Any, guide: Any, search: Any) -> None:
    """Broadcasts parameters, buffers, search and random state of the first process.

    Parameters that :class:`AllReduced` leaves to every process stay as they are.

    Args:
        model: a model.
        guide: its guide.
        search: has ``state_dict`` and ``load_state_dict``.
    """
    held = dict(pyro.get_param_store().named_parameters())
    modules = {name: part for name, part in (("model", model), ("guide", guide)) if isinstance(part, torch.nn.Module)}
    for name, module in modules.items():
        held |= {f"{name}.{key}": value for key, value in module.named_parameters()}
    if "model" in modules:
        held |= {f"model.{key}": value for key, value in model.named_buffers()}
    left = {id(tensor) for name, tensor in held.items() if name in local_names()}
    tensors = [tensor for _, tensor in sorted(held.items()) if id(tensor) not in left]
    for tensor, value in zip(tensors, world.agree([tensor.detach() for tensor in tensors]), strict=True):
        tensor.copy_(value)
    learned = search.state_dict()
    # What was learned from shards was learned together: it is alike, but for what each process keeps of its data points.
    if not all(world.gather(bool(rows_of(learned)))):
        search.load_state_dict(world.agree(learned))
    draw_alike(None)
