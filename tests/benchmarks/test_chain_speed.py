"""CPU seconds of sums along chains with all states, beside hidden Markov models of other libraries where they are installed.

Both get log likelihoods and give filtered and smoothed probabilities: hmmlearn's two implementations, without the emissions, and
dynamax's compiled smoother.

make bench
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from pyro_truncated.distributions import BinaryChains
from pyro_truncated.ops import binary_chains as chains
from pyro_truncated.states import StateSpace
from tests.benchmarks.timing import cpu_seconds

NUM_STEPS = 20_000


def peers(start: np.ndarray, table: np.ndarray, unary: np.ndarray) -> dict[str, Callable[[], float]]:
    """By name, functions that smooth and return the log evidence."""
    found: dict[str, Callable[[], float]] = {}
    try:
        from hmmlearn import _hmmc

        def by_logarithms() -> float:
            _hmmc.backward_log(start, table, unary)
            return float(_hmmc.forward_log(start, table, unary)[0])

        def by_scaling() -> float:
            likelihood = np.exp(unary)
            log_prob, _, scale = _hmmc.forward_scaling(start, table, likelihood)
            _hmmc.backward_scaling(start, table, likelihood, scale)
            return float(log_prob)

        found |= {"hmmlearn, log": by_logarithms, "hmmlearn, scaling": by_scaling}
    except ImportError:
        pass
    try:
        import jax
        from dynamax.hidden_markov_model import hmm_smoother

        jax.config.update("jax_enable_x64", True)
        smooth = jax.jit(lambda p, a, u: (lambda found: (found.marginal_loglik, found.smoothed_probs))(hmm_smoother(p, a, u)))
        arrays = [jax.numpy.asarray(array) for array in (start, table, unary)]
        found["dynamax"] = lambda: float(jax.block_until_ready(smooth(*arrays))[0])
    except ImportError:
        pass
    return found


@pytest.mark.benchmark
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("num_latents", [1, 2, 3, 4, 5, 6])
def test_full_sets_beside_other_libraries(num_latents):
    """At most twice the time of each."""
    torch.manual_seed(num_latents)
    space = StateSpace([2] * num_latents)
    table = (torch.rand(num_latents, 2, 2, dtype=torch.float64) + 0.2).softmax(-1)
    initial = torch.rand(num_latents, dtype=torch.float64) * 0.8 + 0.1
    moves = BinaryChains(initial, table, NUM_STEPS).expand([1]).transitions()
    unary = 2 * torch.randn(1, NUM_STEPS, space.size, dtype=torch.float64)
    words = space.enumerate().expand(1, NUM_STEPS, -1, -1)
    start, dense = torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    for m in range(num_latents):
        start, dense = torch.kron(torch.stack([1 - initial[m], initial[m]]), start), torch.kron(table[m], dense)
    repeats = 7 + 100 // space.size
    ours = cpu_seconds(lambda: chains.messages(words, unary, moves), repeats)
    with_transitions = cpu_seconds(lambda: chains.expected_transitions(words, unary, moves, chains.messages(words, unary, moves)), repeats)
    line = (
        f"{space.size} states, microseconds a step: {1e6 * ours / NUM_STEPS:.2f}, with transitions {1e6 * with_transitions / NUM_STEPS:.2f}"
    )
    evidence = float(chains.messages(words, unary, moves).free_energy())
    for name, smooth in peers(start.numpy(), dense.numpy(), unary[0].numpy()).items():
        seconds = cpu_seconds(smooth, repeats)
        line += f"; {name} {1e6 * seconds / NUM_STEPS:.2f} ({ours / seconds:.2f})"
        assert smooth() == pytest.approx(evidence, rel=1e-10)
        assert ours < 2 * seconds
    print("\n" + line)
