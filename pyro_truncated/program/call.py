"""A Pyro program with the arguments it is called with: what travels through the library in their place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import pyro.poutine as poutine

from pyro_truncated.program.subsampling import SparseSubsamples, in_minibatch
from pyro_truncated.utils.counts import naming_empty_plates
from pyro_truncated.utils.isolation import Assign, isolated


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A Pyro program, mostly the model, with the arguments of one call.

    Attributes:
        model: the program.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(self) -> Any:
        """Runs the program under the handlers around, and returns what it returns."""
        return self.model(*self.args, **self.kwargs)

    def of(self, program: Callable[..., Any]) -> Call:
        """Another program called with the same arguments: a guide, or the model under a handler."""
        return dataclasses.replace(self, model=program)

    def trace(self) -> poutine.Trace:
        """A trace of the program, which the handlers around see as well."""
        return poutine.trace(in_minibatch(self.model)).get_trace(*self.args, **self.kwargs)

    def run(self, values: Mapping[str, Any]) -> poutine.Trace:
        """A trace with the given values of sample sites and subsamples of plates, seen by nobody outside but for parameters."""
        with naming_empty_plates(), isolated(), SparseSubsamples(), Assign(values):
            return self.trace()
