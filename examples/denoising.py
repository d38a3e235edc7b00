"""Takes noise off a photograph, or fills in what is missing, with a dictionary learned from the damaged image itself.

Every small patch of the image is a sum of few dictionary elements of normally distributed strength (spike-and-slab sparse coding).
Truncated EM learns the elements from overlapping patches, with two searches side by side: greedy pursuit, written here as users would
write searches of their own, and evolution. The result is the posterior mean of all patches, averaged where they overlap.

    python examples/denoising.py --noise 25
    python examples/denoising.py --noise 5 --missing 0.5 --patch 8 --elements 10 --stride 2 --final-stride 2

writes denoising.png (or inpainting.png): the image, its damaged version, the result, and the dictionary.
"""

import argparse
import math
import time
from pathlib import Path

import matplotlib
import pyro
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.nn import functional as F

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Population, Truncated_ELBO
from pyro_truncated.datasets import generated_images, load
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.models import SpikeSlabSparseCoding
from pyro_truncated.search import Search, SearchBatch


class Pursuit(Search):
    """Matching pursuit: proposes the states on a greedy path, each with the element more that explains most of what is left over."""

    def __init__(self, model: SpikeSlabSparseCoding, length: int) -> None:
        self.model, self.length = model, length

    def propose(self, batch: SearchBatch) -> Population:
        """The ``length`` states of the path of every data point."""
        y = batch.observations["y"].nan_to_num(0.0)
        directions = F.normalize(self.model.weight.detach(), dim=0)
        similarity = y @ directions
        gram = directions.mT @ directions
        # States of single elements, as the bits of integers: a state with one element more is "or".
        single = batch.space.pack(torch.eye(len(gram), dtype=torch.uint8))
        path = [single.new_zeros(len(y), single.shape[1])]
        for _ in range(self.length):
            best = similarity.abs().argmax(1, keepdim=True)
            similarity -= similarity.gather(1, best) * gram[best.squeeze(1)]
            path.append(path[-1] | single[best.squeeze(1)])
        return batch.scored(torch.stack(path[1:], 1))


def patches_of(image: Tensor, size: int, stride: int) -> Tensor:
    """Overlapping patches ``(N, size**2)``; the last ones end with the image whatever the stride."""
    windows = image.unfold(0, size, 1).unfold(1, size, 1)
    rows, columns = (positions(n, stride) for n in windows.shape[:2])
    return windows[rows[:, None], columns].flatten(0, 1).flatten(1)


def positions(count: int, stride: int) -> Tensor:
    """Every ``stride``-th of so many positions, and the last."""
    return torch.tensor(sorted({*range(0, count, stride), count - 1}))


def image_of(patches: Tensor, weights: Tensor, shape: tuple[int, int], size: int, stride: int) -> Tensor:
    """The image in which every pixel is the mean of what the patches ``(N, size**2)`` say, with weights ``(N,)``."""
    rows, columns = (positions(n - size + 1, stride) for n in shape)
    total, count = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    weight = weights.double().unflatten(0, (len(rows), len(columns)))
    grid = weight[..., None, None] * patches.double().unflatten(0, (len(rows), len(columns))).unflatten(2, (size, size))
    for i in range(size):
        for j in range(size):
            total[(rows + i)[:, None], columns + j] += grid[:, :, i, j]
            count[(rows + i)[:, None], columns + j] += weight
    return total / count


def cosine_elements(size: int, frequencies: int) -> Tensor:
    """Products of cosines of so many frequencies in either direction, ``(size**2, frequencies**2)``, of unit length."""
    waves = torch.cos(math.pi * torch.outer(torch.arange(size) + 0.5, torch.arange(frequencies)) / frequencies)
    waves[:, 1:] -= waves[:, 1:].mean(0)
    return F.normalize(torch.einsum("ik,jl->ijkl", waves, waves).reshape(size**2, -1), dim=0)


def noise_level(patches: Tensor) -> Tensor:
    """A first guess of the noise's standard deviation: the median of the differences of neighbouring pixels, little affected by edges."""
    differences = (patches[:, 1:] - patches[:, :-1]).abs()
    return differences.nanmedian() / (0.6745 * 2**0.5)


def learn(args: argparse.Namespace, y: Tensor) -> tuple[SpikeSlabSparseCoding, AutoTruncated, Search, list[float]]:
    """The model, the guide with its posteriors, the search, and the free energies per patch."""
    pyro.clear_param_store()
    pyro.set_rng_seed(args.seed)
    model = SpikeSlabSparseCoding(args.patch**2, args.elements**2)
    model.weight = cosine_elements(args.patch, args.elements)
    model.scale = noise_level(y)
    model.slab_mean = torch.zeros_like(model.slab_mean)
    model.slab_scale = torch.full_like(model.slab_scale, args.patch * float(y.nan_to_num(0.0).std()) / 4)
    search = Pursuit(model, args.path) + EvolutionarySearch(args.parents, args.children, 1)
    guide = AutoTruncated(model, num_states=args.states)
    svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))
    return model, guide, search, [-svi.step(y) / len(y) for _ in range(args.iterations)]


