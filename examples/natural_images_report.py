"""The report of natural_images.py: pictures, ArviZ files and their page."""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

import arviz as az
import matplotlib.pyplot as plt
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.nn.functional import fold, unfold

from pyro_truncated import AutoTruncated
from pyro_truncated.datasets import Whitening
from pyro_truncated.diagnostics import to_arviz
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.diagnostics.pages.summary_text import Section, write_page

ORIGIN = {
    "vanhateren": "a photograph of van Hateren's natural image collection",
    "hyvarinen": "eleven photographs from the book Natural Image Statistics (Hyvärinen, Hurri and Hoyer)",
    "sklearn": "the two photographs that scikit-learn ships",
    "generated": "generated images of overlapping discs",
}


class HeldOut(NamedTuple):
    """The held-out region: its overlapping patches, their posterior, and the reconstruction."""

    region: Tensor
    y: Tensor
    guide: AutoTruncated
    whitened_only: Tensor
    reconstruction: Tensor


def encode(args: argparse.Namespace, svi: SVI, whitening: Whitening, region: Tensor) -> HeldOut:
    """Infers the states of overlapping patches and averages their reconstructions."""
    size, stride = args.patch, args.patch // 2
    patches = unfold(region[None, None], size, stride=stride)[0].mT
    brightness = patches.mean(1, keepdim=True)
    y = whitening.apply(patches - brightness)
    search = svi.loss.__self__.search
    guide = svi.guide.infer(y, search, steps=40)

    def assemble(pieces: Tensor) -> Tensor:
        both = torch.stack([pieces, torch.ones_like(pieces)]).mT
        total, count = fold(both, region.shape, size, stride=stride).squeeze(1)
        return total / count

    whitened_only = assemble(whitening.invert(y) + brightness)
    mean = guide.marginals()["s"] @ svi.model.weight.detach().mT
    return HeldOut(region, y, guide, whitened_only, assemble(whitening.invert(mean) + brightness))


def psnr(image: Tensor, reference: Tensor) -> float:
    """Peak signal-to-noise ratio in dB."""
    return float(20 * torch.log10((reference.max() - reference.min()) / (image - reference).square().mean().sqrt()))


def write(args: argparse.Namespace, svi: SVI, data: Any, history: dict[str, list[float]]) -> tuple[dict[str, str], Path]:
    """Writes the report; returns its numbers and its path."""
    svi.guide.setup(data.y)
    marginals = svi.guide.marginals()["s"]
    order = marginals.mean(0).argsort(descending=True)
    held_out = encode(args, svi, data.whitening, data.region)
    summary = write_arviz(args.output, svi, held_out, history)
    numbers = {
        "nats per patch, free energy": f"{history['free_energy'][-1]:.2f}",
        f"of {args.latents} fields active per patch": f"{float(marginals.sum(1).mean()):.1f}",
        "states that share the posterior of a patch": f"{float(svi.guide.population().effective_states().mean()):.1f}",
        "dB, unseen region reconstructed": f"{psnr(held_out.reconstruction, held_out.whitened_only):.1f}",
        "seconds of training": f"{sum(history['seconds']):.0f}",
    }
    lead = (
        f"{len(data.y)} patches of {args.patch} x {args.patch} pixels were taken from {ORIGIN[data.source]}. Binary sparse coding explains each "
        f"as a sum of fields out of a dictionary of {args.latents}, each either present or absent, plus noise. That is 2^{args.latents} possible "
        f"explanations of every patch; the posterior is kept on the best {args.states} that an evolutionary search finds."
    )
    sections = {
        "dictionary": dictionary(svi, data.whitening, order),
        "decompositions": decompositions(svi, data, marginals),
        "reconstruction": reconstruction(held_out),
        "free_energy": free_energy(args, history),
        "activations": activations(args, marginals),
        "summary": summary,
        "how": how(args, data, history),
    }
    for name, section in sections.items():
        if section.figure is not None:
            section.figure.savefig(args.output / f"{name}.png", dpi=110, bbox_inches="tight", facecolor="white")
    page = write_page(args.output / "index.html", "What natural images are made of", lead, numbers, list(sections.values()))
    plt.close("all")
    return numbers, page


