"""Warm starts of neural decoders by the codes of a linear model."""

from __future__ import annotations

import copy
import math
from typing import Self

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.em.closed_form import Statistics
from pyro_truncated.multistart.decoders import observed_numbers
from pyro_truncated.multistart.profile import Profile
from pyro_truncated.multistart.solution import Solution
from pyro_truncated.multistart.trainer import Trainer, fit_states
from pyro_truncated.states.population import Population
from pyro_truncated.utils.devices import generator_device

# Least noise in units of the data, least probability, and relative ridge of the M-step.
_SCALE_FLOOR, _PRIOR_FLOOR, _RIDGE = 1e-3, 1e-6, 1e-10


def decoder_targets(profile: Profile) -> Tensor | None:
    """Returns the real numbers ``(N, D)`` that a network decodes states into.

    They are in units of their deviation. ``None`` for other models: those with ``draw_start``, shared or continuous latents, several
    discrete sites, frozen networks, counts or missing values, and data in files or several processes.
    """
    model, y = profile.model, profile.y
    is_decoder = profile.optimizer == "gradients" and profile.is_network and profile.initializer is None
    if not is_decoder or profile.is_large or profile.has_companion or profile.shares_latents:
        return None
    layout = profile.set_up_guide().layout
    is_trainable = bool(profile.layers & profile.parameters.trainable().keys())
    is_whole = profile.num_data == len(y) == layout.num_data and getattr(y, "file", None) is None
    is_one_site = len(layout.sites) == 1 and layout.space.is_binary and layout.space.num_latents > 1
    if not is_trainable or not is_whole or not is_one_site or layout.other_latents:
        return None
    run = observed_numbers(model, y, layout)
    if run is None:
        return None
    value = run[1]["value"].detach().as_subclass(Tensor).flatten(1).float()
    value = value - value.mean(0)
    unit = value.std(correction=0)
    return value / unit if bool(unit > 0) else None


def likeliest_states(profile: Profile, solution: Solution) -> Tensor:
    """Returns a model's likeliest state of each data point, ``(N, H)``."""
    with Trainer(profile, solution=solution) as trainer:
        trainer.insert_states(solution.states)
        population: Population = trainer.truncated_guide.population()
    return population.space.unpack(population.mode())


@torch.no_grad()
def shuffle(profile: Profile) -> None:
    """Permutes the entries of learned parameters; frozen ones stay.

    Weights that are all equal get noise instead, since any order leaves them and their units equal.
    """
    generator = profile.generator
    for value in profile.parameters.trainable().values():
        order = torch.randperm(value.numel(), generator=generator, device=generator_device(generator)).to(value.device)
        values = value.flatten()[order]
        if value.dim() > 1 and bool((values == values[0]).all()):
            noise = torch.randn(values.shape, generator=generator, dtype=values.dtype, device=generator_device(generator)).to(values.device)
            values = values + (float(values[0].abs()) or 1 / math.sqrt(value.shape[-1])) * noise
        value.copy_(values.view_as(value))


def teach(profile: Profile, code: Tensor) -> None:
    """Trains a network to decode fixed states ``(N, H)``, one per data point."""
    assert profile.space is not None
    fit_states(profile, profile.space.pack(code.unsqueeze(1)))


class LinearCauses(torch.nn.Module):
    r"""Binary sparse coding with an offset, :math:`s_h \sim \mathrm{Bernoulli}(\pi)`, :math:`y \sim \mathcal N(W s + b, \sigma^2 I)`.

    A minimal model for :class:`~pyro_truncated.multistart.multi_start.MultiStart`. Its data are complete, of size one about zero,
    and in one process.
    """

    weight: Tensor  # W, (D, H)
    bias: Tensor  # b, (D,)
    scale: Tensor
    prior: Tensor

    def __init__(self, num_observed: int, num_latents: int) -> None:
        super().__init__()
        self.num_latents = num_latents
        self.register_buffer("weight", torch.zeros(num_observed, num_latents))
        self.register_buffer("bias", torch.zeros(num_observed))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("prior", torch.tensor(min(0.5, 2 / num_latents)))

    def forward(self, y: Tensor) -> None:
        """The model of data ``y (N, D)``."""
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(self.prior).expand([self.num_latents]).to_event(1))
            pyro.sample("y", LinearSuperposition(s, self.weight, self.scale, self.bias), obs=y)

    @torch.no_grad()
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> Self:
        """Initialises elements by the shared parts of random data points.

        A part counts if as many data points have it as have a latent active at first. A whole one may explain no other data point.
        """
        prior = min(0.5, 2 / self.num_latents)
        order = torch.randperm(len(y), generator=generator, device=generator_device(generator)).to(y.device)
        rows = y[order.repeat(-(-self.num_latents // len(y)))[: self.num_latents]]
        parts = y @ rows.mT / rows.square().sum(1).clamp(min=torch.finfo(y.dtype).tiny)
        # Not of the first one: that may be the data point itself.
        part = parts.topk(min(len(y), 1 + max(1, round(prior * len(y)))), 0).values[1:].mean(0).nan_to_num()
        # Least share of a data point in an initial element.
        self.weight.copy_(rows.mT * part.clamp(0.1, 1.0))
        self.bias.zero_()
        self.scale.copy_(y.std(correction=0).clamp(min=_SCALE_FLOOR))
        self.prior.fill_(prior)
        return self

    def with_latents(self, index: Tensor) -> Self:
        """Returns a model whose latent ``i`` copies latent ``index[i]``."""
        other = copy.deepcopy(self)
        other.num_latents = len(index)
        other.weight = self.weight[:, index.to(self.weight.device)].clone()
        other.prior = (self.prior * self.num_latents / len(index)).clamp(max=0.5)
        return other

    def sufficient_statistics(self, population: Population, y: Tensor, *, temperature: float = 1.0) -> Statistics:
        """Those of :meth:`~pyro_truncated.distributions.LinearSuperposition.statistics`."""
        return LinearSuperposition.statistics(population, y, temperature)

    @torch.no_grad()
    def maximize(self, statistics: Statistics) -> None:
        """Solves least squares, with the offset as an always active element."""
        number, often = statistics["num_data"], statistics["states"]
        moments = torch.cat([torch.cat([statistics["pairs"], often.unsqueeze(1)], 1), torch.cat([often, number.view(1)]).unsqueeze(0)])
        cross = torch.cat([statistics["cross"], statistics["sums"].unsqueeze(1)], 1)
        before = torch.cat([self.weight, self.bias.unsqueeze(1)], 1).to(moments)
        ridge = _RIDGE * moments.diagonal().mean() * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        solution = before + torch.linalg.solve(moments + ridge, cross - before @ moments, left=False)
        self.weight.copy_(solution[:, :-1])
        self.bias.copy_(solution[:, -1])
        errors = LinearSuperposition(often, solution[:, :-1], 1.0, solution[:, -1], validate_args=False).square_error(statistics)
        self.scale.copy_((errors.sum() / statistics["observed"].sum()).clamp(min=0.0).sqrt().clamp(min=_SCALE_FLOOR))
        self.prior.copy_((often.mean() / number).clamp(_PRIOR_FLOOR, 1 - _PRIOR_FLOOR))
