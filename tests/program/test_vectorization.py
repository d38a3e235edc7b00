"""Models that do not take many states at once are scored one by one, or by vmap, and equal brute force; sequential plates."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoMultivariateNormal, AutoNormal
from pyro.nn import PyroModule
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import (
    AutoTruncated,
    EvolutionarySearch,
    ExhaustiveSearch,
    Truncated_ELBO,
    VectorizationWarning,
    check_truncation,
    to_arviz,
)
from pyro_truncated.distributions import MaximumSuperposition
from pyro_truncated.program.call import Call

H, N = 4, 7
X = torch.linspace(-2.0, 2.0, N * H, dtype=torch.float64).sin().reshape(N, H)
Y = torch.linspace(-1.0, 2.0, N, dtype=torch.float64).cos() * 2


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def weight() -> Tensor:
    return pyro.param("weight", lambda: torch.linspace(-1.0, 1.0, H))


def bits(number: int = H) -> list[Tensor]:
    return [torch.tensor(b, dtype=torch.float64) for b in itertools.product((0.0, 1.0), repeat=number)]


def classes(number: int) -> list[Tensor]:
    return list(torch.arange(number))


def selection(y):
    gamma = pyro.sample("gamma", dist.Bernoulli(0.3).expand([H]).to_event(1))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(X @ (gamma * weight()), 1.0), obs=y)


def columns(y):
    with pyro.plate("data", N):
        s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
        loc = s[:, 0] - s[:, 1] * weight()[0] + s[:, 2] * s[:, 3]
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def reduction(y):
    s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal((s * weight()).sum(0), 1.0), obs=y)


def branch(y):
    z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
    loc = weight()[0] if z == 1 else 2 * weight()[1]
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def loop(y):
    """A number of steps that Python takes from a latent."""
    k = pyro.sample("k", dist.Binomial(3, 0.4))
    loc = torch.zeros(())
    for step in range(int(k)):
        loc = loc + weight()[step]
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


def sequence(y):
    for i in pyro.plate("data", 3):
        z = pyro.sample(f"z_{i}", dist.Categorical(torch.tensor([0.2, 0.3, 0.5])))
        pyro.sample(f"y_{i}", dist.Normal(weight()[z], 1.0), obs=y[i])


def sequence_in_data(y):
    """A sequential plate within a vectorised one: a joint state of each data point."""
    with pyro.plate("data", N):
        total = torch.zeros(())
        for i in pyro.plate("steps", 2):
            total = total + weight()[i] * pyro.sample(f"z_{i}", dist.Bernoulli(0.3))
        pyro.sample("y", dist.Normal(total, 1.0), obs=y)


def chain(y):
    """Steps of a Markov chain that leave and enter a data plate."""
    z = torch.zeros(())
    data = pyro.plate("data", N)
    for t in pyro.markov(range(3)):
        with data:
            z = pyro.sample(f"z_{t}", dist.Bernoulli(0.2 + 0.5 * z))
            pyro.sample(f"y_{t}", dist.Normal(weight()[0] + weight()[3] * z, 1.0), obs=y)


def rare_branch(y):
    """What Python does is the same for most states, so that a few of them tell nothing."""
    s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
    loc = weight()[0] + (weight()[1] if bool((s.sum(-1) > H - 1).any()) else weight()[2]) * s[..., 0]
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(loc, 1.0), obs=y)


# Model, values of its sites, whether they belong to data points, how it is scored, and what the warning says is fast.
CASES = (
    (selection, {"gamma": bits()}, False, "vmap", r"\(X \* coefficients\).sum\(-1\)"),
    (reduction, {"s": bits()}, False, "vmap", r"s.sum\(-1\)"),
    (branch, {"z": classes(3)}, False, "singly", "torch.where"),
    (loop, {"k": list(torch.arange(4.0, dtype=torch.float64))}, False, "singly", "Vindex"),
    (rare_branch, {"s": bits()}, False, "singly", "torch.where|from the right"),
    (columns, {"s": bits()}, True, "together", None),
    (sequence, {f"z_{i}": classes(3) for i in range(3)}, False, "together", None),
    (sequence_in_data, {f"z_{i}": bits(1) for i in range(2)}, True, "together", None),
    (chain, {f"z_{t}": bits(1) for t in range(3)}, True, "together", None),
)
names = ("model", "sites", "local", "scoring", "idiom")
cases = pytest.mark.parametrize(names, CASES, ids=[case[0].__name__ for case in CASES])
slow_cases = pytest.mark.parametrize(names, CASES[:5], ids=[case[0].__name__ for case in CASES[:5]])


def table(model: Callable, sites: dict[str, list[Tensor]], local: bool) -> Tensor:
    """Log joints of all states ``(T,)``, or ``(T, N)`` if every data point has its own, by plain runs of the model."""
    rows = []
    for values in itertools.product(*sites.values()):
        held = dict(zip(sites, values, strict=True))
        if local:
            held = {name: value.expand(N, *value.shape) if name == "s" else value.expand(N) for name, value in held.items()}
        trace = poutine.trace(poutine.condition(model, data=held)).get_trace(Y)
        trace.compute_log_prob()
        terms = [node["log_prob"] for node in trace.nodes.values() if node["type"] == "sample" and not node["name"].startswith("data")]
        rows.append(sum(terms) if local else sum(term.sum() for term in terms))
    return torch.stack(rows)


def evaluated(elbo, model, guide, *args) -> tuple[float, Tensor]:
    loss = elbo.loss_and_grads(model, guide, *args)
    parameter = pyro.get_param_store()._params["weight"]
    gradient, parameter.grad = parameter.grad.clone(), None
    return loss, gradient


def quietly(guide: AutoTruncated, *args) -> AutoTruncated:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VectorizationWarning)
        guide.setup(*args)
    return guide


@pytest.mark.nightly(keep=4)
@pytest.mark.slow
@cases
def test_losses_gradients_and_weights_equal_brute_force(model, sites, local, scoring, idiom):
    joint = table(model, sites, local)
    exact = -joint.logsumexp(0).sum()
    (expected,) = torch.autograd.grad(exact, pyro.get_param_store()._params["weight"])
    for vectorize in (None, False):
        guide = quietly(AutoTruncated(model, len(joint), vectorize=vectorize), Y)
        assert guide._run_mode == (scoring if vectorize is None else "singly")
        for elbo in (Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1), TraceEnum_ELBO(max_plate_nesting=1)):
            loss, gradient = evaluated(elbo, model, guide, Y)
            assert loss == pytest.approx(exact.item(), rel=1e-12)
            torch.testing.assert_close(gradient, expected, rtol=1e-11, atol=1e-12)
        assert Truncated_ELBO(ExhaustiveSearch()).loss(model, guide, Y) == pytest.approx(exact.item(), rel=1e-12)
        weights = joint.detach().softmax(0).reshape(len(joint), -1)
        torch.testing.assert_close(guide.weights().sort(-1).values.mT, weights.sort(0).values, rtol=1e-10, atol=1e-12)


@slow_cases
def test_one_warning_names_the_line_and_what_would_be_fast(model, sites, local, scoring, idiom):
    guide = AutoTruncated(model, 2)
    way = "by torch.func.vmap" if scoring == "vmap" else "one after the other"
    with pytest.warns(VectorizationWarning, match=f"(?s){way}.*test_vectorization.py:.*Fast would be .*{idiom}") as caught:
        guide(Y)
    first = model.__code__.co_firstlineno
    (found,) = [str(warning.message) for warning in caught]
    line = int(found.partition("test_vectorization.py:")[2].split()[0])
    assert first < line < first + 10
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, Y)


@pytest.mark.nightly(keep=3)
@pytest.mark.slow
@slow_cases
def test_what_users_do_works_with_slow_models_too(model, sites, local, scoring, idiom):
    space = math.prod(len(values) for values in sites.values())
    guide = quietly(AutoTruncated(model, max(2, space // 4)), Y)
    elbo = Truncated_ELBO(EvolutionarySearch(parents=1, children=2, generations=1, crossover=False))
    svi = SVI(model, guide, Adam({"lr": 0.01}), elbo)
    for _ in range(3):
        svi.step(Y)
    assert svi.evaluate_loss(Y) >= -table(model, sites, local).logsumexp(0).sum().item() - 1e-9
    assert set(sites) <= set(to_arviz(model, guide, Y, num_samples=10).posterior)
    assert Predictive(model, guide=guide, num_samples=3)(Y)["y"].shape[0] == 3
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VectorizationWarning)
        other = guide.infer(Y, ExhaustiveSearch(), 1, num_states=space)
        if other.space.num_latents > 1:
            str(check_truncation(other, Y))
    assert guide.median(Y).keys() == sites.keys()


def test_states_together_on_demand_raise_as_they_would():
    with pytest.raises(RuntimeError) as caught:
        Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(selection, AutoTruncated(selection, 4, vectorize=True), Y)
    assert "vectorize=False" in caught.value.__notes__[0]


@pytest.mark.parametrize("choice", [1, "no"])
def test_other_choices_are_refused(choice):
    with pytest.raises(TypeError, match="vectorize must be None"):
        AutoTruncated(selection, 4, vectorize=choice)


def test_sites_that_some_states_lack_are_refused_by_name():
    def model(y):
        z = pyro.sample("z", dist.Bernoulli(0.5))
        if z == 1:
            pyro.sample("extra", dist.Normal(weight()[0], 1.0), obs=y[0])
        pyro.sample("y", dist.Normal(z, 1.0), obs=y[1])

    for seed in range(3):
        pyro.set_rng_seed(seed)
        with pytest.raises(NotImplementedError, match=r"sites \['extra'\] are sampled for some states of \['z'\] only"):
            Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, AutoTruncated(model, 2, vectorize=False), Y)


def test_a_sequential_plate_that_is_subsampled_is_refused():
    def model(y):
        for i in pyro.plate("data", 5, 2):
            pyro.sample(f"z_{i}", dist.Bernoulli(0.5))

    with pytest.raises(NotImplementedError, match=r"sequential plate 'data', of which the model takes 2 of 5"):
        AutoTruncated(model, 2).setup(Y)


def test_a_model_that_is_random_beyond_its_sites_is_not_taken_for_one_that_does_not_vectorise():
    def model(y):
        with pyro.plate("data", N):
            z = pyro.sample("z", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(z + 0.1 * torch.randn(N), 1.0), obs=y)

    guide = AutoTruncated(model, 2)
    with pytest.warns(UserWarning, match=r"site 'y' gets other log probabilities whenever the same states are scored") as caught:
        guide.setup(Y)
    assert not any(issubclass(warning.category, VectorizationWarning) for warning in caught)
    assert guide.is_enumerable


# --- beside other guides ---


def regression(y, batch_size=None, *, fast=False):
    beta = pyro.sample("beta", dist.Normal(torch.zeros(H), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(0.0, 0.3))
    gamma = pyro.sample("gamma", dist.Bernoulli(0.3).expand([H]).to_event(1))
    with pyro.plate("data", N, batch_size) as index:
        loc = (X[index] * (gamma * beta)).sum(-1) if fast else X[index] @ (gamma * beta)
        pyro.sample("y", dist.Normal(loc + weight()[0], sigma), obs=y[index])


def fast_regression(y):
    return regression(y, fast=True)


def local_columns(y, batch_size=None, *, fast=False):
    """Continuous latents of each data point, and a scale of the model."""
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("data", N, batch_size) as index, poutine.scale(scale=0.5):
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
        loc = s[..., 0] + s[..., 1] * x if fast else s[:, 0] + s[:, 1] * x
        pyro.sample("y", dist.Normal(loc + shift * weight()[0], 1.0), obs=y[index])


def fast_local_columns(y):
    return local_columns(y, fast=True)


def list_of(model: Callable, discrete: str, part: type, num_states: int, **options) -> AutoGuideList:
    guide = AutoGuideList(model)
    guide.append(part(poutine.block(model, hide=[discrete])))
    guide.append(AutoTruncated(model, num_states, **options))
    return guide


@pytest.mark.nightly(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize("part", [AutoNormal, AutoDelta, AutoMultivariateNormal])
@pytest.mark.parametrize(
    ("slow", "fast", "discrete", "num_states"),
    [(regression, fast_regression, "gamma", 16), (local_columns, fast_local_columns, "s", 4)],
    ids=["global", "local"],
)
def test_loss_and_gradients_equal_the_stock_elbo_of_the_same_model_written_fast(slow, fast, discrete, num_states, part):
    found = []
    for model in (slow, fast):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = list_of(model, discrete, part, num_states)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VectorizationWarning)
            guide(Y)
        assert guide[1].is_enumerable is (model is fast)
        elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1)
        pyro.set_rng_seed(1)
        loss = elbo.loss_and_grads(model, guide, Y)
        parameters = dict(pyro.get_param_store().named_parameters())
        gradients = {name: value.grad.clone() for name, value in parameters.items()}
        pyro.set_rng_seed(1)
        again = [elbo.loss(model, guide, Y)]
        pyro.set_rng_seed(1)
        again.append(TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, Y))
        assert again == pytest.approx([loss, loss], rel=1e-12)
        found.append((loss, gradients))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    assert found[0][1].keys() == found[1][1].keys()
    for name, value in found[1][1].items():
        torch.testing.assert_close(found[0][1][name], value, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_minibatches_particles_and_the_module_form_beside_other_guides():
    guide = AutoGuideList(regression, create_plates=lambda y, batch_size=None: pyro.plate("data", N, batch_size))
    guide.append(AutoNormal(poutine.block(regression, hide=["gamma"])))
    guide.append(AutoTruncated(regression, 16))
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1, num_particles=2)
    svi = SVI(regression, guide, Adam({"lr": 0.05}), elbo)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", VectorizationWarning)
        before = svi.evaluate_loss(Y)
    with pytest.warns(UserWarning, match="site 'y' lies in the subsampled plate 'data' and depends on discrete latents outside"):
        svi.step(Y, 5)
    for _ in range(59):
        svi.step(Y, 5)
    losses = [svi.evaluate_loss(Y) for _ in range(20)]
    # Measured: 24.6 at the start, 15.8 +- 0.9 at the end.
    assert sum(losses) / 20 < before - 3.0
    assert Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1).differentiable_loss(regression, guide, Y).requires_grad
    assert check_truncation(guide, Y) is not None


def test_draws_that_are_not_reparametrised_are_refused():
    def guide_of_counts(y):
        log_rate = pyro.param("log_rate", lambda: torch.tensor(0.1))
        pyro.sample("shift", ScoreOnly(log_rate, 1.0))

    class ScoreOnly(dist.Normal):
        has_rsample = False

    def model(y):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        gamma = pyro.sample("gamma", dist.Bernoulli(0.3).expand([H]).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(X @ (gamma * weight()) + shift, 1.0), obs=y)

    guide = AutoGuideList(model)
    guide.append(guide_of_counts)
    guide.append(quietly(AutoTruncated(model, 4), Y))
    with pytest.raises(NotImplementedError, match=r"site 'shift' of the guide .* is not reparametrised"):
        Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1).loss_and_grads(model, guide, Y)


def test_latents_without_a_guide_are_drawn_from_the_prior():
    guide = AutoTruncated(regression, 16)
    quietly(guide, Y)
    with pytest.warns(UserWarning, match="no guide covers the latents"):
        loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(regression, guide, Y)
    assert math.isfinite(loss)


def test_an_exact_conditional_gives_the_collapsed_loss():
    def model(y, *, fast=False):
        with pyro.plate("data", N):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.3)).to_event(1))
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            loc = s[..., 0] * z + s[..., 1] * weight()[0] if fast else s[:, 0] * z + s[:, 1] * weight()[0]
            pyro.sample("y", dist.Normal(loc, 1.0), obs=y)

    def conditional(states, y, *, fast=False):
        s = states["s"]
        on, shift = (s[..., 0], s[..., 1] * weight()[0]) if fast else (s[:, 0], s[:, 1] * weight()[0])
        return {"z": pyro.sample("z", dist.Normal(on * (y - shift) / (1 + on), (1 + on).rsqrt()))}

    def fast_model(y):
        return model(y, fast=True)

    losses = []
    for program, given in ((model, conditional), (fast_model, lambda states, y: conditional(states, y, fast=True))):
        pyro.clear_param_store()
        guide = quietly(AutoTruncated(program, 4, conditional=given), Y)
        losses.append(evaluated(Truncated_ELBO(ExhaustiveSearch()), program, guide, Y))
    assert losses[0][0] == pytest.approx(losses[1][0], rel=1e-12)
    torch.testing.assert_close(losses[0][1], losses[1][1], rtol=1e-10, atol=1e-12)


def test_modules_whose_parameters_are_attributes():
    class Selection(PyroModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, H))

        def forward(self, y):
            gamma = pyro.sample("gamma", dist.Bernoulli(0.3).expand([H]).to_event(1))
            with pyro.plate("data", N):
                pyro.sample("y", dist.Normal(X @ (gamma * self.weight), 1.0), obs=y)

    model = Selection()
    guide = quietly(AutoTruncated(model, 16), Y)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, Y)
    assert loss == pytest.approx(-table(selection, {"gamma": bits()}, False).logsumexp(0).item(), rel=1e-12)
    assert model.weight.grad is not None


@pytest.mark.slow
def test_what_is_scored_together_but_cannot_be_enumerated_in_parallel_works_under_every_elbo():
    """The product gains a dimension beside the plate, which scores forgive and Pyro's enumeration does not."""

    def model(y):
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
        gamma = pyro.sample("gamma", dist.Bernoulli(0.3).expand([H]).to_event(1))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal((gamma * weight()) @ X.mT + shift, 1.0), obs=y)

    guide = list_of(model, "gamma", AutoDelta, 16)
    guide(Y)
    assert guide[1]._run_mode == "together"
    assert not guide[1].is_enumerable
    joint = table(poutine.condition(model, data={"shift": guide[0].median()["shift"]}), {"gamma": bits()}, False)
    for elbo in (Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1), TraceEnum_ELBO(max_plate_nesting=1)):
        assert elbo.loss_and_grads(model, guide, Y) == pytest.approx(-joint.logsumexp(0).item(), rel=1e-12)


