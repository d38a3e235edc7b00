"""Observed values that a likelihood does not allow are refused by name, as stock Pyro refuses them; what latents decide is not."""

from __future__ import annotations

import copy
import pickle
import re
import warnings

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated import models as library
from pyro_truncated.distributions import LinearSuperposition, NoisyOrSuperposition
from pyro_truncated.models import PoissonMixture

IMPOSSIBLE = {
    "Bernoulli": (lambda s: dist.Bernoulli(0.2 + 0.3 * s), 2.0),
    "Bernoulli of a fraction": (lambda s: dist.Bernoulli(0.2 + 0.3 * s), 0.3),
    "Poisson": (lambda s: dist.Poisson(1 + s), 1.5),
    "Exponential": (lambda s: dist.Exponential(1 + s), -4.0),
    "Geometric": (lambda s: dist.Geometric(0.2 + 0.3 * s), -3.0),
    "NegativeBinomial": (lambda s: dist.NegativeBinomial(2.0, 0.2 + 0.3 * s), 0.5),
    "Binomial": (lambda s: dist.Binomial(3, torch.full(s.shape, 0.4)), 4.0),
    "Binomial of a latent probability": (lambda s: dist.Binomial(3, 0.2 + 0.3 * s), 4.0),
    "Categorical": (lambda s: dist.Categorical(torch.ones(3)), 5.0),
    "Beta": (lambda s: dist.Beta(2 + s, 2.0), 1.5),
    "missing": (lambda s: dist.Normal(s, 1.0), torch.nan),
}


def model_of(likelihood, batch_size=None):
    def model(y):
        with pyro.plate("data", len(y), subsample_size=batch_size) as index:
            s = pyro.sample("s", dist.Bernoulli(torch.full((len(index),), 0.3)))
            pyro.sample("y", likelihood(s), obs=y[index])

    return model


def svi_of(model, **options):
    return SVI(model, AutoTruncated(model, 2, **options), Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))


def enumerated(model, *args):
    return TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda *args: None, *args)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_what_stock_pyro_refuses_is_refused_by_name(name):
    likelihood, value = IMPOSSIBLE[name]
    fine = 0.5 if name == "Beta" else 1.0
    model, y = model_of(likelihood), torch.tensor([fine, fine, fine, value])
    with pytest.raises(ValueError, match="within the support"):
        enumerated(model, y)
    svi = svi_of(model)
    shown = str(torch.tensor(value).item()).replace(".", r"\.")
    for use in (svi.step, svi.evaluate_loss, svi.guide, svi.guide.refresh_):
        with pytest.raises(ValueError, match=rf"site 'y' observes {shown} at data point 3, outside the support of its distribution"):
            use(y)


def test_infinite_observations_are_refused():
    with pytest.raises(ValueError, match="site 'y' observes -inf at data point 2"):
        svi_of(model_of(lambda s: dist.Normal(s, 1.0))).step(torch.tensor([0.0, 1.0, -torch.inf]))


def test_the_point_and_the_entry_are_those_of_all_data_in_minibatches():
    y = torch.zeros(12, 3)
    y[7, 2] = 0.5
    svi = svi_of(model_of(lambda s: dist.Poisson((1 + s).unsqueeze(-1).expand(*s.shape, 3)).to_event(1), 4))
    steps = (svi.step(y) for _ in range(30))
    with pytest.raises(ValueError, match=r"site 'y' observes 0\.5 at data point 7, entry \(2,\)"):
        sum(steps)


def test_data_that_change_in_place_are_checked_again():
    y = torch.ones(4)
    svi = svi_of(model_of(lambda s: dist.Poisson(1 + s)))
    svi.step(y)
    y[1] = 1.5
    with pytest.raises(ValueError, match=r"observes 1\.5 at data point 1"):
        svi.step(y)


def test_observations_outside_the_plate_are_checked():
    def model(y, z):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((len(y),), 0.3)))
            pyro.sample("y", dist.Normal(s, 1.0), obs=y)
        pyro.sample("z", dist.Poisson(torch.ones(2)).to_event(1), obs=z)

    with pytest.raises(ValueError, match=r"site 'z' observes -1\.0 at entry \(1,\)"):
        svi_of(model).step(torch.randn(4), torch.tensor([1.0, -1.0]))


