"""Binary sparse coding: a linear superposition of binary causes with Gaussian noise."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Population
from pyro_truncated.distributions import LinearSuperposition
from pyro_truncated.extend import generator_device, names_arguments, some_rows, takes_arrays
from pyro_truncated.models.data_model import check_data, first_prior
from pyro_truncated.models.dictionary import LinearDictionary, shared_part
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
        """Reduces elements to the part that data points share."""
        part: Tensor = shared_part(weight, rows, float(first_prior(self.num_latents, is_shared=True)))
        return weight * part

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
        # Elements that are on less often than this part of what they are on average are hardly
        # used.
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
