"""What users do to a guide beyond plain training: each works, or says clearly why not. Also the checks that users can run themselves."""

from __future__ import annotations

import copy
import gc
import io
import pickle

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import ELBO, SVI, JitTraceEnum_ELBO, Predictive, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.infer.reparam import LocScaleReparam
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.ops.indexing import Vindex
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.testing import check_guide, enumerate_log_joint
from tests import zoo

D64 = torch.float64
NUM_LATENTS = 4
WEIGHT = torch.linspace(-1, 1, 12, dtype=D64).reshape(3, NUM_LATENTS)
CLASSES = torch.tensor([0.2, 0.5, 0.3], dtype=D64)
RATE = torch.full((NUM_LATENTS,), 0.3, dtype=D64)


def vectors(y, batch_size=None, *, noise=1.0, bend=torch.clone):
    weight = pyro.param("weight", lambda: WEIGHT.clone())
    with pyro.plate("data", len(y), subsample_size=batch_size) as index:
        s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
        pyro.sample("y", dist.Normal(bend(s @ weight.mT), noise).to_event(1), obs=y[index])


def clusters(y=None, size=None):
    loc = pyro.sample("loc", dist.Normal(torch.zeros(3, dtype=D64), 2.0).to_event(1))
    with pyro.plate("data", len(y) if size is None else size):
        z = pyro.sample("z", dist.Categorical(CLASSES))
        return pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 0.01), obs=y)


def vector_data() -> Tensor:
    return torch.randn(8, 3, dtype=D64)


def cluster_data() -> Tensor:
    return torch.randn(8, dtype=D64)


def best_class(loc: Tensor, y: Tensor) -> Tensor:
    """The most probable class of each observation given the centres."""
    return (dist.Normal(loc, 0.01).log_prob(y.unsqueeze(-1)) + CLASSES.log()).argmax(-1)


def clusters_guide(part: type = AutoNormal) -> AutoGuideList:
    guide = AutoGuideList(clusters)
    guide.append(part(poutine.block(clusters, hide=["z"])))
    guide.append(AutoTruncated(clusters, 3))
    return guide


def truncated(**options) -> Truncated_ELBO:
    return Truncated_ELBO(ExhaustiveSearch(), **{"max_plate_nesting": 1, **options})


def train(model, guide, *args, steps: int = 3, elbo: ELBO | None = None, **kwargs) -> list[float]:
    svi = SVI(model, guide, Adam({"lr": 0.05}), elbo or truncated())
    return [svi.step(*args, **kwargs) for _ in range(steps)]


def evaluate(elbo: ELBO, model, guide, *args) -> tuple[float, dict[str, Tensor]]:
    for _, value in pyro.get_param_store().named_parameters():
        value.grad = None
    loss = elbo.loss_and_grads(model, guide, *args)
    return loss, {name: value.grad.clone() for name, value in pyro.get_param_store().named_parameters()}


def assert_same(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-9)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-7, atol=1e-9)


# --- what belongs to the objective ---


def masked_chain(y, mask, rates):
    rates = pyro.param("rates", lambda: rates.clone())
    with pyro.plate("data", len(y)):
        a = pyro.sample("a", dist.Bernoulli(rates[0]))
        with poutine.mask(mask=mask):
            b = pyro.sample("b", dist.Bernoulli(Vindex(rates)[1 + a.long()]))
        pyro.sample("y", dist.Normal(a + 2 * b, 1.0), obs=y)


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_masked_latents_keep_their_distribution_as_under_enumeration(scale):
    args = (cluster_data(), torch.arange(8) % 3 > 0, torch.tensor([0.3, 0.2, 0.9], dtype=D64))
    model = poutine.scale(masked_chain, scale=scale)
    guide = AutoTruncated(model, 4)
    stock = TraceEnum_ELBO(max_plate_nesting=1)
    train(model, guide, *args, steps=1)
    expected = evaluate(stock, config_enumerate(model, "parallel"), lambda *args: None, *args)
    assert_same(evaluate(truncated(), model, guide, *args), expected)
    assert_same(evaluate(stock, model, guide, *args), expected)


