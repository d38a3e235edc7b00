"""Likelihoods of latent Gaussian processes beside those of :mod:`pyro.contrib.gp.likelihoods`.

A file of its own: regressions have no use for it.
"""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp.likelihoods import Likelihood
from pyro.distributions import constraints
from pyro.nn import PyroParam
from torch import Tensor

from pyro_truncated.utils.arguments import names_arguments


class StudentT(Likelihood):
    r"""Targets with heavy-tailed noise: :math:`y \sim \mathrm{StudentT}(\nu, f, s)`.

    Example:
        >>> kernel = smooth_rbf(torch.randn(30, 1))
        >>> model = SubsetVariationalGP(kernel, torch.randn(30), likelihood=StudentT(df=4.0), num_inducing=5)

    Args:
        df: degrees of freedom :math:`\nu` to start from.
        scale: scale :math:`s` to start from.
        dtype: floating point type of both.

    Raises:
        ValueError: if the scale is not positive, or there is no variance at so few degrees of freedom.
    """

    @names_arguments
    def __init__(self, df: float = 4.0, scale: float = 1.0, dtype: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        if not df > 1:
            raise ValueError(f"df must be more than 1 degree of freedom; got {df}")
        if not scale > 0:
            raise ValueError(f"scale must be positive; got {scale}")
        freedom: Any = PyroParam(torch.tensor(df, dtype=dtype), constraints.greater_than(1.0))
        self.df: Tensor = freedom
        spread: Any = PyroParam(torch.tensor(scale, dtype=dtype), constraints.positive)
        self.scale: Tensor = spread

    def forward(self, f_loc: Tensor, f_var: Tensor, y: Tensor | None = None) -> Tensor:
        """Draws ``y`` by one draw of the latent function.

        Its means and variances are given.
        """
        f = dist.Normal(f_loc, f_var.sqrt())()
        density = dist.StudentT(self.df, f, self.scale)
        if y is not None:
            density = density.expand_by(y.shape[: -f.dim()]).to_event(y.dim())
        found: Tensor = pyro.sample(self._pyro_get_fullname("y"), density, obs=y)
        return found
