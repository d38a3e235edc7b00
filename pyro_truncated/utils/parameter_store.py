"""Names of parameters in Pyro's store, and the modules that hold them."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import logging
import os
import re
import threading
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import pyro
import pyro.poutine as poutine
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from pyro.params.param_store import param_with_module_name
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _DIM_ALLOCATOR, am_i_wrapped
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

# Pyro's handlers and parameters, and torch's random state, are those of all threads: what hides Pyro from its users lets one in at a time.
one_thread = threading.RLock()
if hasattr(os, "register_at_fork"):
    # The thread that holds it does not go on in a child process.
    os.register_at_fork(after_in_child=one_thread._at_fork_reinit)  # type: ignore[attr-defined]


class Assign(Messenger):
    """Gives sample statements, and subsamples, values without observing them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.values and not msg["is_observed"]:
            msg["value"] = self.values[msg["name"]]


@contextmanager
def isolate() -> Iterator[None]:
    """Hides sample statements, but no parameters, from outer handlers."""
    with poutine.block(hide_fn=lambda msg: msg["type"] != "param"), free_plate_dims():
        yield


@contextmanager
def free_plate_dims() -> Iterator[None]:
    """Lets plates take the dimensions they would take without open plates.

    Plates ask one private allocator for their dimensions, which no handler can stand in for.
    """
    stack, _DIM_ALLOCATOR._stack = _DIM_ALLOCATOR._stack, []
    try:
        yield
    finally:
        _DIM_ALLOCATOR._stack = stack


# Whether Python code that looks at values of latents chooses by them.
reads_count: ContextVar[bool] = ContextVar("pyro_truncated_reads_count", default=True)


@contextmanager
def treat_singly() -> Iterator[None]:
    """Lets code look at values of states that it treats singly."""
    token = reads_count.set(False)
    try:
        yield
    finally:
        reads_count.reset(token)


def spare_random_numbers() -> AbstractContextManager[None]:
    """Restores random states after a look at a program."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_initialized() else [])


@contextmanager
def random_numbers_from(generator: torch.Generator | None) -> Iterator[None]:
    """Lets torch's global generator follow another one, if that is given."""
    if generator is None:
        yield
        return
    seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
    with spare_random_numbers():
        torch.manual_seed(seed)
        yield


class Parameter(NamedTuple):
    """A parameter of a module, as Pyro's store knows it."""

    name: str  # its name in the store
    holder: torch.nn.Module  # the module
    tensor: Tensor  # its unconstrained values
    is_managed: bool  # whether it is a PyroParam, not one of torch's


