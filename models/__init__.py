"""Models that users can start from."""

from pyro_truncated.models.binary_vae import BinaryVAE
from pyro_truncated.models.factorial_hmm import FactorialHMM
from pyro_truncated.models.gated_decoder import GatedDecoder
from pyro_truncated.models.gaussian_mixture import GaussianMixture
from pyro_truncated.models.linear_mixture import CategoricalMixture, PoissonMixture
from pyro_truncated.models.nonlinear_superpositions import ExponentialFamilyMaximalCauses, MaximalCauses, NoisyOr
from pyro_truncated.models.occlusive_components import OcclusiveComponents
from pyro_truncated.models.sparse_coding import BinarySparseCoding, DiscreteSparseCoding
from pyro_truncated.models.spike_slab_sparse_coding import MaxSpikeSlabSparseCoding, SpikeSlabSparseCoding

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
