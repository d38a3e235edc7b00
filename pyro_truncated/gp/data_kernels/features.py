"""Kernels without a derivative in the input.

They are Tanimoto, MinMax and other products of counts, and histogram intersection.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels.fixed import FixedKernel
from pyro_truncated.gp.data_kernels.hashed_counts import HashedCounts
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.budget import rows_per_block


class CountKernel(FixedKernel):
    r"""Inner products of counts, :math:`s_{ij} = \sum_f c_{if} c_{jf}`, as they are or normalised.

    ===============  ==================================================
    ``"inner"``      :math:`s_{ij}` over the mean of all :math:`s_{ii}`
    ``"cosine"``     :math:`s_{ij} / \sqrt{s_{ii} s_{jj}}`
    ``"tanimoto"``   :math:`s_{ij} / (s_{ii} + s_{jj} - s_{ij})`
    ===============  ==================================================

    Two objects without any feature count as equal.

    Example:
        >>> kernel = CountKernel(spectrum(["CCO", "CCC", "NNN"], 1))
        >>> kernel.columns(torch.tensor([0])).flatten()  # Tanimoto: 5 common of 5, 6 of 8, none
        tensor([1.0000, 0.7500, 0.0000], dtype=torch.float64, grad_fn=<...>)

    Args:
        features: counts of the training inputs, as :class:`HashedCounts` or a matrix ``(n, F)``. New inputs are given the same way.
        normalization: one of the names above.
        variance: :math:`v` to start from.
        dtype: type of the covariances.
    """

    _vocabulary: Tensor
    _norms: Tensor
    _matrix: Tensor
    _start: Tensor
    _scale: Tensor
    _num_features: int | None = None

    @names_arguments
    def __init__(
        self,
        features: HashedCounts | Tensor,
        normalization: str = "tanimoto",
        variance: float = 1.0,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        width, features = _width(features), self.prepare(features)
        super().__init__(len(features), variance, dtype, device=features.rows.device)
        if normalization not in ("inner", "cosine", "tanimoto"):
            raise ValueError(f'normalization must be "inner", "cosine" or "tanimoto"; got {normalization!r}')
        self.normalization, self._num_features = normalization, width
        vocabulary, norms = features.keys.unique(), features.squared_norms
        if not bool(norms.sum().isfinite()):
            raise ValueError("features must be counts whose squares have a finite sum")
        start = torch.searchsorted(features.rows, torch.arange(len(features) + 1, device=features.rows.device))
        parts = {"_vocabulary": vocabulary, "_norms": norms, "_matrix": features.matrix(vocabulary), "_start": start}
        for name, tensor in {**parts, "_scale": norms.mean().clamp(min=1e-30)}.items():
            self.register_buffer(name, tensor, persistent=False)

    def prepare(self, features: HashedCounts | Tensor) -> HashedCounts:
        """What is multiplied: the counts themselves."""
        if isinstance(features, HashedCounts):
            return features
        width, expected = _width(features), self._num_features
        if width is None:
            kind = type(features).__name__
            raise TypeError(f"features must be HashedCounts or a matrix (n, F) of counts, of new inputs as of training inputs; got {kind}")
        if expected not in (None, width):
            raise ValueError(f"features must have {expected} columns, as those of the training inputs; got {width}")
        return HashedCounts.from_matrix(features)

    def base_columns(self, index: Tensor) -> Tensor:
        """Normalised products ``(n, b)``."""
        return self._normalised(self._matrix, self._norms, index)

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Normalised products ``(n_new, b)`` of new counts."""
        prepared = self._prepare(new)
        return self._normalised(prepared.matrix(self._vocabulary), prepared.squared_norms, index)

    def base_diag(self) -> Tensor:
        """Variances ``(n,)``."""
        return self._own(self._norms)

    def base_diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new counts."""
        return self._own(self._prepare(new).squared_norms)

    def base_among(self, new: Any) -> Tensor:
        """Normalised products ``(n_new, n_new)`` of new counts with each other."""
        prepared = self._prepare(new)
        # New inputs may have features that no training input has.
        vocabulary = prepared.keys.unique()
        matrix = prepared.matrix(vocabulary)
        parts = torch.arange(len(prepared), device=vocabulary.device).split(rows_per_block(16 * len(vocabulary)))
        products = torch.cat([torch.sparse.mm(matrix, matrix.index_select(0, part).to_dense().mT) for part in parts], 1)
        return self._normalise(products, prepared.squared_norms, prepared.squared_norms)

    def _prepare(self, new: Any) -> HashedCounts:
        """Counts of new inputs, where those of the training inputs are."""
        return self.prepare(new).to(self._vocabulary.device)

    def _own(self, norms: Tensor) -> Tensor:
        return norms / self._scale if self.normalization == "inner" else torch.ones_like(norms)

    def _normalised(self, matrix: Tensor, norms: Tensor, index: Tensor) -> Tensor:
        step = rows_per_block(16 * len(self._vocabulary))
        products = torch.cat([torch.sparse.mm(matrix, self._dense(part).mT) for part in index.split(step)], 1)
        return self._normalise(products, norms, self._norms[index])

    def _normalise(self, products: Tensor, first: Tensor, second: Tensor) -> Tensor:
        left, right = first[:, None], second
        if self.normalization == "inner":
            return products / self._scale
        size = (left * right).sqrt() if self.normalization == "cosine" else left + right - products
        return torch.where(left + right > 0, products / size.clamp(min=1e-30), torch.ones_like(products))

    def _dense(self, index: Tensor) -> Tensor:
        """Rows of the matrix of counts, ``(b, V)``."""
        begin, length = self._start[index], self._start[index + 1] - self._start[index]
        row = torch.repeat_interleave(torch.arange(len(index), device=index.device), length)
        entry = torch.arange(int(length.sum()), device=index.device) - (length.cumsum(0) - length)[row] + begin[row]
        found = self._norms.new_zeros(len(index), len(self._vocabulary))
        found[row, self._matrix.indices()[1, entry]] = self._matrix.values()[entry]
        return found


class MinMaxKernel(CountKernel):
    r""":math:`\sum_f \min(c_{if}, c_{jf}) / \sum_f \max(c_{if}, c_{jf})` of integer counts; of zeros and ones the same as Tanimoto.

    Example:
        >>> kernel = MinMaxKernel(spectrum(["CCO", "CCC", "NNN"], 1))
        >>> kernel.columns(torch.tensor([0])).flatten()
        tensor([1.0000, 0.5000, 0.0000], dtype=torch.float64, grad_fn=<...>)

    Args:
        features: counts of the training inputs, as those of :class:`CountKernel`.
        variance: :math:`v` to start from.
        dtype: type of the covariances.
    """

    @names_arguments
    def __init__(self, features: HashedCounts | Tensor, variance: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(features, "tanimoto", variance, dtype)

    def prepare(self, features: HashedCounts | Tensor) -> HashedCounts:
        """Counts in unary, whose inner products are sums of minima."""
        return super().prepare(features).unary()


class HistogramIntersectionKernel(FixedKernel):
    r""":math:`v \sum_d \min(h_{id}, h_{jd})` of histograms, over the mean of their masses :math:`\sum_d h_{id}`.

    Example:
        >>> kernel = HistogramIntersectionKernel(torch.tensor([[0.5, 0.5], [1.0, 0.0]]))
        >>> kernel.columns(torch.tensor([0])).flatten()
        tensor([1.0000, 0.5000], grad_fn=<...>)

    Args:
        histograms: ``(n, D)``, not negative.
        variance: :math:`v` to start from.
    """

    histograms: Tensor
    _mass: Tensor

    @names_arguments
    @takes_arrays
    def __init__(self, histograms: Tensor, variance: float = 1.0) -> None:
        if histograms.dim() != 2 or not bool((histograms >= 0).all()) or not bool(histograms.isfinite().all()):
            raise ValueError(f"histograms must be finite, not negative, and of shape (n, D); got shape {tuple(histograms.shape)}")
        histograms = histograms if histograms.is_floating_point() else histograms.double()
        super().__init__(len(histograms), variance, histograms.dtype, device=histograms.device)
        mass = histograms.sum(1).mean()
        self.register_buffer("_mass", mass if bool(mass > 0) else torch.ones_like(mass), persistent=False)
        self.register_buffer("histograms", histograms / self._mass, persistent=False)

    def base_columns(self, index: Tensor) -> Tensor:
        """Intersections ``(n, b)``."""
        return _intersections(self.histograms, self.histograms[index])

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Intersections ``(n_new, b)`` of new histograms ``(n_new, D)``."""
        return _intersections(self._scaled(new), self.histograms[index])

    def base_diag(self) -> Tensor:
        """Variances ``(n,)``."""
        return self.histograms.sum(1)

    def base_diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new histograms."""
        return self._scaled(new).sum(1)

    def base_among(self, new: Any) -> Tensor:
        """Intersections ``(n_new, n_new)`` of new histograms with each other."""
        scaled = self._scaled(new)
        return _intersections(scaled, scaled)

    def _scaled(self, new: Tensor) -> Tensor:
        return new.to(self.histograms) / self._mass


def _width(features: Any) -> int | None:
    """Columns of a matrix of counts; ``None`` of anything else."""
    shape: tuple[int, ...] = getattr(features, "shape", ())
    return int(shape[1]) if len(shape) == 2 else None


def _intersections(first: Tensor, second: Tensor) -> Tensor:
    """Sums of minima ``(a, b)`` of histograms ``(a, D)`` and ``(b, D)``."""
    step = rows_per_block(16 * first.numel())
    return torch.cat([torch.minimum(first[:, None], part).sum(-1) for part in second.split(step)], 1)
