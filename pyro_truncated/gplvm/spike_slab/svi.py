"""Stochastic training of spike-and-slab models."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from pyro.infer import ELBO
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.collectives import agree
from pyro_truncated.distributed.shards import find_part, find_portion, propagate_shard_errors, shard_sum, synchronize_generator
from pyro_truncated.gplvm.spike_slab.fitting import NEARLY_ON, settle_switches, switch_moves
from pyro_truncated.gplvm.spike_slab.inducing_posterior import InducingPosterior
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD, Views
from pyro_truncated.utils.arguments import check_count, check_kinds, check_learning_rate, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.devices import generator_device

# Parameters with a row per data point.
_LOCAL = ("loc", "scale")


@dataclasses.dataclass(frozen=True)
class Minibatch:
    """Data points of a minibatch.

    Attributes:
        positions: where those of this process lie among the latents of all.
        rows: where they lie among its data.
        scale: number of all data points per one in the minibatch.
        share: of this process in what belongs to no data point.
        total: sums over processes.
    """

    positions: Tensor | slice
    rows: Tensor | slice
    scale: float
    share: float = 1.0
    total: Callable[[Sequence[Tensor]], list[Tensor]] = list


def draw_minibatch(model: Any, views: Sequence[Tensor], size: int, generator: torch.Generator | None) -> Minibatch:
    """A random minibatch, the same for any number of processes."""
    portion = find_part(views)
    index = torch.randperm(model.num_data, generator=generator, device=generator_device(generator))[:size].to(model.loc.device)
    scale = model.num_data / len(index)
    if portion is None:
        return Minibatch(index, index, scale)
    own = index[(index >= portion.first) & (index < portion.first + portion.size)]
    return Minibatch(own, own - portion.first, scale, 1 / collectives.size(), shard_sum(views[0]))


def add_gradients(model: torch.nn.Module, batch: Minibatch) -> None:
    """Sums gradients over processes, except data points' parameters, in one message."""
    if batch.total is list:
        return
    shared = [p for name, p in model.named_parameters() if p.requires_grad and name.removesuffix("_unconstrained") not in _LOCAL]
    has_one = torch.tensor([p.grad is not None for p in shared], dtype=torch.float64)
    has_one, *gradients = batch.total([has_one, *(torch.zeros_like(p) if p.grad is None else p.grad for p in shared)])
    for parameter, gradient, is_known in zip(shared, gradients, has_one.bool().tolist(), strict=True):
        # Where there is none, the optimiser takes no step.
        parameter.grad = gradient if is_known else None


@torch.no_grad()
def gather_latent_marginals(model: torch.nn.Module, views: Sequence[Tensor]) -> None:
    """Gives every process the latents of all data points."""
    portion = find_portion(views)
    assert portion is not None
    for name, parameter in model.named_parameters():
        if name.removesuffix("_unconstrained") in _LOCAL:
            parameter.copy_(torch.cat(collectives.gather(parameter[portion.first : portion.first + portion.size].detach().clone())))


_INDUCING = (".mean", ".scale_tril")


@names_arguments
@takes_arrays
def natural_step(model: SpikeSlabMRD, y: Views, index: Tensor | slice = slice(None), rate: float = 1.0) -> None:
    r"""Moves the inducing variables' posteriors along the natural gradient.

    Let :math:`\Lambda = S^{-1}` and :math:`\eta = \Lambda m` be those of the whitened inducing variables. Then :math:`\Lambda \leftarrow (1
    - \rho) \Lambda + \rho (I + \beta \bar\Psi_2)` and :math:`\eta \leftarrow (1 - \rho) \eta + \rho (\beta\Psi_1^\top Y)`, with sums scaled
    up to all data. With all data and :math:`\rho = 1` this is the optimum if nothing is missing.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> natural_step(explicit_copy(model, y), y)

    Args:
        model: a model with ``collapsed=False``.
        y: all data.
        index: the data points to use.
        rate: :math:`\rho`, above 0 and at most 1.

    Raises:
        ValueError: if the model is collapsed or the rate is out of range.

    Reference:
        Hensman, Fusi and Lawrence, "Gaussian processes for big data" (2013).
    """
    if model.collapsed:
        raise ValueError("the inducing variables of a collapsed model are at their optimum already; use collapsed=False")
    if not 0 < rate <= 1:
        raise ValueError(f"rate must lie in (0, 1]; got {rate}")
    views = model.check_data(y)
    _natural_step(model, Minibatch(index, index, model.num_data / len(views[0][index])), views, rate)


