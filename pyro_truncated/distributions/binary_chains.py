"""Independent binary Markov chains as one distribution over whole sequences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.distributions import TorchDistribution
from pyro.infer.reparam.reparam import Reparam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.ops.binary_chains import Transitions, safe_log
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.constraints import larger_batch


class BinaryChains(TorchDistribution):
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

    initial: Tensor
    transition: Tensor

    @names_arguments
    def __init__(
        self,
        initial: Tensor,
        transition: Tensor,
        num_steps: int,
        lengths: Tensor | None = None,
        validate_args: bool | None = None,
    ) -> None:
        self.num_steps = check_count("num_steps", num_steps)
        if initial.dim() < 1 or transition.shape[-3:] != (initial.shape[-1], 2, 2):
            raise ValueError(
                "initial must have shape (*batch, M) and transition (*batch, M, 2, 2); "
                f"got {tuple(initial.shape)} and {tuple(transition.shape)}"
            )
        batch_shape = torch.broadcast_shapes(initial.shape[:-1], transition.shape[:-3], () if lengths is None else lengths.shape)
        self.num_chains = initial.shape[-1]
        self.initial = initial.expand(*batch_shape, -1)
        self.transition = transition.expand(*batch_shape, -1, -1, -1)
        self.lengths = None if lengths is None else lengths.expand(batch_shape)
        if lengths is not None and (lengths.is_floating_point() or bool(((lengths < 0) | (lengths > num_steps)).any())):
            raise ValueError(f"lengths must be integers from 0 to num_steps = {num_steps}; got {lengths}")
        event_shape = torch.Size((self.num_steps, self.num_chains))
        super().__init__(batch_shape, event_shape, validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> BinaryChains:
        """The same chains for a larger batch."""
        initial, transition = self.initial.expand(*batch_shape, -1), self.transition.expand(*batch_shape, -1, -1, -1)
        lengths = None if self.lengths is None else self.lengths.expand(batch_shape)
        return larger_batch(self, batch_shape, _instance, initial=initial, transition=transition, lengths=lengths)

    @property
    def is_part(self) -> Tensor:
        """Which steps are part of their sequence, ``(*batch, T)``."""
        steps = torch.arange(self.num_steps, device=self.initial.device)
        if self.lengths is None:
            return (steps >= 0).expand(*self.batch_shape, -1)
        return steps < self.lengths.to(steps.device).unsqueeze(-1)

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


class _StepReparam(Reparam):
    """Samples chains step by step, a site for each step."""

    def apply(self, msg: Any) -> Any:
        """Replaces a site by those of its steps, with their values."""
        fn, observed = msg["fn"], msg["value"] if msg["is_observed"] else None
        states: list[Tensor] = []
        chance, after_off, after_on = fn.initial, fn.transition[..., 0, 1], fn.transition[..., 1, 1]
        for t, (name, is_part) in enumerate(zip(step_names(msg["name"], fn), fn.is_part.unbind(-1), strict=True)):
            if t:
                chance = torch.where(states[-1] != 0, after_on, after_off)
            step = dist.Bernoulli(chance, validate_args=False).to_event(1)
            if fn.lengths is not None:
                chance = torch.where(is_part.unsqueeze(-1), chance, 0.0)
                step = dist.Bernoulli(chance, validate_args=False).to_event(1).mask(is_part)
            states.append(pyro.sample(name, step, obs=None if observed is None else observed[..., t, :]))
        value = torch.stack(torch.broadcast_tensors(*states), -2) if observed is None else observed
        return {"fn": dist.Delta(value, event_dim=2), "value": value, "is_observed": True}


def step_names(name: str, chains: BinaryChains) -> list[str]:
    """Names of the sites of steps that stand for one of chains."""
    return [f"{name}_step_{t}" for t in range(chains.num_steps)]


def run_by_steps(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    r"""Runs a program whose chains are sampled step by step.

    .. math:: s_1 \sim p(s_1), \qquad s_t \sim p(s_t \mid s_{t-1}), \qquad s = (s_1, \dots, s_T).

    Its joint density is the same, and each step is a site.
    """
    with poutine.reparam(config=lambda site: _StepReparam() if isinstance(site["fn"], BinaryChains) else None):
        return model(*args, **kwargs)
