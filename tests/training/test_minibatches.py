"""A step on a minibatch costs what its data points cost, however many others there are."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuideList, AutoNormal
from pyro.optim import Adam
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.models import BinarySparseCoding, DiscreteSparseCoding, SpikeSlabSparseCoding
from pyro_truncated.program.subsampling import random_subset

N, BATCH = 40_000, 20
_REACHES_IN = {"index", "index_put_", "_index_put_impl_", "index_select"}


class LargeOperations(TorchDispatchMode):
    """Names the operations that read or write as many numbers as there are data points, but for those that reach for a few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if name not in _REACHES_IN and not func.is_view and any(_numbers_held(tensor) >= N for tensor in tensors):
            self.found.append(name)
        return result


def _numbers_held(tensor: Tensor) -> int:
    """Numbers of a tensor that lie in different places in memory."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else 1
    return count


def step_of(kind: str):
    y = torch.randn(N, 3)
    model = BinarySparseCoding(3, 4)
    model.initialize(y[:100])
    guide = AutoTruncated(model, 5)
    optimizer = Adam({"lr": 0.01}) if kind == "gradient" else ClosedForm(model, minibatch=kind)
    svi = SVI(model, guide, optimizer, Truncated_ELBO(EvolutionarySearch(parents=2, children=2)))
    return lambda: svi.step(y, BATCH)


def step_in_a_list():
    def model(y, batch_size=None):
        loc = pyro.sample("loc", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y), subsample_size=batch_size) as index:
            s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(loc + s[..., :3], 1.0).to_event(1), obs=y[index])

    y = torch.randn(N, 3)
    guide = AutoGuideList(model)
    guide.append(AutoNormal(poutine.block(model, expose=["loc"])))
    guide.append(AutoTruncated(model, 5))
    svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch(parents=2, children=2), max_plate_nesting=1))
    return lambda: svi.step(y, BATCH)


@pytest.mark.parametrize("kind", ["incremental", "online", "gradient", "list"])
def test_a_step_does_not_touch_all_data(kind):
    step = step_in_a_list() if kind == "list" else step_of(kind)
    for _ in range(3):
        step()
    with LargeOperations() as operations:
        step()
    assert operations.found == []


@pytest.mark.parametrize("family", [BinarySparseCoding, SpikeSlabSparseCoding, DiscreteSparseCoding])
def test_statistics_of_minibatches_of_which_some_lack_entries_add_up(family):
    y = torch.randn(12, 3, dtype=torch.float64)
    y[2, 1] = y[7, 0] = torch.nan
    model = family(3, 4, dtype=torch.float64).initialize(y)
    guide = AutoTruncated(model, 6)
    guide.refresh_(y)
    whole = model.sufficient_statistics(guide.population(), y)
    parts = [model.sufficient_statistics(guide.population(rows), y) for rows in torch.arange(12).split(3)]
    for name, value in whole.items():
        total = sum(part[name] for part in parts)
        assert torch.allclose(total.expand(value.shape), value, atol=1e-12), name


@pytest.mark.nightly
def test_subsets_are_uniform():
    pyro.set_rng_seed(0)
    draws = torch.stack([random_subset(40, 3) for _ in range(20_000)])
    assert all(len(set(draw)) == 3 for draw in draws.tolist())
    # Chi-squared tests of the position of every draw: 39 degrees of freedom, false alarms 3 * 1e-5.
    for column in draws.mT:
        counts = column.bincount(minlength=40).double()
        assert float(((counts - 500).square() / 500).sum()) < 88
    # Pairs of positions, 1600 - 40 of them: 1559 degrees of freedom, false alarms below 1e-5.
    pairs = (draws[:, 0] * 40 + draws[:, 1]).bincount(minlength=1600).double()
    expected = 20_000 / 1560
    assert float(((pairs - expected).square() / expected).sum()) - 40 * expected < 1559 + 4.5 * (2 * 1559) ** 0.5


def test_a_subset_of_everything_is_a_permutation():
    assert random_subset(50, 50).sort().values.tolist() == list(range(50))
    assert random_subset(7, 0).tolist() == []
