"""The loss of models whose bound needs no sampling."""

from __future__ import annotations

from typing import Any

from pyro.infer import ELBO
from torch import Tensor


class Analytic_ELBO(ELBO):
    """Minus the closed-form bound of a model that has one, such as :class:`~pyro_truncated.gplvm.SpikeSlabGPLVM`, as loss for ``SVI``.

    Model and guide must be the methods ``model`` and ``guide`` of one object with a method ``bound``, which takes the same arguments.
    A stock :class:`~pyro.infer.Trace_ELBO` estimates the same number by sampling.
    """

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the bound.

        Raises:
            TypeError: if model and guide are not the methods of one object with a bound.
        """
        owner: Any = getattr(guide, "__self__", guide)
        if owner is not getattr(model, "__self__", model) or not hasattr(owner, "bound"):
            raise TypeError(
                "Analytic_ELBO needs the methods `model` and `guide` of one model that has a method `bound`; see SpikeSlabGPLVM"
            )
        # Within the module's context reading a parameter announces it to SVI.
        with owner._pyro_context:
            loss: Tensor = -owner.bound(*args, **kwargs)
        return loss

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound as a number."""
        return float(self.differentiable_loss(model, guide, *args, **kwargs).detach())

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError("Analytic_ELBO draws nothing; use Trace_ELBO for traces")

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound as a number; adds its gradient to the parameters'."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss.backward()
        return float(loss.detach())
