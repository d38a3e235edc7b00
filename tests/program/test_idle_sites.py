"""What masks switch off has one value only where no other density counts that depends on it, in every call: bounds stay bounds."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, config_enumerate
from pyro.infer.autoguide import AutoDelta, AutoGuideList, init_to_value
from torch import Tensor

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO, to_arviz

RATES = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.6, 0.1, 0.2, 0.1], [0.3, 0.3, 0.3, 0.1], [0.25, 0.25, 0.1, 0.4]], dtype=torch.float64)
Y = torch.tensor([0.4, 1.7, 2.9], dtype=torch.float64)
MASKS = [torch.tensor(mask) for mask in ([True, True, True], [True, False, True], [False, False, True])]


def look_up(state: Tensor) -> Tensor:
    """The row of a state, wherever Pyro enumerates."""
    return RATES[state.long()]


def labels(mask: Tensor) -> None:
    """What is observed depends on a class whatever its mask."""
    with pyro.plate("data", 3):
        with poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Categorical(RATES[0]))
        pyro.sample("y", dist.Normal(z.to(Y.dtype), 1.0), obs=Y)


def steps(mask: Tensor) -> None:
    """The same of a chain."""
    z = torch.tensor(0)
    for t in range(3):
        with poutine.mask(mask=mask[t]):
            z = pyro.sample(f"z{t}", dist.Categorical(look_up(z)))
        pyro.sample(f"y{t}", dist.Normal(z.to(Y.dtype), 1.0), obs=Y[t])


def threshold(mask: Tensor) -> None:
    """What is observed depends on a class by halves, and on another latent."""
    with pyro.plate("data", 3):
        with poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Categorical(RATES[0]))
        gate = pyro.sample("gate", dist.Bernoulli(RATES[0, 1]))
        pyro.sample("y", dist.Normal(gate * (z >= 2).to(Y.dtype), 0.5), obs=Y)


def gated(mask: Tensor) -> None:
    """A latent's mask is itself latent."""
    with pyro.plate("data", 3):
        gate = pyro.sample("gate", dist.Bernoulli(RATES[0, 3]))
        with poutine.mask(mask=gate.bool() & mask):
            z = pyro.sample("z", dist.Categorical(RATES[0]))
            pyro.sample("y", dist.Normal(z.to(Y.dtype), 1.0), obs=Y)
        pyro.sample("x", dist.Normal(gate, 1.0), obs=Y)


def imputed(mask: Tensor) -> None:
    """Entries that are not observed, of which some do not count."""
    with pyro.plate("data", 3):
        z = pyro.sample("z", dist.Categorical(RATES[0]))
        with poutine.mask(mask=torch.tensor([True, True, False])):
            x = pyro.sample("x", dist.Categorical(look_up(z)), obs=torch.tensor([1, 2, 3]), obs_mask=mask)
        pyro.sample("y", dist.Normal(x.to(Y.dtype), 1.0), obs=Y)


def pairs(mask: Tensor) -> None:
    """Members of another plate look masked ones up."""
    with pyro.plate("data", 3):
        with poutine.mask(mask=mask):
            z = pyro.sample("z", dist.Categorical(RATES[0]))
        pyro.sample("y", dist.Normal(z.to(Y.dtype), 1.0).mask(mask), obs=Y)
    same = torch.stack([z[..., 0] == z[..., 1], z[..., 1] == z[..., 2]], -1)
    with pyro.plate("pairs", 2):
        pyro.sample("same", dist.Bernoulli(0.1 + 0.8 * same.to(Y.dtype)).mask(torch.tensor([True, False])), obs=torch.ones_like(Y[:2]))


def exact(model: Callable[[Tensor], None], mask: Tensor) -> float:
    """The loss of Pyro's enumeration."""
    return float(TraceEnum_ELBO(max_plate_nesting=1).loss(config_enumerate(model), lambda mask: None, mask))


def exact_pairs(mask: Tensor) -> float:
    """The same of pairs, whose plate Pyro would take to be independent."""
    total = torch.zeros((), dtype=Y.dtype)
    for state in torch.cartesian_prod(*[torch.arange(4)] * 3):
        log_likelihood = torch.where(mask, dist.Normal(state.to(Y.dtype), 1.0).log_prob(Y), 0.0).sum()
        total += RATES[0][state].prod() * log_likelihood.exp() * (0.9 if state[0] == state[1] else 0.1)
    return -float(total.log())


@pytest.mark.parametrize("num_states", [1, *(pytest.param(number, marks=pytest.mark.nightly) for number in (2, 3, 4)), 64])
@pytest.mark.parametrize("model", [labels, steps, threshold, gated, imputed, pairs])
def test_bounds_stay_bounds_whatever_masks_switch_off(model: Callable[[Tensor], None], num_states: int) -> None:
    expected = [exact_pairs(mask) if model is pairs else exact(model, mask) for mask in MASKS]
    for order in (range(len(MASKS)), reversed(range(len(MASKS)))):
        guide, elbo = AutoTruncated(model, num_states), Truncated_ELBO(EvolutionarySearch(2, 2))
        for index in order:
            for _ in range(3):
                loss = elbo.loss_and_grads(model, guide, MASKS[index])
            assert loss >= expected[index] - 1e-9
            assert num_states < 64 or loss == pytest.approx(expected[index], rel=1e-9)