def snapshot(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies of tensors, such as parameters or the values of a ``state_dict()``."""
    return [tensor.detach().clone() for tensor in tensors]


@torch.no_grad()
def load_snapshot(tensors: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Gives tensors, in place, the values that :func:`snapshot` took."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


def program_modules(*programs: Any) -> list[torch.nn.Module]:
    """The modules of programs, under handlers, methods, closures and guides."""
    modules: dict[int, torch.nn.Module] = {}
    queue = list(programs)
    while queue:
        program = queue.pop(0)
        if isinstance(program, torch.nn.Module):
            if id(program) not in modules:
                modules[id(program)] = program
                queue += [part._model[0] for part in program.modules() if isinstance(part, AutoGuide) and part._model is not None]
        elif isinstance(program, functools.partial):
            queue += [program.func, *program.args]
        elif inspect.ismethod(program):
            queue.append(program.__self__)
        elif inspect.isfunction(program):
            found_here = ((value, value.__self__ if inspect.ismethod(value) else value) for value in read_variables(program))
            queue += [value for value, owner in found_here if isinstance(owner, torch.nn.Module)]
    return list(modules.values())


def read_variables(function: Any) -> Iterator[Any]:
    """What a function reads from its closure and globals."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # of a variable that has no value yet
            yield cell.cell_contents
    # ``inspect.getclosurevars`` would take names of attributes for those of globals.
    yield from (function.__globals__[name] for name in _global_names(function.__code__) if name in function.__globals__)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names of globals that code reads, and functions inside of it."""
    names = {instruction.argval for instruction in dis.get_instructions(code) if instruction.opname == "LOAD_GLOBAL"}
    inner = (_global_names(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return tuple(sorted(names.union(*inner)))


def store_parameters(module: torch.nn.Module) -> Iterator[Parameter]:
    """Yields a module's parameters under their names in Pyro's store."""
    for part in module.modules():
        if not isinstance(part, PyroModule):
            continue
        for name, tensor in part._parameters.items():
            own = name.removesuffix("_unconstrained")
            if tensor is not None:
                is_managed = own in part._pyro_params
                yield Parameter(_join(part._pyro_name, own if is_managed else name), part, tensor, is_managed)
        for name, child in part._modules.items():
            if child is not None and not isinstance(child, PyroModule):
                for path, tensor in child.named_parameters():
                    yield Parameter(param_with_module_name(_join(part._pyro_name, name), path), child, tensor, False)


def _join(*names: str) -> str:
    return ".".join(filter(None, names))


@contextmanager
def empty_store() -> Iterator[None]:
    """A context in which Pyro's parameter store is empty.

    Kernels register parameters by names such as ``"variance"``. Pyro's own ``scope()`` removes the mark from unconstrained parameters by
    which :class:`~pyro.infer.SVI` recognises those that the recorded step has read.
    """
    store = pyro.get_param_store()
    before = store._params, store._param_to_name, store._constraints
    store._params, store._param_to_name, store._constraints = {}, {}, {}
    try:
        yield
    finally:
        store._params, store._param_to_name, store._constraints = before


# The modules in whose hands a tensor of the store has been seen. They may be gone: then it has been another module's all the same.
_holders: Any = WeakIdKeyDictionary()


def replaced_parameters(*programs: Any) -> Iterator[tuple[Parameter, Tensor]]:
    """Yields parameters for which Pyro's store holds another tensor, and that tensor."""
    store = pyro.get_param_store()._params
    for module in program_modules(*programs):
        for parameter in store_parameters(module):
            replacement = store.get(parameter.name)
            if replacement is not None and replacement is not parameter.tensor:
                yield parameter, replacement


def refuse_shadowed_parameters(*programs: Any, training: bool = False) -> None:
    """Checks that programs have their parameters for themselves.

    Pyro looks a parameter up in its store first, by name, and puts what it finds in the place of the module's own. If that tensor belongs
    to another module, a model loses its initialisation and changes the other's. Parameters that were read from a file or set by hand
    replace those of a module. Where numbers are equal nothing is lost by looking (``training=False``).
    """
    if pyro.settings.get("module_local_params"):
        return
    refuse_diverged_copies(*programs, training=training)
    for module in program_modules(*programs):
        for parameter in store_parameters(module):
            hold(parameter, training)


def refuse_diverged_copies(*programs: Any, training: bool = False) -> None:
    """Refuses parameters that another copy of the module has trained.

    A copy may have gone its own way, as the mean of ``torch.optim.swa_utils`` does.
    """
    if pyro.settings.get("module_local_params"):
        return
    names = [
        parameter.name
        for parameter, replacement in replaced_parameters(*programs)
        # What the module itself has taken over from the store, as from a file, is its own.
        if list(_holders.get(replacement, ())) != [parameter.holder]
        and _had_owner_or_change(replacement)
        and (_differs(parameter.tensor, replacement) or (training and not _may_go_on(parameter, replacement)))
    ]
    if training:
        names += [name for module in program_modules(*programs) for name in _find_shared_parameters(module)]
    if names:
        raise ValueError(_complaint(names))


class ShadowWatch(Messenger):
    """Refuses shadowed parameters that functions name, or a guide creates."""

    def __init__(self, guide: Any = None) -> None:
        super().__init__()
        self._prefix = f"{guide._pyro_name}." if isinstance(guide, AutoGuide) else None

    def _pyro_param(self, msg: Any) -> None:
        if len(msg["args"]) < 2:
            return
        name, own = msg["args"][:2]
        replacement = pyro.get_param_store()._params.get(name)
        if replacement is None or replacement is own:
            return
        is_made_anew = self._prefix is not None and name.startswith(self._prefix) and _had_owner_or_change(replacement)
        if is_made_anew or (isinstance(own, torch.nn.Parameter) and _had_owner_or_change(replacement) and _differs(own, replacement)):
            raise ValueError(_complaint([name]))


def hold(parameter: Parameter, training: bool) -> None:
    """Records a parameter's owner and the store's tensor that replaces it."""
    if parameter.tensor.is_inference():
        raise ValueError(f"parameter '{parameter.name}' was made inside torch.inference_mode(); make the model outside of it")
    replacement = pyro.get_param_store()._params.get(parameter.name, parameter.tensor)
    tensors = [parameter.tensor, replacement] if training or _may_go_on(parameter, replacement) else [parameter.tensor]
    for tensor in tensors:
        _holders.setdefault(tensor, weakref.WeakSet()).add(parameter.holder)


def _may_go_on(parameter: Parameter, replacement: Tensor) -> bool:
    """Whether a module equal to the store may train the store's tensor.

    Equal numbers after training are those of a copy, which goes on from there. Pyro puts parameters that it manages in place of the
    module's own; others would not be trained at all.
    """
    holders = _holders.get(replacement, ())
    return parameter.is_managed and (replacement._version > 0 or all(holder is parameter.holder for holder in holders))


def _differs(own: Tensor, replacement: Tensor) -> bool:
    return own.shape != replacement.shape or not torch.equal(own.detach().to(replacement), replacement.detach())


def _had_owner_or_change(tensor: Tensor) -> bool:
    """Whether a tensor of the store belonged to a module or changed."""
    # How often torch.load changes a tensor in place while it makes it.
    return tensor in _holders or (isinstance(tensor, torch.nn.Parameter) and tensor._version > 1)


def _find_shared_parameters(module: torch.nn.Module) -> list[str]:
    """Parameters that another module had left in the store."""
    store, is_guide = pyro.get_param_store()._params, isinstance(module, AutoGuide)
    own = [parameter for parameter in store_parameters(module) if store.get(parameter.name) is parameter.tensor]
    return [
        parameter.name
        for parameter in own
        if parameter.holder not in _holders.get(parameter.tensor, (parameter.holder,))
        and (is_guide or (parameter.is_managed and _holders[parameter.tensor]))
    ]


def _complaint(names: Iterable[str]) -> str:
    return (
        f"Pyro's parameter store holds other parameters {sorted(names)} than the model or the guide: those of an earlier one with the same "
        "names. Call pyro.clear_param_store() before making model and guide; to keep both, give each its own names, as by "
        'PyroModule.__init__(self, name="..."), or copies their own parameters: pyro.settings.set(module_local_params=True).'
    )


class PrefixStrippingModule(torch.nn.Module):
    """A module that loads states saved from a wrapper."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads as torch does, without a common prefix such as ``module.``."""
        return super().load_state_dict(without_prefix(state_dict, self), strict, assign)


def without_prefix(state_dict: Mapping[str, Any], module: torch.nn.Module) -> Mapping[str, Any]:
    """The state by the names of a module."""
    names = (name for name, _ in (*module.named_children(), *module.named_parameters(), *module.named_buffers()))
    own = {"_extra_state", *(name.partition(".")[0] for name in names)}
    if not isinstance(state_dict, Mapping) or any(name.partition(".")[0] in own for name in state_dict):
        return state_dict
    cut = [(parts[:end], parts[end]) for parts in (name.split(".") for name in state_dict) for end in range(1, len(parts))]
    prefixes = sorted({".".join(outer) + "." for outer, first in cut if first in own}, key=len)
    common = next((prefix for prefix in prefixes if all(name.startswith(prefix) for name in state_dict)), None)
    if common is not None:
        return {name.removeprefix(common): value for name, value in state_dict.items()}
    if prefixes:
        prefix = repr(prefixes[0])
        raise RuntimeError(
            f"the state is of a module that holds this {type(module).__name__}, as its names begin with {prefix}. Load it into that "
            f"module, or pass {{name.removeprefix({prefix}): value for name, value in state.items() if name.startswith({prefix})}}"
        )
    return state_dict


_logger = logging.getLogger("pyro_truncated")
# How many modules of a class have been made: the next one's name.
_counts: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))


