"""Holds the guide on a foreign model against brute force, and puts it through the habits of a Pyro user."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import matplotlib.pyplot as plt
import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI, TraceEnum_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.optim import Adam
from torch import Tensor

from pyro_truncated import AutoTruncated, ExhaustiveSearch, Truncated_ELBO
from tests.foreign import MODELS, Foreign
from tests.foreign.enumeration import Enumeration, enumerate_states

AUTOGUIDES = (AutoDelta, AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal)


@contextlib.contextmanager
def as_a_new_user(name: str) -> Iterator[Foreign]:
    """The model of that name in float64, with an empty parameter store and a seed; what was there before comes back."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]), pyro.get_param_store().scope(), warnings.catch_warnings():
            # Models that do not take many states at once say so, and are right all the same.
            warnings.filterwarnings("ignore", message="the model does not take many states at once")
            pyro.set_rng_seed(sum(map(ord, name)))
            yield MODELS[name]()
    finally:
        torch.set_default_dtype(dtype)
        plt.close("all")


def latent_names(case: Foreign) -> tuple[list[str], list[str]]:
    """Names of the discrete and of the continuous latents in one plain run."""
    with poutine.block(), torch.random.fork_rng(devices=[]):
        trace = poutine.trace(case.model).get_trace(*case.args, **case.kwargs)
    latents = [node for name, node in trace.iter_stochastic_nodes() if type(node["fn"]).__name__ != "_Subsample"]
    discrete = [node["name"] for node in latents if node["fn"].support.is_discrete]
    return discrete, [node["name"] for node in latents if node["name"] not in discrete]


def truncated_guide(case: Foreign, num_states: int | None = None, model: Any = None) -> AutoTruncated:
    """A guide for the model (or a conditioned form of it) on its own; by default its populations hold all states."""
    options = {"max_count": case.max_count, **case.options}
    model = case.model if model is None else model
    probe = AutoTruncated(model, 1, **options)
    with warnings.catch_warnings():
        # The probe knows nothing of the guides beside it.
        warnings.filterwarnings("ignore", message="no guide covers the latents")
        probe.setup(*case.args, **case.kwargs)
    size = int(probe.space.size)
    return AutoTruncated(model, size if num_states is None else min(size, num_states), **options)


def guide_for(case: Foreign, part: type = AutoDelta, num_states: int | None = None) -> Any:
    """What a user writes: the truncated guide alone, or behind an automatic guide for the continuous latents."""
    discrete, continuous = latent_names(case)
    truncated = truncated_guide(case, num_states)
    if not continuous:
        return truncated
    guide = AutoGuideList(case.model)
    guide.append(part(poutine.block(case.model, hide=discrete)))
    guide.append(truncated)
    return guide


def truncated_part(guide: Any) -> AutoTruncated:
    """The truncated guide, alone or last in a list."""
    part = guide if isinstance(guide, AutoTruncated) else guide[-1]
    assert isinstance(part, AutoTruncated)
    return part


def elbo(**options: Any) -> Truncated_ELBO:
    """The ELBO with a search that fills populations of all states."""
    return Truncated_ELBO(ExhaustiveSearch(), **options)


def brute_force(case: Foreign, given: dict[str, Any] | None = None) -> Enumeration:
    """All states of the model, one plain run for each."""
    return enumerate_states(case.reference or case.model, case.args, case.kwargs, case.plates, case.max_count, given)


# --- numbers ---


@dataclasses.dataclass(frozen=True)
class Errors:
    """Largest differences from brute force: of the loss, of its gradient in any parameter, of the marginals; and the loss in between."""

    loss: float
    stock_loss: float
    gradient: float
    marginals: float
    states: int
    excess: float

    @property
    def worst(self) -> float:
        """The largest of them."""
        return max(self.loss, self.stock_loss, self.gradient, self.marginals, self.excess)


def compare(case: Foreign) -> Errors:
    """Loss, gradient and marginals with all states beside brute force, and how far a bound of fewer states exceeds the evidence."""
    guide = guide_for(case, AutoDelta)
    svi = SVI(case.model, guide, Adam({"lr": 0.01}), elbo())
    svi.step(*case.args, **case.kwargs)
    loss, gradients = loss_and_gradients(lambda: float(elbo().loss_and_grads(case.model, guide, *case.args, **case.kwargs)))
    stock = float(TraceEnum_ELBO().loss(case.model, guide, *case.args, **case.kwargs))
    evaluated = float(elbo().loss(case.model, guide, *case.args, **case.kwargs))

    def exactly() -> float:
        nonlocal exact
        exact = brute_force(case, continuous_values(case, guide))
        evidence = exact.evidence()
        if evidence.requires_grad:
            (-evidence).backward()
        return -float(evidence.detach())

    exact: Enumeration
    expected, expected_gradients = loss_and_gradients(exactly)
    found = truncated_part(guide).marginals(case.indices)
    return Errors(
        abs(loss - expected) + abs(evaluated - expected),
        abs(stock - expected),
        max([0.0, *(difference(gradients.get(name), value) for name, value in expected_gradients.items())]),
        max(marginal_error(found[name], value) for name, value in exact.marginals().items()),
        len(exact.states),
        _excess(case, guide, expected),
    )


def loss_and_gradients(evaluate: Callable[[], float]) -> tuple[float, dict[str, Tensor]]:
    """What a function returns, and the gradients that it leaves in the parameter store."""
    parameters = dict(pyro.get_param_store().named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    loss = evaluate()
    return loss, {name: parameter.grad.clone() for name, parameter in parameters.items() if parameter.grad is not None}


def continuous_values(case: Foreign, guide: Any) -> dict[str, Tensor]:
    """Values of the continuous latents under the first part of a list, differentiable."""
    if isinstance(guide, AutoTruncated):
        return {}
    with poutine.block(hide_fn=lambda msg: msg["type"] != "param"):
        guide._create_plates(*case.args, **case.kwargs)
        values: dict[str, Tensor] = guide[0](*case.args, **case.kwargs)
    return values


def difference(found: Tensor | None, expected: Tensor) -> float:
    """Largest difference relative to one or to the size of what is expected."""
    found = torch.zeros_like(expected) if found is None else found
    return float(((found - expected).abs() / expected.abs().clamp(min=1.0)).max())


def marginal_error(found: Tensor, expected: Tensor) -> float:
    """Values that one side knows and the other does not have probability zero."""
    missing = found.shape[-1] - expected.shape[-1] if found.dim() == expected.dim() else 0
    if missing and found.shape[:-1] == expected.shape[:-1]:
        expected = torch.nn.functional.pad(expected, (0, max(0, missing)))
        found = torch.nn.functional.pad(found, (0, max(0, -missing)))
    assert found.shape == expected.shape, f"marginals of shape {tuple(found.shape)} instead of {tuple(expected.shape)}"
    return float((found.double() - expected).abs().max())


def _excess(case: Foreign, guide: Any, exact: float) -> float:
    """By how much a bound of half of the states, with the same continuous latents, exceeds the evidence."""
    size = truncated_part(guide).num_states
    if size == 1:
        return 0.0
    given = {name: value.detach() for name, value in continuous_values(case, guide).items()}
    # Conditioning keeps the densities of the continuous latents in the bound.
    conditioned = poutine.condition(case.model, data=given) if given else case.model
    smaller = truncated_guide(case, size // 2, conditioned)
    return max(0.0, exact - float(elbo().loss(conditioned, smaller, *case.args, **case.kwargs)))
