from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arviz as az
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import xarray as xr
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.diagnostics import to_arviz as convert
from pyro_truncated.utils.arviz_compat import get_dataset, group_names, quiet

NUM_DATA, NUM_OBSERVED, NUM_LATENTS = 6, 3, 4
STATES = torch.tensor(list(itertools.product((0.0, 1.0), repeat=NUM_LATENTS)), dtype=torch.float64)
RATE, NOISE = 0.3, 0.8


def to_arviz(*args: Any, **kwargs: Any) -> Any:
    """One chain, so that draws are compared with what is expected of them one by one."""
    return convert(*args, **{"num_chains": 1, **kwargs})


@pytest.fixture
def weight(generator: torch.Generator) -> Tensor:
    return torch.randn(NUM_OBSERVED, NUM_LATENTS, generator=generator, dtype=torch.float64)


@pytest.fixture
def data(generator: torch.Generator) -> Tensor:
    return torch.randn(NUM_DATA, NUM_OBSERVED, generator=generator, dtype=torch.float64)


@pytest.fixture
def model(weight: Tensor) -> Callable[..., None]:
    def linear(y: Tensor, batch_size: int | None = None) -> None:
        with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()).expand([NUM_LATENTS]).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, NOISE).to_event(1), obs=y[rows])

    return linear


def fitted(model: Callable[..., None], *args: Any, num_states: int = 16, guide: Any = None, steps: int = 1, **kwargs: Any) -> Any:
    """A guide with the best states found by enumeration; the optimiser does not move anything."""
    guide = AutoTruncated(model, num_states) if guide is None else guide
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1))
    for _ in range(steps):
        svi.step(*args, **kwargs)
    return guide


def exact_log_joint(y: Tensor, weight: Tensor, shift: Tensor | float = 0.0) -> Tensor:
    prior = dist.Bernoulli(torch.tensor(RATE).double()).log_prob(STATES).sum(1)
    return prior + dist.Normal(STATES @ weight.mT + shift, NOISE).log_prob(y[:, None]).sum(-1)


