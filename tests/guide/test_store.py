"""Populations that are loaded, and guides that could not be set up."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoGuideList

from pyro_truncated import AutoTruncated, ClosedForm, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding
from tests import zoo
from tests.utils.averages import average_of_steps


def used(case: zoo.Case, num_states: int) -> AutoTruncated:
    guide = AutoTruncated(case.model, num_states=num_states, max_count=case.max_count)
    Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(case.model, guide, *case.args)
    return guide


def test_loading_into_a_used_guide_is_a_change_of_its_populations():
    case = zoo.binary()
    guide, other = used(case, 8), AutoTruncated(case.model, 8)
    other.refresh_(*case.args)
    revision = guide.populations.revision
    guide.load_state_dict(other.state_dict())
    assert guide.populations.revision > revision
    assert torch.equal(guide.words, other.words)


def test_loading_in_the_middle_of_incremental_em_keeps_the_statistics_right():
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    model = BinarySparseCoding(3, 4, dtype=torch.float64).initialize(y, generator)
    guide, other = AutoTruncated(model, 5), AutoTruncated(model, 5)
    elbo, closed_form = Truncated_ELBO(ExhaustiveSearch()), ClosedForm(model)
    elbo.loss_and_grads(model, guide, y)
    closed_form([])
    other.refresh_(y)
    guide.load_state_dict(other.state_dict())
    elbo.loss_and_grads(model, guide, y, 4)
    for name, value in model.sufficient_statistics(guide.population(), y).items():
        torch.testing.assert_close(closed_form.statistics[name], value, rtol=1e-9, atol=1e-9)


def test_a_used_guide_refuses_populations_of_another_space_and_keeps_its_own():
    guide, other = used(zoo.binary(), 4), used(zoo.mixture(), 4)
    before = {name: value.clone() for name, value in guide.state_dict().items()}
    with pytest.raises(RuntimeError, match="the loaded populations are of 1 latents with 4 values in all"):
        guide.load_state_dict(other.state_dict())
    assert all(torch.equal(value, before[name]) for name, value in guide.state_dict().items())


def test_fewer_states_than_a_population_has_are_not_kept_several_times():
    guide = used(zoo.binary(), 4)
    first = guide.population()
    with pytest.raises(ValueError, match=r"log_joint must be of 4 states of each data point; got shape \(6, 1\)"):
        guide.populations.store_(first.log_joint[:, :1], None, first.words[:, :1])
    assert torch.equal(guide.population().words, first.words)


@pytest.mark.parametrize("options", [{"num_states": 33, "init": torch.zeros(6, 32, 5)}, {"num_states": 4, "init": torch.zeros(6, 4, 5)}])
def test_a_guide_that_could_not_be_set_up_says_so_again(options):
    case = zoo.binary()
    guide = AutoTruncated(case.model, **options)
    messages = []
    for _ in range(2):
        with pytest.raises(ValueError, match="initial states repeat") as error:
            guide(*case.args)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("indices", "given"),
    [([1, 2], "list"), (torch.tensor([True] * 6), "torch.bool"), (torch.tensor([0.0]), "torch.float32"), (torch.tensor(1), "shape")],
)
def test_indices_are_integers(indices, given):
    guide = used(zoo.binary(), 4)
    with pytest.raises(TypeError, match=rf"indices of data points must be a tensor \(n,\) of integers; got .*{given}"):
        guide.marginals(indices)


def old_layout(state, prefix=""):
    """A state as it was when populations were buffers of the guide itself."""
    return {name.replace(f"{prefix}populations.", prefix): value for name, value in state.items()}


@pytest.mark.parametrize("is_used", [True, False], ids=["used", "fresh"])
def test_populations_of_the_old_layout_are_refused_by_name(is_used):
    guide, case = used(zoo.binary(), 4), zoo.binary()
    target = used(case, 4) if is_used else AutoTruncated(case.model, 4)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(
        RuntimeError, match=r"'words' is of an earlier version.*Rename 'words', 'log_joint' and 'cardinalities' to 'populat"
    ):
        target.load_state_dict(old_layout(guide.state_dict()))
    assert target.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_lists_with_populations_of_the_old_layout_are_refused_by_name():
    case = zoo.binary()
    guide = AutoGuideList(case.model)
    guide.append(AutoTruncated(case.model, 4))
    guide(*case.args)
    with pytest.raises(RuntimeError, match=r"'0\.words' is of an earlier version.*to '0\.populations\.words' and so on"):
        guide.load_state_dict(old_layout(guide.state_dict(), "0."))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_joints_stay_out_of_half_precision(dtype):
    """Beyond its range all states would be impossible, and their weights equal."""

    def model(y):
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            pyro.sample("y", dist.Normal(1.0 * z, 0.01), obs=y)

    y = torch.tensor([5.0, 0.4, -6.0])
    guide = AutoTruncated(model, 3)
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(model, guide, y)
    expected = guide.marginals()["z"]
    assert float(guide.log_joint.min()) < -torch.finfo(torch.float16).max
    guide.to(dtype)
    assert torch.equal(guide.marginals()["z"], expected)
    assert Truncated_ELBO().loss(model, guide, y) == pytest.approx(loss)


def test_states_that_an_average_of_buffers_repeats_are_refused():
    class Model(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.weight = pyro.nn.PyroParam(torch.eye(3, 4))

        def forward(self, y):
            with pyro.plate("data", len(y)):
                s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.4)).to_event(1))
                pyro.sample("y", dist.Normal(s @ self.weight, 1.0).to_event(1), obs=y)

    pyro.set_rng_seed(0)
    model, y = Model(), torch.randn(40, 4)
    module = Truncated_ELBO()(model, AutoTruncated(model, num_states=6))
    average = average_of_steps(module, y, 6, use_buffers=True)
    module(y)
    pyro.clear_param_store()
    with pytest.raises(ValueError, match=r"an average with use_buffers=True: states repeat within"):
        average(y)
