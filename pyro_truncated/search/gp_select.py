"""GP-select: preselection by Gaussian process regression of posterior marginals on data."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar

import torch
from pyro.contrib.gp import kernels
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed import collectives
from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.noisy_covariance import SMALLEST_SHARE
from pyro_truncated.gp.subset.leave_one_out import LeaveOneOutRegression
from pyro_truncated.search.base import SearchBatch, Stateful, regression_inputs
from pyro_truncated.search.exhaustive import draw_by_weight
from pyro_truncated.search.preselection import AffinitySearch, Preselection, space_options
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import check_count, check_counts, check_kinds, names_arguments

S = TypeVar("S")
T = TypeVar("T")


class LearnedAffinity(Stateful, abc.ABC, Generic[T]):
    """An affinity that learns from training data and predicts for others.

    New data (``batch.is_new``, as in :meth:`AutoTruncated.infer <pyro_truncated.AutoTruncated.infer>`) are predicted
    and not remembered, unless nothing else is known. When training continues with other data, everything is
    forgotten. What was learned is part of :meth:`state_dict`. So a run resumed from a checkpoint has the numbers of
    one that was never interrupted.

    Attributes:
        regression: the Gaussian process regression, ``None`` before the first batch.
        learns: that it has to :meth:`meet` the data first where they are searched in blocks or on shards. What it
            keeps of this process's data points is in :meth:`state_dict` in the form of
            :func:`pyro_truncated.distributed.shards.collect_rows`.
    """

    learns: ClassVar[bool] = True
    # Whether it learns from minibatches, too, rather than predict them.
    _takes_minibatches: ClassVar[bool] = True

    regression: LeaveOneOutRegression | None
    _has_new_data: bool
    # Whether it drew a seed when it took in the last batch.
    _drew_seed: bool = True

    def __init__(self, generator: torch.Generator | None = None) -> None:
        check_kinds(LearnedAffinity.__init__, generator=generator)
        self.generator = generator
        self.forget()

    def __call__(self, batch: SearchBatch) -> T:
        """Affinities of the batch's data points."""
        data = self._regression_data(batch)
        if batch.is_met:
            return self._predict_after_meeting(data, batch)
        knows = self.regression is not None and not self._has_new_data
        if (batch.is_new and knows) or not (self._takes_minibatches or batch.population.indices is None):
            return self._predict_new(data)
        if self.regression is not None and not self._knows(data, batch):
            self.forget()
        self._has_new_data = batch.is_new
        self._take_in(data, batch)
        return self._predict_from_others(data, batch)

    def meet(self, batch: SearchBatch) -> None:
        """Learns from all data searched at a time, alike in all processes."""
        data, everyone = self._regression_data(batch), gather_function(batch)
        if batch.is_new and self.regression is not None and not self._has_new_data:
            return
        if self.regression is not None and not all(everyone(self._knows(data, batch))):
            self.forget()
        self._has_new_data = batch.is_new
        self._knows_all = all(everyone(self._takes_minibatches or batch.population.indices is None))
        if self._knows_all:
            self._take_in(data, batch)

    def forget(self) -> None:
        """Forgets all data and fits; a given kernel keeps its parameters."""
        self.regression = None
        self._has_new_data = self._knows_all = self._is_spread = False
        # Where the rows of this process are among those remembered by all.
        self._first_position = 0

    def state_dict(self) -> dict[str, Any]:
        """All that was learned, remembered data included; else the generator alone."""
        if self.regression is None:
            return super().state_dict()
        where = {"first_position": self._first_position, "is_spread": self._is_spread}
        memory, regression = {**self._memory_state(), **where}, self.regression.state_dict()
        return {**super().state_dict(), "is_of_new_data": self._has_new_data, "memory": memory, "regression": regression}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores an affinity with equal arguments, of shards on all processes."""
        self.forget()
        super().load_state_dict(state)
        if "regression" in state:
            memory, self._has_new_data = state["memory"], bool(state["is_of_new_data"])
            self._first_position, self._is_spread = memory["first_position"], memory["is_spread"]
            self.regression = self._remember(memory, state["regression"])

    @abc.abstractmethod
    def _regression_data(self, batch: SearchBatch) -> Tensor:
        """What the batch shows to regress on, checked."""

    @abc.abstractmethod
    def _knows(self, data: Tensor, batch: SearchBatch) -> bool:
        """Whether a batch is of the data remembered."""

    @abc.abstractmethod
    def _take_in(self, data: Tensor, batch: SearchBatch) -> None:
        """Stores the posteriors of a batch, and fits if due."""

    def _predict_after_meeting(self, data: Tensor, batch: SearchBatch) -> T:
        """Predicts met data points, or those of which it could not learn."""
        if not self._knows_all or (batch.is_new and not self._has_new_data):
            return self._predict_new(data)
        if self._drew_seed:
            # The seed that it has fitted with: what comes after it is drawn as if it had learned here.
            ops.draw_seed(batch.source(self.generator))
        return self._predict_from_others(data, batch)

    @abc.abstractmethod
    def _predict_from_others(self, data: Tensor, batch: SearchBatch) -> T:
        """Predicts each data point of a batch from the others."""

    @abc.abstractmethod
    def _predict_new(self, data: Tensor) -> T:
        """Predicts data points of which nothing was learned."""

    @abc.abstractmethod
    def _memory_state(self) -> dict[str, Any]:
        """What is remembered beside the parameters of the regression."""

    @abc.abstractmethod
    def _remember(self, memory: Mapping[str, Any], regression: Mapping[str, Any]) -> LeaveOneOutRegression:
        """Restores :meth:`_memory_state`, and returns a regression on the last inputs."""


def gather_function(batch: SearchBatch) -> Callable[[S], list[S]]:
    """Returns a function that gathers what all processes of a batch say."""
    return collectives.gather if batch.is_spread else lambda value: [value]


class ReplayMemory:
    """Inputs and latest marginals of met data points, by global position."""

    def __init__(self, inputs: Tensor, marginals: Tensor, visits: Tensor) -> None:
        self.inputs, self.marginals, self.visits = inputs, marginals, visits

    def holds(self, inputs: Tensor, num_options: int, indices: Tensor | None) -> bool:
        """Whether a batch is of the remembered data: known rows are unchanged."""
        is_larger = indices is None and len(self.visits) > len(inputs)
        sizes = (inputs.shape[1], num_options), (self.inputs.shape[1], self.marginals.shape[1])
        if is_larger or sizes[0] != sizes[1] or inputs.device != self.inputs.device:
            return False
        rows = batch_rows(inputs, indices)
        positions = (rows < len(self.visits)).nonzero().squeeze(-1)
        positions = positions[self.visits[rows[positions]] > 0]
        remembered, current = self.inputs[rows[positions]].nan_to_num(nan=math.inf), inputs[positions].nan_to_num(nan=math.inf)
        return torch.equal(remembered, current)

    def store(self, inputs: Tensor, marginals: Tensor, indices: Tensor | None) -> Tensor:
        """Takes in a batch; returns where its rows are."""
        rows = batch_rows(inputs, indices)
        more = (int(rows.max()) + 1 if len(rows) else 0) - len(self.visits)
        if more > 0:
            self.inputs = torch.cat([self.inputs, self.inputs.new_zeros(more, self.inputs.shape[1])])
            self.marginals = torch.cat([self.marginals, self.marginals.new_zeros(more, self.marginals.shape[1])])
            self.visits = torch.cat([self.visits, self.visits.new_zeros(more)])
        self.inputs[rows], self.marginals[rows] = inputs, marginals
        self.visits[rows] += 1
        return rows


def batch_rows(inputs: Tensor, indices: Tensor | None) -> Tensor:
    """Returns positions of a batch's data points among this process's."""
    return torch.arange(len(inputs), device=inputs.device) if indices is None else indices.to(inputs.device)


# Kernel and pivots are chosen from so many data points; to choose pivots, no more are ever looked at in one process.
MOST_ROWS = 20_000


class ExactRegression:
    """A leave-one-out regression; each process has all inputs and targets."""

    def __init__(self, regression: LeaveOneOutRegression, is_spread: bool) -> None:
        self.regression, self._is_spread = regression, is_spread

    def take(self, targets: Tensor) -> None:
        """Takes in the targets ``(n, P)`` of this process's own data points."""
        every = collectives.gather(targets) if self._is_spread else [targets]
        self._first = sum(map(len, every[: collectives.rank()])) if self._is_spread else 0
        self._targets = torch.cat(every)

    def loo(self, rows: Tensor) -> Tensor:
        """Means ``(m, P)`` of some of its own data points, from all others."""
        return self.regression.loo(self._targets, self._first + rows)[0]

    def predict(self, new_inputs: Tensor) -> Tensor:
        """Means ``(m, P)`` at new inputs."""
        return self.regression.predict(new_inputs, self._targets)[0]


