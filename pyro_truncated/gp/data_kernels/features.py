"""Kernels without a derivative in the input: Tanimoto, MinMax and other products of counts, histogram intersection, plain callables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels.hashed_counts import HashedCounts
from pyro_truncated.gp.data_kernels.protocol import DataKernel, positive_parameter

_CHUNK = 2**24


class FixedKernel(DataKernel):
    r"""A variance :math:`v`, which is learned, times a kernel without parameters, whose columns are computed once and then kept.

    Args:
        num_data: number of training inputs.
        variance: :math:`v` to start from.
        dtype: floating point type of the covariances.
        cache_bytes: memory for columns; when it is full, those unused for longest make room.
    """

    def __init__(self, num_data: int, variance: float = 1.0, dtype: torch.dtype = torch.float64, cache_bytes: int = 2**30) -> None:
        super().__init__(num_data)
        self.variance: Tensor = positive_parameter(variance, torch.zeros((), dtype=dtype))
        self._capacity = max(1, min(num_data, cache_bytes // (num_data * torch.finfo(dtype).bits // 8)))
        self._clock = 0
        self._store: Tensor | None = None

    def base_columns(self, index: Tensor) -> Tensor:
        """Covariances ``(n, b)`` at variance one."""
        raise NotImplementedError

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs at variance one."""
        raise NotImplementedError

    def base_diag(self) -> Tensor:
        """Variances ``(n,)`` at variance one."""
        raise NotImplementedError

    def base_diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs at variance one."""
        raise NotImplementedError

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        base = self._numbers(self.base_diag())
        return self.variance * (base if rows is None else base[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, b)`` of the training inputs, or those at ``rows``, with the ones at positions ``index`` ``(b,)``."""
        base = self._kept_columns(index)
        return self.variance * (base if rows is None else base[rows])

    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self.variance * self._numbers(self.base_cross(new, index))

    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.variance * self._numbers(self.base_diag_new(new))

    def _numbers(self, values: Tensor) -> Tensor:
        return values.to(self.variance)

    @torch.no_grad()
    def _kept_columns(self, index: Tensor) -> Tensor:
        if len(index) > self._capacity:
            return self._numbers(self.base_columns(index))
        if self._store is None or self._store.device != self.variance.device or self._store.dtype != self.variance.dtype:
            self._store = self.variance.detach().new_zeros(0, self.num_data)
            self._slot = torch.full((self.num_data,), -1, dtype=torch.int64, device=self.variance.device)
            self._owner = self._slot[:0].clone()
            self._used = self._slot[:0].clone()
        self._clock += 1
        self._touch(index)
        missing = index[self._slot[index] < 0].unique()
        if len(missing):
            slots = self._make_room(len(missing))
            self._slot[missing], self._owner[slots], self._used[slots] = slots, missing, self._clock
            self._store[slots] = self._numbers(self.base_columns(missing)).mT
        return self._store[self._slot[index]].mT

    def _touch(self, index: Tensor) -> None:
        slots = self._slot[index]
        self._used[slots[slots >= 0]] = self._clock

    def _make_room(self, needed: int) -> Tensor:
        """Slots for new columns: free ones while the store may grow, else those unused for longest."""
        if self._store is None:
            raise RuntimeError("columns are looked up before they are stored")
        size = len(self._store)
        free = (self._owner < 0).nonzero().squeeze(1)[:needed]
        if len(free) < needed and size < self._capacity:
            grown = min(self._capacity, max(2 * size, size + needed))
            self._store = torch.cat([self._store, self._store.new_zeros(grown - size, self.num_data)])
            self._owner = torch.cat([self._owner, self._owner.new_full((grown - size,), -1)])
            self._used = torch.cat([self._used, self._used.new_zeros(grown - size)])
            free = (self._owner < 0).nonzero().squeeze(1)[:needed]
        if len(free) < needed:
            age = self._used.clone()
            age[free] = self._clock
            oldest = age.argsort()[: needed - len(free)]
            self._slot[self._owner[oldest]] = -1
            free = torch.cat([free, oldest])
        return free


