"""learn called twice in one process, as in a notebook: what was learned before neither leaks into the next model nor is changed by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from pyro_truncated import AutoTruncated, LearnConfig, learn
from pyro_truncated.multistart import ConvergenceWarning

QUICK = {"restarts": 1, "config": LearnConfig(restart_steps=3), "steps": 3, "progress": False}


def causes(number: int, *, priors: bool) -> Callable[[Tensor], None]:
    """Binary causes whose vectors are parameters, or latents with priors."""

    def model(y: Tensor) -> None:
        size = (y.shape[1], number)
        if priors:
            weight = pyro.sample("weight", dist.Normal(0.0, 3.0).expand(size).to_event(2))
        else:
            weight = pyro.param("weight", lambda: torch.randn(size))
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((number,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 1.0).to_event(1), obs=y)

    return model


@pytest.fixture
def y() -> Tensor:
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("use", [lambda model, y: learn(model, y, **QUICK), lambda model, y: AutoTruncated(model, 4)(y)])
def test_parameters_of_an_earlier_function_are_named_where_they_do_not_fit(y, use):
    use(causes(3, priors=False), y)
    message = r"mat1 and mat2.*\), as Pyro's.*'weight' of shape \(4, 3\) in the place of \(4, 5\).*pyro.clear_param_store\(\)"
    with pytest.raises(ValueError, match=message):
        use(causes(5, priors=False), y)
    pyro.clear_param_store()
    use(causes(5, priors=False), y)


@pytest.mark.nightly(keep=1)
@pytest.mark.slow
@pytest.mark.parametrize(("priors", "most", "ends"), [(False, 100, [0.1]), (True, 80, [0.3, 0.09, 0.027, 0.0081])])
def test_training_ends_in_small_steps_and_beside_continuous_latents_at_convergence(y, priors, most, ends):
    rates: dict[int, list[float]] = {}
    handle = register_optimizer_step_post_hook(
        lambda optimizer, *_: rates.setdefault(id(optimizer), []).append(optimizer.param_groups[0]["lr"])
    )
    asked = 80 if priors else None
    with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
        guide = learn(causes(3, priors=priors), y, **{**QUICK, "steps": asked})
    handle.remove()
    training = list(rates.values())[-1]
    assert guide.steps == len(training)
    assert guide.steps <= most if priors else guide.steps == most
    assert any(training[-1] / training[0] == pytest.approx(end, rel=0.03) for end in ends)


def test_a_model_that_fails_anyway_says_why_itself(y):
    pyro.param("weight", torch.zeros(2))

    def broken(y: Tensor) -> None:
        pyro.param("weight", torch.zeros(3))
        raise RuntimeError("of its own")

    with pytest.raises(RuntimeError, match="of its own"):
        AutoTruncated(broken, 4)(y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pyro_truncated.ConvergenceWarning")
def test_guides_of_continuous_latents_begin_anew_and_keep_what_they_have(y):
    first = learn(causes(3, priors=True), y, **QUICK)
    before = {name: value.clone() for name, value in first.median(y).items()}
    second = learn(causes(5, priors=True), y, **QUICK)
    third = learn(causes(3, priors=True), y + 4.0, **QUICK)
    assert second.median(y)["weight"].shape == (4, 5)
    assert not torch.equal(third.median(y + 4.0)["weight"], before["weight"])
    torch.testing.assert_close(first.median(y)["weight"], before["weight"], rtol=0, atol=0)
