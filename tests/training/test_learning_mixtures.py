"""learn and mixtures: the best optimum that is known, without a temperature."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.mixture import GaussianMixture as Reference

from pyro_truncated import learn
from pyro_truncated.models import GaussianMixture


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_iris_is_learned_as_well_as_by_scikit_learn_with_many_starts(seed: int) -> None:
    y = torch.from_numpy(load_iris().data)
    best = Reference(3, n_init=5, random_state=0, tol=1e-6, max_iter=500).fit(y).score(y)
    model = GaussianMixture(4, 3, dtype=torch.float64)
    guide = learn(model, y, progress=False, generator=torch.Generator().manual_seed(seed))
    assert float(guide.population().free_energy().mean()) == pytest.approx(best, abs=1e-3)
