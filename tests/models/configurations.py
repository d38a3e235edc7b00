"""One table of all models: how each is made, which data it takes, and what it promises. `test_table.py` checks every row."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated import Population, StateSpace
from pyro_truncated import models as library

D64 = torch.float64
D, H = 5, 3


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A model small enough to enumerate.

    Attributes:
        make: makes the model, of the given type.
        cardinalities: those of its one discrete site.
        site: the name of that site.
        data: draws ``n`` data points of the given type that training takes; default: normal numbers.
        bad: an entry that is refused.
        is_closed_form: whether it has closed-form M-steps.
        stationary: parameters that the M-step sets to the maximiser of the expected log joint of data and states.
        takes_missing: whether entries may be NaN.
        has_units: whether data in other units are learned alike.
        chooses_steps: whether statistics hold a step that is chosen for all of a batch, and so do not add up.
    """

    make: Callable[[torch.dtype], Any]
    cardinalities: tuple[int, ...] = (2,) * H
    site: str = "s"
    data: Callable[[int, torch.dtype], Tensor] = lambda n, dtype: 2 * torch.randn(n, D, dtype=dtype) + 1
    bad: float = math.inf
    is_closed_form: bool = True
    stationary: tuple[str, ...] = ()
    takes_missing: bool = True
    has_units: bool = True
    chooses_steps: bool = False

    def space(self) -> StateSpace:
        return StateSpace(self.cardinalities)

    def generate(self, n: int, dtype: torch.dtype = D64, with_missing: bool = False) -> Tensor:
        """Data, on request with a third of the entries and one whole data point missing."""
        y = self.data(n, dtype)
        if with_missing:
            y[torch.rand(y.shape) < 0.3] = torch.nan
            y[3] = torch.nan
        return y

    def log_joint(self, model: Any, y: Tensor) -> Tensor:
        """``log p(s, y_n)`` of every state and data point, ``(N, T)``, by running the Pyro model."""
        # Pyro's parameter store goes by names, and a test may hold several models.
        pyro.clear_param_store()
        space = self.space()
        states = space.unpack(space.enumerate(), y.dtype if space.is_binary and self.site == "s" else torch.int64)
        values = states.unsqueeze(1).expand(-1, len(y), -1)
        values = values if self.site == "s" else values.squeeze(-1)
        trace = poutine.trace(poutine.condition(model, data={self.site: values})).get_trace(y)
        trace.compute_log_prob()
        return (trace.nodes[self.site]["log_prob"] + trace.nodes["y"]["log_prob"]).mT

    def population(self, model: Any, y: Tensor, chosen: Tensor | None = None) -> Population:
        """The population of all states, or of the chosen ones ``(N, S)``."""
        space = self.space()
        with torch.no_grad():
            scores = self.log_joint(model, y)
        words = space.enumerate().expand(len(y), -1, -1)
        if chosen is not None:
            words, scores = words.gather(1, chosen.unsqueeze(-1).expand(-1, -1, words.shape[-1])), scores.gather(1, chosen)
        return Population(space, words, scores)


def binary(n: int, dtype: torch.dtype) -> Tensor:
    return (torch.rand(n, D) < 0.5).to(dtype)


def counts(n: int, dtype: torch.dtype) -> Tensor:
    return torch.poisson(4 * torch.rand(n, D)).to(dtype)


