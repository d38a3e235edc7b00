"""Decoders for binary, count and categorical data: Gaussian process functions behind any observation distribution."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyro
import torch
from pyro.contrib.gp import kernels
from pyro.nn import PyroParam, pyro_method
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_truncated.distributions.active_set import ActiveSetGaussianProcess, ActiveSetPosterior
from pyro_truncated.gp.active_set import ActiveSet
from pyro_truncated.gp.splits import Split
from pyro_truncated.gplvm.latents import Predictor, principal_components
from pyro_truncated.gplvm.sas_decoder import SASDecoder

Observation = Callable[[Tensor], Any]


class PointwiseSites(nn.Module):
    """Pseudo-targets that grow linearly with each output's own value: ``slope * (x - centre)``, one slope and centre per output."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.full((num_outputs,), 4.0))
        self.centre = nn.Parameter(torch.full((num_outputs,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Targets ``(B, D)`` of data points ``(B, D)``."""
        targets: Tensor = self.slope * (x - self.centre)
        return targets


class SASFunctionDecoder(SASDecoder):
    r"""A decoder whose Gaussian processes are the parameters of any observation distribution, trained with stochastic active sets.

    The functions :math:`f` ``(B, F)`` are a latent site of the model with a guide of their own (:class:`ActiveSetPosterior`: Gaussian sites
    at the active points), and an observation distribution stands on them. With each active set the objective is

    .. math:: \sum_{a \in A} \mathbb E_q[\log p(x_a \mid f_a)] + \tfrac{N - |A|}{|R|} \sum_{n \in R} \mathbb E_q[\log p(x_n \mid f_n)]
        - \mathrm{KL}(q(f_A) \,\|\, p(f_A \mid z_A)) - \ldots

    (the KL terms of the latents follow as in :class:`SASDecoder`), a bound as there, estimated by draws.

    Example::

        decoder = SASFunctionDecoder(len(x), 784, lambda f: dist.Bernoulli(logits=f).to_event(1), bayesian=True)

    Args:
        num_data: number of data points ``N``.
        num_outputs: number of functions ``F``.
        observe: makes the distribution of observations with batch shape ``(*batch, B)`` from function values ``(*batch, B, F)``.
        latent_dim: dimension of the latent space.
        sites: maps data points ``(B, ...)`` to pseudo-targets ``(B, F)``, a module; default :class:`PointwiseSites`.
        options: as for :class:`SASDecoder`.

    The noise of :class:`SASDecoder` is that of the functions here, and small at the start.
    """

    width: Any

    def __init__(
        self, num_data: int, num_outputs: int, observe: Observation, latent_dim: int = 2, *, sites: nn.Module | None = None, **options: Any
    ) -> None:
        super().__init__(num_data, num_outputs, latent_dim, **options)
        self.observe = observe
        self.sites = PointwiseSites(num_outputs) if sites is None else sites
        self.noise = PyroParam(torch.tensor(0.05), constraints.positive)
        self.width = PyroParam(torch.tensor(4.0), constraints.positive)

    def initialize(self, x: Tensor, steps: int = 300, *, latents: Tensor | None = None) -> SASFunctionDecoder:
        """Starts from the principal components of the pseudo-targets, or from latents given; the functions start at mean zero."""
        self._check_data(x)
        self._check_latents(latents)
        with torch.no_grad():
            scores = principal_components(self.sites(x), self.latent_dim).to(self.loc) if latents is None else latents.to(self.loc)
            if isinstance(self.kernel, kernels.Isotropy):
                self.kernel.variance = torch.tensor(2.0).to(self.loc)  # type: ignore[assignment]
            if self.encoder is None:
                self.z_loc = scores
        if self.encoder is not None and steps:
            self._imitate(x, scores, steps)
        return self

    def _check_data(self, x: Tensor) -> None:
        if len(x) != self.num_data:
            raise ValueError(f"data must have {self.num_data} rows; got shape {tuple(x.shape)}")

    def _observe(self, z: Tensor, x: Tensor, split: Split) -> None:
        prior = ActiveSetGaussianProcess(z, self.kernel, self.noise_variance, split.num_active, self.num_outputs)
        functions = pyro.sample("f", prior)
        pyro.sample("x", self.observe(functions), obs=x[split.indices])

    @pyro_method
    def guide(self, x: Tensor, split: Split | None = None) -> None:
        """The approximate posterior of latents and functions of a minibatch."""
        split = self._split(split)
        with self._plate(split):
            z = self._sample_latents(x, split)
            targets = self.sites(x[split.active])
            pyro.sample("f", ActiveSetPosterior(z, self.kernel, self.noise_variance, split.num_active, targets, self.width))

    def condition_(self, x: Tensor, size: int | None = None, **options: Any) -> SASFunctionDecoder:
        """Keeps the pseudo-targets of all training data, or of ``size`` chosen ones; see :meth:`SASDecoder.condition_`."""
        self._check_data(x)
        with torch.no_grad():
            targets = self.sites(x)
            latents = self.latents(x)
            size = min(len(latents), 1000 if size is None else size)
            choose = options.pop("choose", None) or self._least_variance
            chosen = torch.arange(len(x)) if size == len(x) else choose(self.kernel, latents, size)
            self._cache = {"latents": latents[chosen].clone(), "outputs": targets[chosen].clone()}
        return self

    def posterior(self) -> ActiveSet:
        """The posterior of the functions given the pseudo-targets that are kept.

        Raises:
            RuntimeError: before :meth:`condition_`.
        """
        if self._cache is None:
            raise RuntimeError("call condition_(x) first: it keeps the data points that predictions condition on")
        cache = {name: value.to(self.loc.device) for name, value in self._cache.items()}
        with torch.no_grad():
            return ActiveSet(self.kernel, (self.noise_variance + self.width).detach(), cache["latents"], cache["outputs"])

    def infer(self, x: Tensor, *, starts: int = 3, steps: int = 100, lr: float = 0.05) -> Tensor:
        r"""Latents ``(M, Q)`` that maximise :math:`\log p(x \mid f = m(z)) + \log \mathcal N(z; 0, I)`, the functions at their means.

        Starts are the kept latents under which a data point is most probable.
        """
        posterior = self.posterior()
        with torch.no_grad():
            z = self._best_candidates(posterior, x, starts)
        z = z.clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr)
        for _ in range(steps):
            (z.grad,) = torch.autograd.grad(-self._log_joint(posterior, x, z).sum(), z)
            optimizer.step()
        with torch.no_grad():
            best = self._log_joint(posterior, x, z).argmax(0)
        return z.detach().gather(0, best[None, :, None].expand(1, *z.shape[1:])).squeeze(0)

    def _given(self, x: Tensor, latents: Tensor) -> ActiveSet:
        return ActiveSet(self.kernel, (self.noise_variance + self.width).detach(), latents, self.sites(x).detach())

    def _log_joint(self, posterior: Predictor, x: Tensor, latents: Tensor) -> Tensor:
        found: Tensor = self.observe(posterior.predict(latents)[0]).log_prob(x) - 0.5 * latents.square().sum(-1)
        return found

    def _best_candidates(self, posterior: Predictor, x: Tensor, num: int) -> Tensor:
        candidates = posterior.latents[:: -(-len(posterior.latents) // 200)]
        # One candidate at a time: all at once would need a tensor of candidates by data points by functions.
        values = torch.stack([self._log_joint(posterior, x, z.expand(len(x), -1)) for z in candidates])
        return candidates[values.topk(min(num, len(candidates)), 0).indices]