@pytest.mark.parametrize("place", ["handler", "inside", "outside"])
def test_masked_entries_are_no_data(place):
    seen = torch.ones(5, 3, dtype=torch.bool)
    seen[2] = False
    y = torch.zeros(5, 3).masked_fill(~seen, 1.5)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((len(y),), 0.3)))
            rate = (1 + s).unsqueeze(-1).expand(*s.shape, 3)
            fn = dist.Poisson(rate).mask(seen).to_event(1) if place == "inside" else dist.Poisson(rate).to_event(1)
            fn = fn.mask(seen[:, 0]) if place == "outside" else fn
            with poutine.mask(mask=seen[:, 0] if place == "handler" else True):
                pyro.sample("y", fn, obs=y)

    possible = y.masked_fill(~seen, 0.0)
    assert svi_of(model).step(y) == pytest.approx(enumerated(model, possible), abs=1e-4)
    y[3, 1] = 1.5
    with pytest.raises(ValueError, match=r"observes 1\.5 at data point 3, entry \(1,\)"):
        svi_of(model).step(y)


def test_missing_entries_are_allowed_where_the_likelihood_allows_them():
    weight = torch.rand(3, 4)

    def model(y, binary):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
            pyro.sample("y", LinearSuperposition(s, weight, 1.0), obs=y)
            pyro.sample("b", NoisyOrSuperposition(s, weight, 0.1), obs=binary)

    y, binary = torch.randn(6, 3), torch.zeros(6, 3)
    y[1, 2] = binary[0, 0] = torch.nan
    svi = SVI(model, AutoTruncated(model, 16), Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))
    svi.step(y, binary)
    binary[4, 1] = 0.5
    with pytest.raises(ValueError, match=r"site 'b' observes 0\.5 at data point 4, entry \(1,\)"):
        svi.step(y, binary)
    binary[4, 1], y[2, 0] = 0.0, torch.inf
    with pytest.raises(ValueError, match=r"site 'y' observes inf at data point 2, entry \(0,\)"):
        svi.step(y, binary)


def test_supports_that_latents_decide_are_left_to_the_posterior():
    # A data point above its upper end has probability zero under this state alone.
    model = model_of(lambda s: dist.Uniform(torch.zeros(()), 1 + 2 * s))
    y = torch.tensor([0.5, 2.5, 0.2])
    expected = -(torch.tensor([0.7 + 0.1, 0.1, 0.7 + 0.1]).log().sum())
    for seed in range(5):
        pyro.set_rng_seed(seed)
        assert svi_of(model).step(y) == pytest.approx(float(expected), abs=1e-5)


def test_observations_computed_from_latents_are_left_to_the_posterior():
    def model(y):
        with pyro.plate("data", len(y)) as index:
            s = pyro.sample("s", dist.Bernoulli(torch.full((len(y),), 0.3)))
            pyro.sample("rest", dist.Normal(torch.zeros(()), 1.0).mask(True), obs=torch.where(s > 0, y[index], y[index] + 1))

    svi_of(model).step(torch.randn(4))


def test_a_distribution_without_validation_is_left_alone():
    y = torch.tensor([1.0, 1.5])
    svi_of(model_of(lambda s: dist.Poisson(1 + s, validate_args=False))).step(y)
    with pyro.validation_enabled(False):
        svi_of(model_of(lambda s: dist.Poisson(1 + s))).step(y)


def test_beside_other_guides_data_are_checked_too():
    def model(y):
        rate = pyro.sample("rate", dist.LogNormal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((len(y),), 0.3)))
            pyro.sample("y", dist.Poisson(rate * (1 + s)), obs=y)

    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["rate"])))
    guide.append(AutoTruncated(model, 2))
    svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))
    with pytest.raises(ValueError, match=r"observes 1\.5 at data point 1"):
        svi.step(torch.tensor([1.0, 1.5]))


class Counting(dist.Poisson):
    checks = 0

    @property
    def support(self):
        Counting.checks += 1
        return dist.Poisson.support


