"""A superposition of Gaussian process decoders with switches."""

from __future__ import annotations

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.contrib.gp import kernels
from pyro.nn import PyroParam, pyro_method
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_truncated import Population
from pyro_truncated.distributions import ActiveSet, GivenActiveSet
from pyro_truncated.extend import Renamed, UniqueModule, names_arguments, takes_arrays
from pyro_truncated.models.data_model import cast_like, check_real


class GatedKernel(UniqueModule, kernels.Kernel):
    r"""A kernel over ``pose_dim`` inputs for each part that both inputs have.

    .. math:: k\bigl((b, z), (b', z')\bigr) = \sum_h b_h\, b'_h\; k_h(z_h, z'_h)

    An input is a row ``[b, z_1, ..., z_H]`` with ``H`` switches and ``H * pose_dim`` further numbers.
    """

    def __init__(self, parts: list[kernels.Kernel], pose_dim: int = 1) -> None:
        super().__init__(len(parts) * (1 + pose_dim))
        self.num_parts, self.pose_dim = len(parts), pose_dim
        for h, part in enumerate(parts):
            setattr(self, f"part{h}", part)

    def forward(self, X: Tensor, Z: Tensor | None = None, diag: bool = False) -> Tensor:
        """Covariances ``(N, M)`` of rows, or their diagonal ``(N,)``."""
        switches, poses = self._parts(X)
        others, other_poses = (switches, poses) if Z is None else self._parts(Z)
        total = X.new_zeros(())
        for h in range(self.num_parts):
            part = getattr(self, f"part{h}")
            if diag:
                total = total + switches[:, h].square() * part(poses[:, h], diag=True)
            else:
                total = total + switches[:, h, None] * others[:, h] * part(poses[:, h], other_poses[:, h])
        return total

    def _parts(self, X: Tensor) -> tuple[Tensor, Tensor]:
        return X[:, : self.num_parts], X[:, self.num_parts :].unflatten(-1, (self.num_parts, self.pose_dim))


