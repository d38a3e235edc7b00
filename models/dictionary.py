"""A dictionary with Gaussian noise: initialisation and M-steps."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Sequence

import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import LinearSuperposition
from pyro_truncated.extend import generator_device, raise_if, read_conditions
from pyro_truncated.models.data_model import FLOOR, MIN_COUNT, SCALE_FLOOR, DataModel, random_rows

# Rounding of errors, relative to their magnitude.
_ERROR_RTOL = 1e-12

_Errors = Callable[[Tensor, Tensor | slice], Tensor]
_Total = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def data_scale(squares: Tensor, counts: Tensor) -> Tensor:
    """The root mean square of observed entries, or 1, the unit of floors."""
    raise_if(~(counts > 0), "data must have at least one observed entry; got only NaN")
    scale = (squares / counts).sqrt()
    return torch.where(scale > 0, scale, 1.0)


def first_dictionary(y: Tensor, num_latents: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Elements ``(D, H)``, noise deviation, and the least positive entries ``(D, 1)``."""
    observed = y[~y.isnan()].double()
    unit = data_scale(observed.square().sum(), torch.tensor(float(observed.numel())))
    deviation = observed.std(correction=0).maximum(SCALE_FLOOR * unit)
    least = weight_floor({"squares": y.double().square().nansum(0), "observed": (~y.isnan()).sum(0)})
    rows = random_rows(y, num_latents, generator)
    noise = torch.randn(rows.shape, generator=generator, device=generator_device(generator)).to(rows)
    return (rows + 0.01 * deviation * noise).mT, deviation, least


