"""A Pyro program with the arguments it is called with.

The library passes it on in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.poutine.messenger import Messenger

from pyro_truncated.program.sites import family, has_stock_density, unwrap, without_masks
from pyro_truncated.program.subsampling import SparseSubsamples, in_minibatch
from pyro_truncated.program.supports import is_discrete
from pyro_truncated.utils.arguments import naming_empty_plates
from pyro_truncated.utils.parameter_store import Assign, isolate


class CheckedSites(Messenger):
    """Effect handler that refuses observed values that are no dense real tensors.

    Pyro fails on them without naming the site. Masks of discrete latents become those of their sites, so that what
    they switch off has one value, as under ``poutine.mask``. A ``dist.Unit`` has no value to infer: it is a factor, observed or not.
    """

    def _pyro_sample(self, msg: Any) -> None:
        if family(msg["fn"]) == "Unit" and not msg["is_observed"]:
            msg["value"], msg["is_observed"] = msg["fn"].sample(), True
        value, fn = msg["value"], msg["fn"]
        if not msg["is_observed"] and unwrap(fn)[1] and is_discrete(fn):
            while type(fn) is MaskedDistribution:
                msg["mask"] = fn._mask if msg["mask"] is None else msg["mask"] & fn._mask
                fn = fn.base_dist
            # Parts of an event that a mask switches off keep their distribution: their values add up to one, not to their number.
            msg["fn"] = without_masks(fn)
        if not msg["is_observed"] or value is None:
            return
        if not isinstance(value, torch.Tensor):
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            advice = "of a pandas Series or DataFrame data.to_numpy()"
            if isinstance(value, np.ma.MaskedArray):
                advice = "with data.filled(0), and the site under poutine.mask(mask=torch.as_tensor(~data.mask))"
            raise TypeError(
                f"site '{msg['name']}' observes a {kind}, where Pyro needs a tensor. Pass torch.as_tensor(data, dtype="
                f"{torch.get_default_dtype()}) to the model in place of the data, {advice}."
            )
        if value.layout != torch.strided:
            raise TypeError(f"site '{msg['name']}' observes a tensor of layout {value.layout}: call its to_dense()")
        # None of torch's or Pyro's own densities is of complex numbers.
        if value.is_complex() and has_stock_density(unwrap(fn)[0]):
            raise TypeError(f"site '{msg['name']}' must observe real numbers, as its distribution says; got {value.dtype}")


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A Pyro program, mostly the model, with the arguments of one call."""

    model: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    first: poutine.Trace | None = None  # a run of it, without given values

    def __call__(self) -> Any:
        """Runs the program under the handlers around, and returns what it returns."""
        return self.model(*self.args, **self.kwargs)

    def with_program(self, program: Callable[..., Any]) -> Call:
        """Returns a call of another program with the same arguments."""
        return dataclasses.replace(self, model=program, first=None)

    def trace(self) -> poutine.Trace:
        """A trace of the program, which the handlers around see as well."""
        with CheckedSites():
            return poutine.trace(in_minibatch(self.model)).get_trace(*self.args, **self.kwargs)

    def run(self, values: Mapping[str, Any]) -> poutine.Trace:
        """Returns a trace, unseen outside, with given site values and subsamples."""
        with naming_empty_plates(), isolate(), SparseSubsamples(), Assign(values):
            return self.trace()
