"""Binary sparse coding: a linear superposition of binary causes with Gaussian noise."""

from __future__ import annotations

import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributions import LinearSuperposition
from pyro_truncated.models.binary_causes import check_data, rows_of
from pyro_truncated.models.dictionary import best_dictionary, squared_residuals
from pyro_truncated.models.sparse_coding import SparseCoding
from pyro_truncated.states import Population
from pyro_truncated.utils.arrays import takes_arrays


class BinarySparseCoding(SparseCoding):
    r"""Binary sparse coding, :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, :math:`y \sim \mathcal N(W s, \sigma^2 I)`.

    Entries of the data that are NaN are missing: likelihood and M-step are those of the observed entries.

    Args:
        num_observed: number of observed dimensions ``D``.
        num_latents: number of latents ``H``.
        shared_prior: whether all latents share one :math:`\pi`.
        dtype: floating point type of the parameters; default: torch's.

    Attributes:
        weight: dictionary :math:`W`, ``(D, H)``.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: probability :math:`\pi` that a latent is active, a scalar or ``(H,)``.

    Reference:
        Henniges, Puertas, Bornschein, Eggert and Lücke, "Binary Sparse Coding", LVA/ICA 2010.
    """

    superposition = LinearSuperposition

    def __init__(self, num_observed: int, num_latents: int, *, shared_prior: bool = True, dtype: torch.dtype | None = None) -> None:
        super().__init__(num_observed, num_latents, shared_prior=shared_prior, dtype=dtype)

    @torch.no_grad()
    @takes_arrays
    def sufficient_statistics(
        self, population: Population, y: Tensor, batch_size: int | None = None, num_data: int | None = None, *, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        r"""Sums over the population's data points that :meth:`maximize` needs, see :class:`~pyro_truncated.em.closed_form.ClosedFormModel`.

        Returns:
            ``num_data``; ``states``, the sum of :math:`\langle s \rangle`, ``(H,)``; ``pairs``, that of :math:`\langle s s^\top \rangle`,
            ``(H, H)``, or ``(D, H, H)`` over the data points with dimension ``d`` observed if entries of these are missing;
            ``cross``, :math:`\sum_n y_n \langle s \rangle^\top`, ``(D, H)``; ``squares``, the sum of the squared entries; ``observed``,
            the number of entries. All can be added and scaled; pairs of the two shapes add up by broadcasting.
        """
        rows = rows_of(check_data(y, self.num_observed), population).double()
        weights = population.weights(temperature)
        is_missing = rows.isnan()
        observed = (~is_missing).double()
        rows = rows.masked_fill(is_missing, 0.0)
        if bool(is_missing.any()):
            active, pairs = _moments_per_dimension(population.words, weights, observed, self.num_latents)
        else:
            active, pairs = ops.moments(population.words, weights, self.num_latents)
        return {
            "num_data": rows.new_tensor(len(rows)),
            "states": active.sum(0),
            "pairs": pairs,
            "cross": rows.mT @ active,
            "squares": rows.square().sum(),
            "observed": observed.sum(),
        }

    @torch.no_grad()
    def maximize(self, statistics: dict[str, Tensor]) -> None:
        r"""Sets the parameters to the maximiser of the expected log joint.

        With :math:`A_d = \sum_n \langle s s^\top \rangle` over the data points with :math:`y_{nd}` observed and
        :math:`c_d = \sum_n y_{nd} \langle s \rangle`: :math:`W_d = A_d^{-1} c_d`, :math:`\sigma^2` is the mean expected squared residual of
        the observed entries, and :math:`\pi = \frac1N \sum_n \langle s \rangle`, averaged over the latents if shared. A tiny ridge pulls
        the dictionary towards its old value, so the elements of latents that are never active stay as they are.
        """
        pairs, cross, squares = statistics["pairs"], statistics["cross"], statistics["squares"]
        weight = best_dictionary(self.weight.double(), pairs, cross)
        self._set_dictionary(weight, squared_residuals(weight, pairs, cross, squares), statistics)


def _moments_per_dimension(words: Tensor, weights: Tensor, observed: Tensor, num_latents: int) -> tuple[Tensor, Tensor]:
    """First moments ``(N, H)``, and second moments ``(D, H, H)`` over the data points that have dimension ``d``."""
    first, second = [], observed.new_zeros(observed.shape[1], num_latents**2)
    size = max(1, 2**27 // (8 * num_latents**2))
    for block_words, block_weights, block_observed in zip(words.split(size), weights.split(size), observed.split(size), strict=True):
        active, pairs = ops.moments(block_words, block_weights, num_latents, per_datum=True)
        first.append(active)
        second.addmm_(block_observed.mT, pairs.flatten(1))
    return torch.cat(first), second.unflatten(1, (num_latents, num_latents))
