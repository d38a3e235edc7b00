"""Names and labels that come with the data, for dimensions and coordinates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.diagnostics.arviz.drawn import Draws
from pyro_truncated.diagnostics.arviz.roles import is_data
from pyro_truncated.diagnostics.arviz.site_values import is_same, variable_name
from pyro_truncated.utils.arrays import Axis, as_tensors, axes_of, is_labelled, number_of


@dataclasses.dataclass(frozen=True)
class LabelledTensor:
    """A tensor made of a DataFrame, Series or DataArray, with its labels.

    Attributes:
        value: its numbers.
        axes: the names and labels of its dimensions.
    """

    value: Tensor
    axes: tuple[Axis, ...]


@dataclasses.dataclass(frozen=True)
class DataLabels:
    """Names of dimensions and coordinates that data bring.

    Attributes:
        plates: names of dimensions by plate.
        dims: names of event dimensions by site.
        arguments: names of dimensions, other than those of data plates, by argument that is not observed.
        coords: labels by dimension.
    """

    plates: dict[str, str] = dataclasses.field(default_factory=dict)
    dims: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    arguments: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    coords: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def without_labels(
    model: Callable[..., Any], guide: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[LabelledTensor, ...]]:
    """The arguments with tensors in the place of labelled arrays, and these.

    Floating point numbers take the type of the model's, else the guide's, else torch's default; other arguments are as they were.
    """
    like = next((number for part in (model, guide) if (number := number_of(part)) is not None), torch.empty(0))
    found: list[LabelledTensor] = []
    taken = tuple(_bare(value, like, found) for value in args)
    named = {name: _bare(value, like, found) for name, value in kwargs.items()}
    return taken, named, tuple(found)


def _bare(value: Any, like: Tensor, found: list[LabelledTensor]) -> Any:
    if is_labelled(value):
        found.append(LabelledTensor(as_tensors(value, like), axes_of(value)))
        return found[-1].value
    if type(value) in (list, tuple) and any(map(is_labelled, value)):
        return type(value)(_bare(part, like, found) for part in value)
    if isinstance(value, Mapping) and any(map(is_labelled, value.values())):
        return {name: _bare(part, like, found) for name, part in value.items()}
    return value


class Naming:
    """Finds which plates and events the axes of labelled data are.

    Args:
        draws: with the sites of the model.
        reserved: names of dimensions and variables that no dimension of the data may take.
        default_plate: the name of a plate's dimension where data bring none.
        dims: names that the user gives, by site and argument.
        labelled: dimensions that the user gives labels for: they keep the names they have without those of the data.
    """

    def __init__(
        self,
        draws: Draws,
        reserved: set[str],
        default_plate: Callable[[str], str],
        dims: Mapping[str, Sequence[str]],
        labelled: Collection[str],
    ) -> None:
        self.draws, self.default_plate, self.dims, self.labelled = draws, default_plate, dims, labelled
        frames = {frame.name for node in draws.nodes.values() for frame in node["cond_indep_stack"]}
        self.used = reserved | set(map(variable_name, draws.nodes)) | set(map(default_plate, frames))
        self.labels = DataLabels()

    def of(self, tensors: tuple[LabelledTensor, ...], arguments: Mapping[str, Any]) -> DataLabels:
        """Names the dimensions of observed sites and unobserved arguments."""
        self.used |= set(map(variable_name, arguments))
        for tensor in tensors:
            sites = [name for name, node in self.draws.nodes.items() if _holds(node, tensor.value)]
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
        leading = len(sizes) if tuple(tensor.value.shape[: len(sizes)]) == sizes and name not in self.dims else 0
        for plate, axis in zip(self.draws.plates, tensor.axes[:leading], strict=False):
            self._add_plate(plate, axis)
        if name is not None:
            self._add_rest(self.labels.arguments, name, tensor.axes[leading:])

    def _add_plate(self, plate: str, axis: Axis) -> None:
        if plate not in self.labels.plates:
            self.labels.plates[plate] = self._name(axis, self.default_plate(plate))
        self._label(self.labels.plates[plate], axis)

    def _add_rest(self, names: dict[str, tuple[str, ...]], of: str, axes: tuple[Axis, ...]) -> None:
        if of not in self.dims:
            names[of] = tuple(self._name(axis, f"{variable_name(of)}_dim_{position}") for position, axis in enumerate(axes))
        for dim, axis in zip(self.dims.get(of, names.get(of, ())), axes, strict=False):
            self._label(dim, axis)

    def _name(self, axis: Axis, default: str) -> str:
        """Returns the axis' own name, unless it is taken."""
        own = None if axis.name is None else axis.name.replace("/", ".")
        if own is None or default in self.labelled or (own != default and own in self.used and not self._is_known(own, axis)):
            return default
        self.used.add(own)
        return own

    def _is_known(self, dim: str, axis: Axis) -> bool:
        """Whether data have labelled another event's dimension of this name alike.

        An example are genes in two tables.
        """
        events = {name for names in (*self.labels.dims.values(), *self.labels.arguments.values()) for name in names}
        return dim in events and axis.labels is not None and np.array_equal(self.labels.coords.get(dim, ()), axis.labels)

    def _label(self, dim: str, axis: Axis) -> None:
        if axis.labels is not None:
            self.labels.coords.setdefault(dim, axis.labels)


def _holds(node: Any, value: Tensor) -> bool:
    return is_data(node) and torch.is_tensor(node["value"]) and is_same(node["value"], value)
