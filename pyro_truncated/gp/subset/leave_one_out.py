"""Gaussian process regression of many outputs, with leave-one-out predictions."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import cast

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated.gp.cholesky import FINE_JITTER, PivotedCholesky, cholesky_at, inducing_cholesky, pivoted_cholesky
from pyro_truncated.gp.data_kernels.protocol import as_data_kernel, check_kernel
from pyro_truncated.gp.kernels import Covariance, covariance_at, refuse_foreign_kernel
from pyro_truncated.gp.noisy_covariance import DenseCovariance, LowRankCovariance, NoisyCovariance, compress, varying_columns
from pyro_truncated.gp.optimization import minimize
from pyro_truncated.gp.subset.alternation import sample_rows
from pyro_truncated.gp.subset.objectives import SubsetProblem
from pyro_truncated.gp.subset.subset_search import Budget, ExchangeSearch
from pyro_truncated.utils.arguments import check_count, check_kinds, describe, names_arguments
from pyro_truncated.utils.arrays import check_column_names, remember_columns, warn_about_units
from pyro_truncated.utils.constraints import in_double
from pyro_truncated.utils.parameter_store import UniqueModule

Parameters = dict[str, Tensor]
NOISE = "noise"


def make_kernel(kernel: str | kernels.Kernel, inputs: Tensor) -> kernels.Kernel:
    r"""Returns a kernel in float64 by name, or a copy.

    Inputs ``(N, D)`` are standardised. ``"linear"`` is :math:`a\,x^\top x'`, ``"rbf"`` is :math:`r\,\exp(-\|x - x'\|^2 / 2\ell^2)`, where
    :math:`\ell` starts at the median distance of inputs over :math:`\sqrt 2`. ``"composition"`` is the sum of both and a constant.
    """
    if isinstance(kernel, kernels.Kernel):
        return copy.deepcopy(kernel).to(device=inputs.device, dtype=torch.float64)
    refuse_foreign_kernel(kernel)
    if not isinstance(kernel, str):
        raise TypeError(f"kernel must be a name or a kernel of pyro.contrib.gp.kernels; got {type(kernel).__name__}")
    dim = inputs.shape[1]
    one = torch.ones((), dtype=torch.float64, device=inputs.device)
    make: dict[str, Callable[[], kernels.Kernel]] = {
        "linear": lambda: kernels.Linear(dim, one / dim),
        "rbf": lambda: kernels.RBF(dim, one.clone(), _median_distance(inputs) / math.sqrt(2)),
        "composition": lambda: kernels.Sum(kernels.Sum(make["rbf"](), make["linear"]()), kernels.Constant(dim, one.clone())),
    }
    if kernel not in make:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, make))}, or a kernel of pyro.contrib.gp.kernels; got {kernel!r}")
    return make[kernel]()


class Box:
    r"""Bounds of every parameter, and the map :math:`\theta = l + (u - l)\,\mathrm{sigmoid}(z)`.

    On a flat marginal likelihood an unbounded optimiser runs off to amplitudes at which a covariance matrix has no digits left. The bounds
    suit standardised inputs and targets between 0 and 1.
    """

    def __init__(self, kernel: kernels.Kernel) -> None:
        # Bounds of logarithms, here and below.
        self.bounds = {NOISE: (-7.0, 2.0)}
        for prefix, module in kernel.named_modules():
            for name, value in module.named_parameters(recurse=False):
                self.bounds[f"{prefix}.{name}" if prefix else name] = _bounds(module, name, value)

    def free(self, parameters: Parameters) -> Parameters:
        """Returns free values of parameters; those on the boundary are moved inside."""
        free = {}
        for name, value in parameters.items():
            low, high = self.bounds[name]
            free[name] = ((value - low) / (high - low)).clamp(1e-3, 1 - 1e-3).logit()
        return free

    def constrain(self, free: Parameters) -> Parameters:
        """Parameters in the box of free values."""
        return {name: self.bounds[name][0] + (self.bounds[name][1] - self.bounds[name][0]) * z.sigmoid() for name, z in free.items()}


def maximize(
    objective: Callable[[Parameters], Tensor], start: Parameters, box: Box, steps: int, tolerance: float = 1e-6
) -> tuple[Parameters, float]:
    """Returns parameters in the box that raise an objective, by L-BFGS."""
    with torch.no_grad():
        before = float(objective(start))
    free = {name: value.detach().clone().requires_grad_() for name, value in box.free(start).items()}

    def loss() -> Tensor:
        value = -objective(box.constrain(free))
        value.backward()
        return value

    with torch.enable_grad():
        minimum = minimize(loss, list(free.values()), max_iterations=steps, tolerance=tolerance)
    if not -minimum.value > before:
        return start, before
    return {name: value.detach() for name, value in box.constrain(free).items()}, -minimum.value


def _median_distance(inputs: Tensor, most: int = 500) -> Tensor:
    """The median distance of 500 inputs, 1 if all are equal."""
    rows = inputs[:: max(1, len(inputs) // most)][:most]
    distances = torch.pdist(rows)
    median = distances.median() if len(distances) else distances.sum()
    return median if bool(median > 0) else torch.ones_like(median)


def _bounds(module: torch.nn.Module, name: str, value: Tensor) -> tuple[float, float]:
    """Bounds of a parameter, by default the start over and times e^7."""
    if isinstance(module, kernels.Isotropy):
        return (math.log(0.3), math.log(60.0)) if name.startswith("lengthscale") else (-7.0, 4.0)
    if isinstance(module, kernels.DotProduct):
        return -9.0, 3.0
    if isinstance(module, kernels.Constant):
        return -7.0, 4.0
    return float(value.detach().min()) - 7.0, float(value.detach().max()) + 7.0


@torch.no_grad()
def pivots_for(
    kernel: Covariance,
    inputs: Tensor,
    targets: Tensor,
    noise: float,
    rank: int,
    start: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """At most ``rank`` pivots, exchanged to lower the variational free energy."""
    rank = min(rank, len(inputs))
    begin = inputs.new_zeros(0, dtype=torch.int64) if start is None else start
    # Of more data, pivots are chosen from a random sample.
    columns = SimpleNamespace(
        diag=lambda: kernel(inputs, diag=True),
        columns=lambda index: kernel(inputs, inputs[index]),
        cross=lambda new, index: kernel(new, inputs[index]),
    )
    sample = sample_rows(as_data_kernel(columns), targets, begin, max(20_000, 4 * rank), generator)
    problem = SubsetProblem(sample.kernel, sample.targets, noise)
    search = ExchangeSearch()
    pivots = search.improve(problem, rank, sample.inducing if len(begin) else None, Budget(max_attempts=20), generator)
    return sample.among_all(pivots)


class LeaveOneOutRegression:
    r"""Gaussian process regression with one kernel for all outputs.

    :math:`R_{np} = f_p(x_n)` plus noise of variance :math:`\lambda`. Inputs are centred and divided by one standard deviation. Kernel and
    noise are those of targets divided by their largest magnitude at the last :meth:`fit`; predictions and likelihoods are in the targets'
    own unit. Everything is computed in float64.

    With ``rank=None`` it is exact: :math:`O(N^3)` per factorisation, :math:`O(N^2 P)` per set of targets. With a rank ``Q``, the kernel
    matrix is replaced by an incomplete Cholesky factor, :math:`O(N Q^2)` and :math:`O(N Q P)`. Pivots are the inputs of largest variance
    given those before, or those that explain the targets of :meth:`fit` best.

    Example:
        >>> regression = LeaveOneOutRegression(torch.linspace(0.0, 6.0, 30).unsqueeze(-1), "rbf")
        >>> likelihood = regression.fit(regression.inputs.sin())
        >>> means, variances = regression.loo(regression.inputs.sin())

    Args:
        inputs: ``(N, D)``, finite.
        kernel: ``"linear"``, ``"rbf"``, ``"composition"`` (both and a constant), or any kernel of :mod:`pyro.contrib.gp.kernels` for
            standardised inputs, of which a copy is made. The noise is separate.
        rank: number of columns of a low-rank factor. Default: exact.
        noise: noise variance :math:`\lambda` to start from, for targets of magnitude one.
        fitc: whether a low-rank approximation keeps the prior variances exact.
        tolerance: share of the kernel matrix' trace that a low-rank factor of fewer columns than ``rank`` may miss.
        pivots: ``"variance"``, or ``"targets"``: chosen anew by each :meth:`fit`, by the objective that it maximises.
        generator: source of randomness for the choice by targets. Default: torch's global generator.

    Attributes:
        kernel: the kernel, at the current parameters, for targets in the unit.
        noise: the current noise variance, a scalar tensor, for targets in the unit.
        unit: the largest magnitude of the last fit's targets. Without a fit it is 1.

    Raises:
        ValueError: for inputs that are no finite real matrix, a kernel that is none, or a number out of range.

    Warns:
        UserWarning: if units of the inputs are unlike.

    Reference: Shelton, Gasthaus, Dai, Lücke and Gretton, "GP-select: Accelerating EM using adaptive
        subspace preselection", Neural Computation 29 (2017), equation 6. The covariance there must
        include the noise.
    """

    @names_arguments
    def __init__(
        self,
        inputs: Tensor,
        kernel: str | kernels.Kernel = "composition",
        rank: int | None = None,
        *,
        noise: float = 0.1,
        fitc: bool = False,
        tolerance: float = 0.0,
        pivots: str = "variance",
        generator: torch.Generator | None = None,
    ) -> None:
        check_kinds(LeaveOneOutRegression.__init__, fitc=fitc)
        remember_columns(self, "new_inputs", inputs)
        inputs = in_double("inputs", inputs)
        if inputs.dim() != 2 or not inputs.numel():
            raise ValueError(f"inputs must be finite and of shape (N, D), N and D positive; got {describe(inputs)}")
        rank = None if rank is None else check_count("rank", rank)
        if not noise > 0:
            raise ValueError(f"noise must be a positive variance; got {noise}")
        if pivots not in ("variance", "targets"):
            raise ValueError(f'pivots must be "variance" or "targets"; got {pivots!r}')
        if rank is None and (fitc or pivots == "targets"):
            raise ValueError(("fitc=True" if fitc else 'pivots="targets"') + " needs a rank: without one nothing is approximated")
        self._centre = inputs.mean(0)
        squares = (inputs - self._centre).square()
        spread = squares.mean().sqrt()
        warn_about_units("inputs", squares.mean(0).sqrt()[inputs.amax(0) > inputs.amin(0)], "distances")
        self._spread = torch.where(spread > 0, spread, torch.ones_like(spread))
        self.inputs = self.standardize(inputs)
        self.rank, self.fitc, self.tolerance, self.pivots, self.generator = rank, fitc, tolerance, pivots, generator
        self._pivots: Tensor | None = None
        # Under a name of its own, or calls would read another regression's parameters from Pyro's store.
        self._module = UniqueModule()
        self._module.kernel = make_kernel(kernel, self.inputs)
        if not isinstance(kernel, str):
            check_kernel(self.kernel, self.inputs)
        start = {name: value.detach().clone() for name, value in self.kernel.named_parameters()}
        start[NOISE] = torch.tensor(noise, dtype=torch.float64, device=inputs.device).log()
        self._box = Box(self.kernel)
        self._targets: Tensor | None = None
        self.unit = 1.0
        self._set_parameters(start)

    @property
    def kernel(self) -> kernels.Kernel:
        """The kernel, at the current parameters."""
        return cast("kernels.Kernel", self._module.kernel)

    @property
    def noise(self) -> Tensor:
        r"""Variance of the noise, :math:`\lambda`, a positive scalar."""
        return self.parameters[NOISE].exp()

    def standardize(self, inputs: Tensor) -> Tensor:
        """Inputs ``(M, D)`` as the kernel sees them."""
        return (in_double("inputs", inputs) - self._centre) / self._spread

    @names_arguments
    def fit(self, targets: Tensor, steps: int = 20, rows: Tensor | None = None) -> float:
        r"""Raises the targets' marginal likelihood by L-BFGS in a box.

        The exact log likelihood is :math:`\sum_p \log \mathcal N(r_p; 0, K + \lambda I)`. With a low-rank approximation the objective is
        the bound that also charges :math:`\frac{P}{2\lambda} \operatorname{tr}(K - L L^\top)` (Titsias, AISTATS 2009), or the likelihood of
        the FITC approximation. Pivots that the targets choose are chosen before and after, by that bound. Outputs that do not vary are left
        out. Parameters change only for the better.

        Args:
            targets: :math:`R`, ``(N, P)``; kept for :meth:`predict`.
            steps: largest number of iterations.
            rows: positions of the data points to fit to. Default: all.

        Returns:
            The objective reached, in nats per target that varies; if none does, that of all targets, per target.

        Warns:
            UserWarning: if the largest targets hardly vary beside their mean.
        """
        self._targets, steps = self._check(targets), check_count("steps", steps, 0)
        index = slice(None) if rows is None else rows
        some, inputs = self._targets[index], self.inputs[index]
        if not some.numel():
            raise ValueError(f"targets must not be empty at rows; got shape {tuple(some.shape)}")
        varying = self._targets[:, varying_columns(some)]
        if not varying.numel():
            return float(self._objective(some / self.unit, inputs)(self.parameters).detach()) - math.log(self.unit)
        self.unit = float(varying.abs().max())
        varying /= self.unit
        mean, deviation = (float(moment[varying.abs().amax(0).argmax()]) for moment in (varying.mean(0), varying.std(0)))
        if abs(mean) > 10 * deviation:
            warnings.warn(
                f"targets of mean {self.unit * mean:.3g} vary by {self.unit * deviation:.3g}, about as much as the least noise that is "
                "tried beside such means: subtract means from targets, and add them to predictions",
                UserWarning,
                stacklevel=3,
            )
        if self.pivots == "targets":
            self._choose_pivots(varying)
        parameters, value = maximize(self._objective(varying[index], inputs), self.parameters, self._box, steps)
        self._set_parameters(parameters)
        if self.pivots == "targets":
            # Other parameters, other pivots: those of the start may have been far off.
            self._choose_pivots(varying)
        return value - math.log(self.unit)

    @names_arguments
    def log_likelihood(self, targets: Tensor) -> Tensor:
        """The log likelihood of all targets ``(N, P)``, at the current parameters."""
        scaled_targets = self._check(targets) / self.unit
        return self.covariance.log_likelihood(compress(scaled_targets), scaled_targets.shape[1]) - scaled_targets.numel() * math.log(
            self.unit
        )

    @names_arguments
    def loo(self, targets: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Predictions of every data point's targets from those of all others.

        Args:
            targets: ``(N, P)``.
            rows: positions ``(n,)`` of the data points to predict. Default: all.

        Returns:
            Means ``(n, P)`` and variances ``(n,)``, noise included.
        """
        means, variances = self.covariance.leave_one_out(self._check(targets), rows)
        return means, self.unit**2 * variances

    @names_arguments
    def predict(self, new_inputs: Tensor, targets: Tensor | None = None, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        r"""Predictions at new inputs, :math:`k(x_*, X)\, C^{-1} R`, without noise between them.

        Args:
            new_inputs: ``(M, D)``.
            targets: ``(N, P)``. Default: those of the last :meth:`fit`.
            noiseless: whether variances are those of the functions alone.

        Returns:
            Means ``(M, P)`` and variances ``(M,)``.

        Raises:
            ValueError: if there are no targets, or shapes do not fit.
        """
        check_column_names(self, "new_inputs", new_inputs)
        new_inputs = in_double("new_inputs", new_inputs)
        if new_inputs.dim() != 2 or new_inputs.shape[1] != self.inputs.shape[1]:
            raise ValueError(f"new_inputs must have shape (M, {self.inputs.shape[1]}); got {tuple(new_inputs.shape)}")
        values = self._targets if targets is None else self._check(targets)
        if values is None:
            raise ValueError("there are no targets to predict from yet: give targets, or fit(targets) first")
        points, k = self.standardize(new_inputs), self._covariance(self.parameters)
        prior = k(points, diag=True)
        if self.factorization is None:
            cross = k(points, self.inputs)
        else:
            features = self.features(new_inputs)
            cross = features @ self.factorization.factor.mT
            prior = prior if self.fitc else features.square().sum(-1)
        explained = (cross * self.covariance.solve(cross.mT).mT).sum(-1)
        variance = (prior - explained).clamp(min=0.0) + (0.0 if noiseless else self.noise)
        return cross @ self.covariance.solve(values), self.unit**2 * variance

    def features(self, new_inputs: Tensor) -> Tensor:
        r"""Low-rank features :math:`L_P^{-1} k(P, x)`, ``(M, Q)``, of inputs ``(M, D)``.

        Raises:
            ValueError: if the regression is exact.
        """
        if self.factorization is None:
            raise ValueError("features need a rank: an exact regression (rank=None) has no finite features")
        k = self._covariance(self.parameters)
        return self.factorization.features(k(self.standardize(new_inputs), self.inputs[self.factorization.pivots]))

    def state_dict(self) -> dict[str, Tensor]:
        """The results of fits: parameters, their unit, and pivots."""
        extra = {"unit": torch.tensor(self.unit, dtype=torch.float64)} | ({} if self._pivots is None else {"pivots": self._pivots})
        return {name: value.clone() for name, value in (self.parameters | extra).items()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Loads the :meth:`state_dict` of a regression of equal inputs, kernel and rank.

        Raises:
            ValueError: if it is of another kernel.
        """
        values = {name: value.to(self.inputs.device) for name, value in state.items()}
        pivots, unit = values.pop("pivots", None), values.pop("unit", 1.0)
        if values.keys() != self.parameters.keys():
            raise ValueError(f"the state is of another kernel: it holds {sorted(values)}, the kernel here has {sorted(self.parameters)}")
        self._pivots, self.unit = pivots, float(unit)
        self._set_parameters(values)

    @functools.cached_property
    @torch.no_grad()
    def factorization(self) -> PivotedCholesky | None:
        """The incomplete Cholesky factor, on demand; ``None`` if exact."""
        if self.rank is None:
            return None
        k, pivots = self._covariance(self.parameters), self._pivots
        return pivoted_cholesky(k, self.inputs, self.rank, self.tolerance) if pivots is None else cholesky_at(k, self.inputs, pivots)

    @functools.cached_property
    @torch.no_grad()
    def covariance(self) -> NoisyCovariance:
        """The covariance matrix of the noisy targets at the current parameters, factorised."""
        if self.factorization is None:
            return DenseCovariance(self._covariance(self.parameters)(self.inputs), self.noise)
        noise = self.noise + self.factorization.residual if self.fitc else self.noise
        return LowRankCovariance(self.factorization.factor, noise)

    @torch.no_grad()
    def _choose_pivots(self, targets: Tensor) -> None:
        assert self.rank is not None
        kernel = self._covariance(self.parameters)
        self._pivots = pivots_for(kernel, self.inputs, targets, float(self.noise), self.rank, self._pivots, self.generator)
        self._forget_factors()

    @torch.no_grad()
    def _set_parameters(self, parameters: Parameters) -> None:
        self.parameters = parameters
        for name, value in self.kernel.named_parameters():
            value.copy_(parameters[name])
        self._forget_factors()

    def _covariance(self, parameters: Parameters) -> Covariance:
        """The kernel at some parameters as a function of standardised inputs."""
        return covariance_at(self.kernel, {name: value for name, value in parameters.items() if name != NOISE})

    def _forget_factors(self) -> None:
        for outdated in ("factorization", "covariance"):
            self.__dict__.pop(outdated, None)

    def _objective(self, targets: Tensor, inputs: Tensor) -> Callable[[Parameters], Tensor]:
        """What :meth:`fit` maximises, in nats per target."""
        compact = compress(targets)
        return lambda parameters: self._evidence(parameters, inputs, compact, targets.shape[1]) / targets.numel()

    def _evidence(self, parameters: Parameters, inputs: Tensor, targets: Tensor, outputs: int) -> Tensor:
        """What :meth:`fit` maximises of targets, maybe compressed, for ``outputs`` columns."""
        k, noise = self._covariance(parameters), parameters[NOISE].exp()
        if self.factorization is None:
            return DenseCovariance(k(inputs), noise).log_likelihood(targets, outputs)
        pivots = self.inputs[self.factorization.pivots]
        # At other parameters than those they were chosen for, the pivots' matrix may be singular.
        factor = torch.linalg.solve_triangular(inducing_cholesky(k(pivots), FINE_JITTER), k(pivots, inputs), upper=False).mT
        missing = (k(inputs, diag=True) - factor.square().sum(-1)).clamp(min=0.0)
        if self.fitc:
            return LowRankCovariance(factor, noise + missing).log_likelihood(targets, outputs)
        return LowRankCovariance(factor, noise).log_likelihood(targets, outputs) - 0.5 * outputs * missing.sum() / noise

    def _check(self, targets: Tensor) -> Tensor:
        values = in_double("targets", targets).detach()
        if values.dim() != 2 or len(values) != len(self.inputs):
            raise ValueError(f"targets must be finite and of shape ({len(self.inputs)}, P), a row per input; got {describe(values)}")
        return values
