"""The factorial hidden Markov model: bounds that rise, exact EM at full sets, missing steps, lengths, recovery."""

from __future__ import annotations

import copy
import itertools
import math

import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO, learn
from pyro_truncated.distributions import BinaryChains
from pyro_truncated.models import FactorialHMM
from pyro_truncated.models.factorial_hmm import difference_dictionary
from pyro_truncated.multistart.config import Restart
from pyro_truncated.multistart.moves import SolutionPool
from pyro_truncated.multistart.multi_start import StopRule
from pyro_truncated.multistart.profile import profile_model
from pyro_truncated.multistart.solution import FreeEnergyEstimate, Solution

DOUBLE = torch.float64


def draw(num_latents: int, num_observed: int, num_steps: int, num_data: int = 1, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    """Sequences and the columns behind them; a cause stays on for twenty steps."""
    table = torch.tensor([[0.9786, 0.0214], [0.05, 0.95]], dtype=DOUBLE).expand(num_latents, 2, 2)
    states = BinaryChains(torch.full((num_latents,), 0.3, dtype=DOUBLE), table, num_steps).expand([num_data]).sample()
    weight = torch.randn(num_observed, num_latents, dtype=DOUBLE)
    return states @ weight.mT + noise * torch.randn(num_data, num_steps, num_observed, dtype=DOUBLE), weight


def recovered(weight: Tensor, true: Tensor) -> int:
    distances = torch.stack([(sign * weight.unsqueeze(2) - true.unsqueeze(1)).norm(dim=0) for sign in (1, -1)]).amin(0)
    return int(((distances / true.norm(dim=0)).amin(0) < 0.3).sum())


@pytest.mark.slow
@pytest.mark.parametrize("num_states", [4, 8])
def test_em_never_lowers_the_bound(num_states: int) -> None:
    """Sets of four of eight states, and all of them; with missing entries, steps and ends."""
    y, _ = draw(3, 4, 60, 2)
    y[0, 10:13] = math.nan
    y[1, 50:] = math.nan
    y[torch.rand(y.shape) < 0.1] = math.nan
    model = FactorialHMM(4, 3, dtype=DOUBLE).initialize(y)
    bounds, posterior = [], model.posterior(y, num_states)
    for _ in range(15):
        fresh = model.posterior(y, num_states, steps=0)
        posterior.rescore_(fresh.log_likelihood, fresh.transitions).improve_(2)
        bounds.append(float(posterior.free_energy().sum()))
        model.maximize(model.sufficient_statistics(posterior, y))
    rises = torch.tensor(bounds).diff()
    # The M-step adds a thousandth of a transition to each kind.
    assert float(rises.min()) > -0.01
    assert bounds[-1] > bounds[0] + 10


@pytest.mark.slow
def test_the_bound_at_full_sets_is_that_of_the_program() -> None:
    """Against the log joint of the Pyro program summed over all paths."""
    y, _ = draw(2, 3, 4, 2)
    y[1, 3] = math.nan
    y[0, 1, 0] = math.nan
    model = FactorialHMM(3, 2, dtype=DOUBLE).initialize(y)
    bits = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=DOUBLE)] * 8).view(-1, 4, 2)
    totals = []
    for path in bits:
        value = path.expand(2, 4, 2) * (~y.isnan().all(-1)).unsqueeze(-1)
        trace = poutine.trace(poutine.condition(model, {"s": value})).get_trace(y)
        trace.compute_log_prob()
        totals.append(trace.nodes["s"]["log_prob"] + trace.nodes["y"]["log_prob"])
    log_joint = torch.stack(totals)
    is_short = (bits[:, 3] != 0).any(-1)
    expected = torch.stack([log_joint[:, 0].logsumexp(0), log_joint[~is_short, 1].logsumexp(0)])
    torch.testing.assert_close(model.posterior(y).free_energy(), expected.detach(), rtol=1e-10, atol=1e-10)


@pytest.mark.slow
def test_gradients_of_the_bound_vanish_where_em_rests() -> None:
    """At a fixed point of the M-step, the gradient of log p(y) by the columns is zero."""
    y, _ = draw(2, 3, 50)
    model = FactorialHMM(3, 2, dtype=DOUBLE).initialize(y)
    for _ in range(150):
        model.maximize(model.sufficient_statistics(model.posterior(y), y))
    weight = model.weight.detach().clone()
    best = float(model.posterior(y).free_energy())
    for _ in range(5):
        model.weight = weight + 1e-3 * torch.randn_like(weight)
        assert float(model.posterior(y).free_energy()) < best


