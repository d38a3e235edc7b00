"""Sparse Gaussian processes on inducing subsets as Pyro models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.contrib.gp.likelihoods import Likelihood
from pyro.contrib.gp.parameterized import Parameterized
from pyro.distributions import constraints
from pyro.nn import PyroModule, PyroParam
from pyro.nn.module import pyro_method
from torch import Tensor

from pyro_truncated.gp.cholesky import INDUCING_JITTER, stable_cholesky
from pyro_truncated.gp.data_kernels.protocol import DataKernel, bound_kernel, check_data_kernel, positive_parameter
from pyro_truncated.gp.kernels import outside_programs
from pyro_truncated.gp.subset.objectives import check_index, check_witness, witness
from pyro_truncated.gp.subset.subset_search import InducingSubset, SubsetSearch
from pyro_truncated.utils.arguments import check_count, check_kinds, names_arguments
from pyro_truncated.utils.arrays import as_data, module_number
from pyro_truncated.utils.parameter_store import UniqueModule, empty_store, spare_random_numbers


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
        self.df: Tensor = PyroParam(torch.tensor(df, dtype=dtype), constraints.greater_than(1.0))  # type: ignore[assignment]
        self.scale: Tensor = positive_parameter(scale, torch.empty(0, dtype=dtype), "scale")

    def forward(self, f_loc: Tensor, f_var: Tensor, y: Tensor | None = None) -> Tensor:
        """Draws ``y`` given means and variances of the latent function."""
        f = dist.Normal(f_loc, f_var.sqrt())()
        density = dist.StudentT(self.df, f, self.scale)
        if y is not None:
            density = density.expand_by(y.shape[: -f.dim()]).to_event(y.dim())
        return pyro.sample(self._pyro_get_fullname("y"), density, obs=y)


class SubsetModel(UniqueModule, Parameterized):
    """What sparse models on an inducing subset share.

    Inputs and kernel are those of :class:`SubsetGPRegression`; the last dimension of targets is the data. The subset is random until
    :meth:`reselect` chooses one, unless ``index`` is given. While parameters are being learned, ``jitter`` is added to the diagonal of the
    inducing inputs' covariance matrix, as Pyro does.
    """

    index: Tensor  # positions of the inducing inputs, (m,), a buffer
    y: Tensor

    def __init__(self, X: Any, y: Tensor, kernel: Any, num_inducing: int, index: Tensor | None, jitter: float) -> None:
        super().__init__()
        self.kernel: DataKernel = _check(bound_kernel(X, kernel))
        n, y = self.kernel.num_data, as_data("y", y)
        if not y.dim() or y.shape[-1] != n:
            raise ValueError(f"y must have shape (..., {n}), one target per training input; got {tuple(y.shape)}")
        if not y.is_floating_point():
            # Noise and predictions take the type of the targets.
            y = y.to(getattr(module_number(self.kernel), "dtype", torch.get_default_dtype()))
        num_inducing = check_count("num_inducing", num_inducing, most=n, limit="the number of inputs")
        check_kinds(SubsetModel.__init__, jitter=jitter)
        index = torch.randperm(n)[:num_inducing].to(y.device) if index is None else check_index(index, n)
        if len(index) != num_inducing:
            raise ValueError(f"index must hold num_inducing={num_inducing} positions; got {len(index)}")
        self.num_inducing = num_inducing
        self.jitter = jitter
        self.register_buffer("index", index)
        self.register_buffer("y", y, persistent=False)

    def get_extra_state(self) -> Tensor:
        """Covariances by which a model on other inputs is told."""
        with _looking_at(self.kernel):
            one, other = witness(self.kernel, self.index), witness(self.kernel, self.index)
        # Parameters with a prior are drawn for each look.
        return one if torch.equal(one, other) else one[:0]

    def set_extra_state(self, state: Tensor) -> None:
        """Refuses a state of other inputs."""
        with _looking_at(self.kernel):
            if int(self.index.max()) >= self.kernel.num_data or len(self.get_extra_state()):
                check_witness(self.kernel, self.index, state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # The kernel first: what covariances it has is compared. States of earlier versions have none.
        inner = {name.removeprefix(f"{prefix}kernel."): v for name, v in state_dict.items() if name.startswith(f"{prefix}kernel.")}
        self.kernel.load_state_dict(inner, strict=False)
        state_dict.setdefault(f"{prefix}_extra_state", torch.empty(0))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def inducing_factor(self) -> Tensor:
        """Cholesky factor ``(m, m)`` of the inducing inputs' covariance matrix."""
        square = self.kernel.columns(self.index, self.index)
        return stable_cholesky(square + self.jitter * torch.eye(len(square), dtype=square.dtype, device=square.device))

    def surrogate(self, num_draws: int, generator: torch.Generator | None) -> tuple[Any, Tensor, float, str]:
        """Kernel, targets, noise and objective that the subset is chosen by."""
        raise NotImplementedError

    @torch.no_grad()
    def reselect(
        self,
        algorithm: str | SubsetSearch = "exchange",
        *,
        max_attempts: int | None = 20,
        max_seconds: float | None = None,
        num_draws: int = 16,
        generator: torch.Generator | None = None,
    ) -> bool:
        """Exchanges members of the subset at the present parameters.

        Args:
            algorithm: see :class:`InducingSubset`.
            max_attempts: most attempts.
            max_seconds: most seconds.
            num_draws: draws of the functions, an even number, where the likelihood is not Gaussian.
            generator: source of randomness.

        Returns:
            Whether the subset has changed.
        """
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        kernel, targets, noise, objective = self.surrogate(num_draws, generator)
        subset = InducingSubset(
            kernel, targets, num_inducing=self.num_inducing, noise=noise, objective=objective, algorithm=algorithm, index=self.index,
            generator=generator,
        )  # fmt: skip
        subset.optimize(max_attempts=max_attempts, max_seconds=max_seconds)
        return self.take_index(subset.index)

    def take_index(self, index: Tensor) -> bool:
        """Takes a new subset, filled up; says whether it is another one."""
        old = self.index
        rest = old[~torch.isin(old, index)][: self.num_inducing - len(index)]
        new = torch.cat([index, rest])
        if torch.equal(new.sort().values, old.sort().values):
            return False
        self.index = new
        return True