def log_density_parts(idata: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    stats = get_dataset(idata, "sample_stats")
    return stats["lp"].values[0], stats["log_q"].values[0], stats["log_weight"].values[0]


def test_groups_and_dimensions(model: Callable[..., None], data: Tensor) -> None:
    idata = to_arviz(
        model, fitted(model, data), data, num_samples=7, num_chains=3, dims={"y": ["pixel"]}, coords={"pixel": ["a", "b", "c"]}
    )
    predictive = {"prior", "prior_predictive", "posterior_predictive", "marginal_predictive"}
    inferred = {"posterior", "sample_stats", "log_likelihood", "observed_data", "truncated_posterior"}
    assert set(group_names(idata)) == predictive | inferred
    posterior = get_dataset(idata, "posterior")
    assert posterior["s"].dims == ("chain", "draw", "data", "s_dim_0")
    assert posterior["s"].shape == (3, 7, NUM_DATA, NUM_LATENTS)
    assert posterior["s"].dtype == np.int8
    assert posterior["s_index"].dims == ("chain", "draw", "data")
    assert posterior["s_index"].dtype == np.int32
    observed = get_dataset(idata, "observed_data")["y"]
    assert observed.dims == ("data", "pixel")
    assert observed["pixel"].values.tolist() == ["a", "b", "c"]
    np.testing.assert_array_equal(observed.values, data)
    truncated = get_dataset(idata, "truncated_posterior")
    assert truncated["states"].dims == ("data", "state", "latent")
    assert truncated["states"].dtype == np.int8
    assert truncated["latent"].values.tolist() == ["s[0]", "s[1]", "s[2]", "s[3]"]


def test_truncated_posterior_is_the_enumerated_one(model: Callable[..., None], data: Tensor, weight: Tensor) -> None:
    truncated = get_dataset(to_arviz(model, fitted(model, data), data, num_samples=2), "truncated_posterior")
    log_joint = exact_log_joint(data, weight)
    posterior = log_joint.softmax(1)
    np.testing.assert_allclose(truncated["free_energy"], log_joint.logsumexp(1), rtol=1e-10)
    np.testing.assert_allclose(truncated["activation_prob"], posterior @ STATES, atol=1e-10)
    np.testing.assert_allclose(truncated["effective_states"], torch.special.entr(posterior).sum(1).exp(), rtol=1e-10)
    code = (truncated["states"].values * np.array([8, 4, 2, 1])).sum(-1)
    np.testing.assert_allclose(truncated["weights"].values, np.take_along_axis(posterior.numpy(), code, 1), atol=1e-10)


def test_log_likelihood_sums_the_states_out(model: Callable[..., None], data: Tensor, weight: Tensor) -> None:
    likelihood = get_dataset(to_arviz(model, fitted(model, data), data, num_samples=4), "log_likelihood")["y"]
    assert likelihood.dims == ("chain", "draw", "data")
    expected = exact_log_joint(data, weight).logsumexp(1).numpy()
    np.testing.assert_allclose(likelihood.values, np.broadcast_to(expected, (1, 4, NUM_DATA)), rtol=1e-10)


@pytest.mark.nightly
def test_log_densities_of_the_draws(model: Callable[..., None], data: Tensor, weight: Tensor) -> None:
    idata = to_arviz(model, fitted(model, data, num_states=5), data, num_samples=20)
    drawn = torch.from_numpy(get_dataset(idata, "posterior")["s"].values[0]).double()
    prior = dist.Bernoulli(torch.tensor(RATE).double()).log_prob(drawn).sum((1, 2))
    expected = prior + dist.Normal(drawn @ weight.mT, NOISE).log_prob(data).sum((1, 2))
    lp, log_q, log_weight = log_density_parts(idata)
    np.testing.assert_allclose(lp, expected, rtol=1e-10)
    np.testing.assert_allclose(log_weight, lp - log_q)
    # On its support a truncated posterior is proportional to the joint.
    best = exact_log_joint(data, weight).topk(5).values.logsumexp(1).sum()
    np.testing.assert_allclose(log_weight, np.full(20, best), rtol=1e-10)


def test_lp_holds_what_lies_outside_the_plate(data: Tensor, weight: Tensor) -> None:
    def model(y: Tensor) -> None:
        pyro.sample("offset", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0), obs=torch.ones((), dtype=torch.float64))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()).expand([NUM_LATENTS]).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, NOISE).to_event(1), obs=y)

    idata = to_arviz(model, fitted(model, data), data, num_samples=3)
    evidence = exact_log_joint(data, weight).logsumexp(1).sum() - 0.5 - 0.5 * math.log(2 * math.pi)
    np.testing.assert_allclose(log_density_parts(idata)[2], np.full(3, evidence), rtol=1e-10)
    assert get_dataset(idata, "observed_data")["offset"].shape == ()


def test_draws_follow_the_weights_and_index_the_states(model: Callable[..., None], data: Tensor) -> None:
    num_samples = 20_000
    idata = to_arviz(model, fitted(model, data), data, num_samples=num_samples, num_predictive=0, seed=1)
    posterior, truncated = get_dataset(idata, "posterior"), get_dataset(idata, "truncated_posterior")
    expected = truncated["activation_prob"].values
    deviation = np.sqrt(expected * (1 - expected) / num_samples)
    # Six standard deviations, 24 entries: false alarm at a rate of 5e-8.
    assert (np.abs(posterior["s"].values[0].mean(0) - expected) <= 6 * deviation + 1e-12).all()
    index = posterior["s_index"].values[0]
    np.testing.assert_array_equal(truncated["states"].values[np.arange(NUM_DATA), index], posterior["s"].values[0])


def test_conditional_likelihood_only_on_request(model: Callable[..., None], data: Tensor, weight: Tensor) -> None:
    guide = fitted(model, data)
    idata = to_arviz(model, guide, data, num_samples=5, num_predictive=0, conditional_log_likelihood=True)
    drawn = torch.from_numpy(get_dataset(idata, "posterior")["s"].values[0]).double()
    likelihood = get_dataset(idata, "log_likelihood_conditional")["y"]
    assert likelihood.dims == ("chain", "draw", "data")
    np.testing.assert_allclose(likelihood.values[0], dist.Normal(drawn @ weight.mT, NOISE).log_prob(data).sum(-1), rtol=1e-10)