def test_the_posterior_of_a_guide_is_read_as_that_of_the_model() -> None:
    y = torch.randn(3, 7, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    y[1, 3:5], y[2, 5:], y[0, 2, 1] = math.nan, math.nan, math.nan
    model = FactorialHMM(2, 3, dtype=DOUBLE).initialize(y, torch.Generator().manual_seed(0))
    posterior = AutoTruncated(model, num_states=8).infer(y, steps=3).population()
    for read in (model.marginals, model.reconstruct):
        torch.testing.assert_close(read(posterior, y), read(model.posterior(y, 8), y), rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="posterior must be of the sequences y"):
        model.reconstruct(posterior, y[:2])
    learned = []
    for own in (posterior, model.posterior(y, 8)):
        twin = copy.deepcopy(model)
        twin.maximize(model.sufficient_statistics(own, y))
        learned.append(dict(twin.named_parameters()))
    torch.testing.assert_close(*learned, rtol=1e-9, atol=1e-9)


def test_steps_after_the_last_observation_are_forecast() -> None:
    """As if an observation without any information came after them."""
    model = FactorialHMM(2, 3, dtype=DOUBLE)
    model.initial, model.transition = torch.tensor([0.1, 0.6, 0.9], dtype=DOUBLE), torch.rand(3, 2, 2, dtype=DOUBLE).softmax(-1)
    y = torch.randn(2, 9, 2, dtype=DOUBLE)
    y[0, 4:], y[1, 0] = math.nan, math.nan
    ended = torch.cat([y, torch.full((2, 2, 2), math.nan, dtype=DOUBLE)], 1)
    ended = torch.cat([ended, torch.full((1, 11, 2), math.nan, dtype=DOUBLE)])
    found = model.reconstruct(model.posterior(ended, 8), ended)
    chance, states = model.initial.detach(), model.posterior(y, 8).marginals()
    for sequence, last in ((2, None), (0, states[0, 3]), (1, states[1, -1])):
        chance = model.initial.detach() if last is None else last
        for step in range({2: 0, 0: 4, 1: 9}[sequence], 11):
            if step:
                chance = torch.stack([1 - chance, chance], -1).unsqueeze(1).matmul(model.transition.detach())[:, 0, 1]
            expected = model.weight.detach() @ chance + model.bias.detach()
            torch.testing.assert_close(found[sequence, step], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("error::pyro_truncated.DisagreeingStartsWarning")
def test_learn_finds_the_causes() -> None:
    y, weight = draw(4, 8, 400, 2, 0.5)
    y[1, 300:] = math.nan
    model = FactorialHMM(8, 4)
    guide = learn(model, y, num_states=8, progress=False, generator=torch.Generator().manual_seed(0))
    assert recovered(model.weight.detach().double(), weight) == 4
    assert float(model.scale.detach()) == pytest.approx(0.5, rel=0.1)
    ends = model.transition.detach()[:, [0, 1], [1, 0]].sort(dim=1).values
    torch.testing.assert_close(ends.mean(0), torch.tensor([0.0214, 0.05]), rtol=0.5, atol=0.0)
    torch.testing.assert_close(guide.marginals()["s"].double(), model.posterior(y, 8).marginals(), rtol=0.0, atol=1e-3)
    y[0, 100:105] = math.nan
    posterior = model.posterior(y)
    marginals = model.marginals(posterior, y)
    assert marginals.shape == (2, 400, 4)
    assert bool((marginals[1, 300:] == 0).all())
    assert bool((marginals[0, 100:105] > 0).all())
    assert model.reconstruct(posterior, y).shape == y.shape
    assert bool(model.reconstruct(posterior, y).isfinite().all())


@pytest.mark.parametrize("batch_size", [None, 2])
def test_closed_form_steps_maximise_the_expected_log_joint(batch_size: int | None) -> None:
    """At full sets one step of SVI is a step of exact EM; of a minibatch, one with its statistics scaled up."""
    y, _ = draw(2, 3, 30, 3)
    model, other = (FactorialHMM(3, 2, dtype=DOUBLE).initialize(y, torch.Generator().manual_seed(1)) for _ in range(2))
    guide = AutoTruncated(model, num_states=4)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO())
    loss, size = svi.step(y, batch_size), batch_size or 3
    bounds = other.posterior(y).free_energy()
    # The rows that were drawn are those of this loss.
    (rows,) = (
        list(some) for some in itertools.combinations(range(3), size) if abs(loss + 3 / size * float(bounds[list(some)].sum())) < 1e-8
    )
    posterior = other.posterior(y[rows])
    other.maximize({name: 3 / size * value for name, value in other.sufficient_statistics(posterior, y[rows]).items()})
    for name, value in other.named_parameters():
        torch.testing.assert_close(dict(model.named_parameters())[name], value, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("batch_size", [None, 2])
def test_sequences_that_all_end_early_are_learned(batch_size: int | None) -> None:
    y, _ = draw(2, 3, 20, 4)
    y[:, 15:] = math.nan
    model = FactorialHMM(3, 2, dtype=DOUBLE).initialize(y, torch.Generator().manual_seed(1))
    svi = SVI(model, AutoTruncated(model, num_states=4), ClosedForm(model), Truncated_ELBO())
    loss = svi.step(y.numpy(), batch_size)
    assert math.isfinite(loss)
    posterior = model.posterior(y[:, :10])
    with pytest.raises(ValueError, match="posterior must be of the sequences y"):
        model.sufficient_statistics(posterior, y)


def test_differences_are_a_sparse_ternary_code() -> None:
    """Causes that change one at a time, with little noise, are found from differences alone."""
    y, weight = draw(5, 10, 800, 1, 0.2)
    y[torch.rand(y.shape) < 0.05] = math.nan
    found, deviation = difference_dictionary(y, 5, torch.Generator().manual_seed(0))
    assert recovered(found, weight) == 5
    assert 0.1 < float(deviation) < 0.4


def test_it_generates_sums_of_the_columns_of_causes() -> None:
    model = FactorialHMM(3, 2)
    model.weight, model.scale = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]]), torch.tensor(1e-3)
    y = model(num_steps=40).detach()
    assert y.shape == (1, 40, 3)
    sums = torch.tensor(list(itertools.product((0.0, 1.0), repeat=2))) @ model.weight.detach().mT
    nearest = torch.cdist(y[0], sums).min(1)
    assert float(nearest.values.max()) < 0.01
    assert len(nearest.indices.unique()) > 1


