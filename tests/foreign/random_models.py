"""Random models: site kinds, chains of dependence, plates, masks, scales, missing data, continuous latents, minibatches, styles.

A :class:`Program` is a list of statements that :meth:`Program.run` interprets as a Pyro model; :mod:`tests.foreign.random_draws`
makes one of a seed. To extend it, add a kind to :mod:`tests.foreign.random_sites`, or a layout to :data:`LAYOUTS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

from tests.foreign import Foreign
from tests.foreign.random_sites import DISCRETE, OBSERVED, SPELLED_OUT, UNBOUNDED, VECTORS, Statement, summary

Known = dict[str, tuple[Statement, Tensor]]
_INSIDE = {"outside": (), "data": ("data",), "inner": ("data", "inner")}


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where statements may lie (``"data"``: in the data plate, ``"inner"``: in a second plate too, ``"outside"``), and what follows.

    ``data_plates`` are those whose members have independent posteriors wherever statements lie; ``plates`` gives the dimension of each.
    """

    discrete: tuple[str, ...]
    observed: tuple[str, ...]
    data_plates: tuple[str, ...]
    plates: Mapping[str, int]
    steps: int = 1


LAYOUTS = {
    "plate": Layout(("data",), ("data",), ("data",), {"data": -1}),
    "inner_left": Layout(("data", "inner"), ("data", "inner"), ("data",), {"data": -1, "inner": -2}),
    "inner_right": Layout(("data", "inner"), ("data", "inner"), ("data",), {"data": -2, "inner": -1}),
    "two_plates": Layout(("inner",), ("inner",), ("data", "inner"), {"data": -2, "inner": -1}),
    "outside": Layout(("outside",), ("data",), (), {"data": -1}),
    "mixed": Layout(("outside", "data"), ("data",), (), {"data": -1}),
    "total": Layout(("data",), ("data", "outside"), (), {"data": -1}),
    "sequential": Layout(("outside",), ("outside",), (), {}, steps=2),
    "none": Layout(("outside",), ("outside",), (), {}),
}
INNER = 2


