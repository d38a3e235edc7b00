"""EM with continuous latents that Gibbs sweeps draw given a state."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Protocol, runtime_checkable

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import ELBO
from pyro.infer.enum import get_importance_trace
from pyro.nn import PyroModule
from pyro.util import warn_if_nan
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.distributed.launch import start_as_first
from pyro_truncated.distributed.shards import (
    find_part,
    find_portion,
    global_positions,
    propagate_shard_errors,
    shard_sum,
    synchronize_generator,
    total_rows,
)
from pyro_truncated.em.closed_form import ClosedForm, Statistics
from pyro_truncated.ops import defer_checks, draw_seed, lazy_values
from pyro_truncated.search.base import SearchBatch
from pyro_truncated.search.preselection import Preselection
from pyro_truncated.states.population import Population
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.annealing import Temperature, temperature_at
from pyro_truncated.utils.arguments import Renamed, check_count, describe, names_arguments, renames
from pyro_truncated.utils.arrays import check_column_names
from pyro_truncated.utils.devices import module_device
from pyro_truncated.utils.parameter_store import spare_random_numbers
from pyro_truncated.utils.references import Reference


@dataclasses.dataclass(frozen=True)
class GibbsDraws:
    """Draws of selected latents' coefficients for ``n`` data points.

    Example:
        >>> draws = GibbsDraws(torch.tensor([[0, 3]]), torch.ones(1, 5, 2), torch.tensor([[1.0, 0.8]]))
        >>> draws.spread(4)[0, 0]
        tensor([1., 0., 0., 1.])

    Attributes:
        selected: selected latents, ``(n, K)`` int64.
        coefficients: ``(n, S, K)``. Zero where a latent is off.
        probabilities: mean over the draws of the exact conditional probabilities that the selected latents are on, ``(n, K)``.
        indices: positions ``(n,)`` of the data points in the full data set, or ``None`` if these are all data in order.
    """

    selected: Tensor
    coefficients: Tensor
    probabilities: Tensor
    indices: Tensor | None = None

    def spread(self, num_latents: int) -> Tensor:
        """Coefficients of all latents, ``(n, S, H)``."""
        n, num_draws, _ = self.coefficients.shape
        selected = self.selected.unsqueeze(1).expand_as(self.coefficients)
        return self.coefficients.new_zeros(n, num_draws, num_latents).scatter_(2, selected, self.coefficients)


@runtime_checkable
class GibbsModel(Protocol):
    """A model of ``y (N, D)``, with ``num_latents`` and ``unit``, for :class:`~pyro_truncated.GibbsEM`.

    Example:
        >>> isinstance(MaxSpikeSlabSparseCoding(9, 6), GibbsModel)
        True
    """

    # No attributes: of a module's parameters and buffers ``isinstance`` knows nothing from Python 3.12 on.
    def gibbs(
        self,
        y: Tensor,
        selected: Tensor,
        coefficients: Tensor,
        *,
        burn_in: int,
        sweeps: int,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Draws ``(n, sweeps, K)`` for latents ``(n, K)``, and their probabilities.

        ``rows (n,)`` are the positions of the data points among all, by which processes draw alike.
        """

    def singletons(self, y: Tensor) -> Tensor:
        """Log joint of no and of each single active latent, ``(n, 1 + H)``."""

    def site_values(self, coefficients: Tensor) -> dict[str, Tensor]:
        """Values of the model's latent sites for coefficients ``(*batch, H)``."""

    def expected_log_joint(self, draws: GibbsDraws, y: Tensor) -> Tensor:
        """Log joint averaged over the draws, summed over the data points."""

    def sufficient_statistics(self, draws: GibbsDraws, y: Tensor) -> Statistics:
        """Returns what ``maximize`` needs of data ``(N, D)`` and draws."""

    def maximize(self, statistics: Statistics) -> None:
        """Sets the parameters to their maximum given the statistics."""


