"""Operations on packed states: compiled kernels on the CPU, vectorised torch on any other device."""

import numba
import torch

from pyro_truncated.ops.evolution import cross, draw_seed, flip_random, flip_sparse, select_parents, sparse_flip_probabilities
from pyro_truncated.ops.initial import initial_states
from pyro_truncated.ops.maximum import maximum_error, maximum_statistics
from pyro_truncated.ops.maximum_slabs import maximum_slab_gibbs, maximum_slab_statistics
from pyro_truncated.ops.quadratic import moments, noisy_or_log_prob, noisy_or_statistics, pair_energy, square_error
from pyro_truncated.ops.selection import check_bits, check_words, repeated, select_top
from pyro_truncated.ops.spike_slab import spike_slab_log_prob, spike_slab_moments, spike_slab_moments_by_dimension
from pyro_truncated.ops.values import activation_probabilities, draw_values, unpack, value_probabilities

__all__ = [
    "activation_probabilities",
    "check_bits",
    "check_words",
    "cross",
    "draw_seed",
    "draw_values",
    "flip_random",
    "flip_sparse",
    "initial_states",
    "maximum_error",
    "maximum_slab_gibbs",
    "maximum_slab_statistics",
    "maximum_statistics",
    "moments",
    "noisy_or_log_prob",
    "noisy_or_statistics",
    "pair_energy",
    "repeated",
    "select_parents",
    "select_top",
    "sparse_flip_probabilities",
    "spike_slab_log_prob",
    "spike_slab_moments",
    "spike_slab_moments_by_dimension",
    "square_error",
    "unpack",
    "value_probabilities",
]

# Starting numba's threads resets the number of threads of the OpenMP runtime, which torch shares: do it once, now, and put it back.
_num_threads = torch.get_num_threads()
numba.get_num_threads()
torch.set_num_threads(_num_threads)
