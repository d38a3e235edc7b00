"""AutoTruncated as a Pyro guide: what every autoguide is expected to do, and its errors."""

from __future__ import annotations

import copy
import io
import itertools

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO, TraceEnum_ELBO
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, SampledSearch, Truncated_ELBO
from tests import zoo

D64 = torch.float64
cases = pytest.mark.parametrize("make", zoo.CASES, ids=lambda make: make.__name__)


def trained(case: zoo.Case, num_states: int | None = None, **options: bool) -> AutoTruncated:
    guide = AutoTruncated(case.model, num_states=num_states or case.num_states, max_count=case.max_count, **options)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(case.model, guide, *case.args)
    return guide


def exact_expectation(case: zoo.Case, site: str, f) -> Tensor:
    """Posterior expectation ``(N, ...)`` of a function of one site's value by enumeration."""
    weights = case.table().detach().softmax(0)
    values = [dict(zip(case.sites, c, strict=True))[site] for c in itertools.product(*case.sites.values())]
    terms = torch.stack([f(value).double() for value in values])
    return torch.tensordot(weights.mT, terms, 1)


# --- numbers ---


@cases
def test_marginals_and_expectations_equal_enumeration(make):
    case = make()
    guide = trained(case)
    marginals = guide.marginals()
    for name, site in guide.layout.sites.items():
        flat = (-1,) if site.kind == "one_hot" else site.shape

        def value(v, flat=flat):
            return v.reshape(flat)

        mean = guide.expectation(lambda s, n=name: s[n].double())
        torch.testing.assert_close(mean, exact_expectation(case, name, value), rtol=1e-9, atol=1e-9)
        if site.kind == "boolean":
            torch.testing.assert_close(marginals[name].double(), mean, rtol=1e-9, atol=1e-9)
        else:
            torch.testing.assert_close(marginals[name].sum(-1), torch.ones_like(marginals[name].sum(-1)))