def restore(args: argparse.Namespace, damaged: Tensor) -> tuple[Tensor, SpikeSlabSparseCoding, list[float]]:
    """The image restored, the model and its free energies."""
    brightness = damaged.nanmean()
    y = patches_of(damaged - brightness, args.patch, args.stride)
    model, guide, search, free_energies = learn(args, y)
    if args.final_stride != args.stride:
        y = patches_of(damaged - brightness, args.patch, args.final_stride)
        guide = guide.infer(y, search, args.final_steps)
    shape = (damaged.shape[0], damaged.shape[1])
    population = guide.population()
    # The noise that remains in a patch is in its active elements: the fewer, the more it may say about a pixel.
    weights = 1 / (1 + population.activity())
    restored = image_of(model.reconstruct(population, y), weights, shape, args.patch, args.final_stride) + brightness
    return restored.clamp(0, 255), model, free_energies


def psnr(image: Tensor, truth: Tensor) -> float:
    """Peak signal to noise ratio in decibels."""
    return float(10 * torch.log10(255**2 / (image - truth).double().square().mean()))


def picture(truth: Tensor, damaged: Tensor, restored: Tensor, model: SpikeSlabSparseCoding, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    axes = figure.subplots(1, 4)
    is_seen = ~damaged.isnan()
    titles = ("image", f"damaged: {psnr(damaged[is_seen], truth[is_seen]):.2f} dB where seen", f"restored: {psnr(restored, truth):.2f} dB")
    for ax, image, title in zip(axes, (truth, damaged.nan_to_num(0.0), restored), titles, strict=False):
        ax.imshow(image.numpy(), cmap="gray", vmin=0, vmax=255)
        ax.set_title(title, fontsize=10)
        ax.set_axis_off()
    # What an element adds to the variance of a patch says how much it is used.
    prior, mean, deviation = model.prior.detach(), model.slab_mean.detach(), model.slab_scale.detach()
    used = (prior * (mean.square() + deviation.square())).argsort(descending=True)[:100]
    plots.plot_dictionary(model.weight.detach()[:, used], axes[3], columns=10).set_title("most used elements", fontsize=10)
    figure.savefig(path, dpi=75, facecolor="white")


def main(args: argparse.Namespace) -> None:
    matplotlib.use("Agg")
    if args.image == "generated":
        truth = 255 * generated_images(1, args.crop or 256, torch.Generator().manual_seed(0))[0]
    else:
        truth = torch.from_numpy(load("denoising_images")[args.image]).float()
    truth = truth[: args.crop or None, : args.crop or None]
    generator = torch.Generator().manual_seed(args.seed)
    damaged = truth + args.noise * torch.randn(truth.shape, generator=generator)
    damaged[torch.rand(truth.shape, generator=generator) < args.missing] = math.nan
    start = time.process_time()
    restored, model, free_energies = restore(args, damaged)
    seconds = time.process_time() - start
    active = float(model.prior.detach().sum())
    print(
        f"{args.image}, noise {args.noise:g}, {100 * args.missing:.0f} % missing: {psnr(restored, truth):.2f} dB; noise learned "
        f"{model.scale.item():.2f}, {active:.1f} of {args.elements**2} elements active, free energy per patch {free_energies[0]:.1f} to "
        f"{free_energies[-1]:.1f}, {seconds:.0f} CPU seconds"
    )
    args.output.mkdir(parents=True, exist_ok=True)
    path = args.output / ("inpainting.png" if args.missing else "denoising.png")
    picture(truth, damaged, restored, model, path)
    print(f"picture: {path}")


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--image", default="house", help="a name in denoising_images.npz, or 'generated'")
    parser.add_argument("--noise", type=float, default=25.0, help="standard deviation, of 255 grey values")
    parser.add_argument("--missing", type=float, default=0.0, help="share of the pixels that are missing")
    parser.add_argument("--crop", type=int, default=0, help="side of a corner of the image to work on; 0: all of it")
    parser.add_argument("--patch", type=int, default=12, help="side of a patch in pixels")
    parser.add_argument("--stride", type=int, default=1, help="distance of neighbouring patches to learn from; at 2, elements learn noise")
    parser.add_argument("--final-stride", type=int, default=1, help="distance of neighbouring patches in the result")
    parser.add_argument("--final-steps", type=int, default=4, help="search steps for patches that were not learned from")
    parser.add_argument("--elements", type=int, default=18, help="square root of the number of dictionary elements H")
    parser.add_argument("--states", type=int, default=10, help="states per patch, S")
    parser.add_argument("--path", type=int, default=8, help="length of the greedy path")
    parser.add_argument("--parents", type=int, default=3)
    parser.add_argument("--children", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("report"))
    parser.add_argument("--smoke", action="store_true", help="tiny settings: does it run at all?")
    args = parser.parse_args(arguments)
    if max(args.stride, args.final_stride) > args.patch:
        parser.error("--stride and --final-stride must not exceed --patch, or pixels would be left out")
    if args.smoke:
        args.image, args.crop, args.patch, args.elements, args.iterations = "generated", 24, 4, 5, 3
    return args


if __name__ == "__main__":
    main(parse_args())
