"""Calls of Gaussian processes, latent variable models, diagnostics and restoration, see :mod:`tests.faults.calls`."""

from __future__ import annotations

import functools
from typing import Any

import torch
from matplotlib.figure import Figure
from pyro.contrib.gp import kernels

from pyro_truncated import diagnostics, gp, gplvm, restoration, search
from tests.faults.calls import D, Fresh, H, N, data, enter, guide, model, uniform

ONE = torch.ones((), dtype=torch.float64)


def rbf(dim: int = 2) -> kernels.Kernel:
    """A kernel in float64."""
    return kernels.RBF(dim, ONE.clone(), ONE.clone())


def data_kernel() -> Any:
    """A kernel bound to inputs."""
    return gp.PyroKernel(rbf(), uniform(N, 2))


def fitted_subset(**arguments: Any) -> Any:
    """A regression on an inducing subset, fitted."""
    regression = gp.SubsetGPRegression(**arguments)
    regression.fit(max_epochs=1, hyper_evaluations=2)
    return regression


# --- Gaussian processes ---

enter(
    "LeaveOneOutRegression",
    lambda targets, **k: [(r := gp.LeaveOneOutRegression(**k)).fit(targets, 2), r.loo(targets)],
    targets=uniform(N, 3),
    inputs=uniform(N, 2),
    kernel="rbf",
    rank=4,
    noise=0.1,
    fitc=False,
    tolerance=0.0,
    pivots="variance",
    generator=None,
)
enter(
    "LeaveOneOutRegression.fit",
    lambda **k: gp.LeaveOneOutRegression(uniform(N, 2), "rbf").fit(**k),
    targets=uniform(N, 3),
    steps=2,
    rows=torch.arange(5),
)
enter(
    "LeaveOneOutRegression.predict",
    lambda **k: gp.LeaveOneOutRegression(uniform(N, 2), "rbf").predict(**k),
    new_inputs=uniform(3, 2),
    targets=uniform(N, 3),
)
enter(
    "SubsetGPRegression",
    lambda **k: fitted_subset(**k).predict(uniform(3, 2)),
    X=Fresh(data_kernel),
    y=uniform(N),
    num_inducing=4,
    noise=0.3,
    objective="vfe",
    algorithm="exchange",
    generator=None,
)
enter(
    "SubsetGPRegression.fit",
    lambda **k: gp.SubsetGPRegression(data_kernel(), uniform(N), num_inducing=4).fit(**k),
    max_seconds=1.0,
    max_epochs=2,
    hyper_evaluations=2,
    attempts_per_epoch=2,
    tolerance=1e-3,
)
enter(
    "SubsetGPRegression.predict",
    lambda **k: fitted_subset(X=data_kernel(), y=uniform(N), num_inducing=4).predict(**k),
    new=uniform(3, 2),
)
enter(
    "InducingSubset",
    gp.InducingSubset,
    X=Fresh(data_kernel),
    y=uniform(N),
    num_inducing=4,
    noise=0.3,
    objective="vfe",
    algorithm="exchange",
    index=torch.arange(4),
    generator=None,
)
enter("CoregionalizedGPRegression", gp.CoregionalizedGPRegression, X=Fresh(data_kernel), y=uniform(N, 2), rank=1, noise=0.5)
enter(
    "SubsetSparseGPRegression",
    gp.SubsetSparseGPRegression,
    X=Fresh(data_kernel),
    y=uniform(N),
    num_inducing=3,
    index=torch.arange(3),
    noise=0.5,
    approx="VFE",
    jitter=1e-6,
)
enter(
    "DenseCovariance",
    lambda **k: gp.DenseCovariance(**k).log_likelihood(uniform(3, 1), 1),
    kernel_matrix=torch.eye(3).double(),
    noise=torch.tensor(0.1).double(),
)
enter(
    "LowRankCovariance",
    lambda **k: gp.LowRankCovariance(**k).log_likelihood(uniform(N, 1), 1),
    factor=uniform(N, 2),
    noise=torch.tensor(0.1).double(),
)
enter(
    "pivoted_cholesky",
    lambda **k: gp.pivoted_cholesky(lambda x, z=None, diag=False: rbf()(x, z, diag).detach(), **k),
    inputs=uniform(N, 2),
    max_rank=3,
    tolerance=0.0,
)
enter("PyroKernel", lambda **k: gp.PyroKernel(**k).diag(), kernel=Fresh(rbf), inputs=uniform(N, 2))
enter("PrecomputedKernel", lambda **k: gp.PrecomputedKernel(**k).diag(), matrix=torch.eye(4).double(), train=torch.arange(3), variance=1.0)
enter("HistogramIntersectionKernel", lambda **k: gp.HistogramIntersectionKernel(**k).diag(), histograms=uniform(N, 3), variance=1.0)
enter("IdentityKernel", lambda **k: gp.IdentityKernel(**k).diag(), num_data=3, variance=1.0)
enter(
    "FunctionKernel",
    lambda **k: gp.FunctionKernel(**k).diag(),
    function=lambda a, b: float(a == b),
    objects=[1, 2, 3],
    batched=False,
    variance=1.0,
)
enter("SumKernel", lambda **k: gp.SumKernel(**k).diag(), parts=Fresh(lambda: [data_kernel(), data_kernel()]))
enter("RestrictedKernel", lambda **k: gp.RestrictedKernel(**k).diag(), kernel=Fresh(data_kernel), rows=torch.arange(3))
enter("LinearARD", lambda **k: gp.LinearARD(**k)(uniform(N, 2, dtype=torch.float32)), input_dim=2, variance=torch.ones(2))
enter("spectrum", gp.spectrum, strings=["abc", "bcd"], length=2, shorter=False)
enter(
    "CountKernel", lambda **k: gp.CountKernel(**k).diag(), features=gp.spectrum(["abc", "bcd"], 2), normalization="tanimoto", variance=1.0
)
enter(
    "matrix of counts",
    lambda new, **k: gp.CountKernel(**k).cross(new, torch.arange(2)),
    features=uniform(N, 3).mul(4).round(),
    normalization="inner",
    variance=1.0,
    new=uniform(2, 3).mul(4).round(),
)
enter("MinMaxKernel", lambda **k: gp.MinMaxKernel(**k).diag(), features=gp.spectrum(["abc", "bcd"], 2), variance=1.0)
enter("linear_growth", lambda **k: gp.linear_growth(**k)(1), start=2, stop=5, epochs=3)
enter("UniformSplits", lambda **k: list(gp.UniformSplits(**k).epoch(0)), num_data=N, batch_size=6, num_active=3, generator=None)
enter("smooth_rbf", gp.smooth_rbf, inputs=uniform(N, 2))
enter("StudentT", gp.StudentT, df=4.0, scale=1.0)
enter("Quadrature", gp.Quadrature, degree=5)
enter("Sampling", gp.Sampling, num_samples=4, seed=0)
enter("ExchangeSearch", gp.ExchangeSearch, information_pivots=4, pool=4, patience=1, candidates_per_input=2)
enter("SpikeSlabInputs", gp.SpikeSlabInputs, loc=uniform(N, 2), variance=uniform(N, 2), probability=uniform(2), prior_share=None)

