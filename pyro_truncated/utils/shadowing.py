"""Whose parameters are whose: Pyro keeps all of them in one store, by name, whichever module they belong to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pyro_truncated.utils.module_parameters import Parameter, is_managed, modules_of, parameters_of

# The modules in whose hands a tensor of the store has been seen. They may be gone: then it has been another module's all the same.
_holders: Any = WeakIdKeyDictionary()
# How often torch.load changes a tensor in place while it makes it.
_VERSION_OF_READ = 1


def replaced_parameters(*programs: Any) -> Iterator[tuple[Parameter, Tensor]]:
    """Parameters for which Pyro's store holds another tensor than their module does, and that tensor."""
    store = pyro.get_param_store()._params
    for module in modules_of(*programs):
        for parameter in parameters_of(module):
            stored = store.get(parameter.name)
            if stored is not None and stored is not parameter.tensor:
                yield parameter, stored


def refuse_shadowed(*programs: Any, training: bool = False) -> None:
    """Checks that programs have their parameters for themselves.

    Pyro looks a parameter up in its store first, by name, and puts what it finds in the place of the module's own. Where that was the
    tensor of another module, a model forgets how it was initialised and goes on from the other's parameters, and changes them. Parameters
    that were read from a file or set by hand are meant to replace those of a module, and do. Where numbers are equal nothing is lost by
    looking (``training=False``), but the two would be trained as one.

    Raises:
        ValueError: naming the parameters, and what to do.
    """
    if pyro.settings.get("module_local_params"):
        return
    shadowed = [parameter.name for parameter, stored in replaced_parameters(*programs) if _is_shadowed(parameter, stored, training)]
    if training:
        shadowed += [name for module in modules_of(*programs) for name in _shared(module)]
    if shadowed:
        raise ValueError(_complaint(shadowed))
    for module in modules_of(*programs):
        for parameter in parameters_of(module):
            hold(parameter, training)


class ShadowWatch(Messenger):
    """Refuses shadowed parameters when a program asks for them: where functions name them, and those that a guide makes as it first runs.

    Args:
        guide: what runs under it for the first time, if that is known.
    """

    def __init__(self, guide: Any = None) -> None:
        super().__init__()
        self._prefix = f"{guide._pyro_name}." if isinstance(guide, AutoGuide) else None

    def _pyro_param(self, msg: Any) -> None:
        if len(msg["args"]) < 2:
            return
        name, own = msg["args"][:2]
        stored = pyro.get_param_store()._params.get(name)
        if stored is None or stored is own:
            return
        is_made_anew = self._prefix is not None and name.startswith(self._prefix) and _was_used(stored)
        if is_made_anew or (isinstance(own, torch.nn.Parameter) and _is_used_and_differs(own, stored)):
            raise ValueError(_complaint([name]))


def hold(parameter: Parameter, training: bool) -> None:
    """Remembers in whose hands a parameter is, and the tensor of the store that will take its place."""
    stored = pyro.get_param_store()._params.get(parameter.name, parameter.tensor)
    tensors = [parameter.tensor, stored] if training or _may_go_on(parameter, stored) else [parameter.tensor]
    for tensor in tensors:
        _holders.setdefault(tensor, weakref.WeakSet()).add(parameter.holder)


def was_held(stored: Tensor) -> bool:
    """Whether a tensor of the store has been some module's."""
    return stored in _holders


def _is_shadowed(parameter: Parameter, stored: Tensor, training: bool) -> bool:
    return _is_used_and_differs(parameter.tensor, stored) or (training and _was_used(stored) and not _may_go_on(parameter, stored))


def _may_go_on(parameter: Parameter, stored: Tensor) -> bool:
    """Whether a module whose numbers are those of the store may be trained on from there, with the store's tensor.

    The numbers of what has been trained can only be the same in a copy, which is made to go on from there. Pyro puts parameters that it
    manages in place of the module's own; others would be left behind and not be trained at all.
    """
    return is_managed(parameter) and (stored._version > 0 or not _is_held_by_others(parameter, stored))


def _is_used_and_differs(own: Tensor, stored: Tensor) -> bool:
    is_same = own.shape == stored.shape and torch.equal(own.detach().to(stored), stored.detach())
    return not is_same and _was_used(stored)


def _was_used(stored: Tensor) -> bool:
    """Whether a tensor of the store has been some module's, or an optimiser has changed it since it was made or read from a file."""
    return stored in _holders or (isinstance(stored, torch.nn.Parameter) and stored._version > _VERSION_OF_READ)


def _shared(module: torch.nn.Module) -> list[str]:
    """Parameters that were found in the store when they were made, or first used, where another module had left them."""
    store, is_guide = pyro.get_param_store()._params, isinstance(module, AutoGuide)
    own = [parameter for parameter in parameters_of(module) if store.get(parameter.name) is parameter.tensor]
    return [
        parameter.name
        for parameter in own
        if parameter.holder not in _holders.get(parameter.tensor, (parameter.holder,))
        and (is_guide or (is_managed(parameter) and _is_held_by_others(parameter, parameter.tensor)))
    ]


def _is_held_by_others(parameter: Parameter, stored: Tensor) -> bool:
    return any(holder is not parameter.holder for holder in _holders.get(stored, ()))


def _complaint(names: Iterable[str]) -> str:
    return (
        f"Pyro's parameter store holds other parameters {sorted(names)} than the model or the guide: those of another one, made earlier, "
        "that calls its parameters the same. Pyro keeps parameters by name, so it would put those in the place of these, and train both as "
        "one. If the earlier one is no longer needed, call pyro.clear_param_store() before making model and guide. Else give each names of "
        'its own, by PyroModule.__init__(self, name="...") or, for an automatic guide, by a class of its own ("class Second(AutoNormal): '
        'pass"), or run each under "with pyro.get_param_store().scope(state):".'
    )
