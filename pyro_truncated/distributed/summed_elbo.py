"""Losses that add up over processes."""

from __future__ import annotations

from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_truncated.distributed import world
from pyro_truncated.distributed.owned_rows import ending_together
from pyro_truncated.distributed.shards import portion_of
from pyro_truncated.utils.console import Described


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
            scaled = own * (world.size() if _is_part(args, kwargs) else 1)
            return scaled + (self._total(float(own.detach()), args, kwargs) - scaled.detach())

    def _total(self, own: float, args: Any, kwargs: Any) -> float:
        return float(world.add([torch.tensor(own, dtype=torch.float64)])[0]) if _is_part(args, kwargs) else own

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return self.elbo._get_trace(model, guide, args, kwargs)


def _is_part(args: Any, kwargs: Any) -> bool:
    portion = portion_of((args, dict(kwargs)))
    return portion is not None and portion.is_part