@dataclasses.dataclass(frozen=True)
class Program:
    """A random model: its statements and what is done to it as a whole.

    Attributes:
        layout: where statements lie.
        num_data: members of the data plate in one run.
        discrete: statements of discrete latents.
        observed: statements of observations.
        continuous: a continuous latent: ``"global"``; ``"local"`` to a data point; a ``"slab"`` whose mean depends on the states;
            ``"collapsed"``: a slab with its exact conditional.
        part: name of the automatic guide of that latent.
        scale: of the whole model.
        subsample: positions of the data points that are given to the data plate, of two more.
        is_minibatch: whether the model draws them itself.
        has_factor: whether there is a factor at the first observation.
        style: how values are used: ``"left"``, with shapes that have no room for more dimensions; ``"branch"``, by Python's ``if``.
        vectorize: the guide's option.
        search: name of the search.
        is_spelled_out: whether all densities are those of stock distributions.
        seen: the data points of every run.
    """

    layout: Layout
    num_data: int
    discrete: tuple[Statement, ...]
    observed: tuple[Statement, ...]
    continuous: str | None = None
    part: str = "AutoDelta"
    scale: float = 1.0
    subsample: Tensor | None = None
    is_minibatch: bool = False
    has_factor: bool = False
    style: str | None = None
    vectorize: bool | None = None
    search: str = "exhaustive"
    is_spelled_out: bool = False
    seen: list[Tensor] = dataclasses.field(default_factory=list)

    def foreign(self) -> Foreign:
        """The model as the harness takes it."""
        spelled_out = dataclasses.replace(self, is_spelled_out=True, style="branch" if self.style == "branch" else None)
        model, reference = (
            poutine.scale(program.run, scale=self.scale) if self.scale != 1 else program.run for program in (self, spelled_out)
        )
        bounds = {s.name + suffix: s.size for s in self.discrete if s.kind in UNBOUNDED for suffix in self._suffixes()}
        options = {"vectorize": self.vectorize, "conditional": self._conditional if self.continuous == "collapsed" else None}
        return Foreign(
            model,
            plates=self.data_plates(),
            max_count=bounds or None,
            options=options,
            reference=reference,
            indices=self.subsample,
            new=(),
        )

    def data_plates(self) -> tuple[str, ...]:
        """Plates that hold all that there is."""
        places = {statement.place for statement in (*self.discrete, *self.observed)}
        shared = () if "outside" in places else ("data",) if "data" in places else ("data", "inner")
        return tuple(name for name in shared if name in self.layout.plates)

    def _suffixes(self) -> list[str]:
        return [f"_{step}" for step in range(self.layout.steps)] if self.layout.steps > 1 else [""]

    def run(self) -> None:
        """Runs the statements in order; sites know of each other by one number per draw."""
        slope, width = self._parameters()
        is_part = self.subsample is not None or self.is_minibatch
        rows = {"size": self.num_data + 2 * is_part, "subsample": self.subsample, "subsample_size": self.num_data}
        sizes: dict[str, Any] = {"data": rows, "inner": {"size": INNER}}
        plates = {name: pyro.plate(name, dim=dim, **sizes[name]) for name, dim in self.layout.plates.items()}
        if self.is_minibatch:
            with plates["data"] as index:
                self.seen.append(index)
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0)) if self.continuous == "global" else torch.zeros(())
        for step in pyro.plate("steps", self.layout.steps) if self.layout.steps > 1 else [None]:
            self._step("" if step is None else f"_{step}", plates, slope, width, shift)

    def _parameters(self) -> tuple[Tensor, Tensor]:
        slope = pyro.param("slope", lambda: torch.tensor(0.7))
        width = pyro.param("width", lambda: torch.tensor(1.1), constraint=dist.constraints.positive)
        return slope, width

    def _conditional(self, states: Mapping[str, Tensor]) -> None:
        """The exact conditional of a slab: a normal mean with one normal observation."""
        slope, width = self._parameters()
        first = self.observed[0]
        prior = self._number(first, {s.name: (s, states[s.name]) for s in self.discrete}, slope)
        precision = 1 + width**-2
        mean = (prior + (self._data(first) - prior) * width**-2) / precision
        pyro.sample("shift", dist.Normal(mean, precision**-0.5))

    def _step(self, suffix: str, plates: Mapping[str, Any], slope: Tensor, width: Tensor, shift: Tensor) -> None:
        known: Known = {}
        first = self.observed[0]
        if self.continuous == "local":
            with self._placed(first, plates):
                shift = pyro.sample("shift" + suffix, dist.Normal(0.0, 1.0))
        for statement in self.discrete:
            fn = DISCRETE[statement.kind](statement, self._number(statement, known, slope), known)
            with self._placed(statement, plates):
                known[statement.name] = statement, pyro.sample(statement.name + suffix, fn)
        if self.continuous == "slab" or (self.continuous == "collapsed" and not self.is_spelled_out):
            with self._placed(first, plates):
                shift = pyro.sample("shift" + suffix, dist.Normal(self._number(first, known, slope), 1.0))
        elif self.continuous == "collapsed":
            shift, width = self._number(first, known, slope), (1 + width.square()).sqrt()
        kinds = OBSERVED | SPELLED_OUT if self.is_spelled_out else OBSERVED
        for statement in self.observed:
            mean = self._number(statement, known, slope) + self._moved(shift, first.place, statement.place)
            with self._placed(statement, plates):
                if self.has_factor and statement is first:
                    pyro.factor("factor" + suffix, -0.3 * (mean - 0.5).square())
                kinds[statement.kind](dataclasses.replace(statement, data=self._data(statement)), suffix, mean, width, known)

    def _data(self, statement: Statement) -> Tensor:
        assert statement.data is not None
        return statement.data[self.seen[-1]] if self.is_minibatch else statement.data

    def _number(self, statement: Statement, known: Mapping[str, tuple[Statement, Tensor]], slope: Tensor) -> Tensor:
        """A number per draw of a statement, by what the sites before it have become."""
        number = slope * statement.base
        for name, weight in statement.parents:
            parent, value = known[name]
            if self.style == "left":
                value = value.reshape(self._shape(parent, value))
            value = summary(parent, value)
            if self.style == "branch" and bool((value > 1).any()):
                value = 0.5 * value
            number = number + weight * self._moved(value, parent.place, statement.place)
        return number

    def _shape(self, statement: Statement, value: Tensor) -> tuple[int, ...]:
        """The shape of a site's value without any further dimension."""
        sizes = {
            self.layout.plates[name]: {"data": self.num_data, "inner": INNER}[name]
            for name in _INSIDE[statement.place]
            if name in self.layout.plates
        }
        event = value.shape[-1:] if statement.kind in VECTORS else ()
        return (*(sizes.get(dim, 1) for dim in range(min(sizes, default=0), 0)), *event)

    def _moved(self, value: Tensor, before: str, after: str) -> Tensor:
        """Sums over the plates that a statement does not share with one before it."""
        dims = [self.layout.plates[name] for name in _INSIDE[before] if name not in _INSIDE[after] and name in self.layout.plates]
        dims = [dim for dim in dims if value.dim() >= -dim]
        return value.sum(dims, keepdim=True) if dims else value

    @contextlib.contextmanager
    def _placed(self, statement: Statement, plates: Mapping[str, Any]) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name in _INSIDE[statement.place]:
                stack.enter_context(plates[name])
            if statement.hidden == "points":
                stack.enter_context(poutine.mask(mask=self._every_other()))
            yield

    def _every_other(self) -> Tensor:
        # Of the data points, not of their places in a minibatch.
        mask = (self.seen[-1] if self.is_minibatch else torch.arange(self.num_data)) % 2 == 0
        return mask.unsqueeze(-1) if self.layout.plates["data"] == -2 else mask
