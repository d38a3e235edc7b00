r"""The most probable latents of data points, and normal distributions around them.

Several processes may share the data points out, each with their latents.

Around the most probable latent :math:`z_n` the decoder's means are nearly linear, with slopes
:math:`J_n`. So the posterior of the latent is nearly normal, and the outputs have the moments

.. math:: q(z) = \mathcal N(z_n, T H_n^{-1}), \qquad
    H_n = I + \sum_{d\ \mathrm{seen}} \frac{J_{nd} J_{nd}^\top}{v_n + \sigma_d^2}, \qquad
    \mathbb E\, x_{nd} = m_{nd}, \qquad \operatorname{var} x_{nd} = v_n + \sigma_d^2 + T J_{nd}^\top H_n^{-1} J_{nd}

(Laplace's approximation with the curvature of Gauss and Newton) at a temperature :math:`T`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.distributed.shards import (
    Portion,
    find_part,
    gather_owned_rows,
    owned_parameters,
    rows_at,
    synchronize_generator,
)
from pyro_truncated.gp.active_sets import (
    NearestSet,
    Split,
    conditional_log_prob,
    log_prob_of_each,
    split_weights,
)
from pyro_truncated.gplvm.batched_bfgs import maximize_batched
from pyro_truncated.gplvm.decoders.conditioning_set import Posterior
from pyro_truncated.utils.arguments import check_count, describe, leaves_inference_mode, names_arguments
from pyro_truncated.utils.arrays import as_data, check_column_names
from pyro_truncated.utils.devices import generator_device
from pyro_truncated.utils.parameter_store import load_snapshot

# Values ``(M,)`` of data points ``(M, D)`` at latents ``(M, Q)``, under what predicts outputs at latents.
Objective = Callable[[Any, Tensor, Tensor], Tensor]
# Steps after which the neighbours of a latent are found anew.
_STEPS_PER_NEIGHBOURHOOD = 8


def best_candidates(posterior: Posterior, x: Tensor, candidates: Tensor, num: int) -> Tensor:
    """Returns each data point's ``num`` most probable candidates: ``(num, M, Q)``."""
    scores = log_prob_of_each(x, *posterior.predict(candidates)) - 0.5 * candidates.square().sum(-1)
    return candidates[scores.topk(num, 1).indices].movedim(1, 0)


def maximize(posterior: Posterior, objective: Objective, x: Tensor, starts: Tensor, steps: int, lr: float) -> Tensor:
    """Returns the best latents ``(M, Q)`` reached from starts ``(S, M, Q)``."""
    if isinstance(posterior, NearestSet):
        return maximize_among_neighbors(posterior, objective, x, starts, steps, lr)
    return maximize_batched(lambda z, n: objective(posterior, x[n], z), starts, steps, lr)


def maximize_among_neighbors(
    posterior: NearestSet, objective: Objective, x: Tensor, starts: Tensor, steps: int, lr: float, leave_out: Tensor | None = None
) -> Tensor:
    """As :func:`maximize`, given the data points closest to the current latent.

    They are updated after every few steps. For each of ``x`` a data point ``leave_out (M,)``, which is where it comes from itself, is none
    to predict from. Starts are ``(S, M, Q)``, and ``lr`` is the length of the first step.
    """
    num, size, dim = starts.shape
    others = None if leave_out is None else leave_out.repeat(num)
    first = min(steps, _STEPS_PER_NEIGHBOURHOOD)
    points, values = _maximize_once(posterior, objective, x.repeat(num, 1), starts.reshape(num * size, dim), first, lr, others)
    leader = values.reshape(num, size).argmax(0)
    z = points.reshape(num, size, dim)[leader, torch.arange(size, device=leader.device)]
    for done in range(first, steps, _STEPS_PER_NEIGHBOURHOOD):
        z, _ = _maximize_once(posterior, objective, x, z, min(_STEPS_PER_NEIGHBOURHOOD, steps - done), lr, leave_out)
    return z


