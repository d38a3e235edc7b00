"""Truncated posteriors as ArviZ data."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pyro
import torch
import xarray as xr
from pyro.infer.autoguide import AutoGuide
from torch import Tensor

from pyro_truncated.diagnostics.arviz.draws import (
    Draws,
    States,
    conditional_likelihoods,
    draw,
    hidden_entries,
    posterior_draws,
    prior_draws,
    role,
)
from pyro_truncated.diagnostics.truncation.coverage import gather_guide
from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import find_part
from pyro_truncated.program.call import Call
from pyro_truncated.program.sites import DiscreteSite
from pyro_truncated.program.supports import is_discrete
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.arrays import Axis, as_tensors, find_package, labelled_axes, module_number
from pyro_truncated.utils.arviz_compat import find_converter, make_idata
from pyro_truncated.utils.budget import DEFAULT_BUDGET
from pyro_truncated.utils.parameter_store import spare_random_numbers


def variable_name(site: str) -> str:
    """Returns a site's name as files and ArviZ allow it."""
    return f"{site}_site" if site in ("chain", "draw") else site.replace("/", ".")


def event_dims(node: Mapping[str, Any], shape: Sequence[int]) -> int:
    """Event dimensions of a site's values of this shape.

    ``pyro.deterministic`` takes all dimensions for an event's, so leading ones of the plates' sizes are the plates'.
    """
    event_dim: int = node["fn"].event_dim
    if role(node) != "deterministic" or event_dim < len(shape):
        return event_dim
    sizes = {frame.dim: frame.size for frame in node["cond_indep_stack"] if frame.vectorized}
    depth = max((-dim for dim in sizes), default=0)
    is_batch = 0 < depth <= len(shape) and all(shape[depth + dim] == size for dim, size in sizes.items())
    return len(shape) - depth if is_batch else event_dim


def mask_hidden_entries(node: Mapping[str, Any]) -> Tensor:
    """The value of an observed site, NaN where a mask hides it."""
    value: Tensor = node["value"]
    hidden = hidden_entries(node)
    if hidden is None:
        return value
    value = value if value.is_floating_point() else value.double()
    return torch.where(hidden, torch.nan, value)


def observed_sites(nodes: Mapping[str, Any], argument: Tensor) -> list[str]:
    """The sites of which an argument is the observed value."""
    data = {name: node["value"] for name, node in nodes.items() if role(node) == "data" and torch.is_tensor(node["value"])}
    alike = {name: value for name, value in data.items() if value.shape == argument.shape}
    return [
        name
        for name, value in alike.items()
        if value.data_ptr() == argument.data_ptr() or torch.equal(value.nan_to_num(), argument.to(value).nan_to_num())
    ]


def as_array(values: Tensor) -> np.ndarray:
    """Values on the CPU; Boolean ones as integers, ``bfloat16`` in single precision."""
    types = {torch.bool: torch.int8, torch.bfloat16: torch.float32}
    return values.detach().cpu().to(types.get(values.dtype, values.dtype)).numpy()


def level_type(bounds: Sequence[int]) -> torch.dtype:
    """The smallest signed type for values below all bounds."""
    return next(dtype for dtype in (torch.int8, torch.int16, torch.int32, torch.int64) if max(bounds) - 1 <= torch.iinfo(dtype).max)


def training_dataset(records: Mapping[str, Any]) -> xr.Dataset:
    """Training records, ``(steps,)`` or ``(restarts, steps)``, as a dataset."""
    arrays = {name: np.atleast_2d(as_array(v) if torch.is_tensor(v) else np.asarray(v, dtype=float)) for name, v in records.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    if any(len(shape) != 2 for shape in shapes.values()) or len(set(shapes.values())) > 1:
        raise ValueError(f"training records must all have the same dimensions, (step,) or (restart, step); got {shapes}")
    return xr.Dataset({name: (("restart", "step"), array) for name, array in arrays.items()})


@dataclasses.dataclass(frozen=True)
class LabelledTensor:
    """A tensor made of a DataFrame, Series or DataArray, with its labels."""

    value: Tensor  # its numbers
    axes: tuple[Axis, ...]  # the names and labels of its dimensions


@dataclasses.dataclass(frozen=True)
class DataLabels:
    """Names of dimensions and coordinates that data bring."""

    plates: dict[str, str] = dataclasses.field(default_factory=dict)  # names of dimensions by plate
    dims: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # names of event dimensions by site
    # Names of other dimensions, by argument that is not observed.
    arguments: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    coords: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)  # labels by dimension


