"""Gaussian observations of a linear superposition of the active latents' dictionary elements."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import ops
from pyro_truncated.distributions.superposition import GaussianSuperposition, Statistics, data_sums, trials
from pyro_truncated.ops.quadratic import product
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.constraints import finite, has_missing, or_missing, without_missing


class LinearSuperposition(GaussianSuperposition):
    r"""Normal observations around a sum of dictionary elements, :math:`y \sim \mathcal N(W s + b, \mathrm{diag}(\sigma^2))`.

    The same density as ``Normal(states @ weight.mT + bias, scale).to_event(1)``, at a cost per state that does not depend on the number
    ``D`` of observed dimensions. Let :math:`\tilde y = y - b` and :math:`\Lambda = \mathrm{diag}(\sigma^{-2})`

    .. math:: |\tilde y - W s|_\Lambda^2 = |\tilde y|_\Lambda^2 - 2\, s^\top W^\top \Lambda \tilde y + s^\top W^\top \Lambda W s,

    where the two products with :math:`W^\top` are shared by all states. The terms cancel, so they are taken in float64; noise about
    :math:`10^6` times smaller than the data leaves nine or so correct digits.

    Entries of an observation that are NaN are missing and contribute nothing.

    Example:
        >>> states, weight, y = torch.tensor([1.0, 0.0, 1.0]), torch.randn(4, 3), torch.randn(4)
        >>> one = LinearSuperposition(states, weight, 0.5).log_prob(y)
        >>> torch.allclose(one, dist.Normal(weight @ states, 0.5).to_event(1).log_prob(y), rtol=1e-4)
        True

    Args:
        states: states ``(*batch, H)``; real numbers, usually zeros and ones.
        weight: dictionary :math:`W`, ``(D, H)``, or with batch dimensions in front.
        scale: standard deviation :math:`\sigma`, a scalar or ``(D,)``, or with batch dimensions in front of ``D``.
        bias: offset :math:`b`, ``(D,)``, or with batch dimensions in front. Zero by default.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if states and weight disagree about the number of latents, or a parameter is invalid.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "states": constraints.real_vector,
        "weight": constraints.independent(finite, 2),
        "scale": constraints.positive,
        "bias": constraints.independent(finite, 1),
    }
    support = constraints.independent(or_missing(constraints.real), 1)

    is_linear = True  # what tells a search that causes add up
    bias: Tensor
    _last_terms: tuple[Any, Tensor, tuple[Tensor, Tensor, Tensor] | None] | None = None

    @names_arguments
    def __init__(
        self, states: Tensor, weight: Tensor, scale: Tensor | float, bias: Tensor | None = None, validate_args: bool | None = None
    ) -> None:
        bias = weight.new_zeros(1).expand(weight.shape[-2]) if bias is None else bias
        super().__init__(states, weight, validate_args, scale=scale, bias=bias)

    @names_arguments
    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of observations ``(*batch, D)`` under the states, over their observed entries."""
        if self._validate_args:
            self._validate_sample(value)
        terms = self._terms(value)
        if terms is None:
            return super().log_prob(value)
        linear, pairwise, constant = terms
        states = self.states.double()
        energy = (states * (linear + product(pairwise, states))).sum(-1)
        return (constant + energy).to(torch.promote_types(self.weight.dtype, value.dtype))

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density under packed binary states, plus :math:`\sum_h s_h\,\mathrm{logit}_h`: :meth:`Superposition.packed_log_prob`.

        Differentiable in the parameters and the logits, once where entries are missing. Without gradients, products of a value with the
        dictionary are cached. Scoring more states for the same value then computes none of them again.
        """
        dtype = torch.promote_types(self.weight.dtype, value.dtype)
        logits = (self.weight.new_zeros(1) if state_logits is None else state_logits).double()
        terms = self._terms(value)
        if terms is None:
            error = ops.square_error(words, value.double() - self.bias.double(), self.weight, self._precision())
            prior = ops.linear_energy(words, logits.expand(len(value), self.weight.shape[-1]))
            return (prior - 0.5 * error + self._log_normalizer(value).unsqueeze(-1)).to(dtype)
        linear, pairwise, constant = terms
        if logits.dim() == 1:
            # What all data points share is on the diagonal, as the square of a binary value is the value.
            pairwise = pairwise + logits.expand(self.weight.shape[-1]).diag_embed()
        else:
            linear = linear + logits
        return ops.pair_energy(words, linear, pairwise).add_(constant.unsqueeze(-1)).to(dtype)

    @torch.no_grad()
    def packed_flip_gains(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor | None:
        """Returns the change of :meth:`packed_log_prob` for each flipped latent.

        See :func:`pyro_truncated.ops.flip_energy`.

        Args:
            words: one packed state for each data point, ``(N, W)``.
            value: observations ``(N, D)``.
            state_logits: as for :meth:`packed_log_prob`.

        Returns:
            Changes ``(N, H)``; ``None`` if entries are missing, where this is no cheaper than to score the flips.
        """
        terms = self._terms(value)
        if terms is None:
            return None
        linear, pairwise, _ = terms
        return ops.flip_energy(words, linear if state_logits is None else linear + state_logits.double(), pairwise)

    @staticmethod
    @torch.no_grad()
    def statistics(population: Population, value: Tensor, temperature: float = 1.0, *, levels: Tensor | None = None) -> Statistics:
        r"""Expected sufficient statistics, summed over the population's data points, in float64.

        With posterior means :math:`\langle\cdot\rangle` and sums over the data points that have
        dimension ``d``: :math:`N_d`, :math:`Y_d = \sum_n y_{nd}`, :math:`Q_d = \sum_n y_{nd}^2`,
        :math:`t_d = \sum_n \langle s \rangle`, :math:`c_d = \sum_n y_{nd} \langle s \rangle` and
        :math:`A_d = \sum_n \langle s s^\top \rangle`. The gradient of the truncated free energy is
        made of them,

        .. math:: \frac{\partial \mathcal F}{\partial W_d} = \frac{c_d - b_d\, t_d - A_d W_d}{\sigma_d^2}, \qquad
            \frac{\partial \mathcal F}{\partial b_d} = \frac{Y_d - N_d\, b_d - W_d^\top t_d}{\sigma_d^2}, \qquad
            \frac{\partial \mathcal F}{\partial \sigma_d} = \frac{E_d}{\sigma_d^3} - \frac{N_d}{\sigma_d},

        with the expected squared errors :math:`E_d` of :meth:`square_error`; setting it to zero is the M-step. They do not depend on the
        parameters, so the method needs no distribution.

        Beside the arguments of :meth:`Superposition.statistics` it takes ``levels (K,)``, the coefficient that each value of a latent
        stands for. By default these are the values 0, 1, ... themselves.

        Returns:
            ``num_data``; ``observed`` :math:`N_d`, ``sums`` :math:`Y_d` and ``squares``
            :math:`Q_d`, ``(D,)``. ``states``, :math:`\sum_n \langle s \rangle`, ``(H,)``.
            ``trials`` :math:`t_d` and ``cross`` :math:`c_d`, ``(D, H)``. ``pairs``, the matrix
            :math:`A`, ``(H, H)`` if nothing is missing, else ``(D, H, H)``. All can be added and
            scaled; pairs of the two shapes add up by broadcasting.
        """
        rows, is_observed = without_missing(population.select_rows(value))
        mask = None if is_observed is None else is_observed.double()
        if levels is None and population.space.is_binary:
            active, pairs = _binary_moments(population, temperature, mask)
        else:
            active, pairs = _moments(population, temperature, mask, levels)
        return {
            **data_sums(rows, is_observed),
            "states": active.sum(0),
            "trials": trials(active, rows, is_observed),
            "cross": rows.mT @ active,
            "pairs": pairs,
        }

    def square_error(self, statistics: Statistics) -> Tensor:
        r"""Expected squared errors :math:`\sum_n \langle (y_{nd} - b_d - W_d s)^2 \rangle` of every dimension, ``(D,)``.

        :math:`Q_d - 2 b_d Y_d + N_d b_d^2 - 2 W_d^\top (c_d - b_d t_d) + W_d^\top A_d W_d` with the sums of :meth:`statistics`.
        """
        return error_with_bias(self.weight, self.bias, statistics)

    def _terms(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Returns the log density as a quadratic function of the state.

        Its coefficients are ``(*batch, H)`` and ``(H, H)``, its constant ``(*batch)``. Where entries are missing there is none.
        """
        # What is known of a value is kept with it: another view of the same memory is the same value. Whether an inference tensor has
        # been changed since cannot be told.
        is_kept = not torch.is_grad_enabled() and not value.is_inference()
        key = (value.data_ptr(), value.shape, value.stride(), value.dtype, value._version) if is_kept else None
        if key is not None and self._last_terms is not None and self._last_terms[0] == key:
            return self._last_terms[2]
        terms = None
        if not has_missing(value):
            weight, precision = self.weight.double(), self._precision()
            centred = value.double() - self.bias.double()
            scaled = centred * precision
            pairwise = -0.5 * weight.mT @ (precision.unsqueeze(-1) * weight)
            terms = product(weight.mT, scaled), pairwise, self._log_normalizers().sum(-1) - 0.5 * (scaled * centred).sum(-1)
        if key is not None:
            self._last_terms = key, value, terms
        return terms

    def _mean(self, states: Tensor) -> Tensor:
        return product(self.weight, states.to(self.weight.dtype)) + self.bias

    def _log_prob(self, states: Tensor, value: Tensor) -> Tensor:
        # First what is large, and of nearly equal size.
        residual = torch.where(value.isnan(), 0.0, (value - self.bias) - product(self.weight, states.to(self.weight.dtype)))
        log_prob = self._log_normalizer(value) - 0.5 * (residual.double().square() * self._precision()).sum(-1)
        return log_prob.to(torch.promote_types(self.weight.dtype, value.dtype))


def error_with_bias(weight: Tensor, bias: Tensor, statistics: Statistics) -> Tensor:
    """Returns expected squared errors ``(D,)`` of a dictionary and an offset."""
    weight, bias, pairs = weight.double(), bias.double(), statistics["pairs"]
    cross = statistics["cross"] - bias.unsqueeze(-1) * statistics["trials"]
    squares = statistics["squares"] - bias * (2 * statistics["sums"] - bias * statistics["observed"])
    products = weight @ pairs if pairs.dim() == 2 else (pairs @ weight.unsqueeze(-1)).squeeze(-1)
    return squares + (weight * (products - 2 * cross)).sum(-1)


def _binary_moments(population: Population, temperature: float, is_observed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns first moments ``(N, H)`` and second ones, ``(H, H)`` or ``(D, H, H)``."""
    # Their sums are one in float64: about the means, latents that vary together would have negative second moments.
    weights, num_latents = population.weights(temperature, torch.float64), population.space.num_latents
    if is_observed is None:
        return ops.moments(population.words, weights, num_latents)
    first, second = [], is_observed.new_zeros(is_observed.shape[1], num_latents**2)
    size = rows_per_block(16 * num_latents**2)
    for block_words, block_weights, mask in zip(population.words.split(size), weights.split(size), is_observed.split(size), strict=True):
        active, pairs = ops.moments(block_words, block_weights, num_latents, per_datum=True)
        first.append(active)
        second.addmm_(mask.mT, pairs.flatten(1))
    return torch.cat(first), second.unflatten(1, (num_latents, num_latents))


def _moments(population: Population, temperature: float, is_observed: Tensor | None, levels: Tensor | None) -> tuple[Tensor, Tensor]:
    """The same for latents of several values."""
    shape = (population.space.num_latents,) * 2
    pairs = torch.zeros(
        shape if is_observed is None else (is_observed.shape[1], *shape), dtype=torch.float64, device=population.words.device
    )
    first = []
    size = rows_per_block(64 * population.num_states * shape[0])
    for start, block in zip(range(0, max(1, len(population)), size), population.split(size), strict=True):
        states = block.states(torch.int64)
        coefficients = states.double() if levels is None else levels.double()[states]
        weighted = block.weights(temperature, torch.float64).unsqueeze(-1) * coefficients
        first.append(weighted.sum(1))
        if is_observed is None:
            pairs += weighted.flatten(0, 1).mT @ coefficients.flatten(0, 1)
        else:
            mask = is_observed[start : start + size]
            pairs += (mask.mT @ (weighted.mT @ coefficients).flatten(1)).unflatten(1, shape)
    return torch.cat(first), pairs