def test_likelihoods_without_draws_have_no_predictive_groups(data: Tensor) -> None:
    class Squares(dist.TorchDistribution):
        arg_constraints = {"loc": dist.constraints.real_vector}  # noqa: RUF012
        support = dist.constraints.real_vector

        def __init__(self, loc: Tensor) -> None:
            self.loc = loc
            super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=False)

        def log_prob(self, value: Tensor) -> Tensor:
            return -(value - self.loc).square().sum(-1)

    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()))
            pyro.sample("y", Squares(s.unsqueeze(-1).expand(*s.shape, y.shape[1])), obs=y)

    guide = fitted(model, data, num_states=2)
    with pytest.raises(NotImplementedError) as caught:
        to_arviz(model, guide, data, num_samples=2)
    assert any("num_predictive=0 leaves these groups out" in note for note in caught.value.__notes__)
    likelihood = get_dataset(to_arviz(model, guide, data, num_samples=2, num_predictive=0), "log_likelihood")["y"]
    prior = torch.tensor([[1 - RATE], [RATE]]).double().log()
    expected = (prior - torch.stack([data, data - 1]).square().sum(-1)).logsumexp(0)
    np.testing.assert_allclose(likelihood[0, 0], expected)


def test_constant_data_are_the_arguments_that_are_not_observed(data: Tensor) -> None:
    def model(y: Tensor, inputs: Tensor, size: Tensor, scale: float = 1.0) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()))
            pyro.sample("y", dist.Normal((s * inputs).unsqueeze(-1) + size, scale).to_event(1), obs=y)

    inputs, size = torch.arange(6.0).double(), torch.ones(3).double()
    guide = fitted(model, data, inputs, size, num_states=2)
    idata = to_arviz(model, guide, data, inputs, size, num_samples=2, num_predictive=1, dims={"size": ["pixel"]}, scale=2.0)
    constant = get_dataset(idata, "constant_data")
    assert set(constant.data_vars) == {"inputs", "size"}
    assert constant["inputs"].dims == ("data",)
    assert constant["size"].dims == ("pixel",)
    np.testing.assert_array_equal(constant["inputs"], inputs)
    with pytest.raises(ValueError, match="argument 'size' has 1 dimensions; dims names 2"):
        to_arviz(model, guide, data, inputs, size, num_samples=2, dims={"size": ["a", "b"]})


def test_predictive_draws_stay_within_the_budget(model: Callable[..., None], data: Tensor) -> None:
    idata = to_arviz(model, fitted(model, data), data, num_samples=9, memory_budget=300)
    # Arrays of 6 x 4 states are the largest: three draws of 4 bytes each.
    predictive = get_dataset(idata, "posterior_predictive")
    assert predictive.sizes["draw"] == 3
    assert predictive.attrs["omitted"] == "all but 3 of 9 draws per chain: over the memory budget"


def test_seed_decides_the_draws_and_spares_the_global_generator(model: Callable[..., None], data: Tensor) -> None:
    guide = fitted(model, data)
    state = torch.get_rng_state()
    first, second = (get_dataset(to_arviz(model, guide, data, num_samples=9, seed=5), "posterior") for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    np.testing.assert_array_equal(first["s_index"], second["s_index"])
    assert first.attrs["seed"] == 5
    to_arviz(model, guide, data, num_samples=9)
    assert not torch.equal(torch.get_rng_state(), state)


def test_large_arrays_are_left_out_with_a_hint(model: Callable[..., None], data: Tensor) -> None:
    idata = to_arviz(model, fitted(model, data), data, num_samples=5, memory_budget=100)
    posterior, truncated = get_dataset(idata, "posterior"), get_dataset(idata, "truncated_posterior")
    assert list(posterior) == ["s_index"]
    assert "s: over the memory budget" in posterior.attrs["omitted"]
    assert "states" not in truncated
    assert "guide.states()" in truncated.attrs["omitted"]
    assert "omitted" not in get_dataset(to_arviz(model, fitted(model, data), data, num_samples=5), "posterior").attrs


@pytest.mark.slow
def test_guides_trained_on_minibatches(model: Callable[..., None], data: Tensor, weight: Tensor) -> None:
    guide = fitted(model, data, batch_size=2, steps=40)
    with pytest.raises(ValueError, match="needs all 6 data points; the model subsampled 2"):
        to_arviz(model, guide, data, batch_size=2)
    truncated = get_dataset(to_arviz(model, guide, data, num_samples=2), "truncated_posterior")
    # Forty batches of two of six miss a data point with probability 6 * (2 / 3)**40 = 5e-7; its populations are exhaustive anyway.
    np.testing.assert_allclose(truncated["free_energy"], exact_log_joint(data, weight).logsumexp(1), rtol=1e-10)


def global_model(weight: Tensor) -> Callable[[Tensor], None]:
    def model(y: Tensor) -> None:
        shift = pyro.sample("shift", dist.Normal(torch.zeros(NUM_OBSERVED, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()).expand([NUM_LATENTS]).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT + shift, NOISE).to_event(1), obs=y)

    return model


def with_normal(model: Callable[..., None], *names: str) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=list(names)), init_scale=0.3))
    guide.append(AutoTruncated(model, num_states=16))
    return guide


