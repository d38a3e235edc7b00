"""Models from Pyro's tutorials and examples, trained with nothing changed but the guide, against exact model-side enumeration."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyro
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import ELBO, SVI, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoGuideList, AutoNormal
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, EvolutionarySearch, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.testing import check_guide
from tests.user_models import UserModel, annotation, capture_recapture, chain, gaussian_mixture, music, topics

MODELS = (gaussian_mixture, topics, chain, capture_recapture, music, annotation)
models = pytest.mark.parametrize("source", MODELS, ids=lambda source: source.__name__.rpartition(".")[-1])
parts = pytest.mark.parametrize("part", [AutoDelta, AutoNormal])


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def guide_for(user: UserModel, part: type, num_states: int | None = None) -> AutoGuideList:
    guide = AutoGuideList(user.model, create_plates=user.create_plates)
    guide.append(part(poutine.block(user.model, hide=user.discrete)))
    guide.append(AutoTruncated(user.model, num_states or user.num_states))
    return guide


def continuous_part(guide: AutoGuideList) -> Callable:
    """The same guide without its discrete part, in the plates of the list."""

    def continuous(*args, **kwargs):
        guide._create_plates(*args, **kwargs)
        return guide[0](*args, **kwargs)

    return continuous


def evaluate(elbo: ELBO, model: Callable, guide: Callable, user: UserModel, **batch) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients on the same random draws as any other call."""
    pyro.set_rng_seed(11)
    loss = elbo.loss_and_grads(model, guide, *user.args, **user.kwargs, **batch)
    gradients = {}
    for name, value in pyro.get_param_store().named_parameters():
        gradients[name], value.grad = value.grad.clone(), None
    return loss, gradients


@pytest.mark.nightly(keep="values")
@pytest.mark.slow
@parts
@models
def test_losses_and_gradients_equal_model_side_enumeration(source, part):
    user = source.make()
    guide = guide_for(user, part)
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=user.max_plate_nesting)
    stock = TraceEnum_ELBO(max_plate_nesting=user.max_plate_nesting)
    svi = SVI(user.model, guide, Adam({"lr": 0.05}), elbo)
    for _ in range(5):
        svi.step(*user.args, **user.kwargs)
    for value in pyro.get_param_store()._params.values():
        value.grad = None
    for batch in ({}, user.batch or {}):
        exact, expected = evaluate(stock, config_enumerate(user.model, "parallel"), continuous_part(guide), user, **batch)
        loss, gradients = evaluate(stock, user.model, guide, user, **batch)
        assert loss == pytest.approx(exact, rel=1e-9)
        assert gradients.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-7, atol=1e-9)
        pyro.set_rng_seed(11)
        assert elbo.loss(user.model, guide, *user.args, **user.kwargs, **batch) == pytest.approx(exact, rel=1e-9)


@models
def test_log_joints_equal_those_of_plain_runs(source):
    user = source.make()
    guide = guide_for(user, AutoDelta, num_states=max(1, user.num_states // 2))
    guide(*user.args, **user.kwargs)
    check_guide(guide[1], *user.args, **user.kwargs)


@models
def test_fewer_states_bound_the_evidence(source):
    user = source.make()
    guide = guide_for(user, AutoDelta, num_states=1)
    elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=user.max_plate_nesting)
    loss, _ = evaluate(elbo, user.model, guide, user)
    stock = TraceEnum_ELBO(max_plate_nesting=user.max_plate_nesting)
    exact = stock.loss(config_enumerate(user.model, "parallel"), continuous_part(guide), *user.args, **user.kwargs)
    assert loss > exact


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@models
def test_training_ends_where_enumeration_ends(source):
    user = source.make()
    finals = []
    stock = TraceEnum_ELBO(max_plate_nesting=user.max_plate_nesting)
    enumerated = config_enumerate(user.model, "parallel")
    for truncated in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        guide = guide_for(user, AutoDelta)
        elbo = Truncated_ELBO(ExhaustiveSearch(), max_plate_nesting=user.max_plate_nesting)
        guide(*user.args, **user.kwargs)
        start = 0.5 * torch.randn(sum(p.numel() for p in guide.parameters()), generator=torch.Generator().manual_seed(5))
        with torch.no_grad():
            for value, new in zip(guide.parameters(), start.split([p.numel() for p in guide.parameters()]), strict=True):
                value.copy_(new.reshape(value.shape))
        svi = SVI(user.model, guide, Adam({"lr": 0.02}), elbo)
        reference = SVI(enumerated, continuous_part(guide), Adam({"lr": 0.02}), stock)
        for _ in range(30):
            (svi if truncated else reference).step(*user.args, **user.kwargs)
        finals.append(stock.loss(enumerated, continuous_part(guide), *user.args, **user.kwargs))
    # Deterministic guide, exact gradients: the two runs differ by rounding alone.
    assert finals[0] == pytest.approx(finals[1], rel=1e-7)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize("source", [gaussian_mixture, topics, music, annotation], ids=lambda source: source.__name__.rpartition(".")[-1])
def test_minibatches_and_evolutionary_search_improve_the_full_loss(source):
    user = source.make()
    guide = guide_for(user, AutoNormal)
    elbo = Truncated_ELBO(
        EvolutionarySearch(parents=2, children=2, generations=1), max_plate_nesting=user.max_plate_nesting, num_particles=2
    )
    svi = SVI(user.model, guide, Adam({"lr": 0.05}), elbo)
    svi.step(*user.args, **user.kwargs)
    before = sum(svi.evaluate_loss(*user.args, **user.kwargs) for _ in range(10))
    for _ in range(40):
        svi.step(*user.args, **user.kwargs, **user.batch)
    after = sum(svi.evaluate_loss(*user.args, **user.kwargs) for _ in range(10))
    assert after < before
