"""Truncated_ELBO against brute-force enumeration."""

from __future__ import annotations

import copy
import itertools
import math
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, SampledSearch, Truncated_ELBO
from pyro_truncated.distributions import NoisyOrSuperposition
from tests import zoo

cases = pytest.mark.parametrize("make", zoo.CASES, ids=lambda make: make.__name__)


def gradients(loss: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    if loss is not None:
        loss.backward()
    found = {}
    for name, value in pyro.get_param_store().named_parameters():
        found[name] = value.grad.clone()
        value.grad = None
    return found


def step(elbo, model, guide, args) -> tuple[float, dict[str, torch.Tensor]]:
    loss = elbo.loss_and_grads(model, guide, *args)
    return loss, gradients()


@cases
def test_all_states_give_the_evidence_and_its_gradient(make):
    case = make()
    exact = case.table().logsumexp(0).sum()
    expected = gradients(-exact)
    guide = AutoTruncated(case.model, num_states=case.num_states, max_count=case.max_count)
    loss, found = step(Truncated_ELBO(ExhaustiveSearch()), case.model, guide, case.args)
    assert loss == pytest.approx(-exact.item(), rel=1e-9)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=1e-9)


@cases
def test_stock_enumeration_agrees(make):
    case = make()
    guide = AutoTruncated(case.model, num_states=case.num_states, max_count=case.max_count)
    loss, grads = step(Truncated_ELBO(ExhaustiveSearch()), case.model, guide, case.args)
    stock_loss, stock_grads = step(TraceEnum_ELBO(max_plate_nesting=2), case.model, guide, case.args)
    assert stock_loss == pytest.approx(loss, rel=1e-9)
    for name in grads:
        torch.testing.assert_close(stock_grads[name], grads[name], rtol=1e-7, atol=1e-9)