@pytest.mark.slow
def test_global_latents_of_another_guide(data: Tensor, weight: Tensor) -> None:
    model = global_model(weight)
    guide = fitted(model, data, guide=with_normal(model, "shift"))
    idata = to_arviz(model, guide, data, num_samples=8, dims={"shift": ["pixel"]}, seed=0)
    shift = get_dataset(idata, "posterior")["shift"]
    assert shift.dims == ("chain", "draw", "pixel")
    assert len(np.unique(shift.values[0, :, 0])) == 8
    log_joint = torch.stack([exact_log_joint(data, weight, value) for value in torch.from_numpy(shift.values[0])])
    evidence = log_joint.logsumexp(-1)
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"].values[0], evidence, rtol=1e-6)
    truncated = get_dataset(idata, "truncated_posterior")
    np.testing.assert_allclose(truncated["free_energy"], evidence.mean(0), rtol=1e-6)
    np.testing.assert_allclose(truncated["activation_prob"], (log_joint.softmax(-1) @ STATES).mean(0), atol=1e-6)
    np.testing.assert_allclose(truncated["weights"].sum("state"), np.ones(NUM_DATA), rtol=1e-6)
    loc, scale = pyro.param("AutoGuideList.0.locs.shift"), pyro.param("AutoGuideList.0.scales.shift")
    value = torch.from_numpy(shift.values[0])
    expected = dist.Normal(0.0, 1.0).log_prob(value).sum(1) - dist.Normal(loc, scale).log_prob(value).sum(1) + evidence.sum(1)
    np.testing.assert_allclose(log_density_parts(idata)[2], expected.detach(), rtol=1e-6)
    assert truncated.attrs["point_estimates_only"] == 0


@pytest.mark.slow
def test_local_latents_of_another_guide(data: Tensor, weight: Tensor) -> None:
    def model(y: Tensor, dependent: bool = False) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()).expand([NUM_LATENTS]).to_event(1))
            shift = pyro.sample("shift", dist.Normal(s.sum(-1) if dependent else torch.zeros((), dtype=torch.float64), 1.0))
            pyro.sample("y", dist.Normal(s @ weight.mT + shift.unsqueeze(-1), NOISE).to_event(1), obs=y)

    guide = fitted(model, data, guide=with_normal(model, "shift"))
    idata = to_arviz(model, guide, data, num_samples=3)
    shift = get_dataset(idata, "posterior")["shift"]
    assert shift.dims == ("chain", "draw", "data")
    values = torch.from_numpy(shift.values[0])[..., None, None]
    expected = torch.stack([exact_log_joint(data, weight, value).logsumexp(1) for value in values])
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"].values[0], expected, rtol=1e-6)
    assert "log_likelihood" not in group_names(to_arviz(model, guide, data, num_samples=3, dependent=True))