class UniqueModule(PrefixStrippingModule, PyroModule):
    """A ``PyroModule`` whose parameter names are unique in Pyro's store.

    The first ``BinarySparseCoding`` of a process keeps its ``weight`` as ``BinarySparseCoding.weight``, the second as
    ``BinarySparseCoding_2.weight``. As part of another ``PyroModule`` it is named by that. Neither ``state_dict()`` nor the names of sample
    sites know of it. If parameters were read into the store (``pyro.get_param_store().load``) under the name of a module of this class, the
    next one in use takes them over.

    Example:
        >>> class Causes(UniqueModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.weight = pyro.nn.PyroParam(torch.randn(2, 3))
        >>> first, second = Causes(), Causes()
        >>> torch.equal(first.weight, second.weight)
        False
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._unique_name = self._pyro_name = _next_name(type(self))
        self._pyro_context = _UniqueContext(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        # A copy that shares its parts (copy.copy) shares the context, too, and is left as it is.
        if self._pyro_name == self._unique_name and not isinstance(self._pyro_context, _UniqueContext):
            _rename(self, _next_name(type(self)), _UniqueContext(self))


class _UniqueContext(_Context):
    """The context of a :class:`UniqueModule`, without prefixes of sample sites."""

    def __init__(self, module: UniqueModule) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        self._sites: _PrefixStripper | None = None

    def __enter__(self) -> None:
        module = self._module()
        if not self.active and module is not None:
            if not self.used:
                _settle(module)
            # Nobody hears of names outside of all handlers.
            self._sites = _PrefixStripper(f"{module._unique_name}.") if am_i_wrapped() else None
        super().__enter__()
        if self.active == 1 and self._sites is not None:
            self._sites.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.active == 1 and self._sites is not None:
            self._sites.__exit__(*exception)
        super().__exit__(*exception)

    def __reduce__(self) -> Any:
        return _Context, ()


class _PrefixStripper(Messenger):
    """Takes a prefix from the names of sample sites."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def _pyro_sample(self, msg: Any) -> None:
        msg["name"] = msg["name"].removeprefix(self._prefix)


