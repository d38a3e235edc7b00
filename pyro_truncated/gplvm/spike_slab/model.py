"""Spike-and-slab GP-LVM and manifold relevance determination."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.nn import PyroModule, PyroParam
from pyro.nn.module import pyro_method
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributed.shards import as_shard_like, find_portion, refuse_shards
from pyro_truncated.gp.cholesky import stable_cholesky
from pyro_truncated.gp.uncertain import Expectation, SpikeSlabInputs
from pyro_truncated.gplvm.spike_slab.inducing_posterior import InducingPosterior
from pyro_truncated.gplvm.spike_slab.view import KernelSpec, LikelihoodSpec, View, kernel_weights, make_views
from pyro_truncated.utils.arguments import Renamed, check_count, check_counts, check_kinds, describe, names_arguments
from pyro_truncated.utils.arrays import as_data, takes_arrays
from pyro_truncated.utils.constraints import LARGEST
from pyro_truncated.utils.parameter_store import UniqueModule, treat_singly

_KERNELS = ("rbf", "matern", "ou", "periodic")
# Share of the prior variance that is independent over time: it makes factors exist.
_INDEPENDENT_SHARE = 1e-4


class Marginals(NamedTuple):
    """What a bound asks of latents."""

    loc: Tensor  # means, (N, Q)
    scale: Tensor  # standard deviations, (N, Q)
    divergence: Tensor  # from the prior, of each dimension, (Q,)


class TimePrior(UniqueModule):
    """Gaussian processes over time for a model's latents, of variance one.

    Example:
        >>> times = torch.arange(12.0)
        >>> model = SpikeSlabGPLVM(12, 3, num_latents=2, time_prior=TimePrior(times, "matern"))
        >>> loc, scale = model.time_prior.at(torch.tensor([12.0, 13.0]))  # the latents of days to come
        >>> loc.shape
        torch.Size([2, 2])

    Args:
        times: time stamps ``(N,)``, in any order and spacing.
        kernel: ``"rbf"``, ``"matern"`` (3/2), ``"ou"`` (Ornstein-Uhlenbeck, Matern 1/2), or ``"periodic"``.
        sequences: number of the sequence that each data point belongs to, ``(N,)``. Sequences are independent. Default: one.
        period: of the periodic kernel.

    Attributes:
        timescale: length-scales of the dimensions, ``(Q,)``, in units of time. Those of the periodic kernel are relative to a period.
        targets: the posterior's pseudo-observations, ``(N, Q)``.
        spread: their noise deviations, ``(N, Q)``.

    Raises:
        ValueError: if times are not finite, a name is unknown, or a period is missing or not positive.
    """

    times: Tensor
    sequences: Tensor
    timescale: Tensor
    targets: Tensor
    spread: Tensor

    def __init__(self, times: Tensor, kernel: str = "rbf", *, sequences: Tensor | None = None, period: float | None = None) -> None:
        super().__init__()
        times = as_data("times", times)
        if times.dim() != 1 or not bool(times.isfinite().all()):
            raise ValueError(f"times must be finite and of shape (N,); got {describe(times)}")
        sequences = torch.zeros(len(times), dtype=torch.int64) if sequences is None else as_data("sequences", sequences)
        if sequences.shape != times.shape or bool(sequences.isnan().any()):
            raise ValueError(f"sequences must have a number for each of the {len(times)} times; got {describe(sequences)}")
        if kernel not in _KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(_KERNELS)}; got {kernel!r}")
        check_kinds(TimePrior.__init__, period=period)
        if (kernel == "periodic") != (period is not None) or (period is not None and not 0 < period < math.inf):
            raise ValueError(f"a periodic kernel has a period above 0, and no other has one; got kernel={kernel!r}, period={period}")
        self.kernel, self.period = kernel, period
        self.register_buffer("times", times.detach().double())
        self.register_buffer("sequences", sequences.detach())

    def start(self, num_latents: int) -> None:
        """Creates parameters for ``Q`` latents: the prior, with moderate time scales."""
        size = (len(self.times), num_latents)
        ordered = self.times.sort().values.unique()
        spacing = float(ordered.diff().median()) if len(ordered) > 1 else 1.0
        # Five time steps; that of a periodic kernel has no unit.
        timescale = self.times.new_full((num_latents,), 1.0 if self.kernel == "periodic" else 5.0 * spacing)
        self.timescale = PyroParam(timescale, constraints.positive)  # type: ignore[assignment]
        self.targets = PyroParam(self.times.new_zeros(size), constraints.real)  # type: ignore[assignment]
        self.spread = PyroParam(self.times.new_ones(size), constraints.positive)  # type: ignore[assignment]

    def correlations(self, times: Tensor, sequences: Tensor) -> Tensor:
        """Prior covariances ``(Q, n, N)`` of latents at times with the data's."""
        apart, scale = (times[:, None] - self.times).abs(), self.timescale.double()[:, None, None]
        if self.kernel == "rbf":
            matrix = torch.exp(-(apart / scale).square() / 2)
        elif self.kernel == "matern":
            ratio = math.sqrt(3) * apart / scale
            matrix = (1 + ratio) * torch.exp(-ratio)
        elif self.kernel == "ou":
            matrix = torch.exp(-apart / scale)
        else:
            assert self.period is not None
            matrix = torch.exp(-2 * (torch.sin(math.pi * apart / self.period) / scale).square())
        return (1 - _INDEPENDENT_SHARE) * matrix * (sequences[:, None] == self.sequences)

    def covariance(self) -> Tensor:
        """Prior covariances of the data points, ``(Q, N, N)``."""
        eye = torch.eye(len(self.times), dtype=self.times.dtype, device=self.times.device)
        return self.correlations(self.times, self.sequences) + _INDEPENDENT_SHARE * eye

    def marginals(self) -> Marginals:
        """Returns latents' means and deviations, and their joint posterior's divergence."""
        prior, noise, factor, weights = self._solve()
        half = torch.linalg.solve_triangular(factor, prior, upper=False)
        loc = (prior @ weights).squeeze(-1)
        variance = (prior.diagonal(dim1=-2, dim2=-1) - half.square().sum(-2)).clamp(min=1e-12)
        inverse = torch.cholesky_inverse(factor).diagonal(dim1=-2, dim2=-1)
        log_det = 2 * factor.diagonal(dim1=-2, dim2=-1).log().sum(-1) - noise.log().sum(-1)
        fit = (weights * loc.unsqueeze(-1)).sum((-2, -1))
        divergence = ((inverse * noise).sum(-1) - noise.shape[-1] + fit + log_det) / 2
        return Marginals(loc.mT, variance.sqrt().mT, divergence)

    def at(self, times: Tensor, sequences: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means and deviations ``(n, Q)`` of latents at other times ``(n,)``.

        They belong to the first sequence unless sequences are given.

        Raises:
            ValueError: if times are not finite or sequences do not fit them.
        """
        times = as_data("times", times).to(self.times)
        sequences = self.sequences[0].expand(times.shape) if sequences is None else as_data("sequences", sequences, self.times)
        if times.dim() != 1 or sequences.shape != times.shape or not bool(times.isfinite().all()) or bool(sequences.isnan().any()):
            raise ValueError(f"times must be finite, with a sequence each; got {describe(times)} and {describe(sequences)}")
        _, _, factor, weights = self._solve()
        cross = self.correlations(times, sequences)
        half = torch.linalg.solve_triangular(factor, cross.mT, upper=False)
        return (cross @ weights).squeeze(-1).mT, (1 - half.square().sum(-2)).clamp(min=1e-12).sqrt().mT

    def set_latents(self, loc: Tensor, scale: Tensor) -> None:
        """Sets pseudo-observations to agree with given means and deviations ``(N, Q)``."""
        self.targets, self.spread = loc.detach().to(self.targets, copy=True), scale.detach().to(self.spread, copy=True)

    # --- distributions over all data points: event (Q, N) ---

    def prior_distribution(self) -> dist.TorchDistribution:
        """The prior of all latents."""
        covariance = self.covariance()
        zeros, root = covariance.new_zeros(covariance.shape[:-1]), stable_cholesky(covariance)
        return dist.MultivariateNormal(zeros, scale_tril=root).to_event(1)

    def distribution(self, is_used: Tensor) -> dist.TorchDistribution:
        """The latents' posterior in used dimensions ``(*, Q)``, elsewhere the prior."""
        prior, _, factor, weights = self._solve()
        half = torch.linalg.solve_triangular(factor, prior, upper=False)
        root, own = stable_cholesky(prior - half.mT @ half, prior.new_ones(())), stable_cholesky(prior)
        is_used = is_used.unsqueeze(-1)
        loc = torch.where(is_used, (prior @ weights).squeeze(-1), 0.0)
        roots = torch.where(is_used.unsqueeze(-1), root, own)
        return dist.MultivariateNormal(loc, scale_tril=roots).to_event(1)

    def draws(self, is_used: Tensor, noise: Tensor) -> Tensor:
        """Draws ``(*, N, Q)`` from that distribution by standard normal noise."""
        base = self.distribution(is_used.to(self.times.device)).base_dist
        deviation = (base.scale_tril @ noise.mT.unsqueeze(-1).to(base.loc)).squeeze(-1)
        return (base.loc + deviation).mT.cpu()

    def _solve(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Prior, noise, factor and whitened values of the pseudo-observations."""
        prior, noise = self.covariance(), self.spread.double().square().mT
        factor = torch.linalg.cholesky(prior + torch.diag_embed(noise))
        return prior, noise, factor, torch.cholesky_solve(self.targets.double().mT.unsqueeze(-1), factor)


Views = Tensor | Sequence[Tensor]


def refuse_lists(views: Iterable[Any]) -> None:
    """Refuses views that are no tensors, such as lists of rows."""
    for view in views:
        if isinstance(view, np.ndarray):
            as_data("y", view)
        if not isinstance(view, Tensor):
            advice = "of numbers in lists give torch.as_tensor(y)"
            raise TypeError(f"y must be a tensor or an array, or a list of one for each view; got a {type(view).__name__} in y: {advice}")


def refuse_large(name: str, y: Tensor) -> None:
    """Refuses infinite numbers, and those whose squares nearly are."""
    if y.is_floating_point() and bool((y.abs() > min(LARGEST, torch.finfo(y.dtype).max)).any()):
        raise ValueError(f"{name} must be finite, or NaN where missing; got a value that is infinite, or larger than {LARGEST:g}")


class SpikeSlabMRD(UniqueModule):
    r"""Gaussian processes from one latent space to several views, with switches.

    .. math:: b_{cq} \sim \mathrm{Bernoulli}(\pi), \quad x_{nq} \sim \mathcal N(0, 1), \quad f^{(c)}_d \sim \mathcal{GP}(0, k_c), \quad
              y^{(c)}_{nd} \sim \mathcal N\left(f^{(c)}_d(b_c \circ x_n), \beta_c^{-1}\right)

    The posterior is :math:`q(b_{cq} = 1) = \gamma_{cq}`, and :math:`q(x_{nq} \mid b) = \mathcal N(\mu_{nq}, s_{nq})` if some view has
    dimension :math:`q` switched on. Otherwise it is the prior. Kernels' expectations are in closed form (see
    :func:`~pyro_truncated.gp.psi_statistics`).

    A dimension is removed by its switch or by the kernel, hence the default :math:`\pi < 1/2`; see also :meth:`relevance`.

    Example::

        model = SpikeSlabMRD(len(images), [images.shape[1], texts.shape[1]], num_latents=10)
        fit(model, [images, texts])                     # or initialize(model, ...), and SVI with Analytic_ELBO()
        model.probability                               # of every switch, (C, Q)

    A view may hold labels or counts, missing for some data points (NaN rows)::

        model = SpikeSlabMRD(len(images), [images.shape[1], 1], num_latents=10, likelihood=["gaussian", CategoricalLabels(10)])
        fit(model, [images, labels])                    # labels (N, 1): class numbers, NaN where unknown
        posterior = Posterior(model, [images, labels])
        posterior.response(posterior.infer({0: new_images}), view=1)    # probabilities of the classes

    .. note:: Switches tell what the bound prefers. With RBF kernels that can be fewer latents than there are signals, if some follow from
        others by curved functions (:doc:`/results/spike_slab_gplvm`).

    Args:
        num_data: number of data points ``N``.
        num_observed: number of outputs of each view, or of the only one.
        num_latents: number of latent dimensions ``Q``.
        kernel: ``"rbf"``, ``"linear"``, a kernel, or a function that makes one; or one for each view.
        num_inducing: inducing inputs ``M`` of each view. Default: 50, at most ``N``; with ``LinearARD`` the unit vectors.
        likelihood: ``"gaussian"``, ``"bernoulli"``, ``"poisson"``, :class:`~pyro_truncated.gplvm.CategoricalLabels`; or one for each
            view.
        time_prior: Gaussian processes over time for the latents, see :class:`~pyro_truncated.gplvm.TimePrior`. Default: data points
            are independent.
        prior: prior probability :math:`\pi` of a switch, a number or ``(C, Q)``.
        collapsed: whether the inducing variables are integrated out, which takes all data at every step. Else they have a Gaussian
            posterior.
        expectation: how to take expectations without closed form.
        dtype: type of the parameters; sums and factorisations are in float64 anyway.

    Attributes:
        loc: means :math:`\mu` of the latents, ``(N, Q)``.
        scale: standard deviations :math:`\sqrt s`, ``(N, Q)``.
        logits: log odds of the switches, ``(C, Q)``; see :attr:`probability`.
        prior: prior probabilities of the switches, ``(C, Q)``.
        num_steps: training steps by :class:`Analytic_ELBO` since the initialisation, a buffer.
        views: the Gaussian processes.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Dai, Hensman and Lawrence, "Spike and slab Gaussian process latent variable models" (2015), section 4. Latents of new
        data have a tighter posterior than the paper's, see :meth:`~pyro_truncated.gplvm.Posterior.infer`.
    """

    loc: Tensor
    scale: Tensor
    logits: Tensor
    prior: Tensor
    num_steps: Tensor
    views: Sequence[View]

    @names_arguments
    def __init__(
        self,
        num_data: int,
        num_observed: int | Sequence[int],
        num_latents: int,
        *,
        kernel: KernelSpec | Sequence[KernelSpec] = "rbf",
        num_inducing: int | None = None,
        likelihood: LikelihoodSpec | Sequence[LikelihoodSpec] = None,
        prior: float | Tensor = 0.1,
        collapsed: bool = True,
        expectation: Expectation | None = None,
        time_prior: TimePrior | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        super().__init__()
        num_data, num_latents = check_counts(num_data=num_data, num_latents=num_latents)
        # A tensor of one number is a number.
        sizes = num_observed if isinstance(num_observed, Iterable) and getattr(num_observed, "ndim", 1) > 0 else [num_observed]
        num_observed = [check_count(f"num_observed[{c}]", d) for c, d in enumerate(sizes)]
        # The default, if there are as many data points.
        num_inducing = 50 if num_inducing is None else check_count("num_inducing", num_inducing)
        self.num_data, self.num_latents, self.num_observed = num_data, num_latents, tuple(num_observed)
        self.collapsed = collapsed
        shape = (len(self.num_observed), num_latents)
        prior = torch.as_tensor(prior, dtype=torch.float64).expand(shape).clone()
        if not bool(((prior > 0) & (prior < 1)).all()):
            raise ValueError(f"prior must lie strictly between 0 and 1; got {prior.min():g} to {prior.max():g}")
        self.register_buffer("prior", prior)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64))
        # When set, the switches have these probabilities instead of those that are trained.
        self._fixed_probability: Tensor | None = None
        loc, scale = torch.randn(num_data, num_latents, dtype=dtype), torch.full((num_data, num_latents), 0.3, dtype=dtype)
        self.time_prior = time_prior
        if time_prior is None:
            self.loc = PyroParam(loc, constraints.real)  # type: ignore[assignment]
            self.scale = PyroParam(scale, constraints.positive)  # type: ignore[assignment]
        else:
            if len(time_prior.times) != num_data:
                raise ValueError(f"time_prior must have a time for each of the {num_data} data points; got {len(time_prior.times)}")
            time_prior.start(num_latents)
            time_prior.set_latents(loc, scale)
        self.logits = PyroParam(torch.zeros(shape, dtype=torch.float64), constraints.real)  # type: ignore[assignment]
        views = make_views(kernel, likelihood, self.num_observed, loc, num_inducing, collapsed, expectation)
        self.views = PyroModule[torch.nn.ModuleList](views)  # type: ignore[arg-type, assignment]

    def __getattr__(self, name: str) -> Any:
        # Under a prior over time, the latents' means and deviations are no parameters but follow from what is.
        if name in ("loc", "scale") and self._modules.get("time_prior") is not None:
            return getattr(self.latents(), name).to(self.views[0].inducing.dtype)
        return super().__getattr__(name)

    # --- the posterior in numbers ---

    @property
    def num_views(self) -> int:
        """Number of observed views, ``C``."""
        return len(self.num_observed)

    @property
    def probability(self) -> Tensor:
        r"""Posterior probabilities :math:`\gamma` of the switches, ``(C, Q)`` in float64."""
        return self.logits.double().sigmoid() if self._fixed_probability is None else self._fixed_probability

    @contextmanager
    def fix_switches(self, probability: Tensor | float) -> Iterator[None]:
        """A context in which the switches have fixed probabilities ``(C, Q)``."""
        fixed, before = torch.as_tensor(probability, dtype=torch.float64, device=self.prior.device), self._fixed_probability
        if not bool(((fixed >= 0) & (fixed <= 1)).all()):
            raise ValueError(f"probability must lie between 0 and 1; got {probability}")
        self._fixed_probability = fixed.expand(self.prior.shape)
        try:
            yield
        finally:
            self._fixed_probability = before

    holding = Renamed("fix_switches")

    def inputs(self, view: int = 0, index: Tensor | slice = slice(None)) -> SpikeSlabInputs:
        """What a view sees of the latents of some data points."""
        return self._view_inputs(self.latents(index), view)

    def _view_inputs(self, latents: Marginals, view: int) -> SpikeSlabInputs:
        dtype = self.views[view].inducing.dtype
        loc, variance = latents.loc.to(dtype), latents.scale.to(dtype).square()
        return SpikeSlabInputs(loc, variance, self.probability[view].to(dtype), validate_args=False)

    def latents(self, index: Tensor | slice = slice(None)) -> Marginals:
        """Returns latents' means and deviations, and their divergence from the prior."""
        if self.time_prior is not None:
            marginals = self.time_prior.marginals()
            return marginals._replace(loc=marginals.loc[index], scale=marginals.scale[index])
        loc, scale = self.loc[index], self.scale[index]
        mean, deviation = loc.double(), scale.double()
        return Marginals(loc, scale, (mean.square() + deviation.square() - 2 * deviation.log() - 1).sum(0) / 2)

    def set_latents(self, loc: Tensor, scale: Tensor) -> None:
        """Sets copies of means and deviations ``(N, Q)`` of the latents."""
        if {loc.shape, scale.shape} != {(self.num_data, self.num_latents)}:
            expected = self.num_data, self.num_latents
            raise ValueError(f"loc and scale must have shape {expected}; got {tuple(loc.shape)} and {tuple(scale.shape)}")
        if self.time_prior is not None:
            self.time_prior.set_latents(loc, scale)
        else:
            self.loc, self.scale = loc.detach().to(self.loc, copy=True), scale.detach().to(self.scale, copy=True)

    @takes_arrays
    def check_data(self, y: Views, *, takes_shards: bool = False) -> list[Tensor]:
        """The views' outputs as a list, as floating point numbers.

        Raises:
            TypeError: if they are complex, or no tensors.
            ValueError: if their number or shapes do not fit the model, or a value is infinite, or its square nearly so.
            NotImplementedError: for shards of data, where they are not taken.
        """
        views = [y] if isinstance(y, Tensor) else list(y)
        refuse_lists(views)
        if not takes_shards:
            refuse_shards(views, f"{type(self).__name__} takes shards of data in fit_minibatches only")
        portion = find_portion(views)
        num_data = self.num_data if portion is None or portion.total != self.num_data else portion.size
        expected = [(num_data, d) for d in self.num_observed]
        if [tuple(v.shape) for v in views] != expected:
            raise ValueError(f"y must have the shapes {expected}, one matrix per view; got {[tuple(v.shape) for v in views]}")
        if any(v.is_complex() for v in views):
            raise TypeError(f"y must be real; got {[v.dtype for v in views]}")
        for outputs in views:
            refuse_large("y", outputs)
        for c, (view, data) in enumerate(zip(self.views, views, strict=True)):
            view.check_labels(data, c)
            if not data.is_floating_point():
                views[c] = as_shard_like(data.to(view.center), data)
        return views

    @takes_arrays
    def bound(self, y: Views, batch_size: int | None = None) -> Tensor:
        """A lower bound of the data's log evidence, in float64.

        On a minibatch it is an unbiased estimate of the bound.

        Args:
            y: outputs of each view, ``(N, D_c)``. NaN where missing. A single view need not be in a list.
            batch_size: data points to draw for an estimate; not with ``collapsed``.

        Raises:
            ValueError: if the data do not fit the model, or a minibatch is asked of a collapsed model.
        """
        views = self.check_data(y)
        self.check_batch(batch_size)
        index: Tensor | slice = slice(None)
        if batch_size is not None and batch_size < self.num_data:
            index = pyro.plate("data", self.num_data, subsample_size=batch_size, device=str(self.prior.device)).indices
        latents = self.latents(index)
        return self.partial_bound([data[index] for data in views], latents, self.num_data / len(latents.loc))

    def partial_bound(self, outputs: Sequence[Tensor], latents: Marginals, scale: float, share: float = 1.0) -> Tensor:
        """The bound from outputs and latents of some data points, scaled."""
        inputs = [self._view_inputs(latents, c) for c in range(self.num_views)]
        terms = [view.data_term(own, data, scale, share) for view, own, data in zip(self.views, inputs, outputs, strict=True)]
        return torch.stack(terms).sum() - share * self.switch_divergence() - scale * (self.usage() * latents.divergence).sum()

    def check_batch(self, batch_size: int | None) -> None:
        """Refuses minibatches of a collapsed model or under a prior over time."""
        if batch_size is not None and self.time_prior is not None:
            raise ValueError("minibatches need independent latents, and those with a time_prior depend on each other; leave batch_size out")
        if batch_size is not None and self.collapsed:
            raise ValueError("a collapsed bound needs all data; minibatches need collapsed=False")

    def tighten(self, y: Views) -> None:
        """Optimises the local bounds of labels and counts, given all else."""
        for c, (view, data) in enumerate(zip(self.views, self.check_data(y), strict=True)):
            view.tighten(self.inputs(c), data)

    def usage(self) -> Tensor:
        r"""Probability :math:`\rho_q = 1 - \prod_c (1 - \gamma_{cq})` that some view has a dimension switched on, ``(Q,)``."""
        return 1 - (1 - self.probability).prod(0)

    used = Renamed("usage")

    @torch.no_grad()
    def relevance(self) -> Tensor:
        r"""How much each view varies along each dimension, ``(C, Q)``.

        It is :math:`\gamma_{cq} w_{cq} E[x_q^2]`, without unit, where :math:`w` is a linear kernel's weight over its noise-free mean
        variance, or one over a squared length-scale, or one. Only ratios within a view are meaningful.
        """
        latents = self.latents()
        square = (latents.loc.square() + latents.scale.square()).double().mean(0)
        weights = torch.stack([kernel_weights(view.kernel, self.num_latents).to(square) for view in self.views])
        return self.probability * weights * square

    def switch_divergence(self) -> Tensor:
        r"""Divergence of the switches, :math:`\sum_{cq} \gamma\log\frac\gamma\pi + (1-\gamma)\log\frac{1-\gamma}{1-\pi}`."""
        gamma = self.probability
        cross = gamma * self.prior.log() + (1 - gamma) * (-self.prior).log1p()
        if self._fixed_probability is not None:
            return (-torch.special.entr(gamma) - torch.special.entr(1 - gamma) - cross).sum()
        # From the log odds, whose gradient stays finite where the probability rounds to zero or one.
        return (gamma * self.logits - torch.nn.functional.softplus(self.logits) - cross).sum()

    def latent_divergence(self) -> Tensor:
        r"""Divergence of each dimension's slabs, ``(Q,)``: :math:`\frac12 \sum_n (\mu^2 + s - \log s - 1)`, or see :class:`TimePrior`."""
        return self.latents().divergence

    @takes_arrays
    def inducing_posterior(self, y: Views | None = None) -> list[InducingPosterior]:
        """Posteriors of each view's inducing variables, for collapsed models of data."""
        if not self.collapsed:
            return [view.explicit() for view in self.views]
        if y is None:
            raise ValueError("y is needed: the inducing variables of a collapsed model depend on the data")
        return [view.optimal(self.inputs(c), data)[1] for c, (view, data) in enumerate(zip(self.views, self.check_data(y), strict=True))]

    # --- the Pyro programs ---

    @pyro_method
    @takes_arrays
    def model(self, y: Views | None = None, batch_size: int | None = None) -> list[Tensor]:
        """The generative model; without data it generates some.

        Given the whitened inducing variables ``u_c`` the outputs have the mean of the sparse Gaussian process. The variance that it leaves
        enters as a factor. A stock ELBO then estimates :meth:`bound` without bias.
        """
        self.check_batch(batch_size)
        pattern = pyro.sample("b", dist.Bernoulli(self.prior).to_event(2)).to(self.views[0].inducing.dtype)
        whitened = [
            pyro.sample(f"u_{c}", dist.Normal(view.inducing.new_zeros(view.num_functions, len(view.inducing)).double(), 1.0).to_event(2))
            for c, view in enumerate(self.views)
        ]
        if self.time_prior is not None:
            x = pyro.sample("x", self.time_prior.prior_distribution()).mT
        with pyro.plate("data", self.num_data, subsample_size=batch_size, device=str(self.prior.device)) as index:
            if self.time_prior is None:
                x = pyro.sample("x", dist.Normal(self.loc.new_zeros(self.num_latents), 1.0).to_event(1))
            assert index is not None
            inputs = [x * pattern[..., c, :] for c in range(self.num_views)]
            if y is None:
                return [view.generate(f"{c}", inputs[c], whitened[c]) for c, view in enumerate(self.views)]
            points = [view.local_point(self.inputs(c, index), index) for c, view in enumerate(self.views)]
            return [
                view.observe(f"{c}", inputs[c], whitened[c], data[index], points[c])
                for c, (view, data) in enumerate(zip(self.views, self.check_data(y), strict=True))
            ]

    @pyro_method
    @takes_arrays
    def guide(self, y: Views | None = None, batch_size: int | None = None) -> None:
        """The posterior: switches, latents given the switches, inducing variables."""
        self.check_batch(batch_size)
        pattern = pyro.sample("b", dist.Bernoulli(self.probability).to_event(2))
        for c, posterior in enumerate(self.inducing_posterior(y)):
            root = torch.linalg.cholesky(posterior.covariance)
            pyro.sample(f"u_{c}", dist.MultivariateNormal(posterior.mean.mT, scale_tril=root).to_event(1))
        if self.time_prior is not None:
            pyro.sample("x", self.time_prior.distribution(pattern.bool().any(-2)))
            return
        with pyro.plate("data", self.num_data, subsample_size=batch_size, device=str(self.loc.device)) as index:
            is_used = pattern.bool().any(-2)
            loc = torch.where(is_used, self.loc[index], 0.0)
            pyro.sample("x", dist.Normal(loc, torch.where(is_used, self.scale[index], 1.0)).to_event(1))

    @pyro_method
    @takes_arrays
    def switch_model(self, y: Views) -> None:
        r"""The model of the switches alone, for posteriors over their patterns.

        Everything else is integrated out at its optimum, for each pattern.

        .. math:: \log p(b) + \sum_c F_c(b_c) - \sum_q [\textstyle\bigvee_c b_{cq}] \sum_n \mathrm{KL}_{nq}

        Sums of the exponential over any set of patterns are lower bounds of the evidence. Use it with
        :class:`~pyro_truncated.AutoTruncated`::

            guide = AutoTruncated(model.switch_model, num_states=32)
            svi = SVI(model.switch_model, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch()))
        """
        pattern = pyro.sample("b", dist.Bernoulli(self.prior).to_event(2))
        views = self.check_data(y)
        pyro.factor("bound", self.pattern_bounds(pattern, views))

    @treat_singly()
    def pattern_bounds(self, patterns: Tensor, views: list[Tensor]) -> Tensor:
        """Collapsed log likelihood bounds ``(*)`` under patterns of switches ``(*, C, Q)``."""
        flat = patterns.reshape(-1, *self.prior.shape).double()
        distinct, position = torch.unique(flat.flatten(1), dim=0, return_inverse=True)
        latents, bounds = self.latents(), []
        for row in distinct.view(-1, *self.prior.shape):
            with self.fix_switches(row):
                inputs = [self._view_inputs(latents, c) for c in range(self.num_views)]
            terms = [view.optimal(own, data)[0] for view, own, data in zip(self.views, inputs, views, strict=True)]
            bounds.append(torch.stack(terms).sum() - (row.amax(0) * latents.divergence).sum())
        return torch.stack(bounds)[position].reshape(patterns.shape[:-2])


class SpikeSlabGPLVM(SpikeSlabMRD):
    r"""Gaussian process latent variable model with switches for latent dimensions.

    .. math:: b_q \sim \mathrm{Bernoulli}(\pi), \quad x_{nq} \sim \mathcal N(0, 1), \quad f_d \sim \mathcal{GP}(0, k), \quad
              y_{nd} \sim \mathcal N\left(f_d(b \circ x_n), \beta^{-1}\right)

    It is :class:`SpikeSlabMRD` with a single view; with all switches on it is the Bayesian GP-LVM. Data may be passed without a list.

    Example::

        model = SpikeSlabGPLVM(*y.shape, num_latents=5, kernel="linear")
        fit(model, y)
        model.probability                # of each dimension being in use, (1, Q)

    Args:
        num_data: number of data points ``N``.
        num_observed: number of outputs ``D``.
        num_latents: number of latent dimensions ``Q``.
        kernel: ``"rbf"``, ``"linear"``, a kernel of :mod:`pyro.contrib.gp.kernels`, or a function that makes one.
        num_inducing: inducing inputs ``M``. Default: 50, at most ``N``.
        likelihood: ``"gaussian"``, ``"bernoulli"``, ``"poisson"`` or :class:`~pyro_truncated.gplvm.CategoricalLabels`.
        prior: prior probability :math:`\pi` of a switch, a number or ``(1, Q)``.
        collapsed: whether the inducing variables are integrated out at their optimal posterior, which takes all data at every step.
        expectation: how to take expectations of kernels without closed form.
        time_prior: Gaussian processes over time for the latents, see :class:`~pyro_truncated.gplvm.TimePrior`.
        dtype: type of the parameters.

    Reference:
        Dai, Hensman and Lawrence, "Spike and slab Gaussian process latent variable models" (2015), section 3.
    """
