"""Truncated posteriors as ArviZ data."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
import xarray as xr
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated._arviz_compat import make_idata
from pyro_truncated.elbo import truncated_parts
from pyro_truncated.guide import AutoTruncated
from pyro_truncated.log_joint import LogJoint
from pyro_truncated.population import Population
from pyro_truncated.sites import DiscreteSite

Dims = Mapping[str, Sequence[str]]
Coords = Mapping[str, Sequence[Any]]
Variable = tuple[tuple[str, ...], np.ndarray]

STATE, LATENT = "state", "latent"


def to_arviz(
    model: Callable[..., Any],
    guide: Any,
    *args: Any,
    num_samples: int = 500,
    dims: Dims | None = None,
    coords: Coords | None = None,
    seed: int | None = None,
    training: Mapping[str, Any] | None = None,
    memory_budget: int = 2**28,
    **kwargs: Any,
) -> Any:
    r"""Converts a fitted truncated posterior to what ArviZ reads: ``InferenceData``, or a ``DataTree`` from ArviZ 1.0 on.

    =======================  ==========================================================================================================
    group                    content
    =======================  ==========================================================================================================
    ``posterior``            independent draws of every latent site, and of the index of the drawn state (``<sites>_index``). Discrete
                             sites are integers of the smallest type that holds them.
    ``sample_stats``         ``lp`` :math:`= \log p(y, z, \theta)`, ``log_q`` of the guide, ``log_weight`` their difference.
    ``log_likelihood``       for each data point :math:`\log \sum_{s \in K_n} p(y_n, s \mid \theta)`, the states summed out: what
                             leave-one-out cross-validation needs (conditioning on drawn states makes it badly wrong).
    ``observed_data``        the observed sites.
    ``truncated_posterior``  the posterior over the discrete latents without sampling noise: ``states``, their ``weights``,
                             ``free_energy``, ``effective_states`` :math:`= \exp` of the entropy of the weights, ``activation_prob``
                             (the probability that a latent is not at its lowest value). Means over the draws if there are other latents.
    ``training``             what ``training`` holds.
    =======================  ==========================================================================================================

    Dimensions are named after the plates. There is one chain; the draws are independent, so chain diagnostics say nothing about them.
    Parameters of the model are taken as they are. If no latent but the discrete ones is left, ``log_likelihood`` does not vary over
    the draws, and anything made from it is a plug-in estimate.

    Args:
        model: the Pyro model.
        guide: an :class:`~pyro_truncated.AutoTruncated`, or an ``AutoGuideList`` with one among its parts.
        *args: the model's arguments, such that it does not subsample; a guide trained on minibatches is converted on the full data.
        num_samples: number of draws.
        dims: names of the event dimensions by site name; default ``<site>_dim_<i>``.
        coords: coordinates by dimension name; default ``0, 1, ...``.
        seed: seeds the draws and leaves torch's global generators as they were; without it they are used.
        training: records of the training by name, each ``(num_steps,)`` or ``(num_restarts, num_steps)``.
        memory_budget: bytes that a single array of draws or states may take; a larger one is left out, and the attribute ``omitted`` of
            its group says so. States are always recoverable from the index and the guide.
        **kwargs: the model's keyword arguments.

    Returns:
        The groups above. ``log_likelihood`` is missing where it does not exist: there is no data plate to tell data points apart, or a
        latent of theirs that another guide draws has a prior that depends on the discrete ones.

    Raises:
        TypeError: if the guide has no ``AutoTruncated`` part.
        ValueError: if the model subsamples, the guide has several such parts, or dims or coords do not fit.
    """
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1; got {num_samples}")
    with _seeded(seed), torch.no_grad():
        draws = _draw(model, guide, args, kwargs, num_samples)
    writer = _Writer(draws, dims or {}, coords or {}, memory_budget)
    datasets = {"posterior": writer.posterior(), "sample_stats": writer.sample_stats()}
    if draws.log_likelihood is not None:
        datasets["log_likelihood"] = writer.log_likelihood()
    datasets["observed_data"] = writer.observed_data()
    datasets["truncated_posterior"] = writer.truncated_posterior()
    if training is not None:
        datasets["training"] = _training(training)
    attrs = _attributes(guide, draws, seed)
    return make_idata(**{name: data.assign_attrs(attrs) for name, data in datasets.items() if data.sizes or data.data_vars})


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[None]:
    if seed is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


@dataclasses.dataclass
class _Draws:
    """Draws from guide and model.

    Attributes:
        part: the truncated guide.
        log_joint: a scorer; its probe shows the model's sites.
        population: populations whose weights and free energies are means over the draws.
        index: indices of the states drawn, ``(draws, N)``.
        others: draws of the other latents by site name, ``(draws, *shape)``.
        lp: log joint density of each draw.
        log_q: log density of each draw under the guide.
        log_likelihood: ``(draws, N)``, or ``None`` where it does not exist.
    """

    part: AutoTruncated
    log_joint: LogJoint
    population: Population
    index: Tensor
    others: dict[str, Tensor]
    lp: Tensor
    log_q: Tensor
    log_likelihood: Tensor | None


def _draw(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int) -> _Draws:
    if isinstance(guide, AutoTruncated) and guide.master is None:
        guide.setup(*args, **kwargs)
        if not guide.layout.other_latents:
            return _draw_states(guide, args, kwargs, num_samples)
    return _draw_jointly(model, guide, args, kwargs, num_samples)


def _draw_states(guide: AutoTruncated, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int) -> _Draws:
    """Draws where there is nothing but states: the populations are scored once."""
    log_joint = guide.log_joint_of(*args, **kwargs)
    _refuse_subsample(log_joint)
    population = guide.posterior(*args, **kwargs)
    free_energy = population.free_energy()
    index = torch.multinomial(population.weights(), num_samples, replacement=True).mT
    drawn = population.log_joint.double().gather(1, index.mT).mT
    log_q = (drawn - free_energy).sum(1)
    likelihood = free_energy.expand(num_samples, -1) if guide.layout.plates else None
    return _Draws(guide, log_joint, population, index, {}, drawn.sum(1) + _outside(log_joint), log_q, likelihood)


def _outside(log_joint: LogJoint) -> Tensor | float:
    """Log probability of what lies outside the data plate; it does not depend on the states."""
    log_joint.probe.compute_log_prob()
    nodes = log_joint.probe.nodes.values()
    return sum((node["log_prob_sum"].double() for node in nodes if _is_site(node) and not log_joint.is_inside(node)), 0.0)


def _draw_jointly(model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], num_samples: int) -> _Draws:
    """Draws where the weights depend on other latents: the populations are scored anew for each draw of these."""
    rows: dict[str, list[Any]] = {name: [] for name in ("index", "lp", "log_q", "likelihood")}
    others: dict[str, list[Any]] = {}
    weights, free_energy = torch.zeros(()), torch.zeros(())
    for _ in range(num_samples):
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        part = _the_part(guide_trace)
        log_joint = part.log_joint_of(*args, values=_given(part, guide_trace), **kwargs)
        _refuse_subsample(log_joint)
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        population = part.rescored(log_joint)
        weights = weights + population.weights().double() / num_samples
        free_energy = free_energy + population.free_energy() / num_samples
        for name in part.layout.other_latents:
            others.setdefault(name, []).append(model_trace.nodes[name]["value"])
        rows["index"].append(guide_trace.nodes[part.index_name]["value"].reshape(-1))
        rows["lp"].append(torch.as_tensor(model_trace.log_prob_sum()).double())
        rows["log_q"].append(torch.as_tensor(guide_trace.log_prob_sum()).double())
        rows["likelihood"].append(_likelihood(log_joint, population))
    # Log joints that give back both means.
    population = dataclasses.replace(population, log_joint=weights.log() + free_energy.unsqueeze(-1))
    likelihood = None if rows["likelihood"][0] is None else torch.stack(rows["likelihood"])
    index, lp, log_q = (torch.stack(rows[name]) for name in ("index", "lp", "log_q"))
    return _Draws(part, log_joint, population, index, {name: torch.stack(v) for name, v in others.items()}, lp, log_q, likelihood)


def _given(part: AutoTruncated, guide_trace: poutine.Trace) -> dict[str, Any]:
    """What the guide drew beside the states."""
    own = {*part.layout.sites, part.index_name}
    return {name: node["value"] for name, node in guide_trace.nodes.items() if node["type"] == "sample" and name not in own}


def _the_part(guide_trace: poutine.Trace) -> AutoTruncated:
    parts = truncated_parts(guide_trace)
    if len(parts) != 1:
        raise ValueError(f"to_arviz converts guides with one AutoTruncated part; this one has {len(parts)}")
    return parts[0]


def _refuse_subsample(log_joint: LogJoint) -> None:
    if log_joint.num_data != log_joint.full_size:
        raise ValueError(
            f"to_arviz needs all {log_joint.full_size} data points; the model subsampled {log_joint.num_data} of them in "
            f"{' x '.join(log_joint.layout.plates)}. Pass arguments with which it takes the full data, and make the guide's plates with "
            "create_plates if it has parts that remember the size of a minibatch."
        )


def _likelihood(log_joint: LogJoint, population: Population) -> Tensor | None:
    r"""Each data point's log likelihood given the other latents: the free energy less the log prior of the point's own latents.

    Only latents that another guide draws count: for those of a ``conditional`` the free energy holds :math:`\log p - \log q` already.
    """
    layout = log_joint.layout
    if not layout.plates:
        return None
    free_energy = population.free_energy()
    local = [name for name in layout.other_latents if log_joint.is_inside(log_joint.probe.nodes[name])]
    if not local:
        return free_energy
    terms = log_joint.site_log_probs(population.words[:, :2])
    for name in local:
        if f"conditional of {name}" in terms:
            continue
        # A term that varies with the states has one entry for either of them.
        if terms[name].shape[0] > 1:
            return None
        free_energy = free_energy - terms[name].reshape(-1)
    return free_energy


def _is_site(node: Any) -> bool:
    return bool(node["type"] == "sample" and not site_is_subsample(node))


class _Writer:
    """Turns draws into datasets with named dimensions."""

    def __init__(self, draws: _Draws, dims: Dims, coords: Coords, memory_budget: int) -> None:
        self.draws, self.dims, self.coords, self.memory_budget = draws, dims, coords, memory_budget
        self.layout = draws.log_joint.layout
        self.nodes = draws.log_joint.probe.nodes
        self.datum, self.sizes = self.layout.plates, draws.log_joint.sizes
        unknown = set(dims) - {name for name, node in self.nodes.items() if _is_site(node)}
        if unknown:
            raise ValueError(f"dims names the sites {sorted(unknown)}, which the model does not have")

    def posterior(self) -> xr.Dataset:
        """Draws of the index, of the discrete sites, and of the others."""
        index = self.draws.index
        variables = {self.draws.part.index_name: self._per_datum(index.to(torch.int32))}
        omitted = []
        for name, site in self.layout.sites.items():
            size = index.numel() * site.num_latents
            if size > self.memory_budget:
                omitted.append(name)
            else:
                variables[name] = self._discrete_draws(name, site)
        for name, values in self.draws.others.items():
            if values.numel() * values.element_size() > self.memory_budget:
                omitted.append(name)
            else:
                names, array = self._site(name, values)
                variables[name] = (names, array)
        hint = (
            f"{', '.join(omitted)}: over the memory budget; {self.draws.part.index_name} indexes the state dimension of truncated_posterior"
        )
        return self._sampled(variables).assign_attrs({"omitted": hint} if omitted else {})

    def _discrete_draws(self, name: str, site: DiscreteSite) -> Variable:
        rows = torch.arange(len(self.draws.population), device=self.draws.index.device)
        words = self.draws.population.words[rows, self.draws.index]
        values = self.layout.split(self.layout.space.unpack(words, _level_type(self.layout.space.cardinalities)))[name]
        plates = {frame.dim: frame.name for frame in site.frames}
        names = (*(plates[dim] for dim, _ in site.plates), *self._event_names(name, values.dim() - 2 - len(site.plates)))
        dims, array = self._per_datum(values.to(_value_type(site)))
        return (*dims, *names), array

    def sample_stats(self) -> xr.Dataset:
        """Log densities of each draw."""
        lp, log_q = self.draws.lp, self.draws.log_q
        columns = {"lp": lp, "log_q": log_q, "log_weight": lp - log_q}
        return self._sampled({name: ((), _array(value)) for name, value in columns.items()})

    def log_likelihood(self) -> xr.Dataset:
        """Marginal log likelihoods, named after the observed sites in the data plate."""
        assert self.draws.log_likelihood is not None
        observed = [
            name for name, node in self.nodes.items() if _is_site(node) and node["is_observed"] and self.draws.log_joint.is_inside(node)
        ]
        return self._sampled({"_".join(observed): self._per_datum(self.draws.log_likelihood)})

    def observed_data(self) -> xr.Dataset:
        """Values of the observed sites."""
        variables = {}
        for name, node in self.nodes.items():
            if _is_site(node) and node["is_observed"] and torch.is_tensor(node["value"]):
                names, array = self._site(name, node["value"].unsqueeze(0))
                variables[name] = (names, array[0])
        return self._dataset(variables)

    def truncated_posterior(self) -> xr.Dataset:
        """The populations and exact expectations under them."""
        population, space = self.draws.population, self.layout.space
        variables = {
            "weights": ((*self.datum, STATE), self._rows(population.weights())),
            "free_energy": (self.datum, self._rows(population.free_energy())),
            "effective_states": (self.datum, self._rows(population.effective_states())),
            "activation_prob": ((*self.datum, LATENT), self._rows(population.marginals())),
        }
        dtype = _level_type([site.low + v for site in self.layout.sites.values() for v in site.cardinalities])
        size = population.log_joint.numel() * space.num_latents * dtype.itemsize
        attrs = {}
        if size <= self.memory_budget:
            low = torch.tensor([site.low for site in self.layout.sites.values() for _ in range(site.num_latents)], dtype=dtype)
            states = population.states(dtype) + low.to(population.words.device)
            variables["states"] = ((*self.datum, STATE, LATENT), self._rows(states))
        else:
            attrs["omitted"] = f"states: {size} bytes are over the memory budget; see guide.states()"
        labels = {LATENT: [label for name, site in self.layout.sites.items() for label in _labels(name, site.shape)]}
        return self._dataset(variables, labels).assign_attrs(attrs)

    def _rows(self, values: Tensor) -> np.ndarray:
        """Values ``(N, ...)`` with one dimension per data plate."""
        return _array(values.reshape((*self.sizes, *values.shape[1:])))

    def _per_datum(self, values: Tensor) -> Variable:
        """Draws ``(draws, N, ...)`` with one dimension per data plate, named."""
        return self.datum, _array(values.reshape(len(values), *self.sizes, *values.shape[2:]))

    def _site(self, name: str, values: Tensor) -> Variable:
        """Draws ``(draws, *batch, *event)`` of a site, batch dimensions named after plates; size 1 without a plate is dropped."""
        node: Any = self.nodes[name]
        plates = {frame.dim: frame.name for frame in node["cond_indep_stack"] if frame.vectorized}
        event_dim = node["fn"].event_dim
        batch_dim = values.dim() - 1 - event_dim
        names, shape = [], [len(values)]
        for position, size in enumerate(values.shape[1 : 1 + batch_dim]):
            dim = position - batch_dim
            if dim in plates or size != 1:
                names.append(plates.get(dim, f"{name}_batch_{position}"))
                shape.append(size)
        array = values.reshape(*shape, *values.shape[1 + batch_dim :])
        return (*names, *self._event_names(name, event_dim)), _array(array)

    def _event_names(self, name: str, event_dim: int) -> tuple[str, ...]:
        names = tuple(self.dims.get(name, [f"{name}_dim_{i}" for i in range(event_dim)]))
        if len(names) != event_dim:
            raise ValueError(f"site '{name}' has {event_dim} event dimensions; dims names {len(names)}: {names}")
        return names

    def _sampled(self, variables: Mapping[str, Variable]) -> xr.Dataset:
        """A dataset of draws: one chain in front."""
        return self._dataset({name: (("chain", "draw", *names), array[None]) for name, (names, array) in variables.items()})

    def _dataset(self, variables: Mapping[str, Variable], labels: Mapping[str, Sequence[Any]] | None = None) -> xr.Dataset:
        data = xr.Dataset({name: (names, array) for name, (names, array) in variables.items()})
        coords = {}
        for dim, size in data.sizes.items():
            coordinate = self.coords.get(str(dim), (labels or {}).get(str(dim), range(size)))
            if len(coordinate) != size:
                raise ValueError(f"coords['{dim}'] has {len(coordinate)} entries; the dimension has size {size}")
            coords[dim] = np.asarray(coordinate)
        return data.assign_coords(coords)


def _array(values: Tensor) -> np.ndarray:
    values = values.detach().cpu()
    return (values.to(torch.int8) if values.dtype == torch.bool else values).numpy()


def _level_type(bounds: Sequence[int]) -> torch.dtype:
    """Smallest signed type for values below all the bounds; ArviZ plots neither bool nor unsigned types."""
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64) if max(bounds) - 1 <= torch.iinfo(dtype).max)


def _value_type(site: DiscreteSite) -> torch.dtype:
    return _level_type([site.low + max(site.cardinalities)]) if site.kind != "one_hot" else torch.int8


def _labels(name: str, shape: Sequence[int]) -> list[str]:
    return [f"{name}[{','.join(map(str, position))}]" if shape else name for position in np.ndindex(*shape)]


def _training(records: Mapping[str, Any]) -> xr.Dataset:
    arrays = {name: np.atleast_2d(_array(v) if torch.is_tensor(v) else np.asarray(v, dtype=float)) for name, v in records.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(len(shape) != 2 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"training records must all have the same dimensions, (step,) or (restart, step); got {shapes}")
    return xr.Dataset({name: (("restart", "step"), array) for name, array in arrays.items()})


def _attributes(guide: Any, draws: _Draws, seed: int | None) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "created_at": datetime.now(UTC).isoformat(),
        "inference_library": "pyro",
        "inference_library_version": pyro.__version__,
        "inference_method": "truncated variational",
        "guide": type(guide).__name__,
        "num_states": draws.part.num_states,
        "point_estimates_only": int(not draws.others),
    }
    with contextlib.suppress(PackageNotFoundError):
        attributes["creation_library_version"] = version("pyro-truncated")
    return attributes if seed is None else {**attributes, "seed": seed}
