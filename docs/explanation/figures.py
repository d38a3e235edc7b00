"""Draws the figures of the explanation pages: ``python docs/explanation/figures.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor

FOLDER = Path(__file__).with_name("figures")
BLUE, ORANGE, GREY = "#1f5d85", "#d9822b", "#b8c4cc"


def axes(
    number: int = 1, width: float = 7.5, height: float = 2.6
) -> tuple[plt.Figure, list[Axes]]:
    """Returns a figure with axes in a row, without full frames."""
    figure, grid = plt.subplots(
        1, number, figsize=(width, height), squeeze=False, layout="constrained"
    )
    for each in grid[0]:
        each.spines[["top", "right"]].set_visible(False)
    return figure, list(grid[0])


def bound() -> None:
    """A posterior, its population, and what the bound lacks."""
    mass = (
        torch.softmax(3.0 * torch.randn(40, generator=torch.Generator().manual_seed(1)), 0)
        .sort(descending=True)
        .values
    )
    figure, (left, right) = axes(2)
    left.bar(range(40), mass, color=[BLUE] * 8 + [GREY] * 32)
    left.set(
        xlabel="state, by probability",
        ylabel="$p(s \\mid y_n)$",
        title="a population of 8 states",
    )
    right.plot(range(1, 41), -mass.cumsum(0).log(), color=BLUE)
    right.plot([8], [-mass[:8].sum().log()], "o", color=ORANGE)
    right.set(
        xlabel="states in the population",
        ylabel="nats",
        title="$\\log p(y_n) - \\mathcal{F}_n$",
    )
    figure.savefig(FOLDER / "bound.png", dpi=110)


def operators() -> None:
    """Two parents, their offspring by crossover, and both mutations."""
    first, second = (
        torch.tensor([1, 1, 0, 0, 1, 0, 0, 0, 1, 0]),
        torch.tensor([0, 0, 0, 1, 0, 0, 1, 1, 0, 1]),
    )
    crossed = torch.cat([first[:4], second[4:]])
    flipped, sparse = crossed.clone(), crossed.clone()
    flipped[2] ^= 1
    sparse[torch.tensor([0, 5])] ^= 1
    rows = [
        ("parent", first),
        ("parent", second),
        ("crossover", crossed),
        ("randflips", flipped),
        ("sparseflips", sparse),
    ]
    figure, (axis,) = axes(height=2.4)
    for row, (name, bits) in enumerate(rows):
        changed = bits != crossed if row > 2 else torch.zeros(10, dtype=torch.bool)
        for column, bit in enumerate(bits):
            edge = ORANGE if changed[column] else "white"
            axis.add_patch(
                plt.Rectangle(
                    (column, -row),
                    0.9,
                    0.8,
                    facecolor=BLUE if bit else GREY,
                    edgecolor=edge,
                    linewidth=2.5,
                )
            )
        axis.text(-0.3, 0.4 - row, name, ha="right", va="center", fontsize=9)
    axis.plot([3.95, 3.95], [0.9, -2.1], "--", color=ORANGE)
    axis.set(xlim=(-2.5, 10.2), ylim=(-4.2, 1.0))
    axis.set_axis_off()
    figure.savefig(FOLDER / "operators.png", dpi=110)


def restarts() -> None:
    """The loop of learn: restarts, their pool with moves, and the training."""
    figure, (axis,) = axes(width=4.6, height=1.7)
    steps = {
        "profile\nof the model": (0, 1),
        "initialisation": (1, 1),
        "short run,\nannealed": (2, 1),
        "pool,\nmoves": (2, 0),
        "stop rule": (1, 0),
        "training\non all data": (0, 0),
    }
    for text, place in steps.items():
        axis.text(
            *place,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.5", "fc": "white", "ec": BLUE},
        )
    arrows = [
        ((0.38, 1), (0.58, 1)),
        ((1.42, 1), (1.62, 1)),
        ((2, 0.65), (2, 0.35)),
        ((1.7, 0), (1.36, 0)),
        ((0.66, 0), (0.38, 0)),
    ]
    for start, end in [*arrows, ((1, 0.28), (1, 0.76))]:
        axis.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": ORANGE})
    axis.text(0.95, 0.5, "until two agree", ha="right", va="center", fontsize=9)
    axis.set(xlim=(-0.5, 2.5), ylim=(-0.4, 1.4))
    axis.set_axis_off()
    figure.savefig(FOLDER / "learn-loop.png", dpi=110)


def networks() -> None:
    """The steps of a warm start."""
    figure, (axis,) = axes(height=1.3)
    steps = [
        "linear model,\nrestarts",
        "network fitted\nto its codes",
        "search and\ntraining",
    ]
    for position, text in enumerate(steps):
        axis.text(
            position,
            0,
            text,
            ha="center",
            va="center",
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.5", "fc": "white", "ec": BLUE},
        )
        if position:
            axis.annotate(
                "",
                (position - 0.4, 0),
                (position - 0.6, 0),
                arrowprops={"arrowstyle": "->", "color": ORANGE},
            )
    axis.set(xlim=(-0.5, 2.5), ylim=(-0.5, 0.5))
    axis.set_axis_off()
    figure.savefig(FOLDER / "learn-networks.png", dpi=110)


def collapsing() -> None:
    """Joint densities with the strength given and integrated out."""
    z = torch.linspace(-3, 3, 200)
    y, noise = torch.tensor(0.9), 0.4
    slab = torch.distributions.Normal(0.0, 1.0).log_prob(z).exp()
    on = 0.2 * slab * torch.distributions.Normal(z, noise).log_prob(y).exp()
    off = 0.8 * slab * torch.distributions.Normal(0.0, noise).log_prob(y).exp()
    figure, (left, right) = axes(2)
    left.plot(z, on, color=BLUE, label="$s = 1$")
    left.plot(z, off, color=GREY, label="$s = 0$")
    left.set(xlabel="strength $z$", title="$p(y, z, s)$")
    left.legend(frameon=False)
    right.bar(
        ["$s = 0$", "$s = 1$"],
        [float(torch.trapezoid(curve, z)) for curve in (off, on)],
        color=[GREY, BLUE],
    )
    right.set(title="$p(y, s)$: the strength integrated out")
    figure.savefig(FOLDER / "collapsing.png", dpi=110)


def psis() -> None:
    """Importance weights on a population, and the mass that it covers."""
    joint = torch.randn(60, generator=torch.Generator().manual_seed(3)) * 3
    order = joint.argsort(descending=True)
    kept = order[3:12]
    mass = torch.softmax(joint, 0)
    figure, (left, right) = axes(2)
    left.bar(range(9), torch.full((9,), float(joint[kept].logsumexp(0).exp())), color=BLUE)
    left.set(
        xlabel="state of the population", title="$p(s, y_n) / q_n(s)$: all equal", yticks=[]
    )
    right.bar(
        range(60),
        mass[order],
        color=[ORANGE if state in set(kept.tolist()) else GREY for state in order.tolist()],
    )
    right.set(
        xlabel="all states, by probability",
        title=f"covered: {mass[kept].sum():.2f} of the mass",
    )
    figure.savefig(FOLDER / "psis.png", dpi=110)


def active_sets() -> None:
    """The active-set density beside the exact one, over random active sets."""
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.rand(40, 1, generator=generator).double()
    K = torch.exp(-0.5 * torch.cdist(z, z).square()) + 0.1 * torch.eye(40).double()
    x = torch.linalg.cholesky(K) @ torch.randn(40, generator=generator).double()

    def log_prob(index: Tensor) -> Tensor:
        return torch.distributions.MultivariateNormal(
            torch.zeros(len(index)).double(), K[index][:, index]
        ).log_prob(x[index])

    exact = log_prob(torch.arange(40))
    sizes = (1, 2, 4, 8, 16, 32, 39)
    gaps: list[list[float]] = []
    for size in sizes:
        draws = []
        for _ in range(20):
            order = torch.randperm(40, generator=generator)
            active, rest = order[:size], order[size:]
            base = log_prob(active)
            draws.append(
                float(
                    base
                    + sum(log_prob(torch.cat([active, n[None]])) - base for n in rest)
                    - exact
                )
            )
        gaps.append(draws)
    figure, (axis,) = axes()
    axis.boxplot(
        gaps,
        tick_labels=list(map(str, sizes)),
        patch_artist=True,
        boxprops={"facecolor": GREY},
        medianprops={"color": BLUE},
    )
    axis.axhline(0, color=ORANGE)
    axis.set(
        xlabel="active points of 40",
        ylabel="nats",
        title="$L_A - \\log p(x \\mid z)$, twenty active sets each",
    )
    figure.savefig(FOLDER / "active_sets.png", dpi=110)


def subset_bounds() -> None:
    """Free energy by the number of inducing inputs."""
    generator = torch.Generator().manual_seed(0)
    x = 6 * torch.rand(60, 1, generator=generator).double()
    y = (2 * x).sin().squeeze(-1) + 0.3 * torch.randn(60, generator=generator).double()
    K = torch.exp(-2 * torch.cdist(x, x).square())

    def free_energy(index: list[int]) -> float:
        factor = torch.linalg.solve(
            K[index][:, index] + 1e-10 * torch.eye(len(index)).double(), K[index]
        )
        low_rank = K[:, index] @ factor
        S = low_rank + 0.09 * torch.eye(60).double()
        return float(
            0.5
            * (
                y @ torch.linalg.solve(S, y)
                + torch.logdet(S)
                + (K - low_rank).trace() / 0.09
            )
        )

    chosen: list[int] = []
    for _ in range(15):
        chosen.append(
            min(set(range(60)) - set(chosen), key=lambda j: free_energy([*chosen, j]))
        )
    figure, (axis,) = axes()
    for seed in range(5):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed)).tolist()
        axis.plot(range(1, 16), [free_energy(order[:m]) for m in range(1, 16)], color=GREY)
    axis.plot(range(1, 16), [free_energy(chosen[:m]) for m in range(1, 16)], color=BLUE)
    axis.set(
        xlabel="inducing inputs of 60",
        ylabel="$F$",
        title="chosen by gain (blue) and at random (grey)",
    )
    figure.savefig(FOLDER / "subset-bounds.png", dpi=110)


def product_sets() -> None:
    """Sets of states at the steps of a chain, and paths."""
    generator = torch.Generator().manual_seed(3)
    steps, states, kept = 12, 9, 3
    centre = (4 + 2.6 * torch.sin(torch.arange(steps) / 2.0)).round().long()
    figure, (axis,) = axes()
    sets = [
        torch.tensor(sorted({max(0, min(states - 1, int(c) + d)) for d in (-1, 0, 1)}))[
            :kept
        ]
        for c in centre
    ]
    for t in range(steps - 1):
        for one in sets[t].tolist():
            for other in sets[t + 1].tolist():
                axis.plot(
                    [t, t + 1],
                    [one, other],
                    color=BLUE,
                    alpha=0.15 + 0.35 * float(torch.rand(1, generator=generator)),
                    linewidth=1,
                )
    for t in range(steps):
        axis.plot([t] * states, range(states), "o", color=GREY, markersize=3)
        axis.plot([t] * len(sets[t]), sets[t].tolist(), "o", color=ORANGE, markersize=6)
    axis.set(
        xlabel="step",
        ylabel="state",
        title=f"{kept} states at each of {steps} steps stand for $3^{{{steps}}}$ paths",
    )
    figure.savefig(FOLDER / "product-sets.png", dpi=110)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    drawings: tuple[Callable[[], None], ...]
    drawings = (
        bound,
        operators,
        restarts,
        networks,
        collapsing,
        psis,
        active_sets,
        subset_bounds,
        product_sets,
    )
    for draw in drawings:
        draw()
