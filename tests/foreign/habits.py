"""What a Pyro user does with any model and guide: each habit runs, and where there is a number to compare with, it is compared."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import arviz as az
import numpy as np
import pyro
import pyro.poutine as poutine
import torch
from pyro.infer import SVI, Predictive
from pyro.infer.autoguide import AutoGuideList
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, ExhaustiveSearch, check_truncation, fit, to_arviz
from tests.foreign import Foreign
from tests.foreign.harness import AUTOGUIDES, brute_force, elbo, guide_for, latent_names, truncated_guide, truncated_part

Habit = Callable[[Foreign], None]


def trained(case: Foreign, part: type = AUTOGUIDES[0], steps: int = 3) -> object:
    """A guide after some steps of ``fit``."""
    guide = guide_for(case, part)
    training = fit(SVI(case.model, guide, Adam({"lr": 0.01}), elbo()), *case.args, steps=steps, progress=False, **case.kwargs)
    assert training.steps == steps
    assert math.isfinite(training.free_energy)
    return guide


def fits(case: Foreign) -> None:
    """``fit`` improves the free energy, or has nothing to learn."""
    guide = guide_for(case)
    svi = SVI(case.model, guide, Adam({"lr": 0.001}), elbo())
    training = fit(svi, *case.args, steps=8, progress=False, **case.kwargs)
    record = training.record["free_energy"]
    assert record[-1] > record[0] - 1e-9, "eight small steps of exact gradients lost free energy"


def predicts(case: Foreign) -> None:
    """``Predictive`` draws states and observations."""
    _predict(case, parallel=False)


def predicts_in_parallel(case: Foreign) -> None:
    """``Predictive(parallel=True)`` does, too."""
    _predict(case, parallel=True)


def _predict(case: Foreign, parallel: bool) -> None:
    guide = trained(case)
    discrete, continuous = latent_names(case)
    _check_that_pyro_can(case, guide, continuous, parallel)
    draws = Predictive(case.model, guide=guide, num_samples=7, parallel=parallel)(*case.args, **case.kwargs)
    assert set(discrete) <= set(draws)
    with poutine.block():
        trace = poutine.trace(case.model).get_trace(*case.args, **case.kwargs)
    for name in discrete:
        assert len(draws[name]) == 7
        assert draws[name][0].numel() == trace.nodes[name]["value"].numel(), name


class PyroLimitError(Exception):
    """Pyro cannot do this with the model whatever the guide is."""


def _check_that_pyro_can(case: Foreign, guide: Any, continuous: Sequence[str], parallel: bool) -> None:
    """Runs ``Predictive`` without our guide, on continuous latents in the shapes that it gives to a guide's draws."""
    drawn = Predictive(guide, num_samples=7)(*case.args, **case.kwargs)
    samples = {name: drawn[name] for name in continuous}
    try:
        # Several times: an index may be in range by chance.
        for _ in range(3):
            Predictive(case.model, samples, num_samples=7, parallel=parallel)(*case.args, **case.kwargs)
            if parallel:
                _check_shapes(case, samples)
    except (RuntimeError, IndexError, ValueError) as error:
        raise PyroLimitError(str(error).partition("\n")[0]) from error


def _check_shapes(case: Foreign, samples: dict[str, torch.Tensor]) -> None:
    """Under seven draws at once, in a dimension left of all plates, no site may have more dimensions than that."""
    with poutine.block():
        alone = poutine.trace(case.model).get_trace(*case.args, **case.kwargs)
        frames = [frame for node in alone.nodes.values() if node["type"] == "sample" for frame in node["cond_indep_stack"]]
        depth = max([0, *(-frame.dim for frame in frames if frame.vectorized)])
        given = {name: v.reshape(7, *(1,) * (depth + 1 - v.dim()), *v.shape[1:]) for name, v in samples.items()}
        with pyro.plate("_draws", 7, dim=-depth - 1):
            together = poutine.trace(poutine.condition(case.model, data=given)).get_trace(*case.args, **case.kwargs)
    for name, node in together.nodes.items():
        if node["type"] == "sample" and type(node["fn"]).__name__ != "_Subsample" and len(node["fn"].batch_shape) > depth + 1:
            raise RuntimeError(f"site {name} has the batch shape {tuple(node['fn'].batch_shape)}")


def converts(case: Foreign) -> None:
    """``to_arviz``, and ArviZ's ``summary``, ``loo`` and ``plot_ppc`` of the result."""
    guide = trained(case)
    idata = to_arviz(case.model, guide, *case.args, num_samples=10, num_predictive=3, seed=1, **case.kwargs)
    discrete, continuous = latent_names(case)
    assert set(discrete + continuous) <= set(idata.posterior.data_vars)
    assert len(az.summary(idata, kind="stats"))
    for name in discrete:
        assert np.isfinite(idata.posterior[name]).all()
    for name in idata.get("log_likelihood", {}):
        assert np.isfinite(idata.log_likelihood[name]).all()
        with warnings.catch_warnings():
            # Few data, few draws: what ArviZ thinks of its estimate is not the question.
            warnings.simplefilter("ignore", UserWarning)
            az.loo(idata, var_name=name)
    # Binary data that are hidden in part are floats, whose densities ArviZ cannot draw where they are constant.
    complete = [name for name in idata.get("posterior_predictive", {}) if np.isfinite(idata.observed_data[name]).all()]
    if complete:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Your data appears to have a single value")
            az.plot_ppc(idata, num_pp_samples=3, var_names=complete)


