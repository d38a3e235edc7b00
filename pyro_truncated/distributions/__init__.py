"""Likelihoods that know their structure and so evaluate many states cheaply."""

from pyro_truncated.distributions.active_set import ActiveSetGaussianProcess, ActiveSetPosterior, GivenActiveSet
from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.distributions.max_slabs import MaximumSlabs, PiecewiseGaussian
from pyro_truncated.distributions.max_superposition import MaximumSuperposition
from pyro_truncated.distributions.missing import or_missing
from pyro_truncated.distributions.noisy_or import NoisyOrSuperposition
from pyro_truncated.distributions.occlusion import DepthOrder, OccludedScene, Positions
from pyro_truncated.distributions.spike_slab import SpikeSlabSuperposition

__all__ = [
    "ActiveSetGaussianProcess",
    "ActiveSetPosterior",
    "DepthOrder",
    "GivenActiveSet",
    "LinearSuperposition",
    "MaximumSlabs",
    "MaximumSuperposition",
    "NoisyOrSuperposition",
    "OccludedScene",
    "PiecewiseGaussian",
    "Positions",
    "SpikeSlabSuperposition",
    "or_missing",
]
