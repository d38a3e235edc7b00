"""One small call that works for every public function and class that takes arguments of users, fresh each time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from pyro.contrib.gp import kernels
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

import pyro_truncated as pt
from pyro_truncated import distributions, models, search, testing

Arguments = dict[str, Any]
Made = tuple[Callable[..., Any], Arguments]
CALLS: dict[str, Callable[[], Made]] = {}
N, D, H = 12, 5, 4


def enter(name: str, function: Callable[..., Any], /, **arguments: Any) -> None:
    """Enters a call; arguments that are functions without a name of their own are made anew for each call."""
    CALLS[name] = lambda: (function, {key: value() if isinstance(value, Fresh) else value for key, value in arguments.items()})


class Fresh(functools.partial):  # type: ignore[type-arg]
    """Something to be made anew for each call."""


def uniform(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Numbers in (0, 1), the same for each shape."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).clamp(min=0.01).to(dtype)


def data(rows: int = N) -> Tensor:
    """Positive data."""
    return 3 * uniform(rows, D, dtype=torch.float32)


def counts() -> Tensor:
    """Counts."""
    return (4 * uniform(N, D, dtype=torch.float32)).floor()


def model() -> Any:
    """A small model, at its start."""
    return models.BinarySparseCoding(D, H).initialize(data(), torch.Generator().manual_seed(0))


def guide() -> Any:
    """A guide that has been trained."""
    one = model()
    fitted = pt.AutoTruncated(one, 6)
    SVI(one, fitted, pt.ClosedForm(one), pt.Truncated_ELBO(search.EvolutionarySearch(2, 2))).step(data())
    return fitted


def svi() -> SVI:
    """A run that is about to begin."""
    one = model()
    return SVI(one, pt.AutoTruncated(one, 6), pt.ClosedForm(one), pt.Truncated_ELBO(search.EvolutionarySearch(2, 2)))


def learnt(family: Callable[..., Any], y: Tensor) -> Callable[..., Any]:
    """A model of that family is made, started and trained for a step by gradients."""

    def learn(**arguments: Any) -> Any:
        one = family(**arguments)
        one.initialize(y)
        found = pt.AutoTruncated(one, 3)
        loss = SVI(one, found, Adam({"lr": 0.01}), pt.Truncated_ELBO()).step(y)
        return one, loss

    return learn


def started(family: Callable[..., Any]) -> Callable[..., Any]:
    """A model of that family is made, and started."""
    return lambda y: family(D, 3).initialize(y)


def searched(family: Callable[..., Any]) -> Callable[..., Any]:
    """A search is made, and used."""

    def run(**arguments: Any) -> Any:
        return guide().infer(data(3), family(**arguments), 2).population()

    return run


def scored(family: Callable[..., Any], y: Tensor) -> Callable[..., Any]:
    """A likelihood is made, and evaluated."""
    return lambda **arguments: family(**arguments).log_prob(y)


# --- guides and training ---

enter(
    "AutoTruncated",
    lambda y, **k: SVI(k["model"], pt.AutoTruncated(**k), Adam({"lr": 0.01}), pt.Truncated_ELBO()).step(y),
    y=data(),
    model=Fresh(model),
    num_states=4,
    init=None,
    max_count=None,
    vectorize=None,
    memory_budget=2**28,
)
enter("ClosedForm", pt.ClosedForm, model=Fresh(model), minibatch="online", step_size=None)
enter(
    "Truncated_ELBO",
    lambda **k: SVI(m := model(), pt.AutoTruncated(m, 4), pt.ClosedForm(m), pt.Truncated_ELBO(**k)).step(data()),
    search=Fresh(search.EvolutionarySearch, 2, 2),
    search_steps=1,
    search_every=1,
    temperature=1.0,
)
enter("StateSpace", pt.StateSpace, cardinalities=[2, 3])
enter("Population", pt.Population, space=pt.StateSpace([2, 3]), words=torch.tensor([[[0], [1]]]), log_joint=torch.zeros(1, 2), indices=None)
enter(
    "fit",
    pt.fit,
    svi=Fresh(svi),
    y=data(),
    steps=2,
    callbacks=(),
    progress=False,
    patience=2,
    tolerance=1e-5,
    checkpoint=None,
    checkpoint_seconds=30.0,
)
enter("fit_restarts", lambda **k: pt.fit_restarts(**k).trainings, make=lambda number: svi(), y=data(), steps=1, restarts=2, progress=False)
enter(
    "best_start",
    pt.best_start,
    model=Fresh(model),
    y=data(),
    search=Fresh(search.EvolutionarySearch, 2, 2),
    num_starts=2,
    num_data=8,
    steps=2,
    num_states=4,
    temperature=1.0,
    generator=None,
)
enter(
    "learn",
    pt.learn,
    model=Fresh(model),
    y=data(),
    search=None,
    num_states=4,
    steps=2,
    restarts=2,
    config=pt.LearnConfig(restart_steps=2, temperature=2.0, tolerance=1e6, lr=0.02),
    generator=None,
    progress=False,
)
enter("cooling", lambda **k: pt.cooling(**k)(1), start=2.0, steps=5, share=0.5)
enter("check_counts", pt.extend.check_counts, num=3)
enter("check_observable", pt.extend.check_observable, model=Fresh(model), y=data(), support=dist.constraints.real)
enter("SVI.step", lambda y, batch_size: svi().step(y, batch_size), y=data(), batch_size=6)
enter(
    "infer",
    lambda **k: guide().infer(k.pop("y"), **k).population(),
    y=data(3),
    search=Fresh(search.EvolutionarySearch, 2, 2),
    steps=2,
    num_states=4,
)
enter("sample_posterior", lambda **k: guide().sample_posterior(**k), num_samples=3)
enter(
    "GibbsEM",
    lambda **k: SVI(
        m := models.MaxSpikeSlabSparseCoding(D, H).initialize(data()), pt.GibbsGuide(m), pt.ClosedForm(m), pt.GibbsEM(**k)
    ).step(data()),
    search=Fresh(search.Preselection, search.Singletons(), 2),
    sweeps=2,
    burn_in=1,
    temperature=1.0,
    batch_size=6,
    generator=None,
)
enter("GibbsGuide", pt.GibbsGuide, model=Fresh(models.MaxSpikeSlabSparseCoding, D, H))
enter("check_guide", testing.check_guide, guide=Fresh(guide), y=data())

# --- models ---

for _name, _count in (
    ("BinarySparseCoding", "num_latents"),
    ("BinaryVAE", "num_latents"),
    ("MaximalCauses", "num_latents"),
    ("SpikeSlabSparseCoding", "num_latents"),
    ("GaussianMixture", "num_components"),
):
    enter(_name, learnt(getattr(models, _name), data()), num_observed=D, **{_count: 3}, dtype=torch.float32)
enter(
    "DiscreteSparseCoding",
    learnt(models.DiscreteSparseCoding, data()),
    num_observed=D,
    num_latents=2,
    values=(-1.0, 0.0, 1.0),
    shared_prior=True,
    tied_signs=False,
    offset=True,
)
enter(
    "CategoricalMixture",
    learnt(models.CategoricalMixture, counts().clamp(max=3)),
    num_observed=D,
    num_components=2,
    num_values=4,
    dtype=None,
)
enter("PoissonMixture", learnt(models.PoissonMixture, counts()), num_observed=D, num_components=2, dtype=None)
enter(
    "NoisyOr",
    learnt(models.NoisyOr, (data() > 1.5).float()),
    num_observed=D,
    num_latents=3,
    leak=0.01,
    learn_leak=False,
    shared_prior=False,
    update="exact",
)
enter("GaussianMixture.covariance", learnt(models.GaussianMixture, data()), num_observed=D, num_components=2, covariance="diag")
enter("BinaryVAE.hidden", learnt(models.BinaryVAE, data()), num_observed=D, num_latents=3, hidden=(4,), decoder=None)
enter(
    "MaxSpikeSlabSparseCoding",
    lambda **k: models.MaxSpikeSlabSparseCoding(**k).initialize(data()),
    num_observed=D,
    num_latents=3,
    shared_prior=True,
    shared_slab=True,
)
enter(
    "OcclusiveComponents",
    learnt(models.OcclusiveComponents, uniform(N, 3, 4, 2, dtype=torch.float32)),
    num_objects=2,
    canvas=(3, 4),
    template=(1, 2),
    num_channels=2,
    order="exclusive",
    wrap=True,
    min_scale=0.1,
    min_mask=0.01,
)
enter("GatedDecoder", models.GatedDecoder, outputs=uniform(N, D), switches=uniform(N, 2).round(), poses=uniform(N, 2, 1), width=4)
STARTED = (
    "BinarySparseCoding",
    "BinaryVAE",
    "MaximalCauses",
    "SpikeSlabSparseCoding",
    "GaussianMixture",
    "MaxSpikeSlabSparseCoding",
    "PoissonMixture",
)
for _name in STARTED:
    enter(f"{_name}.initialize", started(getattr(models, _name)), y=counts() if _name == "PoissonMixture" else data())

# --- searches ---

enter(
    "EvolutionarySearch",
    searched(search.EvolutionarySearch),
    parents=2,
    children=2,
    generations=1,
    selection="fitparents",
    crossover=False,
    mutation="sparseflips",
    overlapping=False,
    flip_probability=0.3,
    target_activity=1.5,
    generator=None,
)
enter("ExhaustiveSearch", searched(search.ExhaustiveSearch), max_states=100)
enter("SampledSearch", searched(search.SampledSearch), num_samples=4, prior_share=0.5, generator=None)
enter("ConditionalSearch", searched(search.ConditionalSearch), num_candidates=4, generator=None)
enter("CombinedFlips", searched(search.CombinedFlips), num_selected=3, rounds=2)
enter("AutomaticSearch", searched(search.AutomaticSearch), generator=None)
enter("CombinedSearch", searched(search.CombinedSearch), searches=(search.EvolutionarySearch(2, 2), search.ExhaustiveSearch()))
enter(
    "Preselection",
    searched(search.Preselection),
    affinity=search.Singletons(),
    num_selected=2,
    max_active=2,
    explore=0.1,
    merge=True,
    generator=None,
)
enter("Cosine", searched(lambda **k: search.Preselection(search.Cosine(**k), 2)), weight=lambda: uniform(D, H), site="y")
enter("Projection", searched(lambda **k: search.Preselection(search.Projection(**k), 2)), weight=lambda: uniform(D, H), site=None)


def trained_search(**arguments: Any) -> Any:
    """A search that learns is made, and used on the data that it learns from."""
    one = model()
    return SVI(one, pt.AutoTruncated(one, 4), pt.ClosedForm(one), pt.Truncated_ELBO(search.GPSelect(**arguments))).step(data())


enter(
    "GPSelect",
    trained_search,
    num_selected=2,
    kernel="rbf",
    refit_every=2,
    rank=4,
    pivots="variance",
    explore=0.1,
    merge=True,
    inputs=None,
    max_active=2,
    fit_steps=2,
    generator=None,
)

# --- likelihoods ---

STATES = uniform(N, H).round()
enter(
    "LinearSuperposition",
    scored(distributions.LinearSuperposition, uniform(N, D)),
    states=STATES,
    weight=uniform(D, H),
    scale=0.5,
    bias=uniform(D),
    validate_args=True,
)
enter("MaximumSuperposition", scored(distributions.MaximumSuperposition, uniform(N, D)), states=STATES, weight=uniform(D, H), scale=0.5)
enter(
    "NoisyOrSuperposition", scored(distributions.NoisyOrSuperposition, uniform(N, D).round()), states=STATES, weight=uniform(D, H), leak=0.1
)
enter(
    "SpikeSlabSuperposition",
    scored(distributions.SpikeSlabSuperposition, uniform(N, D)),
    states=STATES,
    weight=uniform(D, H),
    scale=0.5,
    slab_mean=0.1,
    slab_scale=1.0,
    bias=uniform(D),
)
enter(
    "MaximumSlabs",
    scored(distributions.MaximumSlabs, uniform(N, H)),
    states=STATES,
    weight=uniform(D, H),
    scale=uniform(()),
    slab_mean=uniform(H),
    slab_scale=uniform(H),
    value=uniform(N, D),
)
enter("Positions", scored(distributions.Positions, torch.zeros(N, H)), presence=STATES, num_values=3)
enter("Canvas", distributions.Canvas, height=3, width=4, template_height=1, template_width=2, wrap=True)
enter("DepthOrder", lambda **k: distributions.DepthOrder(**k).sample(), presence=STATES)
enter(
    "OccludedScene",
    scored(distributions.OccludedScene, uniform(N, 3, 4, 2)),
    presence=torch.ones(2),
    position=torch.zeros(2).long(),
    features=uniform(2, 1, 2, 2),
    masks=uniform(2, 1, 2) / 2,
    scale=0.5,
    background=uniform(2),
    background_scale=0.3,
    canvas=(3, 4),
    wrap=True,
)
enter("log_prob", lambda value: distributions.LinearSuperposition(STATES, uniform(D, H), 0.5).log_prob(value), value=uniform(N, D))
enter(
    "ActiveSetGaussianProcess",
    scored(distributions.ActiveSetGaussianProcess, uniform(N, 2)),
    latents=uniform(N, 2),
    kernel=Fresh(kernels.RBF, 2, torch.ones(()).double(), torch.ones(()).double()),
    noise=0.1,
    num_active=4,
    num_outputs=2,
    num_data=N,
)
enter("or_missing", distributions.or_missing, base=dist.constraints.real)
