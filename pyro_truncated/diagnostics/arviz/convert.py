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

from pyro_truncated.diagnostics.arviz.drawn import Draws
from pyro_truncated.diagnostics.arviz.draws import draw
from pyro_truncated.diagnostics.arviz.predictive_draws import affordable, conditional_likelihoods, posterior_draws, prior_draws
from pyro_truncated.diagnostics.arviz.values import is_discrete, training_dataset, variable_name
from pyro_truncated.diagnostics.arviz.writer import Coords, Dims, Writer
from pyro_truncated.utils.arviz_compat import make_idata

_ON_DATA = (
    "observed_data",
    "prior_predictive",
    "posterior_predictive",
    "marginal_predictive",
    "log_likelihood",
    "log_likelihood_conditional",
)
_VALUES = _ON_DATA[:4]
_BY_CHAIN = ("posterior", "sample_stats", "log_prior", "prior", *_ON_DATA[1:])
_SHARED = ("observed_data", "constant_data")


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
    memory_budget: int = 2**28,
    **kwargs: Any,
) -> Any:
    r"""Converts a model trained by SVI to what ArviZ reads: ``InferenceData``, or a ``DataTree`` from ArviZ 1.0 on.

    ========================  =========================================================================================================
    group                     content
    ========================  =========================================================================================================
    ``posterior``             independent draws of every latent site, of what the model computes from them (``pyro.deterministic``,
                              reparametrised latents, data completed by ``obs_mask``), and of the index of the drawn state
                              (``<sites>_index``). Discrete sites are integers of the smallest type that holds them.
    ``sample_stats``          ``lp`` :math:`= \log p(y, z, \theta)`, ``log_q`` of the guide, ``log_weight`` their difference.
    ``log_likelihood``        for each data point :math:`\log \sum_{s \in K_n} p(y_n, s \mid \theta)`, the states summed out: what
                              leave-one-out cross-validation needs (conditioning on drawn states makes it badly wrong). Where the states
                              are global, they are parameters like others: each observation given them. Terms of ``pyro.factor`` belong
                              to the data in the same plates.
    ``log_prior``             log prior density of each latent that belongs to no data point.
    ``prior``                 draws of the latents, and what is computed from them, from the model.
    ``prior_predictive``      draws of the observations that go with them.
    ``posterior_predictive``  observations drawn given ``posterior``: the data points as they were inferred, repeated.
    ``marginal_predictive``   observations of *new* data points: global latents from the posterior, those of data points from their prior.
    ``observed_data``         the observed sites (``x_observed`` of an ``obs_mask``), integers where their support is discrete; NaN where
                              a mask hides an entry from the model. Data points that masks hide altogether are left out here, in the
                              predictive groups and the likelihoods.
    ``constant_data``         tensors among the arguments that are not observed.
    ``truncated_posterior``   the posterior over the discrete latents without sampling noise: ``states``, their ``weights``,
                              ``free_energy``, ``effective_states`` :math:`= \exp` of the entropy of the weights, ``activation_prob``
                              (the probability that a latent is not at its lowest value), ``support_mass_bound`` (an upper bound on the
                              posterior mass of the population, see :func:`~pyro_truncated.diagnostics.covered_mass`), and what ``checks``
                              found. Means over the draws if there are other latents.
    ``training``              what ``training`` holds.
    ========================  =========================================================================================================

    Any guide will do; ``truncated_posterior`` is there for those with an ``AutoTruncated`` part. Discrete latents that the guide leaves to
    enumeration (:class:`~pyro.infer.TraceEnum_ELBO`) are drawn from their exact posterior given the others
    (:func:`~pyro.infer.infer_discrete`), and summed out of the log likelihood where data points have their own. Missing data are drawn from
    the model. Other latents that the guide does not cover are an error: they would come from the prior.

    Dimensions are named after the plates, variables after the sites; ``/`` becomes ``.``, and names that ArviZ or the group
    ``truncated_posterior`` uses get an ending: the dimension ``draw_plate`` of a plate ``draw``.

    All draws are independent; they are dealt to four chains so that ArviZ's chain diagnostics, which have nothing to find, run. Parameters
    of the model are taken as they are. If the draws of no global latent differ (there is none, or ``AutoDelta`` holds it), whatever is made
    from ``log_likelihood`` is a plug-in estimate; the attribute ``point_estimates_only`` says so, and ``arviz.loo`` warns of it in its way.
    Latents of data points that another guide draws are not summed out; the attribute ``conditional_on`` of ``log_likelihood`` names them.

    Several guides (restarts) become chains, each with its own ``truncated_posterior`` along the dimension ``chain``. Latents of restarts
    come in any order: align them first (:func:`~pyro_truncated.diagnostics.compare_restarts`), or compare only what does not depend on it.

    Example::

        svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), Trace_ELBO())  # or AutoTruncated and Truncated_ELBO, or a list of both
        ...
        idata = to_arviz(model, svi.guide, x, y)
        az.summary(idata), az.loo(idata), az.plot_ppc(idata)

    Args:
        model: the Pyro model, or one for each guide.
        guide: the guide it was trained with: an :class:`~pyro_truncated.AutoTruncated`, any other autoguide, an ``AutoGuideList``, a guide
            function, an effect such as ``AutoNormalMessenger``; or a list or tuple of guides with equal populations. A method of an object
            that converts itself (``SpikeSlabGPLVM``, ``SpikeSlabMRD``) leaves the work to the object's ``to_arviz``; of the options it gets
            ``num_samples``, ``num_chains`` and ``seed``.
        *args: the model's arguments, such that it does not subsample; a guide trained on minibatches is converted on the full data.
        num_samples: number of draws per chain.
        num_chains: number of chains, default 4; of several guides each is one chain.
        num_predictive: number of draws per chain in each of the four predictive groups; default ``num_samples``, as ``arviz.loo_pit`` needs
            it; 0 leaves them out. There are fewer where an array would exceed the memory budget.
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
        TypeError: if the guide cannot be called, or ``training`` or ``checks`` are something else.
        ValueError: if the model subsamples, latents have no distribution but their prior, the guide has several ``AutoTruncated`` parts,
            guides do not go together, or dims or coords do not fit.
    """
    several = isinstance(guide, list | tuple)
    num_chains, num_predictive = _counts(num_samples, num_chains, num_predictive, several)
    if convert_itself := getattr(getattr(guide, "__self__", None), "to_arviz", None):
        options = {"training": training, "checks": checks, "stores": stores, "dims": dims, "coords": coords}
        if given := [name for name, value in options.items() if value is not None]:
            raise TypeError(
                f"{type(guide.__self__).__name__} converts itself and takes num_samples, num_chains and seed only; got also {given}"
            )
        return convert_itself(*args, num_samples=num_samples, num_chains=num_chains, seed=seed, **kwargs)
    if checks is not None and not hasattr(checks, "arrays"):
        raise TypeError(f"checks must be what check_truncation returned; got {type(checks).__name__}")
    if training is not None and not isinstance(training, Mapping):
        raise TypeError(f"training must hold records by name, as the attribute record of what fit returned; got {type(training).__name__}")
    guides: list[Any] = list(guide) if several else [guide]
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model] * len(guides)
    if not guides or len(models) != len(guides) or (stores is not None and len(stores) != len(guides)):
        raise ValueError(f"there must be one guide, model and store each per chain; got {len(guides)} guides and {len(models)} models")
    settings = _Settings(num_samples, num_chains, num_predictive, conditional_log_likelihood, dims or {}, coords or {}, memory_budget)
    with _seeded(seed), torch.no_grad():
        chains = []
        for position, (one, its_model) in enumerate(zip(guides, models, strict=True)):
            with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
                chains.append(_convert(its_model, one, args, kwargs, settings))
    datasets = _join(chains) if several else chains[0]
    if unknown := set(coords or {}).difference(*(data.dims for data in datasets.values())):
        raise ValueError(f"coords names the dimensions {sorted(unknown)}, which the data do not have")
    if checks is not None:
        if "truncated_posterior" not in datasets:
            raise ValueError("checks are of a truncated posterior, which a guide without an AutoTruncated part does not have")
        exact = datasets["truncated_posterior"]
        datasets["truncated_posterior"] = exact.merge(_named_like(checks.arrays(), exact))
    if training is not None:
        datasets["training"] = training_dataset(training)
    attrs = _attributes(guides, datasets, seed)
    return make_idata(**{name: data.assign_attrs(attrs) for name, data in datasets.items()})


