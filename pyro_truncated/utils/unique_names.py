"""Modules whose parameters have names of their own in Pyro's store, and names that mean the same in another process."""

from __future__ import annotations

import itertools
import logging
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pyro
from pyro.nn import PyroModule
from pyro.nn.module import _Context
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import am_i_wrapped

from pyro_truncated.utils.module_parameters import modules_of, parameters_of
from pyro_truncated.utils.prefixes import TakesPrefixed
from pyro_truncated.utils.shadowing import hold, was_held

_logger = logging.getLogger("pyro_truncated")
# How many modules of a class have been made: the next one's name.
_counts: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(1))


class UniqueModule(TakesPrefixed, PyroModule):
    """A ``PyroModule`` whose parameters have names of their own in Pyro's store: two of a class do not share them.

    The first ``BinarySparseCoding`` of a process keeps its ``weight`` as ``BinarySparseCoding.weight``, the second as
    ``BinarySparseCoding_2.weight``. As part of another ``PyroModule`` it is named by that, as always. Neither ``state_dict()`` nor the
    names of sample sites (of parameters with a prior) know of it. Copies and unpickled modules have names of their own, too.

    Parameters that have been read into the store (``pyro.get_param_store().load``) under the name of a module of this class, and belong to
    no module yet, are taken over by the next one that is used for the first time, as Pyro does where names agree.

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
    """The context of a :class:`UniqueModule`: within it sample sites are called as if the module had no name."""

    def __init__(self, module: UniqueModule) -> None:
        super().__init__()
        self._module = weakref.ref(module)
        self._sites: _WithoutPrefix | None = None

    def __enter__(self) -> None:
        module = self._module()
        if not self.active and module is not None:
            if not self.used:
                _settle(module)
            # Nobody hears of names outside of all handlers.
            self._sites = _WithoutPrefix(f"{module._unique_name}.") if am_i_wrapped() else None
        super().__enter__()
        if self.active == 1 and self._sites is not None:
            self._sites.__enter__()

    def __exit__(self, *exception: Any) -> None:
        if self.active == 1 and self._sites is not None:
            self._sites.__exit__(*exception)
        super().__exit__(*exception)

    def __reduce__(self) -> Any:
        return _Context, ()


class _WithoutPrefix(Messenger):
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
    """Before the first use: takes the name of parameters that were read into the store and that this module can take over."""
    store, own = pyro.get_param_store()._params, module._unique_name
    parameters = list(parameters_of(module))
    shapes = {parameter.name: parameter.tensor.shape for parameter in parameters}
    if store.keys().isdisjoint(shapes):
        for name, keys in _families(type(module).__name__, store).items():
            if all(not was_held(store[key]) and shapes.get(own + key.removeprefix(name)) == store[key].shape for key in keys):
                _logger.warning("%s takes over the parameters that were read into Pyro's store under the name %s", own, name)
                _rename(module, name, module._pyro_context)
                break
    for parameter in parameters_of(module):
        hold(parameter, training=False)


def _families(kind: str, store: Iterable[str]) -> dict[str, list[str]]:
    """Names in the store by the name of the module of a class that they belong to."""
    found: dict[str, list[str]] = defaultdict(list)
    for key in store:
        if match := re.match(rf"{re.escape(kind)}(_\d+)?(?=\.)", key):
            found[match[0]].append(key)
    return found


def relative_names(named: Mapping[str, Any], *programs: Any) -> dict[str, Any]:
    """A dictionary by names of parameters, with those of :class:`UniqueModule` counted within the programs instead of the process."""
    return {_renamed(name, _ranked_names(*programs)): value for name, value in named.items()}


def absolute_names(named: Mapping[str, Any], *programs: Any) -> dict[str, Any]:
    """The inverse of :func:`relative_names`, for programs that may have been made in another process."""
    names = {relative: absolute for absolute, relative in _ranked_names(*programs).items()}
    return {_renamed(name, names): value for name, value in named.items()}


def _ranked_names(*programs: Any) -> dict[str, str]:
    ranks: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for module in modules_of(*programs):
        for part in module.modules():
            if isinstance(part, UniqueModule) and part._pyro_name == part._unique_name and part._pyro_name not in ranks:
                kind = type(part).__name__
                counts[kind] += 1
                ranks[part._pyro_name] = f"{kind}:{counts[kind]}"
    return ranks


def _renamed(name: str, names: Mapping[str, str]) -> str:
    module, dot, rest = name.partition(".")
    return f"{names.get(module, module)}{dot}{rest}"
