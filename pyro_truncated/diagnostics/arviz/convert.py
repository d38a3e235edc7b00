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
from pyro.infer.autoguide import AutoGuide

from pyro_truncated.diagnostics.arviz.dataset import (
    Coords,
    Dims,
    LabelledTensor,
    Writer,
    is_discrete,
    training_dataset,
    variable_name,
    without_labels,
)
from pyro_truncated.diagnostics.arviz.draws import Draws, conditional_likelihoods, draw, posterior_draws, prior_draws
from pyro_truncated.diagnostics.truncation.scoring import gathered
from pyro_truncated.distributed import world
from pyro_truncated.distributed.shards import is_spread
from pyro_truncated.utils.arviz_compat import convert_owner, has_converter, make_idata
from pyro_truncated.utils.budget import DEFAULT_BUDGET
from pyro_truncated.utils.isolation import spare_random_numbers

_ON_DATA = (
    "observed_data",
    "prior_predictive",
    "posterior_predictive",
    "marginal_predictive",
    "log_likelihood",
    "log_likelihood_conditional",
)


def to_arviz(
    model: Callable[..., Any] | Sequence[Callable[..., Any]],
    guide: Any,
    *args: Any,
    num_samples: int = 125,
    num_chains: int | None = None,
    num_predictive: int | None = None,
    dims: Dims | None = None,
    coords: Coords | None = None,
    seed: int | None = None,
    training: Mapping[str, Any] | None = None,
    checks: Any = None,
    stores: Sequence[Any] | None = None,
    conditional_log_likelihood: bool = False,
    memory_budget: int = DEFAULT_BUDGET,
    **kwargs: Any,
) -> Any:
    r"""Converts a model trained by SVI to ArviZ's ``InferenceData`` or ``DataTree``.

    .. math:: \log p(y_n \mid \theta) \ge \log \sum_{s \in K_n} p(y_n, s \mid \theta)

    The right side is the group ``log_likelihood``, with the states of data points summed out. All
    groups and the rules for guides, names and missing data: :doc:`/how-to/arviz`.

    Example::

        # Any guide, as AutoTruncated with Truncated_ELBO, or a list of both.
        svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), Trace_ELBO())
        ...
        idata = to_arviz(model, svi.guide, x, y)
        az.summary(idata), az.loo(idata), az.plot_ppc(idata)

    Args:
        model: the Pyro model, or one for each guide; or an object that converts itself
            (:func:`~pyro_truncated.diagnostics.convert_owner`), without a guide.
        guide: its guide, or a list of guides with equal populations, which become chains.
        *args: the model's arguments for all data, without subsampling.
        num_samples: draws per chain.
        num_chains: number of chains. Default: 4, or one for each guide.
        num_predictive: draws per chain in predictive groups. Default: ``num_samples``; 0 leaves them out.
        dims: names of event dimensions by site, of all dimensions by argument. Default: ``<site>_dim_<i>``.
        coords: coordinates by dimension. Default: ``0, 1, ...``.
        seed: seeds the draws and leaves torch's global generators unchanged.
        training: records of the training by name, each ``(num_steps,)`` or ``(num_restarts, num_steps)``.
        checks: what :func:`~pyro_truncated.diagnostics.check_truncation` returned for the same data.
        stores: states of Pyro's parameter store, one per guide (``Restarts.stores``).
        conditional_log_likelihood: whether to add the likelihood given drawn states. Wrong for cross-validation.
        memory_budget: bytes of a single array. Larger ones are left out (attribute ``omitted``).
        **kwargs: the model's keyword arguments.

    Returns:
        The groups that are not empty. On several processes the first one gets them, the others ``None``.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if the model subsamples, latents have no guide, guides do not go together, or dims or coords do not fit.
    """
    several = isinstance(guide, list | tuple)
    num_chains, num_predictive = _counts(num_samples, num_chains, num_predictive, several)
    settings = _Settings(
        num_samples, num_chains, num_predictive, dims, coords, seed, training, checks, stores, conditional_log_likelihood, memory_budget
    )
    if not is_spread(args, kwargs):
        return _convert(model, guide, args, kwargs, settings)
    # The other processes draw nothing meanwhile.
    with spare_random_numbers():
        with world.failing_together():
            found = [gathered(one, args, kwargs) for one in (guide if several else [guide])]
        every = [one for one in found if one is not None]
        if not every:
            return None
        guides = [one.guide for one in every]
        return _convert(model, guides if several else guides[0], every[0].args, every[0].kwargs, settings)


