"""Decoders on stochastic active sets, whose latents live with their owners: the losses, trajectories and predictions of one process."""

from __future__ import annotations

import re
from typing import Any

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.optim import Adam

from pyro_truncated import distributed
from pyro_truncated.distributed import AllReduced, OtherProcessError, SummedELBO
from pyro_truncated.gp import Split, UniformSplits
from pyro_truncated.gplvm import SASDecoder, SASFunctionDecoder, principal_components

N, D = 19, 5


class SeesActive(torch.nn.Module):
    """An encoder that looks at the mean of the active set."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2 * num_inputs, num_outputs)

    def forward(self, x: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.cat([x, active.mean(0).expand_as(x)], -1))


def data(num: int = N, missing: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    angle = 6 * torch.rand(num, 1, generator=generator).double()
    x = (angle * torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0]) + torch.arange(D)).sin()
    x += 0.05 * torch.randn(x.shape, generator=generator)
    if missing:
        x[::4, 1] = torch.nan
    return x


def decoder_of(kind: str, num: int = N, **options: Any) -> SASDecoder:
    # Whatever the process has drawn before.
    pyro.clear_param_store()
    pyro.set_rng_seed(3)
    bayesian = kind.startswith("bayesian")
    width = 4 if bayesian else 2
    encoders = {"encoder": torch.nn.Linear(D, width), "active": SeesActive(D, width)}
    encoder = next((value for name, value in encoders.items() if kind.endswith(name)), None)
    decoder = SASDecoder(num, D, bayesian=bayesian, encoder=encoder, encoder_sees_active=kind.endswith("active"), **options).double()
    # What the others have is of no account: the first one's parameters and draws are those of all.
    pyro.set_rng_seed(4 + distributed.rank())
    return decoder


def stepped(kind: str, missing: bool, steps: int = 8) -> tuple[list[float], dict[str, torch.Tensor], list[torch.Tensor]]:
    """Losses of steps with Adam, parameters, and predictions."""
    x = distributed.shard(data(missing=missing))
    decoder = decoder_of(kind, num_active=3, batch_size=8).initialize(x, steps=3)
    elbo = TraceMeanField_ELBO() if decoder.bayesian else Trace_ELBO()
    svi = SVI(decoder.model, decoder.guide, AllReduced(Adam(decoder.learning_rates(0.05, 0.02))), SummedELBO(elbo))
    splits = UniformSplits(N, 8, 3)
    losses: list[float] = []
    for epoch in range(steps // 3 + 1):
        losses += [svi.step(x, split) for split in splits.epoch(epoch)]
    # Splits that the program draws itself; all data; few data points, of which some processes have none beside the active ones.
    losses += [svi.step(x), svi.step(x, Split(torch.arange(N).flip(0), 4)), svi.step(x, Split(torch.tensor([0, 18, 17]), 2))]
    losses += [svi.evaluate_loss(x)]
    if decoder.encoder is None:
        losses += [decoder.relocate_(x, 6), svi.step(x)]
    own = decoder.latents(x)
    predictions = []
    for options in ({}, {"size": 7}, {"size": 5, "projected": True}, {"num_neighbors": 6}):
        decoder.condition_(x, **options)
        predictions += [*decoder.predict(torch.linspace(-1, 1, 8).double().reshape(4, 2)), decoder.infer(data(3), steps=3)]
    decoder.gather_()
    assert torch.equal(own, decoder.latents(x))
    return losses, {name: value.detach().clone() for name, value in decoder.named_parameters()}, predictions


@pytest.mark.parametrize(
    ("kind", "missing"),
    [("free", False), ("free", True), ("encoder", False), ("active", True), ("bayesian", True), ("bayesian-encoder", False)],
)
def test_losses_and_trajectories_are_those_of_one_process(kind, missing, crew):
    losses, parameters, predictions = stepped(kind, missing)
    for number in (2, 3):
        ranks = crew.results(number, stepped, kind, missing)
        for found, held, predicted in ranks:
            assert found == pytest.approx(losses, rel=1e-12, abs=1e-12)
            for name, value in parameters.items():
                torch.testing.assert_close(held[name], value, rtol=1e-10, atol=1e-10)
                assert torch.equal(held[name], ranks[0][1][name])
            for mine, expected in zip(predicted, predictions, strict=True):
                torch.testing.assert_close(mine, expected, rtol=1e-8, atol=1e-8)


def fitted(num: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = distributed.shard(data(num))
    decoder = decoder_of("free", num, num_active=1 if num < N else 4, batch_size=min(num, 7)).fit(x, epochs=10)
    return decoder.latents(data(num)), decoder.predict(torch.zeros(1, 2).double())[0]


@pytest.mark.parametrize("num", [N, 3])
def test_a_fit_leaves_every_process_with_all_latents(num, crew):
    # Of three data points every process has one.
    latents, mean = fitted(num)
    for number in (2, 3):
        for found, predicted in crew.results(number, fitted, num):
            torch.testing.assert_close(found, latents, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(predicted, mean, rtol=1e-9, atol=1e-9)


def refused(what: str) -> None:
    x = distributed.shard(data())
    if what == "size":
        decoder_of("free", len(x)).initialize(x)
    elif what == "infinite":
        infinite = distributed.Shard.from_rows(x.as_subclass(torch.Tensor).clone(), x.portion)
        infinite[0, 0] = torch.inf if distributed.rank() == 1 else 0.0
        decoder_of("free").fit(infinite, epochs=1)
    elif what == "no active set":
        decoder = decoder_of("free", num_active=0)
        SVI(decoder.model, decoder.guide, AllReduced(Adam({"lr": 0.1})), SummedELBO(Trace_ELBO())).step(x)
    elif what == "whole":
        decoder = decoder_of("free").initialize(x)
        decoder.relocate_(data())
    else:
        SASFunctionDecoder(N, D, lambda f: pyro.distributions.Bernoulli(logits=f).to_event(1)).initialize(x)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("size", r"data x must have shape \((9|10), 5\) in all processes; got \(19, 5\)"),
        ("infinite", "data x must be finite, of magnitude .* got inf"),
        ("no active set", "needs an active set of at least one data point"),
        ("whole", r"Call gather_\(\) on all processes before"),
        ("functions", "the functions of a minibatch are drawn together"),
    ],
)
def test_what_several_processes_cannot_do_is_refused(what, message, crew):
    for found in crew.run(2, refused, what):
        assert isinstance(found, (ValueError, NotImplementedError, OtherProcessError))
        assert re.search(message, str(found))


def components(num: int, size: int) -> torch.Tensor:
    x = torch.randn(num, size, generator=torch.Generator().manual_seed(1)).double()
    return principal_components(distributed.shard(x), 3, torch.Generator().manual_seed(2))


@pytest.mark.parametrize(("num", "size"), [(9, 4), (5, 8), (7, 2)])
def test_principal_components_are_those_of_all_data(num, size, crew):
    expected = components(num, size)
    for number in (2, 3):
        torch.testing.assert_close(torch.cat(crew.results(number, components, num, size)), expected, rtol=1e-9, atol=1e-9)
