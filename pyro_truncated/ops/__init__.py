"""Operations on packed states.

Kernels are compiled on the CPU, vectorised torch on any other device. They handle numbers only.
"""

from pyro_truncated.ops import forks as forks  # what a forked child must know is noted from the first import on
from pyro_truncated.ops.backend import is_vectorised, use
from pyro_truncated.ops.checks import afterwards, ask, cholesky, look, number, refuse, soon, together
from pyro_truncated.ops.evolution import (
    cross,
    flip_random,
    flip_sparse,
    initial_states,
    repeated,
    select_parents,
    select_top,
    sparse_flip_probabilities,
)
from pyro_truncated.ops.fields import Fields, enumerate_states, pack
from pyro_truncated.ops.maximum import (
    maximum_error,
    maximum_score,
    maximum_slab_gibbs,
    maximum_slab_statistics,
    maximum_statistics,
    maximum_wins,
)
from pyro_truncated.ops.most_active import made_of
from pyro_truncated.ops.noisy_or import noisy_or_log_prob, noisy_or_statistics
from pyro_truncated.ops.quadratic import flip_energy, moments, pair_energy, square_error
from pyro_truncated.ops.slabs import (
    correlated_slab_log_prob,
    correlated_slab_moments,
    correlated_slab_moments_by_dimension,
    expected_log_slab_prior,
    spike_slab_log_prob,
    spike_slab_moments,
    spike_slab_moments_by_dimension,
)
from pyro_truncated.ops.streams import Source, Stream, draw_ahead, draw_seed, mixed, positions, uniform, uniform_integers
from pyro_truncated.ops.values import activation_probabilities, draw_values, unpack, value_probabilities
from pyro_truncated.ops.words import check_bits, check_words, take
from pyro_truncated.utils.budget import memory_budget

__all__ = [
    "Fields",
    "Source",
    "Stream",
    "activation_probabilities",
    "afterwards",
    "ask",
    "check_bits",
    "check_words",
    "cholesky",
    "correlated_slab_log_prob",
    "correlated_slab_moments",
    "correlated_slab_moments_by_dimension",
    "cross",
    "draw_ahead",
    "draw_seed",
    "draw_values",
    "enumerate_states",
    "expected_log_slab_prior",
    "flip_energy",
    "flip_random",
    "flip_sparse",
    "initial_states",
    "is_vectorised",
    "look",
    "made_of",
    "maximum_error",
    "maximum_score",
    "maximum_slab_gibbs",
    "maximum_slab_statistics",
    "maximum_statistics",
    "maximum_wins",
    "memory_budget",
    "mixed",
    "moments",
    "noisy_or_log_prob",
    "noisy_or_statistics",
    "number",
    "pack",
    "pair_energy",
    "positions",
    "refuse",
    "repeated",
    "select_parents",
    "select_top",
    "soon",
    "sparse_flip_probabilities",
    "spike_slab_log_prob",
    "spike_slab_moments",
    "spike_slab_moments_by_dimension",
    "square_error",
    "take",
    "together",
    "uniform",
    "uniform_integers",
    "unpack",
    "use",
    "value_probabilities",
]
