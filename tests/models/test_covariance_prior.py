"""The prior of the covariances of Gaussian mixtures: its density against direct evaluation, and that EM climbs with it."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import GaussianMixture
from pyro_truncated.models.covariances import Prior
from tests.models.mixture import free_energies, full_population, objective

D64 = torch.float64
D, K = 4, 5
KINDS = ("full", "diag", "spherical", "tied", "low-rank", "shared noise")


def few_data(size: int = 30) -> Tensor:
    return torch.randn(size, D, dtype=D64, generator=torch.Generator().manual_seed(0)).cumsum(1).cumsum(0) / 5


def make(kind: str, y: Tensor, **options: Any) -> GaussianMixture:
    rank: Any = {"rank": 2, "shared_noise": kind == "shared noise"} if kind in ("low-rank", "shared noise") else {}
    return GaussianMixture(D, K, covariance="low-rank" if rank else kind, dtype=D64, **rank, **options).initialize(y)


def matrices(spreads: dict[str, Tensor]) -> Tensor:
    scale = spreads["scale"].detach()
    if scale.dim() == 3:
        return scale @ scale.mT
    noise = torch.diag_embed(scale.square().reshape(-1, D if scale.dim() == 2 else 1).expand(K, D))
    return noise + spreads["factor"].detach() @ spreads["factor"].detach().mT if "factor" in spreads else noise


def spreads_of(model: GaussianMixture) -> dict[str, Tensor]:
    return {name: getattr(model, name).detach() for name in model._kind.supports}


@pytest.mark.parametrize("kind", KINDS)
def test_its_density_is_the_highest_over_all_units(kind: str) -> None:
    model = make(kind, few_data(), pseudo_data=3)
    if kind == "tied":
        assert model.log_prior() == 0
        return
    unit = torch.linspace(-8, 4, 40_001, dtype=D64).exp()
    spread = model.spread if model.spread.dim() == 2 else torch.diag(model.spread)
    nearest = {"diag": model.spread, "spherical": model.spread.mean().expand(D)}
    best = torch.diag(nearest[kind]) if kind in nearest else spread

    def highest(covariance: Tensor) -> Tensor:
        trace = (covariance.inverse() @ spread).trace()
        return (1.5 * (D * unit.log() - covariance.logdet() - unit * trace) + 0.5 * D * (unit.log() - unit)).max()

    expected = float(sum(highest(own) for own in matrices(spreads_of(model))) - K * highest(best))
    assert float(model.log_prior().detach()) == pytest.approx(expected, rel=1e-6)
    if "noise" not in kind and "low" not in kind:
        at_the_data = model._kind.start(spread, K)
        log_prob = Prior(torch.zeros((), dtype=D64), 3.0, spread).log_prob(model._kind, at_the_data)
        torch.testing.assert_close(log_prob, torch.zeros(K, dtype=D64))


def value(model: GaussianMixture, y: Tensor) -> float:
    return objective(model, full_population(model, y))


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_em_never_falls_and_ends_at_a_maximum(kind: str) -> None:
    y = few_data()
    model = make(kind, y, pseudo_data=3)
    guide = AutoTruncated(model, K)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(ExhaustiveSearch()))
    values = [-svi.step(y) for _ in range(300)]
    assert all(after >= before - 1e-9 * abs(before) for before, after in itertools.pairwise(values))
    assert value(model, y) == pytest.approx(values[-1], rel=1e-9)
    for name in model._kind.supports:
        best = getattr(model, name).detach().clone()
        for factor in (0.999, 1.001):
            setattr(model, name, factor * best)
            assert value(model, y) <= values[-1] + 1e-6
        setattr(model, name, best)


def test_gradients_climb_the_same_height() -> None:
    y = few_data()
    model = make("full", y)
    guide = AutoTruncated(model, K)
    loss = Truncated_ELBO(ExhaustiveSearch()).differentiable_loss(model, guide, y)
    assert float(loss.detach()) == pytest.approx(-value(model, y))
    model.log_prior().backward()
    assert model.scale_unconstrained.grad.abs().sum() > 0


@torch.no_grad()
def test_new_data_do_not_pay_for_what_is_known_of_the_parameters() -> None:
    y = few_data()
    model = make("full", y)
    guide, elbo = AutoTruncated(model, K), Truncated_ELBO(ExhaustiveSearch())
    svi = SVI(model, guide, ClosedForm(model), elbo)
    svi.step(y)
    assert svi.evaluate_loss(y) == pytest.approx(-value(model, y))
    new = guide.infer(y[:7], ExhaustiveSearch(), 1)
    evidence = float(full_population(model, y[:7]).free_energy().sum())
    assert Truncated_ELBO().loss(model, new, y[:7]) == pytest.approx(-evidence)
    assert float(Truncated_ELBO().differentiable_loss(model, new, y[:7])) == pytest.approx(-evidence)
    read = AutoTruncated(model, K)
    read.load_state_dict(new.state_dict())
    assert Truncated_ELBO().loss(model, read, y[:7]) == pytest.approx(-evidence)
    # A guide that trains the model counts all that training raises.
    SVI(model, new, ClosedForm(model), elbo).step(y[:7])
    assert Truncated_ELBO().loss(model, new, y[:7]) == pytest.approx(-value(model, y[:7]))


@pytest.mark.slow
def test_components_of_few_data_are_no_narrower_than_the_data_allow() -> None:
    y = torch.randn(40, D, dtype=D64, generator=torch.Generator().manual_seed(1))
    ratios = []
    for number in (0.0, 4.0):
        model = make("full", y, pseudo_data=number)
        free_energies(model, y, num_iterations=50)
        values = torch.linalg.eigvalsh(matrices(spreads_of(model)))
        ratios.append(float((values[:, -1] / values[:, 0]).max()))
    assert ratios[1] < 0.1 * ratios[0]


def test_mixtures_of_before_have_none() -> None:
    y = few_data()
    model = make("diag", y)
    state = {name: value for name, value in model.state_dict().items() if name not in ("spread", "pseudo")}
    other = GaussianMixture(D, K, covariance="diag", dtype=D64)
    other.load_state_dict(state)
    assert model.log_prior() < 0
    assert other.log_prior() == 0
    without = make("diag", y, pseudo_data=0)
    assert without.spread.numel() == without.pseudo.numel() == make("tied", y).spread.numel() == 0
    assert model.spread.shape == (D,)
    # From those with a prior to those without, and back.
    without.load_state_dict(model.state_dict())
    assert without.log_prior() == 0
    model.load_state_dict(without.state_dict())
    assert model.log_prior() == 0
    old = GaussianMixture(D, K, dtype=D64)
    del old._buffers["spread"], old._buffers["pseudo"], old.__dict__["pseudo_data"]
    found = pickle.loads(pickle.dumps(old))
    assert found.pseudo_data == 0.0
    assert found.initialize(y).log_prior() == 0
    with pytest.raises(ValueError, match="pseudo_data must be finite and not negative; got -1"):
        GaussianMixture(2, 2, pseudo_data=-1)
