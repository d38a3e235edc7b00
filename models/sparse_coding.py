"""Binary and discrete sparse coding: linear superpositions with Gaussian noise."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, ClosedForm, Population
from pyro_truncated.distributions import LinearSuperposition, categorical, or_missing
from pyro_truncated.extend import check_counts, generator_device, names_arguments, selected_rows, some_rows, takes_arrays
from pyro_truncated.models.data_model import FLOOR, cast_like, check_data, count_data, first_prior
from pyro_truncated.models.dictionary import LinearDictionary, best_scale, shared_part
from pyro_truncated.models.superposed_causes import SparseCoding
from pyro_truncated.search import CombinedFlips


class BinarySparseCoding(LinearDictionary, SparseCoding):
    r"""Binary sparse coding, :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`y \sim \mathcal N(W s + b, \sigma^2 I)`.

    Entries of the data that are NaN are missing. Elements start from the part of a random data point that others share with it, see
    :func:`.shared_part`.

    Example:
        >>> bars = linear_bars(200, 4, mean_active=2.0)
        >>> model = BinarySparseCoding(16, 8).initialize(bars.data)
        >>> guide = AutoTruncated(model, num_states=64)
        >>> svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(bars.data) for _ in range(10)]
        >>> model.weight.shape
        torch.Size([16, 8])

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        shared_prior: whether all latents share one :math:`\pi`.
        offset: whether an offset :math:`b` is learned, as the literature's models have none. Without it the data's background must be zero.
        ridge: strength of a prior of the dictionary, see :class:`.LinearDictionary`. With one the free energy may fall.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: activation probability :math:`\pi`, a scalar or ``(H,)``.
        bias: offset :math:`b`, ``(D,)``, or ``None``.
        center: where moments are taken, ``(D,)``, see :class:`.LinearDictionary`.

    Reference:
        Henniges, Puertas, Bornschein, Eggert and Lücke, "Binary Sparse Coding", LVA/ICA 2010.
    """

    superposition = LinearSuperposition

    weight: Tensor

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        *,
        shared_prior: bool = True,
        offset: bool = True,
        ridge: float = 0.0,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, dtype=dtype)
        self._make_offset(offset, dtype)
        self._set_ridge(ridge)

    def _likelihood_parameters(self) -> tuple[Tensor | None, ...]:
        return self.scale, self.bias

    def _first_dictionary(self, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Returns what random data points share with others, and noise deviations."""
        weight, deviation = super()._first_dictionary(y, generator)
        above = y if self.bias is None else y - self.bias
        return self._keep_shared_part(weight, above), deviation

    def _keep_shared_part(self, weight: Tensor, rows: Tensor) -> Tensor:
        return weight * shared_part(weight, rows, float(first_prior(self.num_latents, is_shared=True)))

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        """Those of :meth:`.LinearSuperposition.statistics`, with an offset above the ``center``."""
        population, y = self._above_center(population, y)
        return LinearSuperposition.statistics(population, y, temperature)

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def restart_unused(self, y: Tensor, generator: torch.Generator | None = None) -> int:
        r"""Replaces elements that are hardly ever active by badly explained data.

        Elements below a fiftieth of the mean frequency in the last M-step of :class:`~pyro_truncated.ClosedForm` are unused. They become
        residuals of data points, as far as others share them. These are drawn in proportion to :math:`|y_n - W \langle s \rangle - b|^2`,
        from a thousand.

        Example:
            >>> y = linear_bars(200, 4, mean_active=2.0).data
            >>> model = BinarySparseCoding(16, 8).initialize(y)
            >>> svi = SVI(model, AutoTruncated(model, num_states=64), ClosedForm(model), Truncated_ELBO())
            >>> losses = [svi.step(y) for _ in range(10)]
            >>> model.restart_unused(y) <= 8
            True

        Args:
            y: data ``(N, D)``.
            generator: source of randomness.

        Returns:
            How many elements have another start; none before the first M-step.
        """
        driver = ClosedForm.find(self)
        if driver is None or driver.statistics is None:
            return 0
        often = driver.statistics["states"]
        # Data points that new elements are drawn from, at most.
        rows = some_rows(check_data(y, self.num_observed), 1000, generator).to(self.weight)
        unused = (often < 0.02 * often.mean()).nonzero().squeeze(1)[: len(rows)]
        if len(unused):
            guide = AutoTruncated(self, num_states=16).infer(rows, CombinedFlips(), steps=5)
            residual = (rows - self.reconstruct(guide.population(), rows)).nan_to_num()
            power = residual.double().square().sum(1).to(generator_device(generator))
            index = torch.multinomial(power + power.mean() * torch.finfo(power.dtype).eps, len(unused), generator=generator)
            self.weight = self.weight.index_copy(1, unused, self._keep_shared_part(residual[index.to(residual.device)].mT, residual))
        return len(unused)

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        Let :math:`A_d = \sum_n \langle s s^\top \rangle` over the data points with :math:`y_{nd}` observed and :math:`c_d = \sum_n y_{nd}
        \langle s \rangle`. Then :math:`W_d = A_d^{-1} c_d`, with an offset see :func:`.best_dictionary_and_offset`. The variance
        :math:`\sigma^2` is the mean expected squared residual of the observed entries, and :math:`\pi = \frac1N \sum_n \langle s \rangle`,
        averaged over the latents if shared. Elements of latents that are never active stay as they are.
        """
        weight, errors = self._best_dictionary(statistics)
        self._set_dictionary(weight, statistics, errors)


class DiscreteSparseCoding(LinearDictionary):
    r"""Sparse coding with discrete coefficients, :math:`P(s_h = k) = \pi_k`, :math:`y \sim \mathcal N(W \phi_s + b, \sigma^2 I)`.

    The site ``s`` holds the *numbers* of the values :math:`\phi_0 = 0, \phi_1, \dots`, so that zero means "off" as everywhere. The default
    is ternary sparse coding, with the values -1, 0 and 1. Entries of the data that are NaN are missing. If the values lie symmetrically
    around zero, the sign of an element is not determined.

    Example:
        >>> y = linear_bars(50, 3, mean_active=2.0).data
        >>> model = DiscreteSparseCoding(9, 4).initialize(y)  # coefficients -1, 0 and 1
        >>> svi = SVI(model, AutoTruncated(model, num_states=27), ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(3)]

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        values: the values of a coefficient, distinct, with zero among them.
        shared_prior: whether all latents share one :math:`\pi`.
        tied_signs: whether values of equal magnitude have equal probabilities.
        offset: whether an offset :math:`b` is learned, as the literature's models have none. Without it the data's background must be zero.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: probabilities :math:`\pi` of the values, ``(K,)`` or ``(H, K)``.
        values: the values :math:`\phi`, zero first and the others in ascending order, ``(K,)``.
        bias: offset :math:`b`, ``(D,)``, or ``None``.
        center: where moments are taken, ``(D,)``, see :class:`.LinearDictionary`.

    Raises:
        ValueError: if values repeat or zero is not among them.

    Reference:
        Exarchakis and Lücke, "Discrete Sparse Coding", Neural Computation 2017.
    """

    data_support = or_missing(constraints.real)

    weight: Tensor
    scale: Tensor
    prior: Tensor
    values: Tensor

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        values: Sequence[float] = (-1.0, 0.0, 1.0),
        *,
        shared_prior: bool = True,
        tied_signs: bool = False,
        offset: bool = True,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(num_observed=num_observed, num_latents=num_latents)
        numbers = [float(value) for value in values]
        if len(numbers) < 2 or len(set(numbers)) < len(numbers) or 0.0 not in numbers:
            raise ValueError(f"values must be at least two distinct numbers, with zero among them; got {tuple(values)}")
        self.num_observed, self.num_latents, self.num_values = num_observed, num_latents, len(numbers)
        self.shared_prior, self.tied_signs = shared_prior, tied_signs
        ordered = [0.0, *sorted(number for number in numbers if number)]
        self.register_buffer("values", torch.tensor(ordered, dtype=dtype))
        self.weight = PyroParam(torch.randn(num_observed, num_latents, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.scale = PyroParam(torch.ones((), dtype=dtype), constraints.positive)  # type: ignore[assignment]
        self.prior = PyroParam(self._first_prior(), constraints.simplex)  # type: ignore[assignment]
        self._make_offset(offset, dtype)

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        weight, scale, prior, bias = self.weight, self.scale, self.prior, self.bias
        size = count_data(y, num_data)
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            states = pyro.sample("s", categorical(prior).expand([self.num_latents]).to_event(1))
            coefficients = self.values[states.long()]
            return pyro.sample("y", LinearSuperposition(coefficients, weight, scale, bias), obs=selected_rows(y, index))

    def _start(self, y: Tensor, generator: torch.Generator | None) -> None:
        weight, deviation = self._first_dictionary(y, generator)
        self.weight = weight.to(self.weight).contiguous()
        self.scale = deviation.to(self.scale)
        self.prior = self._first_prior().to(self.prior)

    def _statistics(self, population: Population, y: Tensor, temperature: float) -> dict[str, Tensor]:
        r"""``counts``, :math:`\sum_n q_n(s_h = k)`, ``(H, K)``, and those of :meth:`.LinearSuperposition.statistics`.

        Coefficients are :math:`x = \phi_s`. With an offset, the data are taken above the ``center``.
        """
        population, y = self._above_center(population, y)
        statistics = LinearSuperposition.statistics(population, y, temperature, levels=self.values)
        return {"counts": population.value_probabilities(temperature).double().sum(0), **statistics}

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        Let :math:`x = \phi_s`, :math:`A_d = \sum_n \langle x x^\top \rangle` over the data points with :math:`y_{nd}` observed and
        :math:`c_d = \sum_n y_{nd} \langle x \rangle`. Then :math:`W_d = A_d^{-1} c_d`, with an offset see
        :func:`.best_dictionary_and_offset`. The noise :math:`\sigma^2` is the mean expected squared residual of the observed entries. The
        prior :math:`\pi_k` is the mean of :math:`q_n(s_h = k)` over the data points, and over latents and magnitudes that share it.
        Elements of latents that are never active stay as they are.
        """
        weight, errors = self._best_dictionary(statistics)
        self.weight = weight.to(self.weight)
        self.scale = best_scale(errors.sum(), self._power(statistics), statistics["observed"].sum()).to(self.scale)
        counts = statistics["counts"].sum(0) if self.shared_prior else statistics["counts"]
        if self.tied_signs:
            is_tied = (self.values.abs() == self.values.abs().unsqueeze(-1)).double()
            counts = counts @ (is_tied / is_tied.sum(0))
        # At zero a value could never come back.
        prior = (counts / counts.sum(-1, keepdim=True)).clamp(min=FLOOR)
        self.prior = (prior / prior.sum(-1, keepdim=True)).to(self.prior)

    @torch.no_grad()
    def with_latents(self, index: Tensor) -> Self:
        """Returns a model whose latent ``i`` copies latent ``index[i]``."""
        other = copy.deepcopy(self)
        other.weight = self.weight[:, index].contiguous()
        other.num_latents = len(index)
        if not self.shared_prior:
            other.prior = self.prior[index]
            return other
        active = ((1 - self.prior[0]) * self.num_latents / len(index)).clamp(max=0.5)
        other.prior = torch.cat([1 - active.reshape(1), self.prior[1:] * active / (1 - self.prior[0])])
        return other

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor) -> Tensor:
        r"""Returns the posterior mean :math:`W \langle \phi_s \rangle + b` of noise-free data.

        Args:
            population: truncated posteriors, of data points that have been scored; its ``indices`` select these among ``y``.
            y: all data, ``(N, D)``; missing entries (NaN) are filled in.
        """
        y = population.select_rows(check_data(y, self.num_observed))
        coefficients = population.value_probabilities().double() @ self.values.double()
        mean = coefficients @ self.weight.double().mT
        return cast_like(mean if self.bias is None else mean + self.bias.double(), y)

    def _first_prior(self) -> Tensor:
        """Two active latents on average, all their values alike; ``(K,)`` or ``(H, K)``."""
        active = min(0.5, 2 / self.num_latents)
        prior = torch.full_like(self.values, active / (self.num_values - 1))
        prior[0] = 1 - active
        return prior if self.shared_prior else prior.repeat(self.num_latents, 1)
