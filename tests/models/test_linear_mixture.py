"""What mixtures whose log joints are linear in features of the data have in common: their search, and what they expect of data."""

from __future__ import annotations

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding, GaussianMixture, PoissonMixture
from pyro_truncated.models.linear_mixture import LinearMixture
from tests.models.mixture import log_joint

D64 = torch.float64
KINDS = ("full", "diag", "spherical", "tied", "low-rank", "shared noise", "poisson")


def problem(kind: str, number: int = 6, num_data: int = 120) -> tuple[LinearMixture, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y = 3 * torch.randn(num_data, 4, generator=generator, dtype=D64)
    if kind == "poisson":
        y = y.abs().round()
        return PoissonMixture(4, number, dtype=D64).initialize(y, generator), y
    is_shared = kind == "shared noise"
    covariance, rank = ("low-rank", 2) if is_shared or kind == "low-rank" else (kind, None)
    model = GaussianMixture(4, number, covariance=covariance, rank=rank, shared_noise=is_shared, dtype=D64)
    return model.initialize(y + 100, generator), y + 100


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
    with pytest.raises(ValueError, match="for mixtures, whose one latent is the component; got 5 latents"):
        AutoTruncated(model, num_states=2).infer(y, problem("diag")[0].default_search(2), steps=1)
