"""Which parameters a Pyro program has, and what Pyro's store calls them."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from pyro.params.param_store import param_with_module_name
from torch import Tensor


class Parameter(NamedTuple):
    """A parameter of a module, as Pyro's store knows it."""

    name: str
    holder: torch.nn.Module
    tensor: Tensor


def modules_of(*programs: Any) -> list[torch.nn.Module]:
    """The modules that Pyro programs consist of: themselves, under handlers, of bound methods, in closures, models of guides."""
    found: dict[int, torch.nn.Module] = {}
    pending = list(programs)
    while pending:
        program = pending.pop(0)
        if isinstance(program, torch.nn.Module):
            if id(program) not in found:
                found[id(program)] = program
                pending += [part._model[0] for part in program.modules() if isinstance(part, AutoGuide) and part._model is not None]
        elif isinstance(program, functools.partial):
            pending += [program.func, *program.args]
        elif inspect.ismethod(program):
            pending.append(program.__self__)
        elif inspect.isfunction(program):
            pending += [value for value in _variables(program) if _is_module(value)]
    return list(found.values())


def _variables(function: Any) -> Iterator[Any]:
    """What a function reads from around it (``inspect.getclosurevars`` would take names of attributes for those of globals)."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            yield cell.cell_contents
    names = {instruction.argval for instruction in dis.get_instructions(function) if instruction.opname == "LOAD_GLOBAL"}
    yield from (function.__globals__[name] for name in sorted(names & function.__globals__.keys()))


def _is_module(value: Any) -> bool:
    return isinstance(value.__self__ if inspect.ismethod(value) else value, torch.nn.Module)


def parameters_of(module: torch.nn.Module) -> Iterator[Parameter]:
    """The parameters of a module under the names that Pyro's store gives them."""
    for part in module.modules():
        if not isinstance(part, PyroModule):
            continue
        for name, tensor in part._parameters.items():
            own = name.removesuffix("_unconstrained")
            if tensor is not None:
                yield Parameter(_join(part._pyro_name, own if own in part._pyro_params else name), part, tensor)
        for name, child in part._modules.items():
            if child is not None and not isinstance(child, PyroModule):
                for path, tensor in child.named_parameters():
                    yield Parameter(param_with_module_name(_join(part._pyro_name, name), path), child, tensor)


def is_managed(parameter: Parameter) -> bool:
    """Whether a parameter is a ``PyroParam``, not one of torch's."""
    return isinstance(parameter.holder, PyroModule) and parameter.name.rpartition(".")[2] in parameter.holder._pyro_params


def _join(*names: str) -> str:
    return ".".join(filter(None, names))