@dataclasses.dataclass(frozen=True)
class _Settings:
    """What :func:`to_arviz` was asked for; see there."""

    num_samples: int
    num_chains: int
    num_predictive: int
    dims: Dims | None
    coords: Coords | None
    seed: int | None
    training: Mapping[str, Any] | None
    checks: Any
    stores: Sequence[Any] | None
    conditional_log_likelihood: bool
    memory_budget: int


def _counts(num_samples: int, num_chains: int | None, num_predictive: int | None, several: bool) -> tuple[int, int]:
    """Numbers of chains and of predictive draws per chain, checked."""
    predictive = num_samples if num_predictive is None else num_predictive
    if num_samples < 1 or predictive < 0:
        raise ValueError(f"num_samples must be at least 1 and num_predictive at least 0; got {num_samples} and {predictive}")
    if num_chains is not None and (num_chains < 1 or (several and num_chains != 1)):
        raise ValueError(f"num_chains must be at least 1, and of several guides each is one chain; got {num_chains}")
    return num_chains or (1 if several else 4), min(predictive, num_samples)


def _convert(model: Any, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings) -> Any:
    """What :func:`to_arviz` returns of data that one process holds."""
    owner, data = (model, (guide, *args)) if has_converter(model) else (getattr(guide, "__self__", None), args)
    if has_converter(owner):
        if given := [name for name in ("training", "checks", "stores", "dims", "coords") if getattr(settings, name) is not None]:
            raise TypeError(f"{type(owner).__name__} converts itself and takes num_samples, num_chains and seed only; got also {given}")
        counts = {"num_samples": settings.num_samples, "num_chains": settings.num_chains}
        return convert_owner(owner, *data, **counts, seed=settings.seed, **kwargs)
    several = isinstance(guide, list | tuple)
    guides: list[Any] = list(guide) if several else [guide]
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model] * len(guides)
    _check_chains(models, guides, settings)
    args, kwargs, labelled = without_labels(models[0], guides[0], args, kwargs)
    with _seed(settings.seed), torch.no_grad():
        chains = []
        for position, (one, its_model) in enumerate(zip(guides, models, strict=True)):
            stores = settings.stores
            with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
                chains.append(_groups_of(its_model, one, args, kwargs, labelled, settings))
    datasets = _side_by_side(chains) if several else chains[0]
    _add_records(datasets, settings)
    attrs = _attributes_of(guides, datasets, settings.seed)
    return make_idata(**{name: data.assign_attrs(attrs) for name, data in datasets.items()})


def _check_chains(models: list[Any], guides: list[Any], settings: _Settings) -> None:
    """Refuses records of another kind, and guides without a model."""
    checks, training, stores = settings.checks, settings.training, settings.stores
    if checks is not None and not hasattr(checks, "arrays"):
        raise TypeError(f"checks must be what check_truncation returned; got {type(checks).__name__}")
    if training is not None and not isinstance(training, Mapping):
        raise TypeError(f"training must hold records by name, as the attribute record of what fit returned; got {type(training).__name__}")
    if not guides or len(models) != len(guides) or (stores is not None and len(stores) != len(guides)):
        raise ValueError(f"there must be one guide, model and store each per chain; got {len(guides)} guides and {len(models)} models")
    for one in models:
        if isinstance(one, AutoGuide):
            raise TypeError(f"model must come first, to_arviz(model, guide, *data); got a guide, {type(one).__name__}, in its place")


