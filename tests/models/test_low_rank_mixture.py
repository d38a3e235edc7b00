"""Mixtures of probabilistic principal component analysers against dense normal distributions, scikit-learn and brute force."""

from __future__ import annotations

import itertools

import pyro
import pytest
import torch
from pyro.infer import SVI
from sklearn.decomposition import PCA
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO
from pyro_truncated.models import GaussianMixture
from pyro_truncated.models.covariances import best_low_rank
from pyro_truncated.search import NeighbourSearch
from tests.models.enumeration import assert_never_falls
from tests.models.mixture import free_energies, full_population, log_joint, sparse_pairs

D64 = torch.float64
N, D, R, K = 200, 6, 2, 4


def make_data(seed: int = 0, dtype: torch.dtype = D64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    factor, loc = 2 * torch.randn(K, D, R, generator=generator), 3 * torch.randn(K, D, generator=generator)
    scale = 0.3 + torch.rand(K, generator=generator)
    z = torch.randint(K, (N,), generator=generator)
    directions = torch.randn(N, R, 1, generator=generator)
    return (loc[z] + (factor[z] @ directions).squeeze(-1) + scale[z].unsqueeze(1) * torch.randn(N, D, generator=generator)).to(dtype)


def make_model(y: Tensor, *, shared_noise: bool = False) -> GaussianMixture:
    model = GaussianMixture(D, K, covariance="low-rank", rank=R, shared_noise=shared_noise, dtype=y.dtype)
    return model.initialize(y, torch.Generator().manual_seed(0))


def covariances(model: GaussianMixture) -> Tensor:
    noise = model.scale.detach().square().expand(K)
    return model.factor.detach() @ model.factor.detach().mT + noise[:, None, None] * torch.eye(D, dtype=model.loc.dtype)


@pytest.mark.parametrize("shared_noise", [False, True])
def test_log_joints_are_those_of_dense_covariances(shared_noise: bool) -> None:
    y = make_data()
    model = make_model(y, shared_noise=shared_noise)
    free_energies(model, y, num_iterations=2)
    dense = torch.distributions.MultivariateNormal(model.loc.detach(), covariances(model))
    expected = model.weights.detach().log() + dense.log_prob(y.unsqueeze(1))
    torch.testing.assert_close(log_joint(model, y).detach(), expected)
    assert torch.equal(model.likeliest_components(y, 2), expected.topk(2).indices)


@pytest.mark.slow
@pytest.mark.parametrize("shared_noise", [False, True])
def test_the_free_energy_never_falls(shared_noise: bool) -> None:
    y = make_data()
    assert_never_falls(free_energies(make_model(y, shared_noise=shared_noise), y, num_iterations=30))
    # Two of four components of each data point.
    chosen = torch.stack([torch.randperm(K, generator=torch.Generator().manual_seed(n))[:2] for n in range(N)])
    assert_never_falls(free_energies(make_model(y, shared_noise=shared_noise), y, num_iterations=30, chosen=chosen))


def test_one_component_is_principal_component_analysis() -> None:
    y = make_data()
    model = GaussianMixture(D, 1, covariance="low-rank", rank=R, pseudo_data=0, dtype=D64).initialize(y)
    model.maximize(model.sufficient_statistics(full_population(model, y), y))
    theirs = PCA(R, svd_solver="full").fit(y.numpy())
    # They divide by N - 1.
    found = model.factor[0].detach() @ model.factor[0].detach().mT + model.scale[0].detach().square() * torch.eye(D, dtype=D64)
    torch.testing.assert_close(found * N / (N - 1), torch.as_tensor(theirs.get_covariance()))


@pytest.mark.parametrize("seed", range(5))
def test_shared_noise_is_the_likeliest_of_all_choices_of_directions(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.rand(3, 4, generator=generator, dtype=D64).cumsum(0).sort(-1).values  # some directions of one lie below others' noise
    counts = torch.tensor([2.0, 5.0, 1.0], dtype=D64)

    def log_likelihood(variances: Tensor) -> Tensor:
        return -0.5 * (counts.unsqueeze(1) * (variances.log() + values / variances)).sum()

    best = -torch.inf
    for kept in itertools.product(range(3), repeat=3):
        is_noise = torch.arange(4) < 4 - torch.tensor(kept).unsqueeze(1)
        noise = (counts.unsqueeze(1) * values)[is_noise].sum() / (counts.unsqueeze(1) * is_noise).sum()
        # Fewer directions than allowed are no better than as many; a direction below the noise is none.
        best = max(best, float(log_likelihood(torch.where(is_noise, noise, values))) if bool((values >= noise)[~is_noise].all()) else best)
    factor, scale = best_low_rank(torch.diag_embed(values), counts, 2, values.new_zeros(()), is_shared=True)
    covariance = factor @ factor.mT + scale.square() * torch.eye(4, dtype=D64)
    assert float(log_likelihood(torch.linalg.eigvalsh(covariance))) == pytest.approx(best, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_covariances_of_two_points_have_one_direction(dtype: torch.dtype) -> None:
    half = 0.5 * sparse_pairs(100, 64, dtype).diff(dim=1)
    covariance = half.mT @ half
    floor = torch.tensor(1e-6, dtype=dtype)
    factor, scale = best_low_rank(covariance, covariance.new_ones(100), 2, floor, is_shared=False)
    torch.testing.assert_close(factor @ factor.mT, covariance, rtol=0.0, atol=1e-5)
    torch.testing.assert_close(scale, floor.sqrt().expand(100), rtol=0.0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, D64])
def test_trains_with_a_search_among_neighbours_in_minibatches(dtype: torch.dtype) -> None:
    y = make_data(dtype=dtype)
    pyro.set_rng_seed(0)
    model = make_model(y)
    guide = AutoTruncated(model, num_states=2, init=model.likeliest_components(y, 2))
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(NeighbourSearch(2, parents=2)))
    before = full_population(model, y).free_energy().sum()
    svi.step(y)  # fifty data points alone are too few to begin with
    for _ in range(30):
        svi.step(y, 50)
    found = full_population(model, y).free_energy().sum()
    truth = free_energies(make_model(y.double()), y.double(), num_iterations=30)[-1]
    assert found > before + 0.9 * (truth - before)


def test_ranks_out_of_range_and_options_of_other_kinds_are_refused() -> None:
    for rank in (None, 0, D):
        with pytest.raises(ValueError, match="rank must be a number of directions below"):
            GaussianMixture(D, K, covariance="low-rank", rank=rank)
    with pytest.raises(ValueError, match="rank and shared_noise are for covariance='low-rank'"):
        GaussianMixture(D, K, covariance="diag", rank=2)
