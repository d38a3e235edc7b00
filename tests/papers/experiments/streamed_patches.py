"""A million natural image patches that stay on the disk: held-out free energy and Gabor functions against the number of fields.

python -m tests.papers.experiments.streamed_patches FOLDER --num-latents 1000 --passes 4

Whitened patches of all images but the last two are written to a file once; binary sparse coding is trained on them by online EM, on
minibatches of successive rows, with populations in files. The experiment reports once all passes are done. What was interrupted goes on
from its checkpoint, and so does a run of fewer passes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyro
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_truncated import AutoTruncated, ClosedForm, Training, Truncated_ELBO, distributed, fit
from pyro_truncated.callbacks import RestartUnused
from pyro_truncated.datasets import Whitening, natural_images, save_whitened_patches, whitened_patches
from pyro_truncated.models import BinarySparseCoding
from pyro_truncated.search import CombinedFlips
from tests.papers.experiments.gabor import fit_gabors
from tests.papers.experiments.natural_patches import save_fields

SIDE, MINIBATCH, HELD_OUT = 16, 5000, 2000
# Unused fields start again every so many steps, but not in the last ones, in which they would learn nothing.
EVERY, LAST = 20, 40
UNUSED = 1e-4  # of the patches: fields that are on in fewer


@dataclasses.dataclass
class Clock:
    """A callback that records CPU time, activity and noise."""

    model: BinarySparseCoding
    last: float = 0.0

    def start(self, training: Training) -> None:
        """Begins to count."""
        self.last = time.process_time()

    def __call__(self, training: Training) -> dict[str, float]:
        """What is recorded of a step."""
        now, before = time.process_time(), self.last
        self.last = now
        active = float(self.model.prior.detach()) * self.model.num_latents
        return {"cpu": now - before, "active": active, "scale": float(self.model.scale.detach())}


def data(folder: Path, num_data: int) -> tuple[Path, Tensor, Whitening]:
    """The file of the patches, made if there is none; held-out patches of other images, and the whitening of all."""
    file, kept = folder / f"patches-{num_data}.npy", folder / f"patches-{num_data}.pt"
    if not kept.exists():
        generator = torch.Generator().manual_seed(0)
        images = natural_images("hyvarinen")
        whitening = save_whitened_patches(file, images[:-2], SIDE, num_data, generator)
        held_out, _ = whitened_patches(images[-2:], SIDE, HELD_OUT, generator, whitening=whitening)
        torch.save({"held_out": held_out, **dataclasses.asdict(whitening)}, kept)
    saved = torch.load(kept)
    return file, saved.pop("held_out"), Whitening(**saved)


def train(
    folder: Path, num_data: int, num_latents: int, passes: int, num_states: int, is_restarting: bool, rounds: int
) -> tuple[Any, Training]:
    """Online EM; goes on from a checkpoint."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    y = distributed.shard(np.load(folder / f"patches-{num_data}.npy", mmap_mode="r"))
    model = BinarySparseCoding(SIDE**2, num_latents, offset=False).initialize(y)
    guide = AutoTruncated(model, num_states=num_states, store=folder / f"populations-{num_latents}")
    svi = SVI(model, guide, ClosedForm(model, minibatch="online"), Truncated_ELBO(CombinedFlips(rounds=rounds) if rounds else None))
    steps = passes * -(-num_data // MINIBATCH)
    restarts = [RestartUnused(y, every=EVERY, until=steps - LAST)] if is_restarting else []
    training = fit(
        svi, y, steps=steps, batches=distributed.Batches(y, MINIBATCH), callbacks=[*restarts, Clock(model)],
        checkpoint=folder / f"run-{num_data}-{num_latents}.pt", checkpoint_seconds=900, progress=False,
    )  # fmt: skip
    return model, training


def held_out_free_energy(model: BinarySparseCoding, y: Tensor, num_states: int = 100, steps: int = 10) -> float:
    """Free energy per patch of patches of images that were not seen."""
    guide = AutoTruncated(model, num_states=num_states).infer(y, CombinedFlips(8), steps)
    return float(guide.population().free_energy().mean())


def summary(model: BinarySparseCoding, training: Training, held_out: Tensor, num_data: int) -> dict[str, Any]:
    """What is reported of a run; free energies are those of a patch, the mean of every pass."""
    per_pass = -(-num_data // MINIBATCH)
    start = time.process_time()
    fits = fit_gabors(model.weight.mT)
    record = training.record
    free_energy = np.array(record["free_energy"]).reshape(-1, per_pass).mean(1) / num_data
    return {
        "num_latents": model.num_latents, "passes": training.steps // per_pass, "cpu_seconds": sum(record["cpu"]),
        "ms_per_patch": 1e3 * sum(record["cpu"]) / training.steps / MINIBATCH, "active": record["active"][-1], "scale": record["scale"][-1],
        "free_energy": free_energy.tolist(), "held_out": held_out_free_energy(model, held_out),
        "restarted": sum(record.get("restarted", [])), "unused": int((training.svi.optim.statistics["states"] < UNUSED * num_data).sum()),
        "gabor_share": float((fits.r_squared > 0.8).double().mean()), "r_squared": fits.r_squared.sort().values.tolist(),
        "gabor_seconds": time.process_time() - start, "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for data, populations and checkpoints: 5 GB and more")
    parser.add_argument("--num-data", type=int, default=1_000_000)
    parser.add_argument("--num-latents", type=int, nargs="+", default=[1000])
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--num-states", type=int, default=24)
    parser.add_argument("--restart", action="store_true", help="fields that are hardly ever on")
    parser.add_argument("--rounds", type=int, default=0, help="of combined flips; default: no search is named")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    _, held_out, _ = data(args.folder, args.num_data)
    for number in args.num_latents:
        model, training = train(args.folder, args.num_data, number, args.passes, args.num_states, args.restart, args.rounds)
        found = {"num_data": args.num_data, "num_states": args.num_states, "restart": args.restart, "rounds": args.rounds}
        found |= summary(model, training, held_out, args.num_data)
        with (args.folder / "results.jsonl").open("a") as stream:
            stream.write(json.dumps(found) + "\n")
        save_fields(model.weight, args.folder / f"fields-{number}.png", columns=40)
        print({key: value for key, value in found.items() if key != "r_squared"}, flush=True)


if __name__ == "__main__":
    main()
