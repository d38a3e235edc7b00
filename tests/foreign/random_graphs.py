"""Random structured programs of seeds: chains, trees, hierarchies, masks, stacks and lookups; against brute force and whole states."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated import AutoTruncated, Truncated_ELBO
from tests.foreign.structured import Structured, brute_force, search

MAX_JOINT = 2**13
_DATA, _INNER = 2, 2
_PLACES = {"global": (), "data": ("data",), "inner": ("data", "inner")}


@dataclasses.dataclass(frozen=True)
class Variable:
    """A discrete latent: number of values, place, parents with weights, whether a mask of data points lies on it."""

    name: str
    size: int
    place: str
    parents: tuple[tuple[int, float], ...]
    is_masked: bool


@dataclasses.dataclass(frozen=True)
class Observation:
    """What depends on some latents, in the innermost of their plates."""

    place: str
    parents: tuple[tuple[int, float], ...]
    is_factor: bool
    is_masked: bool
    value: float


@dataclasses.dataclass(frozen=True)
class Rows:
    """A table whose rows look up members of the plate of data points."""

    parents: tuple[tuple[int, float], ...]
    index: tuple[int, ...]
    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Graph:
    """A random program.

    Attributes:
        variables: its latents.
        observations: what is observed of them, each by a site of its own.
        stacked: observations of global latents in one site, whose entries are an event or members of a plate.
        is_event: whether they are an event.
        rows: a table.
    """

    variables: tuple[Variable, ...]
    observations: tuple[Observation, ...]
    stacked: tuple[Observation, ...] = ()
    is_event: bool = True
    rows: Rows | None = None

    def run(self) -> None:
        """Samples all statements."""
        slope = pyro.param("slope", lambda: torch.tensor(0.8))
        plates = {"data": pyro.plate("data", _DATA, dim=-2), "inner": pyro.plate("inner", _INNER, dim=-1)}
        values: list[Tensor] = []
        for one in self.variables:
            number = self._number(one.parents, values, slope)
            with _Placed(plates, one.place, one.is_masked):
                if one.size == 2:
                    values.append(pyro.sample(one.name, dist.Bernoulli(logits=number - 0.3)))
                else:
                    logits = number.unsqueeze(-1) * torch.linspace(-1, 1, one.size)
                    values.append(pyro.sample(one.name, dist.Categorical(logits=logits)))
        for position, own in enumerate(self.observations):
            number = self._number(own.parents, values, slope)
            with _Placed(plates, own.place, own.is_masked):
                if own.is_factor:
                    pyro.factor(f"y_{position}", -0.4 * (number - own.value).square())
                else:
                    pyro.sample(f"y_{position}", dist.Normal(number, 0.7), obs=torch.tensor(own.value))
        if self.stacked:
            means = torch.stack([self._number(own.parents, values, slope) for own in self.stacked], -1)
            observed = torch.tensor([own.value for own in self.stacked])
            if self.is_event:
                pyro.sample("stacked", dist.Normal(means, 0.7).to_event(1), obs=observed)
            else:
                with pyro.plate("stack", len(self.stacked), dim=-1):
                    pyro.sample("stacked", dist.Normal(means, 0.7), obs=observed)
        if self.rows is not None:
            with pyro.plate("rows", len(self.rows.index), dim=-2):
                looked_up = {parent: values[parent][..., torch.tensor(self.rows.index), :] for parent, _ in self.rows.parents}
                number = self._number(self.rows.parents, looked_up, slope)
                pyro.sample("row", dist.Normal(number, 0.7), obs=torch.tensor(self.rows.values).unsqueeze(-1))

    @staticmethod
    def _number(parents: tuple[tuple[int, float], ...], values: Any, slope: Tensor) -> Tensor:
        number = 0.5 * slope
        for parent, weight in parents:
            number = number + weight * slope * values[parent]
        return number


class _Placed:
    """In the plates of a place, and in a mask of every other data point."""

    def __init__(self, plates: Any, place: str, is_masked: bool) -> None:
        self.parts = [plates[name] for name in _PLACES[place]]
        if is_masked:
            self.parts.append(poutine.mask(mask=torch.tensor([[True], [False]])))

    def __enter__(self) -> None:
        for part in self.parts:
            part.__enter__()

    def __exit__(self, *error: Any) -> None:
        for part in reversed(self.parts):
            part.__exit__(*error)


def draw(seed: int) -> Graph:
    """The program of a seed."""
    rng = random.Random(seed)
    style = rng.choice(["chain", "second order", "tree", "hierarchy", "network"])
    variables: list[Variable] = []
    joint = 1
    for position in range(rng.randint(4, 9)):
        has_plates = style in ("hierarchy", "network")
        place = rng.choice(["global", "data", "data", "inner"] if has_plates else ["global"] * 4 + ["data"])
        size = rng.choice([2, 2, 3, 4])
        joint *= size ** {"global": 1, "data": _DATA, "inner": _DATA * _INNER}[place]
        if joint > MAX_JOINT:
            break
        before = [i for i, one in enumerate(variables) if set(_PLACES[one.place]) <= set(_PLACES[place])]
        number = {"chain": 1, "second order": 2, "tree": 1, "hierarchy": 1, "network": 3}[style]
        chosen = before[-number:] if style in ("chain", "second order") else rng.sample(before, min(len(before), number))
        parents = tuple((i, rng.uniform(-1.5, 1.5)) for i in chosen if rng.random() < 0.9)
        is_masked = place != "global" and rng.random() < 0.15
        variables.append(Variable(f"z_{position}", size, place, parents, is_masked))
    observations = []
    for _ in range(rng.randint(2, len(variables) + 2)):
        first = rng.randrange(len(variables))
        place = variables[first].place
        near = [i for i, one in enumerate(variables) if set(_PLACES[one.place]) <= set(_PLACES[place]) and abs(i - first) <= 2]
        chosen = sorted({first, *rng.sample(near, min(len(near), rng.choice([0, 0, 1, 2])))})
        parents = tuple((i, rng.uniform(-1.5, 1.5)) for i in chosen)
        is_masked = place != "global" and rng.random() < 0.2
        observations.append(Observation(place, parents, rng.random() < 0.25, is_masked, rng.uniform(-1, 2)))
    stacked = [own for own in observations if own.place == "global" and not own.is_factor and rng.random() < 0.7]
    if len(stacked) > 1 and rng.random() < 0.7:
        observations = [own for own in observations if own not in stacked]
    else:
        stacked = []
    return Graph(tuple(variables), tuple(observations), tuple(stacked), rng.random() < 0.5, _draw_rows(rng, variables))


def _draw_rows(rng: random.Random, variables: list[Variable]) -> Rows | None:
    inside = [i for i, one in enumerate(variables) if one.place == "data"]
    if not inside or rng.random() < 0.5:
        return None
    chosen = rng.sample(inside, min(len(inside), rng.choice([1, 1, 2])))
    number = rng.randint(1, 4)
    index, values = (tuple(draw() for _ in range(number)) for draw in (lambda: rng.randrange(_DATA), lambda: rng.uniform(-1, 2)))
    return Rows(tuple((i, rng.uniform(-1.5, 1.5)) for i in chosen), index, values)


@dataclasses.dataclass(frozen=True)
class GraphFinding:
    """Differences from brute force with all states, and what fewer states lack.

    Attributes:
        is_product: whether nodes have sets of their own.
        exact: of loss, gradient and marginals at full sets.
        excess: nats by which a bound exceeds the evidence.
        behind: nats by which sets of nodes are worse than whole states of the same size.
    """

    is_product: bool
    exact: float
    excess: float
    behind: float


def check_graph(seed: int, steps: int = 3) -> GraphFinding:
    """Holds product sets of a random program on brute force, and on whole states."""
    case = Structured(draw(seed).run)
    full = max(one.size for one in draw(seed).variables)
    guide, objective = AutoTruncated(case.model, full), Truncated_ELBO(search())
    parameters = pyro.get_param_store()
    objective.loss_and_grads(case.model, guide)
    if guide.product is None:
        return GraphFinding(False, 0.0, 0.0, 0.0)
    slope = parameters._params["slope"]
    slope.grad = None
    loss = float(objective.loss_and_grads(case.model, guide))
    found = slope.grad.clone()
    slope.grad = None
    exact = brute_force(case)
    evidence = exact.evidence()
    (-evidence).backward()
    expected = -float(evidence.detach())
    marginals = guide.marginals()
    is_full = all(own.space.size <= full for own in guide.product.node_layouts)
    errors = [abs(loss - expected), float((found - slope.grad).abs())]
    errors += [float((marginals[name].flatten() - one.flatten()).abs().max()) for name, one in exact.marginals(guide.layout.dims).items()]
    excess = expected - loss
    losses = []
    for is_whole in (False, True):
        smaller = AutoTruncated(case.model, 1 + seed % 3, whole_states=is_whole)
        losses.append([float(objective.loss_and_grads(case.model, smaller)) for _ in range(steps)][-1])
    excess, behind = max(excess, *(expected - one for one in losses)), max(0.0, losses[0] - losses[1])
    return GraphFinding(True, max(errors) if is_full else 0.0, excess, behind if math.isfinite(behind) else 0.0)
