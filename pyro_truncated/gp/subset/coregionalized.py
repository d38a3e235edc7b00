r"""Regression of correlated outputs by an intrinsic model of coregionalisation.

.. math:: \operatorname{Cov}(f_h(x), f_{h'}(x')) = B_{hh'}\, k(x, x'), \quad B = W W^\top + \operatorname{diag}(v), \quad
    y_{nh} \sim \mathcal N(f_h(x_n), \sigma_h^2)
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.data_kernels.protocol import bound_kernel, check_data_kernel
from pyro_truncated.gp.optimization import FitRecord, FitSettings
from pyro_truncated.gp.subset.alternation import (
    EXACT_UP_TO,
    LEAST_EXPLAINED,
    MIN_SCOUTED_GAIN,
    SCOUTED,
    SCOUTING_ITERATIONS,
    evidence_backward,
    kernels_with_length_scales,
    learn_exactly,
    scout_length_scales,
)
from pyro_truncated.gp.subset.objectives import NOISE_FLOOR, Basis, covariances_with, noise_from_log
from pyro_truncated.gp.subset.regression import SavedRegression, explained_share, warn_about_copies, warn_about_noise
from pyro_truncated.utils.arguments import check_count, check_kinds, describe, names_arguments
from pyro_truncated.utils.arrays import as_data
from pyro_truncated.utils.budget import rows_per_block
from pyro_truncated.utils.constraints import LARGEST
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot


@dataclasses.dataclass(frozen=True)
class ObservedEntries:
    """Entries of standardised targets ``(n, H)`` that were observed, ``E`` of them."""

    row: Tensor  # the input of each, (E,)
    output: Tensor  # the output of each, (E,)
    value: Tensor

    def __len__(self) -> int:
        return len(self.value)

    def subsample(self, num: int, generator: torch.Generator | None = None) -> ObservedEntries:
        """Returns at most ``num`` random entries, of as many inputs as possible."""
        order = torch.randperm(len(self), generator=generator).to(self.row.device)
        by_input, place = self.row[order].sort(stable=True)
        turn = torch.arange(len(self), device=place.device) - torch.searchsorted(by_input, by_input)
        index = order[place[turn.argsort(stable=True)[:num]]]
        return ObservedEntries(self.row[index], self.output[index], self.value[index])

    def predict_left_out(self, inverse: Tensor) -> Tensor:
        r"""Predicts an input's entries ``(E,)`` from those of others: :math:`y_b - (P_{bb})^{-1} [P y]_b`."""
        _, group = self.row.unique(return_inverse=True)
        place = torch.full((int(group.max()) + 1, int(self.output.max()) + 1), -1, device=group.device)
        place[group, self.output] = torch.arange(len(self), device=group.device)
        is_observed = place >= 0
        within = inverse[place[:, :, None], place[:, None, :]]
        identity = torch.eye(place.shape[1], dtype=inverse.dtype, device=inverse.device)
        blocks = torch.where(is_observed[:, :, None] & is_observed[:, None, :], within, identity)
        weights = torch.where(is_observed, (inverse @ self.value)[place], 0.0)
        return self.value - torch.linalg.solve(blocks, weights)[group, self.output]


# Share of their variance that outputs have of their own at the start.
_OWN_SHARE = 0.5


