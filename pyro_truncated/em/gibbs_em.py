"""EM with Gibbs sampling over a few selected latents of every data point, for models whose truncated posterior has no closed form."""

from __future__ import annotations

import math
from typing import Any

import torch
from pyro.infer import ELBO
from pyro.infer.enum import get_importance_trace
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_truncated.distributed.shards import portion_of
from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.em.gibbs_guide import GibbsGuide
from pyro_truncated.search.preselection import Preselection
from pyro_truncated.utils.annealing import Temperature, temperature_at
from pyro_truncated.utils.counts import check_count


class GibbsEM(ELBO):
    r"""Monte Carlo EM: ``SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search))``.

    Every step of :class:`~pyro.infer.SVI` selects :math:`H'` latents of every data point, continues its Gibbs chain over these, and takes
    the M-step of the draws. The selection is that of a :class:`~pyro_truncated.Preselection`, hand-crafted or learned: a
    :class:`~pyro_truncated.GPSelect` regresses on the means of the exact conditional probabilities that the latents are on, and starts from
    random ones.

    The loss is minus the log joint of data and draws, averaged over the draws, under the parameters before the M-step. It is noisy and no
    bound of anything, but serves to watch convergence.

    Example:
        >>> y = linear_bars(30, 4, mean_active=2.0).data.clamp(min=0)
        >>> model = MaxSpikeSlabSparseCoding(16, 8).initialize(y)
        >>> svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(GPSelect(3), sweeps=2))
        >>> losses = [svi.step(y) for _ in range(2)]

    Args:
        search: selects the latents; its proposals are not used.
        sweeps: sweeps whose outcomes are kept as draws.
        burn_in: sweeps before them.
        temperature: factor :math:`\ge 1` on the variance of the noise in the E-step, a number or a function of the step ``t = 0, 1, ...``.
        batch_size: data points per step, drawn without replacement; default: all.
        generator: source of randomness; default: torch's global generator.

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
        temperature: Temperature = 1.0,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(search, Preselection):
            raise TypeError(f"search must select latents: a Preselection, such as GPSelect(5); got {type(search).__name__}")
        sweeps, burn_in = check_count("sweeps", sweeps), check_count("burn_in", burn_in, 0)
        batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        super().__init__()  # type: ignore[no-untyped-call]
        self.search = search
        self.sweeps = sweeps
        self.burn_in = burn_in
        self.temperature = temperature
        self.batch_size = batch_size
        self.generator = generator
        self.num_steps = 0

    def loss(self, model: Any, guide: Any, y: Tensor, *args: Any, **kwargs: Any) -> float:
        """Minus the mean log joint of the draws as they are; nothing changes."""
        return -float(model.expected_log_joint(_checked(guide, model).draws(), y))

    def loss_and_grads(self, model: Any, guide: Any, y: Tensor, *args: Any, **kwargs: Any) -> float:
        """One E-step; returns minus the mean log joint of its draws and hands the statistics to the closed-form M-step.

        Raises:
            TypeError: if no :class:`~pyro_truncated.ClosedForm` drives the model.
        """
        closed_form = ClosedForm.driving(model)
        if closed_form is None:
            raise TypeError("GibbsEM needs ClosedForm(model) as the optimiser; to train by gradients use an AutoTruncated guide")
        portion = portion_of(y)
        if portion is not None and portion.is_part:
            raise NotImplementedError("GibbsEM trains in one process; its draws of a shard of the data would not be those of all data")
        indices = self._subsample(y)
        temperature = temperature_at(self.temperature, self.num_steps)
        budget: dict[str, Any] = {"sweeps": self.sweeps, "burn_in": self.burn_in, "temperature": temperature}
        draws = _checked(guide, model).update_(self.search, y, indices, generator=self.generator, **budget)
        self.num_steps += 1
        share = 1.0 if indices is None else len(indices) / len(y)
        loss = -float(model.expected_log_joint(draws, y)) / share
        warn_if_nan(loss, "loss")  # type: ignore[call-overload]
        closed_form.collect(model.sufficient_statistics(draws, y), None, indices, len(y))
        return loss

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return get_importance_trace("flat", math.inf, model, guide, args, kwargs)

    def _subsample(self, y: Tensor) -> Tensor | None:
        if self.batch_size is None or self.batch_size >= len(y):
            return None
        device = None if self.generator is None else self.generator.device
        chosen = torch.randperm(len(y), generator=self.generator, device=device)[: self.batch_size]
        return chosen.sort().values.to(y.device)


def _checked(guide: Any, model: Any) -> GibbsGuide:
    if not isinstance(guide, GibbsGuide) or guide.model is not model:
        raise TypeError(f"GibbsEM trains a GibbsGuide of the very model it was made for; got {type(guide).__name__}")
    return guide