def test_values_of_parts_of_an_event_that_masks_switch_off_add_up_to_one() -> None:
    """As under ``poutine.mask``: a bound above the log evidence by log 2 for each part would be none."""
    on = torch.tensor([[True, True, False], [False, False, False]])

    def model(is_masked: bool) -> None:
        prior, mean = dist.Bernoulli(RATES[:2, :3]), pyro.sample("mean", dist.Normal(Y[0], 1.0))
        with pyro.plate("data", 2):
            s = pyro.sample("s", (prior.mask(on).mask(True) if is_masked else prior).to_event(1))
            pyro.sample("y", dist.Normal(mean + (s * on).sum(-1), 1.0), obs=Y[:2])

    given = poutine.condition(model, {"mean": Y[1]})
    for program in (given, model):
        found = []
        for is_masked in (True, False):
            guide: Any = AutoTruncated(program, 8)
            if program is model:
                companion = AutoDelta(poutine.block(model, hide=["s"]), init_loc_fn=init_to_value(values={"mean": Y[1]}))
                guide = AutoGuideList(model)
                guide.append(companion)
                guide.append(AutoTruncated(model, 8))
                pyro.clear_param_store()
            loss = Truncated_ELBO().loss(program, guide, is_masked)
            weights = to_arviz(program, guide, is_masked, num_samples=2)["sample_stats"]["log_weight"].values
            found.append([loss, -weights.mean()])
        assert found[0] == pytest.approx(found[1], rel=1e-6)
        assert loss == pytest.approx(-weights.mean(), rel=1e-6)


# --- along a plate whose members depend on each other ---


def neighbours(mask: Tensor) -> Callable[[Tensor], None]:
    """Sequences of flags of which each explains its own number and the next one; masks switch off both."""

    def model(x: Tensor) -> None:
        with pyro.plate("sequences", len(x), dim=-2):
            c = pyro.sample("c", dist.Bernoulli(torch.tensor(0.5, dtype=x.dtype)))
            with pyro.plate("steps", x.shape[1], dim=-1), poutine.mask(mask=mask):
                z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.5, dtype=x.dtype)))
                z = z.expand(torch.broadcast_shapes(z.shape, x.shape))
                before = torch.nn.functional.pad(z[..., :-1], (1, 0))
                pyro.sample("x", dist.Normal(z + 2 * before + 0 * c, 0.3), obs=x)

    return model


@pytest.mark.parametrize("num_states", [16, 32])
def test_a_masked_flag_counts_where_the_next_number_does(num_states: int) -> None:
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(5, 4, generator=generator) < 0.6
    x = 2 * torch.randn(5, 4, dtype=torch.float64, generator=generator)
    states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 4)
    mean = states + 2 * torch.nn.functional.pad(states[:, :-1], (1, 0))
    log_joint = (mask.unsqueeze(1) * (dist.Normal(mean, 0.3).log_prob(x.unsqueeze(1)) + math.log(0.5))).sum(-1)
    # The prior of flags that are off adds up to one.
    expected = -float((log_joint.logsumexp(1) - (~mask).sum(1) * math.log(2)).sum())
    with warnings.catch_warnings(action="ignore"):
        guide, elbo = AutoTruncated(neighbours(mask), num_states), Truncated_ELBO(EvolutionarySearch(8, 4))
        for _ in range(20):
            loss = elbo.loss_and_grads(neighbours(mask), guide, x)
    assert loss == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("num_states", [2, 4])
def test_a_mask_of_a_latents_own_distribution_is_that_of_its_site(num_states: int) -> None:
    """A chain in a plate, whose ends differ, and a vector: bounds, also by Pyro's own ELBO, and marginals."""

    def model(is_own: bool) -> None:
        def sample(name: str, fn: object, mask: Tensor, **options: Tensor) -> Tensor:
            with poutine.mask(mask=True if is_own else mask):
                return pyro.sample(name, fn.mask(mask) if is_own else fn, **options)  # type: ignore[attr-defined]

        z = torch.tensor(0)
        with pyro.plate("data", 3):
            for t, mask in enumerate(MASKS):
                z = sample(f"z{t}", dist.Categorical(RATES[z]), mask)
                sample(f"y{t}", dist.Normal(z.to(Y.dtype), 1.0), mask, obs=Y)
            s = sample("s", dist.Bernoulli(RATES[0]).to_event(1), MASKS[2])
            sample("x", dist.Normal(s.sum(-1), 1.0), MASKS[2], obs=Y)

    found = []
    for is_own in (True, False):
        pyro.set_rng_seed(0)
        guide, elbo = AutoTruncated(model, num_states), Truncated_ELBO(EvolutionarySearch(2, 2))
        losses = [elbo.loss_and_grads(model, guide, is_own) for _ in range(3)]
        losses += [Truncated_ELBO().loss(model, guide, is_own), Trace_ELBO().loss(model, guide, is_own)]
        found.append((losses, guide.marginals()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    torch.testing.assert_close(found[0][1], found[1][1])


def test_a_masked_distribution_counts_once_for_all_values() -> None:
    """The evidence of what is seen, by hand."""

    def model() -> None:
        with pyro.plate("data", 3):
            z = pyro.sample("z", dist.Categorical(RATES[1]).mask(MASKS[1]))
            pyro.sample("y", dist.Normal(z.to(Y.dtype), 1.0).mask(MASKS[1]), obs=Y)

    evidence = (RATES[1].log() + dist.Normal(torch.arange(4.0), 1.0).log_prob(Y.unsqueeze(1))).logsumexp(1)[MASKS[1]].sum()
    for num_states in (2, 4):
        bound = -Truncated_ELBO().loss(model, AutoTruncated(model, num_states))
        assert bound <= float(evidence) + 1e-9
    assert bound == pytest.approx(float(evidence), rel=1e-9)
