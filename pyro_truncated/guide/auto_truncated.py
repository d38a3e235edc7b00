"""AutoTruncated: exact posteriors over discrete latents, renormalised on populations of states."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated.distributed.shards import find_part
from pyro_truncated.guide.averaging import average_over_draws, draw_batches, readable, rescore_over_draws
from pyro_truncated.guide.batch import Batch
from pyro_truncated.guide.chain_batch import ChainBatch, ChainProgramRun, ChainReadings
from pyro_truncated.guide.given_states import Init, old_layout
from pyro_truncated.guide.plates import plate_subsamples
from pyro_truncated.guide.product_batch import ProductBatch
from pyro_truncated.guide.product_posterior import NO_WHOLE_STATES, ProductPosterior, ProductProgramRun
from pyro_truncated.guide.product_store import ProductStore, count_saved_groups
from pyro_truncated.guide.program import ProgramRun, recorded_values
from pyro_truncated.guide.store import PopulationStore, populations_in
from pyro_truncated.guide.structure import plate_portion, refuse_other_structure, takes_arguments
from pyro_truncated.guide.truncated_posterior import TruncatedPosterior
from pyro_truncated.guide.whole_model import WholeModelGuide
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import Conditional
from pyro_truncated.program.chain_scorer import ChainLayout, ChainScorer
from pyro_truncated.program.inspection import ordinary_tensors, refuse_handlers_around
from pyro_truncated.program.log_joint import LogJoint
from pyro_truncated.program.product_scorer import ProductScorer
from pyro_truncated.program.subsampling import SparseSubsamples
from pyro_truncated.search.automatic import AutomaticSearch
from pyro_truncated.search.base import Search, check_search
from pyro_truncated.utils.arguments import Renamed, check_count
from pyro_truncated.utils.arrays import check_column_names
from pyro_truncated.utils.console import readable_count
from pyro_truncated.utils.parameter_store import PrefixStrippingModule, isolate, spare_random_numbers


class AutoTruncated(PrefixStrippingModule, WholeModelGuide):
    r"""Guide with the exact posterior over discrete latents, on few states.

    The posterior of a data point :math:`n` is restricted to a population :math:`K_n` of ``num_states`` states and renormalised:

    .. math:: q_n(s) = \frac{p(s, y_n)}{\sum_{s' \in K_n} p(s', y_n)} \quad (s \in K_n), \qquad
              \mathcal F = \sum_n \log \sum_{s \in K_n} p(s, y_n) \le \log p(y).

    Discrete latent sites may be Bernoulli, categorical, one-hot and count sites, vector-valued or not, in plates or outside of them.
    Other latents are left to other guides in an :class:`~pyro.infer.autoguide.AutoGuideList`, or to ``conditional``. Give this guide the
    *whole* model, not a blocked one.

    The stock :class:`~pyro.infer.TraceEnum_ELBO` returns :math:`-\mathcal F` with this guide. Populations are improved by
    :class:`~pyro_truncated.Truncated_ELBO` or :meth:`search_`.

    Example::

        guide = AutoTruncated(model, num_states=64)
        svi = SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO())
        svi.step(y)
        guide.marginals()["s"]  # posterior probability that each latent is on

    Args:
        model: a Pyro model; fast if it vectorises.
        num_states: states per data point, ``S``, or all there are. ``H`` binary latents in float32 take ``8 * ceil(H / 64) + 4`` bytes a
            state.
        conditional: called as ``conditional(states, *args, **kwargs)``; samples continuous latents given the states.
        init: initial states ``(N, S, *site shape)``, a dictionary of them by site name, or a callable. Default: sparse ones.
        max_count: largest value of count sites, one number or by site name.
        vectorize: whether states are scored together, in a new left-most dimension. Default: by trial.
        create_plates: as in Pyro's autoguides.
        memory_budget: bytes of temporaries. Default: 2**28, on CUDA an eighth of what is free.
        store: a folder, for populations in memory-mapped files.
        whole_states: whether a population holds whole states. By default each node of the factor graph has a set of ``num_states``
            states.

    Attributes:
        populations: the states of all data points.
        num_draws: draws of other latents that are averaged over.
        is_conditional_exact: whether draws of the conditional do not matter; ``None`` if unknown.

    Raises:
        ValueError: on the first call, if no site is discrete, a count has no bound, or initial states do not fit or repeat.
        NotImplementedError: on the first call, for a discrete site in a subsampled sequential plate, or one that some states lack.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        num_states: int = 64,
        *,
        conditional: Conditional | None = None,
        init: Init = None,
        max_count: int | Mapping[str, int] | None = None,
        vectorize: bool | None = None,
        create_plates: Callable[..., Any] | None = None,
        memory_budget: int | None = None,
        store: str | Path | None = None,
        whole_states: bool = False,
    ) -> None:
        options: dict[str, Any] = {"conditional": conditional, "max_count": max_count, "vectorize": vectorize}
        super().__init__(model, create_plates=create_plates, memory_budget=memory_budget, **options)
        # A store of whole states, or of the sets of all nodes.
        self.populations: Any = populations_in(store, check_count("num_states", num_states))
        self._init = init
        self.whole_states = whole_states
        self._last_call: Call | None = None
        # The subsamples of plates that it drew, or was given.
        self._last_rows: Mapping[str, Tensor] = {}

    @property
    def num_states(self) -> int:  # type: ignore[override]
        """States per data point, ``S``.

        From the first call on it is at most the number of states in the space.
        """
        return self.populations.num_states

    @property
    def words(self) -> Tensor:
        """The packed states of all data points, ``(N, S, num_words)``."""
        self._refuse_product()
        return self.populations.words

    @property
    def log_joint(self) -> Tensor:
        """The log joints ``(N, S)`` of all data points when last scored.

        They are NaN if never scored.
        """
        self._refuse_product()
        return self.populations.log_joint

    def population(self, indices: Tensor | None = None) -> Any:
        """Returns the stored populations of all or the given data points.

        Log joints are those of the last scoring.

        Where each node of the model's factor graph has a set of states, what is returned has no list of whole states.
        """
        return self._product_posterior(indices) if isinstance(self.populations, ProductStore) else self.populations.population(indices)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        self.populations.seed_()  # before the model draws as many numbers as it has data
        try:
            super()._setup_prototype(*args, **kwargs)
            with ordinary_tensors():
                portion = plate_portion(self.layout, (args, kwargs))
                if portion is not None and portion.is_part:
                    refuse_other_structure(self.product)
                if self.product is not None:
                    if isinstance(self.populations, PopulationStore):
                        seed, self.populations = self.populations.seed, self._product_store(len(self.product.groups))
                        self.populations.seed_(seed)
                    self.populations.start_(self.product, self._init, self._device, find_part(args, kwargs))
                    return
                if isinstance(self.populations, ProductStore):
                    raise ValueError(
                        "the saved populations are sets of states of the nodes of a factor graph; this guide keeps whole states. Load them "
                        "into a guide with the arguments of the one that was saved: without whole_states=True, and without a conditional"
                    )
                self.populations.start_(self.layout, self._init, self._device, portion)
        except BaseException:
            self._forget_model()
            raise

    @property
    def holds_whole_states(self) -> bool:  # type: ignore[override]
        """Whether populations of whole states have been loaded."""
        return isinstance(self.populations, PopulationStore) and self.populations.is_filled

    def _stored_sets(self) -> list[Tensor]:
        return [store.take().words for store in self.populations.stores]

    def _product_store(self, num_groups: int) -> ProductStore:
        return ProductStore(self.num_states, num_groups, getattr(self.populations, "folder", None))

    def mismatch(self, state_dict: Mapping[str, Any], prefix: str = "") -> str | None:
        """Returns why a state dict does not fit this guide.

        A guide that has not seen its model knows only part of the reasons.
        """
        return old_layout(state_dict, prefix) or self.populations.mismatch(state_dict, f"{prefix}populations.")

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        problem = old_layout(state_dict, prefix)
        if problem is not None:
            args[-1].append(problem)
            return
        groups = count_saved_groups(state_dict, f"{prefix}populations.")
        if groups and isinstance(self.populations, PopulationStore) and not self.populations.is_filled:
            self.populations = self._product_store(groups)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_init": None, "_last_call": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        duplicate = super().__deepcopy__(memo)
        duplicate._init, duplicate._last_call = self._init, self._last_call
        return duplicate

    def __repr__(self) -> str:
        if self.product is not None:
            lines = "".join(f"\n  {line}" for line in self.product.summary(self.num_states))
            return f"{type(self).__name__}(sets of num_states={self.num_states} for each node of the factor graph:{lines}\n)"
        if self.prototype_trace is None:
            return f"{type(self).__name__}(num_states={self.num_states}, not set up yet: call it, or svi.step, with the model's arguments)"
        layout, plates = self.layout, ", ".join(self.layout.plates)
        data = f"{layout.num_data} data points in {plates}" if plates else "one state of all data (no data plate)"
        states = f"{self.num_states} of {readable_count(layout.space.size)} states each"
        return f"{type(self).__name__}(sites: {', '.join(layout.sites)}; {data}; {states})"

    def make_batch(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the populations of the data points that a call selects.

        They come with a scorer of their states.

        The populations must be of these data, see :meth:`Batch.check`; plates of ``create_plates`` take fresh subsamples.
        """
        call, subsamples = Call(self.model, args, kwargs), {}
        if self.create_plates is not None:
            self.setup(*args, **kwargs)
            with poutine.block(), SparseSubsamples():
                subsamples = plate_subsamples(self._create_plates(*args, **kwargs))  # type: ignore[no-untyped-call]
        return self.batch(call, subsamples)

    def batch(self, call: Call, values: Mapping[str, Any] | None = None) -> Any:
        """Returns the batch of a call of the model, see :meth:`make_batch`.

        Other latents and subsamples of plates may be given by name.
        """
        scorer = self.scorer(call, values)
        batch = self._batch_of(scorer)
        batch.check()
        self._last_call, self._last_rows = call, scorer.subsamples
        return batch

    def _batch_of(self, scorer: LogJoint | ProductScorer | ChainScorer) -> Any:
        return _KINDS[type(scorer)](self.populations, scorer)

    def make_scorer(self, *args: Any, values: Mapping[str, Any] | None = None, **kwargs: Any) -> LogJoint:
        """The scorer of a batch, see :meth:`batch`."""
        return self.batch(Call(self.model, args, kwargs), values).scorer

    batch_of = Renamed("make_batch")
    siblings = Renamed("companions")
    log_joint_of = Renamed("make_scorer")

    def posterior(self, *args: Any, **kwargs: Any) -> Any:
        """Returns populations with log joints under the current model.

        They are those of the data points the model selects. Nothing is stored.
        """
        refuse_handlers_around()
        call = Call(self.model, args, kwargs)
        with torch.no_grad():
            batch = self.batch(call, ({} if self.prototype_trace is None else recorded_values(self)) or self.other_values(call))
            return rescore_over_draws(self, batch) if isinstance(batch, Batch) else _reader([batch])

    def rescore(self, log_joint: LogJoint | ProductScorer | ChainScorer) -> Any:
        """Returns a scorer's stored populations with log joints under it.

        Nothing is stored.
        """
        return self._batch_of(log_joint).rescore()

    rescored = Renamed("rescore")

    def search_(self, search: Search, log_joint: LogJoint | ProductScorer | ChainScorer, steps: int = 1) -> Any:
        """Improves a scorer's populations in place by search steps.

        It returns them with their log joints.
        """
        return self._batch_of(log_joint).search_(search, steps)

    @torch.no_grad()
    def refresh_(self, *args: Any, **kwargs: Any) -> Any:
        """Scores the stored states under the current model.

        They are those of the data points the model selects. The states stay.

        Beside other guides, or a conditional that is not exact, they are averages over :attr:`num_draws` draws.
        """
        refuse_handlers_around()
        self.setup(*args, **kwargs)
        call = Call(self.model, args, kwargs)
        if self.product is not None:
            self.batch(call, self.other_values(call)).rescore_()
            return self._product_posterior()
        population = average_over_draws(self, call)
        return self.batch(call).rescore_() if population is None else self.populations.store_averages_(population)

    def infer(
        self, data: Any, search: Search | None = None, steps: int = 10, *, num_states: int | None = None, init: Init = None, **kwargs: Any
    ) -> AutoTruncated:
        """Returns a guide for unseen data, under the current model.

        It has this guide's arguments. Neither the model nor this guide changes.

        From an :class:`~pyro.infer.autoguide.AutoGuideList` the new guide takes along the guides before this one, as they are and share
        their parameters. It samples the model's other latents from them, as the list does. So it
        stands for the whole trained guide in losses, ``Predictive``, ``check_truncation`` and
        ``to_arviz``. The search scores states given one draw of them. Of latents inside the data
        plate only guides that compute them from the model's arguments (amortised ones, functions
        for example) know anything.

        Example::

            new = guide_list[-1].infer(y_new)
            idata = to_arviz(model, new, y_new)

        Args:
            data: the model's positional arguments, one tensor or a tuple: the model must take all data points at once.
            search: fills the populations. Default: what :class:`~pyro_truncated.search.AutomaticSearch` chooses, as in training.
            steps: number of search steps.
            num_states: states per data point. Default: as in this guide.
            init: initial states, as for the constructor.
            **kwargs: the model's keyword arguments.

        Raises:
            TypeError: if ``search`` is no search.
            ValueError: if the model subsamples, or no guide in the list knows a latent of the new data, but for its prior.
        """
        refuse_handlers_around()
        check_column_names(self, "data", data)
        search = AutomaticSearch() if search is None else search
        check_search(search, "several arguments of the model go in as a tuple, guide.infer((x, y))")
        steps = check_count("steps", steps)
        # A named tuple is one argument.
        call = Call(self.model, data if type(data) is tuple else (data,), kwargs)
        size = self.num_states if num_states is None else num_states
        guide = AutoTruncated(self.model, size, init=init, whole_states=self.whole_states, **self.options)
        with torch.no_grad(), isolate():
            guide.setup(*call.args, **call.kwargs)
            guide.inherit(self.companions)
            values = guide.other_values(call)
            if self.conditional is None and (names := [name for name in guide.layout.other_latents if name not in values]):
                raise ValueError(
                    f"infer() could only draw the latents {names} from the prior: no guide covers them. Append their guide to an "
                    "AutoGuideList before AutoTruncated, or give AutoTruncated a conditional=... that samples them given the states."
                )
            guide.batch(call, values).search_(search, steps, is_new=True)
            # Averages over the draws of an approximate conditional replace log joints given one draw.
            if guide.conditional is not None and (population := average_over_draws(guide, call)) is not None:
                guide.populations.store_averages_(population)
        return guide

    def stored_posterior(self, indices: Tensor | None = None) -> Any:
        """Returns the posterior of all or the given data points.

        It is that of the populations when last scored, in training for example.

        An ELBO of Pyro's own stores no scores; after it, everything is scored under the model as it
        is now. Beside guides of other latents, and with a ``conditional`` that is not exact, the
        posterior of the states is another one for every draw. The result, here and of the methods
        below, is then the average over :attr:`num_draws` of them. The model and the arguments are
        those of its last call.
        """
        if isinstance(self.populations, ProductStore):
            return self._product_posterior(indices)
        return TruncatedPosterior(readable(self, indices, self._last_call), self.layout, self.layout.full_sizes)

    scored = Renamed("stored_posterior")

    def _product_posterior(self, indices: Tensor | None = None) -> ProductPosterior | ChainReadings:
        """Returns the posterior of all nodes' sets under the current model."""
        if indices is not None:
            raise NotImplementedError("indices needs populations of whole states; leave it out and index what is returned")
        if self._last_call is None:
            raise RuntimeError("the guide has not been used with its model yet; call guide.refresh_(*args) with the model's arguments")
        last_rows = self._last_rows
        with torch.no_grad(), spare_random_numbers():
            batches = list(draw_batches(self, self._last_call, self.other_values(self._last_call)))
        self._last_rows = last_rows
        self._refuse_drawn_rows(batches[0].scorer.subsamples)
        return _reader(batches)

    def _refuse_drawn_rows(self, subsamples: Mapping[str, Tensor]) -> None:
        """Checks that the model selects the data points of its last call."""
        for frame in (frame for site in self.layout.sites.values() for frame in site.frames):
            rows = subsamples.get(frame.name)
            if rows is not None and not torch.equal(rows, self._last_rows.get(frame.name, rows)):
                raise RuntimeError(
                    f"the model draws {len(rows)} of {frame.full_size} members of plate '{frame.name}' anew in every run. First call "
                    "guide.refresh_(*args) with arguments for which the model takes all data"
                )

    def _refuse_product(self) -> None:
        """Refuses to list whole states if each node has its own set."""
        if self.product is not None:
            raise NotImplementedError(NO_WHOLE_STATES)

    def weights(self, indices: Tensor | None = None) -> Tensor:
        """Posterior weights of the states, ``(N, S)``, see :meth:`stored_posterior`."""
        self._refuse_product()
        return self.stored_posterior(indices).population.weights()

    def states(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """Returns the populations as site values ``(N, S, *site shape)``.

        They are by site name, with nested plates in front of the event.
        """
        self._refuse_product()
        return self.layout.split(self.population(indices).states())

    def marginals(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """Returns marginals by site.

        For Boolean sites they are the probability of 1, ``(N, *site shape)``, for others that of
        each value, ``(..., V)``.

        Warns:
            UserWarning: where ``max_count`` cuts off a posterior, or data points depend on each other.
        """
        marginals: dict[str, Tensor] = self.stored_posterior(indices).marginals()
        for problem, advice in self.layout.find_problems(marginals, indices):
            warnings.warn(f"{problem} {advice}", stacklevel=2)
        return marginals

    def pairwise_marginals(self, first: str, second: str, indices: Tensor | None = None) -> Tensor:
        r"""Returns the joint marginals :math:`q(s_a = v, s_b = w)` of two discrete sites.

        Data points come first, then the other plates of the sites, which they share or not, then
        the entries of both events, then both values: ``(N, *plates, *event of first, *event of second, V, W)``.

        Example:
            >>> def model(y):
            ...     with pyro.plate("data", len(y)):
            ...         z = pyro.sample("z", dist.Categorical(torch.ones(3)))
            ...         s = pyro.sample("s", dist.Bernoulli(0.5))
            ...         pyro.sample("y", dist.Normal(z - s, 0.3), obs=y)
            >>> y = torch.randn(20)
            >>> guide = AutoTruncated(model, num_states=6)
            >>> loss = Truncated_ELBO(ExhaustiveSearch()).loss(model, guide, y)
            >>> guide.pairwise_marginals("z", "s").shape
            torch.Size([20, 3, 2])

        Args:
            first: name of a site.
            second: name of a site, which may be the same one: pairs of the entries of its event.
            indices: data points, as in :meth:`marginals`.

        Raises:
            ValueError: if there is no such site.
            NotImplementedError: where each node has its own set, for sites that no density joins; for more pairs than memory holds.
        """
        return self.stored_posterior(indices).pairwise_marginals(first, second)

    def mode(self, indices: Tensor | None = None) -> dict[str, Tensor]:
        """The most probable joint state by site, ``(N, *site shape)``.

        :meth:`median` has the shapes of the model's sites.
        """
        return self.stored_posterior(indices).mode()

    def expectation(self, f: Callable[[dict[str, Tensor]], Tensor], indices: Tensor | None = None) -> Tensor:
        """Returns a function's posterior expectation ``(N, ...)``.

        The function maps site values ``(N, S, *site shape)`` to ``(N, S, ...)``.
        """
        self._refuse_product()
        return self.stored_posterior(indices).expectation(f, self.memory_budget)

    def sample_posterior(
        self, num_samples: int, indices: Tensor | None = None, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Independent draws from the truncated posterior by site, ``(num_samples, N, *site shape)``."""
        return self.stored_posterior(indices).sample(num_samples, generator)

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns the most probable state, shaped as the model's sites.

        It replaces the median of a discrete posterior.

        Without the arguments that the model takes, those of all data points as they were last scored (in training, say).
        """
        return self._given_medians(Call(self.model, args, kwargs)).median()

    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Returns quantiles of all latents' marginals.

        See :meth:`TruncatedPosterior.quantiles`. Arguments are those of :meth:`median`.
        """
        return self._given_medians(Call(self.model, args, kwargs)).quantiles(quantiles)

    def _given_medians(self, call: Call) -> Any:
        """Returns it given the medians of other latents.

        Without the model's arguments, it is that of all data points when last scored.
        """
        has_arguments = bool(call.args or call.kwargs) or self.prototype_trace is None
        stores = self.populations.stores
        if not has_arguments and takes_arguments(self.model, otherwise=not any(bool(store.log_joint.isnan().any()) for store in stores)):
            return self.stored_posterior()
        refuse_handlers_around()
        with torch.no_grad():
            batch = self.batch(call, self.other_values(call, median=True))
            if not isinstance(batch, Batch):
                return _reader([batch])
            return TruncatedPosterior(rescore_over_draws(self, batch), self.layout, batch.scorer.sizes)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Samples the discrete sites (and what ``conditional`` samples).

        The arguments are those of the model.
        """
        self.setup(*args, **kwargs)
        if isinstance(self.product, ChainLayout):
            return ChainProgramRun(self, Call(self.model, args, kwargs)).sample()
        run = ProgramRun if self.product is None else ProductProgramRun
        return run(self, Call(self.model, args, kwargs)).sample()


_KINDS: dict[type, Callable[..., Any]] = {LogJoint: Batch, ProductScorer: ProductBatch, ChainScorer: ChainBatch}


def _reader(batches: list[Any]) -> ProductPosterior | ChainReadings:
    """What is read from batches of one kind."""
    return ChainReadings(batches) if isinstance(batches[0], ChainBatch) else ProductPosterior(batches)
