"""The state of a training run, and its restoration."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated.distributed.launch import AllReduced
from pyro_truncated.search.base import Search
from pyro_truncated.utils.devices import brought, device_of_module
from pyro_truncated.utils.parameter_store import relative_names

_COUNTS = ("num_evaluations", "num_steps")


def state_of(svi: SVI) -> dict[str, Any]:
    """Returns the complete state of a run under portable names.

    It is made of tensors and plain Python values.
    """
    elbo, search = elbo_of(svi), search_of(svi)
    return {
        "modules": {name: module.state_dict() for name, module in modules_of_run(svi).items()},
        "params": relative_names({name: value.detach() for name, value in loose_parameters(svi).items()}, svi.model, svi.guide),
        "optim": relative_names(svi.optim.get_state(), svi.model, svi.guide),
        "counts": {name: getattr(elbo, name) for name in _COUNTS if hasattr(elbo, name)},
        "search": {} if search is None else search.state_dict(),
        "generators": {name: generator.get_state() for name, generator in generators_of(svi)},
    }


def set_state(svi: SVI, state: Mapping[str, Any], leaves: Collection[str] = ()) -> None:
    """Loads a state into a run, without the parts that may differ.

    These are ``"optimizer"`` and ``"search"``.

    Names of parameters are those of this process.
    """
    params = loose_parameters(svi)
    for name, module in modules_of_run(svi).items():
        module.load_state_dict(state["modules"][name])
    with torch.no_grad():
        for name, value in state["params"].items():
            params[name].copy_(value)
    if "optimizer" not in leaves:
        _set_optimizer(svi.optim, state["optim"])
    search = search_of(svi)
    if search is not None and "search" not in leaves:
        search.load_state_dict(brought(state["search"], _device_of(svi)))
    for name, generator in generators_of(svi):
        if name in state["generators"]:
            generator.set_state(state["generators"][name])
    for name, count in state["counts"].items():
        if hasattr(elbo_of(svi), name):
            setattr(elbo_of(svi), name, count)


def _device_of(svi: SVI) -> torch.device:
    """Returns the model's device, which learned values are loaded to."""
    loose = next(iter(loose_parameters(svi).values()), None)
    return device_of_module(modules_of_run(svi).get("model")) if loose is None else loose.device


def remembered(svi: SVI) -> Callable[[], None]:
    """Returns a function that restores the present state of a run.

    It covers modules, parameters, optimiser, search, counts and generators.
    """
    parts = [(part, _snapshot(part)) for module in modules_of_run(svi).values() for part in module.modules()]
    tensors = [*loose_parameters(svi).values(), *(param for module in modules_of_run(svi).values() for param in module.parameters())]
    values = [(tensor, tensor.detach().clone()) for tensor in tensors]
    optimizer = _innermost(svi.optim)
    optim = {name: copy.copy(value) if isinstance(value, dict) else value for name, value in vars(optimizer).items()}
    generators = [(generator, generator.get_state()) for _, generator in generators_of(svi)]
    search, counts = search_of(svi), {name: getattr(elbo_of(svi), name) for name in _COUNTS if hasattr(elbo_of(svi), name)}
    learned = {} if search is None else search.state_dict()

    def undo() -> None:
        """Puts everything back as it was."""
        for part, held in parts:
            part.__dict__.update(held)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        vars(optimizer).update(optim)
        if search is not None:
            search.load_state_dict(learned)
        for generator, drawn in generators:
            generator.set_state(drawn)
        for name, count in counts.items():
            setattr(elbo_of(svi), name, count)

    return undo


def _snapshot(module: torch.nn.Module) -> dict[str, Any]:
    buffers: dict[str, Any] = {name: None if value is None else value.clone() for name, value in module._buffers.items()}
    return {**module.__dict__, "_buffers": buffers}


def _innermost(optim: Any) -> Any:
    return optim.optimizer if isinstance(optim, AllReduced) else optim


def _set_optimizer(optim: Any, state: Any) -> None:
    optim = _innermost(optim)
    if hasattr(optim, "optim_objs"):
        # Pyro gives a state only to optimisers of parameters that it has not met.
        optim.optim_objs.clear()
        optim.grad_clip.clear()
    optim.set_state(copy.deepcopy(state))


def modules_of_run(svi: SVI) -> dict[str, torch.nn.Module]:
    """Returns the modules of model and guide, each once.

    Methods and handlers are unwrapped.
    """
    found = {name: module for name, part in (("model", svi.model), ("guide", svi.guide)) if (module := _module_of(part)) is not None}
    if found.get("model") is found.get("guide"):
        found.pop("guide", None)
    return found


def _module_of(part: Any) -> torch.nn.Module | None:
    while isinstance(part, functools.partial):
        part = next((argument for argument in part.args[::-1] if callable(argument)), None)
    owner = getattr(part, "__self__", part)
    return owner if isinstance(owner, torch.nn.Module) else None


def loose_parameters(svi: SVI) -> dict[str, Tensor]:
    """Returns unconstrained store parameters of no module of the run."""
    owned = {id(param) for module in modules_of_run(svi).values() for param in module.parameters()}
    return {name: param for name, param in pyro.get_param_store().named_parameters() if id(param) not in owned}


def elbo_of(svi: SVI) -> Any:
    """The ELBO, ``None`` where the loss is a function of its own."""
    return getattr(svi.loss, "__self__", None)


def search_of(svi: SVI) -> Search | None:
    """The search of the ELBO, if it has one."""
    search = getattr(elbo_of(svi), "search", None)
    return search if isinstance(search, Search) else None


def generators_of(svi: SVI) -> Iterator[tuple[str, torch.Generator]]:
    """Returns torch's global generators and that of the ELBO.

    Searches save their own.
    """
    yield "cpu", torch.default_generator
    if torch.cuda.is_available():
        torch.cuda.init()
        for index, generator in enumerate(torch.cuda.default_generators):
            yield f"cuda:{index}", generator
    own: torch.Generator | None = getattr(elbo_of(svi), "generator", None)
    if own is not None:
        yield "elbo", own