@cases
def test_fewer_states_never_exceed_the_evidence_and_match_their_own_sum(make):
    case = make()
    table = case.table().detach()
    guide = AutoTruncated(case.model, num_states=max(1, case.num_states // 2), max_count=case.max_count, whole_states=True)
    elbo = Truncated_ELBO(SampledSearch(5))
    before = elbo.loss(case.model, guide, *case.args)
    losses = [elbo.loss_and_grads(case.model, guide, *case.args) for _ in range(5)]
    assert -before <= table.logsumexp(0).sum() + 1e-9
    assert all(-loss <= table.logsumexp(0).sum() + 1e-9 for loss in losses)
    assert losses == sorted(losses, reverse=True)
    # The best populations are the top of each data point's table; data points that a mask switches off need one state.
    best = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(case.model, guide, *case.args)
    expected = table.topk(guide.num_states, 0).values.logsumexp(0)
    for idle in guide.make_batch(*case.args).scorer.idle.values():
        expected = torch.where(idle, table.logsumexp(0), expected)
    assert -best == pytest.approx(expected.sum().item(), rel=1e-9)


@cases
def test_differentiable_loss_is_the_same_loss(make):
    case = make()
    guide = AutoTruncated(case.model, num_states=case.num_states, max_count=case.max_count)
    elbo = Truncated_ELBO(ExhaustiveSearch())
    loss, expected = step(elbo, case.model, guide, case.args)
    again = elbo.differentiable_loss(case.model, guide, *case.args)
    assert again.item() == pytest.approx(loss, rel=1e-12)
    for name, value in gradients(again).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)


def _second_derivative(model, whole_states):
    """The second derivative of the loss by a program's only parameter."""
    num_states = 4 if whole_states else 2
    guide, elbo = AutoTruncated(model, num_states, whole_states=whole_states), Truncated_ELBO(ExhaustiveSearch())
    elbo.loss(model, guide)
    (scale,) = pyro.get_param_store()._params.values()
    (first,) = torch.autograd.grad(elbo.differentiable_loss(model, guide), scale, create_graph=True)
    return float(torch.autograd.grad(first, scale)[0])


def _two_steps():
    scale, z = pyro.param("scale", torch.tensor(1.2, dtype=torch.float64)), torch.tensor(0)
    transition = scale.new_tensor([[0.8, 0.2], [0.3, 0.7]])
    for t, y in enumerate((0.4, 1.7)):
        z = pyro.sample(f"z_{t}", dist.Categorical(transition[z]))
        pyro.sample(f"y_{t}", dist.Normal(scale * z, 1.0), obs=scale.new_tensor(y))


def _two_causes():
    scale = pyro.param("scale", torch.tensor(0.6, dtype=torch.float64))
    with pyro.plate("data", 1):
        s = pyro.sample("s", dist.Bernoulli(scale.new_tensor([0.3, 0.4])).to_event(1))
        likelihood = NoisyOrSuperposition(s, scale * scale.new_tensor([[1.0, 0.5]]), scale.new_tensor([0.1]))
        pyro.sample("y", likelihood, obs=scale.new_ones(1, 1))


def test_second_derivatives_are_exact_or_refused():
    def log_evidence(scale):
        log_joint = []
        for a, b in itertools.product((0, 1), repeat=2):
            prior = (0.8, 0.2)[a] * ((0.8, 0.2), (0.3, 0.7))[a][b]
            log_joint.append(
                math.log(prior) + sum(dist.Normal(scale * z, 1.0).log_prob(scale.new_tensor(y)) for z, y in ((a, 0.4), (b, 1.7)))
            )
        return torch.stack(log_joint).logsumexp(0)

    exact = -torch.autograd.functional.hessian(log_evidence, torch.tensor(1.2, dtype=torch.float64))
    assert _second_derivative(_two_steps, True) == pytest.approx(float(exact), rel=1e-9)
    for model, whole_states in ((_two_steps, False), (_two_causes, True)):
        pyro.clear_param_store()
        with pytest.raises(NotImplementedError, match="have no second derivatives"):
            _second_derivative(model, whole_states)


def test_loss_changes_nothing():
    case = zoo.binary()
    guide = AutoTruncated(case.model, num_states=8)
    elbo = Truncated_ELBO(EvolutionarySearch(parents=3, children=2))
    svi = SVI(case.model, guide, Adam({"lr": 0.01}), elbo)
    svi.step(*case.args)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    first = svi.evaluate_loss(*case.args)
    with torch.no_grad():
        second = elbo.differentiable_loss(case.model, guide, *case.args).item()
    assert first == svi.evaluate_loss(*case.args) == pytest.approx(second, rel=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


def subsampled(y, batch_size=None, scale=1.0):
    weight = pyro.param("weight", lambda: torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4))
    with pyro.plate("data", len(y), subsample_size=batch_size) as index, poutine.scale(scale=scale):
        s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3, dtype=torch.float64)).to_event(1))
        pyro.sample("y", dist.Normal(s @ weight.mT, 0.5).to_event(1), obs=y[index])


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize("elbo", [Truncated_ELBO(ExhaustiveSearch()), TraceEnum_ELBO(max_plate_nesting=1)], ids=["truncated", "stock"])
def test_subsampling_is_unbiased_and_batch_sizes_may_vary(elbo, scale):
    y = torch.randn(6, 3, dtype=torch.float64)
    guide = AutoTruncated(subsampled, num_states=16)
    full, full_grads = step(Truncated_ELBO(ExhaustiveSearch()), subsampled, guide, (y, None, scale))
    for batch_size in (1, 3):
        losses, grads = [], []
        for _ in range(150):
            loss, grad = step(elbo, subsampled, guide, (y, batch_size, scale))
            losses.append(loss)
            grads.append(grad["weight"])
        losses = torch.tensor(losses)
        # Five standard errors: one false alarm in 1.7 million, per comparison.
        assert abs(losses.mean() - full) < 5 * losses.std() / 150**0.5
        grads = torch.stack(grads)
        assert ((grads.mean(0) - full_grads["weight"]).abs() < 5 * grads.std(0) / 150**0.5 + 1e-12).all()


def test_subsampled_search_touches_only_its_data_points():
    y = torch.randn(10, 3, dtype=torch.float64)
    guide = AutoTruncated(subsampled, num_states=4)
    guide.setup(y)
    before = guide.words.clone()
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(subsampled, guide, y, 3)
    scored = ~guide.log_joint.isnan().any(-1)
    assert scored.sum() == 3
    assert torch.equal(guide.words[~scored], before[~scored])