def shared_part(elements: Tensor, rows: Tensor, share: float) -> Tensor:
    r"""The part of every element that data points have in them, ``(H,)``.

    Of an element :math:`w` a data point :math:`y_n` has :math:`w^\top y_n / |w|^2` in it, by least squares. The part is the mean over the
    data points that have most of it, but for the first, as the element may come from it.
    """
    # About a thousand rows tell the part, of which a tenth at least is kept.
    rows = rows[:: -(-len(rows) // 1000)].to(elements)
    number = min(max(1, round(share * len(rows))), len(rows) - 1)
    if not number:
        return elements.new_ones(elements.shape[1])
    squares = (~rows.isnan()).to(elements) @ elements.square()
    parts = (rows.nan_to_num() @ elements) / squares.clamp(min=torch.finfo(squares.dtype).tiny)
    return parts.topk(number + 1, 0).values[1:].mean(0).clamp(0.1, 1.0)


def best_scale(errors: Tensor, squares: Tensor, counts: Tensor) -> Tensor:
    """Returns the root mean expected squared residual, above a floor."""
    return torch.maximum((errors / counts).clamp(min=0.0).sqrt(), noise_floor(squares, counts))


def noise_floor(squares: Tensor, counts: Tensor) -> Tensor:
    """The smallest noise deviation: a thousandth of :func:`data_scale`."""
    return data_scale(squares, counts).mul(SCALE_FLOOR)


def best_dictionary(weight: Tensor, pairs: Tensor, cross: Tensor, activity: Tensor | None = None) -> Tensor:
    r"""Minimiser of the expected squared residuals :math:`\sum_n \langle (y_{nd} - W_d s)^2 \rangle` of every dimension ``d``.

    :math:`W_d = A_d^{-1} c_d` with ``pairs`` :math:`A_d = \sum_n \langle s s^\top \rangle`, ``(H, H)`` if common, and ``cross`` :math:`c_d
    = \sum_n y_{nd} \langle s \rangle`. A tiny ridge, in the unit ``activity``, keeps elements of inactive latents as they are. The
    residuals still never grow.
    """
    gradient = cross - (weight @ pairs if pairs.dim() == 2 else (pairs @ weight.unsqueeze(-1)).squeeze(-1))
    activity = _mean_square(pairs) if activity is None else activity
    ridge = 1e-10 * activity.clamp(min=torch.finfo(pairs.dtype).tiny)
    factor = cholesky(pairs + ridge * torch.eye(weight.shape[1], dtype=pairs.dtype, device=pairs.device))
    if pairs.dim() == 2:
        return weight + torch.cholesky_solve(gradient.mT, factor).mT
    return weight + torch.cholesky_solve(gradient.unsqueeze(-1), factor).squeeze(-1)


def cholesky(matrix: Tensor) -> Tensor:
    """Returns Cholesky factors, with deferred checks that they exist."""
    factor, info = torch.linalg.cholesky_ex(matrix)
    raise_if((info != 0).any(), lambda: torch.linalg.cholesky(matrix))
    return factor


def best_dictionary_and_offset(weight: Tensor, bias: Tensor, statistics: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    r"""Joint minimiser of the expected squared residuals :math:`\sum_n \langle (y_{nd} - b_d - W_d s)^2 \rangle`.

    The offset is the element of a latent that is always on, so with :math:`N_d`, :math:`Y_d`, :math:`t_d`, :math:`c_d` and :math:`A_d` of
    :meth:`.LinearSuperposition.statistics`

    .. math:: W_d = \Bigl(A_d - \frac{t_d t_d^\top}{N_d}\Bigr)^{-1} \Bigl(c_d - \frac{Y_d t_d}{N_d}\Bigr), \qquad
        b_d = \frac{Y_d - W_d^\top t_d}{N_d}.

    Elements of latents that are never or always active stay as they are. So does the offset of a dimension that is never observed.
    """
    observed, sums, trials, pairs = (statistics[name] for name in ("observed", "sums", "trials", "pairs"))
    counts = observed.clamp(min=MIN_COUNT)
    means = trials / counts.unsqueeze(-1)
    # With nothing missing all dimensions have the same trials.
    outer = trials[0, :, None] * means[0] if pairs.dim() == 2 else trials.unsqueeze(-1) * means.unsqueeze(-2)
    weight = best_dictionary(weight, pairs - outer, statistics["cross"] - sums.unsqueeze(-1) * means, _mean_square(pairs))
    return weight, torch.where(observed > MIN_COUNT, (sums - (weight * trials).sum(-1)) / counts, bias)


def _mean_square(pairs: Tensor) -> Tensor:
    return pairs.diagonal(dim1=-2, dim2=-1).mean()


def best_claims(
    weight: Tensor,
    statistics: dict[str, Tensor],
    expected_errors: _Errors,
    total: _Total = lambda parts: parts,
) -> dict[str, Tensor]:
    r"""Statistics of a superposition by maximum, with a better dictionary.

    An entry asks for what it has won per win, the minimiser if the winners stay the same. As they may not, the step there is halved, in the
    dimensions where the residuals would grow, until they do not.

    ``expected_errors`` gives errors ``(K,)`` of dimensions under other rows ``(K, H)`` of the dictionary. Errors are rounded relative to
    ``magnitude``, by default that of the squared data. Returns the statistics, with ``claims``, the wins times the new dictionary, in the
    place of ``won``; and its ``errors``.
    """
    parts = {"magnitude": statistics["squares"], **statistics}
    names = ("wins", "won", "errors", "squares", "observed", "magnitude")
    sums = dict(zip(names, total([parts[name] for name in names]), strict=True))
    wins = sums["wins"]
    max_errors = sums["errors"] + _ERROR_RTOL * sums["magnitude"]
    step = torch.where(wins > MIN_COUNT, sums["won"] / wins, weight).maximum(weight_floor(sums)) - weight
    new_weight = weight + step
    errors = expected_errors(new_weight, slice(None))
    is_better = total([errors])[0] <= max_errors
    worse = [d for d, is_taken in enumerate(read_conditions(is_better)) if not is_taken]
    if worse:
        where = torch.tensor(worse, device="cpu").to(weight.device, non_blocking=True)
        new_weight[where], errors[where] = weight[where], statistics["errors"][where]
        _take_shorter_steps_(new_weight, errors, step, where, max_errors, expected_errors, total)
    others = {name: value for name, value in statistics.items() if name != "won"}
    return {**others, "claims": statistics["wins"] * new_weight, "errors": errors}


def _take_shorter_steps_(
    weight: Tensor,
    errors: Tensor,
    step: Tensor,
    dims: Tensor,
    max_errors: Tensor,
    expected_errors: _Errors,
    total: _Total,
    *,
    max_halvings: int = 10,
) -> None:
    """Takes steps ``(D, H)`` in dimensions ``dims (K,)``, halved until allowed."""
    shares = 0.5 ** torch.arange(1, max_halvings, dtype=step.dtype, device=step.device).view(-1, 1, 1)
    # On a device all are tried at once: to see which is the first that is allowed would be to wait for it.
    for some in shares.split(1 if step.is_cpu else len(shares)):
        trial = weight[dims] + some * step[dims]
        trial_errors = expected_errors(trial.flatten(0, 1), dims.repeat(len(some))).view(trial.shape[:2])
        is_better = total([trial_errors])[0] <= max_errors[dims]
        first, is_done = is_better.byte().argmax(0, keepdim=True), is_better.any(0)
        best = trial.gather(0, first.unsqueeze(-1).expand(-1, -1, trial.shape[-1]))[0]
        weight[dims] = torch.where(is_done.unsqueeze(-1), best, weight[dims])
        errors[dims] = torch.where(is_done, trial_errors.gather(0, first)[0], errors[dims])
        if step.is_cpu:
            dims = dims[~is_done]
        if not len(dims):
            break


def dictionary_from_claims(weight: Tensor, statistics: dict[str, Tensor], gain: Tensor | float = 1.0) -> Tensor:
    """The dictionary of :func:`best_claims`, divided by a ``gain``, kept without wins."""
    wins, floor = statistics["wins"], weight_floor(statistics)
    claimed = torch.where(wins > MIN_COUNT, statistics["claims"] / wins, weight).maximum(floor)
    return (claimed / gain).maximum(floor)


def weight_floor(statistics: dict[str, Tensor]) -> Tensor:
    """The smallest entries of a positive dictionary, ``(D, 1)``, relative to data."""
    squares, observed = statistics["squares"], statistics["observed"]
    whole = data_scale(squares.sum(), observed.sum())
    each = (squares / observed.clamp(min=1.0)).sqrt()
    return torch.where(each > 0, each, whole).unsqueeze(-1).mul(FLOOR)


def best_slabs(count: Tensor, sums: Tensor, squares: Tensor, slab_mean: Tensor, slab_scale: Tensor) -> tuple[Tensor, Tensor]:
    r"""The slabs' mean and deviation where latents are on, else the old.

    Of ``count`` :math:`\sum_n \langle b \rangle`, ``sums`` :math:`\sum_n \langle b z \rangle` and ``squares`` :math:`\sum_n \langle b z^2
    \rangle`.
    """
    is_used, power = count > MIN_COUNT, squares / count
    mean = torch.where(is_used, sums / count, slab_mean.double())
    variance = (power - mean.square()).maximum(FLOOR * power)
    return mean, torch.where(is_used, variance.sqrt(), slab_scale.double())


class BackgroundWarning(UserWarning):
    """The data of a model without offset have a background."""


def lies_on_background(y: Tensor) -> bool:
    """Whether most dimensions are far from zero without active causes.

    If that is a quarter of the data points, the noise lies between the smallest hundredth of the entries and their lower quartile. Above
    zero the former must be nearer to the latter than to zero. Below zero the latter is twice as far from zero as from the former.
    """
    smallest, quartile = row_quantile(y, 100), row_quantile(y, 4)
    spread = quartile - smallest
    is_far = (smallest > spread) | (quartile < -2 * spread)
    # Of fewer than 20 data points the smallest ones say little.
    return bool((is_far & ((~y.isnan()).sum(0) >= 20)).double().mean() > 0.5)


def row_quantile(y: Tensor, part: int) -> Tensor:
    """The entry below which one in so many lies, ``(D,)``, approximate."""
    most = 10_000
    if len(y) > most:  # always the same, but no regular ones, which may be alike
        y = y[torch.randint(len(y), (most,), generator=torch.Generator().manual_seed(0)).to(y.device)]
    rows = y.double().sort(0).values
    position = ((~rows.isnan()).sum(0) - 1).clamp(min=0) // part
    return rows.gather(0, position.unsqueeze(0)).squeeze(0).nan_to_num()


def warn_about_background(model: object, y: Tensor) -> None:
    """Warns of data with a background, always with the same text."""
    if lies_on_background(y):
        warnings.warn(
            f"the data lie on a background, but {type(model).__name__} has no offset: most dimensions are far from zero without active "
            "causes. Subtract the background, for example y - y.nanquantile(0.05, 0).",
            BackgroundWarning,
            stacklevel=1,
        )


Statistics = dict[str, Tensor]


class LinearDictionary(DataModel):
    r"""Base of models :math:`y \sim \mathcal N(W s + b, \sigma^2 I)`."""

    num_latents: int
    weight: Tensor  # dictionary W, (D, H)
    scale: Tensor  # noise standard deviation, a scalar
    bias: Tensor | None  # offset b, (D,); None in models without
    center: Tensor  # where moments are taken, (D,). The data's mean after initialize, which avoids cancellation. Only with an offset.
    # The M-step's prior of the dictionary's entries has the variance scale ** 2 / ridge. Where little is observed, elements that fit it
    # closely explain what is missing badly. At first, elements that are hardly used yet would vanish with it.
    ridge: float = 0.0

    def _set_ridge(self, ridge: float) -> None:
        if not 0 <= ridge < math.inf:
            raise ValueError(f"ridge must be a finite number of at least 0; got {ridge}")
        self.ridge = float(ridge)

    def _make_offset(self, offset: bool, dtype: torch.dtype | None) -> None:
        if not offset:
            self.bias = None
            return
        self.bias = PyroParam(torch.zeros(self.num_observed, dtype=dtype), constraints.real)  # type: ignore[assignment]
        self.register_buffer("center", torch.zeros(self.num_observed, dtype=torch.float64))

    def _first_dictionary(self, y: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        """Sets the offset; returns elements and the noise's deviation."""
        if self.bias is None:
            weight, deviation, _ = first_dictionary(y, self.num_latents, generator)
            return weight, deviation
        self.center = y.double().nanmean(0).nan_to_num()
        above = y.double() - self.center
        # Elements that add up lie above the offset, most of which is seen where few of them are on. On bars the lower quartile is a better
        # start than the mean, the median, and quantiles near the minimum; with annealing lower ones are a little better.
        first = row_quantile(above, 4)
        weight, deviation, _ = first_dictionary(above, self.num_latents, generator)
        sums = {"observed": (~above.isnan()).sum(0), "sums": above.nansum(0), "squares": above.square().nansum(0)}
        floor = noise_floor(self._power(sums), sums["observed"].sum())
        self.bias = (first + self.center).to(self.weight)
        return weight - first.unsqueeze(-1), deviation.maximum(floor)

    def _above_center(self, population: Population, y: Tensor) -> tuple[Population, Tensor]:
        """The data for statistics, with an offset the population's, above the center."""
        if self.bias is None:
            return population, y
        return dataclasses.replace(population, indices=None), population.rows_above(y, self.center)

    def _bias_above_center(self) -> Tensor | None:
        return None if self.bias is None else self.bias.double() - self.center

    def _best_dictionary(self, statistics: Statistics) -> tuple[Tensor, Tensor]:
        """Sets the offset; returns the best dictionary and expected squared errors ``(D,)``."""
        weight, bias = self.weight.double(), self._bias_above_center()
        pairs = statistics["pairs"]
        if self.ridge:  # for latents that are active
            pairs = pairs + torch.diag_embed(self.ridge * (pairs.diagonal(dim1=-2, dim2=-1) > MIN_COUNT).to(pairs))
        if bias is None:
            weight = best_dictionary(weight, pairs, statistics["cross"])
        else:
            weight, bias = best_dictionary_and_offset(weight, bias, {**statistics, "pairs": pairs})
            self.bias = (bias + self.center).to(self.weight)
        # The errors do not depend on the noise.
        superposition = LinearSuperposition(weight.new_zeros(self.num_latents), weight, 1.0, bias, validate_args=False)
        return weight, superposition.square_error(statistics)

    def _power(self, statistics: Statistics) -> Tensor:
        """The sum of squares, about means if offset, for the data's unit."""
        squares = statistics["squares"]
        if self.bias is None:
            return squares.sum()
        observed, sums = statistics["observed"], statistics["sums"]
        about_mean = squares - sums.square() / observed.clamp(min=torch.finfo(sums.dtype).tiny)
        about_zero = squares + 2 * self.center * sums + observed * self.center.square()
        # How many units in the last place of the data their deviation must be, to be more than rounding.
        rounding = 2e3 * torch.finfo(self.weight.dtype).eps
        return about_mean.clamp(min=0.0).sum().maximum(rounding**2 * about_zero.clamp(min=0.0).sum())
