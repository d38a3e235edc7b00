"""Models that users can start from."""

from pyro_truncated.models.binary_sparse_coding import BinarySparseCoding
from pyro_truncated.models.binary_vae import BinaryVAE
from pyro_truncated.models.discrete_mixtures import CategoricalMixture, PoissonMixture
from pyro_truncated.models.discrete_sparse_coding import DiscreteSparseCoding
from pyro_truncated.models.factorial_hmm import FactorialHMM
from pyro_truncated.models.gated_decoder import GatedDecoder
from pyro_truncated.models.gaussian_mixture import GaussianMixture
from pyro_truncated.models.max_spike_slab_sparse_coding import MaxSpikeSlabSparseCoding
from pyro_truncated.models.maximal_causes import ExponentialFamilyMaximalCauses, MaximalCauses
from pyro_truncated.models.noisy_or import NoisyOr
from pyro_truncated.models.occlusive_components import OcclusiveComponents
from pyro_truncated.models.spike_slab_sparse_coding import SpikeSlabSparseCoding

__all__ = [
    "BinarySparseCoding",
    "BinaryVAE",
    "CategoricalMixture",
    "DiscreteSparseCoding",
    "ExponentialFamilyMaximalCauses",
    "FactorialHMM",
    "GatedDecoder",
    "GaussianMixture",
    "MaxSpikeSlabSparseCoding",
    "MaximalCauses",
    "NoisyOr",
    "OcclusiveComponents",
    "PoissonMixture",
    "SpikeSlabSparseCoding",
]
