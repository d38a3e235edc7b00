"""Random models: site kinds, chains of dependence, plates, masks, scales, missing data, continuous latents, minibatches.

:func:`draw` makes a :class:`Program` of a seed: a list of statements that :meth:`Program.run` interprets as a Pyro model. To extend it, add
a kind to :data:`DISCRETE` or :data:`OBSERVED`, or a layout to :data:`LAYOUTS`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.distributions import LinearSuperposition, NoisyOrSuperposition
from tests.foreign import Foreign


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
MAX_STATES = 100


@dataclasses.dataclass(frozen=True)
class Statement:
    """A sample statement: kind, place, a number of its own, the sites it depends on, the site that bounds it, what hides it."""

    name: str
    kind: str
    place: str
    size: int = 0
    base: float = 0.0
    parents: tuple[tuple[str, float], ...] = ()
    total: str | None = None
    hidden: str | None = None
    data: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A random model: its statements and what is done to it as a whole."""

    layout: Layout
    num_data: int
    discrete: tuple[Statement, ...]
    observed: tuple[Statement, ...]
    continuous: str | None = None
    scale: float = 1.0
    subsample: Tensor | None = None
    has_factor: bool = False

    def foreign(self) -> Foreign:
        """The model as the harness takes it."""
        model: Any = poutine.scale(self.run, scale=self.scale) if self.scale != 1 else self.run
        spelled_out = dataclasses.replace(
            self, observed=tuple(dataclasses.replace(s, kind=_STOCK.get(s.kind, s.kind)) for s in self.observed)
        )
        reference: Any = poutine.scale(spelled_out.run, scale=self.scale) if self.scale != 1 else spelled_out.run
        bounds = {s.name + suffix: s.size for s in self.discrete if s.kind in UNBOUNDED for suffix in self._suffixes()}
        return Foreign(model, plates=self._data_plates(), max_count=bounds or None, reference=reference, indices=self.subsample, new=())

    def _data_plates(self) -> tuple[str, ...]:
        """Plates that hold all that there is."""
        places = {statement.place for statement in (*self.discrete, *self.observed)}
        shared = () if "outside" in places else ("data",) if "data" in places else ("data", "inner")
        return tuple(name for name in shared if name in self.layout.plates)

    def _suffixes(self) -> list[str]:
        return [f"_{step}" for step in range(self.layout.steps)] if self.layout.steps > 1 else [""]

    def run(self) -> None:
        """Runs the statements in order; sites know of each other by one number per draw."""
        slope = pyro.param("slope", lambda: torch.tensor(0.7))
        width = pyro.param("width", lambda: torch.tensor(1.1), constraint=dist.constraints.positive)
        full = self.num_data if self.subsample is None else self.num_data + 2
        sizes: dict[str, Any] = {"data": {"size": full, "subsample": self.subsample}, "inner": {"size": INNER}}
        plates = {name: pyro.plate(name, dim=dim, **sizes[name]) for name, dim in self.layout.plates.items()}
        shift = pyro.sample("shift", dist.Normal(0.0, 1.0)) if self.continuous == "global" else torch.zeros(())
        for step in pyro.plate("steps", self.layout.steps) if self.layout.steps > 1 else [None]:
            self._step("" if step is None else f"_{step}", plates, slope, width, shift)

    def _step(self, suffix: str, plates: Mapping[str, Any], slope: Tensor, width: Tensor, shift: Tensor) -> None:
        known: dict[str, tuple[Statement, Tensor]] = {}
        first = self.observed[0]
        if self.continuous == "local":
            with self._placed(first, plates):
                shift = pyro.sample("shift" + suffix, dist.Normal(0.0, 1.0))
        for statement in self.discrete:
            fn = DISCRETE[statement.kind](statement, self._number(statement, known, slope), known)
            with self._placed(statement, plates):
                known[statement.name] = statement, pyro.sample(statement.name + suffix, fn)
        if self.continuous == "slab":
            with self._placed(first, plates):
                shift = pyro.sample("shift" + suffix, dist.Normal(self._number(first, known, slope), 1.0))
        for statement in self.observed:
            mean = self._number(statement, known, slope) + self._moved(shift, first.place, statement.place)
            with self._placed(statement, plates):
                if self.has_factor and statement is first:
                    pyro.factor("factor" + suffix, -0.3 * (mean - 0.5).square())
                OBSERVED[statement.kind](statement, suffix, mean, width, known)

    def _number(self, statement: Statement, known: Mapping[str, tuple[Statement, Tensor]], slope: Tensor) -> Tensor:
        """A number per draw of a statement, by what the sites before it have become."""
        number = slope * statement.base
        for name, weight in statement.parents:
            parent, value = known[name]
            number = number + weight * self._moved(summary(parent, value), parent.place, statement.place)
        return number

    def _moved(self, value: Tensor, before: str, after: str) -> Tensor:
        """Sums over the plates that a statement does not share with one before it."""
        inside = {"outside": (), "data": ("data",), "inner": ("data", "inner")}
        dims = [self.layout.plates[name] for name in inside[before] if name not in inside[after] and name in self.layout.plates]
        dims = [dim for dim in dims if value.dim() >= -dim]
        return value.sum(dims, keepdim=True) if dims else value

    @contextlib.contextmanager
    def _placed(self, statement: Statement, plates: Mapping[str, Any]) -> Iterator[None]:
        names = {"outside": [], "data": ["data"], "inner": ["data", "inner"]}[statement.place]
        with contextlib.ExitStack() as stack:
            for name in names:
                stack.enter_context(plates[name])
            if statement.hidden == "points":
                stack.enter_context(poutine.mask(mask=self._every_other()))
            yield

    def _every_other(self) -> Tensor:
        mask = torch.arange(self.num_data) % 2 == 0
        return mask.unsqueeze(-1) if self.layout.plates["data"] == -2 else mask


