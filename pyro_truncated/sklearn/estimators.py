"""What estimators share: checks, units, separate runs, posteriors."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_array, validate_data
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.search.base import Search, SearchBatch
from pyro_truncated.search.conditional import Moves
from pyro_truncated.search.exhaustive import ExhaustiveSearch
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.arrays import (
    OF_TIMES,
    as_data,
    as_plain_array,
    check_columns,
    column_names,
    find_package,
    holds_arrays,
)
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.parameter_store import empty_store, one_thread, spare_random_numbers


def validated_data(estimator: Any, X: Any, y: Any = "no_validation", **options: Any) -> Any:
    """Returns data as scikit-learn's ``validate_data`` checks them, NaN where missing."""
    X, y = _with_nan("X", X), _with_nan("y", y)
    for name, values in (("X", X), ("y", y)):
        if options["dtype"] is not None:
            check_columns(values, name)
        if options["dtype"] is not None and isinstance(values, np.ndarray) and values.dtype.kind in "mM":
            # Scikit-learn takes times for numbers, and those that are missing for very low ones.
            raise TypeError(f"{name} must hold numbers; got times ({values.dtype}): {OF_TIMES}")
    return validate_data(estimator, X, y=y, **options)


def validated_codes(transformer: Any, X: Any, **options: Any) -> Any:
    """Returns a transformer's codes, as scikit-learn's ``check_array`` checks them."""
    check_columns(X, "X")
    expected, names = transformer.get_feature_names_out().tolist(), column_names(X)
    if names and names != expected and sorted(names) == sorted(expected):
        raise ValueError(f"X must have the columns of transform, in their order: {expected}; got {names}")
    codes = check_array(_with_nan("X", X), **options)
    if codes.shape[1] != len(expected):
        raise ValueError(f"X must have {len(expected)} columns, one per component; got {codes.shape[1]}")
    return codes


def _with_nan(name: str, values: Any) -> Any:
    # Tables stay tables: scikit-learn reads the names of their columns, and takes their nulls for NaN, but not pandas.NA among objects.
    if hasattr(values, "columns"):
        # Pandas has this where all columns are sparse; scikit-learn would name a method that tables lack.
        if hasattr(values, "sparse"):
            raise TypeError(f"{name} must be dense; got a table of sparse columns: call its sparse.to_dense()")
        has_objects = find_package(values) == "pandas" and "object" in map(str, values.dtypes)
        return values.where(values.notna(), np.nan) if has_objects else values
    if isinstance(values, Tensor) or holds_arrays(values):
        tensor = as_data(name, values).detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    if (names := column_names(values)) and find_package(values) == "xarray":
        # Of xarray's arrays scikit-learn knows no names; whoever has xarray has pandas.
        return sys.modules["pandas"].DataFrame(as_plain_array(values, name), columns=names)
    # Scikit-learn takes None among targets for NaN only after it has looked for NaN.
    return as_plain_array(np.asarray(values) if name == "y" and isinstance(values, list) else values, name)


@dataclasses.dataclass(frozen=True)
class ColumnUnits:
    r"""Means and standard deviations of columns, by which data are standardised.

    .. math:: x_d = (y_d - c_d) / u_d
    """

    center: Tensor  # c, (D,)
    deviation: Tensor  # u, (D,); one for columns that do not vary

    @classmethod
    def from_rows(cls, rows: Tensor, *, is_centred: bool = True) -> Self:
        """Returns the units of data ``(N, D)``, NaN where missing."""
        _check_observed(rows)
        low, high = rows.nan_to_num(torch.inf).amin(0), rows.nan_to_num(-torch.inf).amax(0)
        center = torch.where(high > low, rows.nanmean(0), low)
        # In units of the extent, a power of two, no square is too small or too large.
        extent = torch.ldexp(torch.ones_like(low), torch.frexp(high - low).exponent)
        deviation = extent * ((rows - center) / extent).square().nanmean(0).sqrt()
        _warn_of_outliers(rows, deviation)
        # Rounding errors of a constant column are no deviation.
        varies = deviation > torch.finfo(rows.dtype).eps * center.abs()
        return cls(center if is_centred else torch.zeros_like(center), torch.where(varies, deviation, 1.0))

    @classmethod
    def none(cls, rows: Tensor) -> Self:
        """Returns units that leave the columns of data ``(N, D)`` as they are."""
        _check_observed(rows)
        return cls(torch.zeros(rows.shape[1], dtype=torch.float64), torch.ones(rows.shape[1], dtype=torch.float64))

    def standardise(self, rows: Tensor) -> Tensor:
        """Returns data ``(N, D)`` in these units."""
        return (rows - self.center.to(rows)) / self.deviation.to(rows)

    def to_original(self, rows: Tensor) -> Tensor:
        """Returns data ``(N, D)`` that were in these units."""
        return rows * self.deviation.to(rows) + self.center.to(rows)

    def log_volume(self, rows: Tensor) -> Tensor:
        """Returns by how much log densities of rows fall, ``(N,)``."""
        return (~rows.isnan()).to(self.deviation) @ self.deviation.log()


