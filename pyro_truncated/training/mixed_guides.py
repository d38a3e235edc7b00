"""Losses of guides that combine AutoTruncated with other guides.

They are those of Pyro's enumerating ELBO where it can compute them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer import ELBO, TraceEnum_ELBO
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from pyro_truncated.guide.auto_truncated import AutoTruncated
from pyro_truncated.program.call import Call
from pyro_truncated.program.probe import AllObservedError
from pyro_truncated.program.sites import log_density, sample_nodes
from pyro_truncated.program.subsampling import SparseSubsamples
from pyro_truncated.utils.parameter_store import spare_random_numbers

_PYRO_SAYS = (
    "packing tensors",
    "max_plate_nesting",
    "nvalid log_prob shape",
    "Shape mismatch inside plate",
    "enumerat",
    "must match the size of",
)


class MixedGuides:
    """The loss and gradient of a guide with other parts, without search.

    It is that of the stock :class:`~pyro.infer.TraceEnum_ELBO`. For models that do not take many states at once it is computed from
    draws of the other parts, see :func:`free_energy_given_draws`.

    Args:
        **kwargs: what :class:`pyro.infer.ELBO` takes.

    Attributes:
        stock: Pyro's ELBO.
    """

    def __init__(self, **kwargs: Any) -> None:
        # Labels may leave nothing to enumerate.
        self.stock = TraceEnum_ELBO(**{"strict_enumeration_warning": False, **kwargs})
        self._known: tuple[Any, list[AutoTruncated]] | None = None

    def loss(self, call: Call, guide: Any) -> float:
        """The loss; nothing changes."""
        with torch.no_grad():
            free_energy = self._mean_given_draws(call, guide)
        return self.stock_loss(call, guide) if free_energy is None else -float(free_energy)

    def differentiable_loss(self, call: Call, guide: Any) -> Tensor:
        """The loss as a tensor."""
        free_energy = self._mean_given_draws(call, guide)
        return self.stock_differentiable_loss(call, guide) if free_energy is None else -free_energy

    def loss_and_grads(self, call: Call, guide: Any) -> float:
        """The loss, whose gradient is accumulated."""
        part = self._slow_part(call, guide)
        if part is None:
            return self.stock_loss_and_grads(call, guide)
        try:
            return sum(self._backward(part, call.of(guide)) for _ in range(self.stock.num_particles))
        except AllObservedError:
            return self.stock_loss_and_grads(call, guide)

    # --- Pyro's own ---

    def stock_loss(self, call: Call, guide: Any) -> float:
        """Pyro's loss."""
        return float(self.stock.loss(call.model, guide, *call.args, **call.kwargs))

    def stock_differentiable_loss(self, call: Call, guide: Any) -> Tensor:
        """Pyro's loss as a tensor."""
        return self.stock.differentiable_loss(call.model, guide, *call.args, **call.kwargs)  # type: ignore[no-any-return]

    def stock_loss_and_grads(self, call: Call, guide: Any) -> float:
        """Pyro's loss, whose gradient is accumulated."""
        return float(self.stock.loss_and_grads(call.model, guide, *call.args, **call.kwargs))

    # --- the parts of a guide ---

    def parts(self, call: Call, guide: Any) -> list[AutoTruncated]:
        """Runs a guide once and returns its truncated parts.

        They announce themselves at their index sites.
        """
        if self._known is None or self._known[0] is not guide:
            with spare_random_numbers(), poutine.block(), torch.no_grad():
                marks: list[Any] = [node["infer"].get("truncated") for node in sample_nodes(call.of(guide).trace()).values()]
            self._known = guide, list(dict.fromkeys(mark["guide"]() for mark in marks if mark is not None))
        return self._known[1]

    def prepare(self, call: Call, guide: Any) -> None:
        """Lets Pyro's ELBO count plates before training."""
        if self._slow_part(call, guide) is None and self.stock.max_plate_nesting == math.inf:
            with _unannounced():
                self.stock._guess_max_plate_nesting(call.model, guide, call.args, call.kwargs)

    def _slow_part(self, call: Call, guide: Any) -> AutoTruncated | None:
        """Returns a truncated part that Pyro cannot enumerate in parallel, if any.

        It must score this very model.
        """
        parts = self.parts(call, guide)
        return parts[0] if len(parts) == 1 and not parts[0].is_enumerable and bool(call.model == parts[0].model) else None

    def _mean_given_draws(self, call: Call, guide: Any) -> Tensor | None:
        """Returns the free energy of such a guide, averaged over draws.

        ``None`` if there is none, or the model observes all discrete sites.
        """
        part = self._slow_part(call, guide)
        if part is None:
            return None
        try:
            return torch.stack([free_energy_given_draws(part, call.of(guide)) for _ in range(self.stock.num_particles)]).mean()
        except AllObservedError:
            return None

    def _backward(self, part: AutoTruncated, guide: Call) -> float:
        loss = -free_energy_given_draws(part, guide) / self.stock.num_particles
        if loss.requires_grad:
            loss.backward()
        return float(loss.detach())