@pytest.mark.parametrize("copied", [lambda y: y, torch.clone], ids=["argument", "computed"])
def test_the_same_data_are_checked_once(copied):
    y = torch.ones(4)
    own = copied(y)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((len(y),), 0.3)))
            pyro.sample("y", Counting(1 + s), obs=own)

    svi = svi_of(model)
    svi.step(y)
    Counting.checks = 0
    for _ in range(3):
        svi.evaluate_loss(y if own is y else y.clone())
    assert Counting.checks == 0


def test_copies_of_a_guide_check():
    svi = svi_of(model_of(lambda s: dist.Poisson(1 + s)))
    svi.step(torch.ones(3))
    for guide in (copy.deepcopy(svi.guide), pickle.loads(pickle.dumps(svi.guide))):
        guide._model = svi.guide._model
        with pytest.raises(ValueError, match=r"observes 1\.5"):
            guide(torch.tensor([1.0, 1.0, 1.5]))


def test_poisson_mixtures_of_fractions():
    y = torch.poisson(torch.full((20, 3), 4.0))
    y[4, 1] = 1.5
    model = PoissonMixture(3, 2)
    with pytest.raises(ValueError, match=r"observes 1\.5 at data point 4, entry \(1,\)"):
        svi_of(model).step(y)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_models_that_cannot_be_followed(monkeypatch, batch_size):
    def fails(*args):
        raise RuntimeError("no such code")

    monkeypatch.setattr("pyro_truncated.program.dependencies.FollowLatents", fails)
    values = torch.full((4,), 4.0)
    with pytest.raises(ValueError, match=r"site 'y' observes 4.* at data point"):
        svi_of(model_of(IMPOSSIBLE["Binomial of a latent probability"][0], batch_size)).step(values + torch.arange(4) / 8)


REFUSED = {"PoissonMixture": [1.5, -1.0, torch.nan, torch.inf], "NoisyOr": [2.0, 0.3, -1.0, torch.inf]}
REFUSED |= {"GaussianMixture": [torch.nan, torch.inf, -torch.inf], "BinaryVAE": [torch.inf, -torch.inf]}
REFUSED |= {key: [torch.inf] for key in ["BinarySparseCoding", "SpikeSlabSparseCoding", "MaximalCauses", "DiscreteSparseCoding"]}


@pytest.mark.parametrize(("family", "value"), [(family, value) for family, values in REFUSED.items() for value in values])
def test_initialize_refuses_what_training_refuses(family, value):
    y = torch.ones(5, 3)
    y[3, 1] = value
    trained, model = (getattr(library, family)(3, 2) for _ in range(2))
    with pytest.raises(ValueError, match=r"site 'y' observes .* at data point 3, entry \(1,\), outside the support") as training:
        SVI(trained, AutoTruncated(trained, 2), Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch())).step(y)
    before, stored, seed = copy.deepcopy(model.state_dict()), set(pyro.get_param_store()), torch.get_rng_state()
    with pytest.raises(ValueError, match=re.escape(str(training.value))):
        model.initialize(y)
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert set(pyro.get_param_store()) == stored
    assert torch.equal(torch.get_rng_state(), seed)


def test_missing_values_do_not_depend_on_latents_of_programs_that_cannot_be_followed():
    y = torch.ones(5, 3)
    y[:, 1] = torch.nan
    with pytest.raises(ValueError, match=r"site 'y' observes nan at data point 0, entry \(1,\), outside the support"):
        library.CategoricalMixture(3, 2, 2).initialize(y)


@pytest.mark.parametrize("form", ["normal", "normal vectors", "correlated"])
def test_distributions_of_pyro_that_take_nan_have_it(form):
    nan, weight = torch.nan, torch.tensor([[0.0, 1.0], [1.0, 1.0], [2.0, -1.0]])
    y = torch.tensor([[nan, 0.3], [0.1, 0.2], [nan, nan], [1.0, nan]])
    square = torch.tensor([[1.0, 0.5], [0.5, 1.0]])

    def likelihood(mean, seen):
        if form == "correlated":
            return dist.MultivariateNormal(mean[..., seen], square[seen][:, seen])
        return dist.Normal(mean[..., seen], 1.0).to_event(1)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
            if form == "correlated":
                pyro.sample("y", dist.NanMaskedMultivariateNormal(s @ weight, square), obs=y)
            elif form == "normal vectors":
                pyro.sample("y", dist.NanMaskedNormal(s @ weight, 1.0).to_event(1), obs=y)
            else:
                for column in range(2):
                    pyro.sample(f"y{column}", dist.NanMaskedNormal(s @ weight[:, column], 1.0), obs=y[:, column])

    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 3)
    prior = dist.Bernoulli(0.3).log_prob(states).sum(-1)
    expected = sum(
        float((prior + likelihood(states @ weight, ~row.isnan()).log_prob(row[~row.isnan()])).logsumexp(0)) for row in y[[0, 1, 3]]
    )
    assert Truncated_ELBO().loss(model, AutoTruncated(model, num_states=8), y) == pytest.approx(-expected, rel=1e-5)


