"""Components that move between steps of training: through fit's callback, and in learn."""

from __future__ import annotations

import itertools
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Truncated_ELBO, fit, learn
from pyro_truncated.callbacks import SplitAndMerge
from pyro_truncated.models import BinarySparseCoding, GaussianMixture
from pyro_truncated.search import NeighbourSearch

K, N = 5, 300


def clusters() -> Tensor:
    """Data of well separated clusters, cluster ``n % K`` of data point ``n``."""
    generator = torch.Generator().manual_seed(0)
    corners = torch.tensor(list(itertools.product([0.0, 20.0], repeat=3)))[:K]
    return (corners[torch.arange(N) % K] + torch.randn(N, 3, generator=generator)).double()


class BadlyStarted(GaussianMixture):
    """A mixture two of whose components begin in the first cluster, and one far from all data, so that EM leaves a cluster without any."""

    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> BadlyStarted:
        super().initialize(y, generator)
        loc = y[:K].clone()
        loc[1] = loc[0] + 0.1
        loc[-1] = loc[-1] + 1e4
        self.loc, self.scale = loc, torch.ones(K, dtype=y.dtype)
        self.weights = torch.full((K,), 1 / K, dtype=y.dtype)
        return self


def make() -> BadlyStarted:
    return BadlyStarted(3, K, covariance="spherical", dtype=torch.float64)


def has_all_clusters(model: GaussianMixture, y: Tensor) -> bool:
    return bool((torch.cdist(y[:K], model.loc.detach()).amin(1) < 5).all())


def run(y: Tensor, batch_size: int | None, *callbacks: Any) -> tuple[BadlyStarted, Any]:
    pyro.set_rng_seed(0)
    model = make().initialize(y)
    guide = AutoTruncated(model, num_states=2, init=model.likeliest_components(y, 2))
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(NeighbourSearch(2, parents=2)))
    return model, fit(svi, y, batch_size, steps=30, callbacks=callbacks, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 100])
def test_the_callback_moves_components_until_nothing_moves(batch_size: int | None) -> None:
    y = clusters()
    assert not has_all_clusters(run(y, batch_size)[0], y)
    model, training = run(y, batch_size, SplitAndMerge(y, every=5))
    moved = training.record["moved"]
    assert has_all_clusters(model, y)
    assert sum(moved) >= 1
    assert all(number == 0 for step, number in enumerate(moved, 1) if step % 5)
    if batch_size is None:
        energies = training.record["free_energy"]
        assert all(after >= before - 1e-9 * abs(before) for before, after in itertools.pairwise(energies))


def test_once_nothing_has_moved_it_is_not_called_again() -> None:
    y, calls = clusters(), []

    class Counting(GaussianMixture):
        def split_and_merge(self, guide: AutoTruncated, y: Tensor, generator: torch.Generator | None = None) -> int:
            calls.append(len(y))
            return 3 - len(calls)

    model = Counting(3, K).initialize(y.float())
    svi = SVI(model, AutoTruncated(model, num_states=K), ClosedForm(model), Truncated_ELBO())
    training = fit(svi, y.float(), steps=12, callbacks=[SplitAndMerge(y.float(), every=2)], progress=False)
    assert calls == [N] * 3
    assert training.record["moved"] == [0, 2, 0, 1] + 8 * [0]


@pytest.mark.slow
def test_learn_moves_components_where_no_start_has_them() -> None:
    y = clusters()
    model = make()
    guide = learn(model, y, restarts=2, progress=False, generator=torch.Generator().manual_seed(0))
    assert has_all_clusters(model, y)
    again = learn(make(), y, restarts=2, progress=False, generator=torch.Generator().manual_seed(0))
    assert guide.starts == again.starts


def test_other_models_and_counts_out_of_range_are_refused() -> None:
    y = torch.randn(20, 4)
    with pytest.raises(ValueError, match="every"):
        SplitAndMerge(y, every=0)
    model = BinarySparseCoding(4, 3).initialize(y)
    svi = SVI(model, AutoTruncated(model, num_states=8), ClosedForm(model), Truncated_ELBO())
    with pytest.raises(TypeError, match="split_and_merge; BinarySparseCoding has none"):
        fit(svi, y, steps=1, callbacks=[SplitAndMerge(y)], progress=False)
    assert ClosedForm.find(model).num_steps == 0
