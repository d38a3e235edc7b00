"""Log densities of many states that share work between states."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pyro.distributions as dist
import torch
from pyro.distributions.util import broadcast_shape
from torch import Tensor
from torch.distributions.utils import clamp_probs, probs_to_logits
from torch.nn.functional import logsigmoid

from pyro_truncated.program.operations import tensors_in
from pyro_truncated.program.sites import strip_events
from pyro_truncated.utils.arrays import once

# Entries up to which sites are computed together: a stack of larger ones takes memory.
MAX_STACKED = 2**12
# Families whose parameters can be stacked, and those of them whose parameters have one dimension more.
_STACKED, _OF_VECTORS = {dist.Normal, dist.Poisson, dist.Bernoulli, dist.Categorical}, {dist.Categorical}
# Terms with their factors.
_Terms = list[tuple[float, Tensor]]


def log_density(fn: Any, value: Tensor) -> Tensor:
    r"""What ``fn.log_prob(value)`` is, for values in the support.

    Pyro expands the parameters of a distribution to all states, and computes logarithms and
    normalisers for each of them. But a scale is mostly a single number, and the data are the same
    under all states. Here each term of the density has the shape of what it is of,

    .. math:: -\tfrac12 \Big(\frac{y - \mu}{\sigma}\Big)^2 - \log\sigma - \tfrac12 \log 2\pi, \qquad
              y \log\lambda - \lambda - \log y!, \qquad y \log p + (1 - y) \log(1 - p),

    for normal, Poisson, Bernoulli and categorical distributions with or without ``to_event``, on a CPU. It is
    computed in place where possible, as new memory for every step takes more time than the steps.
    Of counts both :math:`y \log\lambda - \lambda` and :math:`\log y!` are taken without :math:`y
    \log y - y`, so that their sums stay small. Probabilities are clamped as Pyro does. Other
    distributions are asked themselves.
    """
    base, event_dim = strip_events(fn)
    formula = _TERMS.get(type(base))
    terms = None if formula is None or value.device.type != "cpu" else formula(base, once(value))
    if terms is None:
        log_prob: Tensor = fn.log_prob(value)
        return log_prob
    shape = torch.Size(broadcast_shape(base.batch_shape, value.shape))
    total = sum(factor * _sum_up(term, shape, event_dim) for factor, term in terms)
    assert isinstance(total, Tensor)
    return total.expand(shape[: len(shape) - event_dim])


def site_log_density(node: Any, formula: Callable[[Any, Tensor], Tensor] = log_density) -> Tensor:
    """The log density of a sample site at its value."""
    if not node["args"] and not node["kwargs"]:
        return formula(node["fn"], node["value"])
    log_prob: Tensor = node["fn"].log_prob(node["value"], *node["args"], **node["kwargs"])
    return log_prob


class _Site(NamedTuple):
    """What a site's density is computed from."""

    family: type  # type of the distribution without wrappers
    event_dim: int  # its last batch dimensions, which are those of an event
    parameters: dict[str, Tensor]  # by name, without expanded dimensions
    value: Tensor  # the value
    batch_shape: torch.Size  # of the distribution, with the dimensions of an event

    @classmethod
    def from_node(cls, node: Any) -> _Site | None:
        """Returns a site whose parameters can be stacked, or ``None``."""
        base, event_dim = strip_events(node["fn"])
        if type(base) not in _STACKED or node["args"] or node["kwargs"]:
            return None
        names = [name for name in base.arg_constraints if name in vars(base)]
        if len(names) > 1 and hasattr(base, "_param"):
            parameter = vars(base)["_param"]
            names = [name for name in names if vars(base)[name] is parameter]
        value: Tensor = node["value"]
        if event_dim and value.shape[-event_dim:] != base.batch_shape[-event_dim:]:
            return None
        parameters = {name: vars(base)[name] if type(base) in _OF_VECTORS else once(vars(base)[name]) for name in names}
        # Numbers without dimensions adapt to the type and the device of tensors, but not when they are stacked.
        is_number = value.dim() == 0 and value.is_floating_point()
        if any(value.device != one.device or (is_number and value.dtype != one.dtype) for one in parameters.values()):
            return None
        return cls(type(base), event_dim, parameters, value, base.batch_shape)

    @property
    def kind(self) -> tuple[Any, ...]:
        """What sites share whose densities can be computed together."""
        tensors = (self.value, *self.parameters.values())
        return self.family, self.event_dim, self.batch_shape, *self.parameters, *((t.shape, t.dtype, t.device) for t in tensors)