def test_where_pyros_elbo_cannot_pack_our_note_stands_beside_its_message():
    guide = list_of(fast_regression, "gamma", AutoNormal, 4)
    guide(Y)
    with pytest.raises((ValueError, RuntimeError)) as caught:
        Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=0).loss_and_grads(fast_regression, guide, Y)
    assert any("vectorize=False" in note for note in caught.value.__notes__)


def maximum(y, *, is_beside=True):
    """The likelihood scores packed states; what the model makes of them besides counts its dimensions from the left."""
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0)) if is_beside else torch.tensor(0.3)
    with pyro.plate("data", N):
        s = pyro.sample("s", dist.Bernoulli(torch.full((H,), 0.3)).to_event(1))
        assert s.reshape(N, H).shape == (N, H)
        pyro.sample("y", MaximumSuperposition(s, (weight() + shift).unsqueeze(0), 1.0), obs=y.unsqueeze(-1))


def maximum_alone(y):
    return maximum(y, is_beside=False)


def exact_maximum(shift):
    loc = (torch.stack(bits()) * (weight() + shift)).amax(-1).clamp(min=0.0)
    prior = dist.Bernoulli(0.3).log_prob(torch.stack(bits())).sum(-1)
    return (dist.Normal(loc, 1.0).log_prob(Y.unsqueeze(-1)) + prior).logsumexp(-1).sum() + dist.Normal(0.0, 1.0).log_prob(shift)


