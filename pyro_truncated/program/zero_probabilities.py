"""Log probabilities of discrete distributions with values of probability zero.

Torch and Pyro clamp these.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from pyro.distributions import MaskedMixture
from pyro.distributions.torch_distribution import ExpandedDistribution, MaskedDistribution
from pyro.distributions.util import broadcast_shape
from pyro.distributions.zero_inflated import ZeroInflatedDistribution
from torch import Tensor, distributions
from torch.distributions.utils import clamp_probs, probs_to_logits
from torch.nn.functional import logsigmoid

from pyro_truncated.program.sites import WRAPPERS, has_stock_density, unwrap
from pyro_truncated.utils.arrays import once

_Formula = Callable[[Any, Tensor], Tensor | None]


def exact_log_prob(fn: Any, value: Tensor, stock_log_prob: Callable[[], Tensor]) -> Tensor:
    """Returns the exact log probability of values in the support.

    It is ``-inf`` where the probability is zero, and ``stock_log_prob()`` where that says the same.

    Where no single value is as improbable as the least that torch knows, none is impossible, and parameters need no look.
    """
    if value.device.type != "cpu" or not isinstance(unwrap(fn)[0], _OF_ONE_TRIAL):
        exact = log_prob_with_zeros(fn, value)
        return stock_log_prob() if exact is None else exact
    log_prob = stock_log_prob()
    exact = log_prob_with_zeros(fn, value) if _may_be_clamped(fn, log_prob) else None
    return log_prob if exact is None else exact


def without_impossible(fn: Any, value: Tensor, log_prob: Tensor) -> Tensor:
    """Returns a log probability less what impossible entries cost.

    No evidence outweighs it, and yet a search sees which states explain more of the data.
    """
    impossible = impossible_entries(fn, value) if _may_be_clamped(fn, log_prob) else None
    return log_prob if impossible is None else log_prob - 1e5 * impossible


def _may_be_clamped(fn: Any, log_prob: Tensor) -> bool:
    """Whether log probabilities are as low as those that torch clamps."""
    if not isinstance(unwrap(fn)[0], _OF_ONE_TRIAL):
        return True
    # Torch clamps probabilities to the rounding error; 0.01 nats are room for that of the logarithm.
    return _may_reach(log_prob, math.log(torch.finfo(log_prob.dtype).eps) + 0.01, math.inf)


def log_prob_with_zeros(fn: Any, value: Tensor) -> Tensor | None:
    r"""Returns the log probability of values, ``-inf`` for impossible ones.

    The values are in the support. It is ``None`` where ``fn.log_prob`` says the same.

    Torch scores :math:`\mathrm{Bernoulli}(0)` at one as :math:`\log \epsilon = -15.9`, so that impossible values are merely improbable.
    With infinite logits it computes NaN for possible values too. Here probabilities that are exactly 0 or 1 have exact logarithms, and
    gradients at possible values are finite. All others are clamped as torch does. On a CPU parameters are looked at first, which takes no
    time beside the density. A device is not waited for: there it is for sites that had such probabilities when the guide was set up.
    """
    return _apply_to_entries(fn, value, _entry_log_prob)


def _entry_log_prob(fn: Any, value: Tensor) -> Tensor | None:
    formula = next((formula for kind, formula in _FORMULAS.items() if isinstance(fn, kind)), None)
    return None if formula is None else formula(fn, value)


def _apply_to_entries(fn: Any, value: Tensor, entry_formula: _Formula) -> Tensor | None:
    """Returns what is said of single entries in the batch's shape.

    It is summed over events, without masked entries. Of classes with a density of their own nothing is said: it knows best.
    """
    if not has_stock_density(fn):
        return None
    if not isinstance(fn, WRAPPERS):
        return entry_formula(fn, value)
    entries = _apply_to_entries(fn.base_dist, value, entry_formula)
    if entries is None:
        return None
    if isinstance(fn, MaskedDistribution):
        return torch.where(torch.as_tensor(fn._mask, device=entries.device), entries, 0)
    if isinstance(fn, ExpandedDistribution):
        return entries.expand(broadcast_shape(entries.shape, fn.batch_shape))
    entries = entries.expand(broadcast_shape(entries.shape, fn.base_dist.batch_shape))
    return entries.flatten(-fn.reinterpreted_batch_ndims).sum(-1) if fn.reinterpreted_batch_ndims else entries


def certain_values(fn: Any) -> tuple[Tensor, Tensor] | None:
    """Returns where a distribution has probabilities of zero and of one.

    Of a Bernoulli distribution they tell where it cannot be one, and where it cannot be zero. It is ``None`` if nowhere, as far as a CPU
    can tell.
    """
    fn, _ = unwrap(fn)
    fn = vars(fn)["_categorical"] if isinstance(fn, distributions.OneHotCategorical) else fn
    if not isinstance(fn, tuple(_FORMULAS)) or not {"probs", "logits"} & vars(fn).keys():
        return None
    parameter = _Probability.from_distribution(fn)
    return parameter.certain if parameter.may_be_certain else None


def impossible_entries(fn: Any, value: Tensor) -> Tensor | None:
    """Returns how many observed entries have probability zero.

    They are counted by batch entry. It is ``None`` for families that torch does not clamp, and where a CPU sees none.
    """
    return _apply_to_entries(fn, value, _impossible)


def _impossible(fn: Any, value: Tensor) -> Tensor | None:
    if not isinstance(fn, _OBSERVED):
        return None
    if isinstance(fn, _WITH_FORMULA):
        exact = _entry_log_prob(fn, value)
        return None if exact is None else (exact == -math.inf).long()
    is_one_hot = isinstance(fn, (distributions.OneHotCategorical, distributions.Multinomial))
    parameter = _Probability.from_distribution(vars(fn)["_categorical"] if is_one_hot else fn)
    if not parameter.may_be_certain:
        return None
    is_zero, is_one = parameter.certain
    if is_one_hot:
        return (is_zero & (value > 0)).sum(-1)
    if isinstance(fn, distributions.Categorical):
        shape = broadcast_shape(value.shape, fn.batch_shape)
        return is_zero.expand(*shape, fn.param_shape[-1]).gather(-1, value.long().unsqueeze(-1).expand(*shape, 1)).squeeze(-1).long()
    total = getattr(fn, "total_count", 1) if not isinstance(fn, distributions.NegativeBinomial) else math.inf
    return ((is_zero & (value > 0)) | (is_one & (value < total))).long()


@dataclasses.dataclass(frozen=True)
class _Probability:
    """A probability, as it was given to a distribution."""

    value: Tensor  # the parameter, without the dimensions in which it was expanded
    name: str  # "probs" or "logits"

    @classmethod
    def from_distribution(cls, fn: Any, probs: str = "probs", logits: str = "logits") -> _Probability:
        """Returns the parameter that a distribution was made with."""
        names = [name for name in vars(fn) if name in (probs, logits)]
        own_name = next((name for name in names if vars(fn).get("_param") is vars(fn)[name]), names[0])
        if len(names) == 2 and own_name == logits:
            # Expanded after both were known, which makes torch forget which was given: it clamps logits that it computes.
            most = 0.01 - math.log(torch.finfo(vars(fn)[logits].dtype).eps)
            own_name = logits if _may_reach(vars(fn)[logits].cpu(), -most, most) else probs
        return cls(once(vars(fn)[own_name]), "probs" if own_name == probs else "logits")

    @property
    def _ends(self) -> tuple[float, float]:
        return (0.0, 1.0) if self.name == "probs" else (-math.inf, math.inf)

    @property
    def certain(self) -> tuple[Tensor, Tensor]:
        """Where it is exactly zero, and where exactly one."""
        low, high = self._ends
        return self.value == low, self.value == high

    @property
    def may_be_certain(self) -> bool:
        """Whether it may be zero or one somewhere."""
        return _may_reach(self.value, *self._ends)

    @property
    def logs(self) -> tuple[Tensor, Tensor]:
        """Logarithms of it and of one minus it."""
        if self.name == "logits":
            return logsigmoid(self.value), logsigmoid(-self.value)
        probs, (is_zero, is_one) = clamp_probs(self.value), self.certain
        return probs.log().masked_fill(is_zero, -math.inf), (-probs).log1p().masked_fill(is_one, -math.inf)


def _may_reach(parameter: Tensor, low: float, high: float) -> bool:
    """Whether a parameter may reach these ends of its range.

    On a device, or where many runs go together, it is taken to: under ``torch.func.vmap`` there is no number to look at.
    """
    if parameter.device.type != "cpu":
        return True
    if parameter.numel() == 0:
        return False
    ends = parameter.detach().aminmax()
    try:
        return not low < float(ends.min) <= float(ends.max) < high
    except RuntimeError:
        return True


def _bernoulli(fn: Any, value: Tensor) -> Tensor | None:
    parameter = _Probability.from_distribution(fn)
    return torch.where(value.bool(), *parameter.logs) if parameter.may_be_certain else None


def _log_masses(fn: Any) -> Tensor | None:
    """Log probabilities of categories; ``None`` where torch does not clamp them."""
    parameter = _Probability.from_distribution(fn)
    if parameter.name == "logits" or not _may_reach(parameter.value, 0.0, math.inf):
        return None
    return probs_to_logits(parameter.value).masked_fill(parameter.value == 0.0, -math.inf)


def _categorical(fn: Any, value: Tensor) -> Tensor | None:
    masses = _log_masses(fn)
    if masses is None:
        return None
    index = value.long().unsqueeze(-1)
    shape = broadcast_shape(index.shape[:-1], masses.shape[:-1])
    return masses.expand(*shape, -1).gather(-1, index.expand(*shape, 1)).squeeze(-1)


def _with_certain(fn: Any, value: Tensor, low: Tensor | float | None, high: Tensor | float | None) -> Tensor | None:
    """Returns the log probability with certain values put right.

    A probability of 0 leaves the value ``low`` alone, and one of 1 the value ``high``, if there are such.
    """
    parameter = _Probability.from_distribution(fn)
    if not parameter.may_be_certain:
        return None
    is_zero, is_one = parameter.certain
    usual = parameter.value.masked_fill(is_zero | is_one, 0.5)
    counts = {"total_count": fn.total_count} if hasattr(fn, "total_count") else {}
    log_prob: Tensor = type(fn)(**counts, **{parameter.name: usual}, validate_args=False).log_prob(value)
    for is_certain, only in ((is_zero, low), (is_one, high)):
        if only is not None:
            certain = torch.where(value == only, 0.0, -math.inf).to(log_prob)
            log_prob = torch.where(is_certain & (log_prob.detach() > -math.inf), certain, log_prob)
    return log_prob


def _mixture(fn: Any, value: Tensor) -> Tensor | None:
    column = value.unsqueeze(value.dim() - len(fn.event_shape))
    masses, component_log_prob = _log_masses(fn.mixture_distribution), log_prob_with_zeros(fn.component_distribution, column)
    if masses is None and component_log_prob is None:
        return None
    masses = fn.mixture_distribution.logits.log_softmax(-1) if masses is None else masses
    component_log_prob = fn.component_distribution.log_prob(column) if component_log_prob is None else component_log_prob
    return (component_log_prob + masses).logsumexp(-1)


def _zero_inflated(fn: Any, value: Tensor) -> Tensor | None:
    gate, others = _Probability.from_distribution(fn, "gate", "gate_logits"), log_prob_with_zeros(fn.base_dist, value)
    if others is None and not gate.may_be_certain:
        return None
    log_gate, usual = gate.logs
    log_prob = usual + (fn.base_dist.log_prob(value) if others is None else others)
    return torch.where(value == 0, torch.logaddexp(log_gate.expand_as(log_prob), log_prob), log_prob)


def _either(fn: Any, value: Tensor) -> Tensor | None:
    parts = [log_prob_with_zeros(part, value) for part in (fn.component0, fn.component1)]
    if all(part is None for part in parts):
        return None
    log_probs = [kind.log_prob(value) if part is None else part for part, kind in zip(parts, (fn.component0, fn.component1), strict=True)]
    return torch.where(fn.mask, log_probs[1], log_probs[0])


# Counts have more than one way to come about, so that their least probabilities are larger.
_OF_ONE_TRIAL = (distributions.Bernoulli, distributions.Categorical, distributions.OneHotCategorical)
# Of these an observation is impossible where the formula says so.
_WITH_FORMULA = (distributions.Geometric, distributions.MixtureSameFamily, ZeroInflatedDistribution, MaskedMixture)
_OBSERVED = (*_OF_ONE_TRIAL, *_WITH_FORMULA, distributions.Binomial, distributions.NegativeBinomial, distributions.Multinomial)
_FORMULAS: dict[Any, _Formula] = {
    distributions.Bernoulli: _bernoulli,
    distributions.Categorical: _categorical,
    distributions.OneHotCategorical: lambda fn, value: _categorical(vars(fn)["_categorical"], value.argmax(-1)),
    distributions.Binomial: lambda fn, value: _with_certain(fn, value, 0, fn.total_count),
    distributions.NegativeBinomial: lambda fn, value: _with_certain(fn, value, 0, None),
    distributions.Geometric: lambda fn, value: _with_certain(fn, value, None, 0),
    distributions.MixtureSameFamily: _mixture,
    ZeroInflatedDistribution: _zero_inflated,
    MaskedMixture: _either,
}