def categories(n: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(3, (n, D)).to(dtype)


def mixture(kind: str, **options: Any) -> Configuration:
    def make(dtype: torch.dtype) -> Any:
        return library.GaussianMixture(D, H, covariance=kind, dtype=dtype, **options)

    stationary = ("weights", "loc", "scale", *(["factor"] if options else []))
    return Configuration(make, (H,), "z", bad=math.nan, stationary=stationary, takes_missing=False)


def sparse(family: Any, stationary: tuple[str, ...] = (), cardinalities: tuple[int, ...] = (2,) * H, **options: Any) -> Configuration:
    chooses = not getattr(family(D, H, **options), "statistics_are_additive", True)
    return Configuration(lambda dtype: family(D, H, dtype=dtype, **options), cardinalities, stationary=stationary, chooses_steps=chooses)


def noisy_or(**options: Any) -> Configuration:
    def make(dtype: torch.dtype) -> Any:
        return library.NoisyOr(D, H, leak=0.05, dtype=dtype, **options)

    return Configuration(make, data=binary, bad=0.5, stationary=("prior",), has_units=False)


def positive(n: int, dtype: torch.dtype) -> Tensor:
    return (0.2 + 3 * torch.rand(n, D)).to(dtype)


def family(name: str, data: Callable[[int, torch.dtype], Tensor], bad: float, *stationary: str, has_units: bool = False) -> Configuration:
    def make(dtype: torch.dtype) -> Any:
        return library.ExponentialFamilyMaximalCauses(D, H, family=name, dtype=dtype)

    names = ("prior", *stationary)
    return Configuration(make, data=data, bad=bad, stationary=names, has_units=has_units, chooses_steps=True)


ALL = ("weight", "scale", "prior")
CONFIGURATIONS: dict[str, Configuration] = {
    "BinarySparseCoding": sparse(library.BinarySparseCoding, ALL, offset=False),
    "BinarySparseCoding-own-priors": sparse(library.BinarySparseCoding, ALL, shared_prior=False, offset=False),
    "BinarySparseCoding-offset": sparse(library.BinarySparseCoding, (*ALL, "bias")),
    "BinarySparseCoding-own-priors-offset": sparse(library.BinarySparseCoding, (*ALL, "bias"), shared_prior=False),
    "SpikeSlabSparseCoding": sparse(library.SpikeSlabSparseCoding, ("prior",), offset=False),
    "SpikeSlabSparseCoding-shared-prior": sparse(library.SpikeSlabSparseCoding, ("prior",), shared_prior=True, offset=False),
    "SpikeSlabSparseCoding-offset": sparse(library.SpikeSlabSparseCoding, ("prior",)),
    "SpikeSlabSparseCoding-full": sparse(library.SpikeSlabSparseCoding, ("prior",), covariance="full", offset=False),
    "SpikeSlabSparseCoding-full-offset": sparse(library.SpikeSlabSparseCoding, ("prior",), covariance="full"),
    "MaximalCauses": sparse(library.MaximalCauses, ("scale", "prior")),
    "MaximalCauses-own-priors": sparse(library.MaximalCauses, ("scale", "prior"), shared_prior=False),
    "DiscreteSparseCoding": sparse(library.DiscreteSparseCoding, ALL, (3,) * H, offset=False),
    "DiscreteSparseCoding-uneven": sparse(
        library.DiscreteSparseCoding, ALL, (4,) * H, values=(0.0, 2.0, -0.5, 1.0), shared_prior=False, offset=False
    ),
    "DiscreteSparseCoding-tied": sparse(library.DiscreteSparseCoding, ("weight", "scale"), (3,) * H, tied_signs=True, offset=False),
    "DiscreteSparseCoding-offset": sparse(library.DiscreteSparseCoding, (*ALL, "bias"), (4,) * H, values=(0.0, 2.0, -0.5, 1.0)),
    "NoisyOr": noisy_or(),
    "NoisyOr-leak": noisy_or(learn_leak=True),
    "NoisyOr-shared-prior": noisy_or(shared_prior=True),
    **{f"GaussianMixture-{kind}": mixture(kind) for kind in ("full", "diag", "spherical", "tied")},
    "GaussianMixture-low-rank": mixture("low-rank", rank=2),
    "GaussianMixture-low-rank-shared-noise": mixture("low-rank", rank=2, shared_noise=True),
    "ExponentialFamilyMaximalCauses-poisson": family("poisson", counts, -1.0),
    "ExponentialFamilyMaximalCauses-bernoulli": family("bernoulli", binary, 0.5),
    "ExponentialFamilyMaximalCauses-exponential": family("exponential", positive, -1.0, has_units=True),
    "ExponentialFamilyMaximalCauses-gamma": family("gamma", positive, 0.0, "concentration", has_units=True),
    "CategoricalMixture": Configuration(
        lambda dtype: library.CategoricalMixture(D, H, 3, dtype=dtype), (H,), "z", categories, 3.0, stationary=("weights", "probs"),
        takes_missing=False, has_units=False,
    ),
    "PoissonMixture": Configuration(
        lambda dtype: library.PoissonMixture(D, H, dtype=dtype), (H,), "z", counts, -1.0, stationary=("weights", "rate"),
        takes_missing=False, has_units=False,
    ),
    "BinaryVAE": Configuration(
        lambda dtype: library.BinaryVAE(D, H, hidden=(4,), dtype=dtype), is_closed_form=False, has_units=False,
    ),
}  # fmt: skip
CLOSED_FORM = [name for name, configuration in CONFIGURATIONS.items() if configuration.is_closed_form]
WITH_UNITS = [name for name, configuration in CONFIGURATIONS.items() if configuration.has_units]
# By model, and whether data are missing.
WITH_MISSING = [(name, missing) for name, row in CONFIGURATIONS.items() for missing in (False, True)[: 1 + row.takes_missing]]
# These have latents that cannot be enumerated, or take data of another kind; their own files check them.
ELSEWHERE = {"FactorialHMM", "GatedDecoder", "MaxSpikeSlabSparseCoding", "OcclusiveComponents"}
