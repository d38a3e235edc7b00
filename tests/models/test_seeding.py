"""Where mixtures start: rows that lie spread over the data, their clusters, and the likeliest components of every data point."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.models import GaussianMixture, seeding
from pyro_truncated.models.seeding import group_places, scattered_rows, spread_rows
from pyro_truncated.search import MaxInnerProductIndex, max_inner_product_index
from tests.pretended_device import PretendedDevice, here, there

D64 = torch.float64


def clusters(number: int, size: int, seed: int = 0, dims: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    """Data of as many points in every cluster, the clusters they are of, and the means of these."""
    generator = torch.Generator().manual_seed(seed)
    means = 4 * torch.randn(number, dims, generator=generator, dtype=D64)
    member = torch.arange(number).repeat(size)
    return means[member] + 0.5 * torch.randn(len(member), dims, generator=generator, dtype=D64), member, means


def cost(points: Tensor, chosen: Tensor) -> float:
    return float(torch.cdist(points, points[chosen]).square().min(1).values.sum())


@pytest.mark.parametrize("seed", range(5))
def test_every_cluster_gets_one_row(seed: int) -> None:
    y, member, _ = clusters(40, 15, seed)
    chosen, nearest = spread_rows(y, 40, torch.Generator().manual_seed(seed))
    assert len(member[chosen].unique()) == 40
    assert torch.equal(nearest, torch.cdist(y, y[chosen]).argmin(1))


@pytest.mark.parametrize("seed", range(10))
def test_spread_rows_cost_hardly_more_than_the_best_ones(seed: int) -> None:
    points = torch.randn(12, 2, dtype=D64, generator=torch.Generator().manual_seed(seed))
    best = min(cost(points, torch.tensor(some)) for some in itertools.combinations(range(12), 3))
    chosen, nearest = spread_rows(points, 3, torch.Generator().manual_seed(100 + seed))
    assert cost(points, chosen) <= 1.2 * best
    assert cost(points, chosen) == pytest.approx(float((points - points[chosen][nearest]).square().sum()), rel=1e-9)


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical", "tied"])
def test_a_mixture_starts_where_its_clusters_are(covariance: str) -> None:
    y, member, means = clusters(30, 40)
    model = GaussianMixture(8, 30, covariance=covariance, dtype=D64).initialize(y, torch.Generator().manual_seed(1))
    distance, nearest = torch.cdist(model.loc.detach(), means).min(1)
    assert len(nearest.unique()) == 30
    # Means of 40 points in 8 dimensions are sqrt(8 / 40) * 0.5 = 0.22 away on average; a hundred standard deviations leave no false alarm.
    assert float(distance.max()) < 0.6
    scale = model.scale.detach()
    deviation = scale.diagonal(dim1=-2, dim2=-1) if model.covariance in ("full", "tied") else scale
    # On average: of 40 points one deviation is off by a tenth.
    assert float(deviation.mean()) == pytest.approx(0.5, rel=0.1)
    # Four standard errors and more: none has collapsed, or covers two clusters.
    torch.testing.assert_close(deviation, torch.full_like(deviation, 0.5), rtol=0.45, atol=0.0)
    # Every data point finds its component at once.
    assert torch.equal(nearest[model.likeliest_components(y, 1)[:, 0]], member)


@pytest.mark.parametrize("covariance", ["full", "diag", "spherical", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_likeliest_components_are_those_of_the_highest_log_joint(covariance: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    y = torch.randn(50, 3, dtype=dtype) + 20.0
    model = GaussianMixture(3, 12, covariance=covariance, dtype=dtype).initialize(y)
    with torch.no_grad():
        model.weights = torch.rand(12, dtype=dtype).softmax(0)
        model.scale = (
            model.scale * (0.5 + torch.rand(12, dtype=dtype).reshape(-1, *(1,) * (model.scale.dim() - 1)).expand_as(model.scale))
            if (covariance != "tied")
            else model.scale
        )
        if model.covariance in ("full", "tied"):
            density = torch.distributions.MultivariateNormal(model.loc, scale_tril=model.scale).log_prob(y.unsqueeze(1))
        else:
            density = torch.distributions.Normal(model.loc, model.scale.reshape(12, -1)).log_prob(y.unsqueeze(1)).sum(-1)
        expected = (model.weights.log() + density).topk(5)
    found = model.likeliest_components(y, 5)
    # Where two are as likely, rounding may decide.
    torch.testing.assert_close((model.weights.log() + density).gather(1, found), expected.values, rtol=1e-4, atol=1e-3)
    assert model.likeliest_components(y[:3], 99).sort(1).values.equal(torch.arange(12).repeat(3, 1))


def test_many_rows_drawn_at_a_time_are_as_good_as_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    means = 20 * torch.rand(150, 3, generator=generator)
    points = means[torch.randint(150, (3000,), generator=generator)] + 0.1 * torch.randn(3000, 3, generator=generator)
    one_by_one = scattered_rows(points, 300, generator)
    monkeypatch.setattr(seeding, "_MAX_SCATTERED_AT_ONCE", 100)
    together, in_cells = (scattered_rows(points, 300, generator, cells) for cells in (1, 8))
    assert len(together.unique()) == len(in_cells.unique()) == 300
    costs = [float(torch.cdist(points, points[rows]).amin(1).square().sum()) for rows in (one_by_one, together, in_cells)]
    assert max(costs[1:]) < 1.1 * costs[0]


@pytest.mark.slow
def test_draws_are_held_against_all_that_are_taken_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_MAX_SCATTERED_AT_ONCE", 100)
    points = torch.randn(3000, 3, generator=torch.Generator().manual_seed(0))
    rows = []
    for held in (4, 64, 2**20):
        monkeypatch.setattr(seeding, "_DRAWS_PER_BLOCK", held)
        rows.append(scattered_rows(points, 600, torch.Generator().manual_seed(0), 8))
    assert torch.equal(rows[0], rows[2])
    assert torch.equal(rows[1], rows[2])


def test_of_few_different_rows_some_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeding, "_MAX_SCATTERED_AT_ONCE", 3)
    points = torch.arange(4.0).repeat(10).unsqueeze(1)
    rows = scattered_rows(points, 12, torch.Generator().manual_seed(0))
    assert len(rows) == 12
    assert points[rows].unique().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.slow
def test_the_rows_for_a_thousand_components_are_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(seeding, "_in_rounds")
    points = 1e30 * torch.rand(2200, 8, generator=torch.Generator().manual_seed(0), dtype=D64)
    assert len(scattered_rows(points, 2000, torch.Generator().manual_seed(0)).unique()) == 2000
    with pytest.raises(NameError):
        scattered_rows(points.float(), 4001)


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand functions are looked for in groups, for any number of data."""
    monkeypatch.setattr(
        MaxInnerProductIndex, "EFFORT", dataclasses.replace(MaxInnerProductIndex.EFFORT, max_exhaustive=1000, rows_per_function=0)
    )


