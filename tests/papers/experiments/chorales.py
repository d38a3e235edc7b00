"""Hidden Markov programs of chorales: sets of states for each node beside Pyro's own enumeration.

    python -m tests.papers.experiments.chorales FILE

FILE is a JSON object of lists of chorales, each a list of chords, each a list of MIDI pitches (the quarter notes of the JSB chorales,
for example). The programs are those of Pyro's tutorial on hidden Markov models: a plain chain, tones that depend on the tones before,
two chains, a chain that drives another one, tones by a network, a chain of second order, and several binary chains. Both objectives
start from the same parameters and make the same steps of Adam. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from pyro.infer import SVI, TraceEnum_ELBO, config_enumerate
from pyro.ops.indexing import Vindex
from pyro.optim import Adam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO

NUM_STEPS = 10
HIDDEN = 16


def read_chorales(path: str, part: str = "train") -> tuple[Tensor, Tensor]:
    """Tones ``(N, T, D)``, of those that are played at all, and lengths ``(N,)``."""
    chorales = json.loads(Path(path).read_text())[part]
    pitches = sorted({pitch for chorale in chorales for chord in chorale for pitch in chord if pitch > 0})
    place, lengths = {pitch: i for i, pitch in enumerate(pitches)}, torch.tensor([len(chorale) for chorale in chorales])
    y = torch.zeros(len(chorales), int(lengths.max()), len(pitches))
    for n, chorale in enumerate(chorales):
        for t, chord in enumerate(chorale):
            for pitch in chord:
                if pitch > 0:
                    y[n, t, place[pitch]] = 1.0
    return y, lengths


def table(name: str, *shape: int, stay: float = 0.0) -> Tensor:
    """Transition probabilities, with some weight on staying."""

    def initial() -> Tensor:
        found = torch.rand(shape) + 1.0
        found = found + stay * shape[-1] * torch.eye(shape[-1]) if stay else found
        return found / found.sum(-1, keepdim=True)

    return pyro.param(name, initial, constraints.simplex)


def tones(*shape: int) -> Tensor:
    """Probabilities of tones."""
    return pyro.param("tones", lambda: 0.02 + 0.15 * torch.rand(shape), constraints.unit_interval)


def steps_of(y: Tensor, lengths: Tensor, step: Callable[[int, Any], Any], state: Any) -> None:
    """A loop over steps in a plate of sequences, without what lies beyond the ends."""
    with pyro.plate("sequences", len(y), dim=-2):
        for t in pyro.markov(range(y.shape[1])):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                state = step(t, state)


def play(y: Tensor, t: int, probability: Tensor) -> Tensor:
    """Observes the tones of a step."""
    with pyro.plate(f"tones_{t}", y.shape[2], dim=-1):
        return pyro.sample(f"y_{t}", dist.Bernoulli(probability), obs=y[:, t])


def chain(y: Tensor, lengths: Tensor) -> None:
    """A hidden Markov model."""
    move, emit, tone = table("x", HIDDEN, HIDDEN, stay=0.5), tones(HIDDEN, y.shape[2]), torch.arange(y.shape[2])

    def step(t: int, x: Any) -> Any:
        x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(move)[x]))
        play(y, t, Vindex(emit)[x, tone])
        return x

    steps_of(y, lengths, step, torch.tensor(0))


def tones_before(y: Tensor, lengths: Tensor) -> None:
    """Tones that depend on the state and on themselves a step before."""
    move, emit, tone = table("x", HIDDEN, HIDDEN, stay=0.5), tones(HIDDEN, 2, y.shape[2]), torch.arange(y.shape[2])

    def step(t: int, state: Any) -> Any:
        x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(move)[state[0]]))
        return x, play(y, t, Vindex(emit)[x, state[1].long(), tone])

    steps_of(y, lengths, step, (torch.tensor(0), torch.zeros(())))


def two_chains(y: Tensor, lengths: Tensor) -> None:
    """Two chains of four states behind all tones."""
    moves, emit, tone = [table(name, 4, 4, stay=0.5) for name in "wx"], tones(4, 4, y.shape[2]), torch.arange(y.shape[2])

    def step(t: int, state: Any) -> Any:
        w, x = (pyro.sample(f"{name}_{t}", dist.Categorical(Vindex(move)[s])) for name, move, s in zip("wx", moves, state, strict=True))
        play(y, t, Vindex(emit)[w, x, tone])
        return w, x

    steps_of(y, lengths, step, (torch.tensor(0), torch.tensor(0)))


def driven_chain(y: Tensor, lengths: Tensor) -> None:
    """A chain of four states whose steps depend on another chain."""
    first, second, emit = table("w", 4, 4, stay=0.5), table("x", 4, 4, 4), tones(4, 4, y.shape[2])
    tone = torch.arange(y.shape[2])

    def step(t: int, state: Any) -> Any:
        w = pyro.sample(f"w_{t}", dist.Categorical(Vindex(first)[state[0]]))
        x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(second)[w, state[1]]))
        play(y, t, Vindex(emit)[w, x, tone])
        return w, x

    steps_of(y, lengths, step, (torch.tensor(0), torch.tensor(0)))


def network(y: Tensor, lengths: Tensor) -> None:
    """Tones by a network of the state and the tones before."""
    move, emit, tone = table("x", HIDDEN, HIDDEN, stay=0.5), tones(HIDDEN, y.shape[2]), torch.arange(y.shape[2])
    inner = pyro.param("inner", lambda: 0.1 * torch.randn(y.shape[2], 20))
    outer = pyro.param("outer", lambda: 0.1 * torch.randn(20, y.shape[2]))

    def step(t: int, x: Any) -> Any:
        x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(move)[x]))
        before = y[:, t - 1] if t else torch.zeros_like(y[:, 0])
        play(y, t, (Vindex(emit)[x, tone].logit() + torch.tanh(before @ inner) @ outer).sigmoid())
        return x

    steps_of(y, lengths, step, torch.tensor(0))


def second_order(y: Tensor, lengths: Tensor) -> None:
    """A chain of four states that depends on the last two of them."""
    move, emit, tone = table("x", 4, 4, 4), tones(4, y.shape[2]), torch.arange(y.shape[2])

    def step(t: int, state: Any) -> Any:
        x = pyro.sample(f"x_{t}", dist.Categorical(Vindex(move)[state[0], state[1]]))
        play(y, t, Vindex(emit)[x, tone])
        return state[1], x

    with pyro.plate("sequences", len(y), dim=-2):
        state: Any = (torch.tensor(0), torch.tensor(0))
        for t in pyro.markov(range(y.shape[1]), history=2):
            with poutine.mask(mask=(t < lengths).unsqueeze(-1)):
                state = step(t, state)


def binary_chains(y: Tensor, lengths: Tensor, number: int) -> None:
    """Several binary chains whose logits add up."""
    moves = [table(f"s{m}", 2, 2, stay=0.5) for m in range(number)]
    weight = pyro.param("weight", lambda: torch.randn(number, y.shape[2]))
    offset = pyro.param("offset", lambda: torch.full((y.shape[2],), -3.0))

    def step(t: int, states: Any) -> Any:
        states = [pyro.sample(f"s{m}_{t}", dist.Categorical(Vindex(moves[m])[states[m]])) for m in range(number)]
        play(y, t, (offset + sum(s * weight[m] for m, s in enumerate(states))).sigmoid())
        return states

    steps_of(y, lengths, step, [torch.tensor(0)] * number)


def trained(model: Callable[..., None], objective: Any, guide: Callable[..., Any], y: Tensor, lengths: Tensor) -> str:
    """Log likelihood per step before and after training; seconds of the first step and the mean of the others."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model(y, lengths)  # both begin with the parameters that the first run draws
    svi, total = SVI(model, guide, Adam({"lr": 0.05}), objective), float(lengths.sum())
    start = time.process_time()
    try:
        losses = [svi.step(y, lengths)]
        first, start = time.process_time() - start, time.process_time()
        losses += [svi.step(y, lengths) for _ in range(NUM_STEPS)]
    except Exception as error:
        print(f"{type(error).__name__}: {str(error)[:200]}")
        return "fails | | |"
    each = (time.process_time() - start) / NUM_STEPS
    return f"{-losses[0] / total:.5f} | {-losses[-1] / total:.5f} | {first:.1f} | {each:.2f}"


def main() -> None:
    torch.set_num_threads(1)
    y, lengths = read_chorales(sys.argv[1])
    print(f"{len(y)} chorales of up to {y.shape[1]} steps, {y.shape[2]} tones", flush=True)
    programs: dict[str, tuple[Callable[..., None], int]] = {
        program.__name__: (program, HIDDEN) for program in (chain, tones_before, two_chains, driven_chain, network, second_order)
    }
    for number in (4, 8, 12):
        programs[f"{number} binary chains"] = (lambda y, lengths, m=number: binary_chains(y, lengths, m)), HIDDEN
    for name, (program, size) in programs.items():
        row = trained(program, Truncated_ELBO(EvolutionarySearch(2, 2)), AutoTruncated(program, size), y, lengths)
        peer = " | | |"
        if name not in ("8 binary chains", "12 binary chains"):  # more than 20 GB
            peer = trained(config_enumerate(program), TraceEnum_ELBO(max_plate_nesting=2), lambda *args: None, y, lengths)
        print(f"| {name.replace('_', ' ')} | {row} | {peer} |", flush=True)


if __name__ == "__main__":
    main()