@torch.no_grad()
def _natural_step(model: SpikeSlabMRD, batch: Minibatch, views: list[Tensor], rate: float) -> None:
    for c, (view, outputs) in enumerate(zip(model.views, views, strict=True)):
        posterior, data = view.explicit(), outputs[batch.rows]
        with torch.enable_grad():
            mean, covariance = (v.detach().requires_grad_() for v in (posterior.mean, posterior.covariance))
            updated = InducingPosterior(posterior.cholesky.detach(), mean, covariance)
            expected = 0.0 * (mean.sum() + covariance.sum())
            if len(data):
                expected = expected + batch.scale * view.log_likelihood(model.inputs(c, batch.positions), data, updated).sum()
            by_mean, by_covariance = batch.total(torch.autograd.grad(expected, (mean, covariance)))
        # Twice the curvature of the expected log likelihood of one output: the precision that the data add.
        gain = -(by_covariance + by_covariance.mT) / view.num_functions
        precision = torch.cholesky_inverse(view.scale_tril.double())
        eta = precision @ posterior.mean
        precision = (1 - rate) * precision + rate * (torch.eye(len(gain), dtype=gain.dtype, device=gain.device) + gain)
        eta = (1 - rate) * eta + rate * (by_mean + gain @ posterior.mean)
        factor = torch.linalg.cholesky(precision)
        view.mean = torch.cholesky_solve(eta, factor).to(view.mean).contiguous()
        view.scale_tril = torch.linalg.cholesky(torch.cholesky_inverse(factor)).to(view.scale_tril)


@names_arguments
@takes_arrays
def fit_minibatches(
    model: SpikeSlabMRD,
    y: Views,
    steps: int,
    *,
    batch_size: int = 256,
    learning_rate: float = 0.02,
    rate: float = 0.3,
    switches_from: float = 0.3,
    generator: torch.Generator | None = None,
    callback: Callable[[int, float], None] | None = None,
) -> list[float]:
    """Trains a model on minibatches, from its current parameters.

    Every step draws data points without replacement. It takes a natural-gradient step for the inducing variables and an Adam step, whose
    rate falls to a tenth over the last half, for all other parameters. Switches are held on for a share of the steps.

    Data may be shared out to several processes (:func:`pyro_truncated.distributed.shard`), all of which have the model of all data,
    initialised alike. In the end all have all latents.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> bounds = fit_minibatches(explicit_copy(model, y), y, steps=3, batch_size=10)

    Args:
        model: a model with ``collapsed=False``, initialised.
        y: its data.
        steps: number of steps.
        batch_size: data points per step.
        learning_rate: of Adam.
        rate: of the natural gradient, at the start. It falls likewise.
        switches_from: share of the steps after which the switches are free.
        generator: source of randomness.
        callback: called with the number of each step and its bound.

    Returns:
        The estimates of the bound.

    Raises:
        ValueError: if the model is collapsed, or a number is out of range.
    """
    steps, batch_size = check_count("steps", steps, least=0), check_count("batch_size", batch_size)
    check_learning_rate(learning_rate)
    check_kinds(fit_minibatches, switches_from=switches_from)
    views = model.check_data(y, takes_shards=True)
    model.check_batch(batch_size)
    free_from, estimates = int(switches_from * steps), []
    with propagate_shard_errors(views):
        if find_part(views) is not None:
            model.load_state_dict(agree(model.state_dict()))
            synchronize_generator(generator)
        parameters = [p for name, p in model.named_parameters() if p.requires_grad and not any(part in name for part in _INDUCING)]
        optimizer = torch.optim.Adam(parameters, lr=learning_rate)
        for step in range(steps):
            # In the second half the learning rate falls to a tenth.
            decay = 0.1 ** max(0.0, 2 * step / steps - 1)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * decay
            batch = draw_minibatch(model, views, batch_size, generator)
            if step == free_from > 0:
                with torch.no_grad():
                    model.logits = torch.full_like(model.logits, NEARLY_ON)
            with model.fix_switches(1.0) if step < free_from else nullcontext():
                estimates.append(_step(model, batch, views, rate * decay, optimizer))
            if callback is not None:
                callback(step, estimates[-1])
        if find_part(views) is not None:
            gather_latent_marginals(model, views)
    return estimates


