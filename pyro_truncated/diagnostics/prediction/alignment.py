"""Restarts compared, their latents matched first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import pyro
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from pyro_truncated.diagnostics.truncation.scoring import plain, scored_populations
from pyro_truncated.utils.arguments import names_arguments


@dataclasses.dataclass(frozen=True)
class RestartComparison:
    """``R`` restarts, matched to the one of the highest free energy.

    Example:
        >>> y = linear_bars(30, 3, mean_active=2.0).data
        >>> models = [BinarySparseCoding(9, 6).initialize(y) for _ in range(2)]
        >>> guides = [AutoTruncated(model, num_states=64).infer(y, ExhaustiveSearch(), steps=1) for model in models]
        >>> comparison = compare_restarts(guides, y)

    Attributes:
        free_energy: sum over the data points, ``(R,)``.
        best: position of the best restart.
        order: ``order[r, l]`` is the latent of restart ``r`` that matches latent ``l`` of the best, ``(R, L)``.
        similarity: correlation (or cosine of components) of the matched pairs, ``(R, L)``.
        activation: activation probabilities with matched latents in the same place, ``(R, N, L)``.
    """

    free_energy: Tensor
    best: int
    order: Tensor
    similarity: Tensor
    activation: Tensor

    @property
    def spread(self) -> float:
        """Returns best minus worst free energy per data point, in nats."""
        return float(self.free_energy.max() - self.free_energy.min()) / self.activation.shape[1]

    def shared(self, threshold: float = 0.9) -> Tensor:
        """Returns the share of the best restart's latents in each restart, ``(R,)``."""
        return (self.similarity >= threshold).double().mean(-1)


@names_arguments
def match_latents(reference: Tensor, other: Tensor, *, centred: bool = True) -> tuple[Tensor, Tensor]:
    """Returns the permutation of ``other``'s rows most similar to ``reference``.

    Example:
        >>> rows = torch.randn(4, 9)
        >>> order, similarity = match_latents(rows, rows[[2, 0, 3, 1]])
        >>> order.tolist()
        [1, 3, 0, 2]

    Args:
        reference: one row of features per latent, ``(L, F)``.
        other: the same of another restart.
        centred: compare by correlation; otherwise by cosine.

    Returns:
        ``order (L,)``, so that ``other[order]`` matches ``reference``, and the similarities ``(L,)`` of the pairs; zero for rows that do
        not vary.

    Raises:
        ValueError: if the two differ in shape or are not finite.
    """
    if reference.dim() != 2 or reference.shape != other.shape:
        raise ValueError(f"reference and other must both have shape (L, F); got {tuple(reference.shape)} and {tuple(other.shape)}")
    if not bool(reference.isfinite().all() and other.isfinite().all()):
        raise ValueError("reference and other must be finite; got NaN or infinity")
    table = _unit_rows(reference, centred) @ _unit_rows(other, centred).mT
    rows, columns = linear_sum_assignment(table.numpy(), maximize=True)
    return torch.as_tensor(columns), table[torch.as_tensor(rows), torch.as_tensor(columns)]


def _unit_rows(features: Tensor, centred: bool) -> Tensor:
    features = plain(features).double()
    features = features - features.mean(-1, keepdim=True) if centred else features
    norm = features.norm(dim=-1, keepdim=True)
    return torch.where(norm > 1e-12 * features.shape[-1] ** 0.5, features / norm, 0.0)


@torch.no_grad()
def compare_restarts(
    guides: Sequence[Any], *args: Any, components: Sequence[Tensor] | None = None, stores: Sequence[Any] | None = None, **kwargs: Any
) -> RestartComparison:
    """Compares restarts of a model up to a permutation of the latents.

    Latents of restarts are matched to those of the best by an optimal assignment
    (``scipy.optimize.linear_sum_assignment``). It maximises the sum of the similarities of all pairs. Without it,
    convergence statistics such as R-hat make sense only for quantities that do not depend on the order of latents.

    Example:
        >>> y = linear_bars(30, 3, mean_active=2.0).data
        >>> models = [BinarySparseCoding(9, 6).initialize(y) for _ in range(2)]
        >>> guides = [AutoTruncated(model, num_states=64).infer(y, ExhaustiveSearch(), steps=1) for model in models]
        >>> comparison = compare_restarts(guides, y, components=[model.weight.detach() for model in models])

    Args:
        guides: one fitted guide per restart; each knows its own model.
        *args: the model's arguments.
        components: what to match latents by, one dictionary ``(D, L)`` per restart (cosine). Default: their activation probabilities over
            the data points (correlation).
        stores: states of Pyro's parameter store, one per guide (``Restarts.stores``). They hold parameters of plain
            functions, and of modules whose names repeat.
        **kwargs: the model's keyword arguments.

    Returns:
        The restarts, matched.

    Raises:
        ValueError: if there are no guides, numbers differ, or the restarts differ in their latents.
    """
    if not guides:
        raise ValueError("guides must hold at least one guide")
    for name, given in (("components", components), ("stores", stores)):
        if given is not None and len(given) != len(guides):
            raise ValueError(f"{name} must hold one entry per guide; got {len(given)} for {len(guides)}")
    populations = []
    for position, guide in enumerate(guides):
        with contextlib.nullcontext() if stores is None else pyro.get_param_store().scope(stores[position]):
            populations.append(scored_populations(guide, args, kwargs)[2])
    if len({population.space for population in populations}) > 1:
        raise ValueError("the restarts differ in their discrete latents; only fits of one model can be matched")
    activation = [plain(population.marginals()).double() for population in populations]
    free_energy = torch.stack([plain(population.free_energy()).sum() for population in populations])
    best = int(free_energy.argmax())
    features = [values.mT for values in activation] if components is None else [plain(part).mT for part in components]
    matches = [match_latents(features[best], own, centred=components is None) for own in features]
    order, similarity = torch.stack([order for order, _ in matches]), torch.stack([similar for _, similar in matches])
    matched = torch.stack([values[:, own] for values, own in zip(activation, order, strict=True)])
    return RestartComparison(free_energy, best, order, similarity, matched)
