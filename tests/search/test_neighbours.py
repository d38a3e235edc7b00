"""The search among neighbouring components: who is near, what it finds beside looking at all, what it costs."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Population, StateSpace, Truncated_ELBO
from pyro_truncated.distributions import Component, ComponentNormal
from pyro_truncated.models import BinarySparseCoding, GaussianMixture
from pyro_truncated.search import NeighbourSearch, SearchBatch

D64 = torch.float64


def mixture(num_components: int, num_data: int) -> tuple[GaussianMixture, Tensor]:
    """Components on a grid in the plane, and data drawn from them."""
    side = round(num_components**0.5)
    model = GaussianMixture(2, side**2, covariance="spherical", dtype=D64)
    model.loc = 3.0 * torch.cartesian_prod(torch.arange(side), torch.arange(side)).to(D64)
    model.scale = torch.full((side**2,), 0.7, dtype=D64)
    with torch.no_grad():
        y: Tensor = model(num_data=num_data)
    pyro.clear_param_store()
    return model, y


@pytest.mark.slow
def test_neighbours_on_a_grid_are_found() -> None:
    model, y = mixture(49, 3000)
    guide, search = AutoTruncated(model, num_states=4), NeighbourSearch(8, generator=torch.Generator().manual_seed(0))
    guide.refresh_(y)
    elbo = Truncated_ELBO(search)
    for _ in range(12):
        elbo.loss_and_grads(model, guide, y)
    distances = torch.cdist(model.loc.detach(), model.loc.detach())
    assert search.neighbours is not None
    # Every component knows the two to four that are 3 away; the nearest comes first.
    for component, row in enumerate(search.neighbours):
        nearest = (distances[component] < 3.1).nonzero().squeeze(-1)
        assert set(nearest.tolist()) - {component} <= set(row.tolist())
        assert distances[component, row[0]] < 3.1


@pytest.mark.slow
def test_searches_find_what_matters_without_looking_at_all() -> None:
    model, y = mixture(100, 2000)
    bounds = {}
    for name, search in (("all", ExhaustiveSearch()), ("near", NeighbourSearch(6, parents=2))):
        pyro.clear_param_store()
        guide, elbo = AutoTruncated(model, num_states=5), Truncated_ELBO(search)
        for _ in range(1 if name == "all" else 15):
            bounds[name] = -elbo.loss_and_grads(model, guide, y)
    assert bounds["near"] == pytest.approx(bounds["all"], abs=0.002 * len(y))
    assert bounds["near"] <= bounds["all"] + 1e-6


@pytest.mark.slow
def test_em_on_minibatches_reaches_what_looking_at_all_reaches() -> None:
    truth, y = mixture(36, 3000)
    reached = {}
    for name, search in (("all", ExhaustiveSearch()), ("near", NeighbourSearch(6, parents=3))):
        pyro.clear_param_store()
        model = GaussianMixture(2, 36, covariance="spherical", dtype=D64).initialize(y, torch.Generator().manual_seed(1))
        guide = AutoTruncated(model, num_states=4, init=model.likeliest_components(y, 4))
        svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
        for _ in range(40):
            svi.step(y, 1000)
        reached[name] = evidence(model, y)
    assert reached["near"] == pytest.approx(reached["all"], abs=0.02)
    assert reached["near"] > evidence(truth, y) - 0.05


def evidence(model: GaussianMixture, y: Tensor) -> float:
    """Mean log density of the data."""
    with torch.no_grad():
        parts = torch.distributions.Normal(model.loc, model.scale.unsqueeze(-1)).log_prob(y.unsqueeze(1)).sum(-1)
        return float((parts + model.weights.log()).logsumexp(-1).mean())


def test_distances_are_how_much_worse_others_explain_a_components_data() -> None:
    space, search = StateSpace([5]), NeighbourSearch(3, parents=1, num_random=1)
    table = torch.tensor([[0.0, -1.0, -2.0, -3.0, -4.0], [0.0, -3.0, -2.0, -9.0, -4.0]], dtype=D64)

    def score(words: Tensor) -> Tensor:
        return table.gather(1, space.unpack(words, torch.int64)[..., 0])

    words = space.pack(torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]]).unsqueeze(-1))
    search.propose(SearchBatch(Population(space, words, score(words)), score))
    assert search.neighbours is not None
    # Component 0 is best of both: 1 and 2 are on average 2 worse, then comes whoever of 3 (6) and 4 (4) has been tried.
    assert set(search.neighbours[0, :2].tolist()) == {1, 2}
    assert (search.neighbours[3] == 3).all()


def test_what_was_learned_is_saved_and_forgotten() -> None:
    model, y = mixture(16, 300)
    guide, search = AutoTruncated(model, num_states=3), NeighbourSearch(4, generator=torch.Generator().manual_seed(0))
    Truncated_ELBO(search).loss_and_grads(model, guide, y)
    saved = search.state_dict()
    other = NeighbourSearch(4, generator=torch.Generator())
    other.load_state_dict(saved)
    assert other.neighbours is not None
    assert torch.equal(other.neighbours, saved["neighbours"])
    # New data use it and add nothing.
    guide.infer(y[:20], search, 2)
    assert search.neighbours is not None
    assert torch.equal(search.neighbours, saved["neighbours"])
    search.forget()
    assert search.neighbours is None
    assert "neighbours" not in search.state_dict()


def test_other_models_are_refused() -> None:
    model, y = BinarySparseCoding(4, 3), torch.randn(6, 4)
    with pytest.raises(ValueError, match="NeighbourSearch is for mixtures, whose one latent is the component; the model has 3 latents"):
        Truncated_ELBO(NeighbourSearch(2)).loss_and_grads(model, AutoTruncated(model, num_states=3), y)
    with pytest.raises(ValueError, match="num_neighbours"):
        NeighbourSearch(0)


def test_components_are_drawn_and_scored_like_categorical_numbers() -> None:
    # 5 standard errors of 4 shares: false alarm rate 2e-6 over all seeds.
    weights = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=D64)
    component = Component(weights).expand([20_000])
    drawn = component.sample()
    assert drawn.shape == (20_000,)
    shares = torch.bincount(drawn, minlength=4) / 20_000
    assert ((shares - weights).abs() < 5 * (weights * (1 - weights) / 20_000).sqrt()).all()
    torch.testing.assert_close(component.log_prob(drawn), weights.log()[drawn])
    assert component.sample((2,)).shape == (2, 20_000)
    assert Component(weights).sample().shape == ()
    assert Component(weights.expand(3, 4).contiguous()).sample((5,)).shape == (5, 3)


@pytest.mark.parametrize("width", [1, 3])
def test_normal_distributions_of_components_are_those_of_torch(width: int) -> None:
    torch.manual_seed(0)
    loc, scale = torch.randn(5, 3, dtype=D64, requires_grad=True), (torch.rand(5, width, dtype=D64) + 0.5).requires_grad_()
    component, y = torch.randint(5, (4, 7)), torch.randn(7, 3, dtype=D64)
    found, expected = ComponentNormal(component, loc, scale), torch.distributions.Normal(loc[component], scale[component])
    density = expected.log_prob(y).sum(-1)
    torch.testing.assert_close(found.log_prob(y), density)
    weight = torch.randn(4, 7, dtype=D64)
    for ours, theirs in zip(
        *(torch.autograd.grad((value * weight).sum(), (loc, scale)) for value in (found.log_prob(y), density)), strict=True
    ):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)
    larger = ComponentNormal(component[:, :1], loc, scale).expand([4, 7])
    torch.testing.assert_close(larger.log_prob(y), ComponentNormal(component[:, :1].expand(4, 7), loc, scale).log_prob(y))
    # Means of 20 000 draws within 6 standard errors: false alarm rate 2e-9 for each of 84 numbers.
    drawn = found.sample((20_000,))
    assert ((drawn.mean(0) - found.mean).abs() < 6 * (found.variance / 20_000).sqrt()).all()
    torch.testing.assert_close(drawn.var(0), found.variance.detach(), rtol=0.06, atol=0.0)
    with pytest.raises(ValueError, match=r"loc must have shape \(K, D\)"):
        ComponentNormal(component, loc, scale[:4])


@pytest.mark.parametrize("kind", ["full", "diag", "spherical", "tied"])
def test_sums_over_kept_components_are_those_over_all(kind: str) -> None:
    y = torch.randn(30, 3, dtype=D64)
    model, space = GaussianMixture(3, 40, covariance=kind, dtype=D64), StateSpace([40])
    words = space.pack(torch.stack([torch.randperm(40)[:5] for _ in y]).unsqueeze(-1))
    population = Population(space, words, torch.randn(30, 5, dtype=D64))
    found = model.sufficient_statistics(population, y, temperature=1.5)
    shares = population.value_probabilities(1.5)[:, 0]
    products = {
        "full": torch.einsum("nk,nd,ne->kde", shares, y, y),
        "tied": y.mT @ y,
        "diag": shares.mT @ y.square(),
        "spherical": shares.mT @ y.square(),
    }
    expected = {"counts": shares.sum(0), "sums": shares.mT @ y, "squares": y.square().sum(0), "products": products[kind]}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)
