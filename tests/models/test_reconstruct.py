"""Every model gives the data back without their noise: ``reconstruct(population, y)``, held against enumeration and quadrature."""

from __future__ import annotations

import inspect
from typing import Any

import pyro
import pyro.poutine as poutine
import pytest
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch
from pyro_truncated import models as library
from pyro_truncated.models import SpikeSlabSparseCoding
from tests.models.configurations import CONFIGURATIONS, D64, WITH_MISSING, Configuration

N = 6


def means_of_states(row: Configuration, model: Any, y: Tensor) -> Tensor:
    """``E[y_n | s]`` of every state without its noise, ``(T, N, D)``, by running the Pyro model; of categories their probabilities."""
    pyro.clear_param_store()
    space = row.space()
    states = space.unpack(space.enumerate(), y.dtype if space.is_binary and row.site == "s" else torch.int64)
    values = states.unsqueeze(1).expand(-1, len(y), -1)
    values = values if row.site == "s" else values.squeeze(-1)
    conditioned = poutine.condition(model, data={row.site: values})
    if isinstance(model, library.CategoricalMixture):
        probs: Tensor = model.probs.detach()[values]
        return probs
    likelihood: Any = poutine.trace(conditioned).get_trace(y).nodes["y"]["fn"]
    means = likelihood.mean.detach().expand(len(states), *y.shape)
    signal: Tensor = means + shift_of_integrated(model, values, means, y)
    return signal


def shift_of_integrated(model: Any, states: Tensor, means: Tensor, y: Tensor) -> Tensor:
    """What the data say of normal latents that were integrated out: the regression of the signal on the observed entries."""
    shift = torch.zeros_like(means)
    if not (isinstance(model, SpikeSlabSparseCoding) or hasattr(model, "factor")):
        return shift
    for t, n in ((t, n) for t in range(len(states)) for n in range(len(y))):
        if isinstance(model, SpikeSlabSparseCoding):
            slabs, scale = model.slab_scale.detach(), model.scale.detach()
            loading = model.weight.detach() * states[t, n] @ (slabs.diag() if slabs.dim() < 2 else slabs)
        else:
            loading, scale = model.factor.detach()[states[t, n]], model.scale.detach().expand(len(model.loc))[states[t, n]]
        signal, seen = loading @ loading.mT, ~y[n].isnan()
        noisy = signal[seen][:, seen] + scale**2 * torch.eye(int(seen.sum()), dtype=D64)
        shift[t, n] = signal[:, seen] @ torch.linalg.solve(noisy, (y[n] - means[t, n])[seen])
    return shift


@pytest.mark.parametrize(("name", "with_missing"), WITH_MISSING)
def test_reconstructions_are_the_exact_posterior_means(name: str, with_missing: bool) -> None:
    row = CONFIGURATIONS[name]
    model, y = row.make(D64), row.generate(N, with_missing=with_missing)
    weights = row.log_joint(model, y).detach().softmax(-1)
    expected = torch.einsum("nt,tn...->n...", weights, means_of_states(row, model, y))
    population = row.population(model, y)
    found = model.reconstruct(population, y)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)
    # Of some of the data points, and in the type of the data.
    some = torch.tensor([4, 1])
    part = row.population(model, y[some])
    part = type(part)(part.space, part.words, part.log_joint, some)
    torch.testing.assert_close(model.reconstruct(part, y), expected[some], rtol=1e-8, atol=1e-8)
    assert model.reconstruct(population, y.float()).dtype == torch.float32


@pytest.mark.parametrize("name", [name for name, _ in WITH_MISSING if not _])
def test_data_of_other_rows_than_the_population_are_refused(name: str) -> None:
    row = CONFIGURATIONS[name]
    model, y = row.make(D64), row.generate(N)
    population = row.population(model, y)
    with pytest.raises(ValueError, match=rf"data must have a row for each of the population's {N} data points; got {N - 1} rows"):
        model.reconstruct(population, y[1:])
    part = type(population)(population.space, population.words[:2], population.log_joint[:2], torch.tensor([N - 1, 0]))
    with pytest.raises(ValueError, match=rf"data must be all data, of which the population's indices select row {N - 1}; got 2 rows"):
        model.reconstruct(part, y[:2])


def test_a_mixture_of_many_components_reconstructs_from_the_few_that_are_kept() -> None:
    model = library.GaussianMixture(3, 40, covariance="spherical", dtype=D64)
    y = torch.randn(5, 3, dtype=D64)
    row = Configuration(lambda dtype: model, (40,), "z")
    chosen = torch.stack([torch.randperm(40)[:4] for _ in y])
    population = row.population(model, y, chosen)
    expected = torch.einsum("ns,nsd->nd", population.weights(), model.loc.detach()[chosen])
    torch.testing.assert_close(model.reconstruct(population, y), expected)


def test_every_model_has_the_same_signature() -> None:
    models = [getattr(library, name) for name in library.__all__ if isinstance(getattr(library, name), type)]
    # Sequences have no population of whole states.
    for model in (model for model in models if model is not library.FactorialHMM):
        assert list(inspect.signature(model.reconstruct).parameters)[:3] == ["self", "population", "y"], model


@pytest.mark.parametrize("kind", [library.BinarySparseCoding, library.DiscreteSparseCoding, library.MaximalCauses])
def test_means_of_integers_are_none(kind: Any) -> None:
    y = torch.randint(9, (N, 4))
    model = kind(4, 3)
    guide = AutoTruncated(model, num_states=8).infer(y.float(), ExhaustiveSearch(), steps=1)
    torch.testing.assert_close(model.reconstruct(guide.population(), y), model.reconstruct(guide.population(), y.float()))
