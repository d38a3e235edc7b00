"""A variational autoencoder with binary latents, trained without an encoder.

    python examples/binary_vae.py

learns a neural network over binary latents from patches of MNIST, or of scikit-learn's digits where the data folder has no MNIST. It
writes binary_vae.png: what single latents draw, patches beside their reconstructions, patches drawn from the model, the free energy.
"""

import argparse
import time
from pathlib import Path

import matplotlib
import pyro
import torch
from pyro.infer import SVI
from pyro.optim import Adam

from pyro_truncated import AutoTruncated, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import DatasetNotFoundError, image_patches, load
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.models import BinaryVAE


def make_patches(num: int, size: int, seed: int) -> torch.Tensor:
    """Patches ``(num, size**2)`` with something on them, grey values from 0 to 1."""
    try:
        images = torch.from_numpy(load("mnist_train")["X"][:2000]) / 255
    except DatasetNotFoundError:
        from sklearn.datasets import load_digits

        small = torch.from_numpy(load_digits().images).float() / 16
        images = torch.nn.functional.interpolate(small.unsqueeze(1), scale_factor=3.0, mode="bilinear").squeeze(1)
    patches = image_patches(list(images), size, 3 * num, torch.Generator().manual_seed(seed))
    return patches[patches.mean(1) > 0.1][:num]


def learn(args: argparse.Namespace, y: torch.Tensor) -> tuple[BinaryVAE, AutoTruncated, list[float]]:
    """Returns the model, its posterior, and the free energy after every epoch."""
    model = BinaryVAE(y.shape[1], args.latents, hidden=(args.hidden,)).initialize(y)
    guide = AutoTruncated(model, num_states=args.states)
    elbo = Truncated_ELBO(EvolutionarySearch(args.parents, args.children, 1, mutation="sparseflips"))
    svi = SVI(model, guide, Adam({"lr": args.learning_rate}), elbo)
    history, steps = [], max(1, len(y) // args.batch)
    for epoch in range(args.epochs):
        loss = sum(svi.step(y, args.batch) for _ in range(steps)) / steps
        history.append(-loss / len(y))
        if epoch % max(1, args.epochs // 10) == 0 or epoch == args.epochs - 1:
            # Random batches may have left some patches out.
            active = float(guide.refresh_(y).activity().mean())
            print(f"epoch {epoch + 1:3}   free energy {history[-1]:8.2f}   noise {float(model.scale.detach()):.3f}   active {active:.2f}")
    return model, guide, history


def picture(model: BinaryVAE, guide: AutoTruncated, y: torch.Tensor, history: list[float], path: Path) -> None:
    from matplotlib.figure import Figure

    with torch.no_grad():
        nothing = model.mean(torch.zeros(model.num_latents))
        alone = model.mean(torch.eye(model.num_latents)) - nothing
        order = guide.marginals()["s"].mean(0).argsort(descending=True)
        rows = torch.arange(min(20, len(y)))
        pairs = torch.stack([y[rows], model.reconstruct(guide.population(rows))], 1).flatten(0, 1)
        drawn = model.mean(torch.bernoulli(model.prior.expand(40, -1)))
    figure = Figure(figsize=(11, 8), layout="constrained")
    axes = figure.subplots(2, 2)
    plots.plot_dictionary(alone[order].mT, axes[0, 0], columns=8).set_title(
        "what each latent adds to an empty state, most used first", fontsize=10
    )
    plots.plot_dictionary(2 * pairs.mT - 1, axes[0, 1], columns=10).set_title(
        "patches, each with its reconstruction to the right", fontsize=10
    )
    plots.plot_dictionary(2 * drawn.mT - 1, axes[1, 0], columns=8).set_title("drawn from the model, without noise", fontsize=10)
    plots.plot_free_energy(history, axes[1, 1]).set(xlabel="epoch", ylabel="", title="free energy per patch")
    figure.savefig(path, dpi=70, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    y = make_patches(args.patches, args.size, args.seed)
    start = time.monotonic()
    model, guide, history = learn(args, y)
    error = (y - model.reconstruct(guide.population())).square().mean()
    print(
        f"{len(y)} patches of {args.size} x {args.size} pixels, {args.latents} latents, {time.monotonic() - start:.0f} s; "
        f"reconstructions explain {1 - float(error / y.var(0).mean()):.1%} of the variance"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    picture(model, guide, y, history, args.output / "binary_vae.png")
    print(f"picture: {args.output / 'binary_vae.png'}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--patches", type=int, default=1500)
    parser.add_argument("--size", type=int, default=10, help="side of a patch")
    parser.add_argument("--latents", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=64, help="width of the hidden layer")
    parser.add_argument("--states", type=int, default=24)
    parser.add_argument("--parents", type=int, default=6)
    parser.add_argument("--children", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if args.smoke:
        args.patches, args.size, args.latents, args.hidden, args.states, args.epochs, args.batch = 60, 5, 6, 8, 8, 3, 30
    return args


if __name__ == "__main__":
    main(parse_args())
