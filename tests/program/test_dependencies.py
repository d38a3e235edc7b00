"""Programs in which a density depends on latents by ways that its functions do not show: full sums stay exact.

What is computed is always 2 z: by writes into other tensors, by NumPy and numbers of Python, by compiled functions.
"""

from __future__ import annotations

import copy
import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from pyro_truncated.program.call import Call
from pyro_truncated.program.dependencies import Dependencies

PROBS = torch.tensor([0.3, 0.6, 0.4, 0.7])
Y = torch.tensor([0.3, 1.8, 2.4, -0.5])


def by_item(z: Tensor) -> Tensor:
    x = torch.zeros(z.shape)
    x[...] = 2 * z
    return x


def by_view(z: Tensor) -> Tensor:
    x = torch.zeros(*z.shape, 1)
    x[..., 0].copy_(2 * z)
    return x.squeeze(-1)


def by_alias(z: Tensor) -> Tensor:
    x = torch.zeros(z.shape)
    other = x
    other += 2 * z
    return x


def by_out(z: Tensor) -> Tensor:
    x = torch.zeros(z.shape)
    torch.mul(z, 2, out=x)
    return x


def by_type(z: Tensor) -> Tensor:
    x = torch.zeros(z.shape)
    x[...] = 2 * z
    return x.type_as(torch.zeros(1, dtype=torch.float64)).float()


def by_pairs(z: Tensor) -> Tensor:
    x = torch.zeros(*z.shape, 2)
    torch.view_as_complex(x)[...] = 2 * z
    return x[..., 0]


def by_mask(z: Tensor) -> Tensor:
    x = torch.zeros(z.shape)
    x[z == 1] = 2.0
    return x


def by_index(z: Tensor) -> Tensor:
    return torch.zeros(z.shape).index_add_(-1, torch.arange(z.shape[-1]), 2 * z)


def by_numpy(z: Tensor) -> Tensor:
    x = np.zeros(z.shape, np.float32)
    x[...] = 2 * z.numpy()
    return torch.from_numpy(x)


def by_numbers(z: Tensor) -> Tensor:
    return torch.tensor([2 * value for value in z.flatten().tolist()]).reshape(z.shape)


@torch.jit.script
def by_script(z):  # a script has no annotations of ours
    return 2 * z


def by_vmap(z: Tensor) -> Tensor:
    doubled: Tensor = torch.func.vmap(lambda value: 2 * value)(z)
    return doubled


def by_shift(z: Tensor) -> Tensor:
    return (z.long() << 1).float()


def by_copy(z: Tensor) -> Tensor:
    return 2 * copy.deepcopy(z)


def by_memory(z: Tensor) -> Tensor:
    """What code of another language does, given addresses."""
    x, z = torch.zeros(z.shape), z.clone(memory_format=torch.contiguous_format)
    ctypes.memmove(x.untyped_storage().data_ptr(), z.untyped_storage().data_ptr(), 4 * z.numel())
    return 2 * x


WAYS = [
    by_item,
    by_view,
    by_alias,
    by_out,
    by_type,
    by_pairs,
    by_mask,
    by_index,
    by_numpy,
    by_numbers,
    by_script,
    by_vmap,
    by_shift,
    by_copy,
    by_memory,
]


def evidence(loc: Callable[[Tensor], Tensor], scale: Tensor) -> float:
    """By the sum over all values of four binary latents."""
    z = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * 4)
    joint = dist.Bernoulli(PROBS).log_prob(z) + dist.Normal(loc(z), scale).log_prob(Y)
    return float(joint.sum(-1).logsumexp(0))


@pytest.mark.filterwarnings("ignore:the model does not take many states at once")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_a_density_beyond_the_plate(way):
    """One observation of all members: they are one decision."""

    def program(y):
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Bernoulli(PROBS))
        pyro.sample("y", dist.Normal(way(z), 1.0).to_event(1), obs=y)

    guide = AutoTruncated(program)
    loss = Truncated_ELBO().loss(program, guide, Y)
    assert loss == pytest.approx(-evidence(lambda z: 2 * z, torch.tensor(1.0)), rel=1e-6)
    posterior = 1 / (1 + (1 - PROBS) / PROBS * ((2 * (1 - Y)).exp()))
    assert torch.allclose(guide.marginals()["z"].reshape(-1), posterior, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the model does not take many states at once")
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_one_latent_shown_and_one_lost(way):
    """A flag above a plate, of whose densities torch shows the flag alone; sets of two states are full."""

    def program(y):
        flag = pyro.sample("flag", dist.Bernoulli(0.4))
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Bernoulli(PROBS))
            pyro.sample("y", dist.Normal(way(z), 1.0 + flag), obs=y)

    exact = torch.tensor([evidence(lambda z: 2 * z, torch.tensor(1.0 + flag)) for flag in (0.0, 1.0)])
    exact = (exact + torch.tensor([0.6, 0.4]).log()).logsumexp(0)
    # Whole states where Python code reads values, and where torch shows nothing.
    num_states = 32 if way in (by_numpy, by_numbers, by_memory) else 2
    loss = Truncated_ELBO().loss(program, AutoTruncated(program, num_states=num_states), Y)
    assert loss == pytest.approx(-float(exact), rel=1e-6)