def dictionary(svi: SVI, whitening: Whitening, order: Tensor) -> Section:
    weight = svi.model.weight.detach()[:, order]
    figure, ax = plt.subplots(figsize=(7, 7))
    plots.plot_dictionary(whitening.dewhiten @ weight, ax)
    text = (
        "Every square is one learned field, the most used first: what switching on that latent adds to a patch, back in pixels (white adds light, black takes "
        "it away, grey leaves it). Nothing told the model about edges. That oriented, localised strokes and edges appear, like the "
        "receptive fields of simple cells in the visual cortex, is what natural images themselves suggest as their parts."
    )
    return Section("The dictionary", text, figure)


def decompositions(svi: SVI, data: Any, marginals: Tensor) -> Section:
    mode = svi.guide.mode()["s"].bool()
    active, fields = mode.sum(1), (data.whitening.dewhiten @ svi.model.weight.detach()).mT
    # Patches that are typical in their number of parts and well explained, spread over all such.
    pixels = data.whitening.invert(data.y) - data.whitening.mean
    error = (pixels - mode.float() @ fields).square().sum(1) / pixels.square().sum(1)
    few = ((active >= 3) & (active <= 8)).nonzero().squeeze(-1)
    rows = few[error[few].argsort()[: max(1, len(few) // 4)]] if len(few) else active.argsort(descending=True)
    rows = rows[torch.linspace(0, len(rows) - 1, min(8, len(rows))).long()]
    figure, ax = plt.subplots(figsize=(8, 6.5))
    plots.plot_decompositions(pixels[rows], [fields[mode[row]] for row in rows], ax)
    text = (
        "Some patches (left) that the model explains well, taken apart by its most probable state: the sum of the fields that are on (second column), and these fields one "
        "by one, the strongest first. A field is on or off; there is no brightness to adjust, so what looks like the patch is "
        "the choice of fields alone."
    )
    return Section("Patches taken apart", text, figure)


def reconstruction(held_out: HeldOut) -> Section:
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.2))
    low, high = float(held_out.region.min()), float(held_out.region.max())
    images = {"original": held_out.region, "what whitening keeps": held_out.whitened_only, "reconstruction": held_out.reconstruction}
    for ax, (title, image) in zip(axes, images.items(), strict=True):
        ax.imshow(image.numpy(), cmap="gray", vmin=low, vmax=high)
        ax.set_title(title, fontsize=10)
        ax.set_axis_off()
    active = float(held_out.guide.marginals()["s"].sum(1).mean())
    text = (
        "A part of an image that was kept out of training: of the strip kept out, the piece with most contrast. The middle is the best that any dictionary could do after the preprocessing; the right is "
        f"put together from the posterior means of overlapping patches, each of which uses {active:.1f} fields on average and its mean "
        f"brightness. Its distance from the middle is {psnr(held_out.reconstruction, held_out.whitened_only):.1f} dB (peak signal-to-noise ratio, higher is better), "
        f"from the original {psnr(held_out.reconstruction, held_out.region):.1f} dB."
    )
    return Section("A region never seen before", text, figure)


def free_energy(args: argparse.Namespace, history: dict[str, list[float]]) -> Section:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2))
    plots.plot_free_energy(history["free_energy"], axes[0])
    axes[0].set_ylabel("free energy per patch (nats)")
    axes[1].plot(history["active"], color=plots.COLOUR, label="active fields per patch")
    axes[1].plot([args.patch * noise for noise in history["noise"]], color=plots.ACCENT, label="noise: norm per patch")
    axes[1].set_xlabel("iteration")
    axes[1].legend(frameon=False)
    axes[1].spines[["top", "right"]].set_visible(False)
    text = (
        "The free energy is a lower bound on the log likelihood of the data, so higher is better. It rises as the search finds better states "
        f"(E-step) and the dictionary adapts to them (M-step). The posterior is flattened by a temperature at first, {args.temperature:g} falling to 1 over the first "
        "60 % of the run, so that fields do not settle too early. Meanwhile the noise shrinks, "
        "since more fields take over what it had to explain. "
        f"In its last tenth the run still gained {history['free_energy'][-1] - history['free_energy'][int(0.9 * args.iterations) - 1]:.1f} nats per patch: "
        "--iterations makes it longer."
    )
    return Section("Learning", text, figure)


