"""Observations must be possible: values outside supports are refused by name.

Each data set is checked once.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.nn import Module

from pyro_truncated.distributed.shards import release_pages
from pyro_truncated.program.call import Call
from pyro_truncated.program.dependencies import Dependencies
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.sites import family, unwrap
from pyro_truncated.program.supports import elementwise
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import check_dense_real, module_number, warn_if_rounded
from pyro_truncated.utils.budget import row_slices
from pyro_truncated.utils.constraints import as_signed
from pyro_truncated.utils.parameter_store import spare_random_numbers


class ObservedValues:
    """Checks observed values against their supports, if independent of latents.

    A value outside a support that depends on a latent carries information about the latent. An
    example is the total count of an N-mixture. Such states have probability zero. Entries that
    masks hide are no data, and distributions made with ``validate_args=False`` are left alone, as
    by Pyro.
    """

    def __init__(self) -> None:
        self._checked_values: dict[str, tuple[Any, int]] = {}
        self._conditional: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_checked_values": {}}

    def check(self, probe: Probe) -> None:
        """Checks a run's observations, except tensors checked earlier."""
        for name, node in probe.nodes.items():
            value = node["value"]
            if not node["is_observed"] or not torch.is_tensor(value) or name in self._conditional or family(node["fn"]) == "Delta":
                continue
            record = self._checked_values.get(name)
            if record is not None and not value.is_inference() and record[0]() is value and record[1] == value._version:
                continue
            invalid = _invalid(node)
            if invalid is not None and bool(invalid.any()) and not self._depends_on_latents(name, probe):
                raise ValueError(_complaint(probe, node, invalid))
            if not value.is_inference():
                self._checked_values[name] = weakref.ref(value), value._version

    def _depends_on_latents(self, name: str, probe: Probe) -> bool:
        """Whether an observation or its support is computed from latents."""
        with poutine.block():
            dependencies = Dependencies(probe.call)
        if dependencies.parents[name] or dependencies.leaked[name] or dependencies.observed[name]:
            self._conditional.add(name)
        return name in self._conditional


@names_arguments
def check_observable(model: Module, y: Tensor, support: Any) -> None:
    """Refuses data that a library model's training would refuse.

    It does so in the same words before the model starts from them.

    Example:
        >>> model, y = BinarySparseCoding(16, 8), torch.zeros(5, 16)
        >>> check_observable(model, y, pyro_truncated.distributions.or_missing(dist.constraints.real))

    Args:
        model: takes data and the size of minibatches. It observes the data at site ``y``, one row per data point.
        y: the data.
        support: of the entries that it observes.

    Raises:
        ValueError: naming the first impossible value and its data point.
        TypeError: if the data are sparse or complex.

    Warns:
        UserWarning: if the model's type loses the digits of the data.
    """
    number = module_number(model)
    warn_if_rounded(check_dense_real("y", y), torch.get_default_dtype() if number is None else number.dtype)
    for rows in row_slices(len(y), 16 * y[:1].numel()):
        block = as_signed(y[rows])
        possible = support.check(block) & ~block.isinf()
        impossible = (~possible.flatten(1).all(1)).nonzero().squeeze(-1)[:1]
        if len(impossible):
            # Refused in the words of training. The model is run only now: one that has been run can become part of no other.
            with torch.no_grad(), spare_random_numbers(), poutine.block(), pyro.get_param_store().scope():
                call = Call(model, (y, 1))
                layout = Layout(call.trace(), Dependencies(call))
                ObservedValues().check(Probe(call, layout, {layout.plates[0]: impossible + rows.start}))
        release_pages(y)


def _invalid(node: Mapping[str, Any]) -> Tensor | None:
    """Returns which observed values are impossible, ``None`` if it cannot be told."""
    fn, value = node["fn"], node["value"]
    inner, masks = unwrap(fn)
    try:
        support = fn.support
    except NotImplementedError:
        return None
    if support is None or not inner._validate_args:
        return None
    support = elementwise(support)
    invalid: Tensor = ~support.check(value)
    if value.is_floating_point() and bool(invalid.any()) and _takes_nan(fn, value):
        nan = value.isnan()
        invalid = invalid & ~(nan.flatten(invalid.dim()).any(-1) if support.event_dim else nan)
    if (
        not bool(invalid.any())
        and value.is_floating_point()
        # A pass that writes nothing.
        and not bool(value.sum().isfinite())
        and bool(value.isinf().any())
        and not bool(fn.log_prob(value).isfinite().all())
    ):
        # Infinity is a real number to torch.
        invalid = value.isinf().flatten(invalid.dim()).any(-1) if support.event_dim else value.isinf()
    for mask, event_dim in [(node["mask"], fn.event_dim), *masks]:
        if mask is not None:
            seen = torch.as_tensor(mask, device=value.device)
            invalid = invalid & (seen.reshape(*seen.shape, *(1,) * (event_dim - support.event_dim)) if seen.dim() else seen)
    return invalid


def _takes_nan(fn: Any, value: Tensor) -> bool:
    """Whether a density takes missing entries, as Pyro's NanMaskedNormal does."""
    try:
        return bool(value.isnan().any()) and not bool(fn.log_prob(value).isnan().any())
    except ValueError:  # of a distribution that validates its values
        return False


def _complaint(probe: Probe, node: Mapping[str, Any], invalid: Tensor) -> str:
    inner, _ = unwrap(node["fn"])
    support = elementwise(node["fn"].support)
    first = tuple(int(position) for position in invalid.nonzero()[0])
    value = node["value"].expand((*invalid.shape, *node["value"].shape[node["value"].dim() - support.event_dim :]))[first]
    problem = (
        f"site '{node['name']}' observes {value.tolist()} at {_place(probe, node, first, support.event_dim)}, "
        f"outside the support of its distribution {type(inner).__name__} ({support}). "
    )
    if bool(value.isnan().any()):
        return problem + (
            "Missing entries need a mask (poutine.mask, or .mask(...) of the distribution), or a distribution that takes NaN, "
            "such as Pyro's NanMaskedNormal or those of pyro_truncated."
        )
    return problem + "Check the data, or choose a distribution that allows such values."


def _place(probe: Probe, node: Mapping[str, Any], first: tuple[int, ...], element_dim: int) -> str:
    """Describes a value's place: data point and entry."""
    batch_dim = len(first) - (node["fn"].event_dim - element_dim)
    data_point, entry = 0, list(first)
    frames = [frame for frame in node["cond_indep_stack"] if frame.name in probe.layout.plates and batch_dim + frame.dim >= 0]
    for frame in sorted(frames, key=lambda frame: frame.dim):
        position = torch.as_tensor(probe.values[frame.name])[first[batch_dim + frame.dim]]
        data_point = data_point * int(frame.full_size or frame.size) + int(position)
    for frame in frames:
        entry[batch_dim + frame.dim] = -1
    rest = tuple(position for position in entry if position >= 0)
    parts = [f"data point {data_point}"] * bool(frames) + [f"entry {rest}"] * bool(rest)
    return ", ".join(parts) or "its only entry"