def checks_truncation(case: Foreign) -> None:
    """``check_truncation`` of all states finds nothing wrong, with default arguments but for the number of draws."""
    guide = trained(case)
    report = check_truncation(guide, *case.args, num_samples=30, **case.kwargs)
    assert "data points" in str(report)
    assert report.exact is not None
    assert float(report.exact.gap.abs().max()) < 1e-9


def infers(case: Foreign) -> None:
    """``infer`` fills populations for data the guide has not seen; their free energy is the evidence by brute force."""
    guide = trained(case)
    args = case.args if case.new is None else case.new
    part = truncated_part(guide)
    new = part.infer(args, ExhaustiveSearch(), steps=1, **case.kwargs)
    given = {} if guide is part else {name: value.detach() for name, value in guide[0](*case.args, **case.kwargs).items()}
    exact = brute_force(Foreign(case.model, args, case.kwargs, case.plates, case.max_count), given)
    torch.testing.assert_close(new.stored_posterior().population.free_energy(), exact.log_joint.detach().logsumexp(0), rtol=1e-9, atol=1e-9)


def saves(case: Foreign) -> None:
    """A fresh guide loads the ``state_dict`` and has the same loss and marginals."""
    guide = trained(case)
    file = io.BytesIO()
    torch.save(guide.state_dict(), file)
    file.seek(0)
    fresh = guide_for(case)
    if isinstance(fresh, AutoGuideList):
        # Pyro's own guides have no parameters before their first call.
        fresh(*case.args, **case.kwargs)
    fresh.load_state_dict(torch.load(file, weights_only=True))
    losses = [float(elbo().loss(case.model, one, *case.args, **case.kwargs)) for one in (guide, fresh)]
    assert losses[0] == losses[1]
    for one in (guide, fresh):
        truncated_part(one).refresh_(*case.args, **case.kwargs)
    for name, value in truncated_part(guide).marginals().items():
        assert torch.equal(truncated_part(fresh).marginals()[name], value)


def keeps_company(case: Foreign) -> None:
    """In an ``AutoGuideList`` with each of Pyro's continuous guides the loss is that of brute force for the same draws."""
    continuous = latent_names(case)[1]
    if not continuous:
        guide = AutoGuideList(case.model)
        guide.append(truncated_guide(case))
        assert math.isfinite(SVI(case.model, guide, Adam({"lr": 0.01}), elbo()).step(*case.args, **case.kwargs))
        return
    for part in AUTOGUIDES:
        if part.__name__ in ("AutoDiagonalNormal", "AutoLowRankMultivariateNormal") and _size(case, continuous) < 2:
            continue  # Pyro refuses or warns of these in one dimension.
        with pyro.get_param_store().scope():
            guide = trained(case, part, steps=2)
            objective = elbo()
            objective.loss(case.model, guide, *case.args, **case.kwargs)  # The first call looks at the plates and draws for that.
            pyro.set_rng_seed(11)
            loss = float(objective.loss(case.model, guide, *case.args, **case.kwargs))
            pyro.set_rng_seed(11)
            guide._create_plates(*case.args, **case.kwargs)
            with poutine.block(), torch.no_grad():
                drawn = poutine.trace(guide[0]).get_trace(*case.args, **case.kwargs)
                given = {name: drawn.nodes[name]["value"] for name in continuous}
                exact = -float((brute_force(case, given).evidence() - drawn.log_prob_sum()).detach())
            assert abs(loss - exact) < 1e-8 * max(1.0, abs(exact)), f"{part.__name__}: loss {loss}, by brute force {exact}"


def _size(case: Foreign, names: list[str]) -> int:
    with poutine.block():
        trace = poutine.trace(case.model).get_trace(*case.args, **case.kwargs)
    return sum(trace.nodes[name]["value"].numel() for name in names)


def has_a_median(case: Foreign) -> None:
    """``median`` is the most probable state by brute force, given the medians of the continuous latents."""
    guide = trained(case)
    median = {name: value.detach() for name, value in guide.median(*case.args, **case.kwargs).items()}
    continuous = latent_names(case)[1]
    exact = brute_force(case, {name: median[name] for name in continuous})
    single = brute_force(case, median)
    found = single.log_joint.sum() if exact.scale == 1 else single.log_joint.sum() / exact.scale
    torch.testing.assert_close(found, exact.log_joint.max(0).values.sum(), rtol=1e-9, atol=1e-9)


def is_copied(case: Foreign) -> None:
    """``copy.deepcopy`` and ``pickle`` of a guide leave it as it was; the copies hold the same populations."""
    guide = trained(case)
    part = truncated_part(guide)
    before = float(elbo().loss(case.model, guide, *case.args, **case.kwargs))
    for duplicate in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert isinstance(duplicate, AutoTruncated)
        assert torch.equal(duplicate.words, part.words)
    assert float(elbo().loss(case.model, guide, *case.args, **case.kwargs)) == before


HABITS: dict[str, Habit] = {
    "fit": fits,
    "Predictive": predicts,
    "parallel": predicts_in_parallel,
    "to_arviz": converts,
    "check_truncation": checks_truncation,
    "infer": infers,
    "state_dict": saves,
    "AutoGuideList": keeps_company,
    "median": has_a_median,
    "copy": is_copied,
}
