"""Operations on packed states: compiled on the CPU, vectorised torch elsewhere."""

from __future__ import annotations

import warnings
from typing import Any

from pyro_truncated.ops.backend import is_vectorised, use_backend
from pyro_truncated.ops.deferred_checks import (
    cholesky,
    defer_checks,
    flush_checks,
    lazy_values,
    on_success,
    raise_if,
    read_conditions,
    read_number,
)
from pyro_truncated.ops.evolution import (
    cross,
    find_duplicates,
    flip_random,
    flip_sparse,
    initial_states,
    select_parents,
    select_top,
    sparse_flip_probabilities,
)
from pyro_truncated.ops.maximum import (
    maximum_error,
    maximum_score,
    maximum_slab_gibbs,
    maximum_slab_statistics,
    maximum_statistics,
    maximum_wins,
)
from pyro_truncated.ops.noisy_or import noisy_or_log_prob, noisy_or_statistics
from pyro_truncated.ops.packed_states import (
    Fields,
    activation_probabilities,
    check_bits,
    check_words,
    draw_values,
    enumerate_states,
    gather_states,
    pack,
    unpack,
    value_probabilities,
)
from pyro_truncated.ops.quadratic import flip_energy, linear_energy, moments, pair_energy, square_error
from pyro_truncated.ops.slabs import expected_log_slab_prior, slab_log_prob, slab_moments, slab_moments_by_dimension
from pyro_truncated.ops.streams import Source, Stream, draw_ahead, draw_seed, mix_bits, positions, uniform, uniform_integers
from pyro_truncated.utils.budget import memory_budget

_RENAMED = {
    **{"mixed": "mix_bits", "repeated": "find_duplicates", "take": "gather_states", "use": "use_backend"},
    # One name for slabs of both kinds.
    **{
        f"{kind}_slab_{what}": f"slab_{what}"
        for kind in ("spike", "correlated")
        for what in ("log_prob", "moments", "moments_by_dimension")
    },
}

__all__ = [
    "Fields",
    "Source",
    "Stream",
    "activation_probabilities",
    "check_bits",
    "check_words",
    "cholesky",
    "cross",
    "defer_checks",
    "draw_ahead",
    "draw_seed",
    "draw_values",
    "enumerate_states",
    "expected_log_slab_prior",
    "find_duplicates",
    "flip_energy",
    "flip_random",
    "flip_sparse",
    "flush_checks",
    "gather_states",
    "initial_states",
    "is_vectorised",
    "lazy_values",
    "linear_energy",
    "maximum_error",
    "maximum_score",
    "maximum_slab_gibbs",
    "maximum_slab_statistics",
    "maximum_statistics",
    "maximum_wins",
    "memory_budget",
    "mix_bits",
    "moments",
    "noisy_or_log_prob",
    "noisy_or_statistics",
    "on_success",
    "pack",
    "pair_energy",
    "positions",
    "raise_if",
    "read_conditions",
    "read_number",
    "select_parents",
    "select_top",
    "slab_log_prob",
    "slab_moments",
    "slab_moments_by_dimension",
    "sparse_flip_probabilities",
    "square_error",
    "uniform",
    "uniform_integers",
    "unpack",
    "use_backend",
    "value_probabilities",
]


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        warnings.warn(f"ops.{name} has a new name: use ops.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
        return globals()[_RENAMED[name]]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