class CoregionalizedGPRegression(SavedRegression):
    r"""Exact Gaussian process regression of several correlated outputs.

    Each output has its own noise, and inputs are of any kind. Outputs need not be observed at the same inputs. Every output is
    standardised. The cost is that of an exact regression on all observed entries, of which there may be up to 5000.

    If a first fit predicts nothing of an input's targets from other inputs, other length-scales are tried on some of the entries, and the
    fit restarts from the best.

    Example::

        model = CoregionalizedGPRegression(x, y)                   # y (n, H), NaN where missing
        model.fit()
        mean, variance = model.predict(new)                         # (n_new, H) each
        draws = model.posterior(new).sample((100,)).reshape(100, len(new), -1)

    Args:
        X: the training inputs, or a kernel with its own, as for :class:`SubsetGPRegression`.
        y: targets ``(n, H)``, NaN where missing.
        kernel: as for :class:`SubsetGPRegression`.
        rank: columns ``R`` of :math:`W`.
        noise: noise variance of each output to start from, of standardised targets.
        generator: source of randomness.

    Attributes:
        mixing: :math:`W`, ``(H, R)``. It starts at the leading correlations of the targets.
        log_own: :math:`\log v`, ``(H,)``.
        log_noise: noise variances as free parameters, ``(H,)``; see :attr:`noise`.
        history: seconds, ``"exact"`` and objective of each improvement.
        objective_value: minus the log evidence of standardised targets, without its constant; NaN before :meth:`fit`.

    Raises:
        ValueError: if a shape or a number is not as above, an output is never observed, or there are too many entries.
    """

    _row: Tensor
    _output: Tensor
    _values: Tensor

    @names_arguments
    def __init__(
        self, X: Any, y: Tensor, kernel: Any = None, *, rank: int = 1, noise: float = 0.5, generator: torch.Generator | None = None
    ) -> None:
        super().__init__()
        check_kinds(CoregionalizedGPRegression.__init__, generator=generator)
        self.kernel, targets = bound_kernel(X, kernel), as_data("y, the targets,", y)
        n, rank = self.kernel.num_data, check_count("rank", rank)
        matrix = targets.detach().double()
        if targets.dim() != 2 or len(targets) != n or bool((matrix.abs() > LARGEST).any()):
            raise ValueError(f"y, the targets, must be finite or NaN and of shape ({n}, H); got {describe(targets)}")
        is_observed = ~targets.isnan()
        if not bool((is_observed.sum(0) > 1).all()):
            raise ValueError(
                f"every output of y must be observed at two inputs or more; got outputs with {is_observed.sum(0).tolist()} observations"
            )
        if int(is_observed.sum()) > EXACT_UP_TO:
            raise ValueError(f"an exact regression has at most {EXACT_UP_TO} observed entries; got {int(is_observed.sum())}")
        if not NOISE_FLOOR < noise < math.inf:
            raise ValueError(f"noise must be a variance above {NOISE_FLOOR}; got {noise}")
        check_data_kernel(self.kernel)
        mean, spread = matrix.nanmean(0), (matrix - matrix.nanmean(0)).square().nanmean(0).sqrt()
        self.register_buffer("target_mean", mean)
        self.register_buffer("target_scale", torch.where(spread > 0, spread, torch.ones_like(spread)))
        standard = (matrix - self.target_mean) / self.target_scale
        row, output = is_observed.nonzero().unbind(1)
        for name, part in {"_row": row, "_output": output, "_values": standard[is_observed]}.items():
            self.register_buffer(name, part, persistent=False)
        self.mixing = torch.nn.Parameter(_leading_correlations(standard, rank))
        self.log_own = torch.nn.Parameter(torch.full_like(mean, _OWN_SHARE).log())
        self.log_noise = torch.nn.Parameter(torch.full_like(mean, noise - NOISE_FLOOR).log())
        self.generator = generator
        self.objective_value = math.nan
        self.history: list[tuple[float, str, float]] = []

    @property
    def num_outputs(self) -> int:
        """Number of correlated outputs, ``H``."""
        return len(self.target_mean)

    @property
    def coregionalization(self) -> Tensor:
        """The covariances ``B`` of the standardised outputs, ``(H, H)``."""
        return self.mixing @ self.mixing.mT + torch.diag_embed(self.log_own.exp())

    @property
    def noise(self) -> Tensor:
        """Noise variances of the standardised outputs, ``(H,)``."""
        return noise_from_log(self.log_noise)

    def covariance(self, entries: ObservedEntries | None = None) -> Tensor:
        """Covariances of all observed entries or of some, noise included."""
        entries = self._entries if entries is None else entries
        inputs, place = entries.row.unique(return_inverse=True)
        prior = Basis(self.kernel, inputs).square()[place[:, None], place]
        shared = prior * self.coregionalization[entries.output[:, None], entries.output]
        return shared + torch.diag_embed(self.noise[entries.output])

    def saved_data(self) -> tuple[Tensor, Tensor]:
        """Observed entries of standardised targets, and the positions of all inputs."""
        return torch.stack([self._row, self._output, self._values]), torch.arange(self.kernel.num_data, device=self._row.device)

    @property
    def _entries(self) -> ObservedEntries:
        return ObservedEntries(self._row, self._output, self._values)

    def fit(
        self,
        *,
        max_iterations: int = 200,
        max_seconds: float | None = None,
        tolerance: float = 1e-5,
        clock: Callable[[], float] = time.perf_counter,
        progress: bool | None = None,
    ) -> float:
        """Learns kernel parameters, correlations and noise by L-BFGS, from current values.

        Args:
            max_iterations: most iterations.
            max_seconds: most seconds by ``clock``. Default: no limit.
            tolerance: gain per observed entry below which it ends.
            clock: seconds from some moment on.
            progress: whether to show a progress bar. Default: in a terminal.

        Returns:
            The objective reached, see :attr:`objective_value`.

        Raises:
            ValueError: if the objective is not finite at the start.

        Warns:
            AllNoiseWarning: if the targets of each input predicted from all other inputs account for nearly nothing.
            UserWarning: if repeated data points have made the noise vanish.
        """
        check_kinds(CoregionalizedGPRegression.fit, max_seconds=max_seconds, tolerance=tolerance)
        max_iterations = check_count("max_iterations", max_iterations, least=0)
        record, everything = FitRecord(self.history, max_seconds, clock, progress), self._entries
        start, is_first = snapshot(self._trainable_parameters), math.isnan(self.objective_value) and max_iterations > 0

        def attempt() -> Tensor:
            settings = FitSettings(max_iterations, record.remaining_seconds, tolerance)
            self.objective_value = self._fit_to(everything, settings, record)
            return self._predict_left_out(everything)

        prediction = attempt()
        may_move = is_first and bool(kernels_with_length_scales(self.kernel)) and record.remaining_seconds() > 0
        if may_move:
            before, value = snapshot(self._trainable_parameters), self.objective_value
            parameters = self._scout(start, FitSettings(min(max_iterations, SCOUTING_ITERATIONS), record.budget(0.5), tolerance))
            load_snapshot(self._trainable_parameters, parameters or before)
            other = attempt() if parameters else prediction
            if self.objective_value < value:
                prediction = other
            else:
                load_snapshot(self._trainable_parameters, before)
                self.objective_value = value
        record.close()
        warn_about_noise(everything.value[:, None], prediction[:, None], float(self.noise.detach().mean()))
        of_output = torch.stack([everything.output.double(), everything.value], 1)
        warn_about_copies(self.kernel, everything.row, of_output, float(self.noise.detach().min()))
        return self.objective_value

    @property
    def _trainable_parameters(self) -> list[Tensor]:
        return [p for p in self.parameters() if p.requires_grad]

    def _fit_to(self, entries: ObservedEntries, settings: FitSettings, record: FitRecord) -> float:
        return learn_exactly(lambda weight: self.backward(weight, entries), len(entries), self._trainable_parameters, settings, record)

    def _scout(self, start: list[Tensor], settings: FitSettings) -> list[Tensor] | None:
        """Parameters of better fits to some entries, from other length-scales."""
        some = self._entries.subsample(SCOUTED, self.generator)

        def scout() -> float:
            value = self._fit_to(some, settings, FitRecord([]))
            explained = explained_share(some.value[:, None], self._predict_left_out(some)[:, None])[0]
            return value if explained >= LEAST_EXPLAINED else math.inf

        reached = scout()
        best, parameters = scout_length_scales(scout, self.kernel, self._trainable_parameters, start)
        return parameters if best < reached - MIN_SCOUTED_GAIN else None

    @torch.no_grad()
    def _predict_left_out(self, entries: ObservedEntries) -> Tensor:
        return entries.predict_left_out(torch.cholesky_inverse(stable_cholesky(self.covariance(entries))))

    def backward(self, weight: float = 1.0, entries: ObservedEntries | None = None) -> float:
        """The objective times a weight, whose gradient is added to all parameters."""
        entries = self._entries if entries is None else entries
        with torch.enable_grad():
            covariance = self.covariance(entries)
        return evidence_backward(covariance, entries.value[:, None], weight)

    @torch.no_grad()
    def predict(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictions of all outputs at new inputs.

        Args:
            new: new inputs, as the kernel takes them.
            noiseless: whether variances are those of the functions alone.

        Returns:
            Means and variances of the targets, ``(n_new, H)`` each, in float64.
        """
        (cross, prior), factor = self._cross(new), stable_cholesky(self.covariance())
        weights = torch.cholesky_solve(self._values[:, None], factor).squeeze(1)
        means, variances = [], []
        for rows in torch.arange(len(cross)).split(rows_per_block(32 * self.num_outputs * len(self._values))):
            block = self._block(cross[rows])
            explained = torch.linalg.solve_triangular(factor, block.flatten(0, 1).mT, upper=False).square().sum(0)
            means.append(block @ weights)
            variances.append(prior[rows, None] * self.coregionalization.diagonal() - explained.reshape(len(rows), self.num_outputs))
        mean, variance = torch.cat(means), torch.cat(variances).clamp(min=0.0)
        variance = variance if noiseless else variance + self.noise
        return mean * self.target_scale + self.target_mean, variance * self.target_scale.square()

    def posterior(self, new: Any, *, noiseless: bool = True) -> dist.MultivariateNormal:
        """Returns the joint distribution of all outputs at new inputs.

        Args:
            new: new inputs, as the kernel takes them. The kernel must offer ``among(new)``.
            noiseless: whether it is that of the functions alone, or of targets with noise of their own.

        Returns:
            A normal distribution of event shape ``(n_new * H,)``, the outputs of the first input first.
        """
        (cross, variances), factor = self._cross(new), stable_cholesky(self.covariance())
        solved = torch.linalg.solve_triangular(factor, self._block(cross).flatten(0, 1).mT, upper=False)
        weights = torch.linalg.solve_triangular(factor, self._values[:, None], upper=False)
        output = torch.arange(self.num_outputs, device=self._row.device).repeat(len(cross))
        prior = self.kernel.among(new).double().repeat_interleave(self.num_outputs, 0).repeat_interleave(self.num_outputs, 1)
        spread = prior * self.coregionalization[output[:, None], output] - solved.mT @ solved
        spread = spread if noiseless else spread + torch.diag_embed(self.noise[output])
        scale = self.target_scale[output]
        level = variances.mean() * self.coregionalization.diagonal().mean()
        mean = (solved.mT @ weights).squeeze(1) * scale + self.target_mean[output]
        return dist.MultivariateNormal(mean, scale_tril=scale[:, None] * stable_cholesky(spread, level))

    def _cross(self, new: Any) -> tuple[Tensor, Tensor]:
        """Covariances ``(n_new, n)`` of new inputs with the training inputs, and their variances."""
        return covariances_with(Basis(self.kernel, torch.arange(self.kernel.num_data, device=self._row.device)), new)

    def _block(self, cross: Tensor) -> Tensor:
        """Covariances of all outputs at new inputs with the observed entries, ``(n_new, H, entries)``."""
        return cross[:, None, self._row] * self.coregionalization[:, self._output]


def _leading_correlations(targets: Tensor, rank: int) -> Tensor:
    """The first columns ``(H, R)`` of a correlation matrix's root."""
    complete, counts = targets.nan_to_num(0.0), (~targets.isnan()).double()
    correlations = (complete.mT @ complete) / (counts.mT @ counts).clamp(min=1)
    values, vectors = torch.linalg.eigh(correlations)
    loadings = vectors.flip(1)[:, :rank] * ((1 - _OWN_SHARE) * values.flip(0)[:rank].clamp(min=1e-2)).sqrt()
    return torch.nn.functional.pad(loadings, (0, rank - loadings.shape[1]), value=1e-2)
