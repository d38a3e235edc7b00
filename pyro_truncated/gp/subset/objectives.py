r"""Objectives of sparse regression and their gradients.

With :math:`\hat K = K_{nI} K_{II}^{-1} K_{In} = L L^\top`, :math:`G = L^\top L`, :math:`B = G + \sigma^2 I` and ``H`` outputs :math:`Y`,
the objective without its constant :math:`\frac{nH}2 \log 2\pi` is :math:`F = (E_D + E_C + E_V) / 2`, to be minimised:

.. math::

    E_D = \sigma^{-2} (|Y|^2 - |B^{-1/2} L^\top Y|^2), \quad E_C = H [(n - m) \log \sigma^2 + \log |B|], \quad
    E_V = H \sigma^{-2} \operatorname{tr}(K - \hat K).

``"vfe"`` is the variational free energy (Titsias, 2009); ``"pp"``, the likelihood of the projected process, leaves out :math:`E_V`.

The inducing inputs' columns are :math:`K_{nI} = L C^\top`. With :math:`P = L C^{-1}`, :math:`S = L L^\top + \sigma^2 I`, :math:`a = S^{-1}
Y` and :math:`W = H S^{-1} - a a^\top - [\text{VFE}] H I / \sigma^2`, the gradient is

.. math:: dF = \langle W P, dK_{nI} \rangle - \tfrac12 \langle P^\top W P, dK_{II} \rangle
    + [\text{VFE}] \tfrac{H}{2 \sigma^2} \operatorname{tr} dK ,

so that only the kernel itself is differentiated automatically, a block of rows at a time.

Reference:
    Cao, Brubaker, Fleet and Hertzmann, "Efficient optimization for sparse Gaussian process regression", PAMI 37 (2015), section 2.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.gp.cholesky import independent_cholesky
from pyro_truncated.gp.data_kernels.protocol import DataKernel, InputKernel, check_positions
from pyro_truncated.gp.noisy_covariance import SMALLEST_SHARE, LowRankCovariance
from pyro_truncated.utils.arguments import describe
from pyro_truncated.utils.budget import rows_per_block

OBJECTIVES = ("vfe", "pp")


@dataclasses.dataclass(frozen=True)
class SubsetProblem:
    """Data, kernel and noise of an objective of inducing subsets."""

    kernel: DataKernel  # the kernel on the training inputs
    targets: Tensor  # (n, H) float64; the outputs share the subset, the kernel and the noise
    noise: float  # noise variance
    objective: str = "vfe"  # "vfe" or "pp"

    def __post_init__(self) -> None:
        if self.targets.dim() != 2 or len(self.targets) != self.kernel.num_data or not bool(self.targets.isfinite().all()):
            shape = f"({self.kernel.num_data}, H)"
            raise ValueError(f"targets must be finite and of shape {shape}, one row per input; got {describe(self.targets)}")
        if not 0 < self.noise < float("inf"):
            raise ValueError(f"noise must be a positive variance; got {self.noise}")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"objective must be one of {', '.join(OBJECTIVES)}; got {self.objective!r}")

    @property
    def num_data(self) -> int:
        """Number of training inputs ``n``."""
        return len(self.targets)

    @property
    def num_outputs(self) -> int:
        """Number of outputs ``H``."""
        return self.targets.shape[1]

    @property
    def trace_weight(self) -> float:
        r"""Weight of :math:`\operatorname{tr}(K - \hat K)` in :math:`2F`: :math:`H / \sigma^2`, or zero for the projected process."""
        return self.num_outputs / self.noise if self.objective == "vfe" else 0.0

    @torch.no_grad()
    def columns(self, index: Tensor) -> Tensor:
        """Columns ``(n, b)`` of the kernel matrix in float64."""
        return self.kernel.columns(index).detach().double()

    @torch.no_grad()
    def diag(self) -> Tensor:
        """Diagonal ``(n,)`` of the kernel matrix in float64."""
        return self.kernel.diag().detach().double().clone()

    def value_from(self, factor: Tensor, whitened: Tensor, residual: Tensor) -> Tensor:
        r""":math:`F` from the Cholesky factor of :math:`B`, :math:`B^{-1/2} L^\top Y` and :math:`\operatorname{tr}(K - \hat K)`."""
        data = (self.targets.square().sum() - whitened.square().sum()) / self.noise
        log_noise = torch.tensor(self.noise, dtype=factor.dtype, device=factor.device).log()
        complexity = self.num_outputs * ((self.num_data - len(factor)) * log_noise + 2 * factor.diagonal().log().sum())
        return 0.5 * (data + complexity + self.trace_weight * residual)


def objective_at_share(targets: Tensor, explained: float = 0.02) -> float:
    """The objective of a fit that explains a share of standardised targets."""
    return 0.5 * (1 - explained) * targets.numel()


def check_index(index: Tensor, num_data: int) -> Tensor:
    """Positions of an inducing subset ``(m,)`` as int64."""
    index = check_positions("index", index, num_data)
    if not len(index):
        raise ValueError(f"index must be positions (m,), integers from 0 to {num_data - 1}; got none")
    if len(index.unique()) != len(index):
        raise ValueError(f"index must not hold a position twice; got {len(index)} positions, {len(index.unique())} of them distinct")
    return index.long()


@torch.no_grad()
def witness(kernel: DataKernel, index: Tensor) -> Tensor:
    """Covariances ``(m,)`` of the first inducing input with all of them."""
    return kernel.columns(index[:1], index).double().squeeze(1).clone()


def check_witness(kernel: DataKernel, index: Tensor, saved: Tensor) -> None:
    """Refuses a state of other inputs, by its :func:`witness`."""
    if not len(saved):
        return
    is_within = len(index) == len(saved) and int(index.max()) < kernel.num_data
    if not is_within or not torch.allclose(witness(kernel, index), saved.to(index.device), rtol=1e-4, atol=1e-8):
        raise ValueError("the state is of a regression on other inputs: the kernel here has other covariances of the inducing inputs")


class Basis:
    """Inducing inputs from the training inputs: covariances with them."""

    def __init__(self, kernel: DataKernel, index: Tensor) -> None:
        self.kernel = kernel
        self.index = index

    def __len__(self) -> int:
        return len(self.index)

    def columns(self, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, m)`` of the training inputs, or those at ``rows``, in float64."""
        return self.kernel.columns(self.index, rows).double()

    def square(self) -> Tensor:
        """Covariances ``(m, m)`` of the inducing inputs, in float64."""
        return self.kernel.columns(self.index, self.index).double()

    def cross(self, new: Any) -> Tensor:
        """Covariances ``(n_new, m)`` of new inputs, in float64."""
        return self.kernel.cross(new, self.index).double()


