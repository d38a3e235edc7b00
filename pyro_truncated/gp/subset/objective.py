r"""The objective that an inducing subset is judged by, and the factors of a kernel matrix on a fixed set of inducing inputs.

With :math:`\hat K = K_{nI} K_{II}^{-1} K_{In} = L L^\top`, :math:`G = L^\top L`, :math:`B = G + \sigma^2 I` and ``H`` outputs :math:`Y`,
the objective without its constant :math:`\frac{nH}2 \log 2\pi` is :math:`F = (E_D + E_C + E_V) / 2`, to be minimised:

.. math::

    E_D = \sigma^{-2} (|Y|^2 - |B^{-1/2} L^\top Y|^2), \quad E_C = H [(n - m) \log \sigma^2 + \log |B|], \quad
    E_V = H \sigma^{-2} \operatorname{tr}(K - \hat K).

``"vfe"`` is the variational free energy (Titsias, 2009); ``"pp"``, the likelihood of the projected process, leaves out :math:`E_V`.

Reference:
    Cao, Brubaker, Fleet and Hertzmann, "Efficient optimization for sparse Gaussian process regression", PAMI 37 (2015), section 2.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import DataKernel

OBJECTIVES = ("vfe", "pp")


@dataclasses.dataclass(frozen=True)
class SubsetProblem:
    """Data, kernel and noise: all that an objective of inducing subsets depends on. Everything is computed in float64.

    Attributes:
        kernel: the kernel on the training inputs.
        targets: ``(n, H)`` float64; the outputs share the subset, the kernel and the noise.
        noise: noise variance.
        objective: ``"vfe"`` or ``"pp"``.
    """

    kernel: DataKernel
    targets: Tensor
    noise: float
    objective: str = "vfe"

    def __post_init__(self) -> None:
        if self.targets.dim() != 2 or len(self.targets) != self.kernel.num_data or not bool(self.targets.isfinite().all()):
            shape = tuple(self.targets.shape)
            raise ValueError(f"targets must be finite and of shape ({self.kernel.num_data}, H), one row per input; got shape {shape}")
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

    def value(self, gram: Tensor, moment: Tensor, residual: Tensor) -> Tensor:
        r""":math:`F` from :math:`G` ``(m, m)``, :math:`L^\top Y` ``(m, H)`` and :math:`\operatorname{tr}(K - \hat K)`."""
        m = len(gram)
        factor = torch.linalg.cholesky(gram + self.noise * torch.eye(m, dtype=gram.dtype, device=gram.device))
        return self.value_from(factor, torch.linalg.solve_triangular(factor, moment, upper=False), residual)

    def value_from(self, factor: Tensor, whitened: Tensor, residual: Tensor) -> Tensor:
        r""":math:`F` from the Cholesky factor of :math:`B`, :math:`B^{-1/2} L^\top Y` and :math:`\operatorname{tr}(K - \hat K)`."""
        data = (self.targets.square().sum() - whitened.square().sum()) / self.noise
        log_noise = torch.tensor(self.noise, dtype=factor.dtype, device=factor.device).log()
        complexity = self.num_outputs * ((self.num_data - len(factor)) * log_noise + 2 * factor.diagonal().log().sum())
        return 0.5 * (data + complexity + self.trace_weight * residual)


def explains_something(objective: float, targets: Tensor, share: float = 0.02) -> bool:
    """Whether an objective of standardised targets is below what noise of variance one costs by as much as explaining a share is worth."""
    return objective < 0.5 * (1 - share) * targets.numel()


def check_index(index: Tensor, num_data: int) -> Tensor:
    """Positions of an inducing subset ``(m,)`` as int64.

    Raises:
        ValueError: if they are no vector of distinct positions.
    """
    index = torch.as_tensor(index)
    if index.dim() != 1 or not len(index) or index.is_floating_point() or int(index.min()) < 0 or int(index.max()) >= num_data:
        raise ValueError(f"index must be a vector of positions from 0 to {num_data - 1}; got {index.dtype} of shape {tuple(index.shape)}")
    if len(index.unique()) != len(index):
        raise ValueError("index must not hold a position twice")
    return index.long()
