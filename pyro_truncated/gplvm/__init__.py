"""Gaussian process latent variable models: spike-and-slab GP-LVM, manifold relevance determination, and decoders on active sets."""

from pyro_truncated.gplvm.convert import latents_to_arviz
from pyro_truncated.gplvm.elbo import Analytic_ELBO
from pyro_truncated.gplvm.function_decoder import SASFunctionDecoder
from pyro_truncated.gplvm.inducing import InducingPosterior, Prediction
from pyro_truncated.gplvm.inference import Latents, Posterior
from pyro_truncated.gplvm.initialization import initialize
from pyro_truncated.gplvm.latents import principal_components
from pyro_truncated.gplvm.plots import plot_latents, plot_relevance, plot_switches
from pyro_truncated.gplvm.relevance import SpikeSlabMRD
from pyro_truncated.gplvm.sas_decoder import SASDecoder
from pyro_truncated.gplvm.spike_slab import SpikeSlabGPLVM
from pyro_truncated.gplvm.stochastic import explicit_copy, fit_minibatches, natural_step
from pyro_truncated.gplvm.training import (
    Fit,
    fit,
    maximize_bound,
    remove_dimensions,
    switch_log_odds,
    switch_moves,
    update_switches,
)

__all__ = [
    "Analytic_ELBO",
    "Fit",
    "InducingPosterior",
    "Latents",
    "Posterior",
    "Prediction",
    "SASDecoder",
    "SASFunctionDecoder",
    "SpikeSlabGPLVM",
    "SpikeSlabMRD",
    "explicit_copy",
    "fit",
    "fit_minibatches",
    "initialize",
    "latents_to_arviz",
    "maximize_bound",
    "natural_step",
    "plot_latents",
    "plot_relevance",
    "plot_switches",
    "principal_components",
    "remove_dimensions",
    "switch_log_odds",
    "switch_moves",
    "update_switches",
]