def coarsest_dtype(node: Any) -> torch.dtype:
    """The coarsest floating-point type that a site's density is rounded to."""
    dtypes = {tensor.dtype for tensor in tensors_in([node["fn"], node["value"]]) if tensor.is_floating_point()}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def count_entries(node: Any) -> int:
    """How many densities of single entries a sample site has."""
    return math.prod(broadcast_shape(node["fn"].shape(), node["value"].shape))


def site_log_densities(nodes: Sequence[Any], formula: Callable[[Any, Tensor], Tensor] = log_density) -> list[Tensor]:
    """Returns the log densities of sample sites at their values.

    Small sites of one family and shape are computed together, as one distribution with stacked parameters.
    """
    tables: list[Tensor | None] = [None] * len(nodes)
    alike: dict[tuple[Any, ...], list[tuple[int, _Site]]] = {}
    for place, node in enumerate(nodes):
        if (site := _Site.from_node(node)) is not None:
            alike.setdefault(site.kind, []).append((place, site))
    for members in alike.values():
        if len(members) > 1 and count_entries(nodes[members[0][0]]) <= MAX_STACKED:
            places, sites = zip(*members, strict=True)
            for place, table in zip(places, _stack_log_densities(sites, formula), strict=True):
                tables[place] = table
    return [site_log_density(node, formula) if table is None else table for node, table in zip(nodes, tables, strict=True)]


def _stack_log_densities(sites: Sequence[_Site], formula: Callable[[Any, Tensor], Tensor]) -> Sequence[Tensor]:
    """The log densities of sites of one kind."""
    first = sites[0]
    shape = broadcast_shape(first.batch_shape, first.value.shape)
    depth = len(shape)

    def stack_tensors(tensors: Sequence[Tensor], num_event: int = 0) -> Tensor:
        stack = torch.stack(tuple(tensors))
        missing = depth + num_event - (stack.dim() - 1)
        return stack.reshape(len(stack), *(1,) * missing, *stack.shape[1:])

    num_event = int(first.family in _OF_VECTORS)
    parameters = {name: stack_tensors([site.parameters[name] for site in sites], num_event) for name in first.parameters}
    fn: Any = first.family(**parameters, validate_args=False)
    fn = fn.to_event(first.event_dim) if first.event_dim else fn
    log_probs = formula(fn, stack_tensors([site.value for site in sites]))
    return log_probs.expand(len(sites), *shape[: depth - first.event_dim]).unbind(0)


def _normal(fn: Any, value: Tensor) -> _Terms:
    scale = once(fn.scale)
    return [(-0.5, ((_real(value, scale) - once(fn.loc)) / scale).square_()), (-1.0, scale.log() + 0.5 * math.log(2 * math.pi))]


