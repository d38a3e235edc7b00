"""What each mechanism of ``learn`` is worth: ``python -m tests.papers.experiments.learn_ablation``.

Small runs of several families are made with all mechanisms, and each mechanism is switched off where it acted. Every run is written down
when it ends, and not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.ops.indexing import Vindex
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, DisagreeingStartsWarning, GPSelect, Truncated_ELBO, learn
from pyro_truncated.datasets import linear_bars, matched_bars
from pyro_truncated.multistart import moves, multi_start, profile, pruning, trainer
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.trainer import run_restart
from pyro_truncated.warmup import warm_up
from tests.papers.experiments import every_model, gp_select, own_functions, own_graphs, own_models, own_priors
from tests.papers.experiments import learning as bars

RESULTS = Path(__file__).parents[1] / "results" / "learn_ablation.jsonl"
NUM_LOSSES = 20
# Nats of all data, and root mean squares, that count as found.
GRAPH_TOLERANCE, PRIOR_TOLERANCE = 0.5, 0.25


class Trial(NamedTuple):
    """A call of ``learn``, and how it is judged.

    Attributes:
        model: the model.
        y: data.
        arguments: others of ``learn``.
        number: given the guide, how many components were found, and of how many; ``None``: the free energy is compared.
        target: the free energy per data point that counts as found, where it is compared.
    """

    model: Any
    y: Tensor
    arguments: dict[str, Any]
    number: Callable[[Any], tuple[int, int]] | None
    target: Callable[[], float] = lambda: math.nan


# --- trials ---


def of_bars(name: str) -> Callable[[int], Trial]:
    def trial(seed: int) -> Trial:
        data, model = bars.VARIANTS[name].data(seed), bars.VARIANTS[name].model()
        return Trial(model, data.data, {}, lambda guide: (matched_bars(model.weight, data.components), data.components.shape[1]))

    return trial


def of_model(name: str) -> Callable[[int], Trial]:
    def trial(seed: int) -> Trial:
        model, y, truth = every_model.MODELS[name](every_model.Images(seed))
        size = len(truth) if "Gated" in name or "Mixture" in name else every_model.NUM_BARS
        return Trial(model, y, {}, lambda guide: (every_model.number_found(model, truth, guide), size))

    return trial


def of_kind(kind: own_functions.Kind) -> Callable[[int], Trial]:
    def trial(seed: int) -> Trial:
        true, y = own_functions.sampled(kind)
        target = own_functions.reached_from_truth
        # A network keeps its own parameters.
        store = {name: value.detach().clone() for name, value in pyro.get_param_store().items() if "$$$" not in name}

        def reached() -> float:
            pyro.clear_param_store()
            true(y)
            for name, value in store.items():
                pyro.get_param_store()[name] = value
            return target(kind, true, y) - kind.tolerance

        pyro.set_rng_seed(10_000 + seed)
        return Trial(kind.program(), y, {}, None, reached)

    return trial


def of_function(seed: int) -> Trial:
    data = linear_bars(500, size=6, mean_active=2.0)
    return Trial(
        own_models.function,
        data.data,
        {},
        lambda guide: (matched_bars(pyro.param("weight").detach(), data.components), own_models.NUM_LATENTS),
    )


def of_class(seed: int) -> Trial:
    data = linear_bars(500, size=6, mean_active=2.0)
    model: Any = own_models.Mine(torch.randn(36, own_models.NUM_LATENTS), torch.ones(()))
    return Trial(model, data.data, {}, lambda guide: (matched_bars(model.weight.detach(), data.components), own_models.NUM_LATENTS))


def of_graph(name: str) -> Callable[[int], Trial]:
    def trial(seed: int) -> Trial:
        program, drawn = own_graphs.KINDS[name]
        data = drawn()
        return Trial(program, data.y, {}, None, lambda: data.log_joint - GRAPH_TOLERANCE)

    return trial


NUM_TIMES, CHANGES = 80, (12, 25, 40, 52, 67)


def changes(y: Tensor) -> None:
    """A series with jumps: at each time there may be one, of a size of its own."""
    size = pyro.param("size", lambda: torch.randn(NUM_TIMES))
    noise = pyro.param("noise", torch.tensor(1.0), constraint=constraints.positive)
    is_jump = pyro.sample("states", dist.Bernoulli(torch.full((NUM_TIMES,), 0.05)).to_event(1))
    pyro.sample("y", dist.Normal((is_jump * size).cumsum(-1), noise).to_event(1), obs=y)


def of_changes(seed: int) -> Trial:
    """The log joint of the true jumps at their likeliest sizes is compared."""
    is_jump, at = torch.zeros(NUM_TIMES), torch.tensor(CHANGES)
    is_jump[at] = 1.0
    sizes = (3 + 3 * torch.rand(len(CHANGES))) * torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])
    y = torch.zeros(NUM_TIMES).index_put((at,), sizes).cumsum(0) + torch.randn(NUM_TIMES)
    means = torch.cat([part - part.mean() if start else part for start, part in zip((0, *CHANGES), y.tensor_split(at), strict=True)])
    log_joint = dist.Normal(0.0, means.square().mean().sqrt()).log_prob(means).sum() + dist.Bernoulli(0.05).log_prob(is_jump).sum()
    return Trial(changes, y, {}, None, lambda: float(log_joint) - GRAPH_TOLERANCE)


def of_priors(name: str) -> Callable[[int], Trial]:
    def trial(seed: int) -> Trial:
        program, drawn, what = own_priors.KINDS[name]
        y, true = drawn()

        def number(guide: Any) -> tuple[int, int]:
            learned = guide[0].median(y)[what].detach().reshape(true.shape)
            errors = torch.cdist(true, learned).amin(1) / true.shape[1] ** 0.5
            return int((errors < PRIOR_TOLERANCE).sum()), len(true)

        return Trial(program, y, {}, number)

    return trial


def of_selection(seed: int) -> Trial:
    data, model = gp_select.bars_of("A", 1000, torch.Generator().manual_seed(seed)), gp_select.MODELS["A"](25, 10)
    arguments = {"search": GPSelect(5, kernel="linear"), "num_states": 32}
    return Trial(model, data.data, arguments, lambda guide: (matched_bars(model.weight, data.components), 10))


def small_types() -> own_functions.Program:
    """A type of three and four latents, as parts of one mean."""

    def program(y: Tensor) -> None:
        loc, weight = pyro.param("loc", lambda: torch.randn(3, 12)), pyro.param("weight", lambda: torch.randn(12, 4))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            z = pyro.sample("z", dist.Categorical(torch.ones(3) / 3))
            s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(Vindex(loc)[z] + s @ weight.mT, noise).to_event(1), obs=y)

    return program


def crossed() -> own_functions.Program:
    """Two categorical latents, of five and three values, as parts of one mean."""

    def program(y: Tensor) -> None:
        row, column = pyro.param("row", lambda: torch.randn(5, 12)), pyro.param("column", lambda: torch.randn(3, 12))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            one = pyro.sample("one", dist.Categorical(torch.ones(5) / 5))
            two = pyro.sample("two", dist.Categorical(torch.ones(3) / 3))
            pyro.sample("y", dist.Normal(Vindex(row)[one] + Vindex(column)[two], noise).to_event(1), obs=y)

    return program


def offsets() -> own_functions.Program:
    """Eight latents above an offset, often on."""

    def program(y: Tensor) -> None:
        weight, offset = pyro.param("weight", lambda: torch.randn(25, 8)), pyro.param("offset", lambda: torch.zeros(25))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.full((8,), 0.3)).to_event(1))
            pyro.sample("y", dist.Normal(offset + s @ weight.mT, noise).to_event(1), obs=y)

    return program


def unequal() -> own_functions.Program:
    """Six latents of different rates, which therefore are not exchangeable."""

    def program(y: Tensor) -> None:
        weight = pyro.param("weight", lambda: torch.randn(16, 6))
        noise = pyro.param("noise", torch.tensor(2.0), constraint=constraints.positive)
        with pyro.plate("data", len(y)):
            s = pyro.sample("s", dist.Bernoulli(torch.linspace(0.15, 0.4, 6)).to_event(1))
            pyro.sample("y", dist.Normal(s @ weight.mT, noise).to_event(1), obs=y)

    return program


def answers(has_priors: bool) -> Callable[[], own_functions.Program]:
    """Four binary features of an item, and forty answers."""

    def make() -> own_functions.Program:
        def program(y: Tensor) -> None:
            if has_priors:
                weight = pyro.sample("weight", dist.Normal(0.0, 2.0).expand([4, 40]).to_event(2))
                offset = pyro.sample("offset", dist.Normal(0.0, 2.0).expand([40]).to_event(1)).unsqueeze(-2)
            else:
                weight, offset = pyro.param("weight", lambda: torch.randn(4, 40)), pyro.param("offset", lambda: torch.zeros(40))
            with pyro.plate("data", len(y)):
                s = pyro.sample("s", dist.Bernoulli(torch.full((4,), 0.4)).to_event(1))
                pyro.sample("y", dist.Bernoulli(logits=s @ weight + offset).to_event(1), obs=y)

        return program

    return make


def normal(**sizes: tuple[int, ...]) -> Callable[[], dict[str, Tensor]]:
    """True parameters of deviation three, and noise of one."""
    return lambda: {**{name: 3 * torch.randn(*shape) for name, shape in sizes.items()}, "noise": torch.tensor(1.0)}


KINDS = own_functions.KINDS | {
    "types, small": own_functions.Kind(small_types, normal(loc=(3, 12), weight=(12, 4)), 12),
    "two categorical latents": own_functions.Kind(crossed, normal(row=(5, 12), column=(3, 12)), 12),
    "offset": own_functions.Kind(offsets, normal(weight=(25, 8), offset=(25,)), 25),
    "unequal rates": own_functions.Kind(unequal, normal(weight=(16, 6)), 16),
    "answers": own_functions.Kind(answers(False), lambda: {"weight": 2 * torch.randn(4, 40), "offset": 2 * torch.randn(40)}, 40),
    "answers with priors": own_functions.Kind(answers(True), dict, 40, steps=(400, 0.01)),
}

# Family, trials by name, and the number of seeds of each.
FAMILIES: dict[str, dict[str, tuple[Callable[[int], Trial], int]]] = {
    "mixture": {
        "GaussianMixture": (of_model("GaussianMixture"), 3),
        "PoissonMixture": (of_model("PoissonMixture"), 1),
        "mixture": (of_kind(KINDS["mixture"]), 3),
    },
    "sparse coding": {
        "N = 200": (of_bars("N = 200"), 2),
        "BinarySparseCoding": (of_model("BinarySparseCoding"), 2),
        "activations correlated": (of_bars("activations correlated .8 in pairs"), 2),
        "ten bars negative": (of_bars("ten bars negative"), 2),
        "amplitudes 2 to 6": (of_bars("amplitudes 2 to 6"), 2),
        "H = 40 for 20 bars": (of_bars("H = 40 for 20 bars"), 1),
        "DiscreteSparseCoding": (of_model("DiscreteSparseCoding"), 1),
        "SpikeSlabSparseCoding": (of_model("SpikeSlabSparseCoding"), 1),
    },
    "noisy-OR": {"NoisyOr": (of_model("NoisyOr"), 1), "noisy-OR 8x8": (of_bars("noisy-OR 8x8, weights .6"), 2)},
    "maximal causes": {
        "MaxSpikeSlabSparseCoding": (of_model("MaxSpikeSlabSparseCoding"), 2),
        "MaximalCauses": (of_model("MaximalCauses"), 1),
        "Bernoulli maxima": (of_model("ExponentialFamilyMaximalCauses, bernoulli"), 1),
    },
    "Gibbs sampler": {"GP-select, linear": (of_selection, 1)},
    "factors by gradients": {
        "counts": (of_kind(KINDS["counts"]), 2),
        "offset": (of_kind(KINDS["offset"]), 3),
        "unequal rates": (of_kind(KINDS["unequal rates"]), 2),
        "answers": (of_kind(KINDS["answers"]), 2),
        "own noisy-OR": (of_kind(KINDS["noisy-OR"]), 2),
        "README": (of_function, 2),
        "topics": (of_kind(KINDS["topics"]), 2),
        "class": (of_class, 1),
        "ordinal": (of_kind(KINDS["ordinal"]), 1),
    },
    "categorical beside others": {
        "types, small": (of_kind(KINDS["types, small"]), 4),
        "two categorical latents": (of_kind(KINDS["two categorical latents"]), 4),
        "types": (of_kind(KINDS["types"]), 2),
    },
    "continuous latents": {
        "clusters": (of_priors("clusters"), 2),
        "classes": (of_priors("classes"), 1),
        "positions": (of_kind(KINDS["positions"]), 2),
        "answers with priors": (of_kind(KINDS["answers with priors"]), 2),
        "factors": (of_priors("factors"), 1),
        "contrasts": (of_kind(KINDS["contrasts"]), 1),
    },
    "shared latents": {"blocks": (of_graph("blocks"), 2), "selection": (of_graph("selection"), 2), "changes": (of_changes, 2)},
    "neural decoder": {
        "GatedDecoder": (of_model("GatedDecoder"), 1),
        "decoder": (of_kind(KINDS["decoder"]), 4),
        "BinaryVAE": (of_model("BinaryVAE"), 1),
    },
}
FIRST_SEED = 4101


# --- mechanisms ---


class Mechanism(NamedTuple):
    """Something that can be switched off.

    Attributes:
        patches: owner, name and replacement that switch it off.
        watched: owner and name of functions whose time is its cost; moves are watched where they are tried.
        has_acted: whether a call of these has changed something, by its result.
        config: numbers that switch it off.
    """

    patches: tuple[tuple[Any, str, Any], ...] = ()
    watched: tuple[tuple[Any, str], ...] = ()
    has_acted: Callable[[Any], bool] = bool
    config: LearnConfig | None = None


def constant(start: float, steps: int) -> Callable[[int], float]:
    """No annealing."""
    return lambda step: 1.0


def nothing(self: Any, best: Any) -> Iterator[Any]:
    """Proposals of a move that is off."""
    yield from ()


def without(*moves: type) -> Mechanism:
    return Mechanism(tuple((move, "propose", nothing) for move in moves))


def is_false(result: Any) -> bool:
    return not result


def is_there(result: Any) -> bool:
    return result is not None


def rule(name: str, result: bool, has_acted: Callable[[Any], bool]) -> Mechanism:
    """A rule of agreement that always says the same."""
    return Mechanism(((multi_start, name, lambda *args: result),), ((multi_start, name),), has_acted)


def single_latents(correlation: Tensor) -> list[tuple[int, ...]]:
    """No exchange of several latents at once."""
    return [(latent,) for latent in range(len(correlation))]


def matched_alone(self: Any, one: Any, other: Any) -> tuple[Tensor, Tensor]:
    """Partners by correlation alone."""
    return moves.match_latents(self._marginals(one), self._marginals(other))


def least_needed(losses: Tensor, substitutes: Tensor, number: int) -> Tensor:
    """Those of least loss, substitutes of each other or not."""
    return losses.argsort()[:number]


PRUNE = pruning._prune


def prune_surplus(run: Any, number: int | None = None) -> tuple[Any, Tensor]:
    """No redundant latent is removed."""
    return (run, torch.arange(run.profile.model.num_latents)) if number is None else PRUNE(run, number)


# Is called in every run.
REASON = ((multi_start.StopRule, "reason"),)

MECHANISMS = {
    "complement": without(moves.Complement),
    "use of redundant latents": without(moves.RedundantLatents),
    "revival of dead latents": without(moves.DeadLatents),
    "crossover": without(moves.Crossover),
    "tolerance of networks per number": Mechanism(config=LearnConfig(network_gap=0.0), watched=((multi_start.StopRule, "_share_code"),)),
    "equal latents, networks": rule("share_most", True, is_false),
    "equal data points": rule("explain_equally", True, is_false),
    "end by expected gain": rule("is_gain_below_error", False, bool),
    "split and merge": Mechanism(((trainer.Trainer, "relocate", lambda self: False),), ((trainer.Trainer, "relocate"),)),
    "refit of decoders": Mechanism(((trainer, "fit_decoder", lambda *args: False),), ((trainer, "fit_decoder"),)),
    "linear start of networks": Mechanism(
        ((multi_start, "decoder_targets", lambda *args: None),), ((multi_start, "decoder_targets"),), is_there
    ),
    "overcomplete start": Mechanism(watched=((multi_start, "start_overcomplete"),), config=LearnConfig(growth=1), has_acted=is_there),
    "overcomplete start and pruning": Mechanism(
        ((multi_start, "start_overcomplete", lambda profile: run_restart(profile, profile.temperature)),),
        ((multi_start, "start_overcomplete"),),
        is_there,
    ),
    "annealing": Mechanism(((profile, "cooling", constant),), ((profile, "cooling"),), lambda result: result(0) > 1.0),
    "blocks of latents": Mechanism(((moves, "_blocks", single_latents),), ((moves, "_blocks"),)),
    "pairs of unmatched latents": Mechanism(((moves.Recombination, "_match", matched_alone),), ((moves.Recombination, "_match"),)),
    "substitutes of pruned latents": Mechanism(
        ((pruning, "select_for_pruning", least_needed),), ((pruning, "select_for_pruning"),), is_there
    ),
    "pruning of redundant latents": Mechanism(((pruning, "_prune", prune_surplus),), ((pruning, "_prune"),), is_there),
    "eight substitutes": Mechanism(config=LearnConfig(pruning_depth=2), watched=REASON),
    "eight restarts of small mixtures": Mechanism(config=LearnConfig(small_mixture=0), watched=REASON),
    "gain of mixtures": Mechanism(config=LearnConfig(mixture_gain=0.01), watched=REASON),
}

# Mechanisms of earlier runs that the package lacks; the last one stands for two at once.
DELETED = (
    "comparison of parameters",
    "memory of complements",
    "eight restarts of few rows",
    "four restarts of decoders",
    "data points of Gibbs samplers",
    "search for states of the best",
    "equal latents, closed form",
    "overfit of redundant latents",
    "swap of sites",
    "replacement of difference codes",
    "second threshold of difference codes",
    "start near the best",
    "pairwise codes",
    "swap of sites and complement",
)


@contextlib.contextmanager
def switched_off(name: str) -> Iterator[None]:
    """``learn`` without a mechanism, or with all (``"none"``)."""
    with contextlib.ExitStack() as stack:
        for owner, attribute, replacement in () if name == "none" else MECHANISMS[name].patches:
            stack.enter_context(patch.object(owner, attribute, replacement))
        yield


@contextlib.contextmanager
def watched() -> Iterator[dict[str, list[float]]]:
    """Counts calls, calls that change something, and CPU seconds of each mechanism."""
    spent: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])

    def timed(name: str | None, function: Callable[..., Any], has_acted: Callable[[Any], bool]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            began = time.process_time()
            result = function(*arguments, **named)
            one = spent[arguments[2].name if name is None else name]
            one[0], one[2] = one[0] + 1, round(one[2] + time.process_time() - began, 3)
            one[1] += result is not arguments[1] if name is None else has_acted(result)
            return result

        return wrapped

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.object(moves.SolutionPool, "improve", timed(None, moves.SolutionPool.improve, bool)))
        for name, mechanism in MECHANISMS.items():
            for owner, attribute in mechanism.watched:
                stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute), mechanism.has_acted)))
        yield spent


# --- runs ---


@torch.no_grad()
def free_energy(model: Any, guide: Any, y: Tensor) -> float:
    """That of the trained guide per posterior; of a Gibbs sampler that of the best restart."""
    if isinstance(guide, AutoTruncated):
        return float(guide.population().free_energy().mean())
    if not hasattr(guide, "median"):
        return float(max(guide.starts))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), Truncated_ELBO())
    return -sum(svi.evaluate_loss(y) for _ in range(NUM_LOSSES)) / NUM_LOSSES / len(y)


def run(family: str, name: str, seed: int, mechanism: str, before: dict[str, Any] | None) -> dict[str, Any]:
    """One call of ``learn``."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    trial = FAMILIES[family][name][0](seed)
    target = (math.nan if trial.number else trial.target()) if before is None else before["target"]
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    with switched_off(mechanism), watched() as spent, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        began = time.process_time()
        config = None if mechanism == "none" else MECHANISMS[mechanism].config
        guide: Any = learn(trial.model, trial.y, config=config, progress=False, **trial.arguments)
        seconds = time.process_time() - began
    if family == "continuous latents" and name in KINDS and KINDS[name].evidence is not None:
        reached = KINDS[name].evidence(trial.y)
    else:
        reached = free_energy(trial.model, guide, trial.y)
    number, size = (int(reached > target), 1) if trial.number is None else trial.number(guide)
    return {
        "name": name,
        "family": family,
        "seed": seed,
        "off": mechanism,
        "found": number,
        "of": size,
        "free_energy": round(reached, 4),
        "target": target,
        "warned": any(issubclass(one.category, DisagreeingStartsWarning) for one in told),
        "seconds": round(seconds, 1),
        "restarts": len(guide.starts),
        "reason": guide.learn_report.reason,
        "moves": guide.learn_report.moves,
        "spent": dict(spent),
    }


