"""Sparse Gaussian process regression: inducing inputs from the training set and hyper-parameters, learned by one objective."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from pyro_truncated.gp.data_kernels import InputKernel, as_data_kernel
from pyro_truncated.gp.data_kernels.validity import check_data_kernel
from pyro_truncated.gp.optimization import minimize
from pyro_truncated.gp.subset.basis import Basis, FreeBasis
from pyro_truncated.gp.subset.exchange_factors import ExchangeFactors
from pyro_truncated.gp.subset.gradient import NOISE_FLOOR, backward, noise_of
from pyro_truncated.gp.subset.inducing_subset import make_search
from pyro_truncated.gp.subset.objective import OBJECTIVES, SubsetProblem, check_index
from pyro_truncated.gp.subset.row_sample import RowSample, sample_rows
from pyro_truncated.gp.subset.sparse_posterior import SparsePosterior
from pyro_truncated.gp.subset.subset_search import Budget, SubsetSearch
from pyro_truncated.utils.counts import check_count, check_counts

_EXPLAINED_BY_NOISE = 0.02
_MANY_ROWS, _SOME_ROWS = 50_000, 20_000


class AllNoiseWarning(UserWarning):
    """The fit explains nearly all of the data as noise."""


class _Plan(NamedTuple):
    """How the subset and hyper-parameters take turns."""

    max_epochs: int
    hyper_evaluations: int
    attempts: int
    tolerance: float
    rows: int
    clock: Callable[[], float]


class SubsetGPRegression(torch.nn.Module):
    r"""Sparse Gaussian process regression whose inducing inputs are a subset of the training inputs.

    Targets are standardised, each output by itself; noise is measured on that scale. Learning alternates between exchanging members of
    the subset and L-BFGS on the kernel's parameters and the noise, both by the same objective, which never rises. The start matters:
    from little noise and short length-scales, few inducing inputs explain so little that "all is noise" is the nearest optimum. Start from
    half of the variance as noise and, for standardised inputs in ``D`` dimensions, length-scales of :math:`2 \sqrt D`, which
    :func:`smooth_rbf` does.

    The variational free energy takes for noise whatever the inducing inputs cannot explain. Where they are few for the data, as on
    molecules, other objectives predict better, though they are no bounds: the marginal likelihood of the projected process
    (``objective="pp"``) has the smallest errors; it leaves the kernel's variance free to grow far too large, so what the inducing inputs
    leave of it is calibrated on leave-one-out residuals (see :class:`SparsePosterior`). Hyper-parameters by the FITC likelihood
    (``objective="fitc"``) give densities without such a correction.

    On numeric inputs with a differentiable kernel, inducing inputs that move freely fit better than any subset of equal size:
    ``fit(polish=True)`` lets them move from where the subset is. On discrete inputs there is no such thing.

    Args:
        kernel: a :class:`DataKernel`, or an object with ``diag()``, ``columns(index)`` and ``cross(new, index)``. Its parameters are
            learned in place; with float64 inputs they converge further.
        targets: ``(n,)`` or ``(n, H)``, finite.
        num_inducing: number of inducing inputs ``m``.
        noise: noise variance to start from, of standardised targets.
        objective: ``"vfe"``, ``"pp"``, or ``"fitc"``, for which the subset is chosen by ``"vfe"``.
        algorithm: ``"exchange"``, ``"cholqr"``, or any :class:`SubsetSearch`. Searches that restart, as greedy ones do, choose a new
            subset after each change of hyper-parameters; the best pair is kept.
        generator: source of randomness.

    Attributes:
        index: positions of the inducing inputs; -1 where there are fewer than ``m``, and before :meth:`fit`.
        history: seconds, phase (``"start"``, ``"hyper"``, ``"subset"``, ``"polish"``) and objective; of the last phase, each improvement.
        objective_value: the objective in nats of standardised targets, without its constant; NaN before :meth:`fit`.

    Raises:
        ValueError: if a shape, a name or a number is not as above, or the kernel is none: not finite, not symmetric or not positive.
    """

    index: Tensor
    target_mean: Tensor
    target_scale: Tensor
    targets: Tensor

    def __init__(
        self,
        kernel: Any,
        targets: Tensor,
        num_inducing: int,
        *,
        noise: float = 0.5,
        objective: str = "vfe",
        algorithm: str | SubsetSearch = "exchange",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.kernel = as_data_kernel(kernel)
        n = self.kernel.num_data
        if targets.dim() not in (1, 2) or len(targets) != n or not bool(targets.isfinite().all()):
            raise ValueError(f"targets must be finite and of shape ({n},) or ({n}, H); got shape {tuple(targets.shape)}")
        num_inducing = check_count("num_inducing", num_inducing)
        if num_inducing > n:
            raise ValueError(f"num_inducing must lie in 1 .. {n}, the number of inputs; got {num_inducing}")
        if not NOISE_FLOOR < noise < math.inf:
            raise ValueError(f"noise must be a variance above {NOISE_FLOOR}; got {noise}")
        if objective not in (*OBJECTIVES, "fitc"):
            raise ValueError(f'objective must be one of {", ".join(OBJECTIVES)} and "fitc"; got {objective!r}')
        check_data_kernel(self.kernel)
        self.num_inducing = num_inducing
        self.objective = objective
        self.search = make_search(algorithm)
        self.generator = generator
        matrix = (targets if targets.dim() == 2 else targets[:, None]).detach().double()
        scale = matrix.std(0)
        self._has_columns = targets.dim() == 2
        self.register_buffer("target_mean", matrix.mean(0))
        self.register_buffer("target_scale", torch.where(scale > 0, scale, torch.ones_like(scale)))
        self.register_buffer("targets", (matrix - self.target_mean) / self.target_scale, persistent=False)
        self.register_buffer("index", torch.full((num_inducing,), -1, dtype=torch.int64, device=targets.device))
        self.log_noise = torch.nn.Parameter(torch.tensor(noise - NOISE_FLOOR, dtype=torch.float64, device=targets.device).log())
        self.inducing_inputs: torch.nn.Parameter | None = None
        self.objective_value = math.nan
        self.history: list[tuple[float, str, float]] = []
        self._posterior: SparsePosterior | None = None

    @property
    def noise(self) -> float:
        """Noise variance of standardised targets."""
        return float(noise_of(self.log_noise.detach()))

    @property
    def subset(self) -> Tensor:
        """Positions of the inducing inputs, ``(m,)``; of a polished regression, where they started.

        Raises:
            RuntimeError: before :meth:`fit`.
        """
        chosen = self.index[self.index >= 0]
        if not len(chosen):
            raise RuntimeError("there are no inducing inputs yet: call fit() first, or load a state")
        return chosen

    def fit(
        self,
        *,
        max_seconds: float | None = None,
        max_epochs: int = 100,
        hyper_evaluations: int = 5,
        attempts_per_epoch: int = 4,
        tolerance: float = 1e-4,
        polish: bool = False,
        polish_evaluations: int | None = None,
        subset_share: float = 0.3,
        max_rows: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        progress: bool = False,
    ) -> float:
        """Learns hyper-parameters and the subset, from where they are.

        Args:
            max_seconds: most seconds by ``clock``; default: no limit.
            max_epochs: most alternations.
            hyper_evaluations: evaluations of the objective per continuous phase. Few are better: while the subset is poor, hyper-parameters
                that fit it exactly switch off inputs which a better subset would need.
            attempts_per_epoch: attempts per discrete phase to exchange a block of members, or a single one.
            tolerance: ends the alternation when an epoch gains less than this many nats per data point, and so does one with enough
                attempts for every member.
            polish: whether inducing inputs move freely afterwards; needs a kernel of numeric inputs.
            polish_evaluations: evaluations of the objective, at most, while they move; default: 200, or with ``max_seconds`` as many as
                fit into them.
            subset_share: share of ``max_seconds`` for the subset if it is polished afterwards.
            max_rows: most data points that an alternation looks at, drawn anew for each. What it finds is kept only if it lowers the
                objective of all data; where it does not, by ``tolerance``, the next one looks at twice as many. Default: all of up to
                50 000, else 20 000; far fewer learn faster where time is short.
            clock: seconds from some moment on.
            progress: whether to show a progress bar.

        Returns:
            The objective reached, see :attr:`objective_value`.

        Raises:
            TypeError: if ``polish`` is asked for with a kernel whose inputs are not numeric.

        Warns:
            AllNoiseWarning: if the inducing inputs explain nearly nothing.
        """
        if polish and not isinstance(self.kernel, InputKernel):
            raise TypeError(f"polish=True needs a kernel of numeric inputs, such as PyroKernel; got {type(self.kernel).__name__}")
        hyper_evaluations, attempts_per_epoch = check_counts(hyper_evaluations=hyper_evaluations, attempts_per_epoch=attempts_per_epoch)
        max_epochs = check_count("max_epochs", max_epochs, least=0)
        polish_evaluations = None if polish_evaluations is None else check_count("polish_evaluations", polish_evaluations, least=0)
        max_rows = None if max_rows is None else check_count("max_rows", max_rows)
        n, m = len(self.targets), self.num_inducing
        num_rows = (n if n <= _MANY_ROWS else max(_SOME_ROWS, 4 * m)) if max_rows is None else max_rows
        if num_rows < m:
            raise ValueError(f"max_rows must be at least num_inducing={m}; got {max_rows}")
        start = clock()
        share = subset_share if polish else 1.0

        def seconds_left(of: float = 1.0) -> float:
            """What is left of a share of the budget."""
            return math.inf if max_seconds is None else of * max_seconds - (clock() - start)

        if polish and self.inducing_inputs is not None:
            share = 0.0
        else:
            self.inducing_inputs = None
        bar = tqdm(disable=not progress, unit="phase")

        def note(phase: str, value: float) -> None:
            """Adds a line to the history, and to the progress bar."""
            self.history.append((clock() - start, phase, value))
            bar.update()
            bar.set_postfix_str(f"{phase} F={value:.6g}")

        if share:
            plan = _Plan(max_epochs, hyper_evaluations, attempts_per_epoch, tolerance * len(self.targets), num_rows, clock)
            self._alternate(plan, lambda: seconds_left(share), note)
        if polish:
            evaluations = (200 if max_seconds is None else 10**6) if polish_evaluations is None else polish_evaluations
            self._polish(evaluations, lambda: seconds_left() <= 0, note)
        bar.close()
        self._posterior = None
        self._warn_of_noise()
        return self.objective_value

    def _alternate(self, plan: _Plan, seconds_left: Callable[[], float], note: Callable[[str, float], None]) -> None:
        num, attempts, index = plan.rows, plan.attempts, self.index[self.index >= 0]
        if not len(index):
            sample = sample_rows(self.kernel, self.targets, index, num, self.generator)
            index = sample.among_all(self._improve(sample, None, Budget(max_attempts=0)))
        best, kept = math.inf, self._state(index)
        for epoch in range(plan.max_epochs + 1):
            sample = sample_rows(self.kernel, self.targets, index, num, self.generator)
            chosen = sample.inducing
            if epoch:
                limit = seconds_left()
                budget = Budget(None, attempts, None if limit == math.inf else max(0.0, limit), plan.clock)
                chosen = self._improve(sample, chosen, budget)
                index = sample.among_all(chosen)
                if sample.rows is None:
                    note("subset", self._subset_value(index))
            value = minimize(
                lambda sample=sample, chosen=chosen: backward(  # type: ignore[misc]
                    Basis(sample.kernel, chosen), sample.targets, self.log_noise, self.objective
                ),
                self._hyper_parameters(),
                max_evaluations=plan.hyper_evaluations,
                is_spent=lambda: seconds_left() <= 0,
            ).value
            if sample.rows is not None:
                # What some rows liked has to prove itself on all.
                value = self._value_of_all(index)
            note("hyper" if epoch else "start", value)
            gained = best - value
            if value < best:
                best, kept = value, self._state(index)
            elif sample.rows is not None:
                index = self._restore(kept)
            if seconds_left() <= 0:
                break
            is_settled = bool(epoch) and abs(gained) < plan.tolerance
            if sample.rows is not None:
                num = num if gained >= plan.tolerance else 2 * num
            elif is_settled and attempts > plan.attempts:
                break
            # A few attempts may fail by chance: before it ends, every member has had its turn.
            attempts = plan.attempts + self.num_inducing if is_settled else plan.attempts
        if not math.isfinite(best):
            raise ValueError("the objective is not finite at the start: check the kernel, its parameters and the noise")
        self._restore(kept)
        self.objective_value = best

    def _improve(self, sample: RowSample, index: Tensor | None, budget: Budget) -> Tensor:
        objective = "vfe" if self.objective == "fitc" else self.objective
        problem = SubsetProblem(sample.kernel, sample.targets, self.noise, objective)
        return self.search.improve(problem, self.num_inducing, index, budget, self.generator)

    def _polish(self, evaluations: int, is_spent: Callable[[], bool], note: Callable[[str, float], None]) -> None:
        kernel = self.kernel
        if not isinstance(kernel, InputKernel):
            raise TypeError("only kernels of numeric inputs can be polished")
        if self.inducing_inputs is None:
            self.inducing_inputs = torch.nn.Parameter(kernel.inputs[self.subset].clone())
        inputs = self.inducing_inputs
        value = minimize(
            lambda: backward(FreeBasis(kernel, inputs), self.targets, self.log_noise, self.objective),
            [*self._hyper_parameters(), inputs],
            max_evaluations=evaluations,
            is_spent=is_spent,
            on_better=lambda value: note("polish", value),
        ).value
        self.objective_value = value

    def predict(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Predictions at new inputs: ``O(m)`` per mean and ``O(m^2)`` per variance.

        Args:
            new: new inputs, as the kernel takes them.
            noiseless: whether variances are those of the function alone.

        Returns:
            Means and variances of the targets, ``(n_new,)`` or ``(n_new, H)`` each, in float64.
        """
        posterior = self.posterior()
        mean, variance = posterior.predict(new)
        return self._original(mean, variance if noiseless else variance + self.noise)

    def leave_one_out(self) -> tuple[Tensor, Tensor]:
        """Predictions of each training target from all others, subset and hyper-parameters held fixed.

        Returns:
            Means and variances, noise included, ``(n,)`` or ``(n, H)`` each.
        """
        return self._original(*self.posterior().leave_one_out())

    def posterior(self) -> SparsePosterior:
        """The posterior of the function, of standardised targets. It is kept until the next :meth:`fit` or loaded state."""
        if self._posterior is None:
            self._posterior = SparsePosterior(self._basis(), self.targets, self.noise, self.objective)
        return self._posterior

    def save(self, path: str | Path) -> None:
        """Writes everything learned, but neither the training data nor the kernel's."""
        torch.save(self.state_dict(), path)

    def load(self, path: str | Path) -> SubsetGPRegression:
        """Reads what :meth:`save` wrote into a regression made with the same data, kernel and number of inducing inputs."""
        self.load_state_dict(torch.load(path, weights_only=True, map_location=self.targets.device))
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """What is neither parameter nor buffer of a fixed shape."""
        moved = None if self.inducing_inputs is None else self.inducing_inputs.detach()
        return {"inducing_inputs": moved, "objective_value": self.objective_value}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`get_extra_state` gave."""
        moved = state["inducing_inputs"]
        self.inducing_inputs = None if moved is None else torch.nn.Parameter(moved)
        self.objective_value = state["objective_value"]
        self._posterior = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Moved inducing inputs exist only where a fit made them; they travel with the extra state.
        state_dict.pop(f"{prefix}inducing_inputs", None)
        self.inducing_inputs = None
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _basis(self) -> Basis:
        if self.inducing_inputs is not None and isinstance(self.kernel, InputKernel):
            return FreeBasis(self.kernel, self.inducing_inputs)
        return Basis(self.kernel, self.subset)

    @torch.no_grad()
    def _subset_value(self, index: Tensor) -> float:
        """The objective that subsets are chosen by."""
        problem = SubsetProblem(self.kernel, self.targets, self.noise, "vfe" if self.objective == "fitc" else self.objective)
        return ExchangeFactors(problem, len(index), index).value()

    def _value_of_all(self, index: Tensor) -> float:
        """The objective of all data."""
        if self.objective != "fitc":
            return self._subset_value(index)
        value = backward(Basis(self.kernel, index), self.targets, self.log_noise, "fitc")
        self.zero_grad()
        return value

    def _hyper_parameters(self) -> list[Tensor]:
        return [*(p for p in self.kernel.parameters() if p.requires_grad), self.log_noise]

    def _state(self, index: Tensor) -> tuple[Tensor, list[Tensor]]:
        return index, [p.detach().clone() for p in self._hyper_parameters()]

    @torch.no_grad()
    def _restore(self, state: tuple[Tensor, list[Tensor]]) -> Tensor:
        index, values = state
        self.index.fill_(-1)
        self.index[: len(index)] = check_index(index, len(self.targets))
        for parameter, value in zip(self._hyper_parameters(), values, strict=True):
            parameter.copy_(value)
        return index

    def _original(self, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance = mean * self.target_scale + self.target_mean, variance[:, None] * self.target_scale.square()
        return (mean, variance) if self._has_columns else (mean.squeeze(1), variance.squeeze(1))

    def _warn_of_noise(self) -> None:
        fitted = self.posterior().fitted
        # Of the mean, not of the prior: a kernel that has become a constant has all the prior variance one could want.
        explained = float((fitted - fitted.mean(0)).square().mean())
        if explained < _EXPLAINED_BY_NOISE:
            warnings.warn(
                f"the fit explains the targets as noise of variance {self.noise:.3g} (of 1): predictions from the {self.num_inducing} "
                f"inducing inputs account for {explained:.2g} of the targets' variance. Start from more noise and other "
                "length-scales (as smooth_rbf does), take more inducing inputs, or add an identity kernel "
                "(SumKernel(..., redundant_sum=True, identity=True))",
                AllNoiseWarning,
                stacklevel=3,
            )