@contextmanager
def _unannounced() -> Iterator[None]:
    """Silences Pyro's message on the number of plates."""
    logger = logging.getLogger(ELBO.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


@contextmanager
def pyros_own() -> Iterator[None]:
    """Prepares what Pyro's own ELBO runs.

    Small subsamples cost little, and errors of enumeration say their reason.
    """
    try:
        with SparseSubsamples():
            yield
    except (ValueError, RuntimeError) as error:
        if isinstance(error, NotImplementedError) or not any(hint in str(error) for hint in _PYRO_SAYS):
            raise
        error.add_note(
            "Beside other guides the loss is that of Pyro's TraceEnum_ELBO, which enumerates states in a dimension left of all plates. "
            "Set Truncated_ELBO(search, max_plate_nesting=...), or AutoTruncated(model, ..., vectorize=False) if the model takes no such "
            "dimension."
        )
        raise


def free_energy_given_draws(part: AutoTruncated, guide: Call) -> Tensor:
    r"""Returns the differentiable free energy of a guide with other parts.

    It is that of one draw :math:`z` of the other parts.

    .. math:: \sum_n \log \sum_{s \in K_n} p(s, y_n, z_n \mid z) + \log p(z) - \log q(z), \qquad z \sim q

    with :math:`z_n` the draws inside the data plates and :math:`z` those outside. The enumerating ELBO computes the same for these
    draws; here the guide's own scores are used.

    Args:
        part: the truncated part.
        guide: the whole guide, an :class:`~pyro.infer.autoguide.AutoGuideList` or any callable that runs ``part``, and its arguments.

    Raises:
        NotImplementedError: if a draw depends on parameters that its distribution is not reparametrised in.
    """
    trace = guide.trace()
    own = {*part.layout.sites, *part.index_names}
    siblings = {name: node for name, node in sample_nodes(trace).items() if name not in own}
    log_q = log_density(siblings.values())
    _check_reparametrised(siblings)
    subsamples = {name: node["value"] for name, node in trace.nodes.items() if site_is_subsample(node)}
    drawn = {name: node["value"] for name, node in siblings.items() if name in part.layout.other_latents}
    batch = part.batch(guide.of(part.model), {**drawn, **subsamples})
    beyond = {name: node for name, node in batch.scorer.nodes.items() if name in drawn and not batch.scorer.is_inside(node)}
    return batch.free_energy() + log_density(beyond.values()) - log_q  # type: ignore[no-any-return]


def _check_reparametrised(nodes: Mapping[str, Any]) -> None:
    for name, node in nodes.items():
        fn = node["fn"]
        if not fn.has_rsample and torch.is_grad_enabled() and fn.log_prob(node["value"]).requires_grad:
            raise NotImplementedError(
                f"site '{name}' of the guide ({type(fn).__name__}) is not reparametrised, and has no gradient, as this model does not "
                "take many states at once (see the VectorizationWarning). Use a reparametrised distribution (Normal, LogNormal, ...), "
                "or let the model vectorise."
            )