@cases
def test_mode_is_the_best_state(make):
    case = make()
    guide = trained(case, max(1, case.num_states // 2))
    best = case.table().detach().argmax(0)
    combinations = list(itertools.product(*case.sites.values()))
    mode, median = guide.mode(), guide.median(*case.args)
    # Latents that a mask switches off have one value, whatever it is.
    idle = {name: mask.expand(case.num_data) for name, mask in guide.make_batch(*case.args).scorer.idle.items()}
    for position, (name, site) in enumerate(guide.layout.sites.items()):
        for n, t in enumerate(best.tolist()):
            assert (name in idle and bool(idle[name][n])) or torch.equal(
                mode[name][n].flatten().double(), combinations[t][position].flatten().double()
            )
        assert median[name].numel() == mode[name].numel()
        trace = poutine.trace(case.model).get_trace(*case.args)
        assert median[name].shape == trace.nodes[name]["value"].shape, site


@cases
def test_states_are_distinct_and_weights_sum_to_one(make):
    case = make()
    guide = trained(case, max(1, case.num_states // 2), whole_states=True)
    assert len(guide.population().find_duplicates()) == 0
    torch.testing.assert_close(guide.weights().sum(-1), torch.ones(case.num_data, dtype=guide.weights().dtype))
    for name, site in guide.layout.sites.items():
        hot = (site.cardinalities[0],) if site.kind == "one_hot" else ()
        assert guide.states()[name].shape == (case.num_data, guide.num_states, *site.shape, *hot)


def test_sample_posterior_follows_the_weights():
    case = zoo.two_sites()
    guide = trained(case)
    draws = guide.sample_posterior(4000)
    assert draws["s"].shape == (4000, 5, 4)
    assert draws["z"].shape == (4000, 5)
    expected = guide.marginals()["s"]
    # 20 comparisons at five standard errors: false alarm below 2e-5.
    assert ((draws["s"].double().mean(0) - expected).abs() < 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


def test_given_indices():
    case = zoo.binary()
    guide = trained(case, 8)
    indices = torch.tensor([4, 1])
    assert torch.equal(guide.weights(indices), guide.weights()[indices])
    assert torch.equal(guide.marginals(indices)["s"], guide.marginals()["s"][indices])
    assert torch.equal(guide.mode(indices)["s"], guide.mode()["s"][indices])
    assert guide.sample_posterior(3, indices)["s"].shape == (3, 2, 5)


# --- as a Pyro guide ---


@cases
def test_plain_call_gives_model_shaped_values(make):
    case = make()
    guide = trained(case, max(1, case.num_states // 2))
    trace = poutine.trace(case.model).get_trace(*case.args)
    values = guide(*case.args)
    assert values.keys() == case.sites.keys()
    for name, value in values.items():
        assert value.shape == trace.nodes[name]["value"].shape
        assert value.dtype == trace.nodes[name]["value"].dtype


@pytest.mark.nightly(keep=3)
@pytest.mark.slow
@pytest.mark.parametrize("parallel", [False, True])
@cases
def test_predictive(make, parallel):
    case = make()
    guide = trained(case)
    num_samples = 2000 if parallel else 200
    samples = Predictive(case.model, guide=guide, num_samples=num_samples, parallel=parallel)(*case.args)
    for name, site in guide.layout.sites.items():
        if site.kind == "boolean":
            drawn = samples[name].reshape(num_samples, case.num_data, -1)
            expected = guide.marginals()[name].reshape(case.num_data, -1)
            # At most 30 comparisons at five standard errors: false alarm below 2e-5.
            assert ((drawn.mean(0) - expected).abs() < 5 * (expected * (1 - expected) / num_samples).sqrt() + 1e-9).all()


def test_predictive_of_the_guide_alone_draws_states_by_their_weights():
    case, num_samples = zoo.binary(), 2000
    guide = trained(case)
    index = Predictive(guide, num_samples=num_samples, parallel=True)(*case.args)[guide.index_name]
    expected = guide.weights()
    drawn = torch.nn.functional.one_hot(index, expected.shape[-1]).to(expected.dtype).mean(0)
    # At most 200 comparisons at six standard errors: false alarm below 1e-6.
    assert ((drawn - expected).abs() < 6 * (expected * (1 - expected) / num_samples).sqrt() + 1e-3).all()


@cases
def test_trace_elbo_runs_and_estimates_the_same_bound(make):
    case = make()
    guide = trained(case)
    exact = Truncated_ELBO(ExhaustiveSearch()).loss(case.model, guide, *case.args)
    # With all states the integrand is constant, so even one sample gives the evidence exactly.
    with pytest.warns(UserWarning, match="you need to use TraceEnum_ELBO"):
        assert Trace_ELBO().loss(case.model, guide, *case.args) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("vectorize", [False, True])
def test_particles_with_the_stock_elbo(vectorize):
    case = zoo.binary()
    guide = trained(case)
    exact = Truncated_ELBO(ExhaustiveSearch()).loss(case.model, guide, *case.args)
    stock = TraceEnum_ELBO(num_particles=3, vectorize_particles=vectorize, max_plate_nesting=1)
    assert stock.loss(case.model, guide, *case.args) == pytest.approx(exact, rel=1e-9)


def test_replay_shares_plates_and_render_model_works():
    case = zoo.binary()
    guide = trained(case)
    guide_trace = poutine.trace(guide).get_trace(*case.args)
    model_trace = poutine.trace(poutine.replay(case.model, trace=guide_trace)).get_trace(*case.args)
    assert torch.equal(model_trace.nodes["s"]["value"], guide_trace.nodes["s"]["value"])
    relations = pyro.infer.inspect.get_model_relations(guide, case.args)
    assert relations["sample_dist"]["s_index"] == "Categorical"


def global_and_local(y, batch_size=None):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(3, dtype=D64), 2.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.5, 0.3], dtype=D64)))
        pyro.sample("y", dist.Normal(loc[..., z] if loc.dim() == 1 else loc.squeeze(-2).gather(-1, z), 0.5), obs=y[index])


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("part", [AutoDelta, AutoNormal])
def test_beside_a_continuous_guide(part, batch_size):
    y = torch.cat([torch.randn(12, dtype=D64) * 0.5 + c for c in (-3, 0, 3)])
    guide = AutoGuideList(global_and_local)
    guide.append(part(poutine.block(global_and_local, hide=["z"])))
    guide.append(AutoTruncated(global_and_local, num_states=3))
    svi = SVI(global_and_local, guide, Adam({"lr": 0.05}), Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=1))
    losses = [svi.step(y, batch_size) for _ in range(60)]
    assert sum(losses[-20:]) < sum(losses[:20])
    if part is AutoDelta and batch_size is None:
        loc = guide.median(y)["loc"].detach()
        exact = dist.Normal(0.0, 2.0).log_prob(loc).sum()
        exact = (
            exact + (dist.Normal(loc, 0.5).log_prob(y.unsqueeze(-1)) + torch.tensor([0.2, 0.5, 0.3], dtype=D64).log()).logsumexp(-1).sum()
        )
        assert svi.evaluate_loss(y) == pytest.approx(-exact.item(), rel=1e-9)


def test_needs_no_prior_draw_of_latents_without_a_guide_unnoticed():
    y = torch.randn(6, dtype=D64)
    guide = AutoTruncated(global_and_local, num_states=3)
    with pytest.warns(UserWarning, match=r"no guide covers the latents \['loc'\]"):
        Truncated_ELBO(ExhaustiveSearch()).loss(global_and_local, guide, y)


# --- structured conditional guides ---

WEIGHT = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.8]], dtype=D64)
NOISE, SLAB = 0.4, 1.5