def test_arguments_are_checked() -> None:
    model = FactorialHMM(3, 2)
    with pytest.raises(ValueError, match="y must have shape"):
        learn(model, torch.randn(10, 3))
    with pytest.raises(ValueError, match="infinity"):
        learn(model, torch.full((1, 4, 3), math.inf))
    with pytest.raises(ValueError, match="num_latents"):
        FactorialHMM(3, 0)


@pytest.mark.nightly
def test_eight_causes_are_found() -> None:
    """No run of four misses more than one of eight causes; six of six other runs missed none."""
    complete = 0
    for seed in range(4):
        torch.manual_seed(seed)
        y, weight = draw(8, 12, 1000, 1, 0.7)
        model = FactorialHMM(12, 8, dtype=DOUBLE)
        learn(model, y, num_states=8, progress=False, generator=torch.Generator().manual_seed(seed))
        complete += recovered(model.weight.detach(), weight) >= 7
    assert complete == 4


@pytest.mark.parametrize(("third", "is_doubted"), [([2, 6, 7], False), ([5, 6, 7], True)])
def test_restarts_that_share_every_latent_of_the_best_agree(third: list[int], is_doubted: bool) -> None:
    """Restarts of different free energies, of which the second found two of three latents of the best, flipped; the third one, or none."""
    y, _ = draw(3, 4, 40)
    profile = profile_model(FactorialHMM(4, 3, dtype=DOUBLE), y, max_restarts=3)
    pool, activity = SolutionPool(profile), (torch.rand(40, 8) < 0.4).double()
    rule = StopRule(pool)
    for free_energy, chosen, flips in ((-1.0, [0, 1, 2], 0.0), (-5.0, [1, 0, 4], 1.0), (-9.0, third, 0.0)):
        estimate = FreeEnergyEstimate(free_energy)
        pool.add(Solution(estimate, {}, probabilities=(activity[:, chosen] - flips).abs()), Restart("", 1, free_energy))
    assert rule.reason() == ("the maximum number of restarts is reached" if is_doubted else "two restarts agree")
    doubt = rule.disagreement()
    assert (doubt is None) is not is_doubted
    assert doubt is None or doubt.startswith("some chains of the best of 3 restarts were found by no other one")


def test_statistics_in_inference_mode_are_those_outside():
    y, _ = draw(2, 6, 5, num_data=2)
    model = FactorialHMM(6, 2, dtype=DOUBLE).initialize(y)
    expected = model.sufficient_statistics(model.posterior(y, 4), y)
    with torch.inference_mode():
        found = model.sufficient_statistics(model.posterior(y.clone(), 4), y.clone())
    assert all(torch.equal(found[name], value) for name, value in expected.items())