class FreeBasis(Basis):
    """Inducing inputs anywhere in the input space."""

    kernel: InputKernel

    def __init__(self, kernel: InputKernel, inputs: Tensor) -> None:
        self.kernel = kernel
        self.inputs = inputs

    def __len__(self) -> int:
        return len(self.inputs)

    def columns(self, rows: Tensor | None = None) -> Tensor:
        """Covariances ``(n, m)`` of the training inputs, or those at ``rows``, in float64."""
        points = self.kernel.inputs if rows is None else self.kernel.inputs[rows]
        return self.kernel.between(points, self.inputs).double()

    def square(self) -> Tensor:
        """Covariances ``(m, m)`` of the inducing inputs, in float64."""
        return self.kernel.between(self.inputs, self.inputs).double()

    def cross(self, new: Any) -> Tensor:
        """Covariances ``(n_new, m)`` of new inputs, in float64."""
        return self.kernel.between(self.kernel.points(new), self.inputs).double()


def covariances_with(basis: Basis, new: Any) -> tuple[Tensor, Tensor]:
    """Covariances ``(n_new, m)`` with inducing inputs, and variances ``(n_new,)``."""
    cross, prior = basis.cross(new), basis.kernel.diag_new(new).double()
    strange = ~(cross.isfinite().all(1) & prior.isfinite())
    if bool(strange.any()):
        raise ValueError(f"the kernel is not finite at new input {int(strange.nonzero()[0])}; check the new inputs")
    return cross, prior


def sparse_marginals(basis: Basis, mean_weights: Tensor, variance_weights: Tensor, share: float, new: Any) -> tuple[Tensor, Tensor]:
    """Means ``(n_new, H)`` and variances ``(n_new,)`` of the function, see :class:`SparsePosterior`."""
    cross, prior = covariances_with(basis, new)
    return cross @ mean_weights, (share * prior - ((cross @ variance_weights) * cross).sum(1)).clamp(min=0.0)