def without_labels(call: Call, guide: Any) -> tuple[Call, tuple[LabelledTensor, ...]]:
    """The call with tensors in the place of labelled arrays, and these.

    Programs that read columns by name keep the arrays.
    """
    like = next((number for part in (call.model, guide) if (number := module_number(part)) is not None), torch.empty(0))
    tensors: list[LabelledTensor] = []
    try:
        bare_args = tuple(_bare(value, like, tensors) for value in call.args)
        bare_call = Call(call.model, bare_args, {name: _bare(value, like, tensors) for name, value in call.kwargs.items()})
    except TypeError:
        if _runs(call):
            return call, ()
        raise
    if tensors and not _runs(bare_call) and _runs(call):
        return call, ()
    return bare_call, tuple(tensors)


def _runs(call: Call) -> bool:
    with contextlib.suppress(Exception), torch.no_grad(), spare_random_numbers():
        call.run({})
        return True
    return False


def _bare(value: Any, like: Tensor, tensors: list[LabelledTensor]) -> Any:
    if find_package(value):
        tensors.append(LabelledTensor(as_tensors(value, like), labelled_axes(value)))
        return tensors[-1].value
    if type(value) in (list, tuple) and any(map(find_package, value)):
        return type(value)(_bare(part, like, tensors) for part in value)
    if isinstance(value, Mapping) and any(map(find_package, value.values())):
        return {name: _bare(part, like, tensors) for name, part in value.items()}
    return value


class DimensionNamer:
    """Finds which plates and events the axes of labelled data are.

    No dimension of the data may take ``reserved_names``. Dimensions that the user gives labels for keep the names they have without those
    of the data.
    """

    def __init__(
        self,
        draws: Draws,
        reserved_names: set[str],
        default_plate: Callable[[str], str],
        dims: Mapping[str, Sequence[str]],
        labelled_dims: Collection[str],
    ) -> None:
        self.draws, self.default_plate, self.dims, self.labelled_dims = draws, default_plate, dims, labelled_dims
        frames = {frame.name for node in draws.nodes.values() for frame in node["cond_indep_stack"]}
        self.used_names = reserved_names | set(map(variable_name, draws.nodes)) | set(map(default_plate, frames))
        self.labels = DataLabels()

    def label(self, tensors: tuple[LabelledTensor, ...], arguments: Mapping[str, Any]) -> DataLabels:
        """Names the dimensions of observed sites and unobserved arguments."""
        self.used_names |= set(map(variable_name, arguments))
        for tensor in tensors:
            sites = observed_sites(self.draws.nodes, tensor.value)
            for name in sites:
                self._add_site(name, tensor.axes)
            if not sites:
                self._add_argument(next((name for name, value in arguments.items() if value is tensor.value), None), tensor)
        return self.labels

    def _add_site(self, name: str, axes: tuple[Axis, ...]) -> None:
        node = self.draws.nodes[name]
        num_batch = len(axes) - node["fn"].event_dim
        plates = {frame.dim: frame.name for frame in node["cond_indep_stack"] if frame.vectorized}
        for position, axis in enumerate(axes[: max(num_batch, 0)]):
            if position - num_batch in plates:
                self._add_plate(plates[position - num_batch], axis)
        if num_batch >= 0:
            self._add_rest(self.labels.dims, name, axes[num_batch:])

    def _add_argument(self, name: str | None, tensor: LabelledTensor) -> None:
        """Its leading dimensions are the data plates' where the sizes are."""
        sizes = tuple(self.draws.plates.values())
        num_leading = len(sizes) if tuple(tensor.value.shape[: len(sizes)]) == sizes and name not in self.dims else 0
        for plate, axis in zip(self.draws.plates, tensor.axes[:num_leading], strict=False):
            self._add_plate(plate, axis)
        if name is not None:
            self._add_rest(self.labels.arguments, name, tensor.axes[num_leading:])

    def _add_plate(self, plate: str, axis: Axis) -> None:
        if plate not in self.labels.plates:
            self.labels.plates[plate] = self._name(axis, self.default_plate(plate))
        self._label(self.labels.plates[plate], axis)

    def _add_rest(self, names: dict[str, tuple[str, ...]], owner: str, axes: tuple[Axis, ...]) -> None:
        if owner not in self.dims:
            names[owner] = tuple(self._name(axis, f"{variable_name(owner)}_dim_{position}") for position, axis in enumerate(axes))
        for dim, axis in zip(self.dims.get(owner, names.get(owner, ())), axes, strict=False):
            self._label(dim, axis)

    def _name(self, axis: Axis, default: str) -> str:
        """Returns the axis' own name, unless it is taken."""
        own = None if axis.name is None else axis.name.replace("/", ".")
        if own is None or default in self.labelled_dims:
            return default
        if own != default and own in self.used_names:
            # Data may have labelled another event's dimension of this name alike, such as genes in two tables.
            events = {name for names in (*self.labels.dims.values(), *self.labels.arguments.values()) for name in names}
            if own not in events or axis.labels is None or not np.array_equal(self.labels.coords.get(own, ()), axis.labels):
                return default
        self.used_names.add(own)
        return own

    def _label(self, dim: str, axis: Axis) -> None:
        if axis.labels is not None:
            self.labels.coords.setdefault(dim, axis.labels)