@pytest.mark.slow
def test_parameters_inside_the_model_are_optimised_by_svi():
    y = torch.randn(20, 3, dtype=torch.float64)
    guide = AutoTruncated(subsampled, num_states=16)
    svi = SVI(subsampled, guide, Adam({"lr": 0.05}), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(40)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.slow
def test_module_form_trains_with_a_torch_optimiser():
    y = torch.randn(20, 3, dtype=torch.float64)

    class Model(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4))

        def forward(self, y):
            with pyro.plate("data", len(y)):
                s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3, dtype=torch.float64)).to_event(1))
                pyro.sample("y", dist.Normal(s @ self.weight.mT, 0.5).to_event(1), obs=y)

    with pyro.settings.context(module_local_params=True):
        model = Model()
        guide = AutoTruncated(model, num_states=8)
        loss_fn = Truncated_ELBO(EvolutionarySearch(parents=3, children=2, generations=1))(model, guide)
        loss_fn(y)
        optimiser = torch.optim.Adam(loss_fn.parameters(), lr=0.05)
        losses = []
        for _ in range(30):
            optimiser.zero_grad()
            loss = loss_fn(y)
            loss.backward()
            optimiser.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0] - 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1.0, 1.5])
def test_states_of_negligible_weight_change_a_gradient_by_rounding_only(dtype, temperature):
    """Most of 32 states lie tens of nats below the best, some in between; the gradient of all of them is compared."""
    generator = torch.Generator().manual_seed(0)
    weight = 6 * torch.randn(6, 9, generator=generator, dtype=dtype)
    y = torch.bernoulli(torch.full((40, 6), 0.4, dtype=dtype), generator=generator) @ weight
    y = y + torch.randn(y.shape, generator=generator, dtype=dtype)

    def model(y):
        learned = pyro.param("weight", weight.clone())
        noise = pyro.param("noise", torch.tensor(1.0, dtype=dtype), constraint=dist.constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.4, dtype=dtype)).to_event(1))
            pyro.sample("y", dist.Normal(s @ learned, noise).to_event(1), obs=y)

    def gradients():
        found = {name: value.unconstrained().grad.clone() for name, value in pyro.get_param_store().items()}
        for value in pyro.get_param_store().values():
            value.unconstrained().grad = None
        return found

    guide = AutoTruncated(model, 32)
    loss = Truncated_ELBO(EvolutionarySearch(), temperature=temperature).loss_and_grads(model, guide, y)
    found, batch = gradients(), guide.make_batch(y)
    states = guide.population().states(dtype)
    assert loss == pytest.approx(-float(batch.free_energy().detach()), rel=1e-5)
    nodes = {name: value.clone() for name, value in pyro.get_param_store().items()}
    log_joint = dist.Normal(states @ nodes["weight"], nodes["noise"]).log_prob(y.unsqueeze(1)).sum(-1)
    log_joint = log_joint + dist.Bernoulli(torch.tensor(0.4, dtype=dtype)).log_prob(states).sum(-1)
    (-temperature * (log_joint / temperature).logsumexp(-1).sum()).backward()
    expected = gradients()
    weights = (log_joint / temperature).softmax(-1)
    assert int((weights > torch.finfo(torch.float64).eps / 32).sum(-1).max()) < 32  # some state is left out everywhere
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=1e3 * torch.finfo(dtype).eps * float(value.abs().max()))


def test_temperature_softens_the_gradient_but_not_the_loss():
    case = zoo.binary()
    guide = AutoTruncated(case.model, num_states=32)
    cold, _ = step(Truncated_ELBO(ExhaustiveSearch()), case.model, guide, case.args)
    warm, found = step(Truncated_ELBO(ExhaustiveSearch(), temperature=lambda t: 3.0), case.model, guide, case.args)
    assert warm == cold
    objective = 3.0 * (case.table() / 3.0).logsumexp(0).sum()
    for name, value in gradients(-objective).items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-9)


def test_search_every_and_search_steps():
    calls = []

    class Counting(SampledSearch):
        def step(self, batch):
            calls.append(1)
            return super().step(batch)

    case = zoo.binary()
    guide = AutoTruncated(case.model, num_states=8)
    elbo = Truncated_ELBO(Counting(3), search_steps=2, search_every=3)
    for _ in range(6):
        elbo.loss_and_grads(case.model, guide, *case.args)
    assert len(calls) == 4