def test_what_is_observed_outside_the_data_plate_counts():
    def model(y, x):
        weight = pyro.param("weight", lambda: WEIGHT.clone())
        pyro.factor("ridge", -weight.square().sum())
        pyro.sample("prior", dist.Delta(weight, log_density=-weight.abs().sum(), event_dim=2))
        with pyro.plate("others", len(x)):
            pyro.sample("x", dist.Normal(weight.sum(), 1.0), obs=x)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 1.0).to_event(1), obs=y)

    args = (vector_data(), cluster_data())
    guide = AutoTruncated(model, 16)
    train(model, guide, *args, steps=1)
    elbo = truncated()
    loss, gradients = evaluate(elbo, model, guide, *args)
    assert elbo.loss(model, guide, *args) == pytest.approx(loss, rel=1e-12)
    assert elbo.differentiable_loss(model, guide, *args).item() == pytest.approx(loss, rel=1e-12)
    weight = pyro.param("weight").detach().requires_grad_()
    s = guide.space.unpack(guide.space.enumerate(), D64)
    table = dist.Bernoulli(RATE).log_prob(s).sum(-1) + dist.Normal(s @ weight.mT, 1.0).log_prob(args[0].unsqueeze(1)).sum(-1)
    exact = table.logsumexp(-1).sum() + dist.Normal(weight.sum(), 1.0).log_prob(args[1]).sum()
    exact = exact - weight.square().sum() - weight.abs().sum()
    (-exact).backward()
    assert loss == pytest.approx(-exact.item(), rel=1e-9)
    torch.testing.assert_close(gradients["weight"], weight.grad, rtol=1e-9, atol=1e-9)