@torch.no_grad()
def _maximize_once(
    posterior: NearestSet, objective: Objective, x: Tensor, starts: Tensor, steps: int, lr: float, leave_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Returns latents ``(M, Q)`` and values, given the data points closest to starts."""
    around = posterior.around(starts, leave_out)
    points = maximize_batched(lambda z, n: objective(around.take(n), x[n], z), starts.unsqueeze(0), steps, lr)
    return points, objective(around, x, points)


def log_joint(posterior: Posterior, x: Tensor, latents: Tensor) -> Tensor:
    r""":math:`\log p(x_n \mid z_n) + \log \mathcal N(z_n; 0, I)`, up to a constant, of data points at latents ``(*batch, M, Q)``."""
    return conditional_log_prob(x, *posterior.predict(latents)) - 0.5 * latents.square().sum(-1)


# Of the latent space, whose prior has unit variance: errors of central differences in float32 are below 1e-4 there.
_DIFFERENCE_STEP = 1e-2


@dataclasses.dataclass(frozen=True)
class OwnLatents:
    """Most probable latents of data points, and the decoder's predictions around them."""

    latents: Tensor  # (M, Q)
    mean: Tensor  # of the functions at the latents, (M, D)
    variance: Tensor  # of the functions there, (M, 1) or (M, D)
    slopes: Tensor  # of the means, (M, D, Q)

    @classmethod
    def at(cls, posterior: Any, latents: Tensor, loc: Tensor, leave_out: Tensor | None = None) -> Self:
        """Predictions of a posterior around latents; slopes are central differences.

        The posterior predicts deviations from ``loc (D,)``, and of a :class:`NearestSet` not from the data points ``leave_out (M,)``.
        """
        around = posterior.around(latents, leave_out) if isinstance(posterior, NearestSet) else posterior
        mean, variance = around.predict(latents, noiseless=True)
        steps = _DIFFERENCE_STEP * torch.eye(latents.shape[1]).to(latents)
        slopes = [(around.predict(latents + step)[0] - around.predict(latents - step)[0]) / (2 * _DIFFERENCE_STEP) for step in steps]
        return cls(latents.double(), (mean + loc).double(), variance.double(), torch.stack(slopes, -1).double())

    def spread(self, is_observed: Tensor, noise: Tensor) -> Tensor:
        """Returns variances ``(M, D)`` of the means under the normals, at temperature one."""
        precision = is_observed / (self.variance + noise)
        curvature = torch.einsum("mdq,md,mdr->mqr", self.slopes, precision, self.slopes)
        root = torch.linalg.cholesky(curvature + torch.eye(self.latents.shape[1]).to(curvature))
        return torch.linalg.solve_triangular(root, self.slopes.mT, upper=False).square().sum(1)

    def log_joint(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns log joint densities ``(M,)`` of observed entries and latents."""
        return conditional_log_prob(x, self.mean, self.variance + noise) - 0.5 * self.latents.square().sum(1)


_TEMPERATURES = [2.0 ** (power / 2) for power in range(21)]


class CandidateLatents:
    """Latents of a decoder's training data as candidates for new data.

    Example::

        decoder.condition_(x)
        candidates = CandidateLatents(decoder, x)
        mean, variance = candidates.reconstruct(x_new)       # (M, D) each, noise included; x_new is NaN where pixels are missing
        weights = candidates.infer(x_new)                    # (M, K): posterior over the candidates, no optimisation
        mean, variance = candidates.predict(weights)

    Args:
        decoder: a :class:`.SASDecoder`, conditioned.
        x: its training data ``(N, D)``, NaN where missing.
        most: most candidates, drawn at random.
        calibration: training points that temperature and noise are learned from.
        generator: source of randomness.

    Attributes:
        latents: the candidates, ``(K, Q)``.
        noise: noise variance of each output, ``(D,)``.
        temperature: the temperature :math:`T` of halves, at least 1.
        usual_count: how many entries of halves are seen, on average.
        own_noise: noise variance of each output where own latents join, ``(D,)``.
        own_temperature: the temperature there.
        own_scale: factor of the variances there for complete data, which makes 95 % intervals hold 96.5 % of random halves.

    Raises:
        ValueError: if the data do not have the decoder's shape or there are fewer than three.
    """

    @names_arguments
    @leaves_inference_mode
    def __init__(
        self, decoder: Any, x: Tensor, *, most: int = 5000, calibration: int = 500, generator: torch.Generator | None = None
    ) -> None:
        most, calibration, x = check_count("most", most, least=3), check_count("calibration", calibration), as_data("x", x, decoder.loc)
        x = x.to(decoder.loc)
        if tuple(x.shape) != (decoder.num_data, decoder.num_outputs):
            raise ValueError(f"x must be the decoder's training data, ({decoder.num_data}, {decoder.num_outputs}); got {tuple(x.shape)}")
        if len(x) < 3:
            raise ValueError(f"x must hold at least three data points, of which some predict the others; got {len(x)}")
        if bool(x.isnan().all()):
            raise ValueError("x must hold numbers, not only missing ones")
        latents: Tensor = decoder.latents(x)
        device = generator_device(generator)
        order = torch.randperm(len(x), generator=generator, device=device).to(x.device)[:most]
        self.decoder, self.latents = decoder, latents[order]
        mean, variance = decoder.predict(self.latents, noiseless=True)
        self._mean, self._variance = mean.double(), variance.double()
        rows = order[:calibration]
        points, is_hidden = x[rows].double(), torch.rand(x[rows].shape, generator=generator, device=device).to(x.device) < 0.5
        self.usual_count = float((~points.masked_fill(is_hidden, math.nan).isnan()).double().sum(1).mean().clamp(min=1.0))
        self.temperature, self.noise = self._calibrate(points, is_hidden, None)
        self._points, self._others, self._own_row = points, *self._closest_others(x, rows)
        own = self._without_themselves(is_hidden)
        self.own_temperature, self.own_noise = (self.temperature, self.noise) if own is None else self._calibrate(points, is_hidden, own)
        self.own_scale = self._scale(is_hidden, own)
        self._scales: dict[bytes, float] = {}

    @names_arguments
    @torch.no_grad()
    def infer(self, x: Tensor) -> Tensor:
        """Returns posterior probabilities of the candidates, ``(M, K)``.

        Data points are ``(M, D)``, NaN where missing.

        Raises:
            TypeError: if data points are complex.
            ValueError: if data points have another number of outputs, or are infinite.
        """
        x = self._check(x)
        return (self._log_joint(x, self.noise) / self._temper(x, self.temperature)).softmax(1)

    def _temper(self, x: Tensor, temperature: float) -> Tensor:
        r"""Returns temperatures ``(M, 1)`` by how much is seen of data points.

        If errors of any two entries have the correlation :math:`\rho`, the mean of ``n`` has :math:`1 + (n - 1) \rho`
        times the variance of that of independent ones. Where less is seen, the temperature stays that of halves.
        """
        count = (~x.isnan()).double().sum(1, keepdim=True)
        return 1 + (temperature - 1) * (count / self.usual_count).clamp(min=1.0)

    def _check(self, x: Tensor) -> Tensor:
        check_column_names(self.decoder, "x", x)
        x = as_data("x", x).to(self._mean)
        if x.dim() != 2 or x.shape[1] != self._mean.shape[1] or bool(x.isinf().any()):
            raise ValueError(f"data points x must be finite or NaN and of shape (M, {self._mean.shape[1]}); got {describe(x)}")
        return x

    @names_arguments
    @leaves_inference_mode
    def reconstruct(self, x: Tensor, *, noiseless: bool = False, block: int = 2000) -> tuple[Tensor, Tensor]:
        """Returns means and variances ``(M, D)`` of all outputs.

        They are given the observed entries of data points ``(M, D)``, NaN where missing.

        The most probable latent of each data point is among its candidates. Variances are scaled such that
        95 % intervals hold 96.5 % of training points' entries, hidden where the data points' are. So the
        scale depends on what is hidden in all data points given. It is learned for each new pattern, and kept.

        Args:
            x: data points.
            noiseless: whether variances are those of the functions alone.
            block: data points at a time.

        Reference:
            Lei, G'Sell, Rinaldo, Tibshirani and Wasserman, "Distribution-free predictive inference for regression", Journal of the American
            Statistical Association 113, 2018.

        Raises:
            ValueError: as :meth:`infer` does.
            RuntimeError: if the decoder's parameters have changed since.
        """
        x = self._check(x)
        parts = []
        for rows in x.split(check_count("block", block)):
            own = OwnLatents.at(self.decoder.posterior(), self.decoder.infer(rows.to(self.latents)), self.decoder.loc)
            parts.append(self._with_own(self._log_joint(rows, self.own_noise), rows, own))
        mean, spread = (torch.cat(moments) for moments in zip(*parts, strict=True))
        return mean, self._variance_factor(x.isnan()) * (spread if noiseless else spread + self.own_noise)

    def _with_own(self, log_joint: Tensor, x: Tensor, own: OwnLatents) -> tuple[Tensor, Tensor]:
        """As :meth:`_mix`, at the temperature and the noise that were learned."""
        T, noise = self._temper(x, self.own_temperature), self.own_noise
        return self._mix(log_joint / T, own, own.log_joint(x, noise) / T[:, 0], T * own.spread((~x.isnan()).double(), noise))

    def _variance_factor(self, is_hidden: Tensor) -> float:
        """Returns the factor of variances, as of training points hidden alike."""
        masks = is_hidden[is_hidden.any(1)]
        if len(masks) == 0:
            return self.own_scale
        turn = torch.arange(len(self._points), device=masks.device)
        masks = masks[turn * len(masks) // len(turn) if len(masks) > len(turn) else turn % len(masks)]
        key = np.packbits(masks.cpu().numpy()).tobytes()
        if key not in self._scales:
            # So many patterns of missing entries are kept, the newest ones.
            if len(self._scales) == 100:
                del self._scales[next(iter(self._scales))]
            self._scales[key] = self._scale(masks, self._without_themselves(masks))
        return self._scales[key]

    def _scale(self, is_hidden: Tensor, own: OwnLatents | None) -> float:
        """Returns the factor of variances that calibrates 95 % intervals."""
        x = self._points
        visible, hidden = x.masked_fill(is_hidden, math.nan), is_hidden & ~x.isnan()
        if own is None or not bool(hidden.any()):
            return 1.0
        mean, spread = self._with_own(self._log_joint_without_own(visible, self.own_noise), visible, own)
        squares = ((x - mean).square() / (spread + self.own_noise))[hidden]
        # Latents were learned with these entries, and others are covered by a hundredth less: chosen on digits.
        rank = min(math.ceil(0.965 * (len(squares) + 1)), len(squares))
        return float(squares.kthvalue(rank).values) / 1.96**2

    def _mix(self, log_weights: Tensor, own: OwnLatents, log_own: Tensor, own_spread: Tensor) -> tuple[Tensor, Tensor]:
        """Returns functions' means and variances ``(M, D)`` under candidates, and own normals."""
        weights, total = log_weights.softmax(1), log_weights.logsumexp(1)
        mean, second = weights @ self._mean, weights @ (self._mean.square() + self._variance)
        # A hundred of 2500: fewer leave errors where all is seen, more make intervals of lower
        # halves of digits too short.
        share = (log_own + math.log(0.04 * len(self.latents)) - total).sigmoid().unsqueeze(1)
        mean = torch.lerp(mean, own.mean, share)
        second = torch.lerp(second, own.mean.square() + own.variance + own_spread, share)
        return mean, (second - mean.square()).clamp(min=0.0)

    @names_arguments
    @torch.no_grad()
    def predict(self, weights: Tensor, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Returns means and variances ``(M, D)`` under posteriors ``(M, K)``.

        They are those of the data points' outputs, or ``noiseless`` of the functions.
        """
        weights = as_data("weights", weights).to(self._mean)
        return self._moments(weights, torch.zeros_like(self.noise) if noiseless else self.noise)

    @names_arguments
    @torch.no_grad()
    def log_density(self, x: Tensor, weights: Tensor, most: int = 50) -> Tensor:
        """Returns each output's log density ``(M, D)`` under the mixture.

        It has the ``most`` probable candidates of each data point. Missing entries have zero.
        """
        x, weights = self._check(x), as_data("weights", weights).to(self._mean)
        chances, index = weights.topk(min(most, weights.shape[1]), 1)
        log_share = (chances / chances.sum(1, keepdim=True)).log()
        total = torch.full_like(x, -math.inf)
        for share, k in zip(log_share.mT, index.mT, strict=True):
            spread = self._variance[k] + self.noise
            log_prob = -((x - self._mean[k]).square() / spread + (2 * math.pi * spread).log()) / 2
            total = torch.logaddexp(total, share[:, None] + log_prob)
        return total.masked_fill(x.isnan(), 0.0)

    def _log_joint(self, x: Tensor, noise: Tensor) -> Tensor:
        """Returns log joint densities ``(M, K)`` of observed entries and candidates."""
        return log_prob_of_each(x, self._mean, self._variance + noise) - 0.5 * self.latents.double().square().sum(1)

    def _moments(self, weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean = weights @ self._mean
        second = weights @ (self._mean.square() + self._variance)
        return mean, (second - mean.square()).clamp(min=0.0) + noise

    def _log_joint_without_own(self, visible: Tensor, noise: Tensor) -> Tensor:
        """As :meth:`_log_joint`, of the first candidates without their own latents."""
        log_joint = self._log_joint(visible, noise)
        log_joint.diagonal()[: len(visible)] = -math.inf
        return log_joint

    def _first_noise(self) -> Tensor:
        return self.decoder.noise_variance.detach().double().expand(self._mean.shape[1])

    def _calibrate(self, x: Tensor, is_hidden: Tensor, own: OwnLatents | None, *, rounds: int = 2) -> tuple[float, Tensor]:
        """Temperature and noise learned from data points that are the first candidates."""
        visible, hidden = x.masked_fill(is_hidden, math.nan), (is_hidden & ~x.isnan()).double()
        temperature, noise, nothing = 1.0, self._first_noise(), torch.zeros_like(self._mean[0])
        for _ in range(rounds):
            logs, temperatures = self._log_joint_without_own(visible, noise), [self._temper(visible, T) for T in _TEMPERATURES]
            if own is None:
                moments = [self._moments((logs / T).softmax(1), nothing) for T in temperatures]
            else:
                log_own, spread = own.log_joint(visible, noise), own.spread((~visible.isnan()).double(), noise)
                moments = [self._mix(logs / T, own, log_own / T[:, 0], T * spread) for T in temperatures]
            fits = [_fit_noise(x.nan_to_num(0.0), hidden, mean, spread) for mean, spread in moments]
            best = int(torch.stack([score for score, _ in fits]).argmax())
            temperature, noise = _TEMPERATURES[best], fits[best][1]
        return temperature, noise

    def _closest_others(self, x: Tensor, rows: Tensor, *, neighbors: int = 100) -> tuple[NearestSet | None, Tensor]:
        """Returns a predictor from the closest complete points, and where rows are.

        It is ``None`` where few of the data are complete. The second is where these rows are among them.
        """
        complete = ~x.isnan().any(1)
        own_row = torch.where(complete, complete.cumsum(0) - 1, -1)[rows]
        if 2 * int(complete.sum()) < len(x):
            return None, own_row
        decoder = self.decoder
        noise, latents = decoder.noise_variance.detach(), decoder.latents(x)[complete]
        return NearestSet(latents, x[complete] - decoder.loc, decoder.kernel, noise, neighbors), own_row

    def _without_themselves(self, is_hidden: Tensor, *, max_bfgs_steps: int = 30) -> OwnLatents | None:
        """Returns own latents of hidden training points, given the closest others."""
        if self._others is None:
            return None
        decoder, visible = self.decoder, self._points.masked_fill(is_hidden, math.nan)
        best = self._log_joint_without_own(visible, self._first_noise()).topk(min(3, len(self.latents) - 1), 1).indices
        starts, centred = self.latents[best].movedim(1, 0), visible.to(self.latents) - decoder.loc
        first_step = 0.05  # its length, in latents of unit variance
        z = maximize_among_neighbors(self._others, log_joint, centred, starts, max_bfgs_steps, first_step, self._own_row)
        return OwnLatents.at(self._others, z, decoder.loc, self._own_row)


def _fit_noise(x: Tensor, is_hidden: Tensor, mean: Tensor, spread: Tensor, *, noise_floor: float = 1e-4) -> tuple[Tensor, Tensor]:
    """Returns the log density of hidden entries, and each output's noise."""
    error, counts = (x - mean).square() * is_hidden, is_hidden.sum(0).clamp(min=1.0)
    noise = ((error - spread * is_hidden).sum(0) / counts).clamp(min=noise_floor * float(error.sum() / is_hidden.sum()))
    total = spread + noise
    return -((error / total + is_hidden * total.log()).sum() / 2), noise


_NAMES = ("z_loc", "z_scale")


def join_latents(module: torch.nn.Module, expected: Portion | None, x: Tensor) -> Portion | None:
    """Which data points a shard has, ``None`` for all.

    On the first call the latents of others are dropped, and all processes start like the first.
    """
    portion = find_part(x)
    if expected is None and portion is not None:
        _begin(module, portion)
    elif portion != expected:
        raise ValueError(f"data must be the shard of the latents, {expected}; got {portion}. Call gather_() on all processes before")
    for parameter in _latent_parameters(module) if portion is not None else ():
        # Copies of a module do not know of it.
        owned_parameters[parameter] = True
    return portion


@torch.no_grad()
def gather_latents(module: torch.nn.Module) -> None:
    """Gives every process the latents of all data points."""
    for parameter in _latent_parameters(module):
        parameter.data = torch.cat(collectives.gather(parameter.detach().clone()))
        parameter.grad = None
        owned_parameters.pop(parameter, None)


@torch.no_grad()
def _begin(module: torch.nn.Module, portion: Portion) -> None:
    latents = _latent_parameters(module)
    for parameter in latents:
        parameter.data = parameter.detach()[portion.first : portion.first + portion.size].clone()
        parameter.grad = None
    own = {id(parameter) for parameter in latents}
    common = [tensor for tensor in (*module.parameters(), *module.buffers()) if id(tensor) not in own]
    load_snapshot(common, collectives.agree([tensor.detach() for tensor in common]))
    synchronize_generator(None)


def _latent_parameters(module: torch.nn.Module) -> list[Tensor]:
    return [value for name, value in module.named_parameters(recurse=False) if name.removesuffix("_unconstrained") in _NAMES]


@dataclasses.dataclass(frozen=True)
class SharedSplit(Split):
    """A process's part of a minibatch, whose results add up."""

    within: Tensor  # positions (b,) of its data points within the minibatch
    batch_size: int  # data points of the minibatch, B
    portion: Portion  # the data points of this process

    @classmethod
    def from_split(cls, split: Split, portion: Portion) -> SharedSplit:
        """That of a minibatch of data points of all processes."""
        if not split.num_active:
            raise ValueError("on several processes a minibatch needs an active set of at least one data point (num_active)")
        is_own = portion.holds(split.indices)
        is_own[: split.num_active] = True
        within = is_own.nonzero().squeeze(-1)
        return cls(split.indices[within], split.num_active, within, len(split.indices), portion)

    def weights(self, num_data: int, like: Tensor | None = None) -> Tensor:
        """Weights ``(b,)`` that correct a plate's scale ``N / b``."""
        weights = split_weights(self.batch_size, self.num_active, num_data, like)[self.within] * (len(self.within) / self.batch_size)
        weights[: self.num_active] /= collectives.size()
        return weights

    def rows(self, x: Tensor) -> Tensor:
        """The data ``(b, D)``, of which the active points come from their owners."""
        return torch.cat([rows_at(x, self.active), x[self.rest - self.portion.first]])

    def latents(self, variables: Sequence[Tensor]) -> list[Tensor]:
        """Gathers rows ``(b, Q)``; gradients of active ones go to owners."""
        every = torch.cat(list(variables), -1)
        rows = torch.cat([gather_owned_rows(every, self.portion, self.active), every[self.rest - self.portion.first]])
        return list(rows.split([values.shape[-1] for values in variables], -1))

    def normal(self, loc: Tensor, scale: Tensor) -> Any:
        """Those that draw for all of the minibatch, alike on all processes."""
        return dist.Independent(RowNormal(loc, scale, self.within, self.batch_size), 1)


class RowNormal(dist.Normal):
    """Normal distributions of some ``rows (b,)`` of ``num_rows``, ``(..., b, Q)``."""

    def __init__(self, loc: Tensor, scale: Tensor, rows: Tensor, num_rows: int) -> None:
        super().__init__(loc, scale)
        self.rows, self.num_rows = rows, num_rows

    def expand(self, batch_shape: Any, _instance: Any = None) -> RowNormal:
        """The same with further dimensions on the left."""
        return RowNormal(self.loc.expand(batch_shape), self.scale.expand(batch_shape), self.rows, self.num_rows)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws for all rows, and takes its own."""
        shape = torch.Size(sample_shape) + self.batch_shape
        noise = torch.randn(*shape[:-2], self.num_rows, shape[-1], dtype=self.loc.dtype, device=self.loc.device)
        return self.loc + noise[..., self.rows, :] * self.scale
