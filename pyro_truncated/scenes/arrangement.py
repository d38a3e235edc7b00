"""Priors of positions and depth orders, and their place in populations."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributions.deferred_validation import defer_constraints, validate_later
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.counts import check_count


class _OfPresent(TorchDistribution):
    """Integers of objects: uniform for present ones, 0 for absent ones.

    Absent objects so add no states.

    Subclasses say how many values each object may take.
    """

    arg_constraints: ClassVar[dict[str, Any]] = defer_constraints({"presence": constraints.independent(constraints.boolean, 1)})
    _validate_sample = validate_later
    presence: Tensor

    @names_arguments
    def __init__(self, presence: Tensor, num_values: int, validate_args: bool | None = None) -> None:
        if presence.dim() < 1:
            raise ValueError("presence must have shape (*batch, H); got a scalar")
        self.presence = presence
        self.num_values = check_count("num_values", num_values)
        super().__init__(presence.shape[:-1], presence.shape[-1:], validate_args=validate_args)

    @constraints.dependent_property(is_discrete=True, event_dim=1)
    def support(self) -> Any:
        """Integers below the number of values."""
        return constraints.independent(constraints.integer_interval(0, self.num_values - 1), 1)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _OfPresent:
        """The same distribution over a larger batch."""
        batch_shape = torch.Size(batch_shape)
        if batch_shape == self.batch_shape:
            return self
        new: _OfPresent = self._get_checked_instance(type(self), _instance)  # type: ignore[no-untyped-call]
        new.presence, new.num_values = self.presence.expand(batch_shape + self.event_shape), self.num_values
        super(_OfPresent, new).__init__(batch_shape, self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def _counts(self) -> Tensor:
        """Returns the number of values of each object, ``(*batch, H)``.

        It is one for all if they are equal.
        """
        return torch.full((), self.num_values, device=self.presence.device)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws integers ``(*sample_shape, *batch, H)``, int64."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        counts = torch.where(self.presence > 0, self._counts(), 1).expand(shape)
        uniform = torch.rand(shape, device=self.presence.device, dtype=torch.float64)
        return torch.minimum((uniform * counts).long(), counts - 1)

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Returns the log probability of integers ``(*batch, H)``.

        It is minus infinity for an absent object that is not at 0.
        """
        if self._validate_args:
            self._validate_sample(value)
        counts = torch.where(self.presence > 0, self._counts(), 1)
        dtype = self.presence.dtype if self.presence.is_floating_point() else torch.get_default_dtype()
        return torch.where(value < counts, -counts.to(dtype).log(), -math.inf).sum(-1)


class Positions(_OfPresent):
    """Positions: uniform over ``num_values`` for present objects, else 0.

    Example:
        >>> Positions(torch.tensor([1.0, 0.0]), 4).log_prob(torch.tensor([3, 0])).exp()
        tensor(0.2500)

    Args:
        presence: which objects are present, ``(*batch, H)``, zeros and ones.
        num_values: number of places ``L``.
        validate_args: whether to check parameters and values.
    """

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        r"""Returns the log probability :math:`-|s| \log L` of places ``(*batch, H)``.

        It is minus infinity for an absent object that is not at place 0.
        """
        if self._validate_args:
            self._validate_sample(value)
        present = self.presence > 0
        dtype = self.presence.dtype if self.presence.is_floating_point() else torch.get_default_dtype()
        number = present.sum(-1).to(dtype)
        return torch.where((present | (value == 0)).all(-1), -math.log(self.num_values) * number, -math.inf)


class DepthOrder(_OfPresent):
    """A uniformly random depth order of the present objects.

    Its code is the place where each object is inserted among those of smaller index.

    Object ``h`` comes behind ``value[h]`` of the present objects of smaller index. So every order has exactly one
    code, and absent objects have code 0. :func:`depth_rank` turns codes into ranks and :func:`depth_code` ranks into
    codes.

    Example:
        >>> order = DepthOrder(torch.tensor([1.0, 0.0, 1.0]))
        >>> order.log_prob(torch.tensor([0, 0, 1])).exp()  # two objects: two orders
        tensor(0.5000)

    Args:
        presence: which objects are present, ``(*batch, H)``, zeros and ones.
        validate_args: whether to check parameters and values.
    """

    @names_arguments
    def __init__(self, presence: Tensor, validate_args: bool | None = None) -> None:
        super().__init__(presence, presence.shape[-1] if presence.dim() else 1, validate_args)

    def _counts(self) -> Tensor:
        present = (self.presence > 0).long()
        return present.cumsum(-1)


def depth_rank(code: Tensor, presence: Tensor) -> Tensor:
    """Returns ranks of present objects from codes ``(*batch, H)``.

    The foremost has rank 0. Absent objects get the number of objects.
    """
    num_objects = code.shape[-1]
    ranks: list[Tensor] = []
    for h in range(num_objects):
        here, present = code[..., h], presence[..., h] > 0
        # Whatever lies at this rank or behind moves back by one.
        ranks = [rank + ((rank >= here) & present) for rank in ranks]
        ranks.append(torch.where(present, here, num_objects))
    found = torch.stack(ranks, -1)
    return found.masked_fill(presence <= 0, num_objects)


def depth_code(rank: Tensor, presence: Tensor) -> Tensor:
    """Returns codes of a :class:`DepthOrder` from ranks ``(*batch, H)``.

    Ranks of present objects must differ; those of others do not count.
    """
    present = presence > 0
    front = rank.unsqueeze(-2) < rank.unsqueeze(-1)
    earlier = torch.ones(rank.shape[-1], rank.shape[-1], dtype=torch.bool, device=rank.device).tril(-1)
    code: Tensor = (front & earlier & present.unsqueeze(-2)).sum(-1)
    return code.masked_fill(~present, 0)


def object_places(population: Population, num_objects: int) -> tuple[Tensor, Tensor | None]:
    """Returns places and depth ranks of the objects in a population.

    Its sites are presence, position and, if there is one, order.

    Args:
        population: ``N`` data points with ``S`` states each.
        num_objects: number of objects ``H``.

    Returns:
        Places ``(N, S, H)``, -1 for absent objects, and their ranks, the foremost 0, or ``None`` if the states have no order.

    Raises:
        ValueError: if the states do not have two or three latents for every object.
    """
    if population.space.num_latents not in (2 * num_objects, 3 * num_objects):
        raise ValueError(
            f"states of {num_objects} objects have {2 * num_objects} latents (presence and position) or {3 * num_objects} (and order); "
            f"got {population.space!r}"
        )
    levels = population.states(torch.int32)
    presence, position = levels[..., :num_objects], levels[..., num_objects : 2 * num_objects]
    code = levels[..., 2 * num_objects :]
    rank = depth_rank(code, presence) if code.shape[-1] else None
    return torch.where(presence > 0, position, -1), rank