Dims = Mapping[str, Sequence[str]]
Coords = Mapping[str, Sequence[Any]]
Variable = tuple[tuple[str, ...], np.ndarray]

STATE, LATENT = "state", "latent"
_VARIABLES = {"lp", "log_q", "log_weight", "states", "weights", "free_energy", "effective_states", "support_mass_bound", "activation_prob"}


class Writer:
    """Turns draws into datasets with named dimensions.

    ``dims`` names event dimensions by site, and all dimensions by argument of the model. What it and ``coords`` say comes before the labels
    of arguments. A single array takes at most ``memory_budget`` bytes. Draws are dealt to chains one after the other.
    """

    def __init__(
        self,
        draws: Draws,
        dims: Dims,
        coords: Coords,
        memory_budget: int,
        arguments: Mapping[str, Any],
        num_chains: int = 1,
        labelled_tensors: tuple[LabelledTensor, ...] = (),
    ) -> None:
        self.draws, self.dims, self.memory_budget = draws, dims, memory_budget
        self.nodes, self.num_chains = draws.nodes, num_chains
        self.reserved_names = {"chain", "draw"} | ({STATE, LATENT} if draws.states is not None else set())
        self.labels = DataLabels()
        self.labels = DimensionNamer(draws, {STATE, LATENT} | self.reserved_names | _VARIABLES, self.dimension, dims, set(coords)).label(
            labelled_tensors, arguments
        )
        self.coords = {**self.labels.coords, **coords}
        self.datum, self.sizes = tuple(map(self.dimension, draws.plates)), tuple(draws.plates.values())
        unknown = set(dims) - set(self.nodes) - set(arguments)
        if unknown:
            raise ValueError(f"dims names the sites {sorted(unknown)}, which the model does not have")

    def dimension(self, plate: str) -> str:
        """Names the dimension of a plate, after the data if possible."""
        if plate in self.labels.plates:
            return self.labels.plates[plate]
        return f"{plate}_plate" if plate in self.reserved_names else variable_name(plate)

    def posterior(self) -> xr.Dataset:
        """Returns draws of index, discrete sites, other latents and computed values."""
        variables: dict[str, Variable] = {}
        too_large: list[str] = []
        if self.draws.states is not None:
            self._add_states(self.draws.states, variables, too_large)
        for name, values in {**self.draws.latents, **self.draws.deterministic}.items():
            if values.numel() * values.element_size() > self.memory_budget:
                too_large.append(name)
            else:
                variables[name] = self._site(name, self._as_integers(name, values))
        if not too_large:
            return self._sample(variables)
        hint = f"{', '.join(too_large)}: over the memory budget"
        if self.draws.states is not None:
            hint += f"; {self.draws.states.part.index_name} indexes the state dimension of truncated_posterior"
        return self._sample(variables).assign_attrs({"omitted": hint})

    def _add_states(self, states: States, variables: dict[str, Variable], too_large: list[str]) -> None:
        variables[states.part.index_name] = self._per_datum(states, states.index.to(torch.int32), start=1)
        for name, site in states.part.layout.sites.items():
            if states.index.numel() * site.num_latents > self.memory_budget:
                too_large.append(name)
            else:
                variables[name] = self._discrete_draws(states, name, site)

    def _discrete_draws(self, states: States, name: str, site: DiscreteSite) -> Variable:
        layout = states.part.layout
        rows = torch.arange(len(states.population), device=states.index.device)
        words = states.population.words[rows, states.index]
        values = layout.split(layout.space.unpack(words, level_type(layout.space.cardinalities)))[name]
        plates = {frame.dim: self.dimension(frame.name) for frame in site.frames}
        names = (*(plates[dim] for dim, _ in site.plates), *self._event_names(name, values.dim() - 2 - len(site.plates)))
        dtype = torch.int8 if site.kind == "one_hot" else level_type([site.low + max(site.cardinalities)])
        return self._per_datum(states, values.to(dtype), names, start=1)

    def sample_stats(self) -> xr.Dataset:
        """Log densities of each draw."""
        lp, log_q = self.draws.lp, self.draws.log_q
        columns = {"lp": lp, "log_q": log_q, "log_weight": lp - log_q}
        return self._sample({name: ((), as_array(value)) for name, value in columns.items()})

    def log_likelihood(self) -> xr.Dataset:
        """Returns log likelihoods of data points, or of observations given latents."""
        variables = {}
        for name, values in self.draws.log_likelihood.items():
            if name == self.draws.joint:
                variables[name] = (self.datum, as_array(values.reshape(len(values), *self.sizes)))
            else:
                variables[name] = self._site(name, values, event_dim=0)
        return self._sample(variables).assign_attrs(
            {"conditional_on": ", ".join(sorted(self.draws.conditional_on))} if self.draws.conditional_on else {}
        )

    def log_likelihood_conditional(self, values: Mapping[str, Tensor]) -> xr.Dataset:
        """Log likelihoods of observed sites given everything that was drawn."""
        return self._sample({name: self._site(name, draws, event_dim=0) for name, draws in values.items()})

    def log_prior(self) -> xr.Dataset:
        """Log prior densities of the global latents."""
        return self._sample({name: ((), as_array(values)) for name, values in self.draws.log_prior.items()})

    def sites(self, values: Mapping[str, Tensor]) -> xr.Dataset:
        """Draws ``(draws, *shape)`` of sites."""
        return self._sample({name: self._site(name, self._as_integers(name, draws)) for name, draws in values.items()})

    def _as_integers(self, name: str, values: Tensor) -> Tensor:
        """A discrete site's values as integers, of latents of smallest type."""
        node: Any = self.nodes[name]
        if role(node) in ("deterministic", "factor") or not is_discrete(node["fn"]) or not values.numel():
            return values
        is_latent = role(node) == "latent"
        # Data may be anything: some values may be hidden, or lie between whole numbers where nobody validates them.
        is_whole = is_latent or (
            hidden_entries(node) is None and all(bool((v - v.round() == 0).all()) for v in (values.double(), node["value"].double()))
        )
        if is_whole:
            return values.to(level_type([int(values.max()) + 1, -int(values.min()), 1 if is_latent else 2**31]))
        # Beside data that are NaN where hidden, and so are floats, integers would be counted in bins that reach to NaN.
        return values if values.is_floating_point() else values.double()

    def observed_data(self) -> xr.Dataset:
        """Returns values of the observed sites, NaN where a mask hides them."""
        variables = {}
        for name, node in self.nodes.items():
            if role(node) == "data" and torch.is_tensor(node["value"]):
                names, array = self._site(name, self._as_integers(name, mask_hidden_entries(node).unsqueeze(0)))
                variables[name] = (names, array[0])
        return self._dataset(variables)

    def constant_data(self, arguments: Mapping[str, Any]) -> xr.Dataset:
        """Tensors among the model's arguments that are not observed: covariates, masks, sizes."""
        variables = {}
        for name, value in arguments.items():
            if torch.is_tensor(value) and not observed_sites(self.nodes, value):
                variables[name] = (self._argument_names(name, value), as_array(value))
        return self._dataset(variables)

    def _argument_names(self, name: str, value: Tensor) -> tuple[str, ...]:
        """Leading dimensions of the sizes of the data plates are theirs."""
        if name in self.dims:
            if len(self.dims[name]) != value.dim():
                raise ValueError(f"argument '{name}' has {value.dim()} dimensions; dims names {len(self.dims[name])}: {self.dims[name]}")
            return tuple(self.dims[name])
        plates = self.datum if self.datum and tuple(value.shape[: len(self.sizes)]) == self.sizes else ()
        rest = (f"{name}_dim_{position}" for position in range(value.dim() - len(plates)))
        return (*plates, *self.labels.arguments.get(name, rest))

    def truncated_posterior(self, states: States) -> xr.Dataset:
        """The populations and exact expectations under them."""
        population, layout = states.population, states.part.layout
        variables: dict[str, Variable] = {}
        for name, values, inner in (
            ("weights", population.weights(), (STATE,)),
            ("free_energy", population.free_energy(), ()),
            ("effective_states", population.effective_states(), ()),
            ("support_mass_bound", states.covered_mass, ()),
            ("activation_prob", population.marginals(), (LATENT,)),
        ):
            variables[name] = self._per_datum(states, values, inner)
        dtype = level_type([site.low + v for site in layout.sites.values() for v in site.cardinalities])
        size = population.log_joint.numel() * layout.space.num_latents * dtype.itemsize
        attrs = {}
        if size <= self.memory_budget:
            low = torch.tensor([site.low for site in layout.sites.values() for _ in range(site.num_latents)], dtype=dtype)
            variables["states"] = self._per_datum(states, population.states(dtype) + low.to(population.words.device), (STATE, LATENT))
        else:
            attrs["omitted"] = f"states: {size} bytes are over the memory budget; see guide.states()"
        entries = [(name, position) for name, site in layout.sites.items() for position in np.ndindex(*site.shape)]
        labels = [f"{name}[{','.join(map(str, position))}]" if position else name for name, position in entries]
        return self._dataset(variables, {LATENT: labels}).assign_attrs(attrs)

    def _per_datum(self, states: States, values: Tensor, inner: tuple[str, ...] = (), *, start: int = 0) -> Variable:
        """Values ``(N, ...)``, or draws in front, with one dimension per data plate."""
        shape = (*values.shape[:start], *states.log_joint.sizes, *values.shape[start + 1 :])
        return (*map(self.dimension, states.part.layout.plates), *inner), as_array(values.reshape(shape))

    def _site(self, name: str, values: Tensor, event_dim: int | None = None) -> Variable:
        """Draws ``(draws, *batch, *event)``; batch dimensions are named after plates."""
        node: Any = self.nodes[name]
        plates = {frame.dim: self.dimension(frame.name) for frame in node["cond_indep_stack"] if frame.vectorized}
        event_dim = event_dims(node, values.shape[1:]) if event_dim is None else event_dim
        batch_dim = values.dim() - 1 - event_dim
        names, shape = [], [len(values)]
        for position, size in enumerate(values.shape[1 : 1 + batch_dim]):
            dim = position - batch_dim
            if dim in plates or size != 1:
                names.append(plates.get(dim, f"{variable_name(name)}_batch_{position}"))
                shape.append(size)
        array = values.reshape(*shape, *values.shape[1 + batch_dim :])
        return (*names, *self._event_names(name, event_dim)), as_array(array)

    def _event_names(self, name: str, event_dim: int) -> tuple[str, ...]:
        default = self.labels.dims.get(name, [f"{variable_name(name)}_dim_{i}" for i in range(event_dim)])
        names = tuple(self.dims.get(name, default))
        if len(names) != event_dim:
            raise ValueError(f"site '{name}' has {event_dim} event dimensions; dims names {len(names)}: {names}")
        return names

    def _sample(self, variables: Mapping[str, Variable]) -> xr.Dataset:
        """A dataset of draws, dealt to the chains."""
        chains = self.num_chains
        return self._dataset(
            {
                name: (("chain", "draw", *names), array.reshape(chains, len(array) // chains, *array.shape[1:]))
                for name, (names, array) in variables.items()
            }
        )

    def _dataset(self, variables: Mapping[str, Variable], labels: Mapping[str, Sequence[Any]] | None = None) -> xr.Dataset:
        for name, (names, _) in variables.items():
            if len(set(names)) < len(names):
                raise ValueError(f"dims must give all dimensions of '{name}' different names; got {names}")
        data = xr.Dataset({variable_name(name): (names, array) for name, (names, array) in variables.items()})
        coords = {}
        for dim, size in data.sizes.items():
            coordinate = self.coords.get(str(dim), (labels or {}).get(str(dim), range(size)))
            if len(coordinate) != size:
                raise ValueError(f"coords['{dim}'] has {len(coordinate)} entries; the dimension has size {size}")
            coords[dim] = np.asarray(coordinate)
        return data.assign_coords(coords)


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
    seed = None if seed is None else check_count("seed", seed, 0)
    memory_budget = check_count("memory_budget", memory_budget)
    num_chains, num_predictive = _counts(num_samples, num_chains, num_predictive, several)
    settings = _Settings(
        num_samples, num_chains, num_predictive, dims, coords, seed, training, checks, stores, conditional_log_likelihood, memory_budget
    )
    if find_part(args, kwargs) is None:
        return _convert(model, guide, args, kwargs, settings)
    # The other processes draw nothing meanwhile.
    with spare_random_numbers():
        with collectives.propagate_errors():
            answers = [gather_guide(one, args, kwargs) for one in (guide if several else [guide])]
        every = [one for one in answers if one is not None]
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
    check_count("num_samples", num_samples)
    predictive = num_samples if num_predictive is None else check_count("num_predictive", num_predictive, 0)
    if num_chains is not None and check_count("num_chains", num_chains) != 1 and several:
        raise ValueError(f"num_chains must be 1 for several guides, each of which is a chain; got {num_chains}")
    return num_chains or (1 if several else 4), min(predictive, num_samples)


def _convert(model: Any, guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], settings: _Settings) -> Any:
    owner = model if find_converter(model) else getattr(guide, "__self__", None)
    if converter := find_converter(owner):
        # Without a guide the first argument of the model stands in its place.
        data = args if guide is None or getattr(guide, "__self__", None) is owner else (guide, *args)
        if settings_without_use := [
            name for name in ("training", "checks", "stores", "dims", "coords") if getattr(settings, name) is not None
        ]:
            raise TypeError(
                f"{type(owner).__name__} converts itself and takes num_samples, num_chains and seed only; got also {settings_without_use}"
            )
        counts = {"num_samples": settings.num_samples, "num_chains": settings.num_chains}
        return converter(owner, *data, **counts, seed=settings.seed, **kwargs)
    several = isinstance(guide, list | tuple)
    guides: list[Any] = list(guide) if several else [guide]
    models: list[Any] = list(model) if isinstance(model, list | tuple) else [model] * len(guides)
    _check_chains(models, guides, settings)
    call, labelled_tensors = without_labels(Call(models[0], args, kwargs), guides[0])
    with _seed(settings.seed), torch.no_grad():
        chains = []
        for position, (one, its_model) in enumerate(zip(guides, models, strict=True)):
            stores = settings.stores
            with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
                chains.append(_build_groups(call.with_program(its_model), one, labelled_tensors, settings))
    datasets = _side_by_side(chains) if several else chains[0]
    _add_records(datasets, settings)
    attrs = _common_attributes(guides, datasets, settings.seed)
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
    """Adds checks and training, which are not drawn."""
    if unknown := set(settings.coords or {}).difference(*(data.dims for data in datasets.values())):
        raise ValueError(f"coords names the dimensions {sorted(unknown)}, which the data do not have")
    if settings.checks is not None:
        if "truncated_posterior" not in datasets:
            raise ValueError("checks needs a guide with an AutoTruncated part, whose posterior is truncated; leave checks out")
        exact = datasets["truncated_posterior"]
        datasets["truncated_posterior"] = exact.merge(_label_like(settings.checks.arrays(), exact))
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


def _build_groups(call: Call, guide: Any, labelled_tensors: tuple[LabelledTensor, ...], settings: _Settings) -> dict[str, xr.Dataset]:
    """The groups of one guide, without empty ones."""
    draws = draw(call, guide, settings.num_samples * settings.num_chains)
    arguments = _arguments(call)
    writer = Writer(
        draws, settings.dims or {}, settings.coords or {}, settings.memory_budget, arguments, settings.num_chains, labelled_tensors
    )
    datasets = {"posterior": writer.posterior(), "sample_stats": writer.sample_stats(), "log_likelihood": writer.log_likelihood()}
    if settings.conditional_log_likelihood:
        datasets["log_likelihood_conditional"] = writer.log_likelihood_conditional(conditional_likelihoods(call, draws))
    datasets["log_prior"] = writer.log_prior()
    if settings.num_predictive:
        datasets |= _predictive(call, draws, writer, settings)
    datasets["observed_data"] = writer.observed_data()
    datasets["constant_data"] = writer.constant_data(arguments)
    if draws.states is not None:
        size = draws.states.part.space.size
        # Of a space beyond the integers that files hold, the size does not matter.
        limits = {"num_states": draws.states.part.num_states} | ({"num_joint_states": size} if size < 2**31 else {})
        datasets["truncated_posterior"] = writer.truncated_posterior(draws.states).assign_attrs(limits)
    datasets = _drop_unobserved_data(datasets, draws, writer)
    # Whether some global latent has a posterior that is no point.
    global_draws = [values for name, values in draws.latents.items() if name not in draws.local]
    is_drawn = draws.states is not None and not draws.states.part.layout.plates
    is_drawn = is_drawn or any(len(values) == 1 or bool((values != values[:1]).any()) for values in global_draws)
    attrs = {
        "point_estimates_only": int(not is_drawn),
        "latents_of_data_points": ", ".join(sorted(map(variable_name, draws.local))),
    }
    return {name: data.assign_attrs(attrs) for name, data in datasets.items() if data.sizes or data.data_vars}


def _drop_unobserved_data(datasets: dict[str, xr.Dataset], draws: Draws, writer: Writer) -> dict[str, xr.Dataset]:
    """Drops data points without observations from the groups on data."""
    is_observed = draws.observed_rows()
    if is_observed is None:
        return datasets
    (plate,) = writer.datum
    rows = {plate: is_observed.nonzero().squeeze(-1).numpy()}
    observed_data = {name: data.isel(rows) if name in _ON_DATA and plate in data.dims else data for name, data in datasets.items()}
    return _count(observed_data, [variable_name(name) for name, node in draws.nodes.items() if is_discrete(node["fn"])])


def _count(datasets: dict[str, xr.Dataset], names: Sequence[str]) -> dict[str, xr.Dataset]:
    """Returns counts as integers once hidden entries are gone."""
    data = datasets["observed_data"]
    whole = [name for name in names if name in data and data[name].dtype.kind == "f" and bool((data[name] == data[name].round()).all())]
    return {
        group: values.assign({name: values[name].astype(np.int32) for name in whole if name in values}) if group in _ON_DATA[:4] else values
        for group, values in datasets.items()
    }


def _predictive(call: Call, draws: Draws, writer: Writer, settings: _Settings) -> dict[str, xr.Dataset]:
    chains, num_predictive = settings.num_chains, settings.num_predictive
    # As many as fit into the budget with the largest site.
    largest = max((torch.as_tensor(node["value"]).numel() for node in draws.nodes.values()), default=1)
    affordable = min(num_predictive * chains, settings.memory_budget // (4 * max(1, largest)))
    count = max(1, affordable // chains)
    positions = [chain * settings.num_samples + position for chain in range(chains) for position in range(count)]
    try:
        latents, observed = prior_draws(call, len(positions))
        results = {
            "prior": latents,
            "prior_predictive": observed,
            "posterior_predictive": posterior_draws(call, draws, positions, new_latents=False),
        }
        if draws.local:
            results["marginal_predictive"] = posterior_draws(call, draws, positions, new_latents=True)
    except NotImplementedError as error:
        # Those of torch say nothing.
        error.add_note("Predictive groups draw from all distributions of the model; num_predictive=0 leaves these groups out.")
        raise
    note = {"omitted": f"all but {count} of {num_predictive} draws per chain: over the memory budget"} if count < num_predictive else {}
    return {name: writer.sites(values).assign_attrs(note) for name, values in results.items()}


def _arguments(call: Call) -> dict[str, Any]:
    program = call.model.forward if isinstance(call.model, torch.nn.Module) else call.model
    try:
        return dict(inspect.signature(program).bind(*call.args, **call.kwargs).arguments)
    except (TypeError, ValueError):
        return {f"argument_{position}": value for position, value in enumerate(call.args)} | dict(call.kwargs)


def _side_by_side(chains: list[dict[str, xr.Dataset]]) -> dict[str, xr.Dataset]:
    """Guides side by side along ``chain``."""
    names = [name for name in chains[0] if all(name in chain for chain in chains)]
    groups = {}
    for name in names:
        parts = [chain[name] for chain in chains]
        if len({tuple(part.sizes.items()) for part in parts}) > 1:
            raise ValueError(f"the guides do not go together: {name} must have equal sizes; got {[dict(part.sizes) for part in parts]}")
        if name in ("observed_data", "constant_data"):
            groups[name] = parts[0]
            continue
        numbers = xr.DataArray(np.arange(len(parts)), dims="chain", name="chain")
        if name in ("posterior", "sample_stats", "log_prior", "prior", *_ON_DATA[1:]):
            parts = [part.assign_coords(chain=[number]) for number, part in enumerate(parts)]
            groups[name] = xr.concat(parts, dim="chain", combine_attrs="override")
        else:
            groups[name] = xr.concat(parts, dim=numbers, combine_attrs="override")
    return groups


def _label_like(arrays: Mapping[str, np.ndarray], data: xr.Dataset) -> xr.Dataset:
    """Names arrays ``(N,)`` like the free energy of the data points."""
    like = data["free_energy"]
    for name, values in arrays.items():
        if values.size != like.size:
            raise ValueError(f"checks are of {values.size} data points ({name}); these are {like.size}")
    return xr.Dataset({name: (like.dims, values.reshape(like.shape)) for name, values in arrays.items()})


def _common_attributes(guides: list[Any], datasets: Mapping[str, xr.Dataset], seed: int | None) -> dict[str, Any]:
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