def spike_slab(y, batch_size=None):
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3, dtype=D64)).to_event(1))
        z = pyro.sample("z", dist.Normal(torch.zeros(3, dtype=D64), SLAB).to_event(1))
        pyro.sample("y", dist.Normal((s * z) @ WEIGHT.mT, NOISE).to_event(1), obs=y[index])


def exact_slabs(states, y, batch_size=None):
    y = pyro.subsample(y, event_dim=1)
    active = states["s"].unsqueeze(-2) * WEIGHT
    precision = active.mT @ active / NOISE**2 + torch.eye(3, dtype=D64) / SLAB**2
    mean = torch.linalg.solve(precision, (active.mT @ y.unsqueeze(-1)) / NOISE**2).squeeze(-1)
    return {"z": pyro.sample("z", dist.MultivariateNormal(mean, precision_matrix=precision))}


def collapsed_evidence(y):
    rows = []
    for bits in itertools.product((0.0, 1.0), repeat=3):
        active = WEIGHT * torch.tensor(bits, dtype=D64)
        cov = NOISE**2 * torch.eye(2, dtype=D64) + SLAB**2 * active @ active.mT
        on = sum(bits)
        prior = on * torch.tensor(0.3, dtype=D64).log() + (3 - on) * torch.tensor(0.7, dtype=D64).log()
        rows.append(prior + dist.MultivariateNormal(torch.zeros(2, dtype=D64), cov).log_prob(y))
    return torch.stack(rows)


@pytest.mark.parametrize("batch_size", [None, 3])
def test_exact_conditional_gives_the_collapsed_log_joint(batch_size):
    y = torch.randn(7, 2, dtype=D64)
    guide = AutoTruncated(spike_slab, num_states=8, conditional=exact_slabs)
    elbo = Truncated_ELBO(ExhaustiveSearch())
    table = collapsed_evidence(y)
    with poutine.trace() as tracer:
        loss = elbo.loss_and_grads(spike_slab, guide, y, batch_size)
    del tracer
    population = guide.population()
    seen = ~population.log_joint.isnan().any(-1)
    assert seen.sum() == (batch_size or 7)
    expected = table.logsumexp(0)[seen].sum() * 7 / seen.sum()
    assert loss == pytest.approx(-expected.item(), rel=1e-9)
    bits = guide.states()["s"][seen].long()
    rows = bits[..., 0] * 4 + bits[..., 1] * 2 + bits[..., 2]
    torch.testing.assert_close(guide.log_joint[seen], table.mT[seen].gather(1, rows), rtol=1e-9, atol=1e-9)
    if batch_size is None:
        stock = TraceEnum_ELBO(max_plate_nesting=1)
        assert stock.loss(spike_slab, guide, y) == pytest.approx(loss, rel=1e-8)


def test_conditional_in_predictive():
    y = torch.randn(4, 2, dtype=D64)
    guide = AutoTruncated(spike_slab, num_states=8, conditional=exact_slabs)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(spike_slab, guide, y)
    samples = Predictive(spike_slab, guide=guide, num_samples=6, parallel=True)(y)
    assert samples["z"].shape == (6, 4, 3)


# --- global sites ---


def variable_selection(x, y):
    with pyro.plate("features", x.shape[-1]):
        on = pyro.sample("on", dist.Bernoulli(torch.tensor(0.3, dtype=D64)))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(on @ x.mT if on.dim() > 1 else x @ on, 0.5), obs=y)


