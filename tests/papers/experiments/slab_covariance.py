"""Is a known covariance of slabs found by ``learn``, and does it pay on new data? ``python -m tests.papers.experiments.slab_covariance``.

Bars of 8x8 pixels, on with probability 0.2, whose sizes are normal with mean 3 and deviation 1, times the bars' heights of 3; the sizes
of each pair of neighbours have a correlation of 0.8, of each second pair of -0.8. The noise has deviation one.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import pyro
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn.functional import normalize

from pyro_truncated import AutoTruncated, learn
from pyro_truncated.models import SpikeSlabSparseCoding
from pyro_truncated.multistart import DisagreeingStartsWarning
from pyro_truncated.search import CombinedFlips

SIZE, PROBABILITY, HEIGHT, MEAN, CORRELATION = 8, 0.2, 3.0, 3.0, 0.8
NUM_LATENTS, NUM_NEW = 2 * SIZE, 2000


def truth(covariance: str) -> SpikeSlabSparseCoding:
    """The model that has made the data, or with the same variances of its slabs alone."""
    model = SpikeSlabSparseCoding(SIZE**2, NUM_LATENTS, covariance=covariance, offset=False, dtype=torch.float64)
    rows = torch.eye(SIZE, dtype=torch.float64).repeat_interleave(SIZE, 1)
    columns = torch.eye(SIZE, dtype=torch.float64).repeat(1, SIZE)
    model.weight = HEIGHT * torch.cat([rows, columns]).mT.contiguous()
    model.prior = torch.full((NUM_LATENTS,), PROBABILITY, dtype=torch.float64)
    model.scale = torch.ones((), dtype=torch.float64)
    model.slab_mean = torch.full((NUM_LATENTS,), MEAN, dtype=torch.float64)
    one = torch.ones(NUM_LATENTS, dtype=torch.float64)
    model.slab_scale = torch.linalg.cholesky(correlations()) if covariance == "full" else one
    return model


def correlations() -> Tensor:
    """Of slabs with a deviation of one."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(NUM_LATENTS // 4)
    blocks = [torch.tensor([[1.0, sign * CORRELATION], [sign * CORRELATION, 1.0]], dtype=torch.float64) for sign in signs.tolist()]
    return torch.block_diag(*blocks)


def data(num_data: int, missing: float, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Data with entries missing, which causes are on ``(N, H)``, and the slabs."""
    model = truth("full")
    on = (torch.rand(num_data, NUM_LATENTS, generator=generator) < PROBABILITY).double()
    noise = torch.randn(num_data, NUM_LATENTS, generator=generator, dtype=torch.float64)
    slabs = MEAN + noise @ model.slab_scale.detach().mT
    y = (on * slabs) @ model.weight.detach().mT + torch.randn(num_data, SIZE**2, generator=generator, dtype=torch.float64)
    y[torch.rand(y.shape, generator=generator) < missing] = torch.nan
    return y, on, slabs


def error(found: Tensor) -> float:
    """How far correlations are off between different slabs, as a root mean square."""
    apart = ~torch.eye(NUM_LATENTS, dtype=torch.bool)
    return float((found - correlations())[apart].square().mean().sqrt())


def seen(on: Tensor, slabs: Tensor) -> Tensor:
    """The correlations of slabs that are seen where both are on: what could be learned if nothing were hidden."""
    found = torch.eye(NUM_LATENTS, dtype=torch.float64)
    for i in range(NUM_LATENTS):
        for j in range(i):
            found[i, j] = found[j, i] = slabs[(on[:, i] * on[:, j]).bool()][:, [i, j]].mT.corrcoef()[0, 1]
    return found


def learned(model: SpikeSlabSparseCoding) -> tuple[int, Tensor]:
    """How many bars are found, and the correlations of their slabs, in the order and with the signs of the truth."""
    cosines = normalize(truth("full").weight.detach(), dim=0).mT @ normalize(model.weight.detach(), dim=0)
    order = torch.as_tensor(linear_sum_assignment(-cosines.abs())[1])
    matched = cosines.gather(1, order.unsqueeze(1)).squeeze(1)
    root = model.slab_scale.detach()
    found = torch.eye(NUM_LATENTS).to(root) if root.dim() == 1 else _correlations(root @ root.mT)
    return int((matched.abs() >= 0.9).sum()), found[order][:, order] * matched.sign().outer(matched.sign())


def _correlations(covariance: Tensor) -> Tensor:
    deviation = covariance.diagonal().sqrt()
    return covariance / deviation.outer(deviation)


def free_energy(model: SpikeSlabSparseCoding, y: Tensor) -> float:
    """Per data point of new data."""
    guide = AutoTruncated(model, num_states=64).infer(y, CombinedFlips(8), 10)
    return float(guide.population().free_energy().mean())


def run(covariance: str, num_data: int, missing: float, seed: int) -> dict[str, object]:
    """What is found, how far correlations are off, and what new data say of it."""
    generator = torch.Generator().manual_seed(seed)
    y, on, slabs = data(num_data, missing, generator)
    new = data(NUM_NEW, missing, generator)[0]
    pyro.set_rng_seed(seed)
    model = SpikeSlabSparseCoding(SIZE**2, NUM_LATENTS, covariance=covariance, dtype=torch.float64)
    start = time.process_time()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DisagreeingStartsWarning)
        learn(model, y, progress=False)
    seconds = time.process_time() - start
    found, of_slabs = learned(model)
    off = {"off_by": error(of_slabs), "where_seen": error(seen(on, slabs))} if covariance == "full" else {}
    energies = {"new_data": free_energy(model, new), "new_data_truth": free_energy(truth("full"), new)}
    facts = {"covariance": covariance, "data": num_data, "missing": missing, "seed": seed, "found": found}
    return {**facts, **off, **energies, "warned": bool(told), "cpu": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--covariances", nargs="*", default=["full", "diag"])
    parser.add_argument("--data", nargs="*", type=int, default=[1000, 4000])
    parser.add_argument("--missing", nargs="*", type=float, default=[0.0, 0.3])
    parser.add_argument("--seeds", nargs="*", type=int, default=[1201, 1202, 1203])
    args = parser.parse_args()
    torch.set_num_threads(1)
    for num_data in args.data:
        for missing in args.missing:
            for seed in args.seeds:
                for covariance in args.covariances:
                    print(json.dumps(run(covariance, num_data, missing, seed)), flush=True)


if __name__ == "__main__":
    main()
