"""What a regression writes to a file, what it must have been made from to be read, and predictions from the inducing inputs alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pyro_truncated.gp.data_kernels import DataKernel, InputKernel, bound_kernel
from pyro_truncated.gp.subset.basis import Basis, FreeBasis, covariances_with
from pyro_truncated.gp.subset.exact_regression import ExactPosterior
from pyro_truncated.gp.subset.gradient import noise_of
from pyro_truncated.gp.subset.sparse_posterior import SparsePosterior
from pyro_truncated.utils.arguments import names_arguments
from pyro_truncated.utils.former_spellings import takes_former_order


class SavedRegression(torch.nn.Module):
    """What :class:`SubsetGPRegression` writes and reads, and what it is as a function."""

    kernel: DataKernel
    index: Tensor
    targets: Tensor
    inducing_inputs: torch.nn.Parameter | None
    held_out: Tensor
    objective_value: float
    is_exact: bool
    _posterior: SparsePosterior | ExactPosterior | None
    predict: Callable[..., tuple[Tensor, Tensor]]

    def forward(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """The same as :meth:`predict`."""
        return self.predict(new, noiseless=noiseless)

    def save(self, path: str | Path) -> None:
        """Writes everything learned, and what it predicts with, but neither the training data nor the kernel's."""
        torch.save(self.state_dict(), path)

    def load(self, path: str | Path) -> Self:
        """Reads what :meth:`save` wrote into a regression made with the same data, kernel and number of inducing inputs.

        Raises:
            ValueError: if it was made from other data.
        """
        self.load_state_dict(torch.load(path, weights_only=True, map_location=self.targets.device))
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """What is neither parameter nor buffer of a fixed shape."""
        moved = None if self.inducing_inputs is None else self.inducing_inputs.detach()
        settled = self._posterior if isinstance(self._posterior, SparsePosterior) else None
        return {
            "inducing_inputs": moved,
            "held_out": self.held_out,
            "objective_value": self.objective_value,
            "targets": _digest(self.targets),
            "witness": _witness(self.kernel, self.index[self.index >= 0]),
            "predictor": settled and {name: getattr(settled, name) for name in ("mean_weights", "variance_weights", "share")},
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Takes what :meth:`get_extra_state` gave.

        Raises:
            ValueError: if it is of other data: other targets, or covariances that the kernel here does not have.
        """
        if state.get("targets", _digest(self.targets)) != _digest(self.targets):
            raise ValueError("the state is of a regression on other targets; make this one from the data that it was fitted to")
        _check_witness(self.kernel, self.index[self.index >= 0], state.get("witness"))
        moved = state["inducing_inputs"]
        self.inducing_inputs = None if moved is None else torch.nn.Parameter(moved)
        self.held_out = state.get("held_out", self.index[:0]).to(self.index.device)
        self.objective_value = state["objective_value"]
        self._posterior = None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # Moved inducing inputs exist only where a fit made them; they travel with the extra state.
        state_dict.pop(f"{prefix}inducing_inputs", None)
        self.inducing_inputs = None
        # The kernel first: what covariances it has is compared.
        inner = {name.removeprefix(f"{prefix}kernel."): v for name, v in state_dict.items() if name.startswith(f"{prefix}kernel.")}
        self.kernel.load_state_dict(inner, strict=False)
        super()._load_from_state_dict(state_dict, prefix, *args)


class SubsetPredictor(torch.nn.Module):
    """Predictions of a saved :class:`SubsetGPRegression` from its inducing inputs alone: of all training data, only these are needed.

    Example::

        model.fit()
        model.save("model.pt")
        kept = fingerprints[model.subset]                       # all that predictions need of the data
        predictor = SubsetPredictor("model.pt", kept, CountKernel)
        mean, variance = predictor.predict(new_fingerprints)

    Args:
        path: what :meth:`SubsetGPRegression.save` wrote after a fit with ``num_inducing``.
        X: the inducing inputs, in the order of ``subset``, or a kernel of the same kind that holds them.
        kernel: as that of the regression was given.

    Raises:
        ValueError: if the file holds no sparse regression that was fitted, or the kernel's inputs are not its inducing inputs.
    """

    @takes_former_order(("path", "X"), lambda given, keywords: len(given) < 2 and "X" not in keywords, {"kernel": "X"})
    @names_arguments
    def __init__(self, path: str | Path, X: Any, kernel: Any = None) -> None:
        super().__init__()
        state = torch.load(path, weights_only=True)
        extra = state["_extra_state"]
        self.kernel = bound_kernel(X, kernel)
        if extra["predictor"] is None:
            raise ValueError("the file holds no sparse regression that was fitted: an exact one needs all its data, see SubsetGPRegression")
        rows = int((state["index"] >= 0).sum())
        if self.kernel.num_data != rows:
            raise ValueError(f"X must be the {rows} inducing inputs of the regression, its `subset`; got {self.kernel.num_data}")
        inner = {name.removeprefix("kernel."): value for name, value in state.items() if name.startswith("kernel.")}
        self.kernel.load_state_dict(inner, strict=False)
        index = torch.arange(rows, device=state["index"].device)
        _check_witness(self.kernel, index, extra["witness"])
        self.basis = Basis(self.kernel, index)
        if extra["inducing_inputs"] is not None:
            assert isinstance(self.kernel, InputKernel)
            self.basis = FreeBasis(self.kernel, extra["inducing_inputs"])
        self.mean_weights, self.variance_weights, self.share = (
            extra["predictor"][k] for k in ("mean_weights", "variance_weights", "share")
        )
        self.target_mean, self.target_scale, self.log_noise = (state[name] for name in ("target_mean", "target_scale", "log_noise"))

    @torch.no_grad()
    def predict(self, new: Any, *, noiseless: bool = False) -> tuple[Tensor, Tensor]:
        """Means and variances ``(n_new, H)`` of the targets at new inputs, as :meth:`SubsetGPRegression.predict` gives."""
        cross, prior = covariances_with(self.basis, new)
        variance = (self.share * prior - ((cross @ self.variance_weights) * cross).sum(1)).clamp(min=0.0)
        variance = variance if noiseless else variance + noise_of(self.log_noise)
        return cross @ self.mean_weights * self.target_scale + self.target_mean, variance[:, None] * self.target_scale.square()


@torch.no_grad()
def _witness(kernel: DataKernel, index: Tensor) -> Tensor:
    """Covariances ``(m,)`` of the first inducing input with all of them."""
    return kernel.columns(index[:1], index).double().squeeze(1).clone()


def _check_witness(kernel: DataKernel, index: Tensor, expected: Tensor | None) -> None:
    if expected is None or not len(expected):
        return
    is_within = len(index) == len(expected) and int(index.max()) < kernel.num_data
    if not is_within or not torch.allclose(_witness(kernel, index), expected.to(index.device), rtol=1e-4, atol=1e-8):
        raise ValueError("the state is of a regression on other inputs: the kernel here has other covariances of the inducing inputs")


def _digest(targets: Tensor) -> str:
    """A checksum of targets, rounded so that other machines agree."""
    rounded = (targets.detach().cpu().double() * 1e6).round().to(torch.int64)
    return hashlib.sha256(rounded.numpy().tobytes()).hexdigest()