def numeric_kernel(kernel: DataKernel, is_exact: bool) -> InputKernel:
    """The kernel of a regression whose inducing inputs are to move."""
    if is_exact:
        raise ValueError(
            "free_inputs=True moves inducing inputs, of which an exact regression has none; give num_inducing, fewer than there are data"
        )
    if not isinstance(kernel, InputKernel):
        raise TypeError(f"free_inputs=True needs a kernel of numeric inputs, such as PyroKernel; got {type(kernel).__name__}")
    return kernel


# Noise below this share of the targets' variance is rounding error.
NOISE_FLOOR = 1e-6


def noise_from_log(log_noise: Tensor) -> Tensor:
    """Noise variance of an unconstrained parameter."""
    return NOISE_FLOOR + log_noise.exp()


def backward(basis: Basis, targets: Tensor, log_noise: Tensor, objective: str) -> float:
    """Returns the objective and adds its gradient to all leaves.

    ``"fitc"`` is minus the log likelihood without its constant. It is NaN, without gradient, if the inducing inputs' covariance matrix has
    no factor.
    """
    if objective == "fitc":
        return _fitc_backward(basis, targets, log_noise)
    return _closed_form_backward(basis, targets, log_noise, objective)


def _fitc_backward(basis: Basis, targets: Tensor, log_noise: Tensor) -> float:
    with torch.enable_grad():
        columns, square = basis.columns(), basis.square()
        # Which inputs depend on others is no differentiable question; the factor of the rest is one.
        rows, _ = independent_cholesky(square.detach())
        triangle, info = torch.linalg.cholesky_ex(square[rows][:, rows])
        if not len(rows) or int(info):
            return math.nan
        factor = torch.linalg.solve_triangular(triangle, columns[:, rows].mT, upper=False).mT
        missing = (basis.kernel.diag().double() - factor.square().sum(1)).clamp(min=0.0)
        covariance = LowRankCovariance(factor, noise_from_log(log_noise) + missing)
        value = -covariance.log_likelihood(targets) - 0.5 * targets.numel() * math.log(2 * math.pi)
        value.backward()
    return float(value.detach())


def _closed_form_backward(basis: Basis, targets: Tensor, log_noise: Tensor, objective: str) -> float:
    with torch.enable_grad():
        square, noise = basis.square(), noise_from_log(log_noise)
        blocks = torch.arange(len(targets)).split(rows_per_block(16 * len(basis)))
        # One block keeps its graph; several are evaluated twice to save memory.
        first = basis.columns() if len(blocks) == 1 else None
        diagonal = basis.kernel.diag().double()
    with torch.no_grad():
        columns = torch.cat([basis.columns(rows) for rows in blocks]) if first is None else first.detach()
        problem = SubsetProblem(basis.kernel, targets, float(noise), objective)
        terms = _gradient_terms(problem, columns, square.detach(), diagonal.detach().sum())
    if terms is None:
        return math.nan
    value, for_columns, for_square, for_noise = terms
    with torch.enable_grad():
        fixed = (for_square * square).sum() + 0.5 * problem.trace_weight * diagonal.sum() + for_noise * noise
        backward_through([(fixed, None)] if first is None else [(fixed, None), (first, for_columns)])
        for rows in blocks if first is None else ():
            backward_through([(basis.columns(rows), for_columns[rows])])
    return value


def backward_through(outputs: list[tuple[Tensor, Tensor | None]]) -> None:
    """Differentiates outputs with their gradients, except those without learned parameters."""
    pairs = [(output, gradient) for output, gradient in outputs if output.requires_grad]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])


