"""Gaussian process observations given latents and an active set."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from pyro.contrib.gp.kernels import Kernel
from pyro.distributions import TorchDistribution
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import effectful
from torch import Tensor
from torch.distributions import constraints

from pyro_truncated.distributed import collectives
from pyro_truncated.gp.active_sets import ActiveSet, conditional_log_prob, split_weights
from pyro_truncated.gp.cholesky import factorize
from pyro_truncated.gp.kernels import covariance, prior_variance
from pyro_truncated.utils.arguments import check_count, names_arguments
from pyro_truncated.utils.arrays import takes_arrays
from pyro_truncated.utils.constraints import larger_batch, or_missing


class ActiveSetScaleWarning(UserWarning):
    """A plate that subsamples scales an active set, which counts once.

    Example:
        >>> def model(z, x):
        ...     with pyro.plate("data", 20, subsample_size=10) as index:
        ...         likelihood = ActiveSetGaussianProcess(z[index], pyro.contrib.gp.kernels.RBF(1), 0.1, 4, 2)  # no num_data=20
        ...         pyro.sample("x", likelihood, obs=x[index])
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     pyro.poutine.trace(model).get_trace(torch.randn(20, 1), torch.randn(20, 2)).compute_log_prob()
        >>> {warning.category.__name__ for warning in caught}
        {'ActiveSetScaleWarning'}
    """


def warn_about_scale(num_active: int, batch_size: int, num_data: int | None = None) -> None:
    """Warns if handlers scale a minibatch's active points like all others.

    A plate that takes ``B`` of ``N`` data points multiplies every log density by ``N / B``, that of the active set, too. What is scaled on
    purpose, by :meth:`Split.weights` for example, differs between data points.
    """
    with _MessageRecorder() as recorder:
        effectful(lambda: None, type="active_set_scale")()
    message = recorder.message
    frame = next((f for f in message["cond_indep_stack"] if f.vectorized and f.dim == -1), None)
    if num_active == 0 or frame is None or frame.size != batch_size or (frame.full_size or frame.size) == frame.size:
        return
    if num_data is not None:
        if num_data != frame.full_size:
            _warn(f"plate '{frame.name}' takes {frame.size} of {frame.full_size} data points, but the distribution has num_data={num_data}")
        return
    scales = torch.as_tensor(message["scale"], dtype=torch.float64)
    # Of data points that several processes share, each takes an equal share.
    first, once = scales.flatten()[0], torch.tensor([1.0, 1.0 / collectives.size()], dtype=torch.float64)
    if torch.allclose(scales, first.expand_as(scales)) and not bool(torch.isclose(first.cpu(), once).any()):
        _warn(
            f"plate '{frame.name}' takes {frame.size} of {frame.full_size} data points and so multiplies the log density of the active "
            f"set, too, by {frame.full_size / frame.size:g}. Pass num_data={frame.full_size} to the distribution, or put "
            "poutine.scale(scale=split.weights(num_data)) around all sites of the plate."
        )


def _warn(text: str) -> None:
    warnings.warn(text, ActiveSetScaleWarning, stacklevel=4)


class _MessageRecorder(Messenger):
    """Keeps a message, with scale and plates of other handlers."""

    def _postprocess_message(self, msg: Any) -> None:
        self.message = msg


class GivenActiveSet(TorchDistribution):
    r"""Observations given a fixed active set: :math:`p(x_n \mid x_A, z_n)`, independent over data points.

    Use it where latents of single data points vary on their own, as under :class:`~pyro_truncated.AutoTruncated`: every state of a data
    point has its own density. Entries that are NaN are missing.

    Example:
        >>> kernel, noise = pyro.contrib.gp.kernels.RBF(1), torch.tensor(0.1)
        >>> active = ActiveSet(torch.randn(8, 1), torch.randn(8, 3), kernel, noise)
        >>> candidates = torch.randn(5, 6, 1)  # latents of six data points in five states
        >>> GivenActiveSet(active, candidates).log_prob(torch.randn(6, 3)).shape
        torch.Size([5, 6])

    Args:
        active_set: the posterior given the active points.
        latents: ``(*batch, Q)``.
        loc: mean of the outputs, a scalar or ``(D,)``, if the active set holds deviations from it.
        validate_args: whether to check parameters and values.
    """

    arg_constraints = {"latents": constraints.independent(constraints.real, 1), "loc": constraints.real}  # noqa: RUF012
    support = constraints.independent(or_missing(constraints.real), 1)
    has_rsample = True

    @takes_arrays
    def __init__(self, active_set: ActiveSet, latents: Tensor, *, loc: Tensor | float = 0.0, validate_args: bool | None = None) -> None:
        self.active_set, self.latents = active_set, latents
        self.loc = torch.as_tensor(loc, dtype=latents.dtype, device=latents.device)
        deviation, variance = active_set.predict(latents)
        self._mean, self._variance = deviation + self.loc, variance
        super().__init__(latents.shape[:-1], deviation.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> GivenActiveSet:
        """The same distribution over a larger batch."""
        larger = {name: getattr(self, name).expand(*batch_shape, -1) for name in ("latents", "_mean", "_variance")}
        return larger_batch(self, batch_shape, _instance, **larger)

    @property
    def mean(self) -> Tensor:
        """Predictive means given the active set, ``(*batch, D)``."""
        return self._mean

    @property
    def variance(self) -> Tensor:
        """Predictive variance of the observations ``(*batch, D)``."""
        return self._variance.expand(self.batch_shape + self.event_shape)

    @takes_arrays
    def log_prob(self, value: Tensor) -> Tensor:
        """Log densities ``(*batch,)`` of observations ``(*batch, D)`` over their observed entries."""
        if self._validate_args:
            self._validate_sample(value)
        return conditional_log_prob(value, self._mean, self._variance)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations, independent over data points and outputs."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        return self._mean + self._variance.sqrt() * torch.randn(shape, dtype=self._mean.dtype, device=self._mean.device)


class ActiveSetGaussianProcess(TorchDistribution):
    r"""Observations of many Gaussian processes, independent given an active set.

    The first ``num_active`` of the ``B`` data points are the active set ``A``, the others the rest ``R``:

    .. math:: \log p_A(x \mid z) = \log p(x_A \mid z_A) + \sum_{n \in R} \log p(x_n \mid x_A, z)

    This is a normalised density for every ``A``. The log density of an active point is its term :math:`\log p(x_a \mid x_{<a})` in the
    chain rule. The distribution belongs inside the data plate, with batch shape ``(B,)`` and event shape ``(D,)``.

    In a plate that subsamples ``N`` data points to ``B`` every log density is multiplied by ``N / B``. With ``num_data=N`` they are
    weighted by ``B / N`` and ``(B / N) (N - |A|) / |R|``, so that the plate's scale leaves

    .. math:: \log p(x_A \mid z_A) + \frac{N - |A|}{|R|} \sum_{n \in R} \log p(x_n \mid x_A, z),

    an unbiased estimate of the log density of all data under a random active set. Where other sites of the plate need the same weights,
    put ``poutine.scale(scale=split.weights(N))`` around all of them and leave ``num_data`` out.

    .. note:: The expectation over active sets is smaller than the log density of the full Gaussian process, on average by the total
        correlation of the rest given the active set. The gradient's expectation at the true parameters is zero all the same.

    Entries of an observation that are NaN are missing and contribute nothing. Active data points should be complete.

    Example:
        >>> kernel, z = pyro.contrib.gp.kernels.RBF(2), torch.randn(10, 2)
        >>> x = ActiveSetGaussianProcess(z, kernel, noise=0.1, num_active=4, num_outputs=3)
        >>> x.log_prob(x.sample()).shape
        torch.Size([10])

    Args:
        latents: ``(*batch, B, Q)``; batch dimensions are those of parallel draws.
        kernel: kernel of :mod:`pyro.contrib.gp.kernels`.
        noise: noise variance, a scalar.
        num_active: size of the active set, ``0 <= num_active <= B``.
        num_outputs: number of outputs ``D``.
        loc: mean of the outputs, a scalar or ``(D,)``.
        num_data: size ``N`` of the data set that the plate subsamples, or ``None`` for no weights.
        validate_args: whether to check parameters and values.

    Raises:
        ValueError: if sizes do not fit, latents are complex, or the noise is not a scalar. Also if
            all points of a minibatch are active.

    Warns: ActiveSetScaleWarning: if ``num_data`` is missing in a plate that subsamples, or differs from the plate's size.

    Reference:
        Moreno-Muñoz, Feldager and Hauberg, "Revisiting Active Sets for Gaussian Process Decoders", 2022, equation 6.
    """

    arg_constraints = {  # noqa: RUF012 - the attribute is an instance attribute in torch
        "latents": constraints.independent(constraints.real, 1),
        "noise": constraints.positive,
        "loc": constraints.real,
    }
    support = constraints.independent(or_missing(constraints.real), 1)
    has_rsample = True

    @names_arguments
    @takes_arrays
    def __init__(
        self,
        latents: Tensor,
        kernel: Kernel,
        noise: Tensor | float,
        num_active: int,
        num_outputs: int,
        *,
        loc: Tensor | float = 0.0,
        num_data: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if latents.dim() < 2 or latents.is_complex():
            raise ValueError(f"latents must be real and have shape (*batch, B, Q); got {latents.dtype} of shape {tuple(latents.shape)}")
        num_data = None if num_data is None else check_count("num_data", num_data)
        if max(kernel.active_dims) >= latents.shape[-1]:
            raise ValueError(f"the kernel looks at dimension {max(kernel.active_dims)} of latents; got shape {tuple(latents.shape)}")
        self.latents, self.kernel = latents, kernel
        self.noise = torch.as_tensor(noise, dtype=latents.dtype, device=latents.device)
        if self.noise.numel() != 1:
            raise ValueError(f"noise must be one variance for all outputs and data points; got shape {tuple(self.noise.shape)}")
        self.loc = torch.as_tensor(loc, dtype=latents.dtype, device=latents.device)
        num_active, num_outputs = check_count("num_active", num_active, least=0), check_count("num_outputs", num_outputs)
        self.num_active, self.num_data = num_active, num_data
        warn_about_scale(num_active, latents.shape[-2], num_data)
        # Computed here, so that impossible sizes are refused before any work.
        batch_size = latents.shape[-2]
        self.weights = split_weights(batch_size, num_active, batch_size if num_data is None else num_data, like=latents)
        # The kernel is evaluated here and not in log_prob, where parameters of a PyroModule would escape the trace of its model.
        head, tail = latents[..., :num_active, :], latents[..., num_active:, :]
        self._matrix, self._cross = covariance(kernel, head, head), covariance(kernel, head, tail)
        self._prior = prior_variance(kernel, latents)
        super().__init__(latents.shape[:-1], torch.Size([num_outputs]), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> ActiveSetGaussianProcess:
        """Returns the distribution with further batch dimensions on the left.

        Raises:
            ValueError: if the last batch dimension, that of the data points, would change.
        """
        batch_shape = torch.Size(batch_shape)
        if batch_shape == self.batch_shape:
            return self
        if batch_shape[-1] != self.batch_shape[-1]:
            raise ValueError(f"batch_shape must end in the number of data points, {self.batch_shape[-1]}; got {tuple(batch_shape)}")
        latents = self.latents.expand(batch_shape + self.latents.shape[-1:])
        arguments = (latents, self.kernel, self.noise, self.num_active, self.event_shape[0])
        return ActiveSetGaussianProcess(*arguments, loc=self.loc, num_data=self.num_data, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Prior mean ``(*batch, B, D)``."""
        return self.loc.expand(self.batch_shape + self.event_shape)

    @property
    def variance(self) -> Tensor:
        """Prior variance of the observations ``(*batch, B, D)``."""
        variance = self._prior + self.noise.reshape(())
        return variance.unsqueeze(-1).expand(self.batch_shape + self.event_shape)

    @takes_arrays
    def condition(self, value: Tensor) -> ActiveSet:
        """The posterior of deviations from ``loc`` given the active observations, ``(*batch, B, D)``."""
        outputs = (value - self.loc)[..., : self.num_active, :]
        return ActiveSet(self.latents[..., : self.num_active, :], outputs, self.kernel, self.noise, self._matrix)

    @takes_arrays
    def log_prob(self, value: Tensor) -> Tensor:
        """Log densities ``(*batch, B)`` of observations ``(*batch, B, D)``, weighted if ``num_data`` was given."""
        if self._validate_args:
            self._validate_sample(value)
        active = self.condition(value)
        terms = active.log_prob_terms()
        if self.num_active < self.latents.shape[-2]:
            mean, variance = active.predict_from(self._prior[..., self.num_active :], self._cross)
            rest = conditional_log_prob((value - self.loc)[..., self.num_active :, :], mean, variance)
            terms = torch.cat([terms.expand(rest.shape[:-1] + terms.shape[-1:]), rest], -1)
        return terms if self.num_data is None else terms * self.weights

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws observations of all data points, given those of the active set."""
        shape = torch.Size(sample_shape) + self.batch_shape + self.event_shape
        noise = torch.randn(shape, dtype=self.latents.dtype, device=self.latents.device)
        cholesky, _ = factorize(self._matrix, self.noise.reshape(()))
        white = noise[..., : self.num_active, :]
        basis = torch.linalg.solve_triangular(cholesky, self._cross, upper=False)
        variance = (self._prior[..., self.num_active :] - basis.square().sum(-2)).clamp(min=0.0) + self.noise.reshape(())
        rest = basis.mT @ white + variance.sqrt().unsqueeze(-1) * noise[..., self.num_active :, :]
        return self.loc + torch.cat([cholesky @ white, rest], -2)


class ActiveSetPosterior(ActiveSetGaussianProcess):
    r"""A normal posterior of the functions at all data points.

    It is a guide where observations are not Gaussian. In the model the functions ``f`` come from an :class:`ActiveSetGaussianProcess` over
    the same latents, with a small noise :math:`\varepsilon`. Here the functions of the active set have Gaussian sites, one pseudo-target
    per value, and the others follow as in the model:

    .. math:: q(f) \propto p(f_A \mid z_A) \prod_{a \in A} \mathcal N(y_a;\, f_a, \tau^2 I) \prod_{n \in R} p(f_n \mid f_A, z)

    so that :math:`\log q(f) - \log p(f) = \log \mathcal N(y_A; f_A, \tau^2) - \log \mathcal N(y_A; 0, K_{AA} + (\varepsilon + \tau^2) I)`.
    The width :math:`\tau` is shared, so that two Cholesky factors serve all outputs.

    Example:
        >>> kernel, z = pyro.contrib.gp.kernels.RBF(2), torch.randn(10, 2)
        >>> f = ActiveSetPosterior(z, kernel, noise=1e-3, num_active=4, targets=torch.randn(4, 3), width=0.5)
        >>> f.rsample().shape
        torch.Size([10, 3])

    Args:
        latents: ``(*batch, B, Q)``, active set first.
        kernel: the model's kernel.
        noise: the model's noise :math:`\varepsilon` of the functions.
        num_active: size of the active set.
        targets: pseudo-targets of the active points, ``(*batch, A, D)``.
        width: variance :math:`\tau^2` of the sites, a scalar.
        loc: mean of the functions, a scalar or ``(D,)``.
        num_data: as for the model's distribution.
        validate_args: whether to check parameters and values.
    """

    @names_arguments
    @takes_arrays
    def __init__(
        self,
        latents: Tensor,
        kernel: Kernel,
        noise: Tensor | float,
        num_active: int,
        targets: Tensor,
        width: Tensor | float,
        *,
        loc: Tensor | float = 0.0,
        num_data: int | None = None,
        validate_args: bool | None = None,
    ) -> None:
        if targets.shape[-2] != num_active:
            raise ValueError(f"targets are needed for the {num_active} active points; got shape {tuple(targets.shape)}")
        super().__init__(latents, kernel, noise, num_active, targets.shape[-1], loc=loc, num_data=num_data, validate_args=validate_args)
        self.targets, self.width = targets, torch.as_tensor(width, dtype=latents.dtype, device=latents.device).reshape(())

    def expand(self, batch_shape: Any, _instance: Any = None) -> ActiveSetPosterior:
        """See :meth:`ActiveSetGaussianProcess.expand`."""
        prior = super().expand(batch_shape)
        if prior is self:
            return self
        arguments = (prior.latents, self.kernel, self.noise, self.num_active, self.targets, self.width)
        return ActiveSetPosterior(*arguments, loc=self.loc, num_data=self.num_data, validate_args=False)

    def sites(self) -> ActiveSet:
        """The process of the functions, as deviations from ``loc``, given pseudo-targets."""
        latents = self.latents[..., : self.num_active, :]
        return ActiveSet(latents, self.targets - self.loc, self.kernel, self.noise + self.width, self._matrix)

    @takes_arrays
    def log_prob(self, value: Tensor) -> Tensor:
        """Log densities ``(*batch, B)`` of function values ``(*batch, B, D)``, weighted if ``num_data`` was given."""
        prior = super().log_prob(value)
        residual = self.targets - value[..., : self.num_active, :]
        gain = conditional_log_prob(residual, torch.zeros_like(residual), self.width.reshape(1, 1)) - self.sites().log_prob_terms()
        gain = gain if self.num_data is None else gain * self.weights[: self.num_active]
        return prior + torch.nn.functional.pad(gain, (0, prior.shape[-1] - gain.shape[-1]))

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draws function values: prior draws, moved by the difference of pseudo-targets."""
        draw = super().rsample(sample_shape) - self.loc
        head = draw[..., : self.num_active, :]
        noisy = head + self.width.sqrt() * torch.randn_like(head)
        (factor,) = self.sites().factors
        step = torch.cholesky_solve(self.targets - self.loc - noisy, factor.cholesky)
        identity = torch.eye(self.num_active, dtype=step.dtype, device=step.device)
        shifted = (self._matrix + self.noise.reshape(()) * identity) @ step
        return self.loc + draw + torch.cat([shifted, self._cross.mT @ step], -2)
