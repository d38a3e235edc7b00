"""Observations that are normal around a linear function of binary latents.

They are scored as a :class:`.LinearSuperposition`, whose states are packed: what the user writes is fast by its structure.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.program.operations import FACTORIES, Operations, tensors_in
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.sites import DiscreteSite, sample_nodes, unwrap
from pyro_truncated.utils.arrays import once

# Functions of one tensor, of several that add up, and of two of which one is constant.
_LINEAR = {"__getitem__", "reshape", "view", "expand", "squeeze", "unsqueeze", "permute", "transpose", "movedim", "flatten", "unflatten"}
_LINEAR |= {"sum", "mean", "neg", "__neg__", "to", "float", "double", "contiguous", "clone", "narrow", "select", "repeat", "expand_as"}
_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub", "cat", "stack"}
_PRODUCTS = {"mul", "__mul__", "__rmul__", "matmul", "__matmul__", "__rmatmul__", "mm", "mv", "linear", "einsum", "tensordot"}
_QUOTIENTS = {"div", "__truediv__"}
# What tells the shape or type of a tensor; transposes.
_SHAPES = {"size", "dim", "__len__", "numel", "stride", "ndimension", "is_floating_point", "is_complex"}
_TRANSPOSES = {"T", "mT", "H", "mH"}


def vector_of_bits(probe: Probe) -> DiscreteSite | None:
    """Returns the only discrete site if it is a binary vector."""
    layout = probe.layout
    if layout.dims != (-1,) or len(layout.sites) != 1 or not layout.space.is_binary:
        return None
    (site,) = layout.sites.values()
    return site if site.kind == "boolean" and not site.plates and len(site.event_shape) == 1 else None


def linear_superpositions(probe: Probe, is_first: bool = False) -> list[tuple[Any, Tensor]] | None:
    r"""Returns the distributions of linear observations, and their values.

    These are :math:`y_n \sim \mathcal N(W s_n + b, \mathrm{diag}(\sigma^2))`, values ``(N, D)``. A run of the program on no active latent,
    and on each alone, tells the parameters. The functions that means are computed by are followed. Only those count of which a
    composition is linear, whatever the parameters. ``None`` if some observation is none of these, or parameters differ between data
    points.
    """
    site = vector_of_bits(probe)
    if site is None or probe.is_vectorized or probe.layout.read:
        return None
    # No active latent, and each alone: (H + 1, 1, H).
    number = probe.layout.space.num_latents
    states = torch.eye(number + 1, number, dtype=probe.dtypes[site.name], device=probe.device).roll(1, 0).unsqueeze(1)
    try:
        with pyro.validation_enabled(False), Operations([(number + 1, [states])]) if is_first else nullcontext() as operations:
            functions = _LinearFunctions(states, operations)
            with functions:
                nodes = sample_nodes(probe.run({**probe.values, site.name: states}))
    except Exception:  # whatever a program says to states that belong to no data point
        return None
    found: list[tuple[Any, Tensor]] = []
    for name, node in nodes.items():
        if name == site.name or not probe.is_inside(node):
            continue
        normal = _normal(node)
        is_linear = normal is not None and id(normal.loc) in functions.linear and not functions.depends(normal.scale, node["value"])
        likelihood = _superposition(normal, states[:, 0]) if is_linear and not functions.is_lost else None
        if likelihood is None or not _tells_means(likelihood, probe, site, name):
            return None
        found.append((likelihood, probe.nodes[name]["value"].reshape(probe.num_data, -1)))
    return found or None


def linear_steps(probe: Probe, name: str) -> LinearSuperposition | None:
    """Returns the likelihood of a site that is linear in each step.

    It is normal around one linear function of the chains of a step, the same for all steps. Two runs tell: no active chain and each
    alone, in turn; and random real numbers in place of states, on which functions that differ are equal with probability zero. ``None``
    stands for other sites, and for fewer steps than chains.
    """
    (site,) = probe.layout.sites.values()
    value, shape = probe.nodes[name]["value"], probe.nodes[site.name]["value"].shape
    (*_, num_chains), number = shape, shape[:-1].numel()
    if _normal_of_steps(probe.nodes[name]) is None or number <= num_chains or not bool(value.isfinite().all()):
        return None
    dtype = probe.dtypes[site.name]
    if not dtype.is_floating_point:
        return None
    any_numbers = torch.rand(number, num_chains, dtype=dtype, generator=torch.Generator().manual_seed(0))
    alone = torch.eye(num_chains + 1, num_chains).roll(1, 0)[torch.arange(number) % (num_chains + 1)]
    likelihood: LinearSuperposition | None = None
    for path in (alone, any_numbers):
        states = path.to(probe.device, dtype).reshape(1, *shape)
        with torch.no_grad(), pyro.validation_enabled(False), Operations([(number, [states])]) as operations:
            functions = _LinearFunctions(states, operations)
            with functions:
                node = sample_nodes(probe.run({**probe.values, site.name: states}))[name]
            normal = _normal_of_steps(node)
            if normal is None or functions.is_lost or id(normal.loc) not in functions.linear:
                return None
            if functions.depends(normal.scale, node["value"]) or normal.loc.shape != (1, *value.shape) or value.shape[:-1] != shape[:-1]:
                return None
        means, scale = normal.loc.reshape(number, -1), once(normal.scale)
        if scale.shape[:-1].numel() != 1:
            return None
        if likelihood is None:
            weight = (means[1 : num_chains + 1] - means[0]).mT
            likelihood = LinearSuperposition(states.reshape(number, -1)[0], weight, scale.flatten(), bias=means[0], validate_args=False)
        if not _agree(means, states.reshape(number, -1), likelihood.weight, likelihood.bias):
            return None
    return likelihood


def _normal_of_steps(node: Mapping[str, Any]) -> Any:
    """Returns the normal distribution of an observed matrix, or ``None``."""
    fn = node["fn"]
    is_matrix = isinstance(fn, torch.distributions.Independent) and fn.reinterpreted_batch_ndims == 2
    is_normal = is_matrix and type(fn.base_dist) in (dist.Normal, torch.distributions.Normal)
    return fn.base_dist if is_normal and node["is_observed"] and node["mask"] is None else None


def _agree(means: Tensor, states: Tensor, weight: Tensor, bias: Tensor) -> bool:
    """Whether means are those of a linear function, up to rounding."""
    rounding = 32 * torch.finfo(weight.dtype).eps * (bias.abs() + weight.abs().sum(1))
    return bool(((means - bias - states.to(weight.dtype) @ weight.mT).abs() <= rounding).all())


def _normal(node: Mapping[str, Any]) -> Any:
    """Returns a site's normal distribution, ``None`` for masked or other ones."""
    fn, masks = unwrap(node["fn"])
    is_plain = type(fn) in (dist.Normal, torch.distributions.Normal) and not masks and node["mask"] is None
    return fn if is_plain and node["is_observed"] and len(node["cond_indep_stack"]) == 1 else None