def test_exact_conditional(data: Tensor, weight: Tensor) -> None:
    # y = s * slope + shift + noise with a scalar shift: given s, the shift is Gaussian, and y has a dense covariance.
    precision = 1 + NUM_OBSERVED / NOISE**2

    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()).expand([NUM_LATENTS]).to_event(1))
            shift = pyro.sample("shift", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
            pyro.sample("y", dist.Normal(s @ weight.mT + shift.unsqueeze(-1), NOISE).to_event(1), obs=y)

    def conditional(states: dict[str, Tensor], y: Tensor) -> None:
        mean = (y - states["s"].double() @ weight.mT).sum(-1) / NOISE**2 / precision
        pyro.sample("shift", dist.Normal(mean, precision**-0.5))

    guide = fitted(model, data, guide=AutoTruncated(model, 16, conditional=conditional))
    idata = to_arviz(model, guide, data, num_samples=3)
    covariance = NOISE**2 * torch.eye(NUM_OBSERVED, dtype=torch.float64) + 1
    prior = dist.Bernoulli(torch.tensor(RATE).double()).log_prob(STATES).sum(1)
    log_joint = prior + dist.MultivariateNormal(STATES @ weight.mT, covariance).log_prob(data[:, None])
    evidence = log_joint.logsumexp(1)
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"].values[0], evidence.expand(3, -1), rtol=1e-6)
    np.testing.assert_allclose(log_density_parts(idata)[2], np.full(3, evidence.sum()), rtol=1e-6)
    assert get_dataset(idata, "posterior")["shift"].dims == ("chain", "draw", "data")


@pytest.mark.nightly
def test_several_sites_in_nested_plates(generator: torch.Generator) -> None:
    y = torch.randn(5, 2, generator=generator)

    def model(y: Tensor) -> None:
        views = pyro.plate("view", 2, dim=-1)
        with pyro.plate("data", 5, dim=-2):
            kind = pyro.sample("kind", dist.Categorical(torch.tensor([0.2, 0.5, 0.3])))
            with views:
                count = pyro.sample("count", dist.Binomial(2, torch.tensor(0.4)))
                pyro.sample("y", dist.Normal(kind + count, 1.0), obs=y)

    guide = fitted(model, y, num_states=27)
    idata = to_arviz(model, guide, y, num_samples=4)
    posterior, truncated = get_dataset(idata, "posterior"), get_dataset(idata, "truncated_posterior")
    assert posterior["kind"].dims == ("chain", "draw", "data")
    assert posterior["count"].dims == ("chain", "draw", "data", "view")
    assert truncated["latent"].values.tolist() == ["kind", "count[0]", "count[1]"]
    assert get_dataset(idata, "observed_data")["y"].dims == ("data", "view")
    kind, count = torch.arange(3.0), torch.arange(3.0)
    one_view = dist.Binomial(2, torch.tensor(0.4)).log_prob(count) + dist.Normal(kind[:, None] + count, 1.0).log_prob(y[..., None, None])
    evidence = (one_view.logsumexp(-1).sum(1) + torch.tensor([0.2, 0.5, 0.3]).log()).logsumexp(1)
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"].values[0, 0], evidence, rtol=1e-5)


def test_two_data_plates(generator: torch.Generator) -> None:
    y = torch.randn(3, 4, generator=generator)

    def model(y: Tensor) -> None:
        with pyro.plate("row", 3, dim=-2), pyro.plate("column", 4, dim=-1):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE)))
            pyro.sample("y", dist.Normal(2 * s, NOISE), obs=y)

    idata = to_arviz(model, fitted(model, y, num_states=2), y, num_samples=5, coords={"row": ["a", "b", "c"]})
    log_joint = torch.stack([torch.tensor(p).log() + dist.Normal(mean, NOISE).log_prob(y) for p, mean in ((1 - RATE, 0.0), (RATE, 2.0))])
    truncated = get_dataset(idata, "truncated_posterior")
    assert truncated["free_energy"].dims == ("row", "column")
    assert truncated["row"].values.tolist() == ["a", "b", "c"]
    np.testing.assert_allclose(truncated["free_energy"], log_joint.logsumexp(0), rtol=1e-5)
    np.testing.assert_allclose(truncated["activation_prob"].sel(latent="s"), log_joint.softmax(0)[1], atol=1e-6)
    assert get_dataset(idata, "posterior")["s"].dims == ("chain", "draw", "row", "column")
    assert get_dataset(idata, "log_likelihood")["y"].dims == ("chain", "draw", "row", "column")


def test_no_data_plate(generator: torch.Generator) -> None:
    inputs = torch.randn(8, 3, generator=generator)
    y = torch.randn(8, generator=generator)

    def model(y: Tensor) -> None:
        chosen = pyro.sample("chosen", dist.Bernoulli(torch.tensor(0.5)).expand([3]).to_event(1))
        with pyro.plate("data", 8):
            pyro.sample("y", dist.Normal((inputs * chosen.unsqueeze(-2)).sum(-1), 1.0), obs=y)

    idata = to_arviz(model, fitted(model, y, num_states=8), y, num_samples=6)
    drawn = torch.from_numpy(get_dataset(idata, "posterior")["chosen"].values[0]).float()
    likelihood = get_dataset(idata, "log_likelihood")["y"]
    assert likelihood.dims == ("chain", "draw", "data")
    np.testing.assert_allclose(likelihood.values[0], dist.Normal(drawn @ inputs.mT, 1.0).log_prob(y), rtol=1e-5)
    assert "marginal_predictive" not in group_names(idata)
    assert idata.posterior.attrs["point_estimates_only"] == 0
    assert get_dataset(idata, "posterior")["chosen"].dims == ("chain", "draw", "chosen_dim_0")
    assert get_dataset(idata, "posterior")["chosen_index"].dims == ("chain", "draw")
    truncated = get_dataset(idata, "truncated_posterior")
    assert truncated["weights"].dims == ("state",)
    states = torch.tensor(list(itertools.product((0.0, 1.0), repeat=3)))
    log_joint = dist.Normal(states @ inputs.mT, 1.0).log_prob(y).sum(1) - 3 * math.log(2)
    np.testing.assert_allclose(truncated["free_energy"], log_joint.logsumexp(0), rtol=1e-5)
    np.testing.assert_allclose(truncated["activation_prob"], log_joint.softmax(0) @ states, atol=1e-5)


