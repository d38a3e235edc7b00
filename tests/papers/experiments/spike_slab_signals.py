"""Section 5.1 of the spike-and-slab GP-LVM paper: three signals seen through random linear maps, by one view or two."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.gplvm import SpikeSlabMRD, fit, initialize, maximize_bound, update_switches

NUM_POINTS, NUM_OUTPUTS, NUM_LATENTS = 50, 12, 5
CORRELATION = 0.95
# Which of the signals sin x, -exp(-cos 2x) and cos x each view is made of.
CONTENT = ((0, 2), (1, 2))


def signals(num_points: int = NUM_POINTS) -> Tensor:
    """The three signals, standardised, ``(N, 3)``."""
    x = torch.linspace(0, 2 * math.pi, num_points, dtype=torch.float64)
    curves = torch.stack([x.sin(), -torch.exp(-torch.cos(2 * x)), x.cos()], 1)
    return (curves - curves.mean(0)) / curves.std(0, correction=0)


def observed(seed: int, noise: float) -> list[Tensor]:
    """Both views: two signals each through a standard normal map to 12 outputs, with noise of the given standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    curves = signals()
    views = []
    for content in CONTENT:
        weight = torch.randn(len(content), NUM_OUTPUTS, generator=generator, dtype=torch.float64)
        clean = curves[:, content] @ weight
        views.append(clean + noise * torch.randn(clean.shape, generator=generator, dtype=torch.float64))
    return views


def relevances(model: SpikeSlabMRD) -> Tensor:
    """What each dimension moves in each view, relative to the view's most important one, ``(C, Q)``; see ``SpikeSlabMRD.relevance``."""
    found = model.relevance().detach()
    return found / found.amax(1, keepdim=True)


def canonical_correlations(a: Tensor, b: Tensor) -> Tensor:
    """Canonical correlations of the columns of two matrices, largest first."""
    bases = [torch.linalg.qr(m - m.mean(0)).Q for m in (a, b)]
    return torch.linalg.svdvals(bases[0].mT @ bases[1])


def score(model: SpikeSlabMRD, is_on: Tensor) -> dict[str, Any]:
    """How well the pattern of switches and the signals are recovered, given which dimensions count as on, ``(C, Q)``."""
    curves, loc = signals(), model.loc.detach().double()
    if len(is_on) == 1:
        used = is_on[0].nonzero().squeeze(-1)
        right = len(used) == len(CONTENT[0])
        worst = float(canonical_correlations(curves[:, CONTENT[0]], loc[:, used]).min()) if len(used) else 0.0
        return {"pattern": right, "correlation": worst}
    parts = (is_on[0] & ~is_on[1], is_on[1] & ~is_on[0], is_on[0] & is_on[1])
    right = all(int(part.sum()) == 1 for part in parts)
    table = torch.corrcoef(torch.cat([curves, loc], 1).mT)[:3, 3:].abs().nan_to_num()
    worst = min(float((table[row] * part).max()) for row, part in enumerate(parts))
    return {"pattern": right, "correlation": worst, "private_1": _explained(curves, loc, parts[0] | parts[2])}


def _explained(curves: Tensor, loc: Tensor, used: Tensor) -> float:
    """Smallest canonical correlation of the first view's signals with the dimensions it uses: free of mixing within the view."""
    return float(canonical_correlations(curves[:, CONTENT[0]], loc[:, used]).min()) if bool(used.any()) else 0.0


def run_fewer(model_name: str, noise: float, seed: int) -> dict[str, Any]:
    """The bound of an RBF model with fewer latents than the signals of its views, from which they follow by curved functions.

    SSGPLVM starts with the signals' common argument as its only latent, SSMRD with sine and cosine.
    """
    views = observed(seed, noise)
    start = signals()[:, [0, 2]]
    if model_name == "SSGPLVM":
        views = views[:1]
        start = torch.linspace(-math.sqrt(3), math.sqrt(3), NUM_POINTS, dtype=torch.float64).unsqueeze(1)
    torch.manual_seed(1000 + seed)
    model = SpikeSlabMRD(NUM_POINTS, [NUM_OUTPUTS] * len(views), start.shape[1], kernel="rbf", num_inducing=25)
    begin = time.process_time()
    initialize(model, views, start, torch.Generator().manual_seed(seed))
    with model.fix_switches(1.0):
        maximize_bound(model, views, fixed=("noise",))
        maximize_bound(model, views)
    update_switches(model, views)
    reached = maximize_bound(model, views)
    # The other latents of the table's models, all off, cost what their prior says.
    bound = reached + (NUM_LATENTS - start.shape[1]) * float((-model.prior[:, 0]).log1p().sum())
    return {
        "experiment": "fewer", "model": model_name, "noise": noise, "seed": seed, "bound": bound, "seconds": time.process_time() - begin,
        "gamma": model.probability.tolist(), "noise_found": [float(view.noise.detach()) ** 0.5 for view in model.views],
    }  # fmt: skip


def run(model_name: str, kernel: str, noise: float, start: str, seed: int, **settings: Any) -> dict[str, Any]:
    """One run with the library's default training."""
    views = observed(seed, noise)
    views = views[:1] if model_name == "SSGPLVM" else views
    torch.manual_seed(1000 + seed)
    model = SpikeSlabMRD(NUM_POINTS, [NUM_OUTPUTS] * len(views), NUM_LATENTS, kernel=kernel, num_inducing=25)
    begin = time.process_time()
    result = fit(model, views, start=start, generator=torch.Generator().manual_seed(seed), **settings)
    seconds = time.process_time() - begin
    gamma, relevance = model.probability.detach(), relevances(model)
    found = {
        f"{name}_{key}": value
        for name, on in (("gamma", gamma > 0.5), ("effective", relevance > 1e-3))
        for key, value in score(model, on).items()
    }
    return {
        "experiment": "signals", "model": model_name, "kernel": kernel, "noise": noise, "start": start, "seed": seed,
        "bound": result.bound, "seconds": seconds, **found,
        "gamma": gamma.tolist(), "relevance": relevance.tolist(),
        "noise_found": [float(view.noise.detach()) ** 0.5 for view in model.views],
    }  # fmt: skip
