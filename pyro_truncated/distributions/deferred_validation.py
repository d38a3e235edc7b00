"""Distributions whose checks wait for a device together with others."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import Distribution, constraints

from pyro_truncated.ops import is_vectorised, raise_if
from pyro_truncated.utils.constraints import check_entries, or_missing


@functools.cache
def defer_validation(kind: Any) -> Any:
    """Returns a distribution whose checks on a device are deferred.

    Parameters and values are checked together with all others of a step.

    Stock distributions look when they are made and whenever they score, and a device is waited for each time. On the CPU nothing changes.

    Example:
        >>> Poisson = defer_validation(dist.Poisson)
        >>> Poisson(torch.tensor(3.0)).log_prob(torch.tensor(2.0))
        tensor(-1.4959)

    Args:
        kind: a distribution of Pyro whose constraints on parameters belong to the class.

    Returns:
        A class with the same parameters.
    """
    members = {"arg_constraints": defer_constraints(kind.arg_constraints), "_validate_sample": validate_later}
    return type(kind.__name__, (kind,), {**members, "__doc__": kind.__doc__, "__module__": __name__})


def defer_constraints(arg_constraints: dict[str, Any]) -> dict[str, Any]:
    """The constraints of a distribution's parameters, looked at with other checks."""
    return {
        name: constraint if constraints.is_dependent(constraint) else _parameter_check(name, constraint)
        for name, constraint in arg_constraints.items()
    }


def defer_check_entries(constraint: constraints.Constraint, **tensors: Tensor) -> None:
    """Does as :func:`.check_entries`, with deferred checks."""
    for name, tensor in tensors.items():
        complain = functools.partial(check_entries, constraint, **{name: tensor})
        if is_vectorised(tensor) and not tensor.is_complex() and tensor.dtype != torch.bool:
            raise_if(~constraint.check(tensor).all(), complain)
        else:
            complain()


def validate_later(distribution: Distribution, value: Tensor) -> None:
    """Replaces a distribution's ``_validate_sample``: the support is checked later, shapes at once."""

    def validate(value: Tensor) -> None:
        Distribution._validate_sample(distribution, value)

    if not isinstance(value, Tensor) or not is_vectorised(value):
        validate(value)
        return
    support = _Later(distribution.support, validate)
    shapes = {"_batch_shape": distribution.batch_shape, "_event_shape": distribution.event_shape}
    Distribution._validate_sample(SimpleNamespace(support=support, **shapes), value)  # type: ignore[arg-type]


class _Later(constraints.Constraint):
    """A constraint that on a device is satisfied until somebody looks."""

    def __init__(self, base: Any, validate: Callable[[Tensor], None]) -> None:
        self.base, self.validate = base, validate
        super().__init__()

    def __repr__(self) -> str:
        return repr(self.base)

    def check(self, value: Tensor) -> Tensor:
        """Which values satisfy the constraint."""
        valid: Tensor = self.base.check(value)
        if not is_vectorised(value):
            return valid
        raise_if(~valid.all(), lambda: self.validate(value))
        return torch.ones((), dtype=torch.bool, device="cpu")


def _parameter_check(name: str, constraint: Any) -> _Later:
    def complain(value: Tensor) -> None:
        raise ValueError(f"expected parameter {name} of shape {tuple(value.shape)} to satisfy the constraint {constraint!r}; got\n{value}")

    return _Later(constraint, complain)


_Normal: Any = defer_validation(dist.Normal)


class NormalOrMissing(_Normal):  # type: ignore[misc]
    r"""A normal distribution of entries that may be missing (NaN).

    Missing entries contribute nothing.

    .. math:: \log p(y) = [y \text{ is observed}] \, \log \mathcal N(y; \mu, \sigma^2).

    Shapes and parameters are those of :class:`~pyro.distributions.Normal`. Draws have no missing entries.

    Example:
        >>> NormalOrMissing(torch.zeros(2), 1.0).log_prob(torch.tensor([0.0, torch.nan]))
        tensor([-0.9189,  0.0000])

    Args:
        loc: means.
        scale: standard deviations.

    Raises:
        ValueError: for parameters of a normal distribution that are none, and values that are infinite.
    """

    support = or_missing(constraints.real)

    def log_prob(self, value: Tensor) -> Tensor:
        """Returns log densities, with zero where the value is missing.

        Booleans count as zeros and ones.
        """
        if self._validate_args:
            self._validate_sample(value)
        value = value.to(self.loc.dtype) if value.dtype == torch.bool else value
        is_missing = value.isnan()
        # Zero in its place keeps NaN out of gradients, too.
        standardised = (value - self.loc).masked_fill(is_missing, 0.0) / self.scale
        log_density: Tensor = torch.sub(-(0.5 * math.log(2 * math.pi)) - self.scale.log(), standardised.square(), alpha=0.5)
        return log_density.masked_fill(is_missing, 0.0)