def test_training_records(model: Callable[..., None], data: Tensor) -> None:
    guide = fitted(model, data)
    training = get_dataset(to_arviz(model, guide, data, num_samples=1, training={"loss": [3.0, 2.0, 1.0]}), "training")
    assert training["loss"].dims == ("restart", "step")
    np.testing.assert_array_equal(training["loss"], [[3.0, 2.0, 1.0]])
    for wrong in ({"loss": np.zeros((1, 1, 1))}, {"loss": [3.0, 2.0], "gap": torch.ones(2, 2)}):
        with pytest.raises(ValueError, match="must all have the same dimensions"):
            to_arviz(model, guide, data, num_samples=1, training=wrong)


def test_refuses_names_of_dimensions_that_repeat(model: Callable[..., None], data: Tensor) -> None:
    guide = fitted(model, data[:NUM_OBSERVED])
    for name in ("data", "draw"):
        with pytest.raises(ValueError, match="dims must give all dimensions of 'y' different names; got"):
            to_arviz(model, guide, data[:NUM_OBSERVED], dims={"y": [name]}, num_samples=NUM_OBSERVED)


def test_refuses_what_does_not_fit(model: Callable[..., None], data: Tensor) -> None:
    guide = fitted(model, data)
    with pytest.raises(ValueError, match="num_samples must be a positive integer; got 0"):
        to_arviz(model, guide, data, num_samples=0)
    with pytest.raises(ValueError, match=r"dims names the sites \['z'\]"):
        to_arviz(model, guide, data, num_samples=1, dims={"z": ["a"]})
    with pytest.raises(ValueError, match="has 1 event dimensions; dims names 2"):
        to_arviz(model, guide, data, num_samples=1, dims={"s": ["a", "b"]})
    with pytest.raises(ValueError, match=r"coords\['data'\] has 2 entries"):
        to_arviz(model, guide, data, num_samples=1, coords={"data": [1, 2]})
    with pytest.raises(ValueError, match=r"coords names the dimensions \['pixels'\]"):
        to_arviz(model, guide, data, num_samples=1, coords={"pixels": [1, 2]})
    with pytest.raises(TypeError, match=r"training must hold records by name.*record of what fit returned; got list"):
        to_arviz(model, guide, data, num_samples=1, training=[1.0])
    with pytest.raises(TypeError, match="checks must be what check_truncation returned; got dict"):
        to_arviz(model, guide, data, num_samples=1, checks={})
    with pytest.raises(TypeError, match=r"model must come first, to_arviz\(model, guide, \*data\); got a guide, AutoTruncated,"):
        to_arviz(guide, model, data)
    with pytest.raises(TypeError, match=r"guide must be a Pyro guide: .* got NoneType"):
        to_arviz(model, None, data)
    with pytest.raises(ValueError, match="num_chains must be 1 for several guides, each of which is a chain; got 4"):
        to_arviz([model], [guide], data, num_chains=4)


@pytest.mark.slow
def test_netcdf_round_trip(model: Callable[..., None], data: Tensor, tmp_path: Path) -> None:
    idata = to_arviz(model, fitted(model, data), data, num_samples=5, seed=1, training={"loss": [2.0, 1.0]})
    idata.to_netcdf(tmp_path / "fit.nc")
    loaded = az.from_netcdf(tmp_path / "fit.nc")
    for name in group_names(idata):
        xr.testing.assert_equal(get_dataset(loaded, name).load(), get_dataset(idata, name))
    assert get_dataset(loaded, "posterior")["s"].dtype == np.int8