# --- kinds of discrete sites ---


def summary(statement: Statement, value: Tensor) -> Tensor:
    """A site's value as one number per draw: classes count as numbers, vectors are summed with unequal weights."""
    value = value.to(torch.get_default_dtype())
    return (value * torch.linspace(0.4, 1.2, value.shape[-1])).sum(-1) if statement.kind in VECTORS else value


def _classes(statement: Statement, number: Tensor) -> Tensor:
    return number.unsqueeze(-1) * torch.linspace(-1, 1, statement.size)


def _thinned(statement: Statement, number: Tensor, known: Mapping[str, tuple[Statement, Tensor]]) -> Any:
    assert statement.total is not None
    return dist.Binomial(known[statement.total][1], logits=number)


DISCRETE: dict[str, Callable[..., Any]] = {
    "bernoulli": lambda statement, number, known: dist.Bernoulli(logits=number),
    "bernoulli_vector": lambda statement, number, known: dist.Bernoulli(logits=number.unsqueeze(-1) + torch.zeros(statement.size)).to_event(
        1
    ),
    "categorical": lambda statement, number, known: dist.Categorical(logits=_classes(statement, number)),
    "categorical_vector": lambda statement, number, known: dist.Categorical(
        logits=_classes(statement, number).unsqueeze(-2) * torch.tensor([[1.0], [2.0]])
    ).to_event(1),
    "one_hot": lambda statement, number, known: dist.OneHotCategorical(logits=_classes(statement, number)),
    "binomial": lambda statement, number, known: dist.Binomial(statement.size, logits=number),
    "poisson": lambda statement, number, known: dist.Poisson((0.5 * number).exp()),
    "poisson_vector": lambda statement, number, known: dist.Poisson((0.5 * number.unsqueeze(-1) + torch.zeros(2)).exp()).to_event(1),
    "geometric": lambda statement, number, known: dist.Geometric(logits=number),
    "thinned": _thinned,
}
VECTORS = ("bernoulli_vector", "categorical_vector", "one_hot", "poisson_vector")
UNBOUNDED = ("poisson", "poisson_vector", "geometric")


def cardinality(statement: Statement) -> int:
    """Number of values of a site in one draw; of a thinned count at most."""
    sizes = {"bernoulli": 2, "bernoulli_vector": 2**statement.size, "categorical": statement.size, "one_hot": statement.size}
    sizes |= {"categorical_vector": statement.size**2, "poisson_vector": (statement.size + 1) ** 2}
    return sizes.get(statement.kind, statement.size + 1)


# --- kinds of observations: they sample a statement, given its mean ---


