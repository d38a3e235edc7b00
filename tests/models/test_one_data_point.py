"""Models that no table enumerates take a single data point, too: for training, in a batch, for inference, and when they generate."""

from __future__ import annotations

from collections.abc import Callable

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, GibbsEM, GibbsGuide, Preselection, Truncated_ELBO
from pyro_truncated import models as library
from pyro_truncated.scenes.occlusion import OccludedScene
from pyro_truncated.search import Cosine

SEARCH = EvolutionarySearch(parents=2, children=2, generations=1)
CANVAS = (4, 5)


def scenes(template: tuple[int, int], **options) -> library.OcclusiveComponents:
    return library.OcclusiveComponents(2, CANVAS, template, 2, **options)


def gated() -> library.GatedDecoder:
    switches = torch.tensor([[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    return library.GatedDecoder(torch.rand(4, 3), switches, torch.randn(4, 2, 1), width=4)


MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "GatedDecoder": gated,
    "OcclusiveComponents": lambda: scenes((2, 2)),
    "OcclusiveComponents in depth": lambda: scenes((2, 2), order="depth"),
    "OcclusiveComponents without wrapping": lambda: scenes((2, 2), wrap=False),
    "OcclusiveComponents as wide as the canvas": lambda: scenes((2, 5)),
    "OcclusiveComponents as high as the canvas": lambda: scenes((4, 2), order="depth"),
    "OcclusiveComponents as large as the canvas": lambda: scenes(CANVAS),
    "OcclusiveComponents almost as large": lambda: scenes((3, 4), wrap=False),
}


def data_of(name: str, num_data: int) -> Tensor:
    if name.startswith("Occlusive"):
        return torch.rand(num_data, *CANVAS, 2)
    return (torch.rand(num_data, 3) < 0.5).float()


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_one_data_point(name, monkeypatch):
    # Of the trained guide and of that of new data.
    monkeypatch.setattr(AutoTruncated, "num_draws", 2)
    y, model = data_of(name, 3), MODELS[name]()
    if hasattr(model, "initialize"):
        model.initialize(y[:1])
    guide = AutoTruncated(model, 3, conditional=getattr(model, "pose_guide", None))
    optimizers = [Adam({"lr": 0.01})] + ([ClosedForm(model)] if hasattr(model, "maximize") else [])
    for optimizer in reversed(optimizers):
        if not isinstance(optimizer, ClosedForm) and ClosedForm.find(model) is not None:
            ClosedForm.find(model).release()
        svi = SVI(model, guide, optimizer, Truncated_ELBO(SEARCH))
        assert all(torch.tensor(svi.step(y[:1])).isfinite() for _ in range(2))
        assert torch.tensor(svi.evaluate_loss(y[:1])).isfinite()
    assert len(guide.infer(y[1:2], SEARCH, 1).weights()) == 1
    if name != "GatedDecoder":
        assert model(num_data=1).shape == y[:1].shape


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_one(name):
    y, model = data_of(name, 3), MODELS[name]()
    guide = AutoTruncated(model, 3, conditional=getattr(model, "pose_guide", None))
    svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(SEARCH))
    assert all(torch.tensor(svi.step(y, 1)).isfinite() for _ in range(4))


def test_one_data_point_of_maximal_slabs():
    y, model = torch.rand(1, 3), library.MaxSpikeSlabSparseCoding(3, 4)
    model.initialize(y)
    svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(Preselection(Cosine(lambda: model.weight), 3)))
    assert all(torch.tensor(svi.step(y)).isfinite() for _ in range(2))


@pytest.mark.parametrize("batch", [(), (1,), (1, 1)])
def test_densities_of_one_image_do_not_depend_on_dimensions_of_size_one(batch):
    presence, position, order = torch.tensor([1.0, 1.0]), torch.tensor([3, 8]), torch.tensor([0, 1])
    features, masks, image = torch.rand(2, 2, 5, 2), torch.full((2, 2, 5), 0.6), torch.rand(*CANVAS, 2)

    def log_prob(states: tuple[int, ...], images: tuple[int, ...]) -> Tensor:
        scene = OccludedScene(
            presence.expand(*states, 2), position.expand(*states, 2), features, masks, 0.3, torch.zeros(2), 0.2, CANVAS, order=order
        )
        return scene.log_prob(image.expand(*images, *image.shape))

    expected = log_prob((4,), (4,))[0]
    for states in ((), (1,), (3, 1)):
        shape = torch.broadcast_shapes(states, batch)
        torch.testing.assert_close(log_prob(states, batch), expected.expand(shape))


def test_one_image_of_many_states_passes_gradients():
    pyro.clear_param_store()
    model, image = scenes((2, 2)), torch.rand(1, *CANVAS, 2)
    loss = Truncated_ELBO(SEARCH).differentiable_loss(model, AutoTruncated(model, 4), image)
    loss.backward()
    assert all(parameter.grad is not None and bool(parameter.grad.isfinite().all()) for parameter in model.parameters())