# --- latent variable models ---


def latent_model() -> Any:
    """A small spike-and-slab GP-LVM, at its start."""
    one = gplvm.SpikeSlabGPLVM(N, D, 2, num_inducing=3)
    gplvm.initialize(one, data().double())
    return one


enter(
    "SpikeSlabGPLVM",
    gplvm.SpikeSlabGPLVM,
    num_data=N,
    num_observed=D,
    num_latents=2,
    kernel="rbf",
    num_inducing=3,
    prior=0.1,
    collapsed=True,
)
enter("SpikeSlabMRD", gplvm.SpikeSlabMRD, num_data=N, num_observed=[D, 2], num_latents=2, kernel="rbf", num_inducing=3, prior=0.1)
enter(
    "gplvm.fit",
    gplvm.fit,
    model=Fresh(latent_model),
    y=data().double(),
    start="pca",
    num_starts=1,
    steps=2,
    warm_up=1,
    rounds=1,
    removal_steps=0,
    tolerance=1e-3,
    generator=None,
)
enter(
    "fit_minibatches",
    gplvm.fit_minibatches,
    model=Fresh(lambda: gplvm.SpikeSlabGPLVM(N, D, 2, num_inducing=3, collapsed=False)),
    y=data().double(),
    steps=2,
    batch_size=4,
    learning_rate=0.02,
    rate=0.3,
    switches_from=0.3,
)
enter("gplvm.initialize", gplvm.initialize, model=Fresh(latent_model), y=data().double(), start="pca", generator=None)
enter("maximize_bound", gplvm.maximize_bound, model=Fresh(latent_model), y=data().double(), steps=2, tolerance=1e-5, fixed=())
enter("principal_components", gplvm.principal_components, data=data().double(), num=2, generator=None)
for _name in ("settle_switches", "switch_log_odds", "switch_moves", "update_switches"):
    enter(_name, getattr(gplvm, _name), model=Fresh(latent_model), y=data().double())
