"""A variational autoencoder with binary latents and no encoder."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence

import pyro
import torch
from pyro.nn import PyroParam
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated import DisagreeingStartsWarning, Population, learn
from pyro_truncated.distributions import NormalOrMissing, or_missing
from pyro_truncated.extend import UniqueModule, check_counts, check_observable, names_arguments, selected_rows, takes_arrays
from pyro_truncated.models.data_model import SCALE_FLOOR, activation, cast_like, check_data, count_data
from pyro_truncated.models.dictionary import data_scale
from pyro_truncated.models.sparse_coding import BinarySparseCoding


class BinaryVAE(UniqueModule):
    r"""Binary latents under a neural network.

    .. math:: s_h \sim \mathrm{Bernoulli}(\pi_h), \quad y \sim \mathcal N(c + u f(s), \sigma^2 I).

    The network :math:`f` works in units of the data, about their mean: :meth:`initialize` sets :math:`c` and :math:`u`, until then 0 and 1.
    Missing entries of the data are NaN. The network, the prior and the noise are trained through the truncated posterior, whose states a
    search finds::

        guide = AutoTruncated(model, num_states=32)
        svi = SVI(model, guide, Adam({"lr": 3e-3}), Truncated_ELBO(EvolutionarySearch()))

    Args:
        num_observed: observed dimensions ``D``.
        num_latents: number of latents ``H``.
        hidden: widths of the hidden layers of a network with leaky rectifiers. Empty for a linear one.
        decoder: a network of your own instead, from states ``(*batch, H)`` to ``(*batch, D)``.
        dtype: type of the parameters. Default: torch's.

    Attributes:
        decoder: the network :math:`f`.
        center: :math:`c`, ``(D,)``.
        unit: :math:`u`, a scalar.
        scale: noise standard deviation :math:`\sigma`, a scalar.
        prior: probabilities :math:`\pi` that the latents are active, ``(H,)``.

    Reference:
        Guiraud, Drefs and Lücke, "Direct Evolutionary Optimization of Variational Autoencoders with Binary Latents", ECML PKDD 2022.
    """

    decoder: torch.nn.Module
    center: Tensor
    unit: Tensor
    scale: Tensor
    prior: Tensor

    @names_arguments
    def __init__(
        self,
        num_observed: int,
        num_latents: int,
        hidden: Sequence[int] = (64,),
        *,
        decoder: torch.nn.Module | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_counts(num_observed=num_observed, num_latents=num_latents)
        self.num_observed, self.num_latents = num_observed, num_latents
        if decoder is not None and not callable(decoder):
            raise TypeError(f"decoder must be a network; got {decoder!r}")
        self.decoder = _perceptron([num_latents, *hidden, num_observed], dtype) if decoder is None else decoder
        self.register_buffer("center", torch.zeros(num_observed, dtype=dtype))
        self.register_buffer("unit", torch.ones((), dtype=dtype))
        prior = torch.full((num_latents,), min(0.5, 2 / num_latents), dtype=dtype)
        self.scale = PyroParam(torch.ones((), dtype=dtype), constraints.positive)  # type: ignore[assignment]
        self.prior = PyroParam(prior, constraints.unit_interval)  # type: ignore[assignment]

    @takes_arrays
    def forward(self, y: Tensor | None = None, batch_size: int | None = None, num_data: int | None = None) -> Tensor:
        """The model of data ``y (N, D)``; without data it generates ``num_data`` observations."""
        decoder, scale, prior = self.decoder, self.scale, self.prior
        size = count_data(y, num_data)
        with pyro.plate("data", size, subsample_size=batch_size) as index:
            states = pyro.sample("s", activation(prior, self.num_latents))
            loc = self.center + self.unit * decoder(states)
            return pyro.sample("y", NormalOrMissing(loc, scale).to_event(1), obs=selected_rows(y, index))

    @names_arguments
    @torch.no_grad()
    @takes_arrays
    def initialize(self, y: Tensor) -> BinaryVAE:
        r"""Initialises from the data: :math:`\sigma` and :math:`u` are deviations, :math:`c` means.

        A network that ends in a linear layer gives zero for the state without active latents, which then explains the mean.

        Args:
            y: data ``(N, D)``, NaN where missing; a dimension that is never observed gets the mean of the others.

        Raises:
            ValueError: for data that training refuses, in its words: those outside the likelihood's support, by name and data point.
        """
        check_observable(self, check_data(y, self.num_observed), or_missing(constraints.real))
        layers = [layer for layer in self.decoder.modules() if isinstance(layer, torch.nn.Linear)]
        if layers and layers[-1].bias is not None and layers[-1].out_features == self.num_observed:
            nothing = self.decoder(torch.zeros(1, self.num_latents, dtype=self.prior.dtype, device=self.prior.device))
            layers[-1].bias.sub_(nothing.squeeze(0))
        rows = y.double()
        observed, center = rows[~rows.isnan()], rows.nanmean(0)  # NaN for dimensions that are never observed
        deviation = (rows - center).square().nanmean(0).nanmean().sqrt()
        unit = deviation.maximum(SCALE_FLOOR * data_scale(observed.square().sum(), torch.tensor(float(observed.numel()))))
        self.center.copy_(torch.where(center.isnan(), center.nanmean(), center))
        self.unit.copy_(unit)
        self.scale = unit.to(self.scale)
        self.prior = torch.full_like(self.prior, min(0.5, 2 / self.num_latents))
        return self

    @names_arguments
    @takes_arrays
    def draw_start(self, y: Tensor, generator: torch.Generator | None = None) -> BinaryVAE:
        """Initialises a new network by a linear model of the data.

        :func:`~pyro_truncated.learn` does so. From random weights, data points get states by chance, which the network then learns to
        decode. Those of a linear model, :class:`~pyro_truncated.models.BinarySparseCoding`, mostly are the causes of the data already.
        Learning it takes three to thirty seconds. Then the network is fitted to it. Layers without gradients stay as they are.

        Args:
            y: data ``(N, D)``, NaN where missing.
            generator: source of randomness. Default: torch's global one.

        Raises:
            ValueError: as :meth:`initialize`.
        """
        check_observable(self, check_data(y, self.num_observed), or_missing(constraints.real))
        with torch.random.fork_rng(enabled=generator is not None):
            if generator is not None:
                torch.manual_seed(int(torch.randint(2**62, (), generator=generator, device=generator.device)))
            for layer in self.decoder.modules():
                is_learned = any(value.requires_grad for value in layer.parameters(recurse=False))
                if is_learned and callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
            self.initialize(y)
            if any(value.requires_grad for value in self.decoder.parameters()):
                self._fit(_linear_start(y.to(torch.promote_types(self.prior.dtype, torch.float32)), self.num_latents))
        return self

    @torch.enable_grad()
    def _fit(self, linear: BinarySparseCoding) -> None:
        """Fits the network to a linear model, on states with all latents.

        Each latent is as frequent as given, and a fifth of the states at least has it, and lacks it. The learning rate falls to a tenth.
        """
        weight, bias, prior = (
            value.detach().to(self.prior) for value in (linear.weight, linear.bias, linear.prior.expand(self.num_latents))
        )
        # Steps, each with two hundred states.
        steps, often = 300, prior.clamp(0.2, 0.8).expand(200, -1)
        parameters = [value for value in self.decoder.parameters() if value.requires_grad]
        optimizer = torch.optim.Adam(parameters, lr=0.01)
        slower = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.1 ** (1 / steps))
        for _ in range(steps):
            states = torch.bernoulli(often.cpu()).to(often)
            target = (states @ weight.mT + bias - self.center) / self.unit
            optimizer.zero_grad()
            (self.decoder(states) - target).square().mean().backward()
            optimizer.step()
            slower.step()
        optimizer.zero_grad()
        with torch.no_grad():
            self.prior, self.scale = prior.clone(), linear.scale.detach().to(self.scale)

    def mean(self, states: Tensor) -> Tensor:
        """Means of observations ``(*batch, D)`` with states ``(*batch, H)``."""
        return self.center + self.unit * self.decoder(states)

    @torch.no_grad()
    @takes_arrays
    def reconstruct(self, population: Population, y: Tensor | None = None) -> Tensor:
        r"""Returns the posterior mean :math:`c + u \langle f(s) \rangle` of noise-free data.

        Args:
            population: truncated posteriors.
            y: all data, ``(N, D)``, whose type the result has, if it is one of real numbers; given the population they play no other role.
        """
        mean = population.expectation(lambda states: self.mean(states.to(self.prior.dtype)))
        return mean if y is None else cast_like(mean, population.select_rows(check_data(y, self.num_observed)))


def _perceptron(sizes: Sequence[int], dtype: torch.dtype | None) -> torch.nn.Module:
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [torch.nn.Linear(inputs, outputs, dtype=dtype), torch.nn.LeakyReLU(0.1)]
    return torch.nn.Sequential(*layers[:-1])


def _linear_start(y: Tensor, num_latents: int) -> BinarySparseCoding:
    """The best linear model of several annealed restarts."""
    linear = BinarySparseCoding(y.shape[1], num_latents, dtype=y.dtype).to(y.device)
    store = pyro.get_param_store()
    before = set(store)
    with warnings.catch_warnings():
        # The network goes on from there, and its own starts are compared.
        warnings.simplefilter("ignore", DisagreeingStartsWarning)
        # Steps of the linear model after its start: where it ends exactly does not matter to a
        # network that goes on from there.
        learn(linear, y, steps=10, progress=False)
    for name in set(store) - before:
        del store[name]
    return linear
