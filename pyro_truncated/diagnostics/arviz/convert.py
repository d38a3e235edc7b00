"""Truncated posteriors as ArviZ data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide

from pyro_truncated.diagnostics.arviz.chains import attributes_of, named_like, side_by_side
from pyro_truncated.diagnostics.arviz.data_labels import without_labels
from pyro_truncated.diagnostics.arviz.groups import Settings, groups_of
from pyro_truncated.diagnostics.arviz.site_values import training_dataset
from pyro_truncated.diagnostics.arviz.writer import Coords, Dims
from pyro_truncated.diagnostics.truncation.gathered import gathered, is_spread
from pyro_truncated.distributed import world
from pyro_truncated.utils.arviz_compat import convert_owner, has_converter, make_idata
from pyro_truncated.utils.budget import DEFAULT_BUDGET
from pyro_truncated.utils.isolation import spare_random_numbers


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
    ``truncated_posterior`` uses get an ending: the dimension ``draw_plate`` of a plate ``draw``. Data may be pandas' ``DataFrame`` and
    ``Series`` and xarray's ``DataArray``: the names and labels of their rows are those of the plate, and of their columns those of the
    event; what ``dims`` and ``coords`` say comes first. Axes without a name keep the default one.

    All draws are independent; they are dealt to four chains so that ArviZ's chain diagnostics, which have nothing to find, run. Parameters
    of the model are taken as they are. If the draws of no global latent differ (there is none, or ``AutoDelta`` holds it), whatever is made
    from ``log_likelihood`` is a plug-in estimate; the attribute ``point_estimates_only`` says so, and ``arviz.loo`` warns of it in its way.
    Latents of data points that another guide draws are not summed out; the attribute ``conditional_on`` of ``log_likelihood`` names them.

    Several guides (restarts) become chains, each with its own ``truncated_posterior`` along the dimension ``chain``. Latents of restarts
    come in any order: align them first (:func:`~pyro_truncated.diagnostics.compare_restarts`), or compare only what does not depend on it.

    Where the data are spread over processes (:func:`pyro_truncated.distributed.shard`), all of them must call this. The first one brings
    the populations together and converts the whole; the others get ``None``.

    Example::

        svi = SVI(model, AutoNormal(model), Adam({"lr": 0.01}), Trace_ELBO())  # or AutoTruncated and Truncated_ELBO, or a list of both
        ...
        idata = to_arviz(model, svi.guide, x, y)
        az.summary(idata), az.loo(idata), az.plot_ppc(idata)

    Args:
        model: the Pyro model, or one for each guide.
        guide: the guide it was trained with: an :class:`~pyro_truncated.AutoTruncated`, any other autoguide, an ``AutoGuideList``, a guide
            function, an effect such as ``AutoNormalMessenger``; or a list or tuple of guides with equal populations. A method of an object
            that knows best how its posterior becomes data (``SpikeSlabGPLVM``, ``SpikeSlabMRD``, or whatever is registered with
            :func:`~pyro_truncated.diagnostics.convert_owner`) leaves the work to it; of the options it gets ``num_samples``,
            ``num_chains`` and ``seed``. ``to_arviz(owner, *args)`` does the same.
        *args: the model's arguments, such that it does not subsample; a guide trained on minibatches is converted on the full data. What
            pandas and xarray made becomes tensors of the type of the model's parameters, else of the guide's, else of torch's default.
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
        TypeError: if the guide cannot be called or is in the place of the model, or ``training`` or ``checks`` are something else.
        ValueError: if the model subsamples, latents have no distribution but their prior, the guide has several ``AutoTruncated`` parts,
            guides do not go together, or dims or coords do not fit.
    """
    if is_spread(args, kwargs):
        options: dict[str, Any] = {"num_samples": num_samples, "num_chains": num_chains, "num_predictive": num_predictive, "seed": seed}
        options |= {"dims": dims, "coords": coords, "training": training, "checks": checks, "stores": stores}
        options |= {"conditional_log_likelihood": conditional_log_likelihood, "memory_budget": memory_budget}
        return _of_all_processes(model, guide, args, kwargs, options)
    several = isinstance(guide, list | tuple)
    num_chains, num_predictive = _counts(num_samples, num_chains, num_predictive, several)
    owner, data = (model, (guide, *args)) if has_converter(model) else (getattr(guide, "__self__", None), args)
    if has_converter(owner):
        options = {"training": training, "checks": checks, "stores": stores, "dims": dims, "coords": coords}
        if given := [name for name, value in options.items() if value is not None]:
            raise TypeError(f"{type(owner).__name__} converts itself and takes num_samples, num_chains and seed only; got also {given}")
        return convert_owner(owner, *data, num_samples=num_samples, num_chains=num_chains, seed=seed, **kwargs)
    if checks is not None and not hasattr(checks, "arrays"):
        raise TypeError(f"checks must be what check_truncation returned; got {type(checks).__name__}")
    if training is not None and not isinstance(training, Mapping):
        raise TypeError(f"training must hold records by name, as the attribute record of what fit returned; got {type(training).__name__}")
    guides: list[Any] = list(guide) if several else [guide]
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model] * len(guides)
    if not guides or len(models) != len(guides) or (stores is not None and len(stores) != len(guides)):
        raise ValueError(f"there must be one guide, model and store each per chain; got {len(guides)} guides and {len(models)} models")
    for one in models:
        if isinstance(one, AutoGuide):
            raise TypeError(f"the order is to_arviz(model, guide, *data); got a guide, {type(one).__name__}, in the place of the model")
    args, kwargs, labelled = without_labels(models[0], guides[0], args, kwargs)
    settings = Settings(
        num_samples, num_chains, num_predictive, conditional_log_likelihood, dims or {}, coords or {}, memory_budget, labelled
    )
    with _seeded(seed), torch.no_grad():
        chains = []
        for position, (one, its_model) in enumerate(zip(guides, models, strict=True)):
            with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
                chains.append(groups_of(its_model, one, args, kwargs, settings))
    datasets = side_by_side(chains) if several else chains[0]
    if unknown := set(coords or {}).difference(*(data.dims for data in datasets.values())):
        raise ValueError(f"coords names the dimensions {sorted(unknown)}, which the data do not have")
    if checks is not None:
        if "truncated_posterior" not in datasets:
            raise ValueError("checks are of a truncated posterior, which a guide without an AutoTruncated part does not have")
        exact = datasets["truncated_posterior"]
        datasets["truncated_posterior"] = exact.merge(named_like(checks.arrays(), exact))
    if training is not None:
        datasets["training"] = training_dataset(training)
    attrs = attributes_of(guides, datasets, seed)
    return make_idata(**{name: data.assign_attrs(attrs) for name, data in datasets.items()})


def _of_all_processes(model: Any, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], options: dict[str, Any]) -> Any:
    several = isinstance(guide, list | tuple)
    # The others draw nothing meanwhile.
    with spare_random_numbers():
        with world.failing_together():
            found = [gathered(one, args, kwargs) for one in (guide if several else [guide])]
        every = [one for one in found if one is not None]
        if not every:
            return None
        guides = [one.guide for one in every]
        return to_arviz(model, guides if several else guides[0], *every[0].args, **every[0].kwargs, **options)


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
