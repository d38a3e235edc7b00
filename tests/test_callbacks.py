"""Curves of training: with stand-ins for the tools, and with TensorBoard where it is installed."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO, fit
from pyro_truncated.callbacks import TensorBoard, WandB
from pyro_truncated.datasets import linear_bars
from pyro_truncated.models import BinarySparseCoding


class Recorder:
    """Stands in for a writer and a run."""

    def __init__(self) -> None:
        self.curves: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.curves.setdefault(name, []).append((step, value))

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self.add_scalar(name, value, step)

    def flush(self) -> None:
        pass


def trained(*callbacks: Any, steps: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    y = linear_bars(30, size=3).data
    model = BinarySparseCoding(9, 6).initialize(y)
    svi = SVI(model, AutoTruncated(model, num_states=64), ClosedForm(model), Truncated_ELBO())
    return fit(svi, y, steps=steps, callbacks=callbacks, progress=False, **options)


@pytest.mark.parametrize("make", [lambda tool, every: TensorBoard(writer=tool, every=every), lambda tool, every: WandB(tool, every=every)])
def test_every_recorded_quantity_is_a_curve(make):
    every_step, every_other = Recorder(), Recorder()
    training = trained(lambda training: {"squared": training.free_energy**2}, make(every_step, 1), make(every_other, 2))
    for name in ("free_energy", "squared"):
        assert every_step.curves[name] == list(enumerate(training.record[name], 1))
        assert every_other.curves[name] == every_step.curves[name][1::2]
    assert every_step.curves["seconds"] == list(enumerate(training.seconds, 1))


def test_a_continued_run_continues_its_curves(tmp_path):
    tool = Recorder()
    trained(TensorBoard(writer=tool), steps=2, checkpoint=tmp_path / "run.pt")
    trained(TensorBoard(writer=tool), steps=5, checkpoint=tmp_path / "run.pt")
    assert [step for step, _ in tool.curves["free_energy"]] == [1, 2, 3, 4, 5]


def test_a_run_of_wandb_is_started_with_training(monkeypatch):
    tool, asked = Recorder(), []
    module = SimpleNamespace(init=lambda **options: asked.append(options) or tool)
    monkeypatch.setitem(sys.modules, "wandb", module)
    callback = WandB(project="bars")
    assert not asked
    trained(callback)
    assert asked == [{"project": "bars"}]
    assert len(tool.curves["free_energy"]) == 4


@pytest.mark.parametrize(("callback", "module"), [(WandB(), "wandb"), (TensorBoard(), "torch.utils.tensorboard")])
def test_a_missing_package_is_named_before_the_first_step(callback, module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r'pip install "pyro-truncated\[(wandb|tensorboard)\]"'):
        trained(callback)


def test_tensorboard_reads_what_is_written(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    training = trained(TensorBoard(tmp_path))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = events.Scalars("free_energy")
    assert [event.step for event in found] == [1, 2, 3, 4]
    assert [event.value for event in found] == pytest.approx(training.record["free_energy"], rel=1e-6)


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="not both"):
        TensorBoard("runs", writer=Recorder())
    with pytest.raises(ValueError, match="cannot change a run that exists"):
        WandB(Recorder(), project="bars")
    with pytest.raises(ValueError, match="every must be a positive integer; got 0"):
        WandB(every=0)


def test_neither_tool_is_loaded_before_training():
    assert isinstance(sys.modules["pyro_truncated.callbacks"], ModuleType)
    assert "wandb" not in sys.modules