class LowRankRegression(ExactRegression):
    r"""A low-rank factor :math:`L` by rows of processes; only sums travel.

    Let :math:`B = I + L^\top L / \lambda` and :math:`c = B^{-1} L^\top R / \lambda`. A row of :math:`C^{-1} R` is
    :math:`(R_n - L_n c) / \lambda`. The diagonal of :math:`C^{-1}` is :math:`(1 - L_n B^{-1} L_n^\top / \lambda) /
    \lambda`. The prediction at a new input with features :math:`f` is :math:`f c`.
    """

    def __init__(self, regression: LeaveOneOutRegression, inputs: Tensor) -> None:
        super().__init__(regression, is_spread=True)
        self._factor, self._noise = regression.features(inputs), regression.noise
        (products,) = collectives.add([self._factor.mT @ self._factor / self._noise])
        self._cholesky = stable_cholesky(torch.eye(len(products), dtype=products.dtype, device=products.device) + products)

    def take(self, targets: Tensor) -> None:
        """See :class:`ExactRegression`."""
        (products,) = collectives.add([self._factor.mT @ targets / self._noise])
        self._targets, self._coefficients = targets, torch.cholesky_solve(products, self._cholesky)

    def loo(self, rows: Tensor) -> Tensor:
        """See :class:`ExactRegression`."""
        factor, targets = self._factor[rows], self._targets[rows]
        whitened: Tensor = torch.linalg.solve_triangular(self._cholesky, factor.mT, upper=False)
        share: Tensor = (1 - whitened.square().sum(0) / self._noise).clamp(min=SMALLEST_SHARE)
        return targets - (targets - factor @ self._coefficients) / share.unsqueeze(-1)

    def predict(self, new_inputs: Tensor) -> Tensor:
        """See :class:`ExactRegression`."""
        means: Tensor = self.regression.features(new_inputs) @ self._coefficients
        return means