class GibbsGuide(PyroModule):
    """Posterior draws of selected latents per data point, kept between steps.

    Chains continue where they stopped. Coefficients of latents that lose their selection become zero. Train it with
    :class:`~pyro_truncated.GibbsEM`. As a Pyro program it sets the model's latent sites to one of the draws, chosen at random for each data
    point.

    Example:
        >>> y = linear_bars(30, 4, mean_active=2.0).data.clamp(min=0)
        >>> model = MaxSpikeSlabSparseCoding(16, 8).initialize(y)
        >>> guide = GibbsGuide(model)
        >>> loss = SVI(model, guide, ClosedForm(model), GibbsEM(GPSelect(3))).step(y)
        >>> guide.marginals().shape
        torch.Size([30, 8])

    Args:
        model: a model with a Gibbs sampler, such as :class:`~pyro_truncated.models.MaxSpikeSlabSparseCoding`.

    Attributes:
        selected: selected latents of all data points, ``(N, K)``; present after the first step, as what follows.
        coefficients: draws of their coefficients, ``(N, S, K)`` in float64.
        probabilities: posterior probabilities that the latents are active, ``(N, H)`` in float64: means of exact conditional probabilities
            over the sweeps. Zero for latents that were not selected. Random numbers before a data point's first step.
        unit: the unit that the coefficients were drawn in, see the model's. Zero before a data point's first step.

        ROWS: names of buffers with a row per data point, which checkpoints of several processes keep apart.

    Raises:
        TypeError: if the model lacks what the sampler needs.
    """

    ROWS: ClassVar[tuple[str, ...]] = ("selected", "coefficients", "probabilities", "unit")

    selected: Tensor
    coefficients: Tensor
    probabilities: Tensor
    unit: Tensor

    @names_arguments
    def __init__(self, model: Any) -> None:
        super().__init__()
        is_able: bool = isinstance(model, GibbsModel)
        if not is_able:
            raise TypeError(f"GibbsGuide needs a model with a Gibbs sampler, such as MaxSpikeSlabSparseCoding; got {type(model).__name__}")
        # Not a submodule: the parameters belong to the model.
        self._model: tuple[Any] = (model,)
        self._space = StateSpace([2] * model.num_latents)

    @property
    def model(self) -> Any:
        """The model whose posterior the sampler draws from."""
        return self._model[0]

    def __deepcopy__(self, memo: dict[int, Any]) -> GibbsGuide:
        # A model that was copied before goes with the copy, else it is the same.
        duplicate = self.__class__.__new__(self.__class__)
        memo[id(self)] = duplicate
        model = memo.get(id(self.model), self.model)
        vars(duplicate).update(copy.deepcopy({**vars(self), "_model": ()}, memo), _model=(model,))
        return duplicate

    def marginals(self, indices: Tensor | None = None) -> Tensor:
        """Returns posterior probabilities that latents are active, ``(N, H)``."""
        self._check_has_draws()
        return self.probabilities if indices is None else self.probabilities[indices]

    def draws(self, indices: Tensor | None = None) -> GibbsDraws:
        """Returns the draws in the present units of the model."""
        self._check_has_draws()
        rows = slice(None) if indices is None else indices
        # The buffers change at the next step.
        selected = self.selected[rows].clone()
        return GibbsDraws(selected, self._in_units(rows), self.probabilities[rows].gather(1, selected), indices)

    @torch.no_grad()
    def update_(
        self,
        search: Preselection,
        y: Tensor,
        indices: Tensor | None = None,
        *,
        sweeps: int = 3,
        burn_in: int = 2,
        temperature: float = 1.0,
        is_new: bool = False,
        generator: torch.Generator | None = None,
    ) -> GibbsDraws:
        """Selects latents, continues the chains over these, and keeps the draws.

        Args:
            search: selects the latents.
            y: all data, ``(N, D)``.
            indices: the data points ``(n,)`` to work on. Default: all.
            sweeps: sweeps kept as draws.
            burn_in: sweeps before them.
            temperature: factor on the variance of the noise.
            is_new: whether the data are new, so that an affinity which learns from data shall not learn from them.
            generator: source of randomness.

        Returns:
            The draws.

        Raises:
            ValueError: if the guide belongs to other data, or a part of the data has another number of draws or latents.
        """
        _check_selects(search)
        self._prepare(y, search.num_selected, sweeps, is_whole=indices is None, generator=generator)
        rows = slice(None) if indices is None else indices
        batch = self._batch(y, rows, indices, is_new)
        if search.learns and find_portion(y) is not None:
            search.meet(batch)
            batch = dataclasses.replace(batch, is_met=True)
        selected = search.select(batch)
        last = GibbsDraws(self.selected[rows], self._in_units(rows)[:, -1:], self.probabilities[rows]).spread(self.model.num_latents)
        arguments: dict[str, Any] = {"burn_in": burn_in, "sweeps": sweeps, "temperature": temperature, "generator": generator}
        coefficients, chances = last.new_zeros(0, sweeps, search.num_selected), last.new_zeros(0, search.num_selected)
        # Of a minibatch of several processes, this one may have no data point.
        if len(selected):
            coefficients, chances = self.model.gibbs(y[rows], selected, last.squeeze(1), rows=batch.positions, **arguments)
        is_finite = coefficients.isfinite().all() & chances.isfinite().all()
        ops.raise_if(
            ~is_finite, lambda: f"Gibbs draws must be finite; got {describe(coefficients)}. Check the model's parameters and the data"
        )
        ops.on_success(lambda: self._keep_(rows, selected, coefficients, chances))
        return GibbsDraws(selected, coefficients, chances, indices)

    def _keep_(self, rows: slice | Tensor, selected: Tensor, coefficients: Tensor, chances: Tensor) -> None:
        self.unit[rows] = self.model.unit
        self.selected[rows], self.coefficients[rows] = selected, coefficients
        self.probabilities[rows] = torch.zeros_like(self.probabilities[rows]).scatter_(1, selected, chances.to(self.probabilities))

    def infer(self, y: Tensor, search: Preselection, steps: int = 10, **kwargs: Any) -> GibbsGuide:
        """Returns a guide for unseen data ``(N, D)``; ``kwargs`` as for :meth:`update_`."""
        check_column_names(self, "y", y)
        guide = GibbsGuide(self.model)
        for _ in range(steps):
            guide.update_(search, y, is_new=True, **kwargs)
        return guide

    def forward(self, y: Tensor, batch_size: int | None = None, num_data: int | None = None) -> dict[str, Tensor]:
        """Sets the model's latent sites to draws; takes the model's arguments."""
        self._check_has_draws()
        with pyro.plate("data", len(self.coefficients), subsample_size=batch_size) as index:
            draws = self.draws(index).spread(self.model.num_latents)
            draw = torch.randint(draws.shape[1], (len(draws),), device=draws.device)
            values = self.model.site_values(draws[torch.arange(len(draws), device=draws.device), draw])
            return {name: pyro.sample(name, dist.Delta(value, event_dim=1)) for name, value in values.items()}

    def _in_units(self, rows: slice | Tensor) -> Tensor:
        """Coefficients ``(n, S, K)`` in the units of the model as it is now."""
        factor = (self.model.unit / self.unit[rows]).nan_to_num(posinf=0.0).expand(-1, self.model.num_latents)
        coefficients: Tensor = self.coefficients[rows] * factor.gather(1, self.selected[rows]).unsqueeze(1)
        return coefficients

    def _batch(self, y: Tensor, rows: slice | Tensor, indices: Tensor | None, is_new: bool) -> SearchBatch:
        portion = find_portion(y)
        words = self._space.pack((self.probabilities[rows] > 0.5).long()).unsqueeze(1)
        population = Population(self._space, words, torch.zeros(words.shape[:2], dtype=torch.float64, device=words.device), indices)
        return SearchBatch(
            population,
            functools.partial(_singleton_scores, self.model, y[rows], self._space),
            {"y": y[rows]},
            self.probabilities[rows].clone(),
            is_new,
            first_position=0 if portion is None else portion.first,
            is_spread=find_part(y) is not None,
        )

    def _prepare(self, y: Tensor, num_selected: int, num_draws: int, is_whole: bool, generator: torch.Generator | None) -> None:
        size, started = len(y), "selected" in self._buffers
        if started and len(self.selected) != size:
            raise ValueError(f"the guide holds chains of {len(self.selected)} data points, the data have {size}; use guide.infer(new_data)")
        shape = (size, num_draws, num_selected)
        if started and self.coefficients.shape == shape:
            return
        if started and not is_whole:
            raise ValueError(
                f"a minibatch must have the guide's {self.coefficients.shape[1]} draws of {self.coefficients.shape[2]} latents; "
                f"got {num_draws} draws of {num_selected}"
            )
        num_latents, device = self.model.num_latents, y.device
        if num_selected > num_latents:
            raise ValueError(f"num_selected must be at most the number of latents, {num_latents}: cannot select {num_selected}")
        options: dict[str, Any] = {"dtype": torch.float64, "device": device}
        if started:
            draws = GibbsDraws(self.selected, self.coefficients[:, -1:], self.probabilities).spread(num_latents).squeeze(1)
            selected = draws.abs().topk(num_selected, 1).indices
            coefficients = draws.gather(1, selected).unsqueeze(1).repeat(1, num_draws, 1)
        else:
            selected = torch.arange(num_selected, device=device).repeat(size, 1)
            coefficients = torch.zeros(shape, **options)
            start = ops.uniform(global_positions(y).to(device), (num_latents,), generator=generator)
            self.register_buffer("probabilities", start)
            self.register_buffer("unit", torch.zeros_like(self.model.unit, **options).repeat(size, 1))
        self.register_buffer("selected", selected)
        self.register_buffer("coefficients", coefficients)

    def _check_has_draws(self) -> None:
        if "selected" not in self._buffers:
            raise RuntimeError("the guide has no draws yet; train it with SVI and a GibbsEM, or call guide.update_(search, y)")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        # A fresh guide has no buffers yet: make them in the shapes that come in.
        for name in self.ROWS:
            value, buffer = state_dict.get(prefix + name), self._buffers.get(name)
            if value is not None and (buffer is None or buffer.shape != value.shape):
                self.register_buffer(name, torch.empty_like(value, device=module_device(self.model)))
        super()._load_from_state_dict(state_dict, prefix, *args)


