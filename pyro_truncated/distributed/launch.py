"""Training on several processes: their start, sums of gradients and losses."""

from __future__ import annotations

import atexit
import datetime
import os
import sys
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakSet

import pyro
import torch
import torch.distributed as dist
from pyro.infer import ELBO
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.collectives import agree
from pyro_truncated.distributed.shards import collect_rows, find_part, owned_parameters, propagate_shard_errors, synchronize_generator
from pyro_truncated.utils.console import ReprFromArguments
from pyro_truncated.utils.parameter_store import load_snapshot

# SVI shows its optimiser to nobody.
_made: WeakSet[AllReduced] = WeakSet()


class AllReduced(ReprFromArguments, PyroOptim):
    r"""An optimiser that follows the sum of all processes' gradients.

    ``SVI(model, guide, AllReduced(Adam({"lr": 0.01})), Truncated_ELBO(search))`` is the same run on one process and on many. The gradient
    of all data is :math:`\sum_k \nabla L_k`, in one message. Parameters that started alike stay alike to the last bit.

    Example:
        >>> model = BinarySparseCoding(9, 4)
        >>> guide = AutoTruncated(model, num_states=8)
        >>> svi = SVI(model, guide, AllReduced(Adam({"lr": 0.01})), Truncated_ELBO())
        >>> loss = svi.step(shard(torch.randn(10, 9)))

    Args:
        optimizer: an optimiser of Pyro.
        local: names in Pyro's parameter store of parameters with a row per data point, which stay with their process.
            All others must have the same shapes on all processes. Those of :class:`~pyro_truncated.gplvm.SASDecoder`
            are known.

    Raises:
        TypeError: if the optimiser is none of Pyro's.
    """

    def __init__(self, optimizer: PyroOptim, local: Collection[str] = ()) -> None:
        if not isinstance(optimizer, PyroOptim):
            raise TypeError(f"optimizer must be one of pyro.optim, such as Adam({{'lr': 0.01}}); got {type(optimizer).__name__}")
        self.optimizer = optimizer
        self.local = frozenset([local] if isinstance(local, str) else local)
        _made.add(self)

    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """Sums the gradients in the order of names and takes the step."""
        params = list(params)
        with collectives.propagate_errors():
            if collectives.size() > 1:
                self._sum(params)
            self.optimizer(params, *args, **kwargs)

    def _sum(self, params: list[Tensor]) -> None:
        store = pyro.get_param_store()
        # Sets of parameters have another order in every process.
        named = {str(store.param_name(param)): param for param in params}
        shared = [named[name] for name in sorted(named) if name not in self.local and named[name] not in owned_parameters]
        gradients = collectives.add([torch.zeros_like(param) if param.grad is None else param.grad for param in shared])
        for param, gradient in zip(shared, gradients, strict=True):
            param.grad = gradient

    def get_state(self) -> dict[str, Any]:
        """Returns the state of the wrapped optimiser."""
        return self.optimizer.get_state()

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Restores the state of the wrapped optimiser."""
        self.optimizer.set_state(state_dict)


class SummedELBO(ReprFromArguments, ELBO):
    r"""Sums an ELBO of Pyro over the processes, :math:`L = \sum_k L_k`.

    :class:`~pyro_truncated.Truncated_ELBO` sums by itself. An error of one process ends all. What belongs to no data point counts once
    for each process: scale such sites of model and guide by ``1 / size()``. Those of :class:`~pyro_truncated.gplvm.SASDecoder` are.

    Example:
        >>> x = shard(torch.randn(20, 3))
        >>> decoder = pyro_truncated.gplvm.SASDecoder(total_rows(x), 3, num_active=5).initialize(x)
        >>> optimizer = AllReduced(Adam(decoder.learning_rates(0.03)))
        >>> svi = SVI(decoder.model, decoder.guide, optimizer, SummedELBO(pyro.infer.Trace_ELBO()))
        >>> loss = svi.step(x)

    Args:
        elbo: an ELBO.

    Raises:
        TypeError: if it is none, or one that sums by itself; for guides with an ``AutoTruncated`` part.
    """

    def __init__(self, elbo: ELBO) -> None:
        if not isinstance(elbo, ELBO):
            raise TypeError(f"elbo must be an ELBO of Pyro, such as Trace_ELBO(); got {type(elbo).__name__}")
        if hasattr(elbo, "search"):
            raise TypeError(f"{type(elbo).__name__} sums the losses of all processes by itself; do not wrap it")
        super().__init__(num_particles=elbo.num_particles)  # type: ignore[no-untyped-call]
        self.elbo: Any = elbo

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The loss of all data."""
        _refuse_populations(guide)
        with propagate_shard_errors((args, dict(kwargs))):
            return self._total(self.elbo.loss(model, guide, *args, **kwargs), args, kwargs)

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Returns the loss of all data; gradients are of this process's share."""
        _refuse_populations(guide)
        with propagate_shard_errors((args, dict(kwargs))):
            return self._total(self.elbo.loss_and_grads(model, guide, *args, **kwargs), args, kwargs)

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """The loss of all data for ``DistributedDataParallel``, which averages gradients."""
        _refuse_populations(guide)
        with propagate_shard_errors((args, dict(kwargs))):
            own: Tensor = self.elbo.differentiable_loss(model, guide, *args, **kwargs)
            scaled = own if find_part(args, dict(kwargs)) is None else own * collectives.size()
            return scaled + (self._total(float(own.detach()), args, kwargs) - scaled.detach())

    def _total(self, own: float, args: Any, kwargs: Any) -> float:
        return own if find_part(args, dict(kwargs)) is None else float(collectives.add([torch.tensor(own, dtype=torch.float64)])[0])

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self.elbo._get_trace(model, guide, args, kwargs)