def _next_name(kind: type) -> str:
    index = next(_counts[kind.__name__])
    return kind.__name__ if index == 1 else f"{kind.__name__}_{index}"


def _rename(module: UniqueModule, name: str, context: _Context) -> None:
    old = module._unique_name
    for part in module.modules():
        if isinstance(part, PyroModule) and (part is module or part._pyro_name.startswith(f"{old}.")):
            part._pyro_name = name + part._pyro_name.removeprefix(old)
            part._pyro_context = context
    module._unique_name = name


def _settle(module: UniqueModule) -> None:
    """Takes over the name of loaded parameters before the first use."""
    store, own = pyro.get_param_store()._params, module._unique_name
    parameters = list(store_parameters(module))
    shapes = {parameter.name: parameter.tensor.shape for parameter in parameters}
    if store.keys().isdisjoint(shapes):
        for name, keys in _families(type(module).__name__, store).items():
            if all(store[key] not in _holders and shapes.get(own + key.removeprefix(name)) == store[key].shape for key in keys):
                _logger.warning("%s takes over the parameters that were read into Pyro's store under the name %s", own, name)
                _rename(module, name, module._pyro_context)
                break
    for parameter in store_parameters(module):
        hold(parameter, training=False)


def _families(kind: str, store: Iterable[str]) -> dict[str, list[str]]:
    """Groups names in the store by the module that owns them."""
    families: dict[str, list[str]] = defaultdict(list)
    for key in store:
        if match := re.match(rf"{re.escape(kind)}(_\d+)?(?=\.)", key):
            families[match[0]].append(key)
    return families


def relative_names(values: Mapping[str, Any], *programs: Any) -> dict[str, Any]:
    """A dictionary whose names number :class:`UniqueModule` within the programs."""
    return {_translate(name, _ranked_names(*programs)): value for name, value in values.items()}


def absolute_names(values: Mapping[str, Any], *programs: Any) -> dict[str, Any]:
    """The inverse of :func:`relative_names`."""
    names = {relative: absolute for absolute, relative in _ranked_names(*programs).items()}
    return {_translate(name, names): value for name, value in values.items()}


def _ranked_names(*programs: Any) -> dict[str, str]:
    ranks: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for module in program_modules(*programs):
        for part in module.modules():
            if isinstance(part, UniqueModule) and part._pyro_name == part._unique_name and part._pyro_name not in ranks:
                kind = type(part).__name__
                counts[kind] += 1
                ranks[part._pyro_name] = f"{kind}:{counts[kind]}"
    return ranks


def _translate(name: str, names: Mapping[str, str]) -> str:
    module, dot, rest = name.partition(".")
    return f"{names.get(module, module)}{dot}{rest}"
