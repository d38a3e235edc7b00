"""Dictionaries of natural image patches: binary sparse coding on whitened patches, noisy-OR on binary ones (Evolutionary EM, section 5.2).

python -m tests.papers.experiments.natural_patches --model bsc --num-data 100000 --iterations 300 --device cuda --output folder
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI

from pyro_truncated import AutoTruncated, ClosedForm, EvolutionarySearch, Truncated_ELBO
from pyro_truncated.datasets import binary_patches, natural_images, whitened_patches
from pyro_truncated.models import BinarySparseCoding, NoisyOr
from tests.papers.experiments.evolutionary_em import cooling


def run(
    model_name: str,
    num_data: int,
    iterations: int,
    device: str,
    seed: int = 0,
    num_latents: int | None = None,
    seconds: float = 1e9,
    batch_size: int | None = None,
    start: str = "data",
    temperature: float | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Trains one model with the paper's search, by online EM if there is a batch size; stops early after the given time."""
    generator = torch.Generator().manual_seed(seed)
    pyro.set_rng_seed(seed)
    pyro.clear_param_store()
    if model_name == "bsc":
        y, _ = whitened_patches(natural_images(), 16, num_data, generator)
        model = BinarySparseCoding(256, num_latents or 300, offset=False).to(device)
        search = EvolutionarySearch(10, 9, 4, crossover=True, mutation="sparseflips")
        num_states, hottest = 200, 4.0
    else:
        y = binary_patches(natural_images("vanhateren"), 10, num_data, generator)
        model = NoisyOr(100, num_latents or 100).to(device)
        search = EvolutionarySearch(8, 7, 2, mutation="sparseflips")
        num_states, hottest = 120, 2.0
    y = y.to(device)
    model.initialize(y)
    if start == "noise":
        with torch.no_grad():
            model.weight = y.mean(0).unsqueeze(1) + 0.2 * y.std() * torch.randn(model.weight.shape, device=y.device)
    guide = AutoTruncated(model, num_states=num_states)
    svi = SVI(
        model,
        guide,
        ClosedForm(model, minibatch="online"),
        Truncated_ELBO(search, temperature=cooling(temperature or hottest, iterations, 0.5)),
    )
    history: dict[str, list[float]] = {"free_energy": [], "active": [], "scale": []}
    began = time.perf_counter()
    for _ in range(iterations):
        history["free_energy"].append(-svi.step(y, batch_size) / num_data)
        prior = model.prior.detach()
        history["active"].append(float(prior.sum() if prior.dim() else prior * model.num_latents))
        history["scale"].append(float(getattr(model, "scale", torch.tensor(torch.nan)).detach()))
        if time.perf_counter() - began > seconds:
            break
    summary = {
        "model": model_name, "num_data": num_data, "batch_size": batch_size, "start": start,
        "temperature": temperature or hottest, "iterations": len(history["free_energy"]), "device": device,
        "seconds": time.perf_counter() - began, "first": history["free_energy"][0], "last": history["free_energy"][-1],
        "active": history["active"][-1], "history": history,
    }  # fmt: skip
    return model, summary


def save_fields(weight: torch.Tensor, file: Path, columns: int = 20, num: int | None = None) -> None:
    """Draws generative fields as a grid, each scaled on its own, strongest first."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fields = weight.detach().cpu().mT
    fields = fields[fields.norm(dim=1).argsort(descending=True)][:num]
    side = round(fields.shape[1] ** 0.5)
    rows = -(-len(fields) // columns)
    canvas = torch.full((rows * (side + 1), columns * (side + 1)), torch.nan)
    for k, field in enumerate(fields):
        r, c = divmod(k, columns)
        canvas[r * (side + 1) : r * (side + 1) + side, c * (side + 1) : c * (side + 1) + side] = (field / field.abs().max()).reshape(
            side, side
        )
    zoom = -(-32 // side)
    enlarged = canvas.repeat_interleave(zoom, 0).repeat_interleave(zoom, 1).numpy()
    plt.imsave(file, enlarged, cmap="gray", vmin=-1 if bool((fields < 0).any()) else 0, vmax=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["bsc", "noisy_or"], default="bsc")
    parser.add_argument("--num-data", type=int, default=100_000)
    parser.add_argument("--num-latents", type=int)
    parser.add_argument("--batch-size", type=int, help="patches per iteration, default all")
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument(
        "--start", choices=["data", "noise"], default="data", help="fields start from data points, or from their mean with noise"
    )
    parser.add_argument("--temperature", type=float, help="at the start; it falls to 1 over the first half")
    parser.add_argument("--seconds", type=float, default=1e9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("report"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    options = {"num_latents": args.num_latents, "seconds": args.seconds, "batch_size": args.batch_size, "start": args.start}
    options["temperature"] = args.temperature
    model, summary = run(args.model, args.num_data, args.iterations, args.device, **options)
    (args.output / f"patches_{args.model}.json").write_text(json.dumps(summary))
    save_fields(model.weight, args.output / f"patches_{args.model}.png")
    print({key: value for key, value in summary.items() if key != "history"})


if __name__ == "__main__":
    main()