def _counts(num_samples: int, num_chains: int | None, num_predictive: int | None, several: bool) -> tuple[int, int]:
    """Numbers of chains and of predictive draws per chain, checked."""
    predictive = num_samples if num_predictive is None else num_predictive
    if num_samples < 1 or predictive < 0:
        raise ValueError(f"num_samples must be at least 1 and num_predictive at least 0; got {num_samples} and {predictive}")
    if num_chains is not None and (num_chains < 1 or (several and num_chains != 1)):
        raise ValueError(f"num_chains must be at least 1, and of several guides each is one chain; got {num_chains}")
    return num_chains or (1 if several else 4), min(predictive, num_samples)


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
    num_chains: int
    num_predictive: int
    conditional_log_likelihood: bool
    dims: Dims
    coords: Coords
    memory_budget: int


def _convert(
    model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings
) -> dict[str, xr.Dataset]:
    """The groups of one guide, without empty ones."""
    draws = draw(model, guide, args, kwargs, settings.num_samples * settings.num_chains)
    arguments = _arguments(model, args, kwargs)
    writer = Writer(draws, settings.dims, settings.coords, settings.memory_budget, list(arguments), settings.num_chains)
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
    attrs = {
        "point_estimates_only": int(not _has_parameters_drawn(draws)),
        "latents_of_data_points": ", ".join(sorted(map(variable_name, draws.local))),
    }
    return {name: data.assign_attrs(attrs) for name, data in datasets.items() if data.sizes or data.data_vars}