@pytest.mark.parametrize("columns", [1, 2, 4])
@pytest.mark.parametrize(
    "model",
    [
        library.GaussianMixture(3, 2),
        library.GaussianMixture(3, 2, covariance="diag"),
        library.BinarySparseCoding(3, 2),
        library.SpikeSlabSparseCoding(3, 2),
        library.NoisyOr(3, 2),
        PoissonMixture(3, 2),
        library.CategoricalMixture(3, 2, 2),
    ],
    ids=lambda model: f"{type(model).__name__}-{getattr(model, 'covariance', '')}",
)
def test_new_data_with_other_columns_are_refused(model, columns):
    # Kernels of mixtures would read beyond a row, and single columns stand for all.
    y = (torch.rand(12, 4) < 0.5).float()
    guide = AutoTruncated(model, 2)
    svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))
    with pytest.raises(ValueError, match=rf"site 'y' observes values of shape \(12, {columns}\), but an event of .* has shape \(3,\)"):
        AutoTruncated(model, 2).infer(y[:, :columns])
    svi.step(y[:, :3])
    for call in (guide.infer, svi.step):
        with pytest.raises(ValueError, match=rf"site 'y' observes values of shape \(12, {columns}\), but an event of .* has shape \(3,\)"):
            call(y[:, :columns])


class Series(dist.TorchDistribution):
    """Independent steps, of which it counts one."""

    arg_constraints, support = {}, dist.constraints.real_vector

    def __init__(self, mean):
        self.loc = mean
        super().__init__(mean.shape, torch.Size([1]), validate_args=False)

    def log_prob(self, value):
        return dist.Normal(self.loc.unsqueeze(-1), 1.0).log_prob(value).sum(-1)

    def expand(self, batch_shape, _instance=None):
        return Series(self.loc.expand(batch_shape))


def test_a_distribution_of_ones_own_takes_events_of_any_size():
    def model(y):
        with pyro.plate("data", len(y)):
            pyro.sample("y", Series(pyro.sample("z", dist.Bernoulli(0.4))), obs=y)

    guide = AutoTruncated(model)
    for size in (3, 5):
        y = torch.randn(4, size)
        each = torch.stack([dist.Normal(mean, 1.0).log_prob(y).sum(-1) for mean in range(2)], 1)
        expected = (each + torch.tensor([0.6, 0.4]).log()).logsumexp(1).sum()
        with warnings.catch_warnings(action="ignore"):
            assert -Truncated_ELBO().loss(model, guide, y) == pytest.approx(float(expected), rel=1e-5)


def test_hidden_markov_models_of_pyro_observe_series_of_any_length():
    y = torch.randn(4, 7, 1)

    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.4))
            likelihood = dist.DiscreteHMM(torch.zeros(2), torch.zeros(2, 2), dist.Normal(torch.stack([z, z + 1], -1).unsqueeze(-2), 1.0))
            pyro.sample("y", likelihood, obs=y.squeeze(-1))

    each = torch.stack([dist.Normal(mean, 1.0).log_prob(y.squeeze(-1)) for mean in range(3)])
    mixed = torch.stack([(each[k : k + 2].logsumexp(0) - torch.tensor(2.0).log()).sum(-1) for k in (0, 1)])
    expected = (mixed + torch.tensor([0.6, 0.4]).log().unsqueeze(1)).logsumexp(0).sum()
    assert -Truncated_ELBO().loss(model, AutoTruncated(model), y) == pytest.approx(float(expected), rel=1e-5)