def test_selectors_in_a_feature_plate_form_one_global_state():
    x = torch.randn(9, 4, dtype=D64)
    y = x @ torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=D64)
    rows = []
    for bits in itertools.product((0.0, 1.0), repeat=4):
        s = torch.tensor(bits, dtype=D64)
        rows.append(dist.Bernoulli(torch.tensor(0.3, dtype=D64)).log_prob(s).sum() + dist.Normal(x @ s, 0.5).log_prob(y).sum())
    guide = AutoTruncated(variable_selection, num_states=16)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(variable_selection, guide, x, y)
    assert guide.layout.plates == ()
    assert loss == pytest.approx(-torch.stack(rows).logsumexp(0).item(), rel=1e-9)
    assert TraceEnum_ELBO(max_plate_nesting=1).loss(variable_selection, guide, x, y) == pytest.approx(loss, rel=1e-9)
    assert guide.marginals()["on"].shape == (1, 4)
    assert guide(x, y)["on"].shape == (4,)
    assert guide.median(x, y)["on"].tolist() == [1, 0, 1, 0]


def test_a_site_outside_every_plate_joins_the_others_in_one_state():
    y = torch.randn(3, dtype=D64)

    def model(y):
        shift = pyro.sample("shift", dist.Bernoulli(torch.tensor(0.4, dtype=D64)))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.8], dtype=D64)))
            pyro.sample("y", dist.Normal(shift + z, 0.5), obs=y)

    rows = []
    for shift in (0.0, 1.0):
        per = torch.stack([dist.Normal(shift + k, 0.5).log_prob(y) + torch.tensor(p, dtype=D64).log() for k, p in ((0, 0.2), (1, 0.8))])
        rows.append(per.logsumexp(0).sum() + dist.Bernoulli(torch.tensor(0.4, dtype=D64)).log_prob(torch.tensor(shift, dtype=D64)))
    guide = AutoTruncated(model, num_states=16)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
    assert loss == pytest.approx(-torch.stack(rows).logsumexp(0).item(), rel=1e-9)


# --- keeping ---


@cases
def test_state_dict_loads_into_a_fresh_guide(make):
    case = make()
    guide = trained(case, max(1, case.num_states // 2))
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    fresh = AutoTruncated(case.model, num_states=guide.num_states, max_count=case.max_count)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    elbo = Truncated_ELBO(ExhaustiveSearch())
    assert elbo.loss(case.model, fresh, *case.args) == elbo.loss(case.model, guide, *case.args)
    assert all(torch.equal(fresh.marginals()[name], guide.marginals()[name]) for name in guide.marginals())
    assert all(torch.equal(fresh.mode()[name], guide.mode()[name]) for name in guide.mode())


def test_loading_populations_of_another_shape_is_refused():
    case = zoo.binary()
    guide = trained(case, 8)
    with pytest.raises(RuntimeError, match="hold 8 states per data point, this guide num_states=4"):
        AutoTruncated(case.model, num_states=4).load_state_dict(guide.state_dict())
    other = AutoTruncated(zoo.mixture().model, num_states=8)
    other.load_state_dict(guide.state_dict())
    with pytest.raises(ValueError, match="the loaded populations are of 5 latents"):
        other(*zoo.mixture().args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_follow_the_model(dtype):
    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3, dtype=dtype)).to_event(1))
            pyro.sample("y", dist.Normal(s.sum(-1), torch.tensor(1.0, dtype=dtype)), obs=y)

    guide = AutoTruncated(model, num_states=4)
    y = torch.randn(5, dtype=dtype)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
    assert guide.log_joint.dtype == dtype
    assert guide(y)["s"].dtype == dtype


def test_infer_leaves_the_trained_guide_alone():
    y = torch.randn(20, 2, dtype=D64)
    guide = AutoTruncated(spike_slab, num_states=4, conditional=exact_slabs)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(spike_slab, guide, y)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    new = torch.randn(9, 2, dtype=D64)
    found = guide.infer(new, SampledSearch(8), 5)
    assert found.words.shape[:2] == (9, 4)
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())
    exact = guide.infer((new,), ExhaustiveSearch(), steps=1, num_states=8)
    torch.testing.assert_close(exact.population().free_energy(), collapsed_evidence(new).logsumexp(0), rtol=1e-9, atol=1e-9)
    assert (found.population().free_energy() <= exact.population().free_energy() + 1e-9).all()
    by_default = guide.infer(new, num_states=8)  # the default search scores all states of so small a space
    torch.testing.assert_close(by_default.population().free_energy(), exact.population().free_energy(), rtol=1e-9, atol=1e-9)