def test_entries_of_one_tensor_are_told_apart():
    """Each density shows the entry that it reads: two states for each of twelve latents are all."""

    def program(y):
        x = torch.zeros(12)
        for i in range(12):
            x[i] = pyro.sample(f"z_{i}", dist.Bernoulli(0.3))
            pyro.sample(f"y_{i}", dist.Normal(x[i], 1.0), obs=y[i])

    scopes = Dependencies(Call(program, (torch.zeros(12),))).scopes
    assert scopes == {f"z_{i}": frozenset() for i in range(12)} | {f"y_{i}": frozenset({f"z_{i}"}) for i in range(12)}


def overwritten(y):
    x = torch.zeros(3)
    for i in range(3):
        x.zero_()
        x[0] = pyro.sample(f"z_{i}", dist.Bernoulli(0.3))
        pyro.sample(f"y_{i}", dist.Normal(x[0].clone(), 1.0), obs=y[i])


def masked(y):
    for i in range(3):
        z = pyro.sample(f"z_{i}", dist.Bernoulli(0.3))
        with pyro.poutine.mask(mask=z > 0):
            pyro.sample(f"y_{i}", dist.Normal(0.0, 1.0), obs=y[i])


@pytest.mark.parametrize("program", [overwritten, masked])
def test_overwritten_entries_and_masks(program):
    scopes = Dependencies(Call(program, (torch.zeros(3),))).scopes
    assert [scopes[f"y_{i}"] for i in range(3)] == [{"z_0"}, {"z_1"}, {"z_2"}]


def looked_at(z: Tensor) -> float:
    assert not torch.isnan(z).any()
    return 1.0


def printed(z: Tensor) -> float:
    return 1.0 + 0.0 * len(f"{z} {z.sum():.2f} {z!r}")


def random_of_numpy(z: Tensor) -> float:
    return float(np.random.rand())  # noqa: NPY002 - what the test is about


def sparse(z: Tensor) -> float:
    x = torch.zeros(z.shape)
    x[...] = z
    x.to_sparse().to_dense()
    return 1.0


def keywords(z: Tensor) -> float:
    torch.nn.init.constant_(tensor=torch.zeros(4), val=0.0)
    return 1.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("work", [looked_at, printed, random_of_numpy, sparse, keywords])
def test_what_concerns_no_density_leaves_data_points_apart(work):
    def program(y):
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Bernoulli(PROBS))
            pyro.sample("y", dist.Normal(z, 1.0), obs=y)
        pyro.factor("regulariser", torch.tensor(-work(z)))

    guide = AutoTruncated(program)
    guide.setup(Y)
    assert guide.layout.plates == ("data",)


def test_a_compiled_comparison_of_latents():
    """It changes if one of two latents does, and not if both do."""

    @torch.jit.script
    def same(a, b):  # a script has no annotations of ours
        return (a == b).float()

    def program():
        for i in range(3):
            a, b = (pyro.sample(f"{name}_{i}", dist.Categorical(torch.tensor([0.6, 0.3, 0.1]))) for name in "ab")
            pyro.sample(f"y_{i}", dist.Bernoulli(0.02 + 0.96 * same(a, b)), obs=torch.tensor(0.0))

    equal = 0.6**2 + 0.3**2 + 0.1**2
    exact = 3 * math.log(0.98 - 0.96 * equal)
    loss = Truncated_ELBO().loss(program, AutoTruncated(program, num_states=729))
    assert loss == pytest.approx(-exact, rel=1e-5)


@torch.jit.script
def is_large(n):  # a script has no annotations of ours
    return n > 7


@torch.jit.script
def is_largest(n):  # a script has no annotations of ours
    return n >= 14


@torch.jit.script
def is_zero(n):  # a script has no annotations of ours
    return n == 0


