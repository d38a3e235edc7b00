"""Draws random models of seeds: :func:`draw`."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.foreign.random_check import SEARCHES
from tests.foreign.random_models import INNER, LAYOUTS, Layout, Program
from tests.foreign.random_sites import DISCRETE, EVENTS, SUPERPOSITIONS, Statement, cardinality

MAX_STATES = 64
_MAX_SINGLE = 24


def draw(seed: int) -> Program:
    """The program of a seed, in torch's default precision."""
    rng = random.Random(seed)
    name = rng.choice(["plate", "plate", *LAYOUTS])
    layout = LAYOUTS[name]
    num_data = 2 if name in ("mixed", "total") else rng.randint(1, 4)
    style = rng.choice([None, None, None, "left", "branch"])
    vectorize = rng.choice([None, False]) if style else rng.choice([None, None, None, True, False])
    discrete = _draw_discrete(rng, layout, num_data, MAX_STATES if style is None and vectorize is not False else _MAX_SINGLE)
    # How far a count of a count reaches may differ between data points that nobody has seen: refused with the cure.
    may_select = name == "plate" and all(statement.kind != "thinned" for statement in discrete)
    selection = rng.choice([None, None, None, "given", "drawn"]) if may_select else None
    observed = _draw_observed(rng, name, discrete, num_data, selection)
    continuous = _draw_continuous(rng, name, selection)
    if continuous == "collapsed":
        data = _draw_data(rng, layout, "data", "normal", num_data + 2 * (selection == "drawn"), None)
        observed = (Statement("y0", "normal", "data", base=rng.uniform(-1, 1), parents=observed[0].parents, data=data),)
    program = Program(
        layout,
        num_data,
        discrete,
        observed,
        continuous=continuous,
        part=rng.choice(["AutoDelta", "AutoNormal"]),
        scale=1.0 if continuous == "collapsed" else rng.choice([1.0, 1.0, 0.4]),
        subsample=torch.tensor(sorted(rng.sample(range(num_data + 2), num_data))) if selection == "given" else None,
        is_minibatch=selection == "drawn",
        has_factor=rng.random() < 0.3 and continuous != "collapsed",
        style=style,
        vectorize=vectorize,
        search=rng.choice(list(SEARCHES)),
    )
    # Python's "if" looks at all data points at once: their posteriors are independent no more, unless they form one state.
    return dataclasses.replace(program, style="left") if style == "branch" and program.data_plates() else program


def _draw_continuous(rng: random.Random, name: str, selection: str | None) -> str | None:
    if name == "sequential":
        return None  # Pyro's guide lists refuse sequential plates, whatever is in them.
    kinds = [None, "global"] if selection is not None else [None, "global", "local", "slab"]
    return rng.choice([None, *kinds, *["collapsed"] * (name == "plate")])


def _draw_discrete(rng: random.Random, layout: Layout, num_data: int, max_states: int) -> tuple[Statement, ...]:
    found: list[Statement] = []
    states = 1
    for position in range(rng.randint(1, 3)):
        place = rng.choice(layout.discrete)
        counts = [s for s in found if s.kind in ("binomial", "poisson", "thinned", "geometric") and s.place in (place, "outside")]
        kind = rng.choice([kind for kind in DISCRETE if kind != "thinned"] + ["thinned"] * 3 * bool(counts))
        total = rng.choice(counts) if kind == "thinned" else None
        statement = Statement(
            f"s{position}",
            kind,
            place,
            rng.randint(2, 3) if total is None else total.size,
            rng.uniform(-1, 1),
            tuple((s.name, rng.uniform(-1, 1)) for s in found if rng.random() < 0.7),
            None if total is None else total.name,
            "points" if place == "data" and "data" in layout.data_plates and rng.random() < 0.15 else None,
        )
        copies = layout.steps * (num_data if place == "data" and not layout.data_plates else 1)
        copies *= INNER if place == "inner" and "inner" not in layout.data_plates else 1
        states *= cardinality(statement) ** copies
        if states > max_states:
            break
        found.append(statement)
    # The first site alone may be too large: a coin is not.
    return tuple(found) or (Statement("s0", "bernoulli", layout.discrete[0], base=rng.uniform(-1, 1)),)


def _draw_observed(
    rng: random.Random, name: str, discrete: Sequence[Statement], num_data: int, selection: str | None
) -> tuple[Statement, ...]:
    layout = LAYOUTS[name]
    found: list[Statement] = []
    for position in range(rng.randint(1, 2) if name != "total" else 2):
        # A total is what makes data points depend on each other.
        place = layout.observed[position] if name == "total" else rng.choice(layout.observed)
        counts = [s.name for s in discrete if s.kind in ("binomial", "poisson", "thinned") and s.place in (place, "outside")]
        vectors = [s.name for s in discrete if s.kind == "bernoulli_vector" and name == "plate"]
        kinds = ["normal", "normal_vector", "own", "bernoulli", "poisson", "categorical"]
        kind = rng.choice(kinds + ["counted"] * bool(counts) + [*SUPERPOSITIONS] * bool(vectors))
        total = rng.choice(counts if kind == "counted" else vectors) if kind in ("counted", *SUPERPOSITIONS) else None
        parents = tuple((s.name, rng.uniform(-1.5, 1.5)) for s in discrete if rng.random() < 0.8 or s is discrete[-1])
        hidden = _draw_hidden(rng, kind, place, name if selection != "drawn" else "drawn")
        data = _draw_data(rng, layout, place, kind, num_data + 2 * (selection == "drawn"), hidden)
        found.append(
            Statement(f"y{position}", kind, place, base=rng.uniform(-1, 1), parents=parents, total=total, hidden=hidden, data=data)
        )
    return tuple(found)


def _draw_hidden(rng: random.Random, kind: str, place: str, name: str) -> str | None:
    options: list[str | None] = [None, None, None]
    if kind in EVENTS:
        options += ["entries", "entries"]
    if place == "data" and kind not in SUPERPOSITIONS:
        options.append("points")
    if kind in ("bernoulli", "categorical") and name == "plate":
        options.append("imputed")
    return rng.choice(options)


def _draw_data(rng: random.Random, layout: Layout, place: str, kind: str, num_data: int, hidden: str | None) -> Tensor:
    sizes = {"data": num_data, "inner": INNER}
    inside = {"outside": (), "data": ("data",), "inner": ("data", "inner")}[place]
    dims = {layout.plates[name]: sizes[name] for name in inside}
    shape = [dims.get(dim, 1) for dim in range(min(dims, default=0), 0)]
    shape += [EVENTS[kind]] if kind in EVENTS else []
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    uniform = torch.rand(shape, generator=generator)
    if kind in ("bernoulli", "noisy_or"):
        data = (uniform < 0.5).to(uniform.dtype)
    elif kind == "categorical":
        return (3 * uniform).long()
    elif kind == "poisson":
        data = (4 * uniform).floor()
    elif kind == "counted":
        # Zero or one of those counted: some state can always explain it.
        data = (2 * uniform).floor()
    else:
        data = 4 * uniform - 2
    if hidden == "entries":
        data = torch.where(torch.rand(shape, generator=generator) < 0.3, math.nan, data)
    return data