def test_a_guide_that_is_copied_with_its_model_follows_the_copy():
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.nn.Parameter(torch.tensor(0.0))

        def forward(self, y):
            with pyro.plate("data", len(y)):
                z = pyro.sample("z", dist.Bernoulli(0.5))
                pyro.sample("y", dist.Normal(z + self.shift, 1.0), obs=y)

    y = torch.tensor([0.2, 1.5])
    parts = torch.nn.ModuleDict({"model": Shifted()})
    parts["guide"] = AutoTruncated(parts["model"])
    parts["guide"](y)
    twin = copy.deepcopy(parts)
    twin["model"].shift.data.fill_(1.0)
    twin["guide"].refresh_(y)
    parts["guide"].refresh_(y)
    for each in (parts, twin):
        expected = torch.sigmoid(y - each["model"].shift - 0.5)  # of two normal densities, one apart
        torch.testing.assert_close(each["guide"].marginals()["z"].flatten(), expected.detach())
    assert copy.deepcopy(twin["guide"]).model is twin["model"]


def test_a_guide_of_a_method_follows_the_copy_of_its_module():
    class Shifted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = torch.tensor(0.0)
            self.posterior = AutoTruncated(self.model)

        def model(self, y):
            with pyro.plate("data", len(y)):
                z = pyro.sample("z", dist.Bernoulli(0.5))
                pyro.sample("y", dist.Normal(z + self.shift, 1.0), obs=y)

    y, module = torch.tensor([0.2, 1.5]), Shifted()
    module.posterior(y)
    twin = copy.deepcopy(module)
    twin.shift = torch.tensor(1.0)
    assert twin.posterior.model == twin.model
    assert copy.deepcopy(module.posterior).model == module.model
    for each in (module, twin):
        each.posterior.refresh_(y)
        torch.testing.assert_close(each.posterior.marginals()["z"].flatten(), torch.sigmoid(y - each.shift - 0.5))


def test_a_guide_is_copied_after_steps_that_changed_a_parameter_of_its_prior():
    y = torch.randn(20, 3)

    def model(y):
        logits = pyro.param("logits", torch.zeros(3))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(logits=logits).to_event(1))
            pyro.sample("y", dist.Normal(s, 1.0).to_event(1), obs=y)

    guide = AutoTruncated(model, num_states=4)
    svi = SVI(model, guide, Adam({"lr": 0.1}), Truncated_ELBO())
    for _ in range(2):
        svi.step(y)
    twin = copy.deepcopy(guide)
    torch.testing.assert_close(twin.marginals(), guide.marginals())
    assert Truncated_ELBO().loss(model, twin, y) == Truncated_ELBO().loss(model, guide, y)


def test_initial_states_from_the_user():
    case = zoo.binary()
    states = torch.stack([torch.cat(zoo.binary_states(5))[torch.randperm(32)[:6]] for _ in range(6)])
    for init in (states, {"s": states}, lambda: states):
        guide = AutoTruncated(case.model, num_states=6, init=init)
        guide.setup(*case.args)
        assert torch.equal(guide.states()["s"], states)


def test_seed_reproduces():
    case = zoo.binary()
    losses = []
    for _ in range(2):
        pyro.set_rng_seed(3)
        pyro.clear_param_store()
        guide = AutoTruncated(case.model, num_states=6)
        svi = SVI(case.model, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch(parents=3, children=2, generations=2)))
        losses.append([svi.step(*case.args) for _ in range(5)])
    assert losses[0] == losses[1]


# --- errors ---


def run(model, *args, num_states=2, **options):
    guide = AutoTruncated(model, num_states=num_states, **options)
    return Truncated_ELBO(SampledSearch(4)).loss_and_grads(model, guide, *args)


def test_unbounded_counts_are_refused_by_name():
    case = zoo.counts()
    with pytest.raises(ValueError, match=r"site 'n' \(Poisson\) has infinite support and no bound.*max_count=\{'n': 20\}"):
        run(case.model, *case.args)