@contextmanager
def _looking_at(kernel: DataKernel) -> Iterator[None]:
    """A context in which covariances are computed without a trace of it."""
    contexts = [module._pyro_context for module in kernel.modules() if isinstance(module, PyroModule)]
    were_used = [context.used for context in contexts]
    try:
        # Random parameters are drawn for the look.
        with spare_random_numbers(), outside_programs():
            yield
    finally:
        for context, was_used in zip(contexts, were_used, strict=True):
            context.used = was_used


def _check(kernel: DataKernel) -> DataKernel:
    """Checks a kernel's covariances and lets a model adopt it."""
    with _looking_at(kernel):
        check_data_kernel(kernel)
    for module in kernel.modules():
        if isinstance(module, PyroModule):
            module._pyro_context.used = False
    return kernel


def gaussian_surrogate(
    likelihood: Likelihood, mean: Tensor, variance: Tensor, y: Tensor, num_draws: int = 16, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    r"""Gaussian observations about as informative as others: targets ``(n, L)`` and deviations.

    With :math:`g` and :math:`\lambda` the expected first and negative second derivatives of :math:`\log p(y \mid f)` under q(f), targets
    are :math:`E[f] + g / \lambda` and noise variances :math:`1 / \lambda`. Several functions share the mean of their :math:`\lambda`.

    ``num_draws`` is even.
    """
    mean, variance = mean.detach(), variance.detach()
    slope, curvature = torch.zeros_like(mean), torch.zeros_like(mean)
    noise = torch.zeros_like(mean)
    for draw in range(num_draws):
        # Every second draw mirrors the one before, so that their mean is E[f].
        noise = -noise if draw % 2 else torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean.device)
        f = (mean + variance.sqrt() * noise).requires_grad_()
        first, second = _derivatives(likelihood, f, y)
        slope, curvature = slope + first / num_draws, curvature - second / num_draws
    # A likelihood that is not concave, or knows nothing, leaves a data point with little weight.
    shared = curvature.reshape(-1, curvature.shape[-1]).mean(0)
    precision = shared.clamp(min=1e-3 * float(shared.abs().max().clamp(min=1e-6)))
    targets = mean + slope / precision
    return targets.reshape(-1, targets.shape[-1]).mT.detach(), precision.rsqrt().detach()


