"""Gaussian process latent variable models: spike-and-slab, multi-view, and decoders."""

from pyro_truncated.gplvm.decoders.function_decoder import SASFunctionDecoder
from pyro_truncated.gplvm.decoders.latents import CandidateLatents
from pyro_truncated.gplvm.decoders.sas_decoder import SASDecoder
from pyro_truncated.gplvm.principal_components import principal_components
from pyro_truncated.gplvm.spike_slab.fitting import (
    Analytic_ELBO,
    Fit,
    explicit_copy,
    fit,
    fit_minibatches,
    initialize,
    maximize_bound,
    natural_step,
    remove_dimensions,
    settle_switches,
    switch_log_odds,
    switch_moves,
    update_switches,
)
from pyro_truncated.gplvm.spike_slab.inducing_posterior import InducingPosterior, Prediction
from pyro_truncated.gplvm.spike_slab.inference import Latents, Posterior, latents_to_arviz, plot_latents, plot_relevance, plot_switches
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabGPLVM, SpikeSlabMRD, TimePrior
from pyro_truncated.gplvm.spike_slab.view import BernoulliLabels, CategoricalLabels, LabelLikelihood, PoissonCounts

__all__ = [
    "Analytic_ELBO",
    "BernoulliLabels",
    "CandidateLatents",
    "CategoricalLabels",
    "Fit",
    "InducingPosterior",
    "LabelLikelihood",
    "Latents",
    "PoissonCounts",
    "Posterior",
    "Prediction",
    "SASDecoder",
    "SASFunctionDecoder",
    "SpikeSlabGPLVM",
    "SpikeSlabMRD",
    "TimePrior",
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
    "settle_switches",
    "switch_log_odds",
    "switch_moves",
    "update_switches",
]