def test_bad_initial_states():
    case = zoo.binary()
    good = torch.stack([torch.cat(zoo.binary_states(5))[:6]] * 6)
    repeated = good.clone()
    repeated[4, 1] = repeated[4, 2]
    for init, message in [
        (repeated, r"initial states repeat within 1 of 6 data points \(first: data point 4\)"),
        (good[:5], r"must start with the dimensions \(num_data, num_states\) = \(6, 6\); got \(5, 6\)"),
        (good[..., :4], r"states for site 's' must end in the dimensions \(5,\); got shape \(6, 6, 4\)"),
        (good + 0.5, "states for site 's' hold values outside its support"),
        ({"t": good}, r"states are needed for the sites \['s'\]; got \['t'\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            run(case.model, *case.args, num_states=6, init=init)


def test_nan_and_inf_name_the_site():
    def model(y, extra):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
            pyro.sample("y", dist.Normal(s.sum(-1), 1.0), obs=y)
            pyro.factor("penalty", torch.where(s.sum(-1) == 2, extra, 0.0))

    y = torch.randn(3)
    with pytest.raises(ValueError, match=r"the log joint is \+inf at site 'penalty' for a state of data point 0"):
        run(model, y, torch.inf, num_states=4)
    y[1] = torch.nan
    with pytest.raises(ValueError, match="site 'y' observes nan at data point 1"):
        run(model, y, 0.0, num_states=4)
    with pyro.validation_enabled(False), pytest.raises(ValueError, match="log joint is NaN at site 'y' for a state of data point 1"):
        run(model, y, 0.0, num_states=4)


def test_impossible_data():
    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.5)).to_event(1))
            pyro.factor("impossible", torch.where(y > 0, -torch.inf, s.sum(-1)))

    with pytest.raises(ValueError, match=r"probability zero to every state in the populations of 2 data points \(first: 1"):
        run(model, torch.tensor([0.0, 1.0, 1.0]), num_states=2)


def test_states_of_probability_zero_are_harmless():
    def model(y):
        rate = pyro.param("rate", torch.tensor(0.4, dtype=D64))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(rate.expand(2)).to_event(1))
            pyro.factor("or", torch.where(s.amax(-1) == y, 0.0, -torch.inf).to(D64))

    y = torch.tensor([0.0, 1.0, 1.0], dtype=D64)
    rate = torch.tensor(0.4, dtype=D64, requires_grad=True)
    exact = (1 - rate).square().log() + 2 * (1 - (1 - rate).square()).log()
    exact.backward()
    guide = AutoTruncated(model, num_states=4)
    for elbo in (Truncated_ELBO(ExhaustiveSearch()), TraceEnum_ELBO(max_plate_nesting=1)):
        assert elbo.loss_and_grads(model, guide, y) == pytest.approx(-exact.item(), rel=1e-9)
        param = pyro.get_param_store()._params["rate"]
        torch.testing.assert_close(param.grad, -rate.grad)
        param.grad = None


def test_other_data_than_trained_on():
    case = zoo.binary()
    guide = trained(case, 4)
    with pytest.raises(
        ValueError, match=r"holds populations of 6 data points, but the model's data plate \['data'\] now has 4.*guide.infer"
    ):
        guide(case.args[0][:4])


def test_subsample_out_of_range():
    y = torch.randn(6, dtype=D64)

    def model(y, index):
        with pyro.plate("data", 6, subsample=index) as i:
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.5, dtype=D64)))
            pyro.sample("y", dist.Normal(s, 1.0), obs=y[i % 6])

    guide = AutoTruncated(model, num_states=2)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y, torch.tensor([1, 5]))
    with pytest.raises(ValueError, match=r"subsample indices of plate 'data' must lie in 0 .. 5; got 1 .. 6"):
        guide(y, torch.tensor([1, 6]))
    with pytest.raises(ValueError, match=r"got -1 .. 2"):
        guide.population(torch.tensor([-1, 2]))


def test_blocked_model_is_noticed():
    case = zoo.binary()
    guide = AutoTruncated(poutine.block(case.model, expose=["s"]), num_states=2)
    with pytest.warns(UserWarning, match="sees no observed site"):
        guide.setup(*case.args)


def test_no_discrete_site_and_unused_guide():
    with pytest.raises(ValueError, match="no discrete latent site"):
        run(lambda y: pyro.sample("x", dist.Normal(0.0, 1.0)), torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"call it .* once with the model's arguments"):
        AutoTruncated(zoo.binary().model).weights()