def _poisson(fn: Any, value: Tensor) -> _Terms | None:
    rate = once(fn.rate)
    # There are no ends without entries; where a rate is infinite products would be NaN.
    if rate.numel() == 0 or not 0 <= (ends := rate.aminmax()).min <= ends.max < math.inf:
        return None
    value = _real(value, rate)
    if ends.min == 0:
        # Torch's own gradient is NaN where both are zero, though that is possible.
        is_zero = rate == 0
        usual = rate.masked_fill(is_zero, 1.0).log() * value - rate
        none = torch.where(value == 0, -rate, -math.inf)
        return [(1.0, torch.where(is_zero, none, usual)), (-1.0, (value + 1).lgamma())]
    if rate.numel() < value.numel():
        return [(1.0, (rate.log() * value).sub_(rate).sub_((value + 1).lgamma()))]
    # Both parts without y log y - y: in single precision their sums over many entries, large and of opposite signs, would be inaccurate.
    usual, exact = value.clamp(min=1), value.double()
    normaliser = (exact + 1).lgamma() - (exact * usual.double().log() - exact)
    return [(1.0, (rate / usual).log_().mul_(value).sub_(rate).add_(value)), (-1.0, normaliser.to(value.dtype))]


def _bernoulli(fn: Any, value: Tensor) -> _Terms | None:
    is_logits = "logits" in fn.__dict__
    parameter = once(fn.logits if is_logits else fn.probs)
    value = _real(value, parameter)
    # Few parameters and few values make many entries: logarithms are of parameters, and each entry picks one.
    if 2 * parameter.numel() <= math.prod(broadcast_shape(parameter.shape, value.shape)):
        logits = parameter if is_logits else probs_to_logits(parameter, is_binary=True)
        # Logarithms of the probabilities of zero and one, not y x - log(1 + exp(x)), whose terms cancel where x is large.
        return [(1.0, torch.lerp(logsigmoid(-logits).to(value.dtype), logsigmoid(logits).to(value.dtype), value))]
    if is_logits:
        return [(1.0, torch.distributions.Bernoulli(logits=parameter, validate_args=False).log_prob(value))]
    # p where the value is one, 1 - p where it is zero; the logarithm of neither elsewhere.
    is_binary = bool(((value == 1) | (value == 0)).all())
    return [(1.0, (clamp_probs(parameter) - (1 - value)).abs_().log_())] if is_binary else None


def _categorical(fn: Any, value: Tensor) -> _Terms | None:
    is_logits = "logits" in fn.__dict__
    # The last dimension is that of the categories.
    parameter = once(fn.logits if is_logits else fn.probs, end=1)
    logits = parameter if is_logits else probs_to_logits(parameter)
    number, ends = logits.shape[-1], value.aminmax() if value.numel() else None
    if ends is None or logits.numel() == 0 or not 0 <= ends.min <= ends.max < number:
        return None
    # One entry is read for each of these, and so has its gradient: expanded logits would have one of their own.
    place = torch.arange(logits.numel() // number).reshape(logits.shape[:-1]) * number + value.long()
    return [(1.0, logits.reshape(-1).index_select(0, place.flatten()).view(place.shape))]


_TERMS: dict[type, Callable[[Any, Tensor], _Terms | None]] = {
    kind: terms
    for terms, kinds in (
        (_normal, (dist.Normal, torch.distributions.Normal)),
        (_poisson, (dist.Poisson, torch.distributions.Poisson)),
        (_bernoulli, (dist.Bernoulli, torch.distributions.Bernoulli)),
        (_categorical, (dist.Categorical, torch.distributions.Categorical)),
    )
    for kind in kinds
}


def _real(value: Tensor, parameter: Tensor) -> Tensor:
    """Returns the value in floating point, at least in the parameter's precision."""
    # Pixels in bytes would wrap around.
    return value.to(torch.promote_types(value.dtype, parameter.dtype))


def _sum_up(term: Tensor, shape: torch.Size, number: int) -> Tensor:
    """Sums a term over the last dimensions of its expanded shape."""
    if number == 0:
        return term
    term = term.reshape((1,) * (len(shape) - term.dim()) + tuple(term.shape))
    repeats = math.prod(shape[-number:]) // max(1, math.prod(term.shape[-number:]))
    total = term.flatten(-number).sum(-1)
    return total if repeats == 1 else total * repeats
