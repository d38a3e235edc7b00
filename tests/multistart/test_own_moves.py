"""Initialisers and moves of a user's own, and arguments of version 0.2."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_truncated import LearnConfig, learn
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.multistart import Solution

QUICK: dict[str, Any] = {"steps": 3, "num_states": 2, "progress": False}
CENTRES = torch.tensor([-4.0, 4.0])


def mixture(y: Tensor) -> None:
    """Two components of unit variance whose centres are learned."""
    centre = pyro.param("centre", lambda: torch.tensor([0.5, 0.6]))
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(torch.ones(2)))
        pyro.sample("y", dist.Normal(centre[z], 1.0), obs=y)


def data() -> Tensor:
    """As many data points about either centre."""
    return torch.cat([centre + 0.5 * torch.randn(20, generator=torch.Generator().manual_seed(0)) for centre in CENTRES])


def evidence(y: Tensor, centre: Tensor) -> float:
    """The log evidence per data point of given centres."""
    each = dist.Normal(centre, 1.0).log_prob(y.unsqueeze(1)) - math.log(2.0)
    return float(each.logsumexp(1).mean())


class Jump:
    """Proposes given centres, and notes what is best at the time."""

    name = "jump"

    def __init__(self, *centres: Tensor) -> None:
        self.centres, self.seen = centres, []

    def propose(self, best: Solution) -> Any:
        for centre in self.centres:
            self.seen.append(best)
            best = yield best.replace(parameters={**best.parameters, "centre": centre})


@pytest.fixture(autouse=True)
def empty_store():
    pyro.clear_param_store()


def test_an_initialiser_of_ones_own_says_where_each_restart_begins():
    begun, y = [], data()

    def spread(model: Any, rows: Tensor, generator: torch.Generator | None) -> None:
        assert model is mixture
        assert torch.equal(rows.sort().values, y.sort().values)
        pyro.get_param_store()["centre"] = CENTRES + torch.randn(2, generator=generator)
        begun.append(pyro.param("centre").detach().clone())

    config = LearnConfig(initializer=spread, restart_steps=1, lr=1e-12, tolerance=0.0)
    with pytest.warns(UserWarning, match="local optimum"):
        guide = learn(mixture, y, restarts=3, config=config, generator=torch.Generator().manual_seed(1), **QUICK)
    assert len(begun) == 3
    assert [restart.initialisation for restart in guide.learn_report.restarts] == ["spread"] * 3
    # The learning rate leaves all centres where they began: the free energies of full populations are evidences.
    assert guide.starts == pytest.approx([evidence(y, centre) for centre in begun], abs=1e-5)
    assert torch.allclose(pyro.param("centre"), max(begun, key=lambda centre: evidence(y, centre)), atol=1e-6)


def test_a_larger_model_begins_by_it_too():
    sizes = []

    def zeros(model: Any, y: Tensor, generator: torch.Generator | None) -> None:
        sizes.append(model.num_latents)
        model.initialize(y, generator)

    y = torch.randn(60, 9, generator=torch.Generator().manual_seed(0))
    config = LearnConfig(initializer=zeros, restart_steps=2, tolerance=1e9)
    learn(BinarySparseCoding(9, 3), y, restarts=2, config=config, **{**QUICK, "num_states": 8})
    assert sizes == [6, 6]


def test_moves_of_ones_own_are_trained_and_accepted_if_they_gain():
    y, move = data(), Jump(torch.tensor([50.0, 60.0]), CENTRES.clone(), torch.tensor([9.0, 9.0]))
    config = LearnConfig(moves=(move,), restart_steps=2, lr=1e-12, tolerance=0.01)
    guide = learn(mixture, y, restarts=1, config=config, **QUICK)
    assert guide.learn_report.moves == {"jump": (3, 1)}
    assert guide.starts == pytest.approx([evidence(y, CENTRES)], abs=1e-5)
    assert torch.allclose(pyro.param("centre"), CENTRES, atol=1e-6)
    # After each proposal the move is told what is best now.
    first, second, third = move.seen
    assert first is second
    assert torch.allclose(third.parameters["centre"], CENTRES, atol=1e-6)
    assert third.free_energy == pytest.approx(evidence(y, CENTRES), abs=1e-5)


def test_arguments_of_version_0_2_warn_and_do_the_same():
    y, reached = torch.randn(50, 9, generator=torch.Generator().manual_seed(0)), []
    for arguments in (
        {"starts": 2, "short_steps": 4, "temperature": 3.0, "tolerance": 1e9},
        {"restarts": 2, "config": LearnConfig(restart_steps=4, temperature=3.0, tolerance=1e9)},
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pyro.set_rng_seed(1)
            guide = learn(BinarySparseCoding(9, 3), y, **arguments, **QUICK, generator=torch.Generator().manual_seed(1))
        told = [str(one.message) for one in caught if issubclass(one.category, DeprecationWarning)]
        assert all(one.filename == __file__ for one in caught)
        assert len(told) == (4 if "starts" in arguments else 0)
        reached.append(guide.starts)
    assert reached[0] == reached[1]


def test_a_number_that_has_gone_warns() -> None:
    with pytest.warns(DeprecationWarning, match="max_lead of LearnConfig has no effect any more"):
        assert LearnConfig(max_lead=4.0) == LearnConfig()