def activations(args: argparse.Namespace, marginals: Tensor) -> Section:
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.2))
    plots.plot_activations(marginals, axes[0])
    plots.plot_usage(marginals, axes[1])
    text = (
        f"Left: how many of the {args.latents} fields a patch uses; few, because the model learned that each is rarely present. Right: how often each "
        "field is used. No field stands idle, and none is in every patch."
        if bool((marginals.mean(0) > 1e-3).all())
        else f"Left: how many of the {args.latents} fields a patch uses. Right: how often each field is used; those at zero stand idle."
    )
    return Section("Sparseness", text, figure)


def write_arviz(folder: Path, svi: SVI, held_out: HeldOut, history: dict[str, list[float]]) -> Section:
    """Writes the posterior of the held-out region as netCDF, and its summary."""
    training = {name: history[name] for name in ("free_energy", "active", "noise")}
    data = to_arviz(
        svi.model,
        held_out.guide,
        held_out.y,
        num_samples=50,
        num_predictive=0,
        dims={"s": ["field"], "y": ["pixel"]},
        seed=0,
        training=training,
    )
    data.to_netcdf(str(folder / "posterior.nc"))
    weights = held_out.guide.weights()
    entropy = torch.special.entr(weights).sum(1)
    patch = int(entropy.argmax())
    summary = az.summary(data, var_names=["s"], coords={"data": [patch]}, kind="stats", round_to=3)
    summary.to_csv(folder / "summary.csv")
    unsure = summary[(summary["mean"] > 0.02)].sort_values("mean", ascending=False).head(12)
    table = [
        ["latent", *map(str, unsure.columns)],
        *([str(name), *map(str, row)] for name, row in zip(unsure.index, unsure.to_numpy(), strict=True)),
    ]
    text = (
        f"The posterior of all {len(held_out.y)} patches of the region above is in posterior.nc, for ArviZ: arviz.from_netcdf('posterior.nc'). Below is its summary for "
        f"the patch whose explanation is least certain (number {patch}; all {len(summary)} fields are in summary.csv). The mean is the probability that the field is present: near 1 or "
        "0 where the model is sure, in between where several explanations compete."
    )
    return Section("The posterior, as ArviZ sees it", text, table=table)


def how(args: argparse.Namespace, data: Any, history: dict[str, list[float]]) -> Section:
    hidden = {"output", "fresh", "smoke", "checkpoint_every", "source"}
    rows = [
        ["setting", "value"],
        ["images", ORIGIN[data.source]],
        *([name, value] for name, value in vars(args).items() if name not in hidden),
    ]
    rows += [
        ["principal components kept", f"{data.whitening.num_components} of {args.patch**2}"],
        ["seconds per iteration", f"{sum(history['seconds']) / len(history['seconds']):.2f}"],
        ["threads", torch.get_num_threads()],
    ]
    text = (
        "Preprocessing: the brightest 2 % of the pixels are clamped, patches without structure left out, the mean of each patch is taken off, and the rest is whitened on the principal "
        "components that hold 95 % of the variance. Training is pyro.infer.SVI with AutoTruncated, Truncated_ELBO, EvolutionarySearch and ClosedForm."
    )
    return Section("How it was made", text, table=rows)