def _step(model: SpikeSlabMRD, batch: Minibatch, views: list[Tensor], rate: float, optimizer: torch.optim.Optimizer) -> float:
    _natural_step(model, batch, views, rate)
    model.zero_grad()
    bound = model.partial_bound([data[batch.rows] for data in views], model.latents(batch.positions), batch.scale, batch.share)
    (-bound / model.num_data).backward()
    add_gradients(model, batch)
    optimizer.step()
    return float(batch.total([bound.detach()])[0])


@names_arguments
@takes_arrays
def explicit_copy(model: SpikeSlabMRD, y: Views) -> SpikeSlabMRD:
    """Returns a collapsed model with explicit inducing variables at their optimum.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> copy = explicit_copy(model, y)  # fit_minibatches trains it
    """
    duplicate = copy.deepcopy(model)
    duplicate.collapsed = False
    for view in duplicate.views:
        view.make_explicit()
    # Local bounds of labels follow the inducing variables, and those follow them: a few turns.
    for _ in range(1 if all(view.likelihood is None for view in duplicate.views) else 20):
        natural_step(duplicate, y)
    return duplicate


class Analytic_ELBO(ELBO):
    r"""Minus the closed-form bound of a model, as loss for ``SVI``.

    Model and guide must be the methods ``model`` and ``guide`` of one object with a method ``bound``, such as
    :class:`~pyro_truncated.gplvm.SpikeSlabGPLVM`. A stock :class:`~pyro.infer.Trace_ELBO` estimates the same number by sampling.

    Training steps on a :class:`~pyro_truncated.gplvm.SpikeSlabMRD` hold its switches: on for the first ``warm_up`` steps, then at their
    optimum in closed form every ``every`` steps (:func:`~pyro_truncated.gplvm.settle_switches`, and
    :func:`~pyro_truncated.gplvm.switch_moves` if collapsed).

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> initialize(model, y)
        >>> svi = SVI(model.model, model.guide, Adam({"lr": 0.01}), Analytic_ELBO(warm_up=2))
        >>> losses = [svi.step(y) for _ in range(3)]

    Args:
        warm_up: number of steps with all switches on. With 0 switches keep their first values.
        every: steps between updates of the switches. ``None`` leaves them to the gradient from the first step on.
    """

    @names_arguments
    def __init__(self, *, warm_up: int = 1000, every: int | None = 25) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.warm_up = check_count("warm_up", warm_up, least=0)
        self.every = None if every is None else check_count("every", every)

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the bound.

        Raises:
            TypeError: if model and guide are not the methods of one object with a bound.
        """
        owner = _owner(model, guide)
        # Within the module's context reading a parameter announces it to SVI.
        with owner._pyro_context:
            loss: Tensor = -owner.bound(*args, **kwargs)
        return loss

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound as a number."""
        return float(self.differentiable_loss(model, guide, *args, **kwargs).detach())

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError("Analytic_ELBO draws nothing; use Trace_ELBO for traces")

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Returns minus the bound and adds its gradient to the parameters."""
        with self._switches(_owner(model, guide), *args, **kwargs):
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        loss.backward()
        return float(loss.detach())

    def _switches(self, owner: Any, y: Any, *args: Any, **kwargs: Any) -> contextlib.AbstractContextManager[None]:
        """Begins the next training step: a context that holds the switches."""
        if self.every is None or not isinstance(owner, SpikeSlabMRD):
            return contextlib.nullcontext()
        with owner._pyro_context:
            # Read, so that Pyro's store has it though no gradient reaches it.
            _ = owner.logits
        step = int(owner.num_steps)
        owner.num_steps += 1
        if step < self.warm_up:
            return owner.fix_switches(1.0)
        if step == self.warm_up > 0:
            with torch.no_grad():
                owner.logits = torch.full_like(owner.logits, NEARLY_ON)
        if (step - self.warm_up) % self.every == 0:
            if owner.collapsed:
                switch_moves(owner, y)
            settle_switches(owner, y)
        return owner.fix_switches(owner.probability.detach())


def _owner(model: Any, guide: Any) -> Any:
    owner: Any = getattr(guide, "__self__", guide)
    if owner is not getattr(model, "__self__", model) or not hasattr(owner, "bound"):
        raise TypeError("Analytic_ELBO needs the methods `model` and `guide` of one model that has a method `bound`; see SpikeSlabGPLVM")
    return owner
