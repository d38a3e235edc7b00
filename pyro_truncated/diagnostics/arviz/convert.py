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
    r"""Converts a model trained by SVI to ArviZ's ``InferenceData`` or ``DataTree``.

    .. math:: \log p(y_n \mid \theta) \ge \log \sum_{s \in K_n} p(y_n, s \mid \theta)

    The right side is the group ``log_likelihood``, with the states of data points summed out. All
    groups and the rules for guides, names and missing data: :doc:`/how-to/arviz`.

    Example::

        svi = SVI(model, AutoTruncated(model), Adam({"lr": 0.01}), Truncated_ELBO())
        ...
        idata = to_arviz(model, svi.guide, x, y)
        az.summary(idata), az.loo(idata), az.plot_ppc(idata)

    Args:
        model: the Pyro model, or one for each guide; or an object that converts itself
            (:func:`~pyro_truncated.diagnostics.convert_owner`), without a guide.
        guide: its guide, of any kind, or a list of guides with equal populations, which become chains.
        *args: the model's arguments for all data, without subsampling.
        num_samples: draws per chain.
        num_chains: number of chains, default 4; of several guides each is one chain.
        num_predictive: draws per chain in predictive groups; default ``num_samples``; 0 leaves them out.
        dims: names of the event dimensions by site name, default ``<site>_dim_<i>``; of all dimensions by argument name.
        coords: coordinates by dimension name; default ``0, 1, ...``.
        seed: seeds the draws and leaves torch's global generators unchanged.
        training: records of the training by name, each ``(num_steps,)`` or ``(num_restarts, num_steps)``.
        checks: what :func:`~pyro_truncated.diagnostics.check_truncation` returned for the same data.
        stores: states of Pyro's parameter store, one per guide (``Restarts.stores``).
        conditional_log_likelihood: whether to add the likelihood given drawn states; wrong for cross-validation.
        memory_budget: bytes of a single array; larger ones are left out (attribute ``omitted``).
        **kwargs: the model's keyword arguments.

    Returns:
        The groups that are not empty. On several processes the first one gets them, the others ``None``.

    Raises:
        TypeError: if an argument is of another kind.
        ValueError: if the model subsamples, latents have no guide, guides do not go together, or dims or coords do not fit.
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