def test_particles_are_counted():
    with pytest.raises(ValueError, match="num_particles must be a positive integer; got 0"):
        Truncated_ELBO(ExhaustiveSearch(), num_particles=0)


def test_bad_search_guide_and_temperature():
    with pytest.raises(TypeError, match="search must be a pyro_truncated search"):
        Truncated_ELBO("evolutionary")
    case = zoo.binary()
    with pytest.raises(TypeError, match="needs a guide with an AutoTruncated part"):
        Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(case.model, lambda y: None, *case.args)
    guide = AutoTruncated(case.model, num_states=8)
    # At infinity the posterior over states of probability zero would be no number.
    with pytest.raises(ValueError, match="temperature must be a number or callable; got nan"):
        Truncated_ELBO(ExhaustiveSearch(), temperature=math.nan)
    for temperature in (0.5, math.inf, lambda step: math.nan, lambda step: math.inf):
        with pytest.raises(ValueError, match="temperature must be at least 1, and finite"):
            Truncated_ELBO(ExhaustiveSearch(), temperature=temperature).loss_and_grads(case.model, guide, *case.args)


def shifted(y):
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((6,), 0.3)).to_event(1))
        pyro.sample("y", dist.Normal(shift + s @ torch.linspace(-2, 2, 6), 0.1), obs=y)


@pytest.mark.parametrize("handler", [{}, {"expose": ["shift", "s", "s_index"]}, {"hide": ["nothing"]}], ids=["plain", "expose", "hide"])
def test_a_search_is_asked_for_through_handlers_around_the_guide(handler):
    y, guide = torch.linspace(-3, 3, 7), AutoGuideList(shifted)
    guide.append(AutoDelta(poutine.block(shifted, expose=["shift"])))
    guide.append(AutoTruncated(shifted, 4))
    guide(y)
    before = guide[1].words.clone()
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(shifted, poutine.block(guide, **handler) if handler else guide, y)
    assert not torch.equal(guide[1].words, before)
    best = guide[1].posterior(y).free_energy()
    exact = AutoTruncated(poutine.condition(shifted, data={"shift": guide[0].median(y)["shift"].detach()}), 64)
    top = exact.posterior(y).log_joint.topk(4).values.logsumexp(-1)
    torch.testing.assert_close(best.float(), top, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("search", [None, ExhaustiveSearch()])
def test_double_data_beside_priors_in_single_precision(search):
    """NumPy's data are double, the numbers of a program single: the loss is that of single data."""

    def program(y):
        weight = pyro.sample("weight", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(torch.full((2,), 0.4)).to_event(1))
            pyro.sample("y", dist.Normal(z @ weight, 1.0).to_event(1), obs=y)

    found = []
    y = torch.randn(20, 3, dtype=torch.float64)
    for data in (y, y.float()):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoGuideList(program)
        guide.append(AutoDelta(poutine.block(program, hide=["z"])))
        guide.append(AutoTruncated(program))
        found.append(step(Truncated_ELBO(search), program, guide, (data,)))
    (loss, gradient), (single_loss, single_gradient) = found
    assert loss == pytest.approx(single_loss, rel=1e-5)
    for name in single_gradient:
        torch.testing.assert_close(gradient[name].float(), single_gradient[name], rtol=1e-4, atol=1e-4)


def mixed_program(y):
    with pyro.plate("data", len(y)):
        s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(s.sum(-1) + z, 0.5), obs=y)


def mixed_guides():
    guides = AutoGuideList(mixed_program)
    guides.append(AutoNormal(poutine.block(mixed_program, hide=["s"])))
    guides.append(AutoTruncated(mixed_program, num_states=8))
    return guides


