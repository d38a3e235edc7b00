"""Programs whose observations are normal around a linear function of binary latents: found, and scored as what they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn

from pyro_truncated import AutoTruncated, Truncated_ELBO
from pyro_truncated.search import EvolutionarySearch

NUM_DATA, NUM_LATENTS, NUM_OBSERVED = 7, 4, 3
Y = torch.randn(NUM_DATA, NUM_OBSERVED, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(NUM_OBSERVED, NUM_LATENTS, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
STATES = torch.tensor(list(itertools.product((0.0, 1.0), repeat=NUM_LATENTS)), dtype=torch.float64)
ODDS = torch.tensor([0.2, 0.4, 0.5, 0.7], dtype=torch.float64)

Mean = Callable[[Tensor, Tensor], Tensor]

LINEAR: dict[str, Mean] = {
    "product": lambda s, w: s @ w.mT,
    "transpose": lambda s, w: torch.matmul(s, w.T) + w[:, 0],
    "sum": lambda s, w: (s.unsqueeze(-2) * w).sum(-1),
    "einsum": lambda s, w: torch.einsum("...h,dh->...d", s, w),
    "layer": lambda s, w: nn.functional.linear(s, w, w.sum(1)),
    "complement": lambda s, w: 3.0 - (1 - s) @ w.mT / 2,
    "loop": lambda s, w: sum((s[..., h, None] * w[:, h] for h in range(NUM_LATENTS)), torch.zeros((), dtype=w.dtype)),
    "stack": lambda s, w: torch.stack([(s * row).sum(-1) for row in w], -1),
    "parts": lambda s, w: torch.cat([s[..., :2], 2 * s[..., 2:]], -1) @ w.mT,
    "far": lambda s, w: s @ w.mT + 1e6,
}


class _Doubled(torch.autograd.Function):
    """Twice a product of latents, by a function of its own."""

    @staticmethod
    def forward(ctx: Any, states: Tensor) -> Tensor:
        return 2 * states.prod(-1, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.zeros(())


OTHER: dict[str, Mean] = {
    "rectified": lambda s, w: (s @ w.mT).relu(),
    "clamped where all are active": lambda s, w: s @ w.mT + (s.sum(-1, keepdim=True) - NUM_LATENTS + 1).clamp(min=0),
    "interaction": lambda s, w: s @ w.mT + s[..., :1] * s[..., 1:2],
    "square": lambda s, w: (s @ w.mT) ** 2,
    "greatest": lambda s, w: (s.unsqueeze(-2) * w).amax(-1),
    "choice": lambda s, w: torch.where(s[..., :1] > 0, s @ w.mT, w[:, 0]),
    "index": lambda s, w: s @ w.mT + w[:, 0] * w.sum(0)[s.sum(-1).long().clamp(max=3)].unsqueeze(-1),
    "function of one's own": lambda s, w: s @ w.mT + _Doubled.apply(s),
    "written": lambda s, w: s @ w.mT + s.clone().mul_(s.roll(1, -1)).sum(-1, keepdim=True),
    "script": lambda s, w: s @ w.mT + _script(s),
    "of each data point": lambda s, w: s @ w.mT + Y[:, :1],
    "of as many data points": lambda s, w: _of_data(s) @ w.mT,
    "nothing": lambda s, w: w.sum(1).expand(*s.shape[:-1], -1),
}


def _of_data(states: Tensor) -> Tensor:
    assert states.shape[-2] == NUM_DATA
    return states


@torch.jit.script
def _script(states: Tensor) -> Tensor:
    return states.prod(-1, keepdim=True)


def program(
    mean: Mean, scale: Callable[[Tensor], Any] = lambda s: pyro.param("scale"), mask: Tensor | None = None
) -> Callable[[Tensor], None]:
    """A program with such means, and with one scale."""

    def model(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: WEIGHT.clone())
        pyro.param("scale", lambda: torch.tensor(0.8, dtype=torch.float64), constraint=dist.constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(ODDS).to_event(1))
            likelihood = dist.Normal(mean(s, weight), scale(s)).to_event(1)
            pyro.sample("y", likelihood if mask is None else likelihood.mask(mask), obs=y)

    return model


def evidence(mean: Mean, weight: Tensor, deviation: Tensor, y: Tensor = Y) -> Tensor:
    """The log evidence by a sum over all states."""
    states = STATES.unsqueeze(1).expand(-1, len(y), -1)
    prior = dist.Bernoulli(ODDS).log_prob(states).sum(-1)
    return (prior + dist.Normal(mean(states, weight), deviation).log_prob(y).sum(-1)).logsumexp(0).sum()


def check(model: Callable[[Tensor], None], mean: Mean) -> AutoTruncated:
    """Compares loss and gradients with sums over all states."""
    guide, elbo = AutoTruncated(model, num_states=2**NUM_LATENTS), Truncated_ELBO()
    loss = elbo.loss_and_grads(model, guide, Y)
    weight, deviation = WEIGHT.clone().requires_grad_(), torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    expected = -evidence(mean, weight, deviation)
    expected.backward()  # type: ignore[no-untyped-call]
    assert loss == pytest.approx(float(expected.detach()), rel=1e-9)
    found = {name: parameter.grad for name, parameter in pyro.get_param_store().named_parameters()}
    torch.testing.assert_close(found["weight"], weight.grad, rtol=1e-7, atol=1e-7)
    assert deviation.grad is not None
    torch.testing.assert_close(found["scale"], 0.8 * deviation.grad, rtol=1e-7, atol=1e-7)
    return guide


@pytest.mark.parametrize("name", LINEAR)
def test_linear_programs_are_scored_packed(name: str) -> None:
    guide = check(program(LINEAR[name]), LINEAR[name])
    assert guide.layout.is_linear
    assert guide.make_batch(Y).scorer.packed_model is not None


@pytest.mark.parametrize("name", OTHER)
@pytest.mark.filterwarnings("ignore::pyro_truncated.program.vectorization.VectorizationWarning")
def test_others_are_scored_by_the_program(name: str) -> None:
    guide = AutoTruncated(program(OTHER[name]), num_states=2**NUM_LATENTS)
    loss = Truncated_ELBO().loss(guide.model, guide, Y)
    expected = -evidence(OTHER[name], WEIGHT, torch.tensor(0.8, dtype=torch.float64))
    assert loss == pytest.approx(float(expected), rel=1e-9)
    assert not guide.layout.is_linear


@pytest.mark.parametrize(
    ("scale", "options"),
    [
        (lambda s: 0.5 + s.sum(-1, keepdim=True), {}),
        (lambda s: 0.5 + Y.abs(), {}),
        (lambda s: 0.8, {"mask": Y[:, 0] > 0}),
    ],
    ids=["scale of the state", "scale of each data point", "mask"],
)
def test_scales_of_states_and_masks_are_those_of_the_program(scale: Callable[[Tensor], Any], options: dict[str, Any]) -> None:
    guide = AutoTruncated(program(LINEAR["product"], scale, **options), num_states=2**NUM_LATENTS)
    loss = Truncated_ELBO().loss(guide.model, guide, Y)
    rows = Y[options["mask"]] if options else Y
    states = STATES.unsqueeze(1).expand(-1, len(rows), -1)
    prior = dist.Bernoulli(ODDS).log_prob(states).sum(-1)
    log_joint = prior + dist.Normal(states @ WEIGHT.mT, scale(states)).log_prob(rows).sum(-1)
    assert loss == pytest.approx(-float(log_joint.logsumexp(0).sum()), rel=1e-9)
    assert not guide.layout.is_linear


@pytest.mark.parametrize("bend", [_script, _Doubled.apply, torch.vmap(lambda s: s.prod(-1, keepdim=True))], ids=["script", "own", "vmap"])
def test_what_counts_nothing_yet_has_its_gradient(bend: Callable[[Tensor], Tensor]) -> None:
    """Scores of linear means are the same, but not their gradients."""

    def mean(s: Tensor, weight: Tensor) -> Tensor:
        return s @ weight.mT + pyro.param("factor", lambda: torch.zeros((), dtype=s.dtype)) * bend(s)

    model = program(mean)
    guide = AutoTruncated(model, num_states=2**NUM_LATENTS)
    Truncated_ELBO().loss_and_grads(model, guide, Y)
    factor = torch.zeros((), dtype=torch.float64, requires_grad=True)
    loss = -evidence(lambda s, w: s @ w.mT + factor * bend(s), WEIGHT, torch.tensor(0.8, dtype=torch.float64))
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(pyro.param("factor").grad, factor.grad, rtol=1e-8, atol=1e-8)


def test_a_program_that_changes_is_scored_as_it_is_now() -> None:
    bend = 0.0

    def mean(s: Tensor, weight: Tensor) -> Tensor:
        return s @ weight.mT if bend == 0 else s @ weight.mT + bend * s[..., :1] * s[..., 1:2]

    model = program(mean)
    guide, elbo = AutoTruncated(model, num_states=2**NUM_LATENTS), Truncated_ELBO()
    for bend in (0.0, 2.0, 0.0):  # noqa: B007 - the program reads it
        expected = -evidence(mean, WEIGHT, torch.tensor(0.8, dtype=torch.float64))
        assert elbo.loss(model, guide, Y) == pytest.approx(float(expected), rel=1e-9)


def test_scalars_and_images_are_observations_too() -> None:
    def model(y: Tensor, image: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(ODDS).to_event(1))
            pyro.sample("y", dist.Normal(s.sum(-1), 0.5), obs=y)
            mean = (s @ WEIGHT.mT).unsqueeze(-1) * torch.ones(2, dtype=s.dtype)
            pyro.sample("image", dist.Normal(mean, torch.tensor([0.5, 2.0], dtype=s.dtype)).to_event(2), obs=image)

    y, image = Y[:, 0], torch.stack([Y, 2 * Y], -1)
    guide = AutoTruncated(model, num_states=2**NUM_LATENTS)
    states = STATES.unsqueeze(1).expand(-1, len(y), -1)
    log_joint = dist.Bernoulli(ODDS).log_prob(states).sum(-1) + dist.Normal(states.sum(-1), 0.5).log_prob(y)
    for k, scale in enumerate((0.5, 2.0)):
        log_joint = log_joint + dist.Normal(states @ WEIGHT.mT, scale).log_prob(image[..., k]).sum(-1)
    assert Truncated_ELBO().loss(model, guide, y, image) == pytest.approx(-float(log_joint.logsumexp(0).sum()), rel=1e-9)
    assert guide.layout.is_linear


@pytest.mark.parametrize(("dtype", "cast"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_means_may_have_another_precision_than_data(dtype: torch.dtype, cast: torch.dtype) -> None:
    y = Y[:, 0].to(dtype)

    def model(y: Tensor) -> None:
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(ODDS.to(dtype)).to_event(1))
            pyro.sample("y", dist.Normal(s.to(cast).sum(-1), 1.0), obs=y)

    loss = Truncated_ELBO().loss(model, AutoTruncated(model, num_states=2**NUM_LATENTS), y)
    states = STATES.unsqueeze(1).expand(-1, len(y), -1)
    log_joint = dist.Bernoulli(ODDS).log_prob(states).sum(-1) + dist.Normal(states.sum(-1), 1.0).log_prob(y.double())
    assert loss == pytest.approx(-float(log_joint.logsumexp(0).sum()), rel=1e-5)


def test_observations_that_are_not_finite_are_named_as_before() -> None:
    model = program(LINEAR["product"])
    guide = AutoTruncated(model, num_states=2**NUM_LATENTS)
    guide.setup(Y)
    with pyro.validation_enabled(False), pytest.raises(ValueError, match="NaN"):
        Truncated_ELBO().loss(model, guide, torch.where(Y > 1, torch.nan, Y))


def test_second_derivatives_are_those_of_the_evidence() -> None:
    model = program(LINEAR["product"])
    guide, elbo = AutoTruncated(model, num_states=2**NUM_LATENTS), Truncated_ELBO()
    loss: Any = elbo.differentiable_loss(model, guide, Y)
    weight = pyro.param("weight")
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), weight)
    own = WEIGHT.clone().requires_grad_()
    (own_first,) = torch.autograd.grad(-evidence(LINEAR["product"], own, torch.tensor(0.8, dtype=torch.float64)), own, create_graph=True)
    (own_second,) = torch.autograd.grad(own_first.square().sum(), own)
    torch.testing.assert_close(second, own_second, rtol=1e-8, atol=1e-8)


def test_minibatches_are_searched_and_trained() -> None:
    """A likelihood with the same draws and the same searches as the program has the same free energies."""

    def model(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: WEIGHT.float())
        with pyro.plate("data", len(y), subsample_size=3) as rows:
            s = pyro.sample("s", dist.Bernoulli(ODDS.float()).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, 0.8).to_event(1), obs=y[rows])

    losses = []
    for vectorize in (None, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        guide = AutoTruncated(model, num_states=4, vectorize=vectorize)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch()))
        losses.append([svi.step(Y.float()) for _ in range(20)])
        assert guide.layout.is_linear is (vectorize is None)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