def _observe(statement: Statement, suffix: str, fn: Any, event_dim: int = 0) -> None:
    value = statement.data
    assert value is not None
    if statement.hidden == "entries":
        seen = ~value.isnan()
        fn, value = fn.mask(seen), torch.where(seen, value, 1.0)
    known = torch.rand(value.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    options: dict[str, Any] = {"obs_mask": known} if statement.hidden == "imputed" else {}
    pyro.sample(statement.name + suffix, fn.to_event(event_dim), obs=value, **options)


def _normal(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Normal(mean, width))


def _normal_vector(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Normal(mean.unsqueeze(-1) * torch.tensor([1.0, -0.5]), width), 1)


def _bernoulli(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Bernoulli(logits=mean))


def _poisson(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Poisson((0.3 * mean).exp() * width))


def _categorical(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    _observe(statement, suffix, dist.Categorical(logits=mean.unsqueeze(-1) * torch.tensor([0.0, 0.5, -0.7])))


def _counted(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Mapping[str, tuple[Statement, Tensor]]) -> None:
    assert statement.total is not None
    _observe(statement, suffix, dist.Binomial(known[statement.total][1], logits=mean, validate_args=False))


def _weights(statement: Statement, known: Mapping[str, tuple[Statement, Tensor]], width: Tensor) -> tuple[Tensor, Tensor]:
    assert statement.total is not None
    site, states = known[statement.total]
    return states, width * torch.linspace(0.1, 1.5, 3 * site.size).reshape(3, site.size)


def _superposition(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, width)
    pyro.sample(statement.name + suffix, LinearSuperposition(states, weight, width), obs=statement.data)


def _superposition_spelled_out(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, width)
    _observe(dataclasses.replace(statement, hidden="entries"), suffix, dist.Normal(states @ weight.mT, width), 1)


def _noisy_or(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, 0.5 * width)
    pyro.sample(statement.name + suffix, NoisyOrSuperposition(states, weight, 0.1), obs=statement.data)


def _noisy_or_spelled_out(statement: Statement, suffix: str, mean: Tensor, width: Tensor, known: Any) -> None:
    states, weight = _weights(statement, known, 0.5 * width)
    probs = 1 - 0.9 * (1 - weight * states.unsqueeze(-2)).prod(-1)
    _observe(dataclasses.replace(statement, hidden="entries"), suffix, dist.Bernoulli(probs), 1)


OBSERVED: dict[str, Callable[..., None]] = {
    "normal": _normal,
    "normal_vector": _normal_vector,
    "bernoulli": _bernoulli,
    "poisson": _poisson,
    "categorical": _categorical,
    "counted": _counted,
    "superposition": _superposition,
    "superposition_spelled_out": _superposition_spelled_out,
    "noisy_or": _noisy_or,
    "noisy_or_spelled_out": _noisy_or_spelled_out,
}
_STOCK = {"superposition": "superposition_spelled_out", "noisy_or": "noisy_or_spelled_out"}
_EVENTS = {"normal_vector": 2, "superposition": 3, "noisy_or": 3}


# --- drawing programs ---


def draw(seed: int) -> Program:
    """The program of a seed, in torch's default precision."""
    rng = random.Random(seed)
    name = rng.choice(["plate", *LAYOUTS])
    layout = LAYOUTS[name]
    num_data = 2 if name in ("mixed", "total") else rng.randint(1, 4)
    discrete = _draw_discrete(rng, layout, num_data)
    observed = _draw_observed(rng, name, discrete, num_data)
    subsample = torch.tensor(sorted(rng.sample(range(num_data + 2), num_data))) if name == "plate" and rng.random() < 0.2 else None
    if any(statement.kind == "thinned" for statement in discrete):
        subsample = None  # Refused with the cure: how far a count reaches may differ between data points that nobody has seen.
    kinds = [None, None, "global"] if subsample is not None else [None, None, "global", "local", "slab"]
    # Pyro's guide lists refuse sequential plates, whatever is in them.
    kinds = [None] if name == "sequential" else kinds
    return Program(
        layout,
        num_data,
        discrete,
        observed,
        continuous=rng.choice(kinds),
        scale=rng.choice([1.0, 1.0, 0.4]),
        subsample=subsample,
        has_factor=rng.random() < 0.3,
    )


def _draw_discrete(rng: random.Random, layout: Layout, num_data: int) -> tuple[Statement, ...]:
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
        if states > MAX_STATES:
            break
        found.append(statement)
    # The first site alone may be too large: a coin is not.
    return tuple(found) or (Statement("s0", "bernoulli", layout.discrete[0], base=rng.uniform(-1, 1)),)


def _draw_observed(rng: random.Random, name: str, discrete: Sequence[Statement], num_data: int) -> tuple[Statement, ...]:
    layout = LAYOUTS[name]
    found: list[Statement] = []
    for position in range(rng.randint(1, 2) if name != "total" else 2):
        # A total is what makes data points depend on each other.
        place = layout.observed[position] if name == "total" else rng.choice(layout.observed)
        counts = [s.name for s in discrete if s.kind in ("binomial", "poisson", "thinned") and s.place in (place, "outside")]
        vectors = [s.name for s in discrete if s.kind == "bernoulli_vector" and name == "plate"]
        kinds = ["normal", "normal_vector", "bernoulli", "poisson", "categorical"]
        kind = rng.choice(kinds + ["counted"] * bool(counts) + ["superposition", "noisy_or"] * bool(vectors))
        total = rng.choice(counts if kind == "counted" else vectors) if kind in ("counted", "superposition", "noisy_or") else None
        parents = tuple((s.name, rng.uniform(-1.5, 1.5)) for s in discrete if rng.random() < 0.8 or s is discrete[-1])
        hidden = _draw_hidden(rng, kind, place, name)
        data = _draw_data(rng, layout, place, kind, num_data, hidden)
        found.append(
            Statement(f"y{position}", kind, place, base=rng.uniform(-1, 1), parents=parents, total=total, hidden=hidden, data=data)
        )
    return tuple(found)


def _draw_hidden(rng: random.Random, kind: str, place: str, name: str) -> str | None:
    options: list[str | None] = [None, None, None]
    if kind in _EVENTS:
        options += ["entries", "entries"]
    if place == "data" and kind not in ("superposition", "noisy_or"):
        options.append("points")
    if kind in ("bernoulli", "categorical") and name == "plate":
        options.append("imputed")
    return rng.choice(options)


def _draw_data(rng: random.Random, layout: Layout, place: str, kind: str, num_data: int, hidden: str | None) -> Tensor:
    sizes = {"data": num_data, "inner": INNER}
    inside = {"outside": (), "data": ("data",), "inner": ("data", "inner")}[place]
    dims = {layout.plates[name]: sizes[name] for name in inside}
    shape = [dims.get(dim, 1) for dim in range(min(dims, default=0), 0)]
    shape += [_EVENTS[kind]] if kind in _EVENTS else []
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
