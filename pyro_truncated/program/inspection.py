"""Inspection of models and guides: hidden and other latents, running statistics."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.do_messenger import DoMessenger
from pyro.poutine.lift_messenger import LiftMessenger
from pyro.poutine.mask_messenger import MaskMessenger
from pyro.poutine.messenger import Messenger
from pyro.poutine.reparam_messenger import ReparamMessenger
from pyro.poutine.runtime import _PYRO_STACK, effectful
from pyro.poutine.scale_messenger import ScaleMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.uncondition_messenger import UnconditionMessenger
from torch.nn.modules.module import register_module_forward_pre_hook

from pyro_truncated.program.call import Call
from pyro_truncated.program.sites import latent_nodes


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """A context whose tensors may be changed and trained later.

    It also works inside :func:`torch.inference_mode`, without gradients there.
    """
    if not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


_CHANGE_MODELS = (
    ConditionMessenger,
    DoMessenger,
    LiftMessenger,
    MaskMessenger,
    ReparamMessenger,
    ScaleMessenger,
    UnconditionMessenger,
)


def refuse_handlers_around() -> None:
    """Refuses handlers around that change models, whose runs are hidden from them.

    Those of a program that is traced, as by ``Predictive``, are that program's own.
    """
    if any(isinstance(handler, TraceMessenger) and not handler.param_only for handler in _PYRO_STACK):
        return
    # What handlers do to messages does not say who they are, so that Pyro's private stack of them has to.
    kinds = [type(handler).__name__ for handler in _PYRO_STACK if isinstance(handler, _CHANGE_MODELS)]
    if kinds:
        name = f"poutine.{kinds[0].removesuffix('Messenger').lower()}"
        raise NotImplementedError(
            f"a guide is called inside of `with {name}(...):`, which its runs of the model would not see. Give the model the handler, "
            f"{name}(model, ...), and make the guide of that model."
        )


def refuse_hidden_latents(call: Call) -> None:
    """Checks that no block handler around the model hides latent sites."""
    hidden: list[str] = []
    model = call.model
    while isinstance(model, functools.partial) and len(model.args) >= 2 and isinstance(model.args[0], Messenger):
        handler, model = model.args[:2]
        if isinstance(handler, BlockMessenger):
            with poutine.block(), torch.no_grad():
                nodes = latent_nodes(call.with_program(model).trace())
            hidden += [node["name"] for node in nodes if handler.hide_fn(node)]
    if hidden:
        raise ValueError(
            f"the model given to AutoTruncated hides its latents {hidden} (poutine.block), so they would be drawn anew from the prior "
            "whenever a state is scored. Give AutoTruncated the whole model: it takes the discrete sites and leaves the others to "
            "other guides."
        )


class _OpenPlates(Messenger):
    """Effect handler that answers which plates a site would lie in."""

    def _pyro_post_open_plates(self, msg: Any) -> None:
        # Every plate adds itself to every message.
        msg["value"] = msg["cond_indep_stack"]


@effectful(type="open_plates")
def _open_plates() -> tuple[Any, ...]:
    return ()


def plates_around(own: Container[str], site: str | None = None) -> list[Any]:
    """Returns open vectorised plates that are not the model's."""
    with _OpenPlates():
        frames: tuple[Any, ...] = _open_plates(name=site)
    return [frame for frame in frames if frame.vectorized and frame.name not in own]


@contextmanager
def warn_about_running_statistics() -> Iterator[None]:
    """Warns of layers in training mode that keep running statistics."""
    layers: dict[str, None] = {}

    def note(module: torch.nn.Module, _: Any) -> None:
        if module.training and getattr(module, "running_mean", None) is not None:
            layers[type(module).__name__] = None

    handle = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
    if layers:
        warnings.warn(
            f"the model runs {', '.join(layers)} in training mode: each run normalises by the states in it and updates the running "
            "statistics. Call .eval() of these layers, or take LayerNorm.",
            UserWarning,
            stacklevel=3,
        )
