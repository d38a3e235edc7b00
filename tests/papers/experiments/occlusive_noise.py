"""Whether objects are found in noise without spare ones, by the start and by `learn`: one line of JSON for each run.

    python -m tests.papers.experiments.occlusive_noise --noise 0.15 --seeds 20
    python -m tests.papers.experiments.occlusive_noise --noise 0.15 --seeds 20 --only-start

The scenes are those of `occlusive_components.py`: 16 COIL-100 objects, 30 x 30 pixels.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from typing import Any

import pyro
import torch
from torch import Tensor

from pyro_truncated import DisagreeingStartsWarning, LearnConfig, learn
from pyro_truncated.models import OcclusiveComponents
from pyro_truncated.scenes import Objects, coil_objects, match_objects, occluded_scenes

NUM_OBJECTS, NUM_DATA = 16, 1000


def found_objects(model: OcclusiveComponents, objects: Objects) -> dict[str, Any]:
    """How many objects are recovered, and the similarity of the one that is recovered worst."""
    match = match_objects(model.features, model.masks, objects)
    return {"recovered": int(match.is_recovered().sum()), "least_similar": round(float(match.similarity.max(1).values.min()), 3)}


def start(model: OcclusiveComponents, y: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    model.initialize(y)
    return {}


def train(model: OcclusiveComponents, y: Tensor, args: argparse.Namespace) -> dict[str, Any]:
    asked = {"num_states": args.states, "steps": args.steps, "restarts": args.starts}
    asked["config"] = LearnConfig(restart_steps=args.short_steps)
    given = {name: value for name, value in asked.items() if value is not None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        guide = learn(model, y, progress=False, **given)
    free_energy = float(guide.population().free_energy().mean())
    return {"starts": guide.starts, "free_energy": free_energy, "warned": len(caught) > 0}


def run(seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run."""
    objects = coil_objects(NUM_OBJECTS)
    y = occluded_scenes(objects, NUM_DATA, noise=args.noise, generator=torch.Generator().manual_seed(seed)).data
    pyro.set_rng_seed(1000 + seed)
    pyro.clear_param_store()
    model = OcclusiveComponents(args.learned)
    began = time.process_time()
    result = (start if args.only_start else train)(model, y, args)
    seconds = round(time.process_time() - began, 1)
    return {"seed": seed, "noise": args.noise, **found_objects(model, objects), **result, "cpu_seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--noise", type=float, default=0.15)
    parser.add_argument("--learned", type=int, default=NUM_OBJECTS, help="number of learned objects")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=20)
    for name in ("states", "steps", "short-steps", "starts"):
        parser.add_argument(f"--{name}", type=int, help="default: as `learn` has it")
    parser.add_argument("--only-start", action="store_true", help="no learning")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(args.first_seed, args.first_seed + args.seeds):
        print(json.dumps(run(seed, args)), flush=True)


if __name__ == "__main__":
    main()