class RegressionAffinity(LearnedAffinity[Tensor]):
    r"""Predicts posterior marginals from observations and other data points.

    Targets are the marginals :math:`\sum_s q_n(s) [s_h = 1]` of the populations. There is one Gaussian process per
    latent (or value), and one kernel for all. The affinity is the leave-one-out mean: a prediction that knew the data
    point's own marginals would select again what was selected before.

    On several processes (:func:`pyro_truncated.distributed.shard`) it learns from all data at the first step of a
    search. With a rank each process has its rows of one low-rank factor, and sums of ``Q (Q + P)`` numbers travel.
    Kernel and pivots are chosen from up to 20 000 random data points. Without a rank all inputs and marginals travel.

    The affinity remembers inputs and latest marginals of every data point it has met, by their ``indices`` in all
    data.

    Example:
        >>> search = Preselection(RegressionAffinity(kernel="linear"), 4)  # what GPSelect(4, kernel="linear") is

    Args:
        kernel: as for :class:`~pyro_truncated.gp.LeaveOneOutRegression`.
        refit_every: visits of a data point between two fits of the kernel's parameters.
        rank: rank of an incomplete Cholesky factor. Default: exact, at :math:`O(N^3)` per fit and :math:`O(N^2)` memory.
        pivots: how data points are chosen for that factor, ``"variance"`` or ``"targets"``, see
            :class:`~pyro_truncated.gp.LeaveOneOutRegression`.
        inputs: inputs of the regression, ``(N, D)`` for all data, or a function that makes ``(n, D)`` of a
            :class:`~pyro_truncated.search.SearchBatch`, of new data too. Default: the observations, flattened.
            Missing (NaN) entries are replaced by the mean of their column.
        fit_steps: largest number of L-BFGS steps of a fit.
        max_fit: largest number of data points that a fit looks at, drawn at random; predictions use all.
        generator: source of randomness for the choice of these points. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range.
    """

    _memory: ReplayMemory | None

    @names_arguments
    def __init__(
        self,
        *,
        kernel: str | kernels.Kernel = "composition",
        refit_every: int = 10,
        rank: int | None = None,
        pivots: str = "variance",
        inputs: Tensor | Callable[[SearchBatch], Tensor] | None = None,
        fit_steps: int = 20,
        max_fit: int = 250,
        generator: torch.Generator | None = None,
    ) -> None:
        check_counts(refit_every=refit_every, fit_steps=fit_steps, max_fit=max_fit)
        check_kinds(RegressionAffinity.__init__, inputs=inputs)
        if isinstance(inputs, Tensor) and inputs.dim() != 2:
            raise ValueError(f"inputs must have shape (N, D), one row per data point of the full data set; got {tuple(inputs.shape)}")
        self.kernel = kernel
        self.refit_every = refit_every
        self.rank = rank
        self.pivots = pivots
        self.inputs = inputs
        self.fit_steps = fit_steps
        self.max_fit = max_fit
        super().__init__(generator)

    def forget(self) -> None:
        """Forgets all data, and what was fitted to them."""
        super().forget()
        self._memory = None
        self._trained_on = torch.zeros(0, dtype=torch.int64)
        self._num_trained = self._last_fit = self._seed = 0

    def _knows(self, data: Tensor, batch: SearchBatch) -> bool:
        options = space_options(batch.space, batch.population.words.device)
        num_options = len(options) if batch.marginals is None else batch.marginals.shape[1]
        return self._memory is not None and self._memory.holds(data, num_options, batch.population.indices)

    def _take_in(self, data: Tensor, batch: SearchBatch) -> None:
        if batch.marginals is not None:
            marginals = batch.marginals.double()
        else:
            population = batch.population
            options = space_options(population.space, population.words.device)
            marginals = population.value_probabilities()[:, options.latent, options.value].double()
        if self._memory is None:
            self._memory = ReplayMemory(data[:0], marginals[:0], torch.zeros(0, dtype=torch.int64, device=data.device))
        rows = self._memory.store(data, marginals, batch.population.indices)
        visit = max(gather_function(batch)(int(self._memory.visits[rows].amax()) if len(rows) else 0))
        self._train(visit, ops.draw_seed(batch.source(self.generator)), batch)
        self._shared.take(self._memory.marginals[self._trained_on])

    def _predict_from_others(self, data: Tensor, batch: SearchBatch) -> Tensor:
        return self._predict(data, batch_rows(data, batch.population.indices))

    def _predict_new(self, data: Tensor) -> Tensor:
        return self._predict(data, data.new_full((len(data),), -1, dtype=torch.int64))

    def _memory_state(self) -> dict[str, Any]:
        assert self._memory is not None
        is_trained_on = torch.zeros_like(self._memory.visits, dtype=torch.bool)
        is_trained_on[self._trained_on] = True
        rows = {"inputs": self._memory.inputs, "marginals": self._memory.marginals, "visits": self._memory.visits}
        settings = {"centre": self._centre, "num_trained": self._num_trained, "last_fit": self._last_fit, "seed": self._seed}
        return {"rows": {**rows, "is_trained_on": is_trained_on}, **settings}

    def _remember(self, memory: Mapping[str, Any], regression: Mapping[str, Any]) -> LeaveOneOutRegression:
        rows = memory["rows"]
        self._memory = ReplayMemory(*(rows[name].clone() for name in ("inputs", "marginals", "visits")))
        self._trained_on = rows["is_trained_on"].nonzero().squeeze(-1)
        for name in ("centre", "num_trained", "last_fit", "seed"):
            setattr(self, f"_{name}", memory[name])
        inputs = _fill(self._gather_training(self._memory.inputs, self._trained_on), self._centre)
        result = LeaveOneOutRegression(inputs, self.kernel, self.rank, pivots=self.pivots)
        result.load_state_dict(regression)
        self._share(result)
        self._shared.take(self._memory.marginals[self._trained_on])
        return result

    def _regression_data(self, batch: SearchBatch) -> Tensor:
        if not isinstance(self.inputs, Tensor):
            return regression_inputs(batch, self.inputs)
        size, indices = len(batch.population), batch.population.indices
        if batch.is_new:
            raise ValueError("inputs hold the rows of the training data; for new data, make inputs a function of a SearchBatch")
        if indices is None and len(self.inputs) != size:
            raise ValueError(f"inputs hold {len(self.inputs)} rows, but the batch is all data and has {size} data points")
        return (self.inputs if indices is None else self.inputs[indices.to(self.inputs.device)]).double()

    def _train(self, visit: int, seed: int, batch: SearchBatch) -> None:
        """Fits anew when due, or when the data met have doubled."""
        assert self._memory is not None
        rows = (self._memory.visits > 0).nonzero().squeeze(-1)
        number = sum(gather_function(batch)(len(rows)))
        due = self.regression is None or visit - self._last_fit >= self.refit_every
        if not due and number < 2 * self._num_trained:
            return
        self._first_position, self._is_spread, self._seed = batch.first_position, batch.is_spread, seed
        inputs, marginals = (self._gather_training(values, rows) for values in (self._memory.inputs, self._memory.marginals))
        # Before the first fit the noise variance is taken for a tenth.
        kernel, noise = (self.kernel, 0.1) if self.regression is None else (self.regression.kernel, float(self.regression.noise))
        self._centre = inputs.nanmean(0).nan_to_num(nan=0.0)
        generator = torch.Generator().manual_seed(seed)
        training_inputs = _fill(inputs, self._centre)
        self.regression = LeaveOneOutRegression(training_inputs, kernel, self.rank, noise=noise, pivots=self.pivots, generator=generator)
        few = torch.randperm(len(inputs), generator=generator)[: self.max_fit].to(rows.device)
        self.regression.fit(marginals, self.fit_steps, rows=few)
        self._trained_on, self._num_trained, self._last_fit = rows, number, visit
        self._share(self.regression)

    def _gather_training(self, values: Tensor, rows: Tensor) -> Tensor:
        """Returns remembered values at these rows, and other processes' training values.

        Where there are very many it is a random part of them, however processes share them.
        """
        values = values[rows]
        if not self._is_spread:
            return values
        number = sum(collectives.gather(len(values)))
        if self.rank is not None and number > MOST_ROWS:
            values = values[ops.uniform(self._first_position + rows, generator=ops.Stream(self._seed)) < MOST_ROWS / number]
        return torch.cat(collectives.gather(values))

    def _share(self, regression: LeaveOneOutRegression) -> None:
        """Gives each of several processes the predictions of its data points."""
        assert self._memory is not None
        if self._is_spread and self.rank is not None:
            self._shared: ExactRegression = LowRankRegression(regression, _fill(self._memory.inputs[self._trained_on], self._centre))
        else:
            self._shared = ExactRegression(regression, self._is_spread)

    def _predict(self, inputs: Tensor, rows: Tensor) -> Tensor:
        """Returns leave-one-out means for training rows, else predictions (-1)."""
        assert self._memory is not None
        place = torch.full((len(self._memory.visits) + 1,), -1, dtype=torch.int64, device=rows.device)
        place[self._trained_on] = torch.arange(len(self._trained_on), device=rows.device)
        place = place[rows]
        inside = place >= 0
        means = self._memory.marginals.new_empty(len(rows), self._memory.marginals.shape[1])
        if bool(inside.any()):
            means[inside] = self._shared.loo(place[inside])
        if not bool(inside.all()):
            means[~inside] = self._shared.predict(_fill(inputs[~inside], self._centre))
        return means


