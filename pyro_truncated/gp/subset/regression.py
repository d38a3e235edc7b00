"""Sparse Gaussian process regression on an inducing subset."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, overload

import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from torch import Tensor

from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.data_kernels.protocol import DataKernel, InputKernel, bound_kernel, check_data_kernel
from pyro_truncated.gp.optimization import FitRecord, FitSettings
from pyro_truncated.gp.subset.alternation import (
    EXACT_UP_TO,
    Alternation,
    ExactPosterior,
    default_size,
    fit_exactly,
    fit_with_restart,
    held_out_rows,
    hyper_parameters,
    num_alternation_rows,
    optimize_free_inputs,
)
from pyro_truncated.gp.subset.objectives import (
    NOISE_FLOOR,
    OBJECTIVES,
    Basis,
    FreeBasis,
    SparsePosterior,
    check_index,
    check_witness,
    noise_from_log,
    numeric_kernel,
    objective_at_share,
    sparse_marginals,
    witness,
)
from pyro_truncated.gp.subset.subset_search import SubsetSearch, make_search
from pyro_truncated.utils.arguments import check_count, check_counts, check_kinds, leaves_inference_mode, names_arguments, renames
from pyro_truncated.utils.arrays import check_units
from pyro_truncated.utils.constraints import in_double
from pyro_truncated.utils.devices import DoubleModule

# By default so many inducing inputs at first, and twice as many as long as that gains so much per data point or nothing is explained.
FIRST_SIZE, MIN_GAIN_NATS = 32, 0.01


class AllNoiseWarning(UserWarning):
    """The fit explains nearly all of the data as noise.

    Example:
        >>> x = torch.randn(40, 3).double()
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     objective = SubsetGPRegression(smooth_rbf(x), torch.randn(40).double(), num_inducing=2).fit(max_epochs=3)
        >>> {warning.category.__name__ for warning in caught}
        {'AllNoiseWarning'}
    """


def explained_share(targets: Tensor, prediction: Tensor) -> tuple[float, float]:
    """The explained share of standardised targets ``(n, H)``, and its standard error."""
    gains = (targets.square() - (targets - prediction).square()).mean(1)
    return float(gains.mean()), float(gains.std(correction=0)) / len(gains) ** 0.5


def warn_about_noise(targets: Tensor, prediction: Tensor, noise: float, num_inducing: int | None = None) -> None:
    """Warns if predictions of standardised targets ``(n, H)`` explain next to nothing.

    Or less than a twentieth, at the 5 % level not to be told from nothing. Of constant targets there is nothing to explain.
    """
    explained, error = explained_share(targets, prediction)
    # Noise itself looks explained by chance, a little: 1.645 errors above a fiftieth are the 5 % level.
    if explained < min(0.05, 0.02 + 1.645 * error) and bool(targets.square().mean() > 1e-12):
        by, more = ("", "") if num_inducing is None else (f", by {num_inducing} inducing inputs,", "take more inducing inputs, ")
        warnings.warn(
            f"the fit explains nearly all of the targets as noise: leave-one-out predictions{by} account for {max(0.0, explained):.3f} of "
            f"their variance, and it has learned a noise variance of {noise:.3g} (of 1). Start from more noise and other length-scales "
            "(as smooth_rbf does), "
            f"{more}or add an identity kernel (SumKernel(..., redundant_sum=True, identity=True)).",
            AllNoiseWarning,
            stacklevel=3,
        )


def warn_about_copies(kernel: DataKernel, index: Tensor, targets: Tensor, noise: float) -> None:
    """Warns if copies of standardised targets ``(n, K)`` have made the noise vanish.

    Without noise the likelihood grows without bound in the number of copies, as those that a bootstrap draws.
    """
    if noise > 2 * NOISE_FLOOR or not isinstance(kernel, InputKernel) or not bool(targets.square().mean() > 1e-12):
        return
    copies = len(targets) - len(torch.cat([kernel.inputs[index].reshape(len(targets), -1), targets], 1).unique(dim=0))
    if copies:
        warnings.warn(
            f"{copies} of {len(targets)} targets are copies of others at the same inputs, for the fit a proof that there is no noise. "
            "Unless there is none, predictions at other inputs are bad: leave copies out, as those that a bootstrap draws.",
            UserWarning,
            stacklevel=3,
        )


class SubsetPredictor(DoubleModule):
    """Predictions of a saved :class:`SubsetGPRegression` from its inducing inputs alone.

    Example::

        model.fit()
        model.save("model.pt")
        kept = fingerprints[model.subset]                       # all that predictions need of the data
        predictor = SubsetPredictor("model.pt", kept, CountKernel)
        mean, variance = predictor.predict(new_fingerprints)

    Args:
        path: what :meth:`SubsetGPRegression.save` wrote after a fit with ``num_inducing``.
        X: the inducing inputs, in the order of ``subset``, or a kernel of the same kind that holds them.
        kernel: as that of the regression was given.

    Raises:
        ValueError: if the file holds no sparse regression that was fitted, or the kernel's inputs are not its inducing inputs.
    """

    inducing_inputs: Tensor | None
    mean_weights: Tensor
    variance_weights: Tensor
    target_mean: Tensor
    target_scale: Tensor
    log_noise: Tensor
    index: Tensor

    @names_arguments
    def __init__(self, path: str | Path, X: Any, kernel: Any = None) -> None:
        super().__init__()
        self.kernel = bound_kernel(X, kernel)
        state = torch.load(path, weights_only=True, map_location=self.kernel.device)
        extra = state["_extra_state"]
        if extra["predictor"] is None:
            raise ValueError("the file holds no sparse regression that was fitted: an exact one needs all its data, see SubsetGPRegression")
        rows = int((state["index"] >= 0).sum())
        if self.kernel.num_data != rows:
            raise ValueError(f"X must be the {rows} inducing inputs of the regression, its `subset`; got {self.kernel.num_data}")
        inner = {name.removeprefix("kernel."): value for name, value in state.items() if name.startswith("kernel.")}
        self.kernel.load_state_dict(inner, strict=False)
        self.register_buffer("index", torch.arange(rows, device=self.kernel.device))
        check_witness(self.kernel, self.index, extra["witness"])
        self.register_buffer("inducing_inputs", extra["inducing_inputs"])
        for name in ("mean_weights", "variance_weights"):
            self.register_buffer(name, extra["predictor"][name])
        for name in ("target_mean", "target_scale", "log_noise"):
            self.register_buffer(name, state[name])
        self.share = extra["predictor"]["share"]
        # Files of earlier versions do not say it.
        self._has_columns = extra["predictor"].get("has_columns", True)

    @torch.no_grad()
    def predict(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """See :meth:`SubsetGPRegression.predict`."""
        basis = _basis(self.kernel, self.inducing_inputs, self.index)
        mean, variance = sparse_marginals(basis, self.mean_weights, self.variance_weights, self.share, new)
        variance = variance if noiseless else variance + noise_from_log(self.log_noise)
        mean, variance = mean * self.target_scale + self.target_mean, variance[:, None] * self.target_scale.square()
        return (mean, variance) if self._has_columns else (mean.squeeze(1), variance.squeeze(1))


def _basis(kernel: DataKernel, inducing_inputs: Tensor | None, index: Tensor) -> Basis:
    """Inducing inputs that have moved, else those at ``index``."""
    if inducing_inputs is not None and isinstance(kernel, InputKernel):
        return FreeBasis(kernel, inducing_inputs)
    return Basis(kernel, index)


def _digest(targets: Tensor) -> str:
    """A checksum of targets, rounded so that other machines agree."""
    rounded = (targets.detach().cpu().double() * 1e6).round().to(torch.int64)
    return hashlib.sha256(rounded.numpy().tobytes()).hexdigest()


class SavedRegression(DoubleModule):
    """A regression whose state no regression on other data takes."""

    kernel: DataKernel
    target_mean: Tensor
    target_scale: Tensor
    objective_value: float

    def saved_data(self) -> tuple[Tensor, Tensor]:
        """Standardised targets, and the positions of inputs whose covariances are compared."""
        raise NotImplementedError

    def get_extra_state(self) -> dict[str, Any]:
        """What is neither parameter nor buffer of a fixed shape."""
        targets, index = self.saved_data()
        return {"objective_value": self.objective_value, "targets": _digest(targets), "witness": witness(self.kernel, index)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`get_extra_state` gave, if it is of these data."""
        targets, index = self.saved_data()
        if state["targets"] != _digest(targets):
            raise ValueError(_OTHER_TARGETS)
        check_witness(self.kernel, index, state["witness"])
        self.objective_value = state["objective_value"]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Standardised targets may be the same in another unit, in which all that is loaded would predict.
        for name in ("target_mean", "target_scale"):
            own, given = getattr(self, name), state_dict.get(f"{prefix}{name}", getattr(self, name))
            if given.shape == own.shape and bool(((given.to(own) - own).abs() > 1e-6 * self.target_scale + 1e-12 * own.abs()).any()):
                raise ValueError(_OTHER_TARGETS)
        # The kernel first: what covariances it has is compared.
        inner = {name.removeprefix(f"{prefix}kernel."): v for name, v in state_dict.items() if name.startswith(f"{prefix}kernel.")}
        self.kernel.load_state_dict(inner, strict=False)
        super()._load_from_state_dict(state_dict, prefix, *args)


