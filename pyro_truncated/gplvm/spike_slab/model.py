"""Manifold relevance determination: views of one latent space, each of which switches latent dimensions on and off."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from pyro.nn.module import pyro_method
from pyro.ops.provenance import detach_provenance
from torch import Tensor

from pyro_truncated.gp.uncertain.inputs import SpikeSlabInputs
from pyro_truncated.gplvm.spike_slab.bound import SpikeSlabBound, Views
from pyro_truncated.utils.arrays import takes_arrays


class SpikeSlabMRD(SpikeSlabBound):
    r"""Gaussian processes from one latent space to several views, with a switch for every latent dimension in every view.

    .. math:: b_{cq} \sim \mathrm{Bernoulli}(\pi), \quad x_{nq} \sim \mathcal N(0, 1), \quad f^{(c)}_d \sim \mathcal{GP}(0, k_c), \quad
              y^{(c)}_{nd} \sim \mathcal N\left(f^{(c)}_d(b_c \circ x_n), \beta_c^{-1}\right)

    with the posterior :math:`q(b_{cq} = 1) = \gamma_{cq}` and :math:`q(x_{nq} \mid b) = \mathcal N(\mu_{nq}, s_{nq})` if some view has
    dimension :math:`q` switched on, the prior otherwise. The bound has no sampling noise: kernels' expectations are in closed form (see
    :func:`~pyro_truncated.gp.psi_statistics`), and the inducing variables are integrated out (``collapsed``) or have a Gaussian
    posterior of their own, with which one can train on minibatches.

    A dimension can be removed by its switch or by the kernel (a linear weight that vanishes, an infinite length-scale), so a switch that is
    on does not mean a dimension that is used, and at :math:`\pi = 1/2` the bound does not even prefer "off" for a dimension that the kernel
    has removed. Hence the default :math:`\pi < 1/2`; see also :meth:`relevance`.

    Example::

        model = SpikeSlabMRD(len(images), [images.shape[1], texts.shape[1]], num_latents=10)
        fit(model, [images, texts])                     # or initialize(model, ...), and SVI with Analytic_ELBO()
        model.probability                               # of every switch, (C, Q)

    A view may hold labels or counts, which may be missing for some data points (NaN rows), as in any view::

        model = SpikeSlabMRD(len(images), [images.shape[1], 1], num_latents=10, likelihood=["gaussian", CategoricalLabels(10)])
        fit(model, [images, labels])                    # labels (N, 1): class numbers, NaN where unknown
        posterior = Posterior(model, [images, labels])
        posterior.response(posterior.infer({0: new_images}), view=1)    # probabilities of the classes

    .. note:: Switches tell what the bound prefers. With RBF kernels that can be fewer latents than there are signals, if some follow from
        others by curved functions. Of three signals on a line, one private to either view and one shared (section 5.1 of the paper, 50
        points, noise 0.1, seeds 31 and 32 of the data), the bound is 119 and 133 with these three latents, trained from the true signals,
        but 245 and 266 with two. Where training ends depends on the way there: :func:`~pyro_truncated.gplvm.fit` at 119, with the pattern
        of the signals, and at 266, with two; SVI, on the first of these data, at 239, with two. With linear kernels, as in the paper, the
        pattern is found by ``fit`` and by SVI. SVI takes five times as long and more (2000 steps of Adam, 10 to 15 CPU seconds; RBF 37,
        where ``fit`` takes 6).

    Args:
        num_data: number of data points ``N``.
        num_observed: number of outputs of each view.
        num_latents: number of latent dimensions ``Q``.
        kernel: ``"rbf"``, ``"linear"``, a kernel (each further view gets a copy), or a function that makes one; or one for each view.
        num_inducing: inducing inputs ``M`` of each view; default: 50, at most ``N``. A ``LinearARD`` kernel is exact with ``Q``
            inducing inputs at the unit vectors, and gets these.
        likelihood: ``"gaussian"``, ``"bernoulli"``, ``"poisson"``, :class:`~pyro_truncated.gplvm.CategoricalLabels`; or one for each
            view. Those that are not Gaussian have a local quadratic bound, whose points of contact are learned along.
        time_prior: Gaussian processes over time for the latents, see :class:`~pyro_truncated.gplvm.TimePrior`; default: data points
            are independent.
        prior: prior probability :math:`\pi` of a switch, a number or ``(C, Q)``.
        collapsed: whether the inducing variables are integrated out at their optimal posterior, which takes all data at every step.
        expectation: how to take expectations of kernels without closed form.
        dtype: floating point type of the parameters; sums and factorisations are in float64 anyway.

    Attributes:
        loc: means :math:`\mu` of the latents, ``(N, Q)``.
        scale: standard deviations :math:`\sqrt s`, ``(N, Q)``.
        logits: log odds of the switches, ``(C, Q)``; see :attr:`probability`.
        prior: prior probabilities of the switches, ``(C, Q)``.
        num_steps: training steps by :class:`Analytic_ELBO` since the model was made or initialised, a buffer.
        views: the Gaussian processes.

    Raises:
        ValueError: if a number is out of range.

    Reference:
        Dai, Hensman and Lawrence, "Spike and slab Gaussian process latent variable models" (2015), section 4. Latents of new
        data have a tighter posterior than the paper's, see :meth:`~pyro_truncated.gplvm.Posterior.infer`.
    """

    # --- the Pyro programs ---

    @pyro_method
    @takes_arrays
    def model(self, y: Views | None = None, batch_size: int | None = None) -> list[Tensor]:
        """The generative model; without data it generates some.

        The inducing variables ``u_c`` are whitened. Given them the outputs have the mean of the sparse Gaussian process; the variance that
        it leaves enters as a factor, the usual variational one, so a stock ELBO estimates :meth:`bound` without bias. Labels and
        counts enter by the same local bounds.
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
            seen = [x * pattern[..., c, :] for c in range(self.num_views)]
            if y is None:
                return [view.generate(f"{c}", seen[c], whitened[c]) for c, view in enumerate(self.views)]
            points = [view.local_point(self.inputs(c, index), index) for c, view in enumerate(self.views)]
            return [
                view.observe(f"{c}", seen[c], whitened[c], data[index], points[c])
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
        r"""The model of the switches alone, everything else integrated out at its optimum: for posteriors over whole patterns of switches.

        .. math:: \log p(b) + \sum_c F_c(b_c) - \sum_q [\textstyle\bigvee_c b_{cq}] \sum_n \mathrm{KL}_{nq}

        Each pattern has inducing variables of its own. Sums of the exponential over any set of patterns are lower bounds of the evidence;
        over all of them the bound is at least as tight as with independent switches. Use it with :class:`~pyro_truncated.AutoTruncated`::

            guide = AutoTruncated(model.switch_model, num_states=32)
            svi = SVI(model.switch_model, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch()))
        """
        pattern = pyro.sample("b", dist.Bernoulli(self.prior).to_event(2))
        views = self.check_data(y)
        pyro.factor("bound", self.pattern_bounds(pattern, views))

    def pattern_bounds(self, patterns: Tensor, views: list[Tensor]) -> Tensor:
        """Bounds of the log likelihood of the data under given patterns of switches ``(*, C, Q)``: one collapsed bound each, ``(*)``."""
        flat = detach_provenance(patterns).reshape(-1, *self.prior.shape).double()  # taken one by one: it reads no others
        distinct, position = torch.unique(flat.flatten(1), dim=0, return_inverse=True)
        latents, found = self.latents(), []
        for row in distinct.view(-1, *self.prior.shape):
            terms = []
            for c, (view, data) in enumerate(zip(self.views, views, strict=True)):
                seen = SpikeSlabInputs(latents.loc, latents.scale.square(), row[c].to(latents.loc.dtype), validate_args=False)
                terms.append(view.optimal(seen, data)[0])
            found.append(torch.stack(terms).sum() - (row.amax(0) * latents.divergence).sum())
        return torch.stack(found)[position].reshape(patterns.shape[:-2])