class GPSelect(Preselection):
    """Preselection by a learned affinity, which needs no knowledge of the model.

    Example:
        >>> y = linear_bars(40, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=16), ClosedForm(model), Truncated_ELBO(GPSelect(4)))
        >>> loss = svi.step(y)

    Args:
        num_selected: number of selected latents.
        kernel: ``"linear"``, ``"rbf"``, ``"composition"`` or a kernel of :mod:`pyro.contrib.gp.kernels`.
        refit_every: visits of a data point between two fits of the kernel's parameters.
        rank: rank of an incomplete Cholesky factor. Default: exact, for a few thousand data points.
        pivots: how data points are chosen for that factor: ``"variance"``, or ``"targets"`` for those that predict
            the marginals best. The latter takes longer and needs a smaller rank.
        explore: mean share of the selected places given to chance, see :class:`Preselection`.
        merge: whether proposals join the population or replace it.
        inputs: inputs of the regression, ``(N, D)`` for all data, or a function that makes ``(n, D)`` of a batch;
            default: the observations.
        max_active: largest number of active latents in a proposal.
        fit_steps: largest number of L-BFGS steps of a fit.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range.

    Reference:
        Shelton, Gasthaus, Dai, Lücke and Gretton, "GP-select: Accelerating EM using adaptive subspace preselection", Neural
        Computation 29 (2017), algorithm 1. Here the first selection already follows the marginals of the initial populations.
    """

    @names_arguments
    def __init__(
        self,
        num_selected: int,
        *,
        kernel: str | kernels.Kernel = "composition",
        refit_every: int = 10,
        rank: int | None = None,
        pivots: str = "variance",
        explore: float = 0.1,
        merge: bool = True,
        inputs: Tensor | Callable[[SearchBatch], Tensor] | None = None,
        max_active: int | None = None,
        fit_steps: int = 20,
        generator: torch.Generator | None = None,
    ) -> None:
        affinity = RegressionAffinity(
            kernel=kernel, refit_every=refit_every, rank=rank, pivots=pivots, inputs=inputs, fit_steps=fit_steps, generator=generator
        )
        super().__init__(affinity, num_selected, max_active=max_active, explore=explore, merge=merge, generator=generator)
        self.kernel, self.refit_every, self.rank, self.pivots = kernel, refit_every, rank, pivots
        self.inputs, self.fit_steps = inputs, fit_steps