def _refuse_populations(guide: Any) -> None:
    if isinstance(guide, torch.nn.Module) and any(hasattr(getattr(part, "populations", None), "stores") for part in guide.modules()):
        raise TypeError(
            "SummedELBO counts once for each process what belongs to no data point, such as the parameters' priors. For guides with an "
            "AutoTruncated part use Truncated_ELBO(), which divides it and sums by itself."
        )


class UnsharedDataWarning(UserWarning):
    """Several processes train, each on all data: independent copies of one model.

    Example:
        >>> device = start()
        >>> warnings.simplefilter("error", UnsharedDataWarning)  # stop rather than train several times what shard() has not split
    """


def start(timeout: float = 600.0) -> torch.device:
    """Joins the processes of a launcher such as ``torchrun``, if any.

    It opens torch's default process group: ``nccl`` where every process of the machine has a GPU of its own, else ``gloo``. Torch and numba
    get ``cores / processes on this machine`` threads, numba unless ``NUMBA_NUM_THREADS`` is set. Torch's global generator gets the state of
    the first process's. At the end of the program the group is closed.

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
    if launcher_world_size() <= 1:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    number = int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
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


def launcher_world_size() -> int:
    """How many processes the launcher says that it has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


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
    """
    parameters = dict(pyro.get_param_store().named_parameters())
    modules = {name: part for name, part in (("model", model), ("guide", guide)) if isinstance(part, torch.nn.Module)}
    for name, module in modules.items():
        parameters |= {f"{name}.{key}": value for key, value in module.named_parameters()}
    if "model" in modules:
        parameters |= {f"model.{key}": value for key, value in model.named_buffers()}
    # Optimisers of other runs, whose parameters the store does not hold, do not count.
    shared_ids = {id(value) for _, value in pyro.get_param_store().named_parameters()}
    stepped = {optimizer: {id(value) for value in optimizer.optimizer.optim_objs} for optimizer in _made}
    local_names = frozenset().union(*(optimizer.local for optimizer, own in stepped.items() if not own or own & shared_ids))
    local_ids = {id(tensor) for name, tensor in parameters.items() if name in local_names}
    tensors = [tensor for _, tensor in sorted(parameters.items()) if id(tensor) not in local_ids]
    load_snapshot(tensors, collectives.agree([tensor.detach() for tensor in tensors]))
    state = search.state_dict()
    # What was learned from shards was learned together: it is alike, but for what each process keeps of its data points.
    if not all(collectives.gather(bool(collect_rows(state)))):
        search.load_state_dict(collectives.agree(state))
    synchronize_generator(None)
