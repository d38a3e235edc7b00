"""What mixtures whose log joints are linear in features of the data have in common: their search, and what they expect of data."""

from __future__ import annotations

import pickle

import pyro
import pytest
import torch
from pyro.distributions import Categorical, Normal, Poisson
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Population, StateSpace, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding, CategoricalMixture, GaussianMixture, PoissonMixture
from pyro_truncated.models.linear_mixture import LinearMixture, Shares
from tests.models.mixture import log_joint

D64 = torch.float64
KINDS = ("full", "diag", "spherical", "tied", "low-rank", "shared noise", "poisson", "categorical")


def problem(kind: str, number: int = 6, num_data: int = 120) -> tuple[LinearMixture, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = 3 * torch.randn(num_data, 4, generator=generator, dtype=D64)
    if kind == "poisson":
        y = y.abs().round()
        return PoissonMixture(4, number, dtype=D64).initialize(y, generator), y
    if kind == "categorical":
        y = (y.abs().round() % 4).clamp(max=3)
        return CategoricalMixture(4, number, 4, dtype=D64).initialize(y, generator), y
    is_shared = kind == "shared noise"
    covariance, rank = ("low-rank", 2) if is_shared or kind == "low-rank" else (kind, None)
    model = GaussianMixture(4, number, covariance=covariance, rank=rank, shared_noise=is_shared, pseudo_data=0, dtype=D64)
    return model.initialize(y + 100, generator), y + 100


@pytest.mark.parametrize("kind", KINDS)
def test_linear_functions_of_different_data_points_can_be_compared(kind: str) -> None:
    model, y = problem(kind)
    functions, features = model.linear_functions(y), model.linear_features(y)
    offset = functions.offset(features)
    missing = (log_joint(model, y) - features @ functions.coefficients.mT).detach() - (0 if offset is None else offset.unsqueeze(1))
    # But for one constant these are log joints; of counts, beside those of the rates that fit a data point best.
    expected = Poisson(y.clamp(min=1e-300)).log_prob(y).sum(1) if kind == "poisson" else missing[0, 0].expand(len(y))
    torch.testing.assert_close(missing, expected.unsqueeze(1).expand_as(missing))


@pytest.mark.parametrize("kind", KINDS)
def test_data_as_expected_change_nothing(kind: str) -> None:
    model, y = problem(kind)
    before = log_joint(model, y).detach()
    expected = model.expected_statistics()
    assert expected is not None
    model.maximize({name: 1000 * value for name, value in expected.items()})
    torch.testing.assert_close(log_joint(model, y).detach(), before, rtol=1e-8, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_one_step_finds_the_likeliest_components(kind: str) -> None:
    model, y = problem(kind)
    expected = log_joint(model, y).detach().topk(2).values
    pyro.clear_param_store()
    guide = AutoTruncated(model, num_states=2).infer(y, model.default_search(2), steps=1)
    torch.testing.assert_close(guide.log_joint.sort(1, descending=True).values, expected)


@pytest.mark.parametrize("kind", ["diag", "poisson"])
def test_minibatches_take_the_place_of_what_was_expected(kind: str) -> None:
    model, y = problem(kind)
    expected = model.expected_statistics()
    assert expected is not None
    closed_form = ClosedForm(model)
    guide = AutoTruncated(model, num_states=6)
    svi = SVI(model, guide, closed_form, Truncated_ELBO(ExhaustiveSearch()))
    svi.step(y, 40)
    assert closed_form.visited is not None
    rows = closed_form.visited.nonzero().squeeze(-1)
    batch = model.sufficient_statistics(guide.population(rows), y)
    assert closed_form.statistics is not None
    for name, value in closed_form.statistics.items():
        torch.testing.assert_close(value, batch[name] + 80 * expected[name])
    # Scores are changed behind its back, and a state of a checkpoint is taken back.
    guide.refresh_(y)
    state = closed_form.get_state()
    closed_form.set_state(state)
    while not closed_form.visited.all():
        svi.step(y, 40)
    whole = model.sufficient_statistics(guide.population(), y)
    for name, value in closed_form.statistics.items():
        torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["full", "diag", "low-rank"])
def test_integers_are_searched_as_the_same_numbers_are(kind: str) -> None:
    model, y = problem(kind)
    counts = y.round().long()
    assert torch.equal(model.likeliest_components(counts, 2), model.likeliest_components(counts.double(), 2))
    assert isinstance(model, GaussianMixture)
    guide = AutoTruncated(model, num_states=6).infer(counts, ExhaustiveSearch(), steps=1)
    moved = model.split_and_merge(guide, counts, torch.Generator().manual_seed(0))
    again = problem(kind)[0]
    assert isinstance(again, GaussianMixture)
    guide = AutoTruncated(again, num_states=6).infer(counts.double(), ExhaustiveSearch(), steps=1)
    assert again.split_and_merge(guide, counts.double(), torch.Generator().manual_seed(0)) == moved
    torch.testing.assert_close(model.loc, again.loc)


@pytest.mark.parametrize("kind", ["diag", "poisson"])
def test_means_of_integers_are_none(kind: str) -> None:
    model, y = problem(kind)
    assert isinstance(model, GaussianMixture | PoissonMixture)
    guide = AutoTruncated(model, num_states=6).infer(y.round(), ExhaustiveSearch(), steps=1)
    expected = model.reconstruct(guide.population(), y.round())
    torch.testing.assert_close(model.reconstruct(guide.population(), y.round().long()), expected)


class _WithOtherName(GaussianMixture):
    """A mixture whose data are called otherwise."""

    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        assert y is not None
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", Categorical(self.weights))
            return pyro.sample("x", Normal(self.loc[z], 1.0).to_event(1), obs=y)


def test_the_search_says_which_site_it_does_not_find() -> None:
    model = _WithOtherName(2, 3)
    with pytest.raises(ValueError, match=r"found no observed site 'y'; the model has \['x'\]"):
        AutoTruncated(model, num_states=2).infer(torch.randn(5, 2), model.default_search(2), steps=1)


@pytest.mark.parametrize("dtype", [torch.float32, D64])
@pytest.mark.parametrize("kind", ["diag", "poisson"])
def test_nothing_is_expected_of_what_the_constructor_draws(kind: str, dtype: torch.dtype) -> None:
    y = problem("poisson")[1].to(dtype)
    model = PoissonMixture(4, 37, dtype=dtype) if kind == "poisson" else GaussianMixture(4, 37, covariance=kind, dtype=dtype)
    closed_form, guide = ClosedForm(model), AutoTruncated(model, num_states=37)
    SVI(model, guide, closed_form, Truncated_ELBO(ExhaustiveSearch())).step(y, 40)
    assert closed_form.expected is None
    assert closed_form.statistics is not None
    assert float(closed_form.statistics["counts"].sum()) == pytest.approx(40)
    assert model.expected_statistics() is not None  # what it has learned by now


def test_a_search_for_mixtures_refuses_other_models() -> None:
    model, y = BinarySparseCoding(4, 5), torch.randn(10, 4)
    with pytest.raises(ValueError, match="for mixtures, whose one latent is the component; the model has 5 latents"):
        AutoTruncated(model, num_states=2).infer(y, problem("diag")[0].default_search(2), steps=1)


@pytest.mark.parametrize("kind", ["diag", "poisson"])
def test_equal_weights_after_a_start_are_those_of_data(kind: str) -> None:
    model, _ = problem(kind)
    model.weights = torch.full_like(model.weights, 1 / model.num_components)
    assert model.expected_statistics() is not None


@pytest.mark.parametrize("kind", ["diag", "poisson"])
def test_states_of_before_the_flag_are_loaded(kind: str) -> None:
    model, _ = problem(kind)
    state = {name: value for name, value in model.state_dict().items() if name != "knows_data"}
    fresh = PoissonMixture(4, 6, dtype=D64) if kind == "poisson" else GaussianMixture(4, 6, covariance=kind, dtype=D64)
    assert fresh.expected_statistics() is None
    fresh.load_state_dict(state)
    assert fresh.expected_statistics() is not None  # its weights differ
    fresh.load_state_dict(model.state_dict())
    assert bool(fresh.knows_data)


@pytest.mark.parametrize("kind", ["diag", "poisson"])
def test_mixtures_pickled_before_the_flag_are_as_good_as_new(kind: str) -> None:
    model, y = problem(kind)
    del model.__dict__["_buffers"]["knows_data"]
    old = pickle.loads(pickle.dumps(model))
    assert not bool(old.knows_data)
    assert old.expected_statistics() is not None  # its weights differ
    SVI(old, AutoTruncated(old, num_states=6), ClosedForm(old), Truncated_ELBO(ExhaustiveSearch())).step(y, 40)
    assert bool(old.initialize(y).knows_data)
    assert "knows_data" in old.state_dict()


@pytest.mark.parametrize("kind", ["poisson", "categorical"])
@pytest.mark.parametrize("number", [1, 6])
def test_tables_of_all_components_hold_the_usual_log_probabilities(kind: str, number: int) -> None:
    model, y = problem(kind)
    if isinstance(model, CategoricalMixture):
        probs = model.probs.detach().clone()
        probs[2, 1, 3] = 0.0
        model.probs = probs / probs.sum(-1, keepdim=True)
    assert isinstance(model, PoissonMixture | CategoricalMixture)
    z = torch.arange(6).roll(4)[:number].unsqueeze(1).expand(number, len(y))
    with pyro.condition(data={"z": z[0]}):
        node = pyro.poutine.trace(model).get_trace(y).nodes["y"]
    found = node["fn"].expand(torch.Size([number, len(y)]))
    found.component = z
    usual = Poisson(model.rate[z]) if isinstance(model, PoissonMixture) else None
    if usual is None:
        assert isinstance(model, CategoricalMixture)
        # Torch takes a smallest probability for zero.
        expected = model.probs[z].gather(-1, y.long().expand(number, *y.shape).unsqueeze(-1)).squeeze(-1).log().sum(-1)
    else:
        expected = usual.log_prob(y).sum(-1)
    is_possible = expected > -torch.inf
    torch.testing.assert_close(found.log_prob(y)[is_possible], expected[is_possible], rtol=1e-10, atol=1e-10)
    if number == 6:
        assert bool((found.log_prob(y)[~is_possible] == -torch.inf).all())
    assert found.sample().shape == (number, len(y), 4)
    with pytest.raises(ValueError, match="support"):
        found.log_prob(y - 0.5)


@pytest.mark.parametrize("size", [3, 12])
@pytest.mark.parametrize("gap", [1.0, 720.0])
def test_outer_products_leave_out_what_is_lost_in_their_sums(size: int, gap: float) -> None:
    """Of components that are far apart, most shares are the smallest numbers there are."""
    space = StateSpace([8])
    words = space.enumerate().expand(50, -1, -1)
    log_joint = -gap * (torch.arange(50).unsqueeze(1) % 8 != torch.arange(8)).double() * torch.rand(50, 8).double()
    shares = Shares(Population(space, words, log_joint), 8)
    rows = torch.randn(50, size).double()
    expected = torch.einsum("nk,nd,ne->kde", log_joint.softmax(-1), rows, rows)
    torch.testing.assert_close(shares.outer_products(rows), expected, rtol=1e-12, atol=1e-12)
    assert not ((shares.means(torch.eye(8).double()) < 1e-100) & (shares.means(torch.eye(8).double()) > 0)).any()