class GatedDecoder(UniqueModule):
    r"""Images of parts in their own poses, learned from a few examples.

    .. math:: x_n = \sum_{h} b_{nh}\, f_h(z_{nh}) + \sigma\,\varepsilon, \qquad b_{nh} \sim \mathrm{Bernoulli}(\pi_h),
        \qquad z_{nh} \sim \mathcal N(0, I), \qquad f_h \sim \mathcal{GP}

    The functions that turn poses into images are integrated out. The examples with known switches and poses are the active set. Given it,
    every other image is independent, and the posterior over its switches can be truncated to a population:

    .. math:: \mathcal F = \log p(x_A \mid b_A, z_A) + \sum_n \log \sum_{b \in K_n} p(x_n \mid x_A, b, z_n)\, p(b)\, p(z_n) / q(z_n \mid b)

    Poses are guided by a network (:meth:`pose_guide`), which :meth:`dream` teaches with images that the model itself makes up.

    .. note:: Inferred images do not join the active set: uncertain active images would have a joint density only, over all combinations of
        their states. Poses of the examples have to be known, as their likelihood has many optima.

    Example::

        model = GatedDecoder(examples, switches, poses)
        model.dream(500)
        guide = AutoTruncated(model, num_states=8, conditional=model.pose_guide)
        SVI(model, guide, Adam({"lr": 0.01}), Truncated_ELBO(EvolutionarySearch())).step(x)
        guide.marginals()["b"]  # probability that each part is present

    Args:
        outputs: examples ``(A, D)``.
        switches: their switches ``(A, H)``, zeros and ones.
        poses: their poses ``(A, H, P)``. Those of absent parts have no influence.
        width: hidden units of the network that guides poses.

    Raises:
        TypeError: if one of them is complex.
        ValueError: if the shapes do not fit, or a switch is neither zero nor one.
    """

    active_outputs: Tensor
    active_inputs: Tensor
    noise: Any
    rate: Any

    @names_arguments
    @takes_arrays
    def __init__(self, outputs: Tensor, switches: Tensor, poses: Tensor, width: int = 64) -> None:
        super().__init__()
        for name, values in {"outputs": outputs, "switches": switches, "poses": poses}.items():
            check_real(values, name)
        if poses.dim() != 3 or poses.shape[:2] != switches.shape or len(outputs) != len(switches):
            raise ValueError(
                f"examples (A, D), switches (A, H) and poses (A, H, P) must fit; got {tuple(outputs.shape)}, {tuple(switches.shape)}, "
                f"{tuple(poses.shape)}"
            )
        if spoiled := sum(int((~part.isfinite()).sum()) for part in (outputs, poses)):
            raise ValueError(f"examples must have finite outputs and poses; got {spoiled} entries that are not")
        if not bool(((switches == 0) | (switches == 1)).all()):
            raise ValueError(f"switches of the examples must be zeros and ones; got {float(switches.min()):g} to {float(switches.max()):g}")
        self.num_parts, self.pose_dim, self.num_outputs = poses.shape[1], poses.shape[2], outputs.shape[1]
        self.register_buffer("active_outputs", outputs)
        self.register_buffer("active_inputs", self.inputs(switches, poses))
        one = torch.ones(()).to(outputs)
        parts: list[kernels.Kernel] = [kernels.RBF(self.pose_dim, one.clone(), one.repeat(self.pose_dim)) for _ in range(self.num_parts)]
        self.kernel = GatedKernel(parts, self.pose_dim)
        self.noise = PyroParam(one.clone(), constraints.positive)
        self.rate = PyroParam(torch.full((self.num_parts,), 0.5).to(outputs), constraints.unit_interval)
        self._begin()
        sizes = (self.num_outputs, width), (width, width), (width, 2 * self.num_parts * self.pose_dim)
        first, second, last = (nn.Linear(*size).to(outputs) for size in sizes)
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)

    @torch.no_grad()
    def _begin(self) -> None:
        """Kernels, noise and rates before anything is learned."""
        switches = self.active_inputs[:, : self.num_parts]
        variance = self.active_outputs.square().mean() / switches.sum(1).mean().clamp(min=1.0)
        for h in range(self.num_parts):
            part = getattr(self.kernel, f"part{h}")
            part.variance, part.lengthscale = variance.clone(), torch.full_like(part.lengthscale, 0.5)
        # The noise is a tenth of the variance of a part.
        self.noise, self.rate = 0.1 * variance, torch.full_like(self.rate, 0.5)

    @names_arguments
    @takes_arrays
    def initialize(self, y: Tensor, generator: torch.Generator | None = None) -> GatedDecoder:
        """Resets what was learned; trains a new pose network by 600 dreams.

        Args:
            y: images ``(N, D)``, which play no role but for their shape.
            generator: source of randomness. Default: torch's global one.

        Raises:
            TypeError: if the images are complex.
            ValueError: if they are of another shape.
        """
        check_real(y)
        if y.ndim != 2 or y.shape[1] != self.num_outputs:
            raise ValueError(f"y must be images (N, {self.num_outputs}); got {tuple(y.shape)}")
        self._begin()
        with torch.random.fork_rng(enabled=generator is not None):
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            for layer in self.network.children():
                if isinstance(layer, nn.Linear):
                    layer.reset_parameters()
            # What a new network is taught by.
            self.dream(600)
        return self

    @staticmethod
    def inputs(switches: Tensor, poses: Tensor) -> Tensor:
        """Rows ``(*batch, H + H * P)`` of the kernel from switches ``(*batch, H)`` and poses ``(*batch, H, P)``."""
        flat = poses.flatten(-2)
        batch = torch.broadcast_shapes(switches.shape[:-1], flat.shape[:-1])
        return torch.cat([switches.to(flat).expand(*batch, -1), flat.expand(*batch, -1)], -1)

    def active_set(self) -> ActiveSet:
        """The processes given the examples."""
        return ActiveSet(self.active_inputs, self.active_outputs, self.kernel, self.noise)

    @takes_arrays
    def forward(self, x: Tensor, batch_size: int | None = None) -> None:
        """The program of images ``(N, D)`` that are no examples, missing pixels NaN."""
        check_real(x, "x")
        active = self.active_set()
        pyro.factor("examples", active.log_prob_terms().sum())
        with pyro.plate("data", len(x), subsample_size=batch_size) as i:
            switches = pyro.sample("b", dist.Bernoulli(self.rate).to_event(1))
            poses = pyro.sample("z", self._pose_prior())
            pyro.sample("x", GivenActiveSet(active, self.inputs(switches, poses)), obs=x[i])

    def _pose_prior(self) -> Any:
        return dist.Normal(self.active_outputs.new_zeros(self.num_parts, self.pose_dim), 1.0).to_event(2)

    @takes_arrays
    def infer_poses(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means and deviations ``(N, H, P)`` of the poses of images ``(N, D)``."""
        check_real(x, "x")
        loc, raw = self.network(x.nan_to_num(0.0)).unflatten(-1, (self.num_parts, 2 * self.pose_dim)).chunk(2, -1)
        # The least deviation of a pose.
        return loc, nn.functional.softplus(raw) + 1e-3

    poses_of = Renamed("infer_poses")

    @pyro_method
    @takes_arrays
    def pose_guide(self, states: dict[str, Tensor], x: Tensor, batch_size: int | None = None) -> None:
        """Samples poses given the switches, of absent parts from the prior."""
        present = states["b"].unsqueeze(-1) > 0.5
        loc, scale = self.infer_poses(pyro.subsample(x, event_dim=1))
        pyro.sample("z", dist.Normal(torch.where(present, loc, 0.0), torch.where(present, scale, 1.0)).to_event(2))

    def default_conditional(self) -> Any:
        """:meth:`pose_guide`, by which ``learn`` samples poses."""
        return self.pose_guide

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor, num_draws: int = 32) -> Tensor:
        r"""Posterior mean :math:`\langle \sum_h b_h f_h(z_h) \rangle` of images without noise, missing pixels filled in.

        Poses are integrated out by importance sampling. Within each state of the population, draws :math:`z \sim q(z \mid b)` of the
        network count in proportion to :math:`p(x \mid b, z)\, p(z) / q(z \mid b)`.

        Args:
            population: truncated posteriors over the switches. Its ``indices`` select the images among ``y``.
            y: all images, ``(N, D)``. NaN where pixels are missing.
            num_draws: draws of poses for every state.

        Returns:
            ``(n, D)`` for the population's images.
        """
        check_real(y)
        rows = population.select_rows(cast_like(y, y))
        active, switches = self.active_set(), population.states(rows.dtype)
        loc, scale = (part.unsqueeze(1) for part in self.infer_poses(rows))
        present = switches.unsqueeze(-1) > 0.5
        proposal = dist.Normal(torch.where(present, loc, 0.0), torch.where(present, scale, 1.0)).to_event(2)
        total, most = torch.zeros(*switches.shape[:2], self.num_outputs).to(rows), torch.full(switches.shape[:2], -torch.inf).to(rows)
        weights = torch.zeros_like(most)
        at_a_time = max(1, 2**22 // max(1, total.numel()))
        for first in range(0, num_draws, at_a_time):
            poses = proposal.sample((min(at_a_time, num_draws - first),))
            image = GivenActiveSet(active, self.inputs(switches, poses))
            chance = image.log_prob(rows.unsqueeze(1)) + self._pose_prior().log_prob(poses) - proposal.log_prob(poses)
            # Weights relative to the largest so far.
            largest = chance.amax(0).maximum(most)
            old, new, most = (most - largest).exp(), (chance - largest).exp(), largest
            total = old.unsqueeze(-1) * total + (new.unsqueeze(-1) * image.mean).sum(0)
            weights = old * weights + new.sum(0)
        means = total / weights.unsqueeze(-1)
        return torch.einsum("ns,nsd->nd", population.weights().to(means), means)

    @torch.enable_grad()
    def dream(self, steps: int, batch_size: int = 128, lr: float = 3e-3) -> list[float]:
        """Trains the pose network on images drawn from the model; returns losses."""
        optimizer = torch.optim.Adam(self.network.parameters(), lr)
        with torch.no_grad():
            active = self.active_set()
        losses = []
        for _ in range(steps):
            with torch.no_grad():
                switches = torch.bernoulli(self.rate.expand(batch_size, -1))
                poses = self._pose_prior().expand([batch_size]).sample()
                images = GivenActiveSet(active, self.inputs(switches, poses)).sample()
            log_prob = dist.Normal(*self.infer_poses(images)).log_prob(poses).sum(-1)
            loss = -(switches * log_prob).sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        # The next optimiser would add its gradients to the last ones.
        optimizer.zero_grad()
        return losses

    def parts(self, switches: Tensor, poses: Tensor) -> Tensor:
        """The mean image of each part alone, ``(N, H, D)``."""
        alone = switches.unsqueeze(-2) * torch.eye(self.num_parts).to(switches)
        with torch.no_grad():
            return self.active_set().predict(self.inputs(alone, poses.unsqueeze(-3)))[0]