def _gradient_terms(problem: SubsetProblem, columns: Tensor, square: Tensor, trace: Tensor) -> tuple[float, Tensor, Tensor, Tensor] | None:
    """The objective and its derivatives in columns, square and noise."""
    Y, s2, H, n = problem.targets, problem.noise, problem.num_outputs, problem.num_data
    rows, C = independent_cholesky(square)
    if not len(rows):
        return None
    whole = len(rows) == len(square)
    L = torch.linalg.solve_triangular(C, (columns if whole else columns[:, rows]).mT, upper=False).mT
    gram = L.mT @ L
    if not bool(gram.isfinite().all()):
        return None
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    R, info = torch.linalg.cholesky_ex(gram + s2 * identity)
    if int(info):
        return None
    whitened = torch.linalg.solve_triangular(R, L.mT @ Y, upper=False)
    residual = trace - gram.diagonal().sum()
    value = problem.value_from(R, whitened, residual)
    B_inverse = torch.cholesky_inverse(R)
    weights = torch.linalg.solve_triangular(R.mT, whitened, upper=True)
    a = (Y - L @ weights) / s2
    C_inverse = torch.linalg.solve_triangular(C, identity, upper=False)
    inner = (H * B_inverse - problem.trace_weight * identity) @ C_inverse
    projected = weights.mT @ C_inverse
    for_columns = (L @ inner).addmm_(a, projected, alpha=-1)
    for_square = -0.5 * C_inverse.mT @ (gram @ inner - weights @ projected)
    d_noise = 0.5 * (
        H * ((n - len(gram)) / s2 + B_inverse.diagonal().sum()) - a.square().sum() - problem.trace_weight * residual.clamp(min=0.0) / s2
    )
    if not whole:
        for_columns = torch.zeros_like(columns).index_copy_(1, rows, for_columns)
        padded = torch.zeros_like(square)
        padded[rows[:, None], rows] = for_square
        for_square = padded
    return float(value), for_columns, for_square, d_noise


class LeaveOneOutPrediction(NamedTuple):
    """What each data point's targets are predicted to be without it."""

    mean: Tensor  # (n, H)
    variance: Tensor  # (n,), of the projected process, noise included
    residual_variance: Tensor  # prior variance that the inducing inputs leave, (n,)


def predict_left_out(
    covariance: LowRankCovariance, triangle: Tensor, members: Tensor, targets: Tensor, residual_variance: Tensor
) -> LeaveOneOutPrediction:
    r"""Predicts each data point from all others, without its inducing input.

    Let :math:`S = \hat K + \sigma^2 I`. Without member :math:`j`, :math:`\hat K` loses :math:`\ell_j \ell_j^\top`, and the inverse of
    :math:`S` gains :math:`S^{-1} \ell_j \ell_j^\top S^{-1} / (1 - w_j)`, with

    .. math:: \ell_j = K_{nI} K_{II}^{-1} e_j / (e_j^\top K_{II}^{-1} e_j)^{1/2}, \qquad w_j = \ell_j^\top S^{-1} \ell_j ,

    which takes :math:`O(n m^2)` for all ``members``. ``covariance`` has the factor :math:`L = K_{nI} C^{-\top}`, ``triangle`` is :math:`C`,
    ``residual_variance (n,)`` the diagonal of :math:`K - \hat K`.
    """
    mean, variance = covariance.leave_one_out(targets)
    if not len(members):
        return LeaveOneOutPrediction(mean, variance, residual_variance)
    identity = torch.eye(len(triangle), dtype=triangle.dtype, device=triangle.device)
    inverse = torch.linalg.solve_triangular(triangle, identity, upper=False)
    directions = covariance.factor @ inverse / inverse.square().sum(0).sqrt()
    solved = covariance.solve(directions)
    room = (1 - (directions * solved).sum(0)).clamp(min=SMALLEST_SHARE)
    own = solved[members].diagonal()
    precision = covariance.inverse_diagonal[members] + own.square() / room
    weights = covariance.solve(targets, members) + (own / room)[:, None] * (solved.mT @ targets)
    return LeaveOneOutPrediction(
        mean.index_copy(0, members, targets[members] - weights / precision[:, None]),
        variance.index_copy(0, members, 1 / precision),
        residual_variance.index_copy(0, members, directions[members].diagonal().square()),
    )


def calibrate_share(prediction: LeaveOneOutPrediction, targets: Tensor) -> float:
    r"""The :math:`c` that maximises :math:`\sum_n \log \mathcal N(y_n; \mu_n, v_n + c r_n)` over all predictions."""
    error = (targets - prediction.mean).square().mean(1)

    def best(shares: Tensor) -> int:
        densities = [-(v.log() + error / v).sum() for v in (prediction.variance + share * prediction.residual_variance for share in shares)]
        return int(torch.stack(densities).argmax())

    # The density may have several maxima: first all orders of magnitude, then between the neighbours of the best.
    coarse = torch.cat([error.new_zeros(1), torch.logspace(-6, 3, 91, dtype=error.dtype, device=error.device)])
    position = best(coarse)
    ends = coarse[max(0, position - 1)], coarse[min(len(coarse) - 1, position + 1)]
    fine = torch.linspace(float(ends[0]), float(ends[1]), 101, dtype=error.dtype, device=error.device)
    return float(fine[best(fine)])