@pytest.mark.slow
def test_arviz_reads_it(data: Tensor, weight: Tensor) -> None:
    model = global_model(weight)
    idata = to_arviz(model, fitted(model, data, guide=with_normal(model, "shift")), data, num_samples=60, seed=0)
    summary = az.summary(idata, var_names=["shift"], kind="stats")
    expected = get_dataset(idata, "posterior")["shift"].mean(("chain", "draw")).values
    # The table is rounded: to three digits in 0.2x, to two significant figures of the error in 1.x.
    np.testing.assert_allclose(summary["mean"].astype(float), expected, atol=0.051)
    with quiet():  # sixty draws are few
        elpd = az.loo(idata, reff=1.0)
    likelihood = get_dataset(idata, "log_likelihood")["y"].values[0]
    in_sample = (torch.from_numpy(likelihood).logsumexp(0) - math.log(60)).sum().item()
    assert elpd.n_data_points == NUM_DATA
    # Leaving a data point out can only lower its expected predictive density here, by little: p_loo is positive.
    assert in_sample - 5 < (elpd.elpd_loo if hasattr(elpd, "elpd_loo") else elpd.elpd) < in_sample


@pytest.mark.slow
def test_guide_lists_trained_on_minibatches(data: Tensor, weight: Tensor) -> None:
    def model(y: Tensor, batch_size: int | None = None) -> None:
        shift = pyro.sample("shift", dist.Normal(torch.zeros(NUM_OBSERVED, dtype=torch.float64), 1.0).to_event(1))
        with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
            own = pyro.sample("own", dist.Normal(torch.zeros((), dtype=torch.float64), 1.0))
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(RATE).double()).expand([NUM_LATENTS]).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT + shift + own.unsqueeze(-1), NOISE).to_event(1), obs=y[rows])

    guide = fitted(model, data, batch_size=2, steps=3, guide=with_normal(model, "shift", "own"))
    with pytest.raises(ValueError, match="needs all 6 data points; the model subsampled 2"):
        to_arviz(model, guide, data, batch_size=2)
    idata = to_arviz(model, guide, data, num_samples=4, num_predictive=2, seed=0)
    posterior = get_dataset(idata, "posterior")
    assert posterior["own"].dims == ("chain", "draw", "data")
    shift, own = (torch.from_numpy(posterior[name].values[0]) for name in ("shift", "own"))
    moved = [exact_log_joint(data, weight, (shift[i] + own[i][:, None])[:, None]).logsumexp(1) for i in range(4)]
    np.testing.assert_allclose(get_dataset(idata, "log_likelihood")["y"].values[0], torch.stack(moved), rtol=1e-6)
    # Training goes on with minibatches.
    assert poutine.trace(guide).get_trace(data, batch_size=2).nodes["own"]["value"].shape == (2,)


@pytest.mark.slow
def test_observed_counts_are_integers_and_plotted_as_such():
    def model(y: Tensor, seen: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Poisson(1.0 + z), obs=y)
            # Constant in the draws: a density of these floats cannot be drawn.
            pyro.sample("seen", dist.Bernoulli(0.999 * torch.ones(len(y))), obs=seen)

    data = torch.tensor([0.0, 2.0, 1.0]), torch.ones(3)
    guide = AutoTruncated(model, 2)
    idata = convert(model, guide, *data, num_samples=10, seed=0)
    for group in ("observed_data", "posterior_predictive", "prior_predictive", "marginal_predictive"):
        for name in ("y", "seen"):
            assert get_dataset(idata, group)[name].dtype == np.int32
    if hasattr(az, "plot_ppc"):  # ArviZ 1.x calls it otherwise.
        az.plot_ppc(idata, num_pp_samples=5)