def _fill(inputs: Tensor, centre: Tensor) -> Tensor:
    return torch.where(inputs.isnan(), centre, inputs)


class LearnedFlips(AffinitySearch):
    r"""Flips latents of good states where a regression predicts otherwise.

    It is for models with expensive scores.

    A Gaussian process predicts the posterior marginals :math:`p_{nh}` of every data point from its observation and
    the marginals of all *other* data points, as in :class:`GPSelect`. A child is a state of the population, drawn by
    its posterior weight, with a geometrically distributed number of flips. Flips are drawn without replacement in
    proportion to

    .. math:: \max(|p_{nh} - s_h|,\ 0.02).

    One of the children is drawn from the predicted marginals instead. Each child is one score. Where a score takes a
    millisecond or more (a renderer, a simulator, a network) this needs several times fewer of them than random flips.
    The gain grows with the data. Where scores are cheap, the regression takes longer than it saves. For binary
    latents.

    Example:
        >>> y = linear_bars(40, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, LearnedFlips(4), steps=5)

    Args:
        children: number of states proposed in a step.
        mean_flips: mean number of flips of a child, at least 1.
        kernel: ``"linear"``, ``"rbf"``, ``"composition"`` or a kernel of :mod:`pyro.contrib.gp.kernels`.
        refit_every: visits of a data point between two fits of the kernel's parameters.
        rank: rank of an incomplete Cholesky factor. Default: exact, for a few thousand data points.
        inputs: inputs of the regression, ``(N, D)`` for all data, or a function that makes ``(n, D)`` of a batch;
            default: the observations.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        ValueError: if an argument is out of range; when searching, if a latent has more than two values.
    """

    affinity: RegressionAffinity
    binary_only = True

    @names_arguments
    def __init__(
        self,
        children: int = 8,
        *,
        mean_flips: float = 1.5,
        kernel: str | kernels.Kernel = "rbf",
        refit_every: int = 5,
        rank: int | None = None,
        inputs: Tensor | Callable[[SearchBatch], Tensor] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        self.children = check_count("children", children)
        if not 1 <= mean_flips < math.inf:
            raise ValueError(f"mean_flips must be at least 1 and finite; got {mean_flips}")
        self.mean_flips = mean_flips
        self.generator = generator
        self.affinity = RegressionAffinity(kernel=kernel, refit_every=refit_every, rank=rank, inputs=inputs, generator=generator)
        self.kernel, self.refit_every, self.rank, self.inputs = kernel, refit_every, rank, inputs

    def propose(self, batch: SearchBatch) -> Population:
        """Children ``(N, children)``; repetitions are possible."""
        self.check_space(batch.space)
        prediction, parents = self.affinity(batch), draw_by_weight(batch, self.children, self.generator)
        # Every latent may be flipped, so that every state can be reached.
        disagreement = (prediction.unsqueeze(1) - batch.space.unpack(parents).double()).abs().clamp(min=0.02)
        children = parents ^ batch.space.pack(self._flips(batch, disagreement))
        # One is drawn from the predicted marginals.
        children[:, 0] = batch.space.pack((ops.uniform(shape=prediction.shape[1:], **batch.draws(self.generator)) < prediction).long())
        return batch.evaluate(children)

    def _flips(self, batch: SearchBatch, disagreement: Tensor) -> Tensor:
        """Draws flips ``(N, children, H)`` of up to eight latents, by disagreement."""
        draws, num_latents = batch.draws(self.generator), disagreement.shape[-1]
        # The largest of independently perturbed logarithms are a draw without replacement (Gumbel).
        noise = -ops.uniform(shape=(self.children, num_latents), **draws).double().clamp(min=1e-300).log()
        place = (disagreement.log() - noise.log()).topk(min(8, num_latents), -1).indices
        stay = torch.tensor(1 - 1 / self.mean_flips, dtype=torch.float64)
        number = ops.uniform(shape=(self.children, 1), **draws).double().clamp(min=1e-300).log() / stay.log()
        is_flipped = torch.arange(place.shape[-1], device=place.device) <= number
        return torch.zeros(disagreement.shape, dtype=torch.int64, device=place.device).scatter_(-1, place, is_flipped.long())