class SparsePosterior:
    r"""The posterior of a Gaussian process given its inducing inputs.

    With :math:`\phi = C^{-1} k_I(x)`, :math:`L` the rows :math:`\phi(x_i)` and noise :math:`\Lambda`, the posterior of the weights has
    precision :math:`A = I + L^\top \Lambda^{-1} L`, so that

    .. math:: \mu(x) = \phi^\top A^{-1} L^\top \Lambda^{-1} Y, \qquad v(x) = k(x, x) - \phi^\top (I - A^{-1}) \phi .

    which takes :math:`O(m)` per mean, :math:`O(m^2)` per variance. With ``objective="pp"`` the variance that the inducing inputs leave is
    multiplied by the share :math:`c \ge 0` under which the leave-one-out predictions of the training targets have the highest density,

    .. math:: v(x) = c \, (k(x, x) - \phi^\top \phi) + \phi^\top A^{-1} \phi .

    With ``"fitc"`` unexplained variance counts as noise of each data point. Data points ``held_out``, that had no part in moving the
    inducing inputs, calibrate ``"pp"`` alone. Inducing inputs that depend on earlier ones are left out.

    Attributes:
        share: the factor :math:`c`; 1 but for ``"pp"``.
    """

    @torch.no_grad()
    def __init__(self, basis: Basis, targets: Tensor, noise: float, objective: str = "vfe", held_out: Tensor | None = None) -> None:
        self.basis = basis
        self.targets = targets
        self.is_projected = objective == "pp"
        columns, square = basis.columns(), basis.square()
        rows, triangle = independent_cholesky(square)
        self.factor = torch.linalg.solve_triangular(triangle, columns[:, rows].mT, upper=False).mT
        prior = basis.kernel.diag().double()
        self.residual = (prior - self.factor.square().sum(1)).clamp(min=0.0)
        self.noise = (noise + self.residual) if objective == "fitc" else torch.full_like(prior, noise)
        scaled = self.factor / self.noise[:, None]
        identity = torch.eye(len(rows), dtype=scaled.dtype, device=scaled.device)
        R = torch.linalg.cholesky(identity + self.factor.mT @ scaled)
        inverse = torch.linalg.solve_triangular(triangle, identity, upper=False)
        shrink = torch.linalg.solve_triangular(R, inverse, upper=False)
        m = len(basis)
        whitened = torch.linalg.solve_triangular(R, scaled.mT @ targets, upper=False)
        self.share = 1.0
        if self.is_projected:
            members = rows[:0] if isinstance(basis, FreeBasis) else basis.index[rows]
            # Outputs that do not vary, standardised, have no errors to calibrate by.
            varying = targets[:, varies] if bool((varies := targets.square().mean(0) > 1e-12).any()) else targets
            prediction = predict_left_out(LowRankCovariance(self.factor, self.noise), triangle, members, varying, self.residual)
            some = slice(None) if held_out is None or not len(held_out) else held_out
            self.share = calibrate_share(LeaveOneOutPrediction(*(part[some] for part in prediction)), varying[some])
        self.mean_weights = targets.new_zeros(m, targets.shape[1])
        self.mean_weights[rows] = shrink.mT @ whitened
        self.variance_weights = targets.new_zeros(m, m)
        self.variance_weights[rows[:, None], rows] = self.share * inverse.mT @ inverse - shrink.mT @ shrink

    def marginals(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and variances ``(n_new,)`` of the function."""
        return sparse_marginals(self.basis, self.mean_weights, self.variance_weights, self.share, new)

    def joint(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means ``(n_new, H)`` and covariances ``(n_new, n_new)`` of the function, differentiable in numeric inputs."""
        cross, _ = covariances_with(self.basis, new)
        covariance = self.share * self.basis.kernel.among(new).double() - cross @ self.variance_weights @ cross.mT
        return cross @ self.mean_weights, (covariance + covariance.mT) / 2

    @torch.no_grad()
    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        r"""Predicts each data point's targets from all others.

        They are those of the approximate covariance :math:`L L^\top + \Lambda`, with ``"pp"`` with the calibrated variances.
        """
        mean, variance = LowRankCovariance(self.factor, self.noise).leave_one_out(self.targets)
        return (mean, variance + self.share * self.residual) if self.is_projected else (mean, variance)
