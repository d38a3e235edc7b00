"""Elements of a dictionary that are hardly ever on start again where data are badly explained."""

from __future__ import annotations

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO, fit
from pyro_truncated.callbacks import RestartUnused
from pyro_truncated.models import BinarySparseCoding, NoisyOr
from pyro_truncated.models.dictionary import shared_part

WEIGHT = 3 * torch.eye(8).repeat_interleave(2, 0)


def _run(num_data: int = 400) -> tuple[SVI, BinarySparseCoding, torch.Tensor]:
    """A model that knows seven of eight causes; its last element is far from everything, and the noise is nearly right."""
    states = torch.bernoulli(torch.full((num_data, 8), 0.2))
    y = states @ WEIGHT.mT + 0.3 * torch.randn(num_data, 16)
    model = BinarySparseCoding(16, 8, offset=False).initialize(y)
    with torch.no_grad():
        model.weight = WEIGHT.clone()
        model.weight[:, 7] = -50.0
        model.scale, model.prior = torch.tensor(1.0), torch.tensor(0.2)
    return SVI(model, AutoTruncated(model, num_states=64), ClosedForm(model), Truncated_ELBO()), model, y


@pytest.mark.slow
def test_an_element_that_is_never_on_finds_what_is_badly_explained() -> None:
    svi, model, y = _run()
    training = fit(svi, y, steps=10, progress=False)
    torch.testing.assert_close(model.weight[:, 7].detach(), torch.full((16,), -50.0))  # EM leaves it where it is
    before = training.free_energy
    training = fit(svi, y, steps=20, callbacks=[RestartUnused(y, every=5, until=5)], progress=False)
    assert training.record["restarted"] == [0, 0, 0, 0, 1, *[0] * 15]
    assert training.free_energy > before + 100
    torch.testing.assert_close(model.weight.detach(), WEIGHT, atol=0.2, rtol=0)


def test_nothing_is_unused_before_the_first_step_or_where_everything_is_on() -> None:
    svi, model, y = _run()
    assert model.restart_unused(y) == 0
    with torch.no_grad():
        model.weight = WEIGHT.clone()
    svi.step(y)
    before = model.weight.detach().clone()
    assert model.restart_unused(y) == 0
    assert torch.equal(model.weight, before)


def test_elements_start_from_what_data_points_share() -> None:
    """Of sums of one of many templates and a part of their own, the template: others have it in them by least squares."""
    template, own = torch.arange(400) % 8, 4 * torch.nn.functional.one_hot(torch.arange(400), 400).float()
    y = torch.cat([3 * torch.eye(8)[template], own], 1)
    model = BinarySparseCoding(408, 16, offset=False).initialize(y)
    length = model.weight.detach().norm(dim=0)
    # Those of the same template have 9 / 25 of it in them; the mean is over the eighth that has most, in which an element is on at first.
    torch.testing.assert_close(length, torch.full((16,), 5 * 9 / 25), atol=0.1, rtol=0)


def test_the_shared_part_leaves_out_what_is_missing_and_has_bounds() -> None:
    rows = torch.tensor([[2.0, 0.0], [1.0, 0.0], [torch.nan, 5.0]])
    element = torch.tensor([[2.0], [0.0]])
    torch.testing.assert_close(shared_part(element, rows, 1 / 3), torch.tensor([0.5]))
    assert shared_part(element, 4 * rows, 1 / 3) == 1.0
    assert shared_part(torch.tensor([[0.0], [-1.0]]), rows, 2 / 3) == pytest.approx(0.1)
    assert shared_part(element, rows[:1], 0.5) == 1.0


@pytest.mark.parametrize("is_released", [True, False])
def test_training_by_gradients_is_refused(is_released: bool) -> None:
    svi, model, y = _run(20)  # whose optimiser is still there
    if is_released:
        svi.optim.release()
    by_gradients = SVI(model, AutoTruncated(model, num_states=8), Adam({"lr": 0.01}), Truncated_ELBO())
    with pytest.raises(TypeError, match=r"RestartUnused needs a BinarySparseCoding trained by ClosedForm; got PyroOptim"):
        fit(by_gradients, y, steps=1, callbacks=[RestartUnused(y)], progress=False)
    ClosedForm(model).release()
    with pytest.raises(TypeError, match=r"the last ClosedForm\(model\) that was made for the model"):
        fit(svi, y, steps=1, callbacks=[RestartUnused(y)], progress=False)


def test_other_models_and_numbers_are_refused() -> None:
    y = torch.ones(5, 4)
    with pytest.raises(ValueError, match="every"):
        RestartUnused(y, every=0)
    with pytest.raises(ValueError, match="until"):
        RestartUnused(y, until=0)
    model = NoisyOr(4, 3).initialize(y)
    svi = SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), Truncated_ELBO())
    with pytest.raises(TypeError, match="RestartUnused needs a model with the method restart_unused; NoisyOr has none"):
        fit(svi, y, steps=1, callbacks=[RestartUnused(y)], progress=False)
