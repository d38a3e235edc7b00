"""Closed-form M-steps that plug into SVI where an optimiser goes."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from pyro.optim import PyroOptim
from torch import Tensor

from pyro_truncated.distributed import collectives
from pyro_truncated.ops import defer_checks
from pyro_truncated.states.population import Population
from pyro_truncated.utils.arguments import Renamed, check_kinds
from pyro_truncated.utils.console import ReprFromArguments
from pyro_truncated.utils.devices import module_device, to_device
from pyro_truncated.utils.parameter_store import load_snapshot, snapshot

Statistics = dict[str, Tensor]

# Who drives a model: SVI shows its optimiser to nobody, and the model is not changed to say it.
_drivers: weakref.WeakKeyDictionary[Any, weakref.ref[ClosedForm]] = weakref.WeakKeyDictionary()


@runtime_checkable
class ClosedFormModel(Protocol):
    """What a model offers to be trained by closed-form M-steps.

    ``sufficient_statistics`` is for the E-step, ``maximize`` for the M-step.

    Example:
        >>> isinstance(BinarySparseCoding(16, 8), ClosedFormModel), isinstance(torch.nn.Linear(2, 1), ClosedFormModel)
        (True, False)
    """

    def sufficient_statistics(self, population: Population, *args: Any, temperature: float = 1.0, **kwargs: Any) -> Statistics:
        """Expected sufficient statistics, summed over the population's data points, in float64.

        Args:
            population: truncated posteriors. Its ``indices`` select the data points among all data.
            *args: the model's own arguments, with all data. Subsampling plays no role.
            temperature: of the posteriors over the discrete latents.
            **kwargs: the model's own keyword arguments.

        Returns:
            Sums by name, which are added over data points and scaled.
        """

    def maximize(self, statistics: Statistics) -> None:
        """Sets the parameters to the maximiser of the expected log joint."""


def default_step_size(step: int) -> float:
    """Step size of online EM, :math:`(t + 2)^{-0.6}`."""
    return float((step + 2) ** -0.6)


class ClosedForm(ReprFromArguments, PyroOptim):
    r"""An "optimiser" for models with a closed-form M-step: ``SVI(model, guide, ClosedForm(model), Truncated_ELBO(search))``.

    Every step of :class:`~pyro.infer.SVI` is then one iteration of (truncated) EM. With the full batch the free energy never decreases. On
    minibatches the sufficient statistics :math:`T` are streamed:

    * ``"incremental"``: :math:`T \leftarrow T + \hat T_{\text{new}} - \hat T_{\text{old}}` over the minibatch's data points (Neal & Hinton
      1998), the old contribution from the stored populations. The free energy of all data visited so far never decreases. A model with
      ``expected_statistics()`` counts data points that have not been visited by these; else the first minibatch replaces all that a model
      knew. Not for models whose statistics depend on the parameters, and not while a temperature changes.

    * ``"online"``: :math:`T \leftarrow (1 - \rho_t) T + \rho_t \hat T_{\text{new}} N / |\text{batch}|` (Cappé & Moulines 2009), which
      forgets the start.

    Several processes (see :func:`pyro_truncated.distributed.shard`) add up the changes of the statistics, one message per step. The model
    is trained this way as long as the object exists (SVI holds it) and is not released.

    Example:
        >>> y = linear_bars(50, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> svi = SVI(model, AutoTruncated(model, num_states=32), ClosedForm(model), Truncated_ELBO())
        >>> losses = [svi.step(y) for _ in range(5)]
        >>> losses[-1] < losses[0]
        True

    Args:
        model: has ``sufficient_statistics`` and ``maximize``, see :class:`ClosedFormModel`; an attribute ``statistics_depend_on_parameters
            = True`` says that incremental streaming is not exact for it.
        minibatch: ``"incremental"`` or ``"online"``. Default: incremental where it is exact.
        step_size: :math:`\rho_t` as a function of the step ``t = 0, 1, ...``; default :math:`(t + 2)^{-0.6}`.

    Raises:
        TypeError: if the model lacks one of the two methods.
        ValueError: for an unknown ``minibatch``, or an incremental one where it is not exact.
    """

    def __init__(self, model: Any, *, minibatch: str | None = None, step_size: Callable[[int], float] | None = None) -> None:
        check_kinds(ClosedForm.__init__, step_size=step_size)
        is_closed_form: bool = isinstance(model, ClosedFormModel)
        if not is_closed_form:
            raise TypeError(
                f"ClosedForm needs a model with the methods sufficient_statistics and maximize; {type(model).__name__} lacks one of them"
            )
        dependent = getattr(model, "statistics_depend_on_parameters", False)
        if minibatch is None:
            minibatch = "online" if dependent else "incremental"
        if minibatch not in ("incremental", "online"):
            raise ValueError(f"minibatch must be 'incremental' or 'online'; got {minibatch!r}")
        if minibatch == "incremental" and dependent:
            raise ValueError(
                f"minibatch='incremental' is not exact for {type(model).__name__}: its statistics depend on the parameters. "
                "Use minibatch='online'."
            )
        self.model: Any = model
        self.minibatch = minibatch
        self.step_size = step_size or default_step_size
        self.statistics: Statistics | None = None
        self.visited: Tensor | None = None
        self.expected: Statistics | None = None
        self.num_steps = 0
        self._pending = False
        self.drive()

    @staticmethod
    def find(model: Any) -> ClosedForm | None:
        """Returns the object that trains a model: the last one not released."""
        try:
            driver = _drivers.get(model)
        except TypeError:  # a program that cannot be looked up is not the model of any
            return None
        return None if driver is None else driver()

    driving = Renamed("find")

    def drive(self) -> None:
        """Takes the training of the model over, as a new object does."""
        _drivers[self.model] = weakref.ref(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # A shallow copy leaves the model to the one that trains it.
        if "model" in state and ClosedForm.find(self.model) is None:
            self.drive()

    def previous(self, population: Population, indices: Tensor | None) -> Population | None:
        """Selects data points whose old contribution must be taken out first."""
        if self.minibatch == "online" or self.statistics is None or indices is None or self.visited is None:
            return None
        visited = self.visited[indices.cpu()].nonzero().squeeze(-1)
        if len(visited) == len(indices) > 0:
            return population
        visited = visited.to(population.words.device, non_blocking=True)
        where = None if population.indices is None else population.indices[visited]
        return Population(population.space, population.words[visited], population.log_joint[visited], where) if len(visited) else None

    def collect(
        self,
        new: Statistics,
        old: Statistics | None,
        indices: Tensor | None,
        num_data: int,
        *,
        scale: float | None = None,
        is_part: bool = False,
    ) -> None:
        """Takes in the statistics of a batch.

        Args:
            new: statistics of the batch.
            old: statistics of the part of it given by :meth:`previous`, as of last time.
            indices: the batch's data points, ``None`` for all.
            num_data: number of data points in all, of this process.
            scale: data points that each one of the batch stands for in online streaming. Default: all divided by the batch.
            is_part: whether other processes collect those of other data points, which are added.

        Raises:
            RuntimeError: if the statistics of the last step were never used, because another optimiser is driving SVI.
            ValueError: if a minibatch for incremental streaming holds a data point twice: its old contribution is there only once.
        """
        if self._pending:
            raise RuntimeError(
                "statistics for a closed-form M-step were collected but not used: SVI is being driven by another optimiser. "
                "Pass the ClosedForm object to SVI, or call ClosedForm.release() to train the model by gradients."
            )
        if indices is not None and self.minibatch == "incremental" and len(indices.unique()) < len(indices):
            raise ValueError(
                f"a data point occurs twice in the minibatch; got {len(indices)} positions, {len(indices.unique())} of them distinct. "
                "Draw without replacement, or use minibatch='online'"
            )
        self._pending = True
        total = sum_over_processes if is_part else dict
        if indices is None:
            self.statistics = total(new)
        elif self.minibatch == "online":
            self._blend(total(new), num_data / len(indices) if scale is None else scale)
        else:
            change = new if old is None else {name: value - old[name] for name, value in new.items()}
            change, before = total(self._replace_expected_statistics(change, indices, num_data)), self.statistics
            self.statistics = change if before is None else {name: before[name] + value for name, value in change.items()}
        if self.minibatch == "incremental":
            if self.visited is None:
                self.visited = torch.zeros(num_data, dtype=torch.bool)
            self.visited[slice(None) if indices is None else indices.cpu()] = True

    def renew(self, statistics: Statistics, *, is_part: bool) -> None:
        """Replaces the streamed statistics by those of changed populations."""
        assert self.visited is not None
        total = _add_expected(statistics, self.expected, int((~self.visited).sum()))
        self.statistics = sum_over_processes(total) if is_part else total

    def _replace_expected_statistics(self, change: Statistics, indices: Tensor, num_data: int) -> Statistics:
        """Returns the change where visited data points replace expected ones."""
        is_beginning = self.statistics is None
        if is_beginning and hasattr(self.model, "expected_statistics"):
            self.expected = self.model.expected_statistics()
        visited = 0 if self.visited is None or self.expected is None else int(self.visited[indices.cpu()].sum())
        return _add_expected(change, self.expected, (num_data if is_beginning else 0) + visited - len(indices))

    def _blend(self, new: Statistics, scale: float) -> None:
        rate = 1.0 if self.statistics is None else self.step_size(self.num_steps)
        old = self.statistics or {}
        self.statistics = {name: rate * scale * value + ((1 - rate) * old[name] if old else 0.0) for name, value in new.items()}

    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """The M-step; called by SVI in the place of a gradient step."""
        if not self._pending or self.statistics is None:
            raise RuntimeError("ClosedForm has no statistics to use; train with SVI and a Truncated_ELBO on the very model it was made for")
        self._pending = False
        self.num_steps += 1
        with torch.no_grad(), _restore_on_error(self.model):
            self.model.maximize(self.statistics)

    def release(self) -> None:
        """Gives the model back to gradient training."""
        self._pending = False
        if ClosedForm.find(self.model) is self:
            del _drivers[self.model]

    def get_state(self) -> dict[str, Any]:
        """Returns statistics, visited data points and steps, for a checkpoint."""
        names = ("statistics", "visited", "expected", "num_steps")
        return copy.deepcopy({name: getattr(self, name) for name in names})

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Restores statistics and visits that :meth:`get_state` returned.

        Tensors go to the model's device.
        """
        state_dict = copy.deepcopy(state_dict)
        # Files are read onto the CPU, whatever they were saved from.
        device = module_device(self.model)
        self.statistics, self.expected = (to_device(one, device) for one in (state_dict["statistics"], state_dict.get("expected")))
        self.visited = state_dict["visited"]
        self.num_steps = state_dict["num_steps"]
        self._pending = False


@contextlib.contextmanager
def restore_driver(model: Any) -> Iterator[None]:
    """Hands a model back to who trained it before."""
    driver = ClosedForm.find(model)
    try:
        yield
    finally:
        if driver is not None:
            driver.drive()


@contextlib.contextmanager
def _restore_on_error(model: Any) -> Iterator[None]:
    """A context that restores a model's parameters after an error."""
    parameters = list(model.parameters()) if isinstance(model, torch.nn.Module) else []
    before = snapshot(parameters)
    try:
        with defer_checks():
            yield
    except BaseException:
        load_snapshot(parameters, before)
        raise


def _add_expected(statistics: Statistics, expectation: Statistics | None, times: int) -> Statistics:
    """With so many data points more that are as expected."""
    return (
        statistics if expectation is None or not times else {name: value + times * expectation[name] for name, value in statistics.items()}
    )


def sum_over_processes(statistics: Statistics) -> Statistics:
    """The sums over all processes."""
    names = sorted(statistics)
    return dict(zip(names, collectives.add([statistics[name] for name in names]), strict=True))
