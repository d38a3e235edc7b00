"""Sparse coding as a transformer."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, Self

import numpy as np
import torch
from pyro.infer import SVI
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from pyro_truncated.em.closed_form import ClosedForm
from pyro_truncated.models import BinarySparseCoding, NoisyOr, SpikeSlabSparseCoding
from pyro_truncated.models.gaussians import add_statistics
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.multi_start import learn
from pyro_truncated.search.evolutionary import EvolutionarySearch
from pyro_truncated.sklearn.estimators import ColumnUnits, binary_posteriors, isolated_state, validated_codes, validated_data
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.loop import fit
from pyro_truncated.utils.arguments import check_count, check_counts, check_kinds
from pyro_truncated.utils.arrays import warn_about_constants

_FAMILIES = ("spike_slab", "gaussian", "bernoulli")


@dataclasses.dataclass(eq=False, repr=False)
class SparseCoding(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    r"""Sparse coding with a posterior over the active dictionary elements.

    Of a data point :math:`y` every element :math:`h` is on with probability :math:`\pi_h`, :math:`s_h \sim \mathrm{Bernoulli}(\pi_h)`, and

    * ``"spike_slab"``: :math:`y \sim \mathcal N(W (s \odot z) + b, \sigma^2 I)` with :math:`z_h \sim \mathcal N(\mu_h,
      \tau_h^2)` integrated out (:class:`~pyro_truncated.models.SpikeSlabSparseCoding`);
    * ``"gaussian"``: :math:`y \sim \mathcal N(W s + b, \sigma^2 I)` (:class:`~pyro_truncated.models.BinarySparseCoding`);
    * ``"bernoulli"``: :math:`p(y_d = 1) = 1 - (1 - w_{0d}) \prod_h (1 - W_{dh} s_h)` for data in {0, 1}
      (:class:`~pyro_truncated.models.NoisyOr`).

    The noise :math:`\sigma` is one for all features, so columns are standardised inside. Codes are those of the model; all else is in the
    units of the data.

    The model is trained by :func:`~pyro_truncated.learn`. Entries of the data that are NaN are missing, and
    ``inverse_transform(transform(X))`` fills them in.

    Example::

        from sklearn.datasets import load_wine
        from sklearn.preprocessing import scale

        coder = SparseCoding(4, max_iter=20, n_init=1, random_state=0)
        codes = coder.fit_transform(scale(load_wine().data))

    Args:
        n_components: number of dictionary elements. Default: as many as there are features, at most 100.
        family: ``"spike_slab"``, ``"gaussian"`` or ``"bernoulli"``.
        offset: whether the data have a background that is learned: :math:`b`, or :math:`w_0`.
        binarize: threshold above which entries of the data are 1, for ``"bernoulli"``. Default: none.
        ridge: strength of a normal prior of the dictionary, not for ``"bernoulli"``. Default: ten times the squared share of missing
            data.
        n_states: states kept per data point.
        max_iter: the most training steps on all data after the best start, which itself takes at most 60.
        n_init: the most starts; training ends sooner with a start on which two agree. Default: 4, or one with a ridge.
        verbose: whether to show a progress bar.
        random_state: seed, ``RandomState``, or ``None`` for NumPy's global one.

    Attributes:
        model_: the fitted model, a Pyro program, of the standardised data.
        components_: the dictionary, ``(n_components, n_features)``.
        offset_: the background, ``(n_features,)``.
        activity_: probability :math:`\pi_h` that an element is on, ``(n_components,)``.
        starts_: the lower bound per data point that each start reached, in nats.
        n_iter_: training steps taken.
        n_features_in_: number of features.
        feature_names_in_: their names, if the data had any.

    Raises:
        ValueError: for a parameter out of range, or data outside of what the family allows.
    """

    n_components: int | None = None
    _: dataclasses.KW_ONLY
    family: str = "spike_slab"
    offset: bool = True
    binarize: float | None = None
    ridge: float | None = None
    n_states: int = 64
    max_iter: int = 100
    n_init: int | None = None
    verbose: bool = False
    random_state: Any = None

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learns the dictionary.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.
            y: ignored.

        Warns:
            UserWarning: if the data or most columns do not vary, or a column has outliers.
        """
        rows = self._rows(X, reset=True)
        units = self._column_units(rows)
        own = units.standardise(rows)
        if self.family != "bernoulli" and not bool(own.nan_to_num(0.0).any()):
            warnings.warn(
                "X does not vary: nothing is learned from it. Codes say nothing, and can be of any size.", UserWarning, stacklevel=2
            )
        with isolated_state(self.random_state) as generator:
            model = self._make(rows)
            starts, steps, statistics = self._learn(model, own, generator)
        shift = float(units.log_volume(rows).mean())
        self.model_, self.starts_, self.n_iter_, self._units = model, [start - shift for start in starts], steps, units
        self._statistics, self._num_rows = statistics, len(rows)
        return self

    def partial_fit(self, X: Any, y: Any = None) -> Self:
        r"""Makes one step of online EM on a minibatch.

        It goes on from :meth:`fit`, or initialises a dictionary from these data. Statistics of the ``B`` new rows count
        :math:`(B / N)^{0.6}` beside those of all ``N`` rows so far. Fewer than 20 rows train nothing yet.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.
            y: ignored.
        """
        is_first = not hasattr(self, "model_")
        rows = self._rows(X, reset=is_first)
        with isolated_state(self.random_state if is_first else 0) as generator:
            if is_first:
                units = self._column_units(rows)
                model = self._make(rows).initialize(units.standardise(rows), generator)
                self.model_, self.n_iter_, self._units = model, 0, units
                self._statistics, self._num_rows = {}, 0
            self._step(self._units.standardise(rows))
        self.n_iter_ += 1
        return self

    def transform(self, X: Any) -> Any:
        r"""Posterior means of the coefficients: :math:`\langle s \odot z \rangle`, or the probabilities :math:`\langle s \rangle`.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.

        Returns:
            Codes ``(n_samples, n_components)``, in the type of the data.
        """
        model = self.model_
        if isinstance(model, SpikeSlabSparseCoding):
            return self._map_posteriors(X, lambda rows, population: model.likelihood().coefficients(population, rows))
        return self._map_posteriors(X, lambda _, population: population.marginals())

    def inverse_transform(self, X: Any) -> Any:
        r"""The data that codes stand for: :math:`W x + b`, or the probabilities :math:`1 - (1 - w_{0d}) \prod_h (1 - W_{dh} x_h)`.

        Args:
            X: codes ``(n_samples, n_components)``.

        Returns:
            Data ``(n_samples, n_features)``.

        Raises:
            ValueError: for codes of another shape, or that are not finite.
        """
        check_is_fitted(self)
        codes = validated_codes(self, X, dtype=[np.float64, np.float32])
        with torch.no_grad():
            data = self._units.to_original(_data(self.model_, torch.from_numpy(np.array(codes, dtype=np.float64))))
        return data.numpy().astype(codes.dtype)

    def score_samples(self, X: Any) -> Any:
        """Returns lower bounds of the data points' log densities, ``(n_samples,)``.

        They are those of the observed entries, in nats.
        """
        return self._map_posteriors(X, lambda rows, population: population.free_energy() - self._units.log_volume(rows))

    def score(self, X: Any, y: Any = None) -> float:
        """The mean of :meth:`score_samples`: what to maximise in a grid search.

        Args:
            X: data ``(n_samples, n_features)``, NaN where missing.
            y: ignored.
        """
        return float(np.mean(self.score_samples(X)))

    @property
    def components_(self) -> Any:
        """The dictionary in the units of the data, ``(n_components, n_features)``."""
        weight = self.model_.weight.detach().mT
        return (weight * self._units.deviation.to(weight)).numpy()

    @property
    def offset_(self) -> Any:
        """The background in the units of the data, ``(n_features,)``; zeros without one."""
        background = self.model_.leak if isinstance(self.model_, NoisyOr) else self.model_.bias
        zero = self.model_.weight.new_zeros(()) if background is None else background.detach()
        return self._units.to_original(zero.expand(self.n_features_in_)).numpy().copy()

    @property
    def activity_(self) -> Any:
        """Probability that an element is on, ``(n_components,)``."""
        return self.model_.prior.detach().expand(self.model_.num_latents).numpy().copy()

    @property
    def _n_features_out(self) -> int:
        return int(self.model_.num_latents)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    # --- data ---

    def _rows(self, X: Any, *, reset: bool) -> Tensor:
        if self.family not in _FAMILIES:
            raise ValueError(f"family must be one of {_FAMILIES}; got {self.family!r}")
        check_kinds(SparseCoding.__init__, ridge=self.ridge, binarize=self.binarize)
        least = 2 if reset else 1
        data = validated_data(self, X, reset=reset, dtype=[np.float64, np.float32], ensure_all_finite="allow-nan", ensure_min_samples=least)
        rows = torch.from_numpy(np.array(data))
        if self.family == "bernoulli" and self.binarize is not None:
            rows = torch.where(rows.isnan(), rows, (rows > self.binarize).to(rows))
        if self.family == "bernoulli" and len(others := rows[~(rows.isnan() | (rows == 0) | (rows == 1))]):
            raise ValueError(f"X must hold 0 and 1 for family='bernoulli'; got {float(others[0]):g}: give a threshold, binarize=...")
        return rows

    def _map_posteriors(self, X: Any, reader: Any) -> Any:
        check_is_fitted(self)
        rows = self._rows(X, reset=False)
        own = self._units.standardise(rows.to(self.model_.weight.dtype))
        with isolated_state(), torch.no_grad():
            blocks = binary_posteriors(self.model_, own, self.model_.num_latents, check_count("n_states", self.n_states))
            return torch.cat([reader(*block) for block in blocks]).to(rows).numpy()

    # --- model ---

    def _column_units(self, rows: Tensor) -> ColumnUnits:
        """The units of columns; probabilities have none."""
        if self.family == "bernoulli":
            return ColumnUnits.none(rows)
        units = ColumnUnits.from_rows(rows, is_centred=bool(self.offset))
        warn_about_constants("the data", rows.nan_to_num(torch.inf).amin(0) < rows.nan_to_num(-torch.inf).amax(0))
        return units

    def _make(self, rows: Tensor, *, max_components: int = 100) -> Any:
        number = min(rows.shape[1], max_components) if self.n_components is None else check_count("n_components", self.n_components)
        options: dict[str, Any] = {"dtype": rows.dtype}
        if self.family == "bernoulli":
            return NoisyOr(rows.shape[1], number, learn_leak=bool(self.offset), **options)
        kind = SpikeSlabSparseCoding if self.family == "spike_slab" else BinarySparseCoding
        return kind(rows.shape[1], number, offset=bool(self.offset), shared_prior=False, **options)

    def _ridge(self, rows: Tensor) -> float:
        if self.family == "bernoulli":
            return 0.0
        if self.ridge is None:
            # Elements that fit the few observed entries of every data point closely explain the
            # others badly.
            return 10.0 * float(rows.isnan().double().mean()) ** 2
        if not 0 <= self.ridge < math.inf:
            raise ValueError(f"ridge must be a finite number of at least 0; got {self.ridge}")
        return float(self.ridge)

    def _learn(self, model: Any, rows: Tensor, generator: torch.Generator) -> tuple[list[float], int, dict[str, Tensor]]:
        """Trains the model; what starts reached, later steps, and mean statistics."""
        ridge = self._ridge(rows)
        # Complete data have several starts.
        n_init = (1 if ridge else 4) if self.n_init is None else self.n_init
        max_iter, n_init, n_states = check_counts(max_iter=self.max_iter, n_init=n_init, n_states=self.n_states)
        # Steps of each start.
        short, progress = min(max_iter, 60), None if self.verbose else False
        steps = 1 if ridge else max_iter
        guide = learn(
            model,
            rows,
            num_states=n_states,
            steps=steps,
            config=LearnConfig(restart_steps=short),
            restarts=n_init,
            generator=generator,
            progress=progress,
        )
        num_steps: int = guide.steps
        if ridge:
            # From the first step on, it would take away elements that are hardly used yet.
            model.ridge = ridge
            svi = SVI(model, guide, ClosedForm(model), Truncated_ELBO(EvolutionarySearch(crossover=True)))
            fit(svi, rows, steps=max_iter, progress=progress)
            num_steps = max_iter
        statistics = model.sufficient_statistics(guide.population(), rows)
        return list(guide.starts), num_steps, {name: value / len(rows) for name, value in statistics.items()}

    def _step(self, rows: Tensor) -> None:
        """Blends in the statistics of a minibatch, and makes an M-step."""
        rows = rows.to(self.model_.weight.dtype)
        blocks = binary_posteriors(self.model_, rows, self.model_.num_latents, check_count("n_states", self.n_states))
        total = add_statistics(self.model_.sufficient_statistics(population, block) for block, population in blocks)
        self._num_rows += len(rows)
        rate, old = (len(rows) / self._num_rows) ** 0.6, self._statistics
        self._statistics = {name: rate * value / len(rows) + ((1 - rate) * old[name] if old else 0.0) for name, value in total.items()}
        # Of fewer rows, statistics are only collected (Cappé and Moulines, 2009).
        if self._num_rows >= 20:
            driver = ClosedForm(self.model_)
            driver.collect({name: self._num_rows * value for name, value in self._statistics.items()}, None, None, self._num_rows)
            driver([])
            driver.release()


def _data(model: Any, codes: Tensor) -> Tensor:
    weight = model.weight.double()
    if isinstance(model, NoisyOr):
        return -torch.expm1(torch.log1p(-model.leak.double()) + torch.log1p(-weight * codes.unsqueeze(1)).sum(-1))
    mean: Tensor = codes @ weight.mT
    return mean if model.bias is None else mean + model.bias.double()