def test_deterministic_sites_follow_the_states():
    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            mean = pyro.sample("mean", dist.Delta(s @ WEIGHT.mT, event_dim=1))
            mean = pyro.deterministic("doubled", 2 * mean, event_dim=1)
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    def plain(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            pyro.sample("y", dist.Normal(2 * s @ WEIGHT.mT, 1.0).to_event(1), obs=y)

    y = vector_data()
    losses = [train(m, AutoTruncated(m, 16), y, steps=1)[0] for m in (model, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_the_loss_is_that_of_the_model_given_to_svi():
    y = vector_data()
    guide = AutoTruncated(vectors, 16)
    train(vectors, guide, y)
    louder = poutine.scale(vectors, scale=2.0)
    stock = TraceEnum_ELBO(max_plate_nesting=1)
    assert truncated().loss(louder, guide, y) == pytest.approx(stock.loss(louder, guide, y), rel=1e-12)
    assert truncated().loss(louder, guide, y) != pytest.approx(truncated().loss(vectors, guide, y), rel=1e-3)


@pytest.mark.parametrize("handler", ["condition", "obs_mask"])
def test_observed_values_of_discrete_sites(handler):
    y, known = cluster_data(), torch.randint(3, (8,))
    seen = torch.ones(8, dtype=torch.bool) if handler == "condition" else torch.arange(8) % 2 == 0
    probs = CLASSES

    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.tensor(0.4, dtype=D64)))
            observed = {"obs": known, "obs_mask": seen} if handler == "obs_mask" else {}
            z = pyro.sample("z", dist.Categorical(probs), **observed)
            pyro.sample("y", dist.Normal(z + s, 1.0), obs=y)

    if handler == "condition":
        model = poutine.condition(model, data={"z": known})
    guide = AutoTruncated(model, 2 if handler == "condition" else 6)
    loss = train(model, guide, y, steps=1)[0]
    prior = dist.Bernoulli(torch.tensor(0.4, dtype=D64)).log_prob(torch.tensor([0.0, 1.0], dtype=D64))
    sums = torch.arange(3, dtype=D64).unsqueeze(-1) + torch.tensor([0.0, 1.0], dtype=D64)
    per_class = (dist.Normal(sums, 1.0).log_prob(y[:, None, None]) + prior).logsumexp(-1) + probs.log()
    exact = torch.where(seen, per_class.gather(-1, known.unsqueeze(-1)).squeeze(-1), per_class.logsumexp(-1)).sum()
    assert loss == pytest.approx(-exact.item(), rel=1e-9)


# --- guides in company ---


def test_a_plain_function_as_the_guide():
    y = cluster_data()
    part = AutoTruncated(clusters, 3)

    def guide(y):
        loc = pyro.param("loc_of_guide", lambda: torch.tensor([-1.0, 0.0, 1.0], dtype=D64))
        pyro.sample("loc", dist.Delta(loc, event_dim=1))
        return part(y)

    losses = train(clusters, guide, y, steps=3)
    assert losses[-1] < losses[0]
    stock = TraceEnum_ELBO(max_plate_nesting=1)
    loc = pyro.param("loc_of_guide").detach()
    prior = dist.Normal(0.0, 2.0).log_prob(loc).sum()
    mixed = dist.Normal(loc, 0.01).log_prob(y.unsqueeze(-1)) + CLASSES.log()
    exact = -(prior + mixed.logsumexp(-1).sum()).item()
    assert stock.loss(clusters, guide, y) == pytest.approx(exact, rel=1e-9)
    assert truncated().loss(clusters, guide, y) == pytest.approx(exact, rel=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("vectorize", [False, True])
def test_particles_in_company(vectorize):
    y = cluster_data()
    guide = clusters_guide()
    train(clusters, guide, y)
    elbo = truncated(num_particles=4, vectorize_particles=vectorize)
    stock = TraceEnum_ELBO(max_plate_nesting=1, num_particles=4, vectorize_particles=vectorize)
    losses = []
    enumerated = config_enumerate(clusters, "parallel")
    continuous = lambda y: (guide._create_plates(y), guide[0](y))[1]  # noqa: E731
    for loss, model, whole in ((elbo, clusters, guide), (stock, clusters, guide), (stock, enumerated, continuous)):
        pyro.set_rng_seed(5)
        losses.append(loss.loss(model, whole, y))
    assert losses[0] == losses[1]
    if vectorize:  # otherwise the guides consume different random numbers between particles
        assert losses[0] == pytest.approx(losses[2], rel=1e-9)
    assert len(train(clusters, guide, y, elbo=elbo)) == 3


def test_guides_of_what_states_depend_on_come_first():
    guide = AutoGuideList(clusters)
    guide.append(AutoTruncated(clusters, 3))
    guide.append(AutoNormal(poutine.block(clusters, hide=["z"])))
    with pytest.raises(
        ValueError, match=r"draws of the latents \['loc'\], but the guides of these come after it.*append AutoTruncated last"
    ):
        guide(cluster_data())


def test_one_truncated_part_takes_all_discrete_sites():
    case = zoo.two_sites()
    guide = AutoGuideList(case.model)
    guide.append(AutoTruncated(case.model, 4))
    guide.append(AutoTruncated(case.model, 4))
    with pytest.raises(ValueError, match="can hold only one AutoTruncated"):
        guide(*case.args)


@pytest.mark.parametrize("blocked", [{"hide": ["loc"]}, {"expose": ["z"]}])
def test_models_with_hidden_latents_are_refused(blocked):
    model = poutine.scale(poutine.block(clusters, **blocked), scale=2.0)
    with pytest.raises(ValueError, match=r"hides its latents \['loc'\] .*Give AutoTruncated the whole model"):
        AutoTruncated(model, 3)(cluster_data())


def test_latents_without_a_guide_are_noticed_everywhere():
    y = cluster_data()
    guide = AutoTruncated(clusters, 3)
    for use in (guide, guide.refresh_, guide.posterior, guide.median):
        with pytest.warns(UserWarning, match=r"no guide covers the latents \['loc'\]"):
            use(y)
    with pytest.raises(ValueError, match=r"could only draw the latents \['loc'\]"):
        guide.infer(y, ExhaustiveSearch(), 1)


@pytest.mark.slow
def test_a_direct_call_of_a_list_draws_states_that_fit_the_other_latents():
    y = cluster_data()
    guide = clusters_guide()
    train(clusters, guide, y)
    for _ in range(10):
        draw = guide(y)
        # Noise of 0.01 leaves no doubt about the nearest centre, unless two are about as near.
        nearest = (draw["loc"] - y.unsqueeze(-1)).abs().sort(-1)
        clear = nearest.values[:, 1].square() - nearest.values[:, 0].square() > 0.01
        assert clear.any()
        assert torch.equal(draw["z"][clear], nearest.indices[clear, 0])


def test_medians_of_a_list_are_not_random():
    y = cluster_data()
    guide = clusters_guide()
    train(clusters, guide, y)
    medians = [guide.median(y) for _ in range(3)]
    assert torch.equal(medians[0]["z"], best_class(medians[0]["loc"], y))
    assert all(torch.equal(medians[0]["z"], other["z"]) for other in medians)


def test_new_data_with_trained_globals():
    guide = clusters_guide(AutoDelta)
    train(clusters, guide, cluster_data())
    new = torch.randn(5, dtype=D64)
    found = guide[1].infer(new, ExhaustiveSearch(), steps=1)
    loc = guide[0].median()["loc"].detach()
    assert torch.equal(found.mode()["z"], best_class(loc, new))

    def together(y, size=None):
        return {**guide[0](y), **found(y)}

    samples = Predictive(clusters, guide=together, num_samples=4)(new)
    assert samples["z"].shape == (4, 5)
    assert torch.equal(samples["loc"].reshape(4, 3), loc.expand(4, 3))


def test_predictive_generates_observations_from_the_posterior():
    y = cluster_data()
    guide = clusters_guide(AutoDelta)
    train(clusters, guide, y)
    for parallel in (False, True):
        predicted = Predictive(lambda y: clusters(None, len(y)), guide=guide, num_samples=6, parallel=parallel)(y)["y"]
        assert predicted.shape == (6, 8)
        loc = guide.median(y)["loc"].detach()
        # All predictions lie within eight standard deviations of a centre.
        assert (predicted.unsqueeze(-1) - loc).abs().amin(-1).max() < 0.08


@pytest.mark.slow
def test_reparameterised_models():
    def centred(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("components", 3):
            loc = pyro.sample("loc", dist.Normal(mean, 2.0))
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(Vindex(loc)[..., z], 0.5), obs=y)

    model = poutine.reparam(centred, config={"loc": LocScaleReparam(0.0)})
    guide = AutoGuideList(model)
    guide.append(AutoDelta(poutine.block(model, hide=["z"])))
    guide.append(AutoTruncated(model, 3))
    losses = train(model, guide, cluster_data().float(), steps=20)
    assert guide[1].layout.other_latents == ["mean", "loc_decentered"]
    assert losses[-1] < losses[0]


class Decoder(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = PyroParam(WEIGHT.clone())
        self.shift = PyroSample(dist.Normal(torch.zeros((), dtype=D64), 1.0))

    def forward(self, y):
        shift = self.shift
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            pyro.sample("y", dist.Normal(s @ self.weight.mT + shift, 0.5).to_event(1), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_modules_with_local_and_global_parameters(local):
    y = vector_data()
    with pyro.settings.context(module_local_params=local):
        model = Decoder()
        guide = AutoGuideList(model)
        guide.append(AutoDelta(poutine.block(model, hide=["s"])))
        guide.append(AutoTruncated(model, 16))
        if local:
            loss = truncated()(model, guide)
            loss(y)
            assert len(list(loss.parameters())) == 2
            optimiser = torch.optim.Adam(loss.parameters(), lr=0.05)
            losses = []
            for _ in range(20):
                optimiser.zero_grad()
                value = loss(y)
                value.backward()
                optimiser.step()
                losses.append(value.item())
        else:
            losses = train(model, guide, y, steps=20)
    assert losses[-1] < losses[0]


def test_two_guides_over_one_model_do_not_disturb_each_other():
    y = vector_data()
    small, large = AutoTruncated(vectors, 4), AutoTruncated(vectors, 16)
    train(vectors, small, y)
    words = small.words.clone()
    train(vectors, large, y)
    assert torch.equal(small.words, words)
    assert truncated().loss(vectors, large, y) < truncated().loss(vectors, small, y)


def test_minibatches_passed_as_data_with_their_positions():
    y = vector_data()

    def model(batch, positions):
        with pyro.plate("data", len(y), subsample=positions):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            pyro.sample("y", dist.Normal(s @ WEIGHT.mT, 1.0).to_event(1), obs=batch)

    guide = AutoTruncated(model, 16)
    total = 0.0
    for positions in torch.tensor([6, 1, 3, 0, 2, 7, 5, 4]).split(2):
        total += train(model, guide, y[positions], positions, steps=1)[0] * 2 / 8
    full = AutoTruncated(vectors, 16)
    assert total == pytest.approx(train(vectors, full, y, steps=1)[0], rel=1e-9)


def test_a_step_runs_the_model_no_more_often_than_it_must():
    runs = []

    def counted(y):
        clusters(y)
        # At the end: to learn what plates it opens, the model runs no further than them.
        runs.append(1)

    y = cluster_data()
    guide = AutoGuideList(counted)
    guide.append(AutoNormal(poutine.block(counted, hide=["z"])))
    guide.append(AutoTruncated(counted, 2))
    svi = SVI(counted, guide, Adam({"lr": 0.01}), truncated())
    svi.step(y)
    runs.clear()
    svi.step(y)
    assert len(runs) == 4  # to see the minibatch, to score the old states, to score all states, for the loss


@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("is_linear", [False, True])
def test_a_step_of_a_guide_that_stands_alone_runs_the_model_no_more_often_than_it_must(is_linear, differentiable):
    runs = []

    def counted(y):
        runs.append(1)
        vectors(y, bend=torch.clone if is_linear else torch.relu)

    y = vector_data()
    guide = AutoTruncated(counted, 4)
    elbo = truncated()
    elbo.loss_and_grads(counted, guide, y)
    runs.clear()
    (elbo.differentiable_loss if differentiable else elbo.loss_and_grads)(counted, guide, y)
    # To see the minibatch; to score the old states, to score all states, for the gradient. Or to see the parameters of linear means.
    assert len(runs) == (2 if is_linear else 4)
    runs.clear()
    elbo.loss(counted, guide, y)
    assert len(runs) == 2


def test_no_temperature_beside_other_guides():
    with pytest.raises(NotImplementedError, match="a temperature needs a guide that is one AutoTruncated"):
        train(clusters, clusters_guide(), cluster_data(), elbo=truncated(temperature=2.0))


# --- copies and compilers ---


def test_deepcopy_shares_the_model_and_nothing_else():
    y = vector_data()
    guide = AutoTruncated(vectors, 4)
    train(vectors, guide, y)
    duplicate = copy.deepcopy(guide)
    assert duplicate.model is guide.model is vectors
    assert truncated().loss(vectors, duplicate, y) == truncated().loss(vectors, guide, y)
    before = guide.words.clone()
    duplicate.words.zero_()
    assert torch.equal(guide.words, before)


def test_deepcopy_beside_parameters_with_a_constraint():
    def model(y):
        noise = pyro.param("noise", lambda: torch.ones((), dtype=D64), constraint=dist.constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            pyro.sample("y", dist.Normal(s @ WEIGHT.mT, noise).to_event(1), obs=y)

    y = vector_data()
    guide = AutoTruncated(model, 16)
    train(model, guide, y)
    assert truncated().loss(model, copy.deepcopy(guide), y) == truncated().loss(model, guide, y)


def test_deepcopy_of_a_list_trains_on():
    y = cluster_data()
    guide = clusters_guide()
    train(clusters, guide, y)
    duplicate = copy.deepcopy(guide)
    assert duplicate[1].master() is duplicate
    assert guide[1].master() is guide
    assert len(train(clusters, duplicate, y)) == len(train(clusters, guide, y))


def test_pickled_guides_can_be_read_but_need_their_model_to_be_used():
    y = vector_data()
    guide = AutoTruncated(vectors, 4, conditional=None, init=None)
    train(vectors, guide, y)
    loaded = pickle.loads(pickle.dumps(guide))
    assert torch.equal(loaded.marginals()["s"], guide.marginals()["s"])
    assert guide.model is vectors
    with pytest.raises(RuntimeError, match=r"was pickled, which leaves its model behind.*load its state_dict"):
        loaded(y)
    file = io.BytesIO()
    torch.save(guide, file)
    assert guide(y)["s"].shape == (8, NUM_LATENTS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tracing_by_jit_is_refused():
    guide = AutoTruncated(vectors, 4)
    y = vector_data()
    train(vectors, guide, y)
    with pytest.raises(NotImplementedError, match=r"cannot be traced by torch\.jit"):
        JitTraceEnum_ELBO(max_plate_nesting=1).loss_and_grads(vectors, guide, y)


def train_in_parallel(y: Tensor) -> list[float]:
    with pyro.settings.context(module_local_params=True):
        model = Decoder()
        guide = AutoGuideList(model)
        guide.append(AutoDelta(poutine.block(model, hide=["s"])))
        guide.append(AutoTruncated(model, 16))
        loss = truncated()(model, guide)
        loss(y)
        parallel = torch.nn.parallel.DistributedDataParallel(loss)
        optimiser = torch.optim.SGD(parallel.parameters(), lr=0.01)
        losses = []
        for _ in range(5):
            optimiser.zero_grad()
            value = parallel(y)
            value.backward()
            optimiser.step()
            losses.append(value.item())
    return losses


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*broadcast_buffers.*:FutureWarning")
def test_data_parallel_training():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        losses = train_in_parallel(vector_data())
        # The module goes before its process group: as the last to hold it, it would wait for the group's threads with the interpreter
        # locked, which these may be waiting for.
        gc.collect()
    finally:
        torch.distributed.destroy_process_group()
    assert losses[-1] < losses[0]


def test_validation_switched_off():
    y = vector_data()
    losses = []
    for validate in (True, False):
        pyro.clear_param_store()
        with pyro.validation_enabled(validate):
            losses.append(train(vectors, AutoTruncated(vectors, 16), y))
    assert losses[0] == losses[1]


def test_structure_can_be_inspected():
    guide = clusters_guide()
    relations = pyro.infer.inspect.get_model_relations(guide, (cluster_data(),))
    assert relations["sample_dist"]["z_index"] == "Categorical"
    assert relations["plate_sample"]["data"] == ["z_index", "z"]


# --- models that do not vectorise, and the checks for users ---


def test_models_that_do_not_vectorise_are_told_how():
    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            mean = torch.stack([WEIGHT @ s[n] for n in range(len(y))])
            pyro.sample("y", dist.Normal(mean, 1.0).to_event(1), obs=y)

    with pytest.raises(RuntimeError) as error:
        train(model, AutoTruncated(model, 16, vectorize=True), vector_data())
    assert any("many states at once, in a new left-most dimension: 's' of shape (16, 8, 4)" in note for note in error.value.__notes__)


def test_check_guide_finds_models_that_vectorise_wrongly():
    def model(y):
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(RATE).to_event(1))
            flat = s.reshape(len(y), -1)[:, :NUM_LATENTS]
            pyro.sample("y", dist.Normal(flat @ WEIGHT.mT, 1.0).to_event(1), obs=y)

    y = vector_data()
    guide = AutoTruncated(model, 4, vectorize=True)
    train(model, guide, y)
    with pytest.raises(AssertionError, match=r"differ from those of plain runs of the model .*left-most dimension"):
        check_guide(guide, y)


@pytest.mark.nightly(keep=5)
@pytest.mark.slow
@pytest.mark.parametrize("make", zoo.CASES, ids=lambda make: make.__name__)
def test_check_guide_passes_where_all_is_well(make):
    case = make()
    guide = AutoTruncated(case.model, max(1, case.num_states // 2), max_count=case.max_count)
    check_guide(guide, *case.args)
    train(case.model, guide, *case.args, elbo=truncated(max_plate_nesting=2))
    check_guide(guide, *case.args)
    exact = case.table().detach()
    table = enumerate_log_joint(guide, *case.args)
    assert table.shape == (case.num_data, guide.space.size)
    torch.testing.assert_close(table.logsumexp(-1), exact.logsumexp(0), rtol=1e-9, atol=1e-9)


def test_check_guide_in_company_and_on_minibatches():
    y = cluster_data()
    guide = clusters_guide()
    train(clusters, guide, y)
    check_guide(guide[1], y)
    batches, y = AutoTruncated(vectors, 8), vector_data()
    train(vectors, batches, y, 3)
    check_guide(batches, y, 3)


def test_check_guide_finds_repeated_states():
    y = vector_data()
    guide = AutoTruncated(vectors, 4)
    train(vectors, guide, y)
    guide.words[3, 1] = guide.words[3, 0]
    with pytest.raises(ValueError, match=r"states repeat within 1 of 8 data points \(first: 3\)"):
        check_guide(guide, y)


def test_enumeration_of_given_latents_and_its_limits():
    y = cluster_data()
    guide = AutoTruncated(clusters, 3)
    loc = torch.tensor([-1.0, 0.0, 1.0], dtype=D64)
    table = enumerate_log_joint(guide, y, values={"loc": loc})
    exact = dist.Normal(loc, 0.01).log_prob(y.unsqueeze(-1)) + CLASSES.log()
    torch.testing.assert_close(table, exact)
    with pytest.raises(ValueError, match="the space has 3 states per data point, more than max_states=2"):
        enumerate_log_joint(guide, y, values={"loc": loc}, max_states=2)
    with_conditional = AutoTruncated(vectors, 4, conditional=lambda states, *args: None)
    with pytest.raises(NotImplementedError, match="conditional"):
        check_guide(with_conditional, vector_data())


def test_kwargs_reach_the_model():
    y = vector_data()
    guide = AutoTruncated(vectors, 8)
    losses = [train(vectors, guide, y=y, noise=noise, steps=1)[0] for noise in (1.0, 0.5)]
    assert losses[0] != losses[1]
    assert guide.infer((), EvolutionarySearch(parents=2, children=2), steps=1, y=y[:5], noise=0.5).words.shape == (5, 8, 1)