@pytest.mark.parametrize("copied", [lambda elbo: pickle.loads(pickle.dumps(elbo)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_copies_of_an_elbo_leave_the_guide_as_it_is(copied):
    y, elbo, guides = torch.randn(200), Truncated_ELBO(), mixed_guides()
    svi = SVI(mixed_program, guides, Adam({"lr": 0.01}), elbo)
    svi.step(y)
    other = copied(elbo)
    # No guide, of 200 data points, is part of it.
    assert len(pickle.dumps(other)) < 2000
    assert math.isfinite(svi.step(y))
    assert math.isfinite(other.loss(mixed_program, guides, y))


def test_a_copied_svi_searches_in_its_own_guide():
    y, svi = torch.randn(200), SVI(mixed_program, mixed_guides(), Adam({"lr": 0.01}), Truncated_ELBO())
    svi.step(y)
    other, before = copy.deepcopy(svi), svi.guide[1].log_joint.clone()
    assert math.isfinite(other.step(y))
    assert torch.equal(svi.guide[1].log_joint, before)
    assert not torch.equal(other.guide[1].log_joint, before)


@pytest.mark.parametrize("num_states", [3, 100])
@pytest.mark.filterwarnings("ignore:Found non-auxiliary vars in guide but not model")
@pytest.mark.filterwarnings("ignore:the model observes")
def test_a_latent_that_a_later_call_observes_counts_once(num_states):
    """Its density was added to that of the observations, where each node has a set of states."""
    observations, switch = torch.tensor([0.7, -0.4, 1.6]), torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.6, 0.2], [0.3, 0.3, 0.4]])

    def model(mu=None):
        mu, z = pyro.sample("mu", dist.Normal(0.0, 1.0), obs=mu), torch.tensor(0)
        for t in range(3):
            z = pyro.sample(f"z_{t}", dist.Categorical(switch[z]))
            pyro.sample(f"y_{t}", dist.Normal(z * mu, 0.7), obs=observations[t])

    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, expose=["mu"])))
    guide.append(AutoTruncated(model, num_states=num_states, whole_states=num_states == 100))
    elbo, mu = Truncated_ELBO(max_plate_nesting=0), torch.tensor(0.9)
    elbo.loss(model, guide)
    paths = torch.cartesian_prod(*[torch.arange(3)] * 3)
    before = torch.cat([torch.zeros(27, 1, dtype=torch.int64), paths[:, :-1]], 1)
    joint = switch[before, paths].log().sum(1) + dist.Normal(paths * mu, 0.7).log_prob(observations).sum(1)
    expected = joint.logsumexp(0) + dist.Normal(0.0, 1.0).log_prob(mu)
    assert elbo.loss(model, guide, mu) == pytest.approx(-float(expected), abs=1e-4)


def test_substituted_parameters_stay_and_others_are_trained():
    def model(y):
        weight = pyro.param("weight", lambda: torch.ones(3, 4, dtype=torch.float64))
        scale = pyro.param("scale", torch.tensor(2.0, dtype=torch.float64), constraint=dist.constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3, dtype=torch.float64)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, scale).to_event(1), obs=y)

    y, weight = 1.0 + 0.1 * torch.randn(20, 3, dtype=torch.float64), torch.eye(3, 4, dtype=torch.float64)
    fixed = poutine.substitute(model, data={"weight": weight})
    svi = SVI(fixed, AutoTruncated(fixed, num_states=16), Adam({"lr": 0.05}), Truncated_ELBO(ExhaustiveSearch()))
    losses = [svi.step(y) for _ in range(3)]
    assert losses[-1] < losses[0]
    assert torch.equal(weight, torch.eye(3, 4, dtype=torch.float64))
    assert set(pyro.get_param_store()) == {"scale"}


@pytest.mark.parametrize("observed", [[], ["x"]])
def test_a_guide_of_another_model_is_a_bound_or_refused(observed):
    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Bernoulli(0.3))
            x = pyro.sample("x", dist.Bernoulli(0.2 + 0.5 * z))
            pyro.sample("y", dist.Normal(2 * x + z, 1.0), obs=y)

    y, elbo = torch.tensor([0.3, -1.2, 2.0]), Truncated_ELBO(max_plate_nesting=1)
    given = poutine.condition(model, data={name: torch.tensor([1.0, 0.0, 1.0]) for name in observed})
    guide = AutoTruncated(model, num_states=4)
    if observed:
        with pytest.warns(UserWarning, match="in guide but not model"), pytest.raises(ValueError, match=r"the model observes \['x'\]"):
            elbo.loss_and_grads(given, guide, y)
    else:
        assert elbo.loss(given, guide, y) == pytest.approx(elbo.loss(model, guide, y), rel=1e-6)
    own = elbo.loss(given, AutoTruncated(given, num_states=4), y)
    exact = TraceEnum_ELBO(max_plate_nesting=1).loss(pyro.infer.config_enumerate(given), lambda y: None, y)
    assert own == pytest.approx(exact, rel=1e-5)