def done(output: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """The runs that were made, by name, seed and mechanism."""
    lines = [json.loads(line) for line in output.read_text().splitlines()] if output.exists() else []
    return {(one["name"], one["seed"], one["off"]): one for one in lines}


def trials() -> Iterator[tuple[str, str, int]]:
    """Families, names and seeds: the first seed of each first."""
    for number in range(max(number for some in FAMILIES.values() for _, number in some.values())):
        for family, some in FAMILIES.items():
            yield from ((family, name, FIRST_SEED + number) for name, (_, most) in some.items() if number < most)


def acted(one: dict[str, Any], mechanism: str) -> bool:
    """Whether a mechanism has changed something in a run with all of them."""
    if mechanism == "swap of sites and complement":
        return acted(one, "swap of sites") or acted(one, "complement")
    if mechanism == "second threshold of difference codes":
        mechanism = "replacement of difference codes"
    return one["spent"].get(mechanism, (0, 0))[1] > 0


def make(output: Path, mechanisms: list[str], names: list[str], most_seconds: float) -> None:
    """Makes the runs that the file lacks, those of the baseline first."""
    made = done(output)
    with output.open("a") as file:
        for mechanism in ["none", *mechanisms]:
            for family, name, seed in trials():
                key, before = (name, seed, mechanism), made.get((name, seed, "none"))
                if (
                    key in made
                    or name not in names
                    or (mechanism != "none" and (before is None or before["seconds"] > most_seconds or not acted(before, mechanism)))
                ):
                    continue
                made[key] = run(family, name, seed, mechanism, before)
                file.write(json.dumps(made[key]) + "\n")
                file.flush()


def is_found(one: dict[str, Any]) -> bool:
    return bool(one["found"] == one["of"])


def table(made: dict[tuple[str, int, str], dict[str, Any]]) -> list[str]:
    """Markdown lines: a row per mechanism, over the runs that were made with it and without it."""
    with_all = [one for one in made.values() if one["off"] == "none"]
    lines = ["| mechanism | acted in | of families | cost | repeated | found with, without | lost without | CPU s with, without |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in [*MECHANISMS, *DELETED]:
        used = [one for one in with_all if acted(one, name)]
        share = sum(one["spent"].get(name, (0, 0, 0.0))[2] for one in with_all) / sum(one["seconds"] for one in with_all)
        pairs = [(made[one["name"], one["seed"], "none"], one) for one in made.values() if one["off"] == name]
        lost = [f"{one['name']} {one['seed']}" for before, one in pairs if is_found(before) and not is_found(one)]
        won = [f"{one['name']} {one['seed']}" for before, one in pairs if not is_found(before) and is_found(one)]
        row = [name, f"{len(used)} of {len(with_all)}", str(len({one["family"] for one in used})), f"{100 * share:.1f} %", str(len(pairs))]
        row.append(", ".join(str(sum(map(is_found, some))) for some in zip(*pairs, strict=True)) if pairs else "")
        row.append("; ".join(lost) + (f" (found only without: {'; '.join(won)})" if won else ""))
        row.append(", ".join(f"{sum(one['seconds'] for one in some):.0f}" for some in zip(*pairs, strict=True)) if pairs else "")
        lines.append("| " + " | ".join(row) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mechanisms", nargs="*", default=list(MECHANISMS), choices=list(MECHANISMS))
    names = [name for some in FAMILIES.values() for name in some]
    parser.add_argument("--trials", nargs="*", default=names, choices=names)
    parser.add_argument("--most-seconds", type=float, default=math.inf, help="longest baseline that is repeated")
    parser.add_argument("--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.mechanisms or args.trials:
        warm_up(False)
    make(args.output, args.mechanisms, args.trials, args.most_seconds)
    print("\n".join(table(done(args.output))))


if __name__ == "__main__":
    main()
