"""Independent Markov chains as one distribution over whole sequences."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Self

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.torch_distribution import MaskedDistribution
from pyro.distributions.util import broadcast_shape
from pyro.infer.reparam.reparam import Reparam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.ops.binary_chains import Transitions, safe_log
from pyro_truncated.utils.arguments import check_count, goes_with, names_arguments
from pyro_truncated.utils.arrays import as_data, once
from pyro_truncated.utils.constraints import larger_batch


class MarkovChains(TorchDistribution):
    """What distributions over ``M`` chains of ``T`` steps share.

    Attributes:
        initial: parameters of the first values, ``(*batch, M)`` or ``(*batch, M, V)``.
        transition: probability of the column's value after the row's, ``(*batch, M, V, V)``.
        num_steps: number of steps ``T``.
        num_chains: number of chains ``M``.
        lengths: number of steps of each sequence, ``(*batch,)``; ``None`` where all have ``T``.
    """

    initial: Tensor
    transition: Tensor

    def __init__(
        self,
        initial: Tensor,
        transition: Tensor,
        num_steps: int,
        lengths: Tensor | None,
        validate_args: bool | None,
        *,
        num_own: int,
    ) -> None:
        self.num_steps, self.num_chains = check_count("num_steps", num_steps), transition.shape[-3]
        lengths = None if lengths is None else as_data("lengths", lengths)
        own = initial.dim() - num_own
        batch_shape = torch.Size(broadcast_shape(initial.shape[:own], transition.shape[:-3], () if lengths is None else lengths.shape))
        self.initial = initial.expand(*batch_shape, *initial.shape[own:])
        self.transition = transition.expand(*batch_shape, *transition.shape[-3:])
        self.lengths = None if lengths is None else lengths.expand(batch_shape)
        if lengths is not None and (lengths.is_floating_point() or bool(((lengths < 0) | (lengths > num_steps)).any())):
            raise ValueError(f"lengths must be integers from 0 to num_steps = {num_steps}; got {lengths}")
        event_shape = torch.Size((self.num_steps, self.num_chains))
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """The same chains for a larger batch."""
        depth = len(self.batch_shape)
        initial, transition = (part.expand(*batch_shape, *part.shape[depth:]) for part in (self.initial, self.transition))
        lengths = None if self.lengths is None else self.lengths.expand(batch_shape)
        return larger_batch(self, batch_shape, _instance, initial=initial, transition=transition, lengths=lengths)

    @property
    def is_part(self) -> Tensor:
        """Which steps are part of their sequence, ``(*batch, T)``."""
        steps = torch.arange(self.num_steps, device=self.initial.device)
        if self.lengths is None:
            return (steps >= 0).expand(*self.batch_shape, -1)
        return steps < self.lengths.to(steps.device).unsqueeze(-1)

    def step(self, before: Tensor | None, is_part: Tensor | None = None) -> TorchDistribution:
        """The distribution of a step, with an event ``(M,)``.

        Args:
            before: values of the step before, ``(..., *batch, M)``; ``None`` for the first step.
            is_part: whether the step is part of its sequence, ``(*batch,)``; elsewhere it has zeros. Default: everywhere.
        """
        raise NotImplementedError


class BinaryChains(MarkovChains):
    r"""``M`` independent binary Markov chains over ``T`` steps, one event ``(T, M)``.

    .. math:: p(s) = \prod_m p_m(s_{1m}) \prod_{t=2}^T A_m(s_{t-1,m}, s_{tm}).

    Shorter sequences have ``lengths``: steps beyond the end hold zeros and no probability.

    Example:
        >>> switch = torch.tensor([[0.9, 0.1], [0.2, 0.8]])
        >>> chains = BinaryChains(torch.full((3,), 0.5), switch.expand(3, 2, 2), num_steps=4)
        >>> chains.sample().shape
        torch.Size([4, 3])
        >>> chains.log_prob(torch.zeros(4, 3)).exp()
        tensor(0.0484)

    Args:
        initial: probability that a chain is on at the first step, ``(*batch, M)``.
        transition: probability of the column's value after the row's, ``(*batch, M, 2, 2)``.
        num_steps: number of steps ``T``.
        lengths: number of steps of each sequence, ``(*batch,)`` integers from 0 to ``T``. Default: all have ``T``.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if shapes do not fit, a parameter is no probability, or a length is out of range.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "initial": constraints.independent(constraints.unit_interval, 1),
        "transition": constraints.independent(constraints.simplex, 2),
    }
    support = constraints.independent(constraints.boolean, 2)

    @names_arguments
    def __init__(
        self,
        initial: Tensor,
        transition: Tensor,
        num_steps: int,
        lengths: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        initial, transition = as_data("initial", initial), as_data("transition", transition)
        if initial.dim() < 1 or transition.shape[-3:] != (initial.shape[-1], 2, 2):
            raise ValueError(
                "initial must have shape (*batch, M) and transition (*batch, M, 2, 2); "
                f"got {tuple(initial.shape)} and {tuple(transition.shape)}"
            )
        super().__init__(initial, transition, num_steps, lengths, validate_args, num_own=1)

    def step(self, before: Tensor | None, is_part: Tensor | None = None) -> TorchDistribution:
        """The distribution of a step, see :meth:`MarkovChains.step`."""
        # Parameters have one batch shape, but a step depends only on what its own are computed from.
        chance = once(self.initial, end=1)
        if before is not None:
            after_off, after_on = (once(self.transition[..., row, 1], end=1) for row in range(2))
            chance = torch.where(before != 0, after_on, after_off)
        if is_part is not None:
            chance = torch.where(is_part.unsqueeze(-1), chance, 0.0)
        step: TorchDistribution = dist.Bernoulli(chance, validate_args=False).to_event(1)
        return step

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log probabilities of sequences ``(*batch, T, M)``."""
        if self._validate_args:
            self._validate_sample(value)
        on = value != 0
        first = torch.where(on[..., 0, :], safe_log(self.initial), safe_log(1 - self.initial))
        table = safe_log(self.transition).unsqueeze(-4)
        after = [torch.where(on[..., 1:, :], table[..., i, 1], table[..., i, 0]) for i in range(2)]
        steps = torch.cat([first.unsqueeze(-2), torch.where(on[..., :-1, :], after[1], after[0])], -2).sum(-1)
        return torch.where(self.is_part, steps, 0.0).sum(-1)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws sequences ``(*sample_shape, *batch, T, M)`` of zeros and ones."""
        shape = torch.Size(sample_shape) + self.batch_shape
        uniform = torch.rand(*shape, *self.event_shape, dtype=self.initial.dtype, device=self.initial.device)
        if uniform[..., 0, :].numel() > self.num_steps:
            return self._draw_in_turn(uniform)
        after_off, after_on = (uniform < self.transition[..., i, 1].unsqueeze(-2) for i in range(2))
        after_off[..., 0, :] = after_on[..., 0, :] = uniform[..., 0, :] < self.initial
        # A step forgets the value before it, keeps it, or turns it round.
        step = torch.arange(self.num_steps, device=uniform.device).unsqueeze(-1)
        forgotten = torch.where(after_off == after_on, step, 0).cummax(-2).values
        turns = (after_off & ~after_on).cumsum(-2)
        is_odd = (turns - turns.gather(-2, forgotten)) % 2 == 1
        return ((after_off.gather(-2, forgotten) ^ is_odd) & self.is_part.unsqueeze(-1)).to(self.initial.dtype)

    def _draw_in_turn(self, uniform: Tensor) -> Tensor:
        """The same draws step by step: of many sequences that is faster."""
        is_on, steps = uniform[..., 0, :] < self.initial, []
        for t in range(self.num_steps):
            if t:
                is_on = uniform[..., t, :] < torch.where(is_on, self.transition[..., 1, 1], self.transition[..., 0, 1])
            steps.append(is_on)
        return (torch.stack(steps, -2) & self.is_part.unsqueeze(-1)).to(self.initial.dtype)

    @property
    def mean(self) -> Tensor:
        """Probability that each chain is on at each step, ``(*batch, T, M)``."""
        chance, steps = self.initial, []
        for _ in range(self.num_steps):
            steps.append(chance)
            chance = chance * self.transition[..., 1, 1] + (1 - chance) * self.transition[..., 0, 1]
        return torch.where(self.is_part.unsqueeze(-1), torch.stack(steps, -2), 0.0)

    @property
    def variance(self) -> Tensor:
        """Variance of each chain at each step, ``(*batch, T, M)``."""
        return self.mean * (1 - self.mean)

    def flatten(self) -> BinaryChains:
        """The same sequences in a batch ``(N,)``."""
        if len(self.batch_shape) == 1:
            return self
        number = self.batch_shape.numel()
        lengths = None if self.lengths is None else self.lengths.reshape(number)
        if any(
            part.stride()[: len(self.batch_shape)].count(0) < sum(size > 1 for size in self.batch_shape)
            for part in (self.initial, self.transition)
        ):
            initial, transition = self.initial.reshape(number, -1), self.transition.reshape(number, -1, 2, 2)
        else:
            place = (0,) * len(self.batch_shape)
            initial = self.initial[place].expand(number, -1)
            transition = self.transition[place].expand(number, -1, -1, -1)
        return BinaryChains(initial, transition, self.num_steps, lengths, validate_args=False)

    def transitions(self) -> Transitions:
        """Returns the chains as sums over sets of states take them.

        There is a row for each sequence of a batch ``(N,)``.

        Raises:
            ValueError: if chains differ between sequences, or the batch has more than one dimension.
        """
        is_shared = self.batch_shape.numel() <= 1 or not (self.initial.stride(0) or self.transition.stride(0))
        if len(self.batch_shape) > 1 or not is_shared:
            raise ValueError(f"sequences of a batch (N,) must share their chains; got a batch of shape {tuple(self.batch_shape)}")
        place = (0,) * len(self.batch_shape)
        kind = torch.ones(max(1, self.batch_shape.numel()), self.num_steps, dtype=torch.int64, device=self.initial.device)
        kind[:, 0] = 0
        initial, transition = self.initial[place], self.transition[place]
        # The first step follows no other.
        first = torch.stack([1 - initial, initial], -1).unsqueeze(-2).expand_as(transition)
        return Transitions(safe_log(torch.stack([first, transition])), kind.masked_fill(~self.is_part, -1))


class CategoricalChains(MarkovChains):
    r"""``M`` independent Markov chains of ``V`` values, one event ``(T, M)``.

    .. math:: p(s) = \prod_m p_m(s_{1m}) \prod_{t=2}^T A_m(s_{t-1,m}, s_{tm}), \qquad s_{tm} \in \{0, \dots, V - 1\}.

    With one chain it is the hidden part of a hidden Markov model. A guide has a set of joint states for each step.
    Shorter sequences have ``lengths``: steps beyond the end hold zeros and no probability. The first call of a guide runs the model step by
    step, some 40 times, which takes long beyond 1000 steps; of :class:`BinaryChains` it does not.

    Example:
        >>> switch = torch.full((1, 3, 3), 0.1) + 0.7 * torch.eye(3)
        >>> def model(y):
        ...     with pyro.plate("sequences", len(y)):
        ...         s = pyro.sample("s", CategoricalChains(torch.full((1, 3), 1 / 3), switch, num_steps=y.shape[1]))
        ...         pyro.sample("y", dist.Normal(1.0 * s.squeeze(-1), 0.5).to_event(1), obs=y)
        >>> guide = AutoTruncated(model)
        >>> loss = Truncated_ELBO().loss(model, guide, torch.randn(5, 30))
        >>> guide.marginals()["s"].shape
        torch.Size([5, 30, 1, 3])

    Args:
        initial: probabilities of the first values, ``(*batch, M, V)``.
        transition: probability of the column's value after the row's, ``(*batch, M, V, V)``.
        num_steps: number of steps ``T``.
        lengths: number of steps of each sequence, ``(*batch,)`` integers from 0 to ``T``. Default: all have ``T``.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if shapes do not fit, parameters are no probabilities, or a length is out of range.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "initial": constraints.independent(constraints.simplex, 1),
        "transition": constraints.independent(constraints.simplex, 2),
    }

    @names_arguments
    def __init__(
        self,
        initial: Tensor,
        transition: Tensor,
        num_steps: int,
        lengths: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        initial, transition = as_data("initial", initial), as_data("transition", transition)
        if initial.dim() < 2 or transition.shape[-3:] != (*initial.shape[-2:], initial.shape[-1]):
            raise ValueError(
                "initial must have shape (*batch, M, V) and transition (*batch, M, V, V); "
                f"got {tuple(initial.shape)} and {tuple(transition.shape)}"
            )
        super().__init__(initial, transition, num_steps, lengths, validate_args, num_own=2)

    @constraints.dependent_property(is_discrete=True, event_dim=2)
    def support(self) -> Any:
        """Integers below ``V``."""
        return constraints.independent(constraints.integer_interval(0, self.initial.shape[-1] - 1), 2)

    def step(self, before: Tensor | None, is_part: Tensor | None = None) -> TorchDistribution:
        """The distribution of a step, see :meth:`MarkovChains.step`."""
        chances = once(self.initial, end=2)
        if before is not None:
            number, transition = chances.shape[-1], once(self.transition, end=3)
            shape = broadcast_shape(before.shape, transition.shape[:-2])
            place = before.long().expand(shape)[..., None, None].expand(*shape, 1, number)
            chances = transition.expand(*shape, number, number).gather(-2, place).squeeze(-2)
        if is_part is not None:
            zeros = torch.nn.functional.one_hot(torch.zeros_like(chances[..., 0], dtype=torch.int64), chances.shape[-1]).to(chances)
            chances = torch.where(is_part[..., None, None], chances, zeros)
        step: TorchDistribution = dist.Categorical(chances, validate_args=False).to_event(1)
        return step

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log probabilities of sequences ``(*batch, T, M)``."""
        if self._validate_args:
            self._validate_sample(value)
        place = value.long().expand(*broadcast_shape(value.shape[:-2], self.batch_shape), *value.shape[-2:])
        first = safe_log(self.initial).expand(*place.shape[:-2], *self.initial.shape[-2:]).gather(-1, place[..., 0, :, None]).squeeze(-1)
        pairs = place[..., :-1, :] * self.initial.shape[-1] + place[..., 1:, :]
        table = safe_log(self.transition).flatten(-2).unsqueeze(-3)
        later = table.expand(*pairs.shape, -1).gather(-1, pairs.unsqueeze(-1)).squeeze(-1)
        steps = torch.cat([first.unsqueeze(-2), later], -2).sum(-1)
        return torch.where(self.is_part, steps, 0.0).sum(-1)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws sequences ``(*sample_shape, *batch, T, M)`` of integers."""
        shape = torch.Size(sample_shape) + self.batch_shape
        steps: list[Tensor] = []
        for is_part in self.is_part.unbind(-1):
            own = self.step(steps[-1] if steps else None, is_part)
            steps.append(own.expand(shape).sample())
        return torch.stack(steps, -2)


def keeps_step_density(fn: Any) -> bool:
    """Whether a distribution is of chains, with the density of their steps."""
    return isinstance(fn, MarkovChains) and goes_with(fn, "step", "log_prob")


class _StepReparam(Reparam):
    """Samples chains step by step, a site for each step."""

    def apply(self, msg: Any) -> Any:
        """Replaces a site by those of its steps, with their values."""
        fn = msg["fn"]
        with contextlib.ExitStack() as masks:
            while isinstance(fn, MaskedDistribution):
                masks.enter_context(poutine.mask(mask=fn._mask))
                fn = fn.base_dist
            return self._sample_steps(fn, msg)

    def _sample_steps(self, fn: MarkovChains, msg: Any) -> Any:
        observed = msg["value"] if msg["is_observed"] else None
        states: list[Tensor] = []
        for t, (name, is_part) in enumerate(zip(step_names(msg["name"], fn), fn.is_part.unbind(-1), strict=True)):
            step = fn.step(states[-1] if states else None, None if fn.lengths is None else is_part)
            step = step if fn.lengths is None else step.mask(is_part)
            states.append(pyro.sample(name, step, obs=None if observed is None else observed[..., t, :]))
        value = torch.stack(torch.broadcast_tensors(*states), -2) if observed is None else observed
        return {"fn": dist.Delta(value, event_dim=2), "value": value, "is_observed": True}


def step_names(name: str, chains: MarkovChains) -> list[str]:
    """Names of the sites of steps that stand for one of chains."""
    return [f"{name}_step_{t}" for t in range(chains.num_steps)]


def run_by_steps(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    r"""Runs a program whose chains are sampled step by step.

    .. math:: s_1 \sim p(s_1), \qquad s_t \sim p(s_t \mid s_{t-1}), \qquad s = (s_1, \dots, s_T).

    Its joint density is the same, and each step is a site.
    """
    with poutine.reparam(config=_reparam_for):
        return model(*args, **kwargs)


def _reparam_for(site: Any) -> Reparam | None:
    """How chains are sampled, whose own site then records their values."""
    fn = site["fn"]
    while isinstance(fn, MaskedDistribution):
        fn = fn.base_dist
    if not keeps_step_density(fn):
        return None
    site["infer"] = {**site["infer"], "_deterministic": True}
    return _StepReparam()
