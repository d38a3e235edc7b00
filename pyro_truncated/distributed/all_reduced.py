"""Training on several processes: gradients and losses are summed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakSet

import pyro
import torch
from pyro.infer import ELBO
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.owned_rows import ending_together, is_owned
from pyro_truncated.distributed.shards import is_spread
from pyro_truncated.utils.console import Described

# SVI shows its optimiser to nobody.
_made: WeakSet[AllReduced] = WeakSet()


def local_names() -> frozenset[str]:
    """Names of the parameters that are left to every process."""
    return frozenset().union(*(optimizer.local for optimizer in _made))


class AllReduced(Described, PyroOptim):
    r"""An optimiser that follows the sum of all processes' gradients.

    ``SVI(model, guide, AllReduced(Adam({"lr": 0.01})), Truncated_ELBO(search))`` is the same run on one process and on many.
    Losses are sums over data points, so that the gradient of all data is :math:`\sum_k \nabla L_k` (and no mean), in one message.
    Parameters that started alike, with the first process's values, stay alike to the last bit. Without other processes it is the
    optimiser alone.

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
        with world.failing_together():
            if world.is_shared():
                self._sum(params)
            self.optimizer(params, *args, **kwargs)

    def _sum(self, params: list[Tensor]) -> None:
        store = pyro.get_param_store()
        # Sets of parameters have another order in every process.
        named = {str(store.param_name(param)): param for param in params}
        shared = [named[name] for name in sorted(named) if name not in self.local and not is_owned(named[name])]
        gradients = world.add([torch.zeros_like(param) if param.grad is None else param.grad for param in shared])
        for param, gradient in zip(shared, gradients, strict=True):
            param.grad = gradient

    def get_state(self) -> dict[str, Any]:
        """The optimiser's state."""
        return self.optimizer.get_state()

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Restores the optimiser's state."""
        self.optimizer.set_state(state_dict)


class SummedELBO(Described, ELBO):
    r"""Sums an ELBO of Pyro over the processes.

    .. math:: L = \sum_k L_k

    :class:`~pyro_truncated.Truncated_ELBO` sums by itself. This class is for models trained by ELBOs of Pyro, such as
    :class:`~pyro_truncated.gplvm.SASDecoder`. An error of one process ends all. Without other processes, and without
    shards among the arguments, it is the ELBO alone.

    Example:
        >>> x = shard(torch.randn(20, 3))
        >>> decoder = pyro_truncated.gplvm.SASDecoder(total_rows(x), 3, num_active=5).initialize(x)
        >>> optimizer = AllReduced(Adam(decoder.learning_rates(0.03)))
        >>> svi = SVI(decoder.model, decoder.guide, optimizer, SummedELBO(pyro.infer.Trace_ELBO()))
        >>> loss = svi.step(x)

    Args:
        elbo: an ELBO.

    Raises:
        TypeError: if it is none, or one that sums by itself.
    """

    def __init__(self, elbo: ELBO) -> None:
        if not isinstance(elbo, ELBO):
            raise TypeError(f"elbo must be an ELBO of Pyro, such as Trace_ELBO(); got {type(elbo).__name__}")
        if hasattr(elbo, "search"):
            raise TypeError(f"{type(elbo).__name__} sums the losses of all processes by itself: take it as it is")
        super().__init__(num_particles=elbo.num_particles)  # type: ignore[no-untyped-call]
        self.elbo: Any = elbo

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """The loss of all data."""
        with ending_together((args, dict(kwargs))):
            return self._total(self.elbo.loss(model, guide, *args, **kwargs), args, kwargs)

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Returns the loss of all data; gradients are of this process's share."""
        with ending_together((args, dict(kwargs))):
            return self._total(self.elbo.loss_and_grads(model, guide, *args, **kwargs), args, kwargs)

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the loss of all data for ``DistributedDataParallel``.

        The mean of its gradients over the processes is the gradient of all data.
        """
        with ending_together((args, dict(kwargs))):
            own: Tensor = self.elbo.differentiable_loss(model, guide, *args, **kwargs)
            scaled = own * (world.size() if is_spread(args, dict(kwargs)) else 1)
            return scaled + (self._total(float(own.detach()), args, kwargs) - scaled.detach())

    def _total(self, own: float, args: Any, kwargs: Any) -> float:
        return float(world.add([torch.tensor(own, dtype=torch.float64)])[0]) if is_spread(args, dict(kwargs)) else own

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self.elbo._get_trace(model, guide, args, kwargs)