@pytest.mark.slow
def test_a_likelihood_that_scores_packed_states_does_not_say_that_pyro_can_enumerate_the_model():
    guide = list_of(maximum, "s", AutoDelta, 2**H)
    guide(Y)
    assert guide[1].scorer(Call(maximum, (Y,), {}), {"shift": torch.tensor(0.0)}).packed_model is not None
    assert not guide[1].is_enumerable
    expected = -exact_maximum(guide[0].median()["shift"]).item()
    for elbo in (Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1), TraceEnum_ELBO(max_plate_nesting=1)):
        assert elbo.loss_and_grads(maximum, guide, Y) == pytest.approx(expected, rel=1e-12)


def test_a_model_that_is_alone_goes_under_the_stock_elbo_with_packed_states_too():
    guide = AutoTruncated(maximum_alone, 2**H)
    found = [
        elbo.loss_and_grads(maximum_alone, guide, Y) for elbo in (Truncated_ELBO(ExhaustiveSearch()), TraceEnum_ELBO(max_plate_nesting=1))
    ]
    shift = torch.tensor(0.3)
    expected = dist.Normal(0.0, 1.0).log_prob(shift) - exact_maximum(shift)
    assert found == pytest.approx([expected.item()] * 2, rel=1e-12)


@pytest.mark.parametrize("num_latents", [1, 2])
@pytest.mark.parametrize("num_states", [5, 9])
def test_densities_that_are_less_precise_for_many_states_than_for_one(num_latents: int, num_states: int) -> None:
    """Whole numbers and a number of Python give single precision: one state, without dimensions, adapts to the data."""
    names, y = ("a", "b")[:num_latents], torch.tensor([0.5, 2.0])

    def model(y: Tensor) -> None:
        for name, own in zip(names, y, strict=False):
            z = pyro.sample(name, dist.Categorical(torch.ones(9, dtype=y.dtype)))
            pyro.sample(f"y_{name}", dist.Normal(z + 0.5, 1.0), obs=own)

    terms = (dist.Normal(torch.arange(9.0) + 0.5, 1.0).log_prob(own) - math.log(9) for own in y[:num_latents])
    evidence = sum(float(one.logsumexp(0)) for one in terms)
    torch.set_default_dtype(torch.float32)
    guide = AutoTruncated(model, num_states)
    loss = Truncated_ELBO(EvolutionarySearch(2, 2)).loss(model, guide, y)
    assert loss >= -evidence - 1e-5
    assert (guide.product is not None) == (num_latents == 2)
    assert num_states == 5 or loss == pytest.approx(-evidence, abs=1e-5)