def _without_unseen(datasets: dict[str, xr.Dataset], draws: Draws, writer: Writer) -> dict[str, xr.Dataset]:
    """The groups on data without the data points of which nothing was observed: their likelihoods would be taken for observations."""
    seen = draws.observed()
    if seen is None:
        return datasets
    (plate,) = writer.datum
    chosen = {plate: seen.nonzero().squeeze(-1).numpy()}
    kept = {name: data.isel(chosen) if name in _ON_DATA and plate in data.dims else data for name, data in datasets.items()}
    return _counted(kept, [variable_name(name) for name, node in draws.nodes.items() if is_discrete(node["fn"])])


def _counted(datasets: dict[str, xr.Dataset], names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Counts that were floats for the sake of hidden entries only, which are gone, as integers."""
    data = datasets["observed_data"]
    whole = [name for name in names if name in data and data[name].dtype.kind == "f" and bool((data[name] == data[name].round()).all())]
    return {
        group: values.assign({name: values[name].astype(np.int32) for name in whole if name in values}) if group in _VALUES else values
        for group, values in datasets.items()
    }


def _has_parameters_drawn(draws: Draws) -> bool:
    """Whether latents that belong to no data point have a posterior that is not a point."""
    if draws.states is not None and not draws.states.part.layout.plates:
        return True
    return any(_varies(values) for name, values in draws.latents.items() if name not in draws.local)


def _varies(values: torch.Tensor) -> bool:
    return len(values) == 1 or bool((values != values[:1]).any())


def _predictive(
    model: Callable[..., Any], draws: Draws, writer: Writer, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings
) -> dict[str, xr.Dataset]:
    chains, wanted = settings.num_chains, settings.num_predictive
    count = max(1, affordable(wanted * chains, draws.nodes, settings.memory_budget) // chains)
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
