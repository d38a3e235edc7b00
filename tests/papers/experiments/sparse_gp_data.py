"""Data of regressions: those that the paper's experiments are repeated on, and those that no setting of this library was chosen on."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pyro_truncated import datasets
from pyro_truncated.gp import (
    CountKernel,
    DataKernel,
    Graphs,
    HashedCounts,
    HistogramIntersectionKernel,
    MinMaxKernel,
    SumKernel,
    shortest_path,
    smooth_rbf,
    weisfeiler_lehman,
)


@dataclasses.dataclass(frozen=True)
class Split:
    """Training data behind a kernel, and test data as the kernel takes them."""

    kernel: Callable[[], DataKernel]
    y: Tensor
    new: Any
    y_new: Tensor


@functools.cache
def lipophilicity(seed: int) -> Split:
    """Tanimoto kernel on counts of Morgan fingerprints: 3600 molecules to learn from, 600 to predict."""
    return _fingerprints("mol_lipophilicity", 3600, seed)


@functools.cache
def esol(seed: int) -> Split:
    """Solubility in water, Tanimoto kernel on counts of Morgan fingerprints: 900 molecules to learn from, 217 to predict."""
    return _fingerprints("mol_esol", 900, seed)


def _fingerprints(name: str, num_train: int, seed: int) -> Split:
    arrays = _tensors(name)
    features = HashedCounts.from_csr(arrays["fp_indptr"], arrays["fp_indices"].long(), arrays["fp_data"])
    train, test = torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tensor_split([num_train])
    kernel, y = CountKernel(features[train]), arrays["y"].double()
    return Split(_reused([kernel], 1.0), y[train], features[test], y[test])


@functools.cache
def thrombin(seed: int) -> Split:
    """Affinities to thrombin; the sum of fourteen kernels on fingerprints and on graphs: 2120 molecules to learn from, 529 to predict."""
    arrays = _tensors("mol_thrombin")
    fingerprint = HashedCounts.from_csr(arrays["fp_indptr"], arrays["fp_indices"].long(), arrays["fp_data"])
    features = [fingerprint, fingerprint]
    for labels in ("atom", "element", "degree", "none"):
        graphs = Graphs.from_molecules(arrays, labels)
        features += [*(weisfeiler_lehman(graphs, h) for h in ((1, 3) if labels == "none" else (0, 3))), shortest_path(graphs)]
    y = arrays["pKi"].double()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, test = order[y[order].isfinite()].tensor_split([2120])
    parts = [(MinMaxKernel if k == 1 else CountKernel)(counts[train]) for k, counts in enumerate(features)]
    return Split(_reused(parts, 0.5 / len(parts)), y[train], tuple(counts[test] for counts in features), y[test])


def _tensors(name: str) -> dict[str, Tensor]:
    return {key: torch.as_tensor(value) for key, value in datasets.load(name).items() if value.dtype.kind != "U"}


@functools.cache
def hog(seed: int) -> Split:
    """Histogram intersection on gradient histograms of objects, one kernel per quarter of the image; the sine of the pose angle."""
    arrays = datasets.load("coil_hog_pose")
    blocks = torch.as_tensor(arrays["H"]).double().reshape(-1, 2, 4, 2, 4, 9).permute(1, 3, 0, 2, 4, 5).flatten(3).flatten(0, 1)
    y = torch.as_tensor(arrays["Y"][:, 0]).double()
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    train, test = order[:734], order[734:]
    parts = [HistogramIntersectionKernel(block.flatten(1)[train], 0.25) for block in blocks]
    new = tuple(block.flatten(1)[test] for block in blocks)
    return Split(_reused(parts, 0.25), y[train], new, y[test])


@functools.cache
def kin40k(seed: int) -> Split:
    """The official 10 000 training inputs; a split only changes the seed of methods, and the 5000 test inputs."""
    arrays = datasets.load("kin40k")
    X, y, X_new, y_new = (torch.as_tensor(arrays[name]).double() for name in ("X_train", "y_train", "X_test", "y_test"))
    chosen = torch.randperm(len(X_new), generator=torch.Generator().manual_seed(seed))[:5000]
    return _standardised(X, y, X_new[chosen], y_new[chosen])


@functools.cache
def snelson(seed: int) -> Split:
    """Snelson's toy, 150 inputs to learn from; the leftmost ones are the first inducing inputs."""
    arrays = datasets.load("snelson1d")
    X, y = (torch.as_tensor(arrays[name]).double().flatten() for name in ("x_train", "y_train"))
    order = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed))
    train, test = order[:150], order[150:]
    scale = X.std()
    return Split(lambda: smooth_rbf(X[train, None] / scale), y[train], X[test, None] / scale, y[test])


@functools.cache
def pol(seed: int) -> Split:
    """Telecommunication (26 inputs): the official 10 000 training inputs and 2500 test inputs; a split only changes the seed of methods."""
    return _official("pol", seed)


@functools.cache
def pumadyn32nm(seed: int) -> Split:
    """A robot arm (32 inputs): the official 7168 training inputs and 512 test inputs; a split only changes the seed of methods."""
    return _official("pumadyn32nm", seed)


def _official(name: str, seed: int) -> Split:
    del seed
    arrays = datasets.load(name)
    X, y, X_new, y_new = (torch.as_tensor(arrays[part]).double() for part in ("X_train", "y_train", "X_test", "y_test"))
    return _standardised(X, y, X_new, y_new)


@functools.cache
def sarcos(seed: int) -> Split:
    """The first torque of a robot arm (21 inputs): 2760 inputs to learn from, 689 to predict, of a part of SARCOS."""
    arrays = datasets.load("sarcos_part")
    X, y = torch.as_tensor(arrays["X"]).double(), torch.as_tensor(arrays["Y"][:, 0]).double()
    train, test = torch.randperm(len(X), generator=torch.Generator().manual_seed(seed)).tensor_split([2760])
    return _standardised(X[train], y[train], X[test], y[test])


def _standardised(X: Tensor, y: Tensor, X_new: Tensor, y_new: Tensor) -> Split:
    mean, spread = X.mean(0), X.std(0)
    scale = torch.where(spread > 0, spread, torch.ones_like(spread))
    return Split(lambda: smooth_rbf((X - mean) / scale), y, (X_new - mean) / scale, y_new)


@functools.cache
def photoswitch(seed: int) -> Split:
    """Wavelengths of photoswitches, Tanimoto kernel on counts of Morgan fingerprints: 300 molecules to learn from, 83 to predict."""
    return _fingerprints("mol_photoswitch", 300, seed)


def _reused(parts: Sequence[Any], variance: float) -> Callable[[], DataKernel]:
    """Makes the sum of kernels at its starting point. Their matrices are computed once, which counts as no method's time."""
    for part in parts:
        part.columns(torch.arange(part.num_data))

    def fresh() -> DataKernel:
        for part in parts:
            part.variance = torch.tensor(variance, dtype=torch.float64)
        return parts[0] if len(parts) == 1 else SumKernel(parts)

    return fresh
