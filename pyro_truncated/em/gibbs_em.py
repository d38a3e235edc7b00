"""EM with Gibbs sampling over a few selected latents per data point."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from pyro.infer import ELBO
from pyro.infer.enum import get_importance_trace
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_truncated.distributed.launch import start_as_first
from pyro_truncated.distributed.owned_rows import ending_together
from pyro_truncated.distributed.shards import draw_alike, is_spread, portion_of, positions_of, sums_of, total_rows
from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.em.gibbs_guide import GibbsDraws, GibbsGuide
from pyro_truncated.ops import defer_checks, draw_seed, lazy_values
from pyro_truncated.search.preselection import Preselection
from pyro_truncated.utils.annealing import Temperature, temperature_at
from pyro_truncated.utils.counts import check_count
from pyro_truncated.utils.isolation import spare_random_numbers


class GibbsEM(ELBO):
    r"""Monte Carlo EM: ``SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search))``.

    Every step of :class:`~pyro.infer.SVI` selects :math:`H'` latents of each data point, continues its Gibbs chain
    over these, and takes the M-step of the draws. The selection is that of a :class:`~pyro_truncated.Preselection`,
    hand-crafted or learned. A :class:`~pyro_truncated.GPSelect` starts from random latents. It regresses on the means
    of the conditional probabilities that latents are active.

    Chains start anywhere, and one M-step with what they draw before they have come to the parameters loses these. So those of data points
    that a guide meets for the first time take some E-steps alone.

    The loss is minus the log joint of data and draws, averaged over the draws, under the parameters before the M-step. It is noisy and no
    bound of anything, but serves to watch convergence.

    Data may be shared out to several processes (:func:`pyro_truncated.distributed.shard`), which then train as one with all data would.

    Example:
        >>> y = linear_bars(30, 4, mean_active=2.0).data.clamp(min=0)
        >>> model = MaxSpikeSlabSparseCoding(16, 8).initialize(y)
        >>> svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(GPSelect(3), sweeps=2))
        >>> losses = [svi.step(y) for _ in range(2)]

    Args:
        search: selects the latents. Its proposals are not used.
        sweeps: sweeps whose outcomes are kept as draws.
        burn_in: sweeps before them.
        settling: E-steps that chains take before the first one with an M-step; 0 where a model begins with random parameters.
        temperature: factor :math:`\ge 1` on the variance of the noise in the E-step, a number or a function of the step ``t = 0, 1, ...``.
        batch_size: data points per step, drawn without replacement. Default: all.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        TypeError: if the search does not select latents.
        ValueError: if a number is out of range.

    Reference:
        Shelton, Bornschein, Sheikh, Berkes and Lücke, "Select and Sample - A Model of Efficient Neural Inference and Learning", NIPS 2011.
    """

    def __init__(
        self,
        search: Preselection,
        *,
        sweeps: int = 3,
        burn_in: int = 2,
        settling: int = 10,
        temperature: Temperature = 1.0,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(search, Preselection):
            raise TypeError(f"search must select latents: a Preselection, such as GPSelect(5); got {type(search).__name__}")
        sweeps, burn_in, settling = check_count("sweeps", sweeps), check_count("burn_in", burn_in, 0), check_count("settling", settling, 0)
        batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        super().__init__()  # type: ignore[no-untyped-call]
        self.search = search
        self.sweeps = sweeps
        self.burn_in = burn_in
        self.settling = settling
        self.temperature = temperature
        self.batch_size = batch_size
        self.generator = generator
        self.num_steps = 0
        self._known_guide: Any = None
        self._settled_guide: Any = None

    def loss(self, model: Any, guide: Any, y: Tensor, *args: Any, **kwargs: Any) -> float:
        """Returns minus the mean log joint of the present draws."""
        return -float(_total(model.expected_log_joint(_check(guide, model).draws(), y), y))

    def loss_and_grads(self, model: Any, guide: Any, y: Tensor, *args: Any, **kwargs: Any) -> float:
        """Takes an E-step and hands its statistics to the closed-form M-step.

        Returns minus the mean log joint of the draws.

        Raises:
            TypeError: if no :class:`~pyro_truncated.ClosedForm` drives the model.
        """
        closed_form = ClosedForm.driving(model)
        if closed_form is None:
            raise TypeError("GibbsEM needs ClosedForm(model) as the optimiser; to train by gradients use an AutoTruncated guide")
        with ending_together(y):
            is_part = is_spread(y)
            if is_part and self._known_guide is not guide:
                start_as_first(model, guide, self.search)
                draw_alike(self.generator)
            self._known_guide = guide
            return self._step(closed_form, _check(guide, model), y, is_part)

    def _step(self, closed_form: ClosedForm, guide: GibbsGuide, y: Tensor, is_part: bool) -> float:
        indices, scale = self._subsample(y)
        self._settle(guide, y, indices)
        with defer_checks():
            draws = self._update(guide, y, indices)
            # A model that looks at its statistics brings it along.
            known = lazy_values(_total(guide.model.expected_log_joint(draws, y), y))
            statistics = guide.model.sufficient_statistics(draws, y)
            loss = -known()[0] * scale
        self.num_steps += 1
        warn_if_nan(loss, "loss")  # type: ignore[call-overload]
        closed_form.collect(statistics, None, indices, len(y), scale=scale, is_part=is_part)
        return loss

    def _update(self, guide: GibbsGuide, y: Tensor, indices: Tensor | None) -> GibbsDraws:
        temperature = temperature_at(self.temperature, self.num_steps)
        budget: dict[str, Any] = {"sweeps": self.sweeps, "burn_in": self.burn_in, "temperature": temperature}
        with _keyed(self.generator) if portion_of(y) is not None else nullcontext(self.generator) as generator:
            return guide.update_(self.search, y, indices, generator=generator, **budget)

    def _settle(self, guide: GibbsGuide, y: Tensor, indices: Tensor | None) -> None:
        """Lets chains that have not begun come to the parameters."""
        if self._settled_guide is guide:
            return
        new = _not_begun(guide, y)
        given = new if indices is None else new[indices]
        # Processes take as many steps, those too whose chains have all begun.
        num_new, num_given = (int(value) for value in sums_of(y)([new.sum(), given.sum()]))
        rows = given.nonzero().squeeze(-1) if indices is None else indices[given]
        for _ in range(self.settling if num_given else 0):
            self._update(guide, y, None if len(rows) == len(y) else rows)
        if num_new == num_given:
            self._settled_guide = guide

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return get_importance_trace("flat", math.inf, model, guide, args, kwargs)

    def _subsample(self, y: Tensor) -> tuple[Tensor | None, float]:
        """Draws this process's part of a minibatch of all processes.

        Returns its positions, ``None`` for all, and how many data points each stands for.
        """
        total = total_rows(y)
        if self.batch_size is None or self.batch_size >= total:
            return None, 1.0
        device = None if self.generator is None else self.generator.device
        chosen = torch.randperm(total, generator=self.generator, device=device)[: self.batch_size].sort().values.to(y.device)
        first = int(positions_of(y)[0])
        return chosen[(chosen >= first) & (chosen < first + len(y))] - first, total / self.batch_size


def _not_begun(guide: GibbsGuide, y: Tensor) -> Tensor:
    """Which data points here have no draws yet, ``(N,)``."""
    if hasattr(guide, "unit") and len(guide.unit) == len(y):
        return guide.unit[:, 0] == 0
    return torch.ones(len(y), dtype=torch.bool, device=y.device)


@contextmanager
def _keyed(generator: torch.Generator | None) -> Iterator[None]:
    """Takes one random number on every process, whatever they draw next."""
    seed = draw_seed(generator)
    with spare_random_numbers():
        torch.manual_seed(seed)
        yield


def _total(value: Tensor, y: Tensor) -> Tensor:
    """Sums what each process has computed of its data."""
    return sums_of(y)([value])[0]


def _check(guide: Any, model: Any) -> GibbsGuide:
    if not isinstance(guide, GibbsGuide) or guide.model is not model:
        raise TypeError(f"GibbsEM trains a GibbsGuide of the very model it was made for; got {type(guide).__name__}")
    return guide