class CountKernel(FixedKernel):
    r"""Inner products of counts, :math:`s_{ij} = \sum_f c_{if} c_{jf}`, as they are or normalised.

    ===============  ==================================================
    ``"inner"``      :math:`s_{ij}` over the mean of all :math:`s_{ii}`
    ``"cosine"``     :math:`s_{ij} / \sqrt{s_{ii} s_{jj}}`
    ``"tanimoto"``   :math:`s_{ij} / (s_{ii} + s_{jj} - s_{ij})`
    ===============  ==================================================

    Two objects without any feature count as equal.

    Args:
        features: counts of the training inputs; new inputs are given as counts made the same way.
        normalization: one of the names above.
        variance: :math:`v` to start from.
        dtype: floating point type of the covariances.
    """

    _vocabulary: Tensor
    _norms: Tensor
    _matrix: Tensor
    _start: Tensor
    _scale: Tensor

    def __init__(
        self, features: HashedCounts, normalization: str = "tanimoto", variance: float = 1.0, dtype: torch.dtype = torch.float64
    ) -> None:
        super().__init__(len(features), variance, dtype)
        if normalization not in ("inner", "cosine", "tanimoto"):
            raise ValueError(f'normalization must be "inner", "cosine" or "tanimoto"; got {normalization!r}')
        self.normalization = normalization
        features = self.prepare(features)
        vocabulary, norms = features.keys.unique(), features.squared_norms
        start = torch.searchsorted(features.rows, torch.arange(len(features) + 1, device=features.rows.device))
        parts = {"_vocabulary": vocabulary, "_norms": norms, "_matrix": features.matrix(vocabulary), "_start": start}
        for name, tensor in {**parts, "_scale": norms.mean().clamp(min=1e-30)}.items():
            self.register_buffer(name, tensor, persistent=False)

    def prepare(self, features: HashedCounts) -> HashedCounts:
        """What is multiplied: the counts themselves."""
        if not isinstance(features, HashedCounts):
            raise TypeError(f"features must be HashedCounts, of new inputs as of training inputs; got {type(features).__name__}")
        return features

    def base_columns(self, index: Tensor) -> Tensor:
        """Normalised products ``(n, b)``."""
        return self._normalised(self._matrix, self._norms, index)

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Normalised products ``(n_new, b)`` of new counts."""
        prepared = self.prepare(new)
        return self._normalised(prepared.matrix(self._vocabulary), prepared.squared_norms, index)

    def base_diag(self) -> Tensor:
        """Variances ``(n,)``."""
        return self._own(self._norms)

    def base_diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new counts."""
        return self._own(self.prepare(new).squared_norms)

    def _own(self, norms: Tensor) -> Tensor:
        return norms / self._scale if self.normalization == "inner" else torch.ones_like(norms)

    def _normalised(self, matrix: Tensor, norms: Tensor, index: Tensor) -> Tensor:
        step = max(1, _CHUNK // max(1, len(self._vocabulary)))
        products = torch.cat([torch.sparse.mm(matrix, self._dense(part).mT) for part in index.split(step)], 1)
        left, right = norms[:, None], self._norms[index]
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

    Args:
        features: counts of the training inputs.
        variance: :math:`v` to start from.
        dtype: floating point type of the covariances.
    """

    def __init__(self, features: HashedCounts, variance: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(features, "tanimoto", variance, dtype)

    def prepare(self, features: HashedCounts) -> HashedCounts:
        """Counts in unary, whose inner products are sums of minima."""
        return super().prepare(features).unary()


class HistogramIntersectionKernel(FixedKernel):
    r""":math:`v \sum_d \min(h_{id}, h_{jd})` of histograms, over the mean of their masses :math:`\sum_d h_{id}`.

    Args:
        histograms: ``(n, D)``, not negative.
        variance: :math:`v` to start from.
    """

    histograms: Tensor

    def __init__(self, histograms: Tensor, variance: float = 1.0) -> None:
        if histograms.dim() != 2 or not bool((histograms >= 0).all()) or not bool(histograms.isfinite().all()):
            raise ValueError(f"histograms must be finite, not negative, and of shape (n, D); got shape {tuple(histograms.shape)}")
        super().__init__(len(histograms), variance, histograms.dtype)
        mass = histograms.sum(1).mean()
        self._mass = mass if bool(mass > 0) else torch.ones_like(mass)
        self.register_buffer("histograms", histograms / self._mass, persistent=False)

    def base_columns(self, index: Tensor) -> Tensor:
        """Intersections ``(n, b)``."""
        return _intersections(self.histograms, self.histograms[index])

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Intersections ``(n_new, b)`` of new histograms ``(n_new, D)``."""
        return _intersections((new / self._mass).to(self.histograms), self.histograms[index])

    def base_diag(self) -> Tensor:
        """Variances ``(n,)``."""
        return self.histograms.sum(1)

    def base_diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new histograms."""
        found: Tensor = (new / self._mass).sum(1)
        return found


class FunctionKernel(FixedKernel):
    """A Python function ``k(x, z)`` of two objects of any type; each column is computed once and kept.

    Args:
        function: returns a number for two objects, or with ``batched`` a matrix ``(a, b)`` for two lists of objects.
        objects: the training inputs; new inputs are given as a sequence as well.
        batched: what the function takes.
        variance: a variance to start from, which multiplies the function.
    """

    def __init__(
        self, function: Callable[[Any, Any], Any], objects: Sequence[Any], *, batched: bool = False, variance: float = 1.0
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable; got {type(function).__name__}")
        super().__init__(len(objects), variance)
        self.function = function
        self.objects = objects
        self.batched = batched

    def base_columns(self, index: Tensor) -> Tensor:
        """Values ``(n, b)`` of the function."""
        return self.base_cross(self.objects, index)

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Values ``(n_new, b)`` of the function for new objects."""
        chosen = [self.objects[i] for i in index.tolist()]
        if self.batched:
            return torch.as_tensor(self.function(list(new), chosen), dtype=torch.float64)
        return torch.tensor([[float(self.function(x, z)) for z in chosen] for x in new], dtype=torch.float64).reshape(len(new), len(chosen))

    def base_diag(self) -> Tensor:
        """Values ``(n,)`` of the function for equal objects."""
        if not hasattr(self, "_diagonal"):
            self._diagonal = self.base_diag_new(self.objects)
        return self._diagonal

    def base_diag_new(self, new: Any) -> Tensor:
        """Values ``(n_new,)`` of the function for equal new objects."""
        if self.batched:
            return torch.tensor([float(torch.as_tensor(self.function([x], [x])).reshape(())) for x in new], dtype=torch.float64)
        return torch.tensor([float(self.function(x, x)) for x in new], dtype=torch.float64)


def _intersections(first: Tensor, second: Tensor) -> Tensor:
    """Sums of minima ``(a, b)`` of histograms ``(a, D)`` and ``(b, D)``."""
    step = max(1, _CHUNK // max(1, first.numel()))
    return torch.cat([torch.minimum(first[:, None], part).sum(-1) for part in second.split(step)], 1)