_OTHER_TARGETS = "the state is of a regression on other targets; make this one from the data that it was fitted to"


class SubsetGPRegression(SavedRegression):
    r"""Sparse Gaussian process regression whose inducing inputs are training inputs.

    Targets are standardised, each output by itself; noise is measured on that scale. Outputs that do not vary have no part in learning, as
    they have no scale. It alternates between exchanging members of
    the subset and L-BFGS on the kernel's parameters and the noise, by the same objective, which never rises.

    The variational free energy takes for noise whatever the inducing inputs cannot explain. With few of them the marginal likelihood of
    the projected process (``objective="pp"``) predicts better, though it is no bound. ``"fitc"`` learns by the FITC likelihood.
    ``fit(free_inputs=True)`` lets numeric inducing inputs move freely.

    Example:
        >>> x = torch.linspace(0, 6, 60).double().unsqueeze(-1)
        >>> model = SubsetGPRegression(x, x.squeeze(-1).sin(), num_inducing=8)  # then fit() and predict(new)

    Args:
        X: the training inputs, of any type that the kernel takes; or a :class:`DataKernel`, which holds them.
        y: targets, ``(n,)`` or ``(n, H)``, finite.
        kernel: a kernel of :mod:`pyro.contrib.gp.kernels` or of GPyTorch, or a function that makes a :class:`DataKernel` of the inputs,
            such as :class:`CountKernel`. Default: :func:`smooth_rbf`. Its parameters are learned in place.
        num_inducing: number of inducing inputs ``m``. Default: none, an exact regression, up to 5000 data points. Else 32, twice as many
            as long as that gains 0.01 nats per data point, and 512 at most.
        noise: noise variance to start from, of standardised targets.
        objective: ``"vfe"``, ``"pp"``, or ``"fitc"``, for which the subset is chosen by ``"vfe"``.
        algorithm: ``"exchange"``, or any :class:`SubsetSearch`.
        generator: source of randomness.

    Attributes:
        is_exact: whether there are no inducing inputs: ``index`` is then all data.
        varies: which outputs do, ``(H,)``; all if none does.
        index: positions of the inducing inputs; -1 without a :meth:`fit`, or where there are fewer than ``m``.
        history: seconds, phase (``"start"``, ``"hyper"``, ``"subset"``, ``"free"``, or ``"exact"``) and objective.
        objective_value: the objective in nats of standardised targets, without its constant; NaN before :meth:`fit`.

    Raises:
        ValueError: if a shape, a name or a number is not as above, or the kernel is not finite, symmetric and positive.
    """

    index: Tensor
    target_mean: Tensor
    target_scale: Tensor
    targets: Tensor
    varies: Tensor
    held_out: Tensor

    def __init__(
        self,
        X: Any,
        y: Tensor,
        kernel: Any = None,
        *,
        num_inducing: int | None = None,
        noise: float = 0.5,
        objective: str = "vfe",
        algorithm: str | SubsetSearch = "exchange",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.kernel = bound_kernel(X, kernel)
        n, targets = self.kernel.num_data, in_double("y, the targets,", y).detach()
        if targets.dim() not in (1, 2) or len(targets) != n:
            raise ValueError(f"y, the targets, must be finite and of shape ({n},) or ({n}, H); got shape {tuple(targets.shape)}")
        check_kinds(SubsetGPRegression.__init__, noise=noise, generator=generator)
        self._grows = num_inducing is None and n > EXACT_UP_TO
        limit = "the number of inputs"
        num_inducing = default_size(n) if num_inducing is None else check_count("num_inducing", num_inducing, most=n, limit=limit)
        self.is_exact = num_inducing == n <= EXACT_UP_TO
        if not NOISE_FLOOR < noise < math.inf:
            raise ValueError(f"noise must be a variance above {NOISE_FLOOR}; got {noise}")
        if objective not in (*OBJECTIVES, "fitc"):
            raise ValueError(f'objective must be one of {", ".join(OBJECTIVES)} and "fitc"; got {objective!r}')
        check_data_kernel(self.kernel.to(targets.device))  # strings are on no device
        self.num_inducing = num_inducing
        self.objective = objective
        self.search = make_search(algorithm)
        self.generator = generator
        matrix = targets if targets.dim() == 2 else targets[:, None]
        check_units("y, the targets,", matrix)
        scale = matrix.std(0, correction=min(1, n - 1))
        # Rounding errors of a constant are no deviation.
        varies = scale > 1e-15 * matrix.mean(0).abs()
        self._has_columns = targets.dim() == 2
        self.register_buffer("target_mean", matrix.mean(0))
        self.register_buffer("target_scale", torch.where(varies, scale, torch.ones_like(scale)))
        self.register_buffer("targets", (matrix - self.target_mean) / self.target_scale, persistent=False)
        self.register_buffer("varies", varies | ~varies.any(), persistent=False)
        index = torch.arange(n) if self.is_exact else torch.full((num_inducing,), -1, dtype=torch.int64)
        self.register_buffer("index", index.to(targets.device))
        self.log_noise = torch.nn.Parameter(torch.tensor(noise - NOISE_FLOOR, dtype=torch.float64, device=targets.device).log())
        self.inducing_inputs: torch.nn.Parameter | None = None
        self.register_buffer("held_out", self.index[:0].clone(), persistent=False)
        self.objective_value = math.nan
        self.history: list[tuple[float, str, float]] = []
        self._posterior: SparsePosterior | ExactPosterior | None = None

    @property
    def noise(self) -> float:
        """Noise variance of standardised targets."""
        return float(noise_from_log(self.log_noise.detach()))

    @property
    def subset(self) -> Tensor:
        """Positions of the inducing inputs, ``(m,)``, or where these started.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        index = self.index[self.index >= 0]
        if not len(index):
            raise RuntimeError("there are no inducing inputs yet: call fit() first, or load a state")
        return index

    @renames(polish="free_inputs", polish_evaluations="free_input_evaluations")
    def fit(
        self,
        *,
        max_seconds: float | None = None,
        max_epochs: int = 100,
        hyper_evaluations: int = 5,
        attempts_per_epoch: int = 4,
        tolerance: float = 1e-4,
        free_inputs: bool = False,
        free_input_evaluations: int | None = None,
        subset_share: float = 0.3,
        max_rows: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        progress: bool | None = None,
    ) -> float:
        """Learns hyper-parameters and the subset, from where they are.

        Args:
            max_seconds: most seconds by ``clock``. Default: no limit.
            max_epochs: most alternations.
            hyper_evaluations: evaluations of the objective per continuous phase. Few are better: hyper-parameters that fit a poor subset
                exactly switch off inputs which a better one would need.
            attempts_per_epoch: attempts per discrete phase to exchange a block of members, or a single one.
            tolerance: ends the alternation when an epoch gains less than this many nats per data
                point. An epoch with enough attempts for every member ends it, too.
            free_inputs: whether to free inducing inputs from the data points afterwards, and optimise them; needs a kernel of numeric
                inputs. With ``"pp"``, which is no bound, a tenth of the data has no part in it, and calibrates the variances.
            free_input_evaluations: most evaluations of the objective for that. Default: 200, or what fits into ``max_seconds``.
            subset_share: share of ``max_seconds`` for the subset if inputs are freed afterwards.
            max_rows: most data points that an alternation looks at, drawn anew for each. A result
                is kept only if it lowers the objective of all data. Otherwise the next epoch uses
                twice as many. Default: all of up to 50 000, else 20 000.
            clock: seconds from some moment on.
            progress: whether to show a progress bar. Default: in a terminal.

        Returns:
            The objective reached, see :attr:`objective_value`.

        Raises:
            TypeError: if ``free_inputs`` is asked for with a kernel whose inputs are not numeric.

        Warns:
            AllNoiseWarning: if the inducing inputs explain nearly nothing.
            UserWarning: if repeated data points have made the noise vanish.
        """
        check_kinds(
            SubsetGPRegression.fit, free_inputs=free_inputs, max_seconds=max_seconds, tolerance=tolerance, subset_share=subset_share
        )
        if free_inputs:
            numeric_kernel(self.kernel, self.is_exact)
        hyper_evaluations, attempts_per_epoch = check_counts(hyper_evaluations=hyper_evaluations, attempts_per_epoch=attempts_per_epoch)
        max_epochs = check_count("max_epochs", max_epochs, least=0)
        free_input_evaluations = (
            None if free_input_evaluations is None else check_count("free_input_evaluations", free_input_evaluations, least=0)
        )
        rows = num_alternation_rows(len(self.targets), self.num_inducing, max_rows)
        record = FitRecord(self.history, max_seconds, clock, progress)
        if not (free_inputs and self.inducing_inputs is not None):
            self.inducing_inputs, self.held_out = None, self.held_out[:0]
            settings = FitSettings(max_epochs, record.remaining_seconds, tolerance, hyper_evaluations, attempts_per_epoch, rows)
            self.objective_value = self._learn(settings, record, subset_share if free_inputs else 1.0)
        if free_inputs:
            evaluations = (200 if max_seconds is None else 10**6) if free_input_evaluations is None else free_input_evaluations
            self._optimize_inputs(evaluations, record)
        record.close()
        self._posterior = None
        prediction, size = self.posterior().leave_one_out()[0][:, self.varies], None if self.is_exact else self.num_inducing
        warn_about_noise(self._learned_targets(), prediction, self.noise, size)
        warn_about_copies(self.kernel, torch.arange(len(self.targets), device=self.targets.device), self.targets, self.noise)
        return self.objective_value

    def _learn(self, settings: FitSettings, record: FitRecord, share: float) -> float:
        size, *larger = self._sizes()
        targets = self._learned_targets()
        # Where the number grows, a finer tolerance than that of the growth would take most of the time.
        tolerance = max(settings.tolerance, MIN_GAIN_NATS) if larger else settings.tolerance

        def attempt(gives_up: bool, size: int, start: Tensor, tries_all: bool) -> float:
            if self.is_exact:
                return fit_exactly(self.kernel, targets, self.log_noise, hyper_parameters(self.kernel, self.log_noise), settings, record)
            turns = Alternation(self.kernel, targets, self.log_noise, self.objective, self.search, size, self.generator)
            budget = record.budget(share)
            limited = dataclasses.replace(settings, gives_up=gives_up, remaining_seconds=budget, tolerance=tolerance, tries_all=tries_all)
            index, value = turns.run(start, limited, record)
            self.index.fill_(-1)
            self.index[: len(index)] = check_index(index, len(targets))
            return value

        begin = functools.partial(attempt, size=size, start=self.index[self.index >= 0], tries_all=not larger)
        if math.isnan(self.objective_value):
            value = fit_with_restart(begin, self.kernel, targets, self.log_noise, record, self.index, self.generator)
        else:
            value = begin(False)
        for size in larger:
            before, value = value, attempt(False, size, self.subset, tries_all=False)
            is_enough = value < objective_at_share(targets) and before - value < MIN_GAIN_NATS * len(targets)
            if is_enough or record.remaining_seconds() <= 0:
                break
        return attempt(False, size, self.subset, tries_all=True) if larger else value

    def _learned_targets(self) -> Tensor:
        """Those that vary, or all if none does."""
        return self.targets[:, self.varies]

    def _sizes(self) -> list[int]:
        """Returns how many inducing inputs are tried, one number after the other."""
        if not self._grows:
            return [self.num_inducing]
        least = max(FIRST_SIZE, int((self.index >= 0).sum()))
        return [size for size in (least * 2**power for power in range(64)) if size < self.num_inducing] + [self.num_inducing]

    def _optimize_inputs(self, evaluations: int, record: FitRecord) -> None:
        kernel = numeric_kernel(self.kernel, self.is_exact)
        if self.inducing_inputs is None:
            self.inducing_inputs = torch.nn.Parameter(kernel.inputs[self.subset].clone())
            if self.objective == "pp":
                self.held_out = held_out_rows(len(self.targets), self.subset, self.generator)
        self.objective_value = optimize_free_inputs(
            kernel, self.inducing_inputs, self._learned_targets(), self.log_noise, self.objective, self.held_out, evaluations, record
        )

    @torch.no_grad()
    def predict(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Returns means and variances of the targets at new inputs.

        They are ``(n_new,)`` or ``(n_new, H)`` each, in float64; with ``noiseless``, variances are those of the function alone.
        """
        mean, variance = self.posterior().marginals(new)
        return self._original(mean, variance if noiseless else variance + self.noise)

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Predicts each training target from all others, as :meth:`predict` does."""
        return self._original(*self.posterior().leave_one_out())

    @overload
    def posterior(self) -> SparsePosterior | ExactPosterior: ...
    @overload
    def posterior(self, new: Any, *, joint: bool = False, noiseless: bool = True) -> TorchDistribution: ...
    def posterior(
        self, new: Any = None, *, joint: bool = False, noiseless: bool = True
    ) -> SparsePosterior | ExactPosterior | TorchDistribution:
        r"""Returns the posterior of the function, or its distribution at new inputs.

        The distribution is in units of the targets, differentiable in numeric inputs, and so are its draws (``rsample()``).

        Args:
            new: new inputs, as the kernel takes them.
            joint: whether they are predicted jointly, with all their covariances. The kernel must offer ``among(new)``.
            noiseless: whether it is that of the function alone, or of targets with noise of their own.

        Returns:
            A normal distribution of event shape ``(n_new,)``, and batch shape ``(H,)`` if the targets have columns. The object without
            new inputs is of standardised targets; it is kept until the next :meth:`fit` or loaded state.
        """
        kept = self._posterior = self._posterior or self._given_targets()
        if new is None:
            return kept
        mean, spread = kept.joint(new) if joint else kept.marginals(new)
        own = 0.0 if noiseless else self.noise
        mean, scale = (mean * self.target_scale + self.target_mean).mT, self.target_scale[:, None]
        if not self._has_columns:
            mean, scale = mean[0], scale[0]
        if joint:
            level = self.kernel.diag_new(new).double().mean()
            root = stable_cholesky(spread + own * torch.eye(len(spread)).to(spread), level)
            return dist.MultivariateNormal(mean, scale_tril=scale.unsqueeze(-1) * root)
        # A variance of zero is no normal distribution: what rounding may have left of it.
        return dist.Normal(mean, scale * (spread + own).clamp(min=1e-14).sqrt()).to_event(1)

    @leaves_inference_mode
    def _given_targets(self) -> SparsePosterior | ExactPosterior:
        if self.is_exact:
            return ExactPosterior(self.kernel, self.targets, self.noise)
        basis = _basis(self.kernel, self.inducing_inputs, self.subset)
        return SparsePosterior(basis, self.targets, self.noise, self.objective, self.held_out)

    def _original(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = mean * self.target_scale + self.target_mean, variance[:, None] * self.target_scale.square()
        return (mean, variance) if self._has_columns else (mean.squeeze(1), variance.squeeze(1))

    def forward(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Returns means and variances of targets, see :meth:`predict`."""
        return self.predict(new, noiseless=noiseless)

    def save(self, path: str | Path) -> None:
        """Writes everything that predictions need, but no training data."""
        torch.save(self.state_dict(), path)

    def load(self, path: str | Path) -> Self:
        """Reads what :meth:`save` wrote, for the same data and kernel.

        Raises:
            ValueError: if it was made from other data.
        """
        self.load_state_dict(torch.load(path, weights_only=True, map_location=self.targets.device))
        return self

    def saved_data(self) -> tuple[Tensor, Tensor]:
        """Standardised targets, and the positions of the inducing inputs."""
        return self.targets, self.index[self.index >= 0]

    def get_extra_state(self) -> dict[str, Any]:
        """What is neither parameter nor buffer of a fixed shape."""
        inputs = None if self.inducing_inputs is None else self.inducing_inputs.detach().clone()
        settled = None if self.is_exact or math.isnan(self.objective_value) else self.posterior()
        kept = settled and {name: getattr(settled, name) for name in ("mean_weights", "variance_weights", "share")}
        return super().get_extra_state() | {
            "inducing_inputs": inputs,
            "held_out": self.held_out.clone(),
            "predictor": kept and {**kept, "has_columns": self._has_columns},
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """See :meth:`SavedRegression.set_extra_state`."""
        super().set_extra_state(state)
        inputs = state["inducing_inputs"]
        self.inducing_inputs = None if inputs is None else torch.nn.Parameter(inputs.to(self.index.device, copy=True))
        self.held_out = state["held_out"].to(self.index.device, copy=True)
        self._posterior = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._posterior = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Moved inducing inputs exist only where a fit made them; they travel with the extra state.
        state_dict.pop(f"{prefix}inducing_inputs", None)
        self.inducing_inputs = None
        super()._load_from_state_dict(state_dict, prefix, *args)
