"""Gaussian process latent variable models: spike-and-slab GP-LVM, manifold relevance determination, and decoders on active sets."""

from pyro_truncated.gplvm.elbo import Analytic_ELBO
from pyro_truncated.gplvm.initialization import initialize, principal_components
from pyro_truncated.gplvm.relevance import SpikeSlabMRD
from pyro_truncated.gplvm.sas_decoder import SASDecoder
from pyro_truncated.gplvm.spike_slab import SpikeSlabGPLVM
from pyro_truncated.gplvm.training import Fit, fit, maximize_bound, switch_log_odds, switch_moves, update_switches

__all__ = [
    "Analytic_ELBO",
    "Fit",
    "SASDecoder",
    "SpikeSlabGPLVM",
    "SpikeSlabMRD",
    "fit",
    "initialize",
    "maximize_bound",
    "principal_components",
    "switch_log_odds",
    "switch_moves",
    "update_switches",
]