def _singleton_scores(model: Any, y: Tensor, space: StateSpace, words: Tensor) -> Tensor:
    """Log joints ``(n, C)`` of states with at most one active latent."""
    if not len(words):
        return torch.zeros(words.shape[:2], dtype=torch.float64, device=words.device)

    def complain() -> None:
        raise NotImplementedError(f"{type(model).__name__} scores only states with at most one active latent")

    states = space.unpack(words)
    ops.raise_if((states.sum(-1, dtype=torch.int64) > 1).any(), complain)
    # Position 0 is the state without any.
    numbers = torch.arange(1, states.shape[-1] + 1, device=states.device)
    return model.singletons(y).gather(1, (states.long() * numbers).sum(-1))


def _check_selects(search: Any) -> None:
    if not isinstance(search, Preselection):
        raise TypeError(f"search must select latents: a Preselection, such as GPSelect(5); got {type(search).__name__}")


class GibbsEM(ELBO):
    r"""Monte Carlo EM: ``SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(search))``.

    Every step of :class:`~pyro.infer.SVI` selects :math:`H'` latents of each data point, continues its Gibbs chain over these, and takes
    the M-step of the draws. The selection is that of a :class:`~pyro_truncated.Preselection`, or a :class:`~pyro_truncated.GPSelect`, which
    starts from random latents. Data points that a guide meets for the first time take some E-steps alone, as chains start anywhere. The
    loss is minus the log joint of data and draws, averaged over the draws, before the M-step: noisy and no bound.

    Data may be shared out to several processes (:func:`pyro_truncated.distributed.shard`).

    Example:
        >>> y = linear_bars(30, 4, mean_active=2.0).data.clamp(min=0)
        >>> model = MaxSpikeSlabSparseCoding(16, 8).initialize(y)
        >>> svi = SVI(model, GibbsGuide(model), ClosedForm(model), GibbsEM(GPSelect(3), sweeps=2))
        >>> losses = [svi.step(y) for _ in range(2)]

    Args:
        search: selects the latents. Its proposals are not used.
        sweeps: sweeps whose outcomes are kept as draws.
        burn_in: sweeps before them.
        warm_up: E-steps that chains take before the first one with an M-step; 0 where a model begins with random parameters.
        temperature: factor :math:`\ge 1` on the variance of the noise in the E-step, a number or a function of the step ``t = 0, 1, ...``.
        batch_size: data points per step, drawn without replacement. Default: all.
        generator: source of randomness. Default: torch's global generator.

    Raises:
        TypeError: if the search does not select latents.
        ValueError: if a number is out of range.

    Reference:
        Shelton, Bornschein, Sheikh, Berkes and Lücke, "Select and Sample - A Model of Efficient Neural Inference and Learning", NIPS 2011.
    """

    settling = Renamed("warm_up")

    @renames(settling="warm_up")
    def __init__(
        self,
        search: Preselection,
        *,
        sweeps: int = 3,
        burn_in: int = 2,
        warm_up: int = 10,
        temperature: Temperature = 1.0,
        batch_size: int | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        _check_selects(search)
        sweeps, burn_in, warm_up = check_count("sweeps", sweeps), check_count("burn_in", burn_in, 0), check_count("warm_up", warm_up, 0)
        batch_size = None if batch_size is None else check_count("batch_size", batch_size)
        super().__init__()  # type: ignore[no-untyped-call]
        self.search = search
        self.sweeps = sweeps
        self.burn_in = burn_in
        self.warm_up = warm_up
        self.temperature = temperature
        self.batch_size = batch_size
        self.generator = generator
        self.num_steps = 0
        self._known_guide: Reference[GibbsGuide] = Reference()
        self._warm_guide: Reference[GibbsGuide] = Reference()

    def loss(self, model: Any, guide: Any, y: Tensor, *args: Any, **kwargs: Any) -> float:
        """Returns minus the mean log joint of the present draws."""
        return -float(shard_sum(y)([model.expected_log_joint(_check(guide, model).draws(), y)])[0])

    def loss_and_grads(self, model: Any, guide: Any, y: Tensor, *args: Any, **kwargs: Any) -> float:
        """Takes an E-step and an M-step; returns the loss.

        Raises:
            TypeError: if no :class:`~pyro_truncated.ClosedForm` drives the model.
        """
        closed_form = ClosedForm.find(model)
        if closed_form is None:
            raise TypeError("GibbsEM needs ClosedForm(model) as the optimiser; to train by gradients use an AutoTruncated guide")
        with propagate_shard_errors(y):
            is_part = find_part(y) is not None
            if is_part and self._known_guide.value is not guide:
                start_as_first(model, guide, self.search)
                synchronize_generator(self.generator)
            self._known_guide = Reference(_check(guide, model))
            indices, scale = self._subsample(y)
            self._warm_up(guide, y, indices)
            with defer_checks():
                draws = self._update(guide, y, indices)
                # A model that looks at its statistics brings it along.
                values = lazy_values(shard_sum(y)([model.expected_log_joint(draws, y)])[0])
                statistics = model.sufficient_statistics(draws, y)
                loss = -values()[0] * scale
            self.num_steps += 1
            warn_if_nan(loss, "loss")  # type: ignore[call-overload]
            closed_form.collect(statistics, None, indices, len(y), scale=scale, is_part=is_part)
            return loss

    def _update(self, guide: GibbsGuide, y: Tensor, indices: Tensor | None) -> GibbsDraws:
        temperature = temperature_at(self.temperature, self.num_steps)
        budget: dict[str, Any] = {"sweeps": self.sweeps, "burn_in": self.burn_in, "temperature": temperature}
        with _draw_key(self.generator) if find_portion(y) is not None else nullcontext(self.generator) as generator:
            return guide.update_(self.search, y, indices, generator=generator, **budget)

    def _warm_up(self, guide: GibbsGuide, y: Tensor, indices: Tensor | None) -> None:
        """Lets chains that have not begun come to the parameters."""
        if self._warm_guide.value is guide:
            return
        is_known = hasattr(guide, "unit") and len(guide.unit) == len(y)
        new = guide.unit[:, 0] == 0 if is_known else torch.ones(len(y), dtype=torch.bool, device=y.device)
        selected = new if indices is None else new[indices]
        # Processes take as many steps, those too whose chains have all begun.
        num_new, num_given = (int(value) for value in shard_sum(y)([new.sum(), selected.sum()]))
        rows = selected.nonzero().squeeze(-1) if indices is None else indices[selected]
        for _ in range(self.warm_up if num_given else 0):
            self._update(guide, y, None if len(rows) == len(y) else rows)
        if num_new == num_given:
            self._warm_guide = Reference(guide)

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return get_importance_trace("flat", math.inf, model, guide, args, kwargs)

    def _subsample(self, y: Tensor) -> tuple[Tensor | None, float]:
        """This process's part of a minibatch, and what each point stands for."""
        total = total_rows(y)
        if self.batch_size is None or self.batch_size >= total:
            return None, 1.0
        device = None if self.generator is None else self.generator.device
        index = torch.randperm(total, generator=self.generator, device=device)[: self.batch_size].sort().values.to(y.device)
        first = int(global_positions(y)[0])
        return index[(index >= first) & (index < first + len(y))] - first, total / self.batch_size


@contextmanager
def _draw_key(generator: torch.Generator | None) -> Iterator[None]:
    """Takes one random number on every process, whatever they draw next."""
    seed = draw_seed(generator)
    with spare_random_numbers():
        torch.manual_seed(seed)
        yield


def _check(guide: Any, model: Any) -> GibbsGuide:
    if not isinstance(guide, GibbsGuide) or guide.model is not model:
        raise TypeError(f"GibbsEM trains a GibbsGuide of the very model it was made for; got {type(guide).__name__}")
    return guide
