"""Counts of Gaussian processes, decoders, training and data sets are whole numbers of any integer type, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pyro.contrib.gp import kernels

from pyro_truncated import datasets, fit, fit_restarts
from pyro_truncated.gp import LeaveOneOutRegression, pivoted_cholesky
from pyro_truncated.gp.active_sets.splits import UniformSplits, growing
from pyro_truncated.gp.data_kernels import PyroKernel
from pyro_truncated.gp.subset import InducingSubset, SubsetGPRegression
from pyro_truncated.gp.subset.exchange import ExchangeSearch
from pyro_truncated.gp.subset.subset_search import Budget
from pyro_truncated.gplvm import Posterior, SASDecoder, SpikeSlabGPLVM, fit_minibatches
from pyro_truncated.gplvm import fit as fit_latents
from tests import zoo
from tests.papers.baselines.cholqr import CholQRSearch
from tests.papers.baselines.greedy import TitsiasSearch

X = torch.linspace(-1, 1, 12, dtype=torch.float64)[:, None]
Y = X.squeeze(1).sin()


def kernel():
    return PyroKernel(kernels.RBF(1), X)


def latent_model(**options):
    return SpikeSlabGPLVM(6, 2, 1, num_inducing=3, **options)


def svi():
    from pyro.infer import SVI
    from pyro.optim import Adam

    from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO

    model = zoo.binary().model
    return SVI(model, AutoTruncated(model, 2), Adam({"lr": 0.01}), Truncated_ELBO(ExhaustiveSearch()))


ARGUMENTS = zoo.binary().args
OUTPUTS = torch.randn(6, 2, dtype=torch.float64)
COUNTS = {
    "num_inducing": lambda n: InducingSubset(kernel(), Y, num_inducing=n, noise=0.1),
    "num_inducing of a regression": lambda n: SubsetGPRegression(kernel(), Y, num_inducing=n),
    "hyper_evaluations": lambda n: SubsetGPRegression(kernel(), Y, num_inducing=2).fit(max_epochs=1, hyper_evaluations=n),
    "information_pivots": lambda n: CholQRSearch(n),
    "pool": lambda n: ExchangeSearch(pool=n),
    "block": lambda n: ExchangeSearch(block=n),
    "candidates": lambda n: TitsiasSearch(n),
    "rank": lambda n: LeaveOneOutRegression(X, rank=n),
    "max_rank": lambda n: pivoted_cholesky(kernels.RBF(1).double(), X, n),
    "batch_size": lambda n: UniformSplits(12, n, 1),
    "epochs": lambda n: growing(1, 4, n),
    "latent_dim": lambda n: SASDecoder(6, 2, n),
    "batch_size of a decoder": lambda n: SASDecoder(6, 2, batch_size=n, num_active=1),
    "num_starts": lambda n: fit_latents(latent_model(), OUTPUTS, num_starts=n, steps=1, warm_up=1, rounds=1),
    "batch_size of latents": lambda n: fit_minibatches(latent_model(collapsed=False), OUTPUTS, 1, batch_size=n),
    "candidates of latents": lambda n: Posterior(latent_model(collapsed=False)).infer(OUTPUTS, steps=1, candidates=n),
    "steps": lambda n: fit(svi(), *ARGUMENTS, steps=n, progress=False),
    "patience": lambda n: fit(svi(), *ARGUMENTS, steps=1, patience=n, progress=False),
    "restarts": lambda n: fit_restarts(lambda _: svi(), *ARGUMENTS, restarts=n, steps=1, progress=False),
    "size": lambda n: datasets.noisy_or_bars(3, n),
    "num_data": lambda n: datasets.linear_bars(n),
    "num": lambda n: datasets.generated_images(n, 8, num_discs=2),
}


@pytest.mark.parametrize("name", COUNTS)
def test_whatever_is_an_integer_is_a_count(name):
    for two in (2, np.int64(2), torch.tensor(2)):
        COUNTS[name](two)


@pytest.mark.parametrize("value", [0, -1, 2.0, 2.7, True, "2"])
@pytest.mark.parametrize("name", COUNTS)
def test_nothing_else_is(name, value):
    with pytest.raises(ValueError, match=rf"{name.split(' of ')[0]} must be a positive integer; got "):
        COUNTS[name](value)


@pytest.mark.parametrize("value", [-1, 1.5, True, "x"])
def test_limits_of_searches(value):
    with pytest.raises(ValueError, match="max_swaps must be an integer of at least 0; got"):
        Budget(max_swaps=value)
    with pytest.raises(ValueError, match="max_seconds must be a number of at least 0; got nan"):
        Budget(max_seconds=float("nan"))
    assert Budget(max_attempts=0).is_spent