def _add_records(datasets: dict[str, xr.Dataset], settings: _Settings) -> None:
    """Adds checks and training, which are not drawn.

    Raises:
        ValueError: if there is nothing that they, or the coordinates, belong to.
    """
    if unknown := set(settings.coords or {}).difference(*(data.dims for data in datasets.values())):
        raise ValueError(f"coords names the dimensions {sorted(unknown)}, which the data do not have")
    if settings.checks is not None:
        if "truncated_posterior" not in datasets:
            raise ValueError("checks needs a guide with an AutoTruncated part, whose posterior is truncated; leave checks out")
        exact = datasets["truncated_posterior"]
        datasets["truncated_posterior"] = exact.merge(_named_like(settings.checks.arrays(), exact))
    if settings.training is not None:
        datasets["training"] = training_dataset(settings.training)


@contextlib.contextmanager
def _seed(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def _groups_of(
    model: Callable[..., Any],
    guide: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    labelled: tuple[LabelledTensor, ...],
    settings: _Settings,
) -> dict[str, xr.Dataset]:
    """The groups of one guide, without empty ones."""
    draws = draw(model, guide, args, kwargs, settings.num_samples * settings.num_chains)
    arguments = _arguments(model, args, kwargs)
    writer = Writer(draws, settings.dims or {}, settings.coords or {}, settings.memory_budget, arguments, settings.num_chains, labelled)
    datasets = {"posterior": writer.posterior(), "sample_stats": writer.sample_stats(), "log_likelihood": writer.log_likelihood()}
    if settings.conditional_log_likelihood:
        datasets["log_likelihood_conditional"] = writer.log_likelihood_conditional(conditional_likelihoods(model, draws, args, kwargs))
    datasets["log_prior"] = writer.log_prior()
    if settings.num_predictive:
        datasets |= _predictive(model, draws, writer, args, kwargs, settings)
    datasets["observed_data"] = writer.observed_data()
    datasets["constant_data"] = writer.constant_data(arguments)
    if draws.states is not None:
        size = draws.states.part.space.size
        # Of a space beyond the integers that files hold, the size does not matter.
        limits = {"num_states": draws.states.part.num_states} | ({"num_joint_states": size} if size < 2**31 else {})
        datasets["truncated_posterior"] = writer.truncated_posterior(draws.states).assign_attrs(limits)
    datasets = _without_unseen(datasets, draws, writer)
    # Whether some global latent has a posterior that is no point.
    of_all = [values for name, values in draws.latents.items() if name not in draws.local]
    is_drawn = draws.states is not None and not draws.states.part.layout.plates
    is_drawn = is_drawn or any(len(values) == 1 or bool((values != values[:1]).any()) for values in of_all)
    attrs = {
        "point_estimates_only": int(not is_drawn),
        "latents_of_data_points": ", ".join(sorted(map(variable_name, draws.local))),
    }
    return {name: data.assign_attrs(attrs) for name, data in datasets.items() if data.sizes or data.data_vars}


def _without_unseen(datasets: dict[str, xr.Dataset], draws: Draws, writer: Writer) -> dict[str, xr.Dataset]:
    """Drops data points without observations from the groups on data.

    Their likelihoods would be taken for observations.
    """
    seen = draws.observed()
    if seen is None:
        return datasets
    (plate,) = writer.datum
    chosen = {plate: seen.nonzero().squeeze(-1).numpy()}
    kept = {name: data.isel(chosen) if name in _ON_DATA and plate in data.dims else data for name, data in datasets.items()}
    return _count(kept, [variable_name(name) for name, node in draws.nodes.items() if is_discrete(node["fn"])])


def _count(datasets: dict[str, xr.Dataset], names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Returns counts as integers once hidden entries are gone."""
    data = datasets["observed_data"]
    whole = [name for name in names if name in data and data[name].dtype.kind == "f" and bool((data[name] == data[name].round()).all())]
    return {
        group: values.assign({name: values[name].astype(np.int32) for name in whole if name in values}) if group in _ON_DATA[:4] else values
        for group, values in datasets.items()
    }


def _predictive(
    model: Callable[..., Any], draws: Draws, writer: Writer, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings
) -> dict[str, xr.Dataset]:
    chains, wanted = settings.num_chains, settings.num_predictive
    # As many as fit into the budget with the largest site.
    largest = max((torch.as_tensor(node["value"]).numel() for node in draws.nodes.values()), default=1)
    affordable = min(wanted * chains, settings.memory_budget // (4 * max(1, largest)))
    count = max(1, affordable // chains)
    # The first draws of each chain.
    chosen = [chain * settings.num_samples + position for chain in range(chains) for position in range(count)]
    latents, observed = prior_draws(model, args, kwargs, len(chosen))
    results = {
        "prior": latents,
        "prior_predictive": observed,
        "posterior_predictive": posterior_draws(model, draws, args, kwargs, chosen, anew=False),
    }
    if draws.local:
        results["marginal_predictive"] = posterior_draws(model, draws, args, kwargs, chosen, anew=True)
    note = {"omitted": f"all but {count} of {wanted} draws per chain: over the memory budget"} if count < wanted else {}
    return {name: writer.sites(values).assign_attrs(note) for name, values in results.items()}


def _arguments(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The model's arguments by name."""
    called = model.forward if isinstance(model, torch.nn.Module) else model
    try:
        return dict(inspect.signature(called).bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument_{position}": value for position, value in enumerate(args)} | dict(kwargs)


def _side_by_side(chains: list[dict[str, xr.Dataset]]) -> dict[str, xr.Dataset]:
    """Guides side by side along ``chain``."""
    names = [name for name in chains[0] if all(name in chain for chain in chains)]
    joined = {}
    for name in names:
        parts = [chain[name] for chain in chains]
        if len({tuple(part.sizes.items()) for part in parts}) > 1:
            raise ValueError(f"the guides do not go together: {name} must have equal sizes; got {[dict(part.sizes) for part in parts]}")
        if name in ("observed_data", "constant_data"):
            joined[name] = parts[0]
            continue
        numbers = xr.DataArray(np.arange(len(parts)), dims="chain", name="chain")
        if name in ("posterior", "sample_stats", "log_prior", "prior", *_ON_DATA[1:]):
            parts = [part.assign_coords(chain=[number]) for number, part in enumerate(parts)]
            joined[name] = xr.concat(parts, dim="chain", combine_attrs="override")
        else:
            joined[name] = xr.concat(parts, dim=numbers, combine_attrs="override")
    return joined


def _named_like(arrays: Mapping[str, np.ndarray], data: xr.Dataset) -> xr.Dataset:
    """Names arrays ``(N,)`` like the free energy of the data points."""
    like = data["free_energy"]
    for name, values in arrays.items():
        if values.size != like.size:
            raise ValueError(f"checks are of {values.size} data points ({name}); these are {like.size}")
    return xr.Dataset({name: (like.dims, values.reshape(like.shape)) for name, values in arrays.items()})


def _attributes_of(guides: list[Any], datasets: Mapping[str, xr.Dataset], seed: int | None) -> dict[str, Any]:
    """What every group says of where it comes from."""
    attributes: dict[str, Any] = {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "pyro",
        "inference_library_version": pyro.__version__,
        "inference_method": "variational",
        "guide": getattr(guides[0], "__name__", type(guides[0]).__name__),
        "num_restarts": len(guides),
        "point_estimates_only": datasets["posterior"].attrs["point_estimates_only"],
    }
    if "truncated_posterior" in datasets:
        attributes |= {"inference_method": "truncated variational", "num_states": datasets["truncated_posterior"].attrs["num_states"]}
    with contextlib.suppress(PackageNotFoundError):
        attributes["creation_library_version"] = version("pyro-truncated")
    return attributes if seed is None else {**attributes, "seed": seed}