@pytest.mark.parametrize(
    "fn",
    [
        dist.Empirical(torch.tensor([0.0, 2.0, 5.0]), torch.zeros(3)),
        dist.OneOneMatching(torch.zeros(3, 3)),
        dist.OneTwoMatching(torch.zeros(4, 2)),
        dist.TransformedDistribution(dist.Poisson(1.0), [torch.distributions.transforms.AffineTransform(1.0, 1.0)]),
    ],
    ids=lambda fn: type(fn).__name__,
)
def test_discrete_distributions_that_are_not_supported_are_named(fn):
    def model(y):
        k = pyro.sample("k", fn)
        pyro.sample("y", dist.Normal(k.double().sum(), 1.0), obs=y)

    with pytest.raises(NotImplementedError, match=rf"'k' \({type(fn).__name__}\) is not supported. Write it with"):
        run(model, torch.zeros(()))


def test_never_scored_populations_have_no_weights():
    case = zoo.binary()
    guide = AutoTruncated(case.model, num_states=4)
    guide.setup(*case.args)
    with pytest.raises(RuntimeError, match="never been scored"):
        guide.weights()
    guide.refresh_(*case.args)
    guide.weights()


def test_memory_budget_does_not_change_results():
    case = zoo.nested()
    losses = set()
    for budget in (2**20, 2**28):
        guide = AutoTruncated(case.model, num_states=case.num_states, memory_budget=budget)
        losses.add(round(Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(case.model, guide, *case.args), 8))
    assert len(losses) == 1


def test_an_uncovered_local_latent_leaves_a_bound():
    y = torch.randn(5, dtype=D64)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.5, dtype=D64)))
            z = pyro.sample("z", dist.Normal(torch.tensor(0.0, dtype=D64), 1e-3))
            pyro.sample("y", dist.Normal(s + z, 1.0), obs=y)

    exact = (
        torch.stack([dist.Normal(k, (1 + 1e-6) ** 0.5).log_prob(y) for k in (0.0, 1.0)]).logsumexp(0).sum() - 5 * torch.tensor(2.0).log()
    )
    guide = AutoTruncated(model, num_states=2)
    with pytest.warns(UserWarning, match="no guide covers"):
        loss = Truncated_ELBO(ExhaustiveSearch()).loss(model, guide, y)
    assert loss == pytest.approx(-exact.item(), abs=0.05)


def test_scales_per_data_point_are_refused():
    def model(y):
        with pyro.plate("data", len(y)), poutine.scale(scale=torch.arange(1.0, 4.0)):
            s = pyro.sample("s", dist.Bernoulli(0.5))
            pyro.sample("y", dist.Normal(s, 1.0), obs=y)

    with pytest.raises(ValueError, match="one positive scale for all data points"):
        run(model, torch.randn(3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("whole_states", [True, False])
def test_programs_in_half_precision_are_scored_in_single(dtype, whole_states):
    loc = torch.tensor([-1.0, 1.5], dtype=dtype)

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((2,), 0.25, dtype=dtype)).to_event(1))
            pyro.sample("y", dist.Normal((s.to(dtype) * loc).sum(-1), torch.ones((), dtype=dtype)), obs=y)

    y = torch.tensor([0.5, -1.0, 2.0], dtype=dtype)
    guide = AutoTruncated(model, num_states=4, whole_states=whole_states)
    guide.refresh_(y)
    states = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
    table = dist.Normal(states @ loc.float(), 1.0).log_prob(y.float().unsqueeze(-1)) + dist.Bernoulli(0.25).log_prob(states).sum(-1)
    found = guide.marginals()["s"]
    assert found.dtype == torch.float32
    # All numbers are sums of powers of two, and densities keep three digits.
    torch.testing.assert_close(found, table.softmax(-1) @ states, rtol=0.02, atol=0.02)


def test_no_data_points_can_be_read():
    def model(y):
        with pyro.plate("data", len(y)):
            n = pyro.sample("n", dist.Poisson(2.0))
            pyro.sample("y", dist.Normal(n, 1.0), obs=y)

    guide = AutoTruncated(model, num_states=4, max_count=5, whole_states=True)
    guide.refresh_(torch.tensor([1.0, 2.0]))
    assert guide.marginals(torch.empty(0, dtype=torch.int64))["n"].shape == (0, 6)
