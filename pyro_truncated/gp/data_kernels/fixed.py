"""Kernels without parameters but a variance, whose columns are computed once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels.protocol import DataKernel, positive_parameter
from pyro_truncated.utils.arguments import check_kinds, names_arguments
from pyro_truncated.utils.arrays import takes_arrays


class FixedKernel(DataKernel):
    r"""A learned variance :math:`v` times a kernel without parameters.

    Its columns are computed once and cached.

    Args:
        num_data: number of training inputs.
        variance: :math:`v` to start from.
        dtype: type of the covariances.
        cache_bytes: memory for columns. When it is full, those unused for longest make room.
        device: where the covariances live.
    """

    def __init__(
        self,
        num_data: int,
        variance: float = 1.0,
        dtype: torch.dtype = torch.float64,
        cache_bytes: int = 2**30,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(num_data)
        self.variance: Tensor = positive_parameter(variance, torch.zeros((), dtype=dtype, device=device))
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

    def base_among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other at variance one."""
        raise NotImplementedError

    def diag(self, rows: Tensor | None = None) -> Tensor:
        """Variances of the training inputs, ``(n,)``, or only those at ``rows``."""
        base = self._numbers(self.base_diag())
        return self.variance * (base if rows is None else base[rows])

    def columns(self, index: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns covariances ``(n, b)`` with training inputs at positions ``index`` ``(b,)``.

        They are those of all training inputs, or those at ``rows``.
        """
        base = self._kept_columns(index)
        return self.variance * (base if rows is None else base[rows])

    @takes_arrays
    def cross(self, new: Any, index: Tensor) -> Tensor:
        """Covariances ``(n_new, b)`` of new inputs with the training inputs at positions ``index``."""
        return self.variance * self._numbers(self.base_cross(new, index))

    @takes_arrays
    def diag_new(self, new: Any) -> Tensor:
        """Variances ``(n_new,)`` of new inputs."""
        return self.variance * self._numbers(self.base_diag_new(new))

    @takes_arrays
    def among(self, new: Any) -> Tensor:
        """Covariances ``(n_new, n_new)`` of new inputs with each other."""
        return self.variance * self._numbers(self.base_among(new))

    def _numbers(self, values: Tensor) -> Tensor:
        return values.to(self.variance)

    @torch.no_grad()
    def _kept_columns(self, index: Tensor) -> Tensor:
        index = index.to(self.variance.device)
        if len(index) > self._capacity:
            return self._numbers(self.base_columns(index))
        if self._store is None or self._store.device != self.variance.device or self._store.dtype != self.variance.dtype:
            self._store = self.variance.detach().new_zeros(0, self.num_data)
            self._slot = torch.full((self.num_data,), -1, dtype=torch.int64, device=self.variance.device)
            self._owner = self._slot[:0].clone()
            self._used = self._slot[:0].clone()
        self._clock += 1
        slots = self._slot[index]
        self._used[slots[slots >= 0]] = self._clock
        missing = index[self._slot[index] < 0].unique()
        if len(missing):
            slots = self._make_room(len(missing))
            self._slot[missing], self._owner[slots], self._used[slots] = slots, missing, self._clock
            self._store[slots] = self._numbers(self.base_columns(missing)).mT
        return self._store[self._slot[index]].mT

    def _make_room(self, needed: int) -> Tensor:
        """Returns slots for new columns.

        They are free while the store may grow, else the least recently used ones.
        """
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


class FunctionKernel(FixedKernel):
    """A Python function ``k(x, z)`` of two objects of any type.

    Each column is computed once and cached.

    Example:
        >>> def common(a, b):
        ...     return len(a & b) / len(a | b)
        >>> kernel = FunctionKernel(common, [{1, 2}, {2, 3}, {4}])
        >>> kernel.columns(torch.tensor([0])).flatten()
        tensor([1.0000, 0.3333, 0.0000], dtype=torch.float64, grad_fn=<...>)

    Args:
        function: returns a number for two objects, or with ``batched`` a matrix ``(a, b)`` for two lists of objects.
        objects: the training inputs; new inputs are given as a sequence as well.
        batched: what the function takes.
        variance: a variance to start from, which multiplies the function.

    Raises:
        TypeError: if an argument is not of its kind, new inputs are no sequence, or the function has no number for two objects.
        ValueError: if with ``batched`` the matrix is of another shape.
    """

    @names_arguments
    def __init__(
        self, function: Callable[[Any, Any], Any], objects: Sequence[Any], *, batched: bool = False, variance: float = 1.0
    ) -> None:
        if not callable(function):
            raise TypeError(f"function must be callable; got {type(function).__name__}")
        check_kinds(FunctionKernel.__init__, objects=objects, batched=batched)
        super().__init__(len(objects), variance)
        self.function = function
        self.objects = objects
        self.batched = batched

    def base_columns(self, index: Tensor) -> Tensor:
        """Values ``(n, b)`` of the function."""
        return self.base_cross(self.objects, index)

    def base_cross(self, new: Any, index: Tensor) -> Tensor:
        """Values ``(n_new, b)`` of the function for new objects."""
        return self._values(new, [self.objects[i] for i in index.tolist()])

    def base_among(self, new: Any) -> Tensor:
        """Values ``(n_new, n_new)`` of the function for new objects."""
        return self._values(new, new)

    def _values(self, new: Sequence[Any], others: Sequence[Any]) -> Tensor:
        check_kinds(FunctionKernel._values, new=new)
        if self.batched:
            found = torch.as_tensor(self.function(list(new), list(others)), dtype=torch.float64)
            if found.shape != (len(new), len(others)):
                raise ValueError(f"function must return a matrix of shape {(len(new), len(others))}; got {tuple(found.shape)}")
            return found
        rows = [[_number(self.function, x, z) for z in others] for x in new]
        return torch.tensor(rows, dtype=torch.float64).reshape(len(new), len(others))

    def base_diag(self) -> Tensor:
        """Values ``(n,)`` of the function for equal objects."""
        if not hasattr(self, "_diagonal"):
            self._diagonal = self.base_diag_new(self.objects)
        return self._diagonal

    def base_diag_new(self, new: Any) -> Tensor:
        """Values ``(n_new,)`` of the function for equal new objects."""
        check_kinds(FunctionKernel._values, new=new)
        if self.batched:
            return torch.tensor([float(torch.as_tensor(self.function([x], [x])).reshape(())) for x in new], dtype=torch.float64)
        return torch.tensor([_number(self.function, x, x) for x in new], dtype=torch.float64)


def _number(function: Callable[[Any, Any], Any], first: Any, second: Any) -> float:
    """What a function returns for two objects."""
    try:
        value = function(first, second)
    except Exception as error:
        kinds = f"{type(first).__name__} and {type(second).__name__}"
        raise TypeError(f"function fails on two objects, {kinds}: {type(error).__name__}: {error}") from error
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"function must return a number for two objects; got {type(value).__name__}: {error}") from error