@pytest.mark.slow
@pytest.mark.usefixtures("few_are_many")
def test_of_very_many_components_few_likeliest_ones_are_missed() -> None:
    y, _, _ = clusters(1500, 4)
    model = GaussianMixture(8, 1500, covariance="spherical", dtype=D64)
    with torch.no_grad():
        model.loc, model.scale = y[:1500].clone(), torch.full((1500,), 0.7, dtype=D64)
    found = model.likeliest_components(y[1500:], 3)
    nearest = torch.cdist(y[1500:], model.loc.detach()).topk(3, largest=False).indices
    assert float((found[:, 0] == nearest[:, 0]).double().mean()) > 0.99
    assert float((found.sort(1).values == nearest.sort(1).values).double().mean()) > 0.97
    assert found.sort(1).values.diff().min() > 0


@pytest.fixture(params=["compiled", "vectorised"])
def kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Both implementations of the largest of linear functions."""
    with ops.use_backend(request.param):
        yield request.param


@pytest.mark.slow
@pytest.mark.usefixtures("few_are_many", "kind")
def test_likely_components_that_are_known_are_kept_and_lead_on() -> None:
    y, _, _ = clusters(1500, 4)
    places, x = y[:1500], y[1500:]
    coefficients = torch.cat([-0.5 * places.square().sum(1, keepdim=True), places], 1)
    features, own = torch.cat([torch.ones(len(x), 1, dtype=D64), x], 1), torch.cat([torch.ones(1500, 1, dtype=D64), places], 1)
    functions = MaxInnerProductIndex(coefficients, own, lambda: group_places(places), len(x))
    expected = (features @ coefficients.mT).topk(3)
    assert functions.query(features, 3, expected.indices).equal(expected.indices)
    # Of few data points none may lack the best one, so that nothing is left to be looked for.
    assert functions.query(features[:3], 3, expected.indices[:3]).equal(expected.indices[:3])
    unlikely = (-features @ coefficients.mT).topk(3).indices
    # What is known to be low does no harm.
    values = [
        (features @ coefficients.mT).gather(1, found) for found in (functions.query(features, 3, unlikely), functions.query(features, 3))
    ]
    assert bool((values[0] >= values[1] - 1e-9).all())
    # Where all but two are impossible those that are found are still different ones.
    coefficients[2:, 0] = -torch.inf
    assert functions.query(features, 3, unlikely).sort(1).values.diff().min() > 0
    for known in (unlikely[:9], unlikely[0], unlikely + 1500, -unlikely, unlikely.double()):
        with pytest.raises(ValueError, match=r"known|component"):
            functions.query(features, 3, known)


@pytest.mark.slow
@pytest.mark.usefixtures("few_are_many", "kind")
def test_data_points_whose_largest_function_is_low_look_further(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    places = 3 * torch.randn(1500, 8, generator=generator, dtype=D64)
    x = places[torch.randint(1500, (6000,), generator=generator)] + torch.randn(6000, 8, generator=generator, dtype=D64)
    own, features = (torch.cat([torch.ones(len(some), 1, dtype=D64), some], 1) for some in (places, x))
    coefficients = torch.cat([-0.5 * places.square().sum(1, keepdim=True), places], 1)
    functions = MaxInnerProductIndex(
        coefficients, own, lambda: group_places(places), len(x), lambda some: -0.5 * some[:, 1:].square().sum(1)
    )
    nearest, looked, of_groups = torch.cdist(x, places).argmin(1), [], max_inner_product_index.max_inner_products_in_groups

    def counted(features: Tensor, coefficients: Tensor, group: Tensor, num_groups: int, asked: Tensor, number: int) -> Any:
        looked.append(len(features) * (asked.shape[1] == 16))
        return of_groups(features, coefficients, group, num_groups, asked, number)

    monkeypatch.setattr(max_inner_product_index, "max_inner_products_in_groups", counted)
    missed = int((functions.query(features, 4)[:, 0] != nearest).sum())
    assert 0 < sum(looked) < 3000
    monkeypatch.setattr(MaxInnerProductIndex, "EFFORT", dataclasses.replace(MaxInnerProductIndex.EFFORT, groups=2))
    missed_before = int((functions.query(features, 4)[:, 0] != nearest).sum())
    assert missed_before > 30
    assert missed < missed_before / 4


@pytest.mark.slow
@pytest.mark.usefixtures("few_are_many", "kind")
def test_where_functions_are_hardly_apart_all_data_points_look_at_all_groups_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    places, x = (torch.randn(number, 12, generator=generator, dtype=D64) for number in (1500, 6000))
    own, features = (torch.cat([torch.ones(len(some), 1, dtype=D64), some], 1) for some in (places, x))
    coefficients = torch.cat([-0.5 * places.square().sum(1, keepdim=True), places], 1)
    functions = MaxInnerProductIndex(
        coefficients, own, lambda: group_places(places), len(x), lambda some: -0.5 * some[:, 1:].square().sum(1)
    )
    looked, of_groups = [], max_inner_product_index.max_inner_products_in_groups

    def counted(features: Tensor, coefficients: Tensor, group: Tensor, num_groups: int, asked: Tensor, number: int) -> Any:
        looked.append((asked.shape[1], len(features)))
        return of_groups(features, coefficients, group, num_groups, asked, number)

    monkeypatch.setattr(max_inner_product_index, "max_inner_products_in_groups", counted)
    functions.query(features, 4)
    # The first 750 data points try it, two groups first.
    assert looked[0] == (2, 750)
    assert looked[-1] == (16, 5250)


@pytest.mark.usefixtures("few_are_many", "kind")
def test_small_groups_are_looked_at_in_such_numbers_that_they_have_enough_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    places = 3 * torch.randn(1500, 2, generator=generator, dtype=D64)
    own = torch.cat([torch.ones(1500, 1, dtype=D64), places], 1)
    coefficients = torch.cat([-0.5 * places.square().sum(1, keepdim=True), places], 1)
    # Groups of 2, 3 and 4 functions, and of some 30.
    group = torch.cat([torch.repeat_interleave(torch.arange(3), torch.tensor([2, 3, 4])), 3 + torch.arange(1491) % 50])
    looked, of_groups = [], max_inner_product_index.max_inner_products_in_groups

    def counted(features: Tensor, coefficients: Tensor, group: Tensor, num_groups: int, asked: Tensor, number: int) -> Any:
        looked.append(asked.shape[1])
        return of_groups(features, coefficients, group, num_groups, asked, number)

    monkeypatch.setattr(max_inner_product_index, "max_inner_products_in_groups", counted)
    functions = MaxInnerProductIndex(coefficients, own, lambda: group, 300)
    found = functions.query(own[:300], 8, torch.arange(8).repeat(300, 1))
    assert looked[0] == 3
    assert found.sort(1).values.diff().min() > 0


def test_more_than_three_thousand_components_are_searched_in_groups() -> None:
    generator = torch.Generator().manual_seed(0)
    model = GaussianMixture(2, 3100, covariance="spherical")
    model.loc, model.scale = 20 * torch.randn(3100, 2, generator=generator), torch.ones(3100)
    y = model.loc[torch.randint(3100, (31_000,), generator=generator)] + torch.randn(31_000, 2, generator=generator)
    assert not model.linear_functions(y).are_few
    found, distance = model.likeliest_components(y, 2)[:1000], torch.cdist(y[:1000], model.loc)
    nearest = distance.topk(2, largest=False)
    assert float((found == nearest.indices).double().mean()) > 0.98
    assert bool((found[:, 0] != found[:, 1]).all())


def test_bad_numbers_and_data_are_refused() -> None:
    model = GaussianMixture(2, 3)
    with pytest.raises(ValueError, match="num_states"):
        model.likeliest_components(torch.randn(5, 2), 0)
    with pytest.raises(ValueError, match=r"y must have shape \(N, 2\)"):
        model.likeliest_components(torch.randn(5, 3), 1)


@pytest.mark.usefixtures("few_are_many")
def test_where_most_components_lie_in_one_place_none_is_missed() -> None:
    generator = torch.Generator().manual_seed(0)
    places = torch.cat([1e-3 * torch.randn(1800, 2, generator=generator), 100 * torch.randn(200, 2, generator=generator)])
    coefficients = torch.cat([-0.5 * places.square().sum(1, keepdim=True), places], 1)
    features = torch.cat([torch.ones(2000, 1), places], 1)
    found = MaxInnerProductIndex(coefficients, features, lambda: group_places(places), 200).query(features[1800:], 1)
    assert torch.equal(found[:, 0], torch.arange(1800, 2000))


@pytest.mark.usefixtures("few_are_many")
def test_components_at_one_place_make_no_empty_groups() -> None:
    places = torch.cat([torch.arange(20.0).unsqueeze(1).repeat(100, 1), torch.full((5, 1), 100.0)])
    coefficients = torch.cat([-0.5 * places.square(), places], 1)
    features = torch.cat([torch.ones_like(places), places], 1)
    found = MaxInnerProductIndex(coefficients, features, lambda: group_places(places), 2).query(torch.tensor([[1.0, 7.0], [1.0, 100.0]]), 1)
    assert places[found].flatten().tolist() == [7.0, 100.0]


@pytest.mark.usefixtures("few_are_many")
@pytest.mark.parametrize("group", [torch.zeros(7, dtype=torch.int64), torch.arange(1200) - 1, 2 * torch.arange(1200), torch.zeros(1200)])
def test_groups_that_are_none_are_refused(group: Tensor) -> None:
    places = torch.randn(1200, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="group"):
        MaxInnerProductIndex(places, places, lambda: group, 1200).query(places, 3)


def test_functions_that_do_not_exist_are_refused() -> None:
    places = torch.randn(5, 2)
    functions = MaxInnerProductIndex(places, places, lambda: torch.zeros(5, dtype=torch.int64), 5)
    for number in (0, 6):
        with pytest.raises(ValueError, match="number must be"):
            functions.query(places, number)
    with pytest.raises(ValueError, match=r"features must have shape \(N, 2\)"):
        functions.query(places[:, :1], 1)
    with pytest.raises(ValueError, match="coefficients and features must have the same shape"):
        MaxInnerProductIndex(places, places[:4], lambda: torch.zeros(5), 5)


def test_up_to_a_thousand_components_are_searched_without_a_look_at_the_device() -> None:
    places = torch.randn(60, 2, generator=torch.Generator().manual_seed(0))
    with PretendedDevice() as device:
        found = MaxInnerProductIndex(there(places), there(places), lambda: group_places(there(places)), 60).query(there(places), 3)
        assert not device.syncs
    assert torch.equal(here(found), (places @ places.mT).topk(3).indices)
