"""Latents and outputs of new data under a trained model."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor

from pyro_truncated.gp.active_sets import log_prob_of_each
from pyro_truncated.gp.uncertain import SpikeSlabInputs
from pyro_truncated.gplvm.batched_bfgs import maximize_batched
from pyro_truncated.gplvm.spike_slab.inducing_posterior import Prediction, predict
from pyro_truncated.gplvm.spike_slab.model import SpikeSlabMRD, Views, refuse_large, refuse_lists
from pyro_truncated.utils.arguments import Renamed, check_count, check_counts, describe, leaves_inference_mode, names_arguments
from pyro_truncated.utils.arrays import as_data, as_tensors, check_column_names, remember_columns, takes_arrays
from pyro_truncated.utils.arviz_compat import convert_owner, make_idata
from pyro_truncated.utils.budget import row_slices


@dataclasses.dataclass(frozen=True)
class Latents:
    r"""Posterior of the latents of new data points.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> latents = Posterior(model, y).infer(y[:3])
        >>> latents.loc.shape, latents.scale.shape
        (torch.Size([3, 3]), torch.Size([3, 3]))

    Attributes:
        loc: means :math:`\mu^*` given that a dimension is in use, ``(N, Q)``.
        scale: standard deviations :math:`\sqrt{s^*}`, ``(N, Q)``.
        usage: probability :math:`\rho_q` that an observed view uses a dimension, ``(Q,)``. Otherwise the prior holds.
        views: the views that were observed.
        bound: what each data point contributes to the bound, ``(N,)``.
    """

    loc: Tensor
    scale: Tensor
    usage: Tensor
    views: tuple[int, ...]
    bound: Tensor

    used = Renamed("usage")
    observed = Renamed("views")


class Posterior:
    r"""A trained model with the posterior of its inducing variables, for predictions.

    Make a new one after further training.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> posterior = Posterior(model, y)
        >>> posterior.infer(y[:3]).loc.shape
        torch.Size([3, 3])

    Args:
        model: the trained model.
        y: the data it was trained on; needed if it is collapsed.
    """

    @names_arguments
    @leaves_inference_mode
    def __init__(self, model: SpikeSlabMRD, y: Views | None = None) -> None:
        self.model = model
        remember_columns(self, "y", y)
        self.inducing = model.inducing_posterior(y)
        if y is not None:
            model.check_data(y)

    # --- from latents to outputs ---

    @names_arguments
    def predict(self, loc: Tensor, view: int = 0, *, scale: Tensor | None = None, full_covariance: bool = False) -> Prediction:
        """A view's outputs at given latents, its switches uncertain as they are.

        For labels they are latent functions without noise.

        Args:
            loc: latents ``(N, Q)``.
            view: the view.
            scale: standard deviations of the latents, ``(N, Q)``. Default: known exactly.
            full_covariance: whether to return covariances between outputs.
        """
        view = check_count("view", view, 0, self.model.num_views - 1)
        loc = self._as_latents("loc", loc)
        scale = torch.zeros_like(loc) if scale is None else self._as_latents("scale", scale)
        if scale.shape != loc.shape or bool((scale < 0).any()):
            least = float(scale.min()) if scale.numel() else 0.0
            raise ValueError(
                f"scale must have loc's shape {tuple(loc.shape)}, and no negative number; got {tuple(scale.shape)} from {least:g}"
            )
        inputs = SpikeSlabInputs(loc, scale.square(), self.model.probability[view].to(loc.dtype), validate_args=False)
        return self.predict_at(inputs, view, full_covariance)

    def _as_latents(self, name: str, value: Tensor) -> Tensor:
        """Returns latents ``(N, Q)`` in the model's type."""
        latents = as_data(name, value).to(self.model.loc)
        if latents.dim() != 2 or latents.shape[1] != self.model.num_latents:
            raise ValueError(f"{name} must have shape (N, {self.model.num_latents}); got {tuple(latents.shape)}")
        return latents

    @torch.no_grad()
    def predict_at(self, inputs: SpikeSlabInputs, view: int = 0, full_covariance: bool = False) -> Prediction:
        """Returns a view's outputs at spike-and-slab inputs, in blocks."""
        if not bool(inputs.loc.isfinite().all() & inputs.variance.isfinite().all()):
            raise ValueError(f"latents must be finite; got means {describe(inputs.loc)} and variances {describe(inputs.variance)}")
        process, posterior = self.model.views[view], self.inducing[view]
        size = 64 * (len(process.inducing) ** 2 + process.num_functions ** (2 if full_covariance else 1))
        noise = process.noise.double() if process.likelihood is None else torch.zeros_like(process.noise).double()
        parts = [
            predict(process.statistics(inputs.rows(rows), per_datum=True), posterior, noise, full_covariance)
            for rows in row_slices(max(1, len(inputs)), size)
        ]
        mean = torch.cat([part.mean for part in parts]) + process.center
        covariance = torch.cat([part.covariance for part in parts if part.covariance is not None]) if full_covariance else None
        return Prediction(mean, torch.cat([part.variance for part in parts]), noise, covariance)

    @names_arguments
    def view_inputs(self, latents: Latents, view: int) -> SpikeSlabInputs:
        r"""What a view sees of the latents of new data points.

        For a view that was observed: a slab where its switch is on. For another: its switch on, and the slab
        if some observed view uses the dimension, :math:`\gamma_{cq}\rho_q`, the prior otherwise, :math:`\gamma_{cq}(1 - \rho_q)`.
        """
        gamma = self.model.probability[check_count("view", view, 0, self.model.num_views - 1)].detach()
        if view in latents.views:
            return SpikeSlabInputs(latents.loc, latents.scale.square(), gamma.to(latents.loc))
        slab = gamma * latents.usage
        rest = (1 - slab).clamp(min=torch.finfo(slab.dtype).tiny)
        share = (gamma * (1 - latents.usage) / rest).clamp(max=1.0)
        return SpikeSlabInputs(latents.loc, latents.scale.square(), slab.to(latents.loc), share.to(latents.loc))

    seen_by = Renamed("view_inputs")

    @names_arguments
    def reconstruct(self, latents: Latents, view: int = 0, full_covariance: bool = False) -> Prediction:
        """A view's outputs, observed or not, for new data points."""
        return self.predict_at(self.view_inputs(latents, view), view, full_covariance)

    @names_arguments
    @torch.no_grad()
    def response(self, latents: Latents, view: int = 0) -> Tensor:
        """A view's expected outputs: means, probabilities or rates."""
        prediction, likelihood = self.reconstruct(latents, view), self.model.views[view].likelihood
        return prediction.mean if likelihood is None else likelihood.response(prediction.mean, prediction.variance)

    @torch.no_grad()
    def at(self, times: Tensor, sequences: Tensor | None = None) -> Latents:
        """Latents of data points whose time alone is known, for :meth:`reconstruct`.

        Args:
            times: time stamps ``(N,)``.
            sequences: the sequences that they belong to. Default: that of the first data point.

        Raises:
            ValueError: if the model has no prior over time.
        """
        loc, scale = self._prior(times, sequences, len(times))
        return Latents(loc, scale, torch.ones(loc.shape[1]).to(loc), (), loc.new_zeros(len(loc)))

    def _prior(self, times: Tensor | None, sequences: Tensor | None, num: int) -> tuple[Tensor, Tensor]:
        """Means and deviations of new latents before anything is seen of them."""
        if times is None:
            zeros = self.model.prior.new_zeros(num, self.model.num_latents, dtype=torch.float64)
            return zeros, torch.ones_like(zeros)
        if self.model.time_prior is None:
            raise ValueError("times are for models with a time_prior; this one has none")
        if len(times) != num:
            raise ValueError(f"there must be a time for each of the {num} data points; got {len(times)}")
        with torch.no_grad():
            return self.model.time_prior.at(times, sequences)

    # --- from outputs to latents ---

    @leaves_inference_mode
    def infer(
        self,
        y: Tensor | Mapping[int, Tensor] | Sequence[Tensor | None],
        *,
        steps: int = 100,
        candidates: int = 200,
        tolerance: float = 1e-7,
        times: Tensor | None = None,
        sequences: Tensor | None = None,
    ) -> Latents:
        r"""Latents of new data points from some or all of their outputs.

        Raises the exact contribution of the new points to the bound, the posteriors of switches and functions held,

        .. math:: \sum_{c \in V} E^{(c)}_n - \sum_q \rho_q\,\mathrm{KL}_{nq}, \qquad
                  \rho_q = 1 - \textstyle\prod_{c \in V} (1 - \gamma_{cq}),

        by quasi-Newton steps, for each point by itself, from the best of some of the training latents. The slab of a dimension is used if
        one of the *observed* views uses it.

        Args:
            y: outputs ``(N, D_c)`` of the only view, of all views (``None`` for unobserved ones), or by the view's number; NaN where
                missing.
            steps: most steps of each data point. A step that gains nothing is shortened, and counts, too.
            candidates: training points, evenly spaced, to start from the best of.
            tolerance: gain expected of a data point's step, in nats, below which it ends.
            times: time stamps ``(N,)`` of the new points, under a prior over time. Each point then
                has the normal prior that follows from the latents of the training data. Default:
                they are at unknown times.
            sequences: the sequences that they belong to. Default: that of the first data point.

        Raises:
            TypeError: if views are no tensors or arrays.
            ValueError: if no view is given or the shapes do not fit.
        """
        steps, candidates = check_count("steps", steps, least=0), check_count("candidates", candidates)
        data = self._check_views(y)
        usage = 1 - torch.stack([1 - self.model.probability[c].detach() for c in data]).prod(0)
        prior = self._prior(times, sequences, len(next(iter(data.values()))))
        if times is not None:
            # A dimension that no view given uses has not the prior of all, but that of its time.
            usage = torch.ones_like(usage)
        loc = self._start(data, usage, candidates, prior)
        parts = []
        size = 64 * max(len(view.inducing) ** 2 + view.num_functions for view in self.model.views)
        for rows in row_slices(max(1, len(loc)), size):
            here, near = {c: value[rows] for c, value in data.items()}, (prior[0][rows], prior[1][rows])
            parts.append(self._maximize(here, usage, loc[rows], near, steps, tolerance))
        loc, log_scale, bound = (torch.cat(part) for part in zip(*parts, strict=True))
        return Latents(loc, log_scale.exp(), usage, tuple(data), bound)

    def _maximize(
        self, data: dict[int, Tensor], usage: Tensor, loc: Tensor, prior: tuple[Tensor, Tensor], steps: int, tolerance: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Improved means and log deviations, and each data point's contribution."""
        num = loc.shape[1]

        def contribution(points: Tensor, rows: Tensor) -> Tensor:
            here, near = {c: value[rows] for c, value in data.items()}, (prior[0][rows], prior[1][rows])
            return self._contribution(here, usage, points[:, :num], points[:, num:], near)

        # Latents start with a deviation of 0.1, and the first step has a length of 0.1.
        starts = torch.cat([loc, torch.full_like(loc, 0.1).log()], 1)
        best = maximize_batched(contribution, starts.unsqueeze(0), steps, 0.1, tolerance)
        return best[:, :num], best[:, num:], contribution(best, torch.arange(len(loc), device=loc.device))

    def _check_views(self, y: Tensor | Mapping[int, Tensor] | Sequence[Tensor | None]) -> dict[int, Tensor]:
        check_column_names(self, "y", y)
        y = as_tensors(y, self.model.loc)
        values = (
            {0: y} if isinstance(y, Tensor) else dict(y) if isinstance(y, Mapping) else {c: v for c, v in enumerate(y) if v is not None}
        )
        views = {c: v for c, v in values.items() if v is not None}
        refuse_lists(views.values())
        sizes = self.model.num_observed
        if not views or len({len(v) for v in views.values()}) > 1:
            raise ValueError(
                f"give at least one view, and all of them for the same data points; got { ({c: tuple(v.shape) for c, v in views.items()}) }"
            )
        for c, v in views.items():
            if c not in range(len(sizes)) or v.dim() != 2 or v.shape[1] != sizes[c]:
                raise ValueError(f"view {c} must have the shape (N, D_c) with D = {sizes}; got {tuple(v.shape)}")
            refuse_large(f"view {c}", v)
            self.model.views[c].check_labels(v, c)
        return {c: v if v.is_floating_point() else v.to(self.model.views[c].center) for c, v in sorted(views.items())}

    @torch.no_grad()
    def _start(self, data: dict[int, Tensor], usage: Tensor, candidates: int, prior: tuple[Tensor, Tensor]) -> Tensor:
        """The training points' latent mean that explains each output best."""
        every = max(1, self.model.num_data // candidates)
        loc = self.model.loc.detach()[::every]
        precision = usage / prior[1].square()
        score = (precision * prior[0]) @ loc.double().mT - precision @ loc.double().square().mT / 2
        for c, y in data.items():
            prediction, likelihood = self.predict(loc, c), self.model.views[c].likelihood
            if likelihood is not None:
                score = score + likelihood.log_prob(y.double().unsqueeze(1), prediction.mean)
                continue
            score = score + log_prob_of_each(y.double(), prediction.mean, prediction.variance + prediction.noise)
        return loc[score.argmax(1)].double()

    def _contribution(self, data: dict[int, Tensor], usage: Tensor, loc: Tensor, log_scale: Tensor, prior: tuple[Tensor, Tensor]) -> Tensor:
        """Contribution of each new data point to the bound, ``(N,)``."""
        mean, deviation = prior
        square = ((loc - mean).square() + (2 * log_scale).exp()).double() / deviation.square()
        total = -(usage * (square - 2 * log_scale.double() + 2 * deviation.log() - 1)).sum(1) / 2
        for c, y in data.items():
            gamma = self.model.probability[c].detach().to(loc)
            inputs = SpikeSlabInputs(loc, (2 * log_scale).exp(), gamma, validate_args=False)
            total = total + self.model.views[c].log_likelihood(inputs, y, self.inducing[c], per_datum=True)
        return total

    # --- neighbours ---

    @names_arguments
    def distances(self, latents: Latents, views: tuple[int, int] = (0, 1), points: Tensor | None = None) -> Tensor:
        r"""Distances ``(N, N_train)`` to training data in dimensions two views share.

        .. math:: d_{ij}^2 = \sum_q \gamma_{1q} \gamma_{2q} (\mu^*_{iq} - \mu_{jq})^2

        Args:
            latents: latents of the new points, from one of the views.
            views: the two views.
            points: latents to compare with. Default: those of the training data.
        """
        pair = [check_count(f"views[{place}]", view, 0, self.model.num_views - 1) for place, view in enumerate(views)]
        weight = self.model.probability[pair].detach().prod(0).sqrt()
        loc = self.model.loc.detach() if points is None else self._as_latents("points", points)
        return torch.cdist(latents.loc.double() * weight, loc.double() * weight)

    def group_dimensions(self, threshold: float = 0.5) -> dict[str, list[int]]:
        """The dimensions by use.

        Keys are ``"shared"`` by all views, ``"private 0"``, ..., ``"partly shared"`` (some views), ``"unused"``.
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be a probability, between 0 and 1; got {threshold}")
        is_on = self.model.probability.detach() > threshold
        count, num_views = is_on.sum(0), self.model.num_views
        groups = {"shared": (count == num_views).nonzero().flatten().tolist(), "unused": (count == 0).nonzero().flatten().tolist()}
        if num_views > 1:
            groups |= {f"private {c}": (is_on[c] & (count == 1)).nonzero().flatten().tolist() for c in range(num_views)}
        if num_views > 2:
            groups["partly shared"] = ((count > 1) & (count < num_views)).nonzero().flatten().tolist()
        return groups

    shared = Renamed("group_dimensions")


@names_arguments
@convert_owner.register(SpikeSlabMRD)
@takes_arrays
@torch.no_grad()
def latents_to_arviz(model: SpikeSlabMRD, y: Views, *, num_samples: int = 125, num_chains: int = 4, seed: int | None = None) -> Any:
    r"""Converts the posterior of switches and latents for ArviZ.

    ``to_arviz(model, y)`` and ``to_arviz(model.model, model.guide, y)`` do the same. For a posterior over whole patterns of switches pass
    it ``model.switch_model`` and its :class:`~pyro_truncated.AutoTruncated`.

    =====================  ==========================================================================================================
    group                  content
    =====================  ==========================================================================================================
    ``posterior``          independent draws of the switches ``b`` (view, latent) and the latents ``x`` (data, latent)
    ``latent_posterior``   without sampling noise: ``probability`` and ``prior`` of the switches, their ``log_odds``, ``relevance`` (view,
                           latent). Also ``loc`` and ``scale`` of the latents where in use (data, latent), and the ``bound``
    ``observed_data``      ``y_0``, ``y_1``, ... (data, output)
    =====================  ==========================================================================================================

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> idata = latents_to_arviz(model, y, num_samples=10)

    Args:
        model: the trained model.
        y: its data.
        num_samples: number of draws per chain.
        num_chains: number of chains that the draws are dealt to.
        seed: seeds the draws. Without it torch's global generator is used.

    Raises:
        ValueError: if ``num_samples`` or ``num_chains`` is not positive or the data do not fit the model.
    """
    # Half a second that only those who ask for it wait.
    import xarray as xr

    num_samples, num_chains = check_counts(num_samples=num_samples, num_chains=num_chains)
    views = model.check_data(y)
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**31, ())) if seed is None else check_count("seed", seed, least=0))
    marginals = model.latents()
    gamma, loc, scale = (value.detach().cpu().double() for value in (model.probability, marginals.loc, marginals.scale))
    switches = torch.rand(num_chains, num_samples, *gamma.shape, generator=generator, dtype=torch.float64) < gamma
    is_used = switches.any(2).unsqueeze(2)
    noise = torch.randn(num_chains, num_samples, *loc.shape, generator=generator, dtype=torch.float64)
    latents = (
        torch.where(is_used, loc + scale * noise, noise) if model.time_prior is None else model.time_prior.draws(is_used.squeeze(2), noise)
    )
    datasets = {
        "posterior": xr.Dataset(
            {
                "b": (("chain", "draw", "view", "latent"), _array(switches.to(torch.int8))),
                "x": (("chain", "draw", "data", "latent"), _array(latents)),
            }
        ),
        "latent_posterior": xr.Dataset(
            {
                "probability": (("view", "latent"), _array(model.probability)),
                "prior": (("view", "latent"), _array(model.prior)),
                "log_odds": (("view", "latent"), _array(model.probability.logit())),
                "relevance": (("view", "latent"), _array(model.relevance())),
                "loc": (("data", "latent"), _array(loc)),
                "scale": (("data", "latent"), _array(scale)),
                "bound": ((), _array(model.bound(views))),
            }
        ),
        "observed_data": xr.Dataset({f"y_{c}": (("data", f"output_{c}"), _array(v)) for c, v in enumerate(views)}),
    }
    attributes = {"inference_library": "pyro", "inference_library_version": pyro.__version__, "inference_method": "variational"}
    numbered = {name: data.assign_coords({d: np.arange(n) for d, n in data.sizes.items()}) for name, data in datasets.items()}
    return make_idata(**{name: data.assign_attrs(attributes) for name, data in numbered.items()})


def _array(value: Tensor) -> np.ndarray:
    return value.detach().cpu().numpy()


@names_arguments
@torch.no_grad()
def plot_latents(
    posterior: Posterior, ax: Any, *, view: int = 0, labels: Any = None, dims: tuple[int, int] | None = None, resolution: int = 40
) -> Any:
    """Plots latent means in two dimensions over a view's predictive deviation.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_latents(Posterior(model, y), ax, dims=(0, 1), resolution=10)

    Args:
        posterior: the trained model.
        ax: matplotlib axes.
        view: the view whose uncertainty is shown.
        labels: classes of the data points, for their colours: numbers or names ``(N,)``.
        dims: the dimensions. Default: the view's two most relevant ones.
        resolution: points of the background per side; the other dimensions are at zero.

    Raises:
        ValueError: for fewer than two dimensions, or another number of labels than data points.
    """
    model = posterior.model
    if dims is None:
        dims = tuple(model.relevance()[view].argsort(descending=True)[:2].tolist())
    number = model.num_latents
    if len(dims) != 2 or not all(-number <= dim < number for dim in dims) or (dims[0] - dims[1]) % number == 0:
        raise ValueError(f"dims must be two different dimensions of the model's {model.num_latents}; got {dims}")
    loc = model.loc.detach()[:, list(dims)]
    low, high = loc.amin(0), loc.amax(0)
    margin = 0.15 * (high - low)
    axes = [torch.linspace(float(a), float(b), resolution, dtype=loc.dtype) for a, b in zip(low - margin, high + margin, strict=True)]
    grid = torch.zeros(resolution**2, model.num_latents, dtype=loc.dtype)
    grid[:, list(dims)] = torch.cartesian_prod(*axes)
    deviation = posterior.predict(grid.to(model.loc.device), view).variance.mean(1).clamp(min=0).sqrt().reshape(resolution, resolution)
    ax.pcolormesh(axes[0].numpy(), axes[1].numpy(), deviation.mT.cpu().numpy(), cmap="Greys", shading="auto", rasterized=True)
    points = loc.cpu().numpy()
    if labels is None:
        ax.scatter(points[:, 0], points[:, 1], s=6, color="tab:blue")
    else:
        names = labels.cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
        if names.shape != (len(points),):
            raise ValueError(f"labels must have shape ({len(points)},), one for each data point; got {names.shape}")
        classes, places = np.unique(names.astype(str) if names.dtype == object else names, return_inverse=True)
        for number, label in enumerate(classes.tolist()):
            is_class = places == number
            ax.scatter(points[is_class, 0], points[is_class, 1], s=6, color=f"C{number}", label=str(label))
        ax.legend(frameon=True, markerscale=2, fontsize=8)
    ax.set(xlabel=f"latent {dims[0]}", ylabel=f"latent {dims[1]}")
    return ax


@names_arguments
@torch.no_grad()
def plot_relevance(model: SpikeSlabMRD, ax: Any, *, view: int = 0) -> Any:
    """Plots weights of the kernel and switches for a view's dimensions.

    Bars to the left are relevances (see ``SpikeSlabMRD.relevance``) without the switches, divided by the largest. Bars to the right are the
    probabilities of the switches.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_relevance(model, ax)

    Args:
        model: the trained model.
        ax: matplotlib axes.
        view: the view.
    """
    gamma = model.probability[view].detach()
    with model.fix_switches(1.0):
        weight = model.relevance()[view]
    order = weight.argsort(descending=True)
    weights, switches = (v[order].double().cpu().numpy() for v in (weight / weight.max(), gamma))
    positions = torch.arange(len(order)).numpy()
    ax.bar(positions - 0.2, weights, width=0.4, color="0.6", label="relevance by the kernel (largest = 1)")
    ax.bar(positions + 0.2, switches, width=0.4, color="tab:green", label="probability of the switch")
    ax.set_xticks(positions, [str(q) for q in order.tolist()])
    ax.set(xlabel="latent dimension", ylim=(0, 1.3))
    ax.legend(frameon=False, fontsize=8)
    return ax


@names_arguments
@torch.no_grad()
def plot_switches(model: SpikeSlabMRD, ax: Any, *, names: Sequence[str] | None = None) -> Any:
    """Plots probabilities of all views' switches for each dimension.

    Example:
        >>> y = torch.randn(20, 2) @ torch.randn(2, 5)
        >>> model = SpikeSlabGPLVM(20, 5, num_latents=3)
        >>> result = pyro_truncated.gplvm.fit(model, y, steps=5, warm_up=5, rounds=1)
        >>> from matplotlib.figure import Figure
        >>> ax = Figure().subplots()
        >>> ax = plot_switches(model, ax)

    Args:
        model: the trained model.
        ax: matplotlib axes.
        names: names of the views. Default: "view 1", "view 2", ...

    Raises:
        ValueError: if the number of names is not that of the views.
    """
    labels = [f"view {c + 1}" for c in range(model.num_views)] if names is None else list(names)
    if len(labels) != model.num_views:
        raise ValueError(f"names must name each of the {model.num_views} views; got {labels}")
    positions = torch.arange(model.num_latents).numpy()
    width = 0.8 / model.num_views
    for c, (label, row) in enumerate(zip(labels, model.probability.cpu().numpy(), strict=True)):
        ax.bar(positions + width * (c - (model.num_views - 1) / 2), row, width=width, color=f"C{c}", label=label)
    if bool((model.prior == model.prior[0, 0]).all()):
        ax.axhline(float(model.prior[0, 0]), color="0.5", linewidth=1, linestyle="dashed", label="prior")
    ax.set(xlabel="latent dimension", xticks=positions, ylim=(0, 1.3))
    ax.legend(frameon=False, fontsize=8, ncols=3)
    return ax
