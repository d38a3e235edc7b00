"""The module of model and guide trains under Lightning as in a loop of one's own; runs where Lightning is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from pyro_truncated import AutoTruncated, Truncated_ELBO

lightning = pytest.importorskip("lightning")
# Lightning's own, about torch's newest release, and its advice on numbers of workers and on checkpoints.
pytestmark = pytest.mark.filterwarnings("ignore:::lightning")
NUM_DATA = 40


class Causes(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, 12).reshape(4, 3))

    def forward(self, rows: Tensor, index: Tensor) -> None:
        with pyro.plate("data", NUM_DATA, subsample=index):
            s = pyro.sample("s", dist.Bernoulli(torch.full((3,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(s @ self.weight.mT, 0.5).to_event(1), obs=rows)


class Training(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, batch: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        pyro.clear_param_store()
        model = Causes()
        self.guide = AutoTruncated(model, num_states=8)
        self.guide(*batch)
        self.elbo = Truncated_ELBO()(model, self.guide)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.elbo(*batch) / NUM_DATA

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.elbo.parameters(), lr=0.05)


@pytest.fixture
def data(generator: torch.Generator) -> TensorDataset:
    return TensorDataset(torch.randn(NUM_DATA, 4, generator=generator), torch.arange(NUM_DATA))


def trainer(max_epochs: int) -> Any:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(max_epochs=max_epochs, accelerator="cpu", **quiet)


def free_energy(training: Training, data: TensorDataset) -> float:
    with torch.no_grad():
        return -float(training.elbo(*data.tensors))


def test_lightning_trains_as_a_loop_does(data: TensorDataset) -> None:
    loader = DataLoader(data, batch_size=10)
    by_lightning = Training(next(iter(loader)))
    before = free_energy(by_lightning, data)
    trainer(5).fit(by_lightning, loader)
    by_hand = Training(next(iter(loader)))
    optimiser = by_hand.configure_optimizers()
    for _ in range(5):
        for batch in loader:
            optimiser.zero_grad()
            by_hand.training_step(batch, 0).backward()
            optimiser.step()
    torch.testing.assert_close(by_lightning.elbo.model.weight, by_hand.elbo.model.weight)
    assert free_energy(by_lightning, data) == pytest.approx(free_energy(by_hand, data), rel=1e-6)
    assert free_energy(by_lightning, data) > before + 5


def test_checkpoints_hold_the_populations(data: TensorDataset, tmp_path: Path) -> None:
    loader = DataLoader(data, batch_size=10)
    first, path = Training(next(iter(loader))), tmp_path / "training.ckpt"
    runner = trainer(2)
    runner.fit(first, loader)
    runner.save_checkpoint(path)
    second = Training(next(iter(loader)))
    second.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    assert torch.equal(second.guide.words, first.guide.words)
    assert free_energy(second, data) == free_energy(first, data)
    third = Training(next(iter(loader)))
    trainer(4).fit(third, loader, ckpt_path=str(path))
    assert free_energy(third, data) > free_energy(first, data)
