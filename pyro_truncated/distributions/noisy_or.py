"""Binary observations that any of the active latents can switch on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import Statistics, Superposition, check_binary, counts, trials
from pyro_truncated.ops.noisy_or import log1mexp, log_off
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.constraints import or_missing, without_missing


class NoisyOrSuperposition(Superposition):
    r"""Bernoulli observations whose causes act independently: a noisy-OR.

    .. math:: p(y_d = 1 \mid s) = 1 - (1 - w_{0d}) \prod_h (1 - W_{dh} s_h).

    Log probabilities are computed from :math:`\log p(y_d = 0 \mid s)`, so that probabilities near 0
    and 1 lose no precision. An observation that is impossible under a state has log probability
    minus infinity. Entries of an observation that are NaN are missing and contribute nothing.

    Example:
        >>> states, weight = torch.tensor([1.0, 1.0]), torch.tensor([[0.5, 0.5]])
        >>> NoisyOrSuperposition(states, weight).log_prob(torch.tensor([1.0])).exp()  # 1 - (1 - 0.5) (1 - 0.5)
        tensor(0.7500)

    Args:
        states: binary states ``(*batch, H)``.
        weight: probabilities :math:`W` that a latent switches a dimension on, ``(D, H)``, or with batch dimensions in front.
        leak: probability :math:`w_0` that a dimension is on without a cause, a scalar or ``(D,)``, or with batch dimensions
            in front of ``D``.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.independent(constraints.boolean, 1),
        "weight": constraints.independent(constraints.unit_interval, 2),
        "leak": constraints.unit_interval,
    }
    support = constraints.independent(or_missing(constraints.boolean), 1)
    has_rsample = False

    leak: Tensor

    @names_arguments
    def __init__(self, states: Tensor, weight: Tensor, leak: Tensor | float = 0.0, validate_args: bool | None = None) -> None:
        super().__init__(states, weight, validate_args, leak=leak)

    @property
    def variance(self) -> Tensor:
        """Variance of the observations, ``(*batch, D)``."""
        mean = self.mean
        return mean * (1 - mean)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations in {0, 1}."""
        with torch.no_grad():
            return torch.bernoulli(self.mean.expand(torch.Size(sample_shape) + self.batch_shape + self.event_shape))

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log probability of observations under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`.

        See :meth:`Superposition.packed_log_prob`; observations that are impossible have minus infinity.
        """
        linear = None if state_logits is None else state_logits.expand(len(value), self.weight.shape[-1])
        return ops.noisy_or_log_prob(words, value, *self._log_complements(), linear).to(self.weight.dtype)

    @torch.no_grad()
    def statistics(self, population: Population, value: Tensor, temperature: float = 1.0) -> Statistics:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        They are those of the model with hidden causes :math:`t_{dh} \sim \mathrm{Bernoulli}(W_{dh}
        s_h)`, :math:`y_d = \mathrm{OR}_h\, t_{dh}`, of which :math:`p(t_{dh} = 1 \mid y, s) = y_d
        s_h W_{dh} / p(y_d = 1 \mid s)`. :math:`C_{dh}` is the expected number of causes that are
        on, and :math:`T_{dh} = \sum_n \langle s_h \rangle` over the data points that have dimension
        ``d``. The gradient of the truncated free energy is

        .. math:: \frac{\partial \mathcal F}{\partial W_{dh}} = \frac{C_{dh} - W_{dh}\, T_{dh}}{W_{dh} (1 - W_{dh})},

        and the M-step of EM sets :math:`W_{dh} = C_{dh} / T_{dh}`; the leak is a latent that is always on.

        Returns:
            ``num_data``; ``states``, the sum of :math:`\langle s \rangle`, ``(H,)``; ``observed``,
            counts of observations, ``(D,)``. ``trials`` :math:`T` and ``causes``
            :math:`C`, ``(D, H)``. ``leak_causes``, the causes of the leak, ``(D,)``. All can be
            added and scaled.
        """
        check_binary(population, self.weight.shape[-1])
        rows = population.select_rows(value)
        complements = self._log_complements()
        active, ratio, leak_ratio = ops.noisy_or_statistics(population.words, population.weights(temperature), rows, *complements)
        rows, is_observed = without_missing(rows)
        return {
            "num_data": active.new_full((), len(rows)),
            "states": active.sum(0),
            "observed": counts(rows, is_observed),
            "trials": trials(active, rows, is_observed),
            "causes": self.weight.double() * ratio,
            "leak_causes": self.leak.double() * leak_ratio,
        }

    def _mean(self, states: Tensor) -> Tensor:
        return -torch.expm1(self._log_off(states))

    def _log_complements(self) -> tuple[Tensor, Tensor]:
        leak = self.leak.double().expand(*self.leak.shape[:-1], *self.event_shape)
        return torch.log1p(-self.weight.double()), torch.log1p(-leak)

    def _log_off(self, states: Tensor) -> Tensor:
        log_complements = (tensor.to(self.weight.dtype) for tensor in self._log_complements())
        return log_off(states.to(self.weight.dtype), *log_complements)

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        off = self._log_off(states)
        return torch.where(value.isnan(), 0.0, torch.where(value == 1, log1mexp(off), off)).sum(-1)