def _derivatives(likelihood: Likelihood, f: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Returns first and second derivatives of the log likelihood in f."""
    with torch.enable_grad(), empty_store(), pyro.validation_enabled(False):
        # Pyro's likelihoods draw f themselves: with next to no variance, around where it is wanted.
        trace: Any = poutine.trace(likelihood).get_trace(f, torch.full_like(f, 1e-20), y)
        (first,) = torch.autograd.grad(trace.log_prob_sum(), f, create_graph=True)
        # Data points are independent; so are the functions of one data point, but for classes, whose cross terms are left out.
        second = torch.zeros_like(f)
        for place in range(f.reshape(-1, f.shape[-1]).shape[0]):
            row = first.reshape(-1, f.shape[-1])[place]
            if row.requires_grad:
                (slopes,) = torch.autograd.grad(row.sum(), f, retain_graph=True)
                second.reshape(-1, f.shape[-1])[place] = slopes.reshape(-1, f.shape[-1])[place]
    return first.detach(), second.detach()


class SubsetSparseGPRegression(SubsetModel):
    r"""Sparse regression on a subset of training inputs of any type.

    .. math:: y \sim \mathcal N(0, \hat K + \sigma^2 I), \qquad \hat K = K_{nI} K_{II}^{-1} K_{In},

    with the trace term of the variational free energy, as :class:`pyro.contrib.gp.models.SparseGPRegression`. Hyper-parameters are learned
    by ``SVI``, the subset by :meth:`reselect` between steps; both lower the same loss.

    Example::

        gp = SubsetSparseGPRegression(X, y, kernel, num_inducing=64)
        svi = SVI(gp.model, gp.guide, Adam({"lr": 0.02}), Trace_ELBO())
        for step in range(500):
            if step % 50 == 0:
                gp.reselect()
            svi.step()

    Args:
        X: the training inputs, see :class:`SubsetModel`.
        y: targets ``(n,)`` or ``(H, n)``.
        kernel: see :class:`SubsetModel`.
        num_inducing: size ``m`` of the subset.
        index: the subset to start from. Default: random.
        noise: noise variance to start from.
        approx: ``"VFE"`` or ``"DTC"`` (the projected process).
        jitter: see :class:`SubsetModel`.
    """

    @names_arguments
    def __init__(
        self,
        X: Any,
        y: Tensor,
        kernel: Any = None,
        *,
        num_inducing: int,
        index: Tensor | None = None,
        noise: float = 0.5,
        approx: str = "VFE",
        jitter: float = INDUCING_JITTER,
    ) -> None:
        super().__init__(X, y, kernel, num_inducing, index, jitter)
        if approx not in ("VFE", "DTC"):
            raise ValueError(f'approx must be "VFE" or "DTC"; got {approx!r}')
        self.approx = approx
        self.noise: Tensor = positive_parameter(noise, self.y, "noise")

    @pyro_method
    def model(self) -> None:
        """The joint density of targets and function values, for ``SVI``."""
        self.set_mode("model")  # type: ignore[no-untyped-call]
        columns, noise = self.kernel.columns(self.index), self.noise
        factor = torch.linalg.solve_triangular(self.inducing_factor(), columns.mT, upper=False).mT
        if self.approx == "VFE":
            missing = (self.kernel.diag() - factor.square().sum(-1)).sum().clamp(min=0)
            outputs = self.y.numel() // self.y.shape[-1]
            pyro.factor("trace_term", -0.5 * outputs * missing / noise)
        density = dist.LowRankMultivariateNormal(factor.new_zeros(len(factor)), factor, noise.expand(len(factor)))
        pyro.sample("y", density.expand_by(self.y.shape[:-1]).to_event(self.y.dim() - 1), obs=self.y)

    @pyro_method
    def guide(self) -> None:
        """The guide, for ``SVI``: it holds the guides of parameters with priors."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        self._load_pyro_samples()

    def surrogate(self, num_draws: int, generator: torch.Generator | None) -> tuple[Any, Tensor, float, str]:
        """The regression itself."""
        targets = self.y.reshape(-1, self.y.shape[-1]).mT
        return self.kernel, targets, float(self.noise), "vfe" if self.approx == "VFE" else "pp"

    @torch.no_grad()
    def forward(self, new: Any, noiseless: bool = True) -> tuple[Tensor, Tensor]:
        """Means ``(..., n_new)`` and variances ``(n_new,)`` of the function, or targets."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        targets = self.y.reshape(-1, self.y.shape[-1]).mT
        subset = InducingSubset(self.kernel, targets, num_inducing=self.num_inducing, noise=float(self.noise), index=self.index)
        mean, variance = subset.predict(new, noiseless=noiseless)
        return mean.mT.reshape(*self.y.shape[:-1], len(mean)).to(self.y), variance.to(self.y)


class SubsetVariationalGP(SubsetModel):
    r"""A variational sparse process on training inputs of any type.

    .. math:: u \sim \mathcal N(0, K_{II}), \quad f = K_{nI} K_{II}^{-1} u + \ldots, \quad y \sim p(y \mid f), \qquad
        q(u) = \mathcal N(C \mu, C \Sigma C^\top), \; K_{II} = C C^\top,

    whitened, as :class:`pyro.contrib.gp.models.VariationalSparseGP`. The likelihood may be any of :mod:`pyro.contrib.gp.likelihoods`, or
    :class:`StudentT`. All is learned by ``SVI`` but the subset, which :meth:`reselect` chooses between steps by a Gaussian surrogate and
    to which it carries q(f) over.

    Example::

        from pyro.contrib.gp import likelihoods

        gp = SubsetVariationalGP(X, y, kernel, likelihood=likelihoods.Binary(), num_inducing=64, batch_size=256)
        gp.reselect()
        svi = SVI(gp.model, gp.guide, Adam({"lr": 0.02}), Trace_ELBO())
        for step in range(2000):
            svi.step()
            if step in (500, 1000):
                gp.reselect()

    Args:
        X: the training inputs, see :class:`SubsetModel`.
        y: targets ``(..., n)``; class labels ``(n,)`` with a ``latent_shape`` ``(C,)``.
        kernel: see :class:`SubsetModel`.
        likelihood: draws ``y`` given means and variances of the latent function.
        num_inducing: size ``m`` of the subset.
        index: the subset to start from. Default: random.
        latent_shape: shape of latent functions. Default: ``y.shape[:-1]``.
        batch_size: number of data points, drawn at random, that each step uses. Default: all.
        jitter: see :class:`SubsetModel`.
    """

    @names_arguments
    def __init__(
        self,
        X: Any,
        y: Tensor,
        kernel: Any = None,
        *,
        likelihood: Likelihood,
        num_inducing: int,
        index: Tensor | None = None,
        latent_shape: Sequence[int] | None = None,
        batch_size: int | None = None,
        jitter: float = INDUCING_JITTER,
    ) -> None:
        super().__init__(X, y, kernel, num_inducing, index, jitter)
        if batch_size is not None and not 1 <= check_count("batch_size", batch_size, 0) <= self.y.shape[-1]:
            raise ValueError(f"batch_size must lie in 1 .. {self.y.shape[-1]}, the number of data points; got {batch_size}")
        self.likelihood = likelihood
        self.latent_shape = torch.Size(self.y.shape[:-1] if latent_shape is None else latent_shape)
        self.batch_size = batch_size
        like = self.kernel.diag().detach()
        m = num_inducing
        self.u_loc: Tensor = torch.nn.Parameter(like.new_zeros(*self.latent_shape, m))
        identity = torch.eye(m, dtype=like.dtype, device=like.device).repeat(*self.latent_shape, 1, 1)
        self.u_scale_tril: Tensor = PyroParam(identity, constraints.lower_cholesky)  # type: ignore[assignment]

    @pyro_method
    def model(self) -> None:
        """The model for ``SVI``, of a minibatch if there is one."""
        self.set_mode("model")  # type: ignore[no-untyped-call]
        zero = torch.zeros_like(self.u_loc)
        prior = dist.MultivariateNormal(zero, scale_tril=torch.eye(zero.shape[-1], dtype=zero.dtype, device=zero.device))
        pyro.sample("u", prior.to_event(len(self.latent_shape)))
        n = self.y.shape[-1]
        rows = None if self.batch_size is None else torch.randperm(n, device=self.y.device)[: self.batch_size]
        mean, variance = self.marginals(rows)
        y = self.y if rows is None else self.y[..., rows]
        self.likelihood._load_pyro_samples()
        with poutine.scale(scale=n / y.shape[-1]):
            self.likelihood(mean, variance, y)

    @pyro_method
    def guide(self) -> None:
        """The guide, for ``SVI``: q(u), whitened."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        self._load_pyro_samples()
        q = dist.MultivariateNormal(self.u_loc, scale_tril=self.u_scale_tril)
        pyro.sample("u", q.to_event(len(self.latent_shape)))

    def marginals(self, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means and variances of q(f), ``latent_shape + (n,)``, or at ``rows``."""
        return self._condition(self.kernel.columns(self.index, rows), self.kernel.diag(rows))

    @torch.no_grad()
    def forward(self, new: Any) -> tuple[Tensor, Tensor]:
        """Means and variances ``latent_shape + (n_new,)`` of q(f) at new inputs."""
        self.set_mode("guide")  # type: ignore[no-untyped-call]
        return self._condition(self.kernel.cross(new, self.index), self.kernel.diag_new(new))

    def _condition(self, cross: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
        whitened = torch.linalg.solve_triangular(self.inducing_factor(), cross.mT, upper=False)
        mean = self.u_loc @ whitened
        spread = (self.u_scale_tril.mT @ whitened).square().sum(-2)
        return mean, (prior - whitened.square().sum(0)).clamp(min=0) + spread

    def surrogate(self, num_draws: int, generator: torch.Generator | None) -> tuple[Any, Tensor, float, str]:
        """Gaussian observations about as informative, see :func:`gaussian_surrogate`."""
        targets, deviations = gaussian_surrogate(self.likelihood, *self.marginals(), self.y, num_draws, generator)
        # Noise of variance one, by a kernel in units of the deviations.
        scaled = SimpleNamespace(
            diag=lambda: self.kernel.diag() / deviations.square(),
            columns=lambda index: self.kernel.columns(index) / (deviations[:, None] * deviations[index]),
            cross=lambda new, index: self.kernel.cross(new, index) / deviations[index],
        )
        return scaled, targets / deviations[:, None], 1.0, "vfe"

    @torch.no_grad()
    def take_index(self, index: Tensor) -> bool:
        """Takes a new subset, and q(f) with it."""
        old, factor = self.index, self.inducing_factor()
        if not super().take_index(index):
            return False
        new = self.index
        # Moments of q(f) at the new inducing inputs, whitened by their prior.
        whitened = torch.linalg.solve_triangular(factor, self.kernel.columns(old, new).mT, upper=False)
        prior = self.kernel.columns(new, new)
        spread = self.u_scale_tril.mT @ whitened
        covariance = prior - whitened.mT @ whitened + spread.mT @ spread
        C = self.inducing_factor()
        loc = torch.linalg.solve_triangular(C, (self.u_loc @ whitened).unsqueeze(-1), upper=False).squeeze(-1)
        half = torch.linalg.solve_triangular(C, covariance, upper=False)
        inner = torch.linalg.solve_triangular(C, half.mT, upper=False)
        inner = (inner + inner.mT) / 2 + self.jitter * torch.eye(len(new), dtype=inner.dtype, device=inner.device)
        self.u_loc.copy_(loc)
        self.u_scale_tril = stable_cholesky(inner)
        return True