PRIORS = {
    "rare counts": lambda: dist.Poisson(1.0),
    "usual counts": lambda: dist.Poisson(9.0),
    "geometric": lambda: dist.Geometric(0.6),
    "binomial": lambda: dist.Binomial(40, 0.1),
    "categorical": lambda: dist.Categorical(torch.tensor([0.3] + [0.05] * 14)),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("branch", [is_large, is_largest, is_zero], ids=["large", "largest", "zero"])
@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_compiled_branches_that_few_values_take(prior, branch, seed):
    """Runs of values that the prior reaches may not differ."""
    pyro.set_rng_seed(seed)

    def program():
        a, b = (pyro.sample(name, PRIORS[prior]()) for name in "ab")
        pyro.sample("x", dist.Bernoulli(torch.where(branch(a), 0.9, 0.001)), obs=torch.tensor(1.0))
        pyro.sample("y", dist.Normal(b.float(), 1.0), obs=torch.tensor(0.1))

    n = torch.arange(15.0)
    log_prior = PRIORS[prior]().log_prob(n)
    exact = sum(
        (log_prior + own).logsumexp(0)
        for own in (torch.where(branch(n), 0.9, 0.001).log(), dist.Normal(n, 1.0).log_prob(torch.tensor(0.1)))
    )
    # One state less than there are, so that sets of states would be kept.
    loss = Truncated_ELBO(ExhaustiveSearch()).loss_and_grads(program, AutoTruncated(program, num_states=15**2 - 1, max_count=14))
    assert loss == pytest.approx(-float(exact), rel=1e-5)


BRANCHES: dict[str, tuple[Any, int | None, Callable[[Tensor], Any]]] = {
    "the largest count": (dist.Poisson(1.0), 14, lambda n: (n >= 14).any()),
    "a bound of NumPy": (dist.Poisson(10.0), np.int64(14), lambda n: (n >= 14).all()),
    "members that differ": (dist.Poisson(1.0), 14, lambda n: n[0] > n[1]),
    "the least counts": (dist.Poisson(1.0), 14, lambda n: (n == 0).all()),
    "values in the middle": (dist.Categorical(torch.ones(24)), None, lambda n: 15 <= int(n[0]) < 22),
    "one value": (dist.Categorical(torch.ones(24)), None, lambda n: n[0] == 19),
    "members with other bounds": (dist.Binomial(torch.tensor([1.0, 13.0]), 0.5), None, lambda n: n[1] >= 6),
}


@pytest.mark.filterwarnings("ignore:the model does not take many states at once")
@pytest.mark.parametrize(("prior", "max_count", "branch"), BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize("effect", ["factor", "mask", "scale"])
@pytest.mark.parametrize("seed", [0, 1])
def test_branches_of_python_reach_beyond_the_plate(
    prior: Any, max_count: int | None, branch: Callable[[Tensor], Any], effect: str, seed: int
) -> None:
    """A factor outside of the plate that some values alone change makes its members one decision."""
    pyro.set_rng_seed(seed)

    def program(y):
        with pyro.plate("data", 2):
            n = pyro.sample("n", prior)
            pyro.sample("y", dist.Normal(n.float(), 1.0), obs=y)
        is_on = bool(branch(n))
        if effect == "factor":
            pyro.factor("branch", torch.tensor(3.0 if is_on else 0.0))
        else:
            with poutine.mask(mask=is_on) if effect == "mask" else poutine.scale(scale=3.0 if is_on else 1.0):
                pyro.sample("x", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))

    y, values = torch.tensor([0.3, 1.2]), torch.cartesian_prod(*[torch.arange(24)] * 2)
    most = torch.tensor(14) if isinstance(prior, dist.Poisson) else getattr(prior, "total_count", torch.tensor(23))
    values = values[(values <= most).all(-1)]
    numbers = values if isinstance(prior, dist.Categorical) else values.float()
    joint = (prior.log_prob(numbers) + dist.Normal(values.float(), 1.0).log_prob(y)).sum(-1)
    is_on = torch.tensor([bool(branch(n)) for n in values])
    on, off = {"factor": (3.0, 0.0), "mask": (1.0, 0.0), "scale": (3.0, 1.0)}[effect]
    weight = 1.0 if effect == "factor" else dist.Normal(0.0, 1.0).log_prob(torch.tensor(1.0))
    exact = (joint + weight * torch.where(is_on, on, off)).logsumexp(0)
    guide = AutoTruncated(program, num_states=24**2, max_count=max_count)
    assert Truncated_ELBO(ExhaustiveSearch()).loss(program, guide, y) == pytest.approx(-float(exact), rel=1e-5)
    assert guide.layout.plates == ()