def _check_observed(rows: Tensor) -> None:
    unseen = rows.isnan().all(0).nonzero().flatten().tolist()
    if unseen:
        raise ValueError(f"columns {unseen} of X have no observed entry, only NaN; leave them out")


def _warn_of_outliers(rows: Tensor, deviation: Tensor) -> None:
    low, high = rows[:: -(-len(rows) // 1000)].nanquantile(rows.new_tensor([0.25, 0.75]), 0)
    ratio = torch.where(high > low, deviation / (high - low), 0.0)
    # Deviations above a hundred extents of the middle half are those of outliers.
    if bool((ratio > 100.0).any()):
        column = int(ratio.argmax())
        center = float((low + high)[column] / 2)
        farthest = float(rows[(rows[:, column] - center).abs().nan_to_num(0.0).argmax(), column])
        warnings.warn(
            f"column {column} of X has outliers, beside which its other entries are nearly equal: half of them lie between "
            f"{float(low[column]):.3g} and {float(high[column]):.3g}, but an entry is {farthest:.3g}. Make outliers NaN, which are "
            "missing, or take logarithms.",
            UserWarning,
            stacklevel=5,
        )


@contextmanager
def isolated_state(random_state: Any = 0) -> Iterator[torch.Generator]:
    """A context with an empty parameter store and its own random numbers.

    It seeds torch's global generator and the generator that it returns. Other threads wait.
    """
    seed = int(check_random_state(random_state).randint(np.iinfo(np.int32).max))
    with one_thread, empty_store(), spare_random_numbers():
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


class SteepestAscent(Search):
    """Scores all changes of one latent of the best states.

    It stops when a data point gains nothing more.

    The result for a data point depends on that data point and its first population only. It depends
    neither on the others nor on chance. Estimators need this, which must say the same of a data
    point in whatever company it comes. In a step the neighbours of ``parents`` states are scored.
    """

    def __init__(self, parents: int = 8) -> None:
        self.parents = check_count("parents", parents)

    def propose(self, batch: SearchBatch) -> Population:
        """The neighbours of the best states."""
        population = batch.population
        best = population.log_joint.topk(min(self.parents, population.num_states)).indices
        return batch.evaluate(Moves(batch.space, population.words.device).neighbours(ops.gather_states(population.words, best)))

    def improve(self, batch: SearchBatch, steps: int = 1) -> Population:
        """Returns the populations after at most so many steps."""
        population = batch.population
        moving = torch.full((len(population),), not population.is_complete, device=population.words.device)
        for _ in range(steps):
            if not bool(moving.any()):
                break
            candidates = self.step(dataclasses.replace(batch, population=population))
            # Less than a millionth of a nat is rounding.
            moving = moving & (candidates.free_energy() > population.free_energy() + 1e-6)
            words = torch.where(moving[:, None, None], candidates.words, population.words)
            log_joint = torch.where(moving[:, None], candidates.log_joint, population.log_joint)
            population = dataclasses.replace(population, words=words, log_joint=log_joint)
        return population


def binary_posteriors(
    model: Any, y: Tensor, num_latents: int, num_states: int, max_steps: int = 200
) -> Iterator[tuple[Tensor, Population]]:
    """Yields blocks of the data with updated populations of binary latents.

    All data points start from the same states: none active, then single latents, then pairs.
    """
    num_states = min(num_states, 2**num_latents)
    first = _sparsest(num_latents, num_states)
    for rows in y.split(4096):
        guide = AutoTruncated(model, num_states, init=first.expand(len(rows), -1, -1))
        yield rows, guide.search_(SteepestAscent(), guide.make_scorer(rows), max_steps)


def mixture_posteriors(model: Any, y: Tensor, num_states: int) -> Iterator[tuple[Tensor, Population]]:
    """Yields blocks of the data with the most probable of all components."""
    # A guide looks at its model anew for every block: as few as fit into memory.
    for rows in y.split(rows_per_block(64 * (len(model.weights) + y.shape[1]))):
        guide = AutoTruncated(model, num_states, vectorize=True)
        yield rows, guide.search_(ExhaustiveSearch(), guide.make_scorer(rows))


def _sparsest(num_latents: int, num_states: int) -> Tensor:
    """Returns the first states ``(S, H)``, ordered by their number of active latents."""
    sizes = (itertools.combinations(range(num_latents), size) for size in range(num_latents + 1))
    states = torch.zeros(num_states, num_latents, dtype=torch.uint8)
    for row, active in zip(states, itertools.chain.from_iterable(sizes), strict=False):
        row[list(active)] = 1
    return states