enter("latents_to_arviz", gplvm.latents_to_arviz, model=Fresh(latent_model), y=data().double(), num_samples=3, num_chains=2, seed=0)
enter("Posterior", lambda **k: gplvm.Posterior(**k).predict(uniform(3, 2)), model=Fresh(latent_model), y=data().double())
enter("Analytic_ELBO", gplvm.Analytic_ELBO, warm_up=1, every=2)
enter("CategoricalLabels", gplvm.CategoricalLabels, num_classes=3)
enter(
    "SASDecoder",
    lambda x, **k: gplvm.SASDecoder(**k).initialize(x),
    x=data(),
    num_data=N,
    num_outputs=D,
    latent_dim=2,
    num_active=4,
    batch_size=6,
    bayesian=False,
)


def decoder() -> Any:
    """A small decoder on active sets, before training."""
    return gplvm.SASDecoder(N, D, 2, num_active=4).initialize(data()).condition_(data())


def of_decoder(name: str) -> Any:
    """A method of a new decoder, as a function."""
    return lambda **k: getattr(decoder(), name)(**k)


# What it keeps of incomplete data has gaps; what it predicts has none.
enter(
    "SASDecoder.fit",
    lambda **k: decoder().fit(**k).predict(uniform(4, 2)),
    x=data(),
    epochs=2,
    learning_rate=0.03,
    generator=None,
    progress=False,
)
enter("SASDecoder.initialize", of_decoder("initialize"), x=data(), steps=2, latents=uniform(N, 2))
enter("SASDecoder.condition_", of_decoder("condition_"), x=data(), size=5, projected=True)
enter("closest points", of_decoder("condition_"), x=data(), num_neighbors=5)
enter("SASDecoder.relocate_", of_decoder("relocate_"), x=data(), num_active=4, generator=None)
enter("SASDecoder.infer", of_decoder("infer"), x=data(), starts=2, steps=3, lr=0.05, block=4)
enter("SASDecoder.predict", of_decoder("predict"), latents=uniform(4, 2), noiseless=False, block=2)
enter("CandidateLatents", lambda **k: gplvm.CandidateLatents(decoder(), **k), x=data(), most=8, calibration=6, generator=None)
enter("reconstruct", lambda x, **k: gplvm.CandidateLatents(decoder(), data()).reconstruct(x, **k), x=data(), noiseless=False, block=4)

# --- diagnostics ---


@functools.cache
def _idata() -> Any:
    one = guide()
    return diagnostics.to_arviz(
        one.model, one, data(), num_samples=10, seed=0, checks=diagnostics.check_truncation(one, data(), warn=False)
    )


