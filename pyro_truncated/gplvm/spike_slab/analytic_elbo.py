"""The loss of models whose bound needs no sampling."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD
from pyro_truncated.gplvm.spike_slab.switches import NEARLY_ON, settle_switches, switch_moves
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.counts import check_count


class Analytic_ELBO(ELBO):
    r"""Minus the closed-form bound of a model that has one, such as :class:`~pyro_truncated.gplvm.SpikeSlabGPLVM`, as loss for ``SVI``.

    Model and guide must be the methods ``model`` and ``guide`` of one object with a method ``bound``, which takes the same arguments.
    A stock :class:`~pyro.infer.Trace_ELBO` estimates the same number by sampling.

    Gradients switch dimensions off before anything has been learned that they would be good for. Training steps on a
    :class:`~pyro_truncated.gplvm.SpikeSlabMRD` therefore hold its switches: on for the first ``warm_up`` steps since the model was made or
    initialised, then at their optimum in closed form (see :func:`~pyro_truncated.gplvm.settle_switches`), which is found every ``every``
    steps. If the model is collapsed, each is also tried on and off with the inducing variables adapted
    (:func:`~pyro_truncated.gplvm.switch_moves`): a bound without gradient for each switch.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> initialize(model, y)
        >>> svi = SVI(model.model, model.guide, Adam({"lr": 0.01}), Analytic_ELBO(warm_up=2))
        >>> losses = [svi.step(y) for _ in range(3)]

    Args:
        warm_up: number of steps with all switches on; 0 for a model whose switches are to stay where they are at first.
        every: steps between updates of the switches; ``None`` leaves them to the gradient from the first step on.
    """

    @names_arguments
    def __init__(self, *, warm_up: int = 1000, every: int | None = 25) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.warm_up = check_count("warm_up", warm_up, least=0)
        self.every = None if every is None else check_count("every", every)

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the bound.

        Raises:
            TypeError: if model and guide are not the methods of one object with a bound.
        """
        owner = _owner(model, guide)
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
        """Minus the bound as a number, at the switches that this training step holds; adds its gradient to the parameters'."""
        with self._switches(_owner(model, guide), *args, **kwargs):
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss.backward()
        return float(loss.detach())

    def _switches(self, owner: Any, y: Any, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """The next training step of a model with switches: a context that holds them."""
        if self.every is None or not isinstance(owner, SpikeSlabMRD):
            return contextlib.nullcontext()
        with owner._pyro_context:
            # Read, so that Pyro's store has it though no gradient reaches it.
            _ = owner.logits
        step = int(owner.num_steps)
        owner.num_steps += 1
        if step < self.warm_up:
            return owner.holding(1.0)
        if step == self.warm_up > 0:
            with torch.no_grad():
                owner.logits = torch.full_like(owner.logits, NEARLY_ON)
        if (step - self.warm_up) % self.every == 0:
            if owner.collapsed:
                switch_moves(owner, y)
            settle_switches(owner, y)
        return owner.holding(owner.probability.detach())


def _owner(model: Any, guide: Any) -> Any:
    owner: Any = getattr(guide, "__self__", guide)
    if owner is not getattr(model, "__self__", model) or not hasattr(owner, "bound"):
        raise TypeError("Analytic_ELBO needs the methods `model` and `guide` of one model that has a method `bound`; see SpikeSlabGPLVM")
    return owner