def test_counts_of_any_size_keep_their_values() -> None:
    """Beyond 32 bits in the data, and beyond ``max_count`` in draws from the prior."""

    def model(n: Tensor) -> None:
        with pyro.plate("rows", len(n)):
            k = pyro.sample("k", dist.Poisson(torch.tensor(125.0)))
            pyro.sample("n", dist.Poisson(1e8 * k.double()), obs=n)

    n = torch.tensor([11_000_000_001.0, 12_000_000_123.0], dtype=torch.float64)
    idata = to_arviz(model, AutoTruncated(model, max_count=126).infer(n), n, num_samples=100)
    assert idata["observed_data"]["n"].values.tolist() == n.tolist()
    assert abs(idata["posterior_predictive"]["n"].mean(("chain", "draw")) / n.numpy() - 1).max() < 1e-3
    seen = torch.tensor([True, False])

    def masked(n: Tensor) -> None:
        with pyro.plate("rows", 2):
            z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.5)))
            pyro.sample("n", dist.Binomial(2**31, (0.3 + 0.4 * z).unsqueeze(-1) * torch.ones(2)).mask(seen).to_event(1), obs=n)

    wide = torch.tensor([[2**30 + 1, 0], [2**29 + 3, 0]])
    observed = get_dataset(to_arviz(masked, AutoTruncated(masked).infer(wide), wide, num_samples=2), "observed_data")["n"].values
    assert observed[:, 0].tolist() == wide[:, 0].tolist()
    prior = idata["prior"]["k"].values
    assert abs(prior.mean() - 125) < 4
    assert prior.max() > 127


def test_data_that_a_prior_draw_makes_impossible_convert(generator):
    """The animals counted cannot be more than there are: most draws of their number from the prior do not allow the data."""

    def model(y):
        with pyro.plate("sites", len(y)):
            number = pyro.sample("number", dist.Poisson(3.0))
            pyro.sample("y", dist.Binomial(number.unsqueeze(-1), torch.tensor(0.4)).to_event(1), obs=y)

    y = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 2.0], [0.0, 0.0, 0.0]])
    guide = AutoTruncated(model, num_states=21, max_count=20)
    number = torch.arange(21.0)
    possible = dist.Binomial(number[:, None, None], torch.tensor(0.4), validate_args=False).log_prob(y)
    possible = torch.where(y <= number[:, None, None], possible, -torch.inf).sum(-1)
    expected = (possible + dist.Poisson(3.0).log_prob(number)[:, None]).logsumexp(0)
    for seed in range(3):
        pyro.set_rng_seed(seed)
        guide.refresh_(y)
        idata = to_arviz(model, guide, y, num_samples=4)
        found = torch.tensor(idata.log_likelihood["y"].values).reshape(-1, 3)
        torch.testing.assert_close(found, expected.double().expand_as(found), rtol=0, atol=1e-4)


@pytest.mark.slow
def test_classes_that_are_partly_observed_are_plotted():
    def model(y: Tensor, classes: Tensor, known: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)), obs=classes, obs_mask=known)
            pyro.sample("y", dist.Normal(1.0 * z, 1.0), obs=y)

    data = torch.randn(4), torch.tensor([0, 2, 0, 1]), torch.tensor([True, True, False, True])
    guide = AutoTruncated(model, 3)
    idata = convert(model, guide, *data, num_samples=10, seed=0)
    for group in ("observed_data", "posterior_predictive"):
        assert get_dataset(idata, group)["z_observed"].dtype.kind == "f"
    if hasattr(az, "plot_ppc"):  # ArviZ 1.x calls it otherwise.
        az.plot_ppc(idata, num_pp_samples=5)


def test_counts_are_integers_where_masks_hide_whole_data_points():
    def model(y: Tensor, seen: Tensor) -> None:
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            with poutine.mask(mask=seen):
                pyro.sample("y", dist.Poisson(1.0 + z), obs=y)

    guide = AutoTruncated(model, 2)
    idata = convert(model, guide, torch.tensor([0.0, 2.0, 1.0]), torch.tensor([True, False, True]), num_samples=10, seed=0)
    for group in ("observed_data", "posterior_predictive"):
        assert get_dataset(idata, group)["y"].dtype == np.int32
    assert get_dataset(idata, "observed_data")["y"].values.tolist() == [0, 1]
    assert get_dataset(idata, "log_likelihood")["y"].dtype.kind == "f"


@pytest.mark.slow
def test_a_hidden_scalar_observation_is_missing() -> None:
    def model(y: Tensor) -> None:
        z = pyro.sample("z", dist.Bernoulli(0.3))
        with poutine.mask(mask=torch.tensor(False)):
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)
        pyro.sample("x", dist.Normal(z, 1.0), obs=2 * y)

    y = torch.tensor(0.5)
    guide = AutoTruncated(model, 2)
    Truncated_ELBO(ExhaustiveSearch()).loss(model, guide, y)
    observed = get_dataset(convert(model, guide, y, num_samples=5, num_predictive=2), "observed_data")
    assert np.isnan(observed["y"]).all()
    assert observed["x"] == 1.0