def axes() -> Any:
    """An empty picture."""
    return Figure().subplots()


enter(
    "to_arviz",
    lambda **k: len(diagnostics.to_arviz((g := k.pop("guide")).model, g, k.pop("y"), **k).groups()),
    guide=Fresh(guide),
    y=data(),
    num_samples=4,
    num_chains=2,
    num_predictive=3,
    dims=None,
    coords=None,
    seed=0,
    memory_budget=2**28,
)
enter(
    "check_truncation",
    diagnostics.check_truncation,
    guide=Fresh(guide),
    y=data(),
    search=Fresh(search.EvolutionarySearch, 2, 2),
    steps=2,
    num_samples=30,
    num_parents=2,
    warn=False,
)
enter("covered_mass", diagnostics.covered_mass, guide=Fresh(guide), y=data(), num_parents=2)
enter(
    "estimate_evidence",
    diagnostics.estimate_evidence,
    guide=Fresh(guide),
    y=data(),
    num_samples=30,
    confidence=0.9,
    exact_states=None,
    generator=None,
)
enter("effective_states", diagnostics.effective_states, guide=Fresh(guide), y=data())
enter(
    "population_growth", diagnostics.population_growth, guide=Fresh(guide), y=data(), search=Fresh(search.EvolutionarySearch, 2, 2), steps=2
)
enter("compare_with_enumeration", diagnostics.compare_with_enumeration, guide=Fresh(guide), y=data(), max_states=100, memory_budget=2**28)
enter("compare_restarts", diagnostics.compare_restarts, guides=Fresh(lambda: [guide(), guide()]), y=data(), components=None)
enter("match_latents", diagnostics.match_latents, reference=uniform(D, H), other=uniform(D, H).flip(1), centred=True)
enter("diagnose", diagnostics.diagnose, idata=Fresh(_idata), path=None, weight=None, image_shape=None, warn=False)
enter("cross_validate", diagnostics.cross_validate, idata=Fresh(_idata), var_name=None)
enter("loo_pit", diagnostics.loo_pit, idata=Fresh(_idata), name="y", seed=0)
enter("predictive_p_values", diagnostics.predictive_p_values, idata=Fresh(_idata), group="posterior_predictive", name="y", statistics=None)
enter("compare_models", diagnostics.compare_models, idatas=Fresh(lambda: {"a": _idata(), "b": _idata()}), var_names=None)
enter("plot_covered_mass", diagnostics.plot_covered_mass, idata=Fresh(_idata), ax=Fresh(axes), worst=2)
enter("plot_marginals", diagnostics.plot_marginals, idata=Fresh(_idata), ax=Fresh(axes), rows=3)
enter("plot_loo_pit", diagnostics.plot_loo_pit, idata=Fresh(_idata), ax=Fresh(axes), name="y", features=[0], level=0.05)
enter(
    "plot_predictive_check",
    diagnostics.plot_predictive_check,
    idata=Fresh(_idata),
    ax=Fresh(axes),
    group="posterior_predictive",
    name="y",
    draws=2,
)
enter(
    "simulation_based_calibration", diagnostics.simulation_based_calibration, model=Fresh(model), y=data(), num_simulations=1, num_draws=3
)

# --- restoration ---

enter("Patches", lambda **k: restoration.Patches(**k), shape=(8, 9), size=3, stride=2, channels=None)
enter(
    "denoise",
    lambda **k: restoration.denoise(**k).image,
    image=uniform(8, 8),
    noise=0.1,
    side=3,
    model=None,
    stride=2,
    channels=None,
    num_components=4,
    rounds=1,
    passes=1,
    num_states=3,
    batch_size=100,
    generator=None,
    progress=False,
)
enter(
    "inpaint",
    lambda **k: restoration.inpaint(**k).image,
    image=uniform(8, 8),
    mask=uniform(8, 8) > 0.3,
    noise=0.1,
    side=3,
    num_components=4,
    rounds=1,
    progress=False,
)
