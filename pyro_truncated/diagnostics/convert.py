"""Truncated posteriors as ArviZ data."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyro
import torch
import xarray as xr

from pyro_truncated._arviz_compat import make_idata
from pyro_truncated.diagnostics.draws import Draws, draw
from pyro_truncated.diagnostics.predictive import affordable, conditional_likelihoods, posterior_draws, prior_draws
from pyro_truncated.diagnostics.writer import Coords, Dims, Writer, training_dataset

PREDICTIVE = ("prior", "prior_predictive", "posterior_predictive", "marginal_predictive")
_BY_CHAIN = ("posterior", "sample_stats", "log_likelihood", "log_likelihood_conditional", "log_prior", *PREDICTIVE)
_SHARED = ("observed_data", "constant_data")


def to_arviz(
    model: Callable[..., Any] | Sequence[Callable[..., Any]],
    guide: Any,
    *args: Any,
    num_samples: int = 500,
    num_predictive: int = 100,
    dims: Dims | None = None,
    coords: Coords | None = None,
    seed: int | None = None,
    training: Mapping[str, Any] | None = None,
    checks: Any = None,
    stores: Sequence[Any] | None = None,
    conditional_log_likelihood: bool = False,
    memory_budget: int = 2**28,
    **kwargs: Any,
) -> Any:
    r"""Converts a fitted truncated posterior to what ArviZ reads: ``InferenceData``, or a ``DataTree`` from ArviZ 1.0 on.

    ========================  =========================================================================================================
    group                     content
    ========================  =========================================================================================================
    ``posterior``             independent draws of every latent site, and of the index of the drawn state (``<sites>_index``). Discrete
                              sites are integers of the smallest type that holds them.
    ``sample_stats``          ``lp`` :math:`= \log p(y, z, \theta)`, ``log_q`` of the guide, ``log_weight`` their difference.
    ``log_likelihood``        for each data point :math:`\log \sum_{s \in K_n} p(y_n, s \mid \theta)`, the states summed out: what
                              leave-one-out cross-validation needs (conditioning on drawn states makes it badly wrong). Where the states
                              are global, they are parameters like others: each observation given them.
    ``log_prior``             log prior density of each global latent.
    ``prior``                 draws of the latents from the model.
    ``prior_predictive``      draws of the observations that go with them.
    ``posterior_predictive``  observations drawn given ``posterior``: the data points as they were inferred, repeated.
    ``marginal_predictive``   observations of *new* data points: global latents from the posterior, those of data points from their prior.
    ``observed_data``         the observed sites.
    ``constant_data``         tensors among the arguments that are not observed.
    ``truncated_posterior``   the posterior over the discrete latents without sampling noise: ``states``, their ``weights``,
                              ``free_energy``, ``effective_states`` :math:`= \exp` of the entropy of the weights, ``activation_prob``
                              (the probability that a latent is not at its lowest value), ``support_mass_bound`` (an upper bound on the
                              posterior mass of the population, see :func:`~pyro_truncated.diagnostics.covered_mass`), and what ``checks``
                              found. Means over the draws if there are other latents.
    ``training``              what ``training`` holds.
    ========================  =========================================================================================================

    Dimensions are named after the plates. There is one chain; the draws are independent, so chain diagnostics say nothing about them.
    Parameters of the model are taken as they are. If the draws of no global latent differ (there is none, or ``AutoDelta`` holds it),
    whatever is made from ``log_likelihood`` is a plug-in estimate; the attribute ``point_estimates_only`` says so. Latents of data points
    that another guide draws are not summed out; the attribute ``conditional_on`` of ``log_likelihood`` names them.

    Several guides (restarts) become chains, each with its own ``truncated_posterior`` along the dimension ``chain``. Latents of restarts
    come in any order: align them first (:func:`~pyro_truncated.diagnostics.compare_restarts`), or compare only what does not depend on it.

    Args:
        model: the Pyro model, or one for each guide.
        guide: an :class:`~pyro_truncated.AutoTruncated`, or an ``AutoGuideList`` with one among its parts; or a list or tuple of such
            guides with equal populations. A method of an object that converts itself (``SpikeSlabGPLVM``, ``SpikeSlabMRD``) leaves the
            work to the object's ``to_arviz``; of the options it gets ``num_samples`` and ``seed``.
        *args: the model's arguments, such that it does not subsample; a guide trained on minibatches is converted on the full data.
        num_samples: number of draws.
        num_predictive: number of draws in each of the four predictive groups, at most ``num_samples``; 0 leaves them out. There are fewer
            where an array would exceed the memory budget.
        dims: names of the event dimensions by site name, default ``<site>_dim_<i>``; of all dimensions by argument name.
        coords: coordinates by dimension name; default ``0, 1, ...``.
        seed: seeds the draws and leaves torch's global generators as they were; without it they are used.
        training: records of the training by name, each ``(num_steps,)`` or ``(num_restarts, num_steps)``.
        checks: what :func:`~pyro_truncated.diagnostics.check_truncation` returned for the same data; its arrays are added to
            ``truncated_posterior``.
        stores: states of Pyro's parameter store, one per guide (``Restarts.stores``): parameters of plain functions, and of modules
            whose names repeat, live there.
        conditional_log_likelihood: whether to add the group ``log_likelihood_conditional``: of the observations given all that was drawn,
            states included. It answers other questions than cross-validation, for which it is wrong.
        memory_budget: bytes that a single array of draws or states may take; a larger one is left out, and the attribute ``omitted`` of
            its group says so. States are always recoverable from the index and the guide.
        **kwargs: the model's keyword arguments.

    Returns:
        The groups above, without those that would be empty. ``log_likelihood`` is missing where it does not exist: a latent of a data point
        that another guide draws has a prior that depends on the discrete ones.

    Raises:
        TypeError: if the guide has no ``AutoTruncated`` part, or ``training`` or ``checks`` are something else.
        ValueError: if the model subsamples, the guide has several such parts, guides do not go together, or dims or coords do not fit.
    """
    if num_samples < 1 or num_predictive < 0:
        raise ValueError(f"num_samples must be at least 1 and num_predictive at least 0; got {num_samples} and {num_predictive}")
    if convert_itself := getattr(getattr(guide, "__self__", None), "to_arviz", None):
        options = {"training": training, "checks": checks, "stores": stores, "dims": dims, "coords": coords}
        if given := [name for name, value in options.items() if value is not None]:
            raise TypeError(f"{type(guide.__self__).__name__} converts itself and takes num_samples and seed only; got also {given}")
        return convert_itself(*args, num_samples=num_samples, seed=seed, **kwargs)
    if checks is not None and not hasattr(checks, "arrays"):
        raise TypeError(f"checks must be what check_truncation returned; got {type(checks).__name__}")
    if training is not None and not isinstance(training, Mapping):
        raise TypeError(f"training must hold records by name, as the attribute record of what fit returned; got {type(training).__name__}")
    several = isinstance(guide, list | tuple)
    guides: list[Any] = list(guide) if several else [guide]
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model] * len(guides)
    if not guides or len(models) != len(guides) or (stores is not None and len(stores) != len(guides)):
        raise ValueError(f"there must be one guide, model and store each per chain; got {len(guides)} guides and {len(models)} models")
    settings = _Settings(num_samples, num_predictive, conditional_log_likelihood, dims or {}, coords or {}, memory_budget)
    with _seeded(seed), torch.no_grad():
        chains = []
        for position, (one, its_model) in enumerate(zip(guides, models, strict=True)):
            with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
                chains.append(_convert(its_model, one, args, kwargs, settings))
    datasets = _join(chains) if several else chains[0]
    if unknown := set(coords or {}).difference(*(data.dims for data in datasets.values())):
        raise ValueError(f"coords names the dimensions {sorted(unknown)}, which the data do not have")
    if checks is not None:
        exact = datasets["truncated_posterior"]
        datasets["truncated_posterior"] = exact.merge(_named_like(checks.arrays(), exact))
    if training is not None:
        datasets["training"] = training_dataset(training)
    attrs = _attributes(guides, datasets, seed)
    return make_idata(**{name: data.assign_attrs(attrs) for name, data in datasets.items()})


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@dataclasses.dataclass(frozen=True)
class _Settings:
    num_samples: int
    num_predictive: int
    conditional_log_likelihood: bool
    dims: Dims
    coords: Coords
    memory_budget: int


def _convert(
    model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings
) -> dict[str, xr.Dataset]:
    """The groups of one guide, without empty ones."""
    draws = draw(model, guide, args, kwargs, settings.num_samples)
    arguments = _arguments(model, args, kwargs)
    writer = Writer(draws, settings.dims, settings.coords, settings.memory_budget, list(arguments))
    datasets = {"posterior": writer.posterior(), "sample_stats": writer.sample_stats(), "log_likelihood": _log_likelihood(writer, draws)}
    if settings.conditional_log_likelihood:
        datasets["log_likelihood_conditional"] = writer.log_likelihood_conditional(conditional_likelihoods(model, draws, args, kwargs))
    datasets["log_prior"] = writer.log_prior()
    if settings.num_predictive:
        datasets |= _predictive(model, draws, writer, args, kwargs, settings)
    datasets["observed_data"] = writer.observed_data()
    datasets["constant_data"] = writer.constant_data(arguments)
    size = draws.part.space.size
    # Of a space beyond the integers that files hold, the size does not matter.
    limits = {"num_states": draws.part.num_states} | ({"num_joint_states": size} if size < 2**31 else {})
    datasets["truncated_posterior"] = writer.truncated_posterior().assign_attrs(limits)
    point_estimates = int(not draws.is_global and not any(_varies(draws, name) for name in draws.others))
    return {
        name: data.assign_attrs(point_estimates_only=point_estimates) for name, data in datasets.items() if data.sizes or data.data_vars
    }


def _varies(draws: Draws, name: str) -> bool:
    """Whether a latent is one of the parameters, those of no data point, and has a posterior that is not a point."""
    if draws.log_joint.is_inside(draws.log_joint.nodes[name]):
        return False
    values = draws.others[name]
    return len(values) == 1 or bool((values != values[:1]).any())


def _log_likelihood(writer: Writer, draws: Draws) -> xr.Dataset:
    local = [name for name in draws.others if draws.log_joint.is_inside(draws.log_joint.nodes[name])]
    given = "" if draws.is_global or draws.part.conditional is not None else ", ".join(local)
    return writer.log_likelihood().assign_attrs({"conditional_on": given} if given else {})


def _predictive(
    model: Callable[..., Any], draws: Draws, writer: Writer, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings
) -> dict[str, xr.Dataset]:
    wanted = min(settings.num_predictive, settings.num_samples)
    count = affordable(wanted, draws.log_joint.nodes, settings.memory_budget)
    chosen = list(range(count))
    latents, observed = prior_draws(model, args, kwargs, count)
    results = {
        "prior": latents,
        "prior_predictive": observed,
        "posterior_predictive": posterior_draws(model, draws, args, kwargs, chosen, anew=False),
    }
    if not draws.is_global:
        results["marginal_predictive"] = posterior_draws(model, draws, args, kwargs, chosen, anew=True)
    note = {"omitted": f"all but {count} of {wanted} draws: over the memory budget"} if count < wanted else {}
    return {name: writer.sites(values).assign_attrs(note) for name, values in results.items()}


def _arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments by name."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return dict(inspect.signature(called).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument_{position}": value for position, value in enumerate(args)} | dict(kwargs)


def _join(chains: list[dict[str, xr.Dataset]]) -> dict[str, xr.Dataset]:
    """Guides side by side along ``chain``."""
    names = [name for name in chains[0] if all(name in chain for chain in chains)]
    joined = {}
    for name in names:
        parts = [chain[name] for chain in chains]
        if len({tuple(part.sizes.items()) for part in parts}) > 1:
            raise ValueError(f"the guides do not go together: {name} has the sizes {[dict(part.sizes) for part in parts]}")
        if name in _SHARED:
            joined[name] = parts[0]
            continue
        numbers = xr.DataArray(np.arange(len(parts)), dims="chain", name="chain")
        if name in _BY_CHAIN:
            parts = [part.assign_coords(chain=[number]) for number, part in enumerate(parts)]
            joined[name] = xr.concat(parts, dim="chain", combine_attrs="override")
        else:
            joined[name] = xr.concat(parts, dim=numbers, combine_attrs="override")
    return joined


def _named_like(arrays: Mapping[str, np.ndarray], data: xr.Dataset) -> xr.Dataset:
    """Arrays ``(N,)`` over the data points, with the dimensions that the free energy has."""
    like = data["free_energy"]
    for name, values in arrays.items():
        if values.size != like.size:
            raise ValueError(f"checks are of {values.size} data points ({name}); these are {like.size}")
    return xr.Dataset({name: (like.dims, values.reshape(like.shape)) for name, values in arrays.items()})


def _attributes(guides: list[Any], datasets: Mapping[str, xr.Dataset], seed: int | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "pyro",
        "inference_library_version": pyro.__version__,
        "inference_method": "truncated variational",
        "guide": type(guides[0]).__name__,
        "num_states": datasets["truncated_posterior"].attrs["num_states"],
        "point_estimates_only": datasets["posterior"].attrs["point_estimates_only"],
    }
    with contextlib.suppress(PackageNotFoundError):
        attributes["creation_library_version"] = version("pyro-truncated")
    return attributes if seed is None else {**attributes, "seed": seed}