def _superposition(normal: Any, states: Tensor) -> LinearSuperposition | None:
    """Returns the likelihood if data points share its parameters, or ``None``."""
    loc, scale = once(normal.loc, 1), once(normal.scale)
    if loc.shape[0] != len(states) or loc.shape[1] != 1 or scale.shape[:2] != (1, 1):
        return None
    means = loc.expand(*loc.shape[:2], *normal.batch_shape[2:]).flatten(1)
    deviation = scale.flatten(1)[0]
    deviation = deviation if len(deviation) == 1 else scale.expand(1, 1, *normal.batch_shape[2:]).flatten()
    return LinearSuperposition(states[0], (means[1:] - means[0]).mT, deviation, bias=means[0], validate_args=False)


@torch.no_grad()
def _tells_means(likelihood: LinearSuperposition, probe: Probe, site: DiscreteSite, name: str) -> bool:
    """Whether the means are those of the probe, and observations finite.

    In each step 64 rows tell whether the program is still what it was.
    """
    value, normal = probe.nodes[name]["value"], _normal(probe.nodes[name])
    if normal is None:
        return False
    step = -(-len(value) // 64)
    states, means = probe.nodes[site.name]["value"][::step].to(likelihood.weight.dtype), normal.loc[::step]
    weight, bias = likelihood.weight, likelihood.bias
    means = means.reshape(len(means), -1)
    if states.shape != (len(means), weight.shape[1]) or means.shape[1:] != bias.shape or len(value) != probe.num_data:
        return False
    return _agree(means, states, weight, bias) and bool(value.isfinite().all())


class _LinearFunctions(TorchFunctionMode):
    """Follows which tensors are affine functions of a first one.

    Attributes:
        linear: the tensors by identity.
        is_lost: whether Python has looked at values, or memory has been written into, so that nothing is known.
    """

    def __init__(self, first: Tensor, operations: Operations | None) -> None:
        super().__init__()
        self.is_lost = False
        self._operations = operations
        # Tensors stay alive with their numbers.
        self.linear: dict[int, Tensor] = {id(first): first}
        self._others: dict[int, Tensor] = {}

    def depends(self, *tensors: Tensor) -> bool:
        """Whether one of the tensors is computed from the first one."""
        watched: Operations | tuple[()] = () if self._operations is None else self._operations
        return any(id(tensor) in self.linear or id(tensor) in self._others or tensor in watched for tensor in tensors)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = list(tensors_in((args, kwargs)))
        name = getattr(func, "__name__", "")
        if name in FACTORIES or not self.depends(*given):
            return result
        if name == "broadcast_tensors":
            parts = args[0] if isinstance(args[0], (tuple, list)) else args
            for part, wide in zip(parts, result, strict=True):
                self._mark(wide, is_linear=id(part) in self.linear, depends=self.depends(part))
            return result
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            is_linear, is_known = name in _TRANSPOSES and id(args[0]) in self.linear, True
        else:
            is_linear, is_known = self._keeps(name, args, kwargs, given), name in _SHAPES
        results = list(tensors_in(result))
        is_written = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.startswith("__i") or "out" in kwargs
        self.is_lost |= is_written or (not results and not is_known)
        for tensor in results:
            self._mark(tensor, is_linear=is_linear and tensor.is_floating_point(), depends=True)
        return result

    def _mark(self, tensor: Tensor, *, is_linear: bool, depends: bool) -> None:
        if depends:
            (self.linear if is_linear else self._others)[id(tensor)] = tensor

    def _keeps(self, name: str, args: Any, kwargs: Mapping[str, Any], given: list[Tensor]) -> bool:
        """Whether a function's result is affine."""
        moving = [tensor for tensor in given if self.depends(tensor)]
        if not all(id(tensor) in self.linear for tensor in moving):
            return False
        if name in _SUMS:
            return True
        is_first = bool(args) and isinstance(args[0], Tensor) and id(args[0]) in self.linear
        if len(moving) > 1:
            return False
        return name in _PRODUCTS or (is_first and (name in _LINEAR or (name in _QUOTIENTS and kwargs.get("rounding_mode") is None)))
