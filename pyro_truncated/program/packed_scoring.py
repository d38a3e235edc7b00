"""Packed states scored by observation distributions, without running the model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch.distributions.utils import probs_to_logits

from pyro_truncated.program.linear_sites import linear_superpositions, vector_of_bits
from pyro_truncated.program.probe import Probe
from pyro_truncated.program.sites import has_stock_density, unwrap
from pyro_truncated.program.zero_probabilities import certain_values
from pyro_truncated.states.space import StateSpace
from pyro_truncated.utils.arguments import goes_with
from pyro_truncated.utils.constraints import at_least_single


@runtime_checkable
class PackedStateScorer(Protocol):
    """The interface of observation distributions that evaluate packed states.

    Those of :mod:`pyro_truncated.distributions` have it.

    ``numbers_per_state`` may say roughly how many intermediate numbers the density of one state
    takes, which determines blocks on a device. Likewise ``is_linear``: whether contributions of
    latents add up, which determines the search. The class that defines ``packed_log_prob`` may
    define ``packed_flip_gains(words, value, state_logits)`` as well. It returns the change by
    flipping each latent, ``(N, H)``, of one state ``(N, num_words)`` for each data point. It
    returns ``None`` if scoring the flips is as cheap.
    """

    @property
    def states(self) -> Tensor:
        """The states it was made with."""

    @property
    def has_packed_log_prob(self) -> bool:
        """Whether its parameters let it do so."""

    def packed_log_prob(self, words: Tensor, value: Tensor, state_logits: Tensor | None = None) -> Tensor:
        r"""Log density ``(N, C)`` of values under states ``(N, C, num_words)``, plus :math:`\sum_h s_h\,\mathrm{logit}_h`."""


@dataclasses.dataclass(frozen=True)
class PackedModel:
    r"""A vector of Bernoulli latents and observations that score packed states.

    .. math:: \log p(y_n, s) = \sum_h s_h\,\mathrm{logit}_h - \sum_h \log(1 + e^{\mathrm{logit}_h}) + \log p(y_n \mid s).
    """

    space: StateSpace  # the space of the states
    logits: Tensor  # of the latents, (H,) or (N, H)
    constant: Tensor  # the second sum with its sign, scalar or (N,)
    # Which latents cannot be on, and which cannot be off, as their probabilities are exactly 0 or
    # 1. They are packed words (num_words,) or (N, num_words), None if there are none. They count in
    # neither sum.
    certain: tuple[Tensor, Tensor] | None
    observations: list[tuple[PackedStateScorer, Tensor]]  # distributions and their values
    is_linear: bool  # whether what the latents cause adds up

    @classmethod
    def from_probe(cls, probe: Probe) -> PackedModel | None:
        """Returns how to score packed states under a model, or ``None``.

        ``None`` means that the model does not have the shape for it.

        The shape: one vector ``Bernoulli`` site in the data plate, no masks, no inner plates. The
        distributions of the observations evaluate packed states with that very site as their
        ``states``, or are normal around a linear function of it (see :func:`.linear_superpositions`).
        """
        layout, site = probe.layout, vector_of_bits(probe)
        if site is None:
            return None
        state = probe.nodes[site.name]
        nodes = [node for node in probe.nodes.values() if probe.is_inside(node)]
        observed = [node for node in nodes if node["name"] != site.name]
        if not observed or any(node["mask"] is not None or len(node["cond_indep_stack"]) != 1 for node in nodes):
            return None
        # Observations may have a scale each, where the states have one.
        if not all(node["is_observed"] and torch.as_tensor(node["scale"] == state["scale"]).all() for node in observed):
            return None
        likelihoods = _own_likelihoods(observed, state["value"], probe.num_data)
        if likelihoods is None and not layout.is_linear:
            return None
        logits = _bernoulli_logits(state["fn"], probe.num_data, layout.space.num_latents)
        if logits is not None and likelihoods is None:
            likelihoods = linear_superpositions(probe)
            if likelihoods is not None and not all(_fits(logits, fn, value) for fn, value in likelihoods):
                return None
        if logits is None or likelihoods is None:
            return None
        is_looked_at = probe.device.type == "cpu" or site.name in layout.clamped_sites
        normalizers, certain = torch.nn.functional.softplus(logits), certain_values(state["fn"]) if is_looked_at else None
        if certain is not None:
            # Where all data points share the logits, both flags have one row at most.
            never, always = ((flags.flatten() if logits.dim() == 1 else flags).expand(logits.shape) for flags in certain)
            logits, normalizers = (values.masked_fill(never | always, 0.0) for values in (logits, normalizers))
            certain = layout.space.pack(never), layout.space.pack(always)
        is_linear = all(getattr(fn, "is_linear", False) for fn, _ in likelihoods)
        return cls(layout.space, logits, -normalizers.sum(-1), certain, likelihoods, is_linear)

    @property
    def numbers_per_state(self) -> int:
        """Returns roughly how many intermediate numbers one state's density takes."""
        return max(getattr(fn, "numbers_per_state", 1) for fn, _ in self.observations)

    def score(self, words: Tensor, rows: slice | Tensor | None = None) -> Tensor:
        """Returns log joints ``(N, C)`` of states ``(N, C, num_words)``."""
        index = slice(None) if rows is None else rows
        logits: Tensor | None = self.logits if self.logits.dim() == 1 else self.logits[index]
        total = self.constant if self.constant.dim() == 0 else self.constant[index].unsqueeze(-1)
        for fn, value in self.observations:
            total = total + fn.packed_log_prob(words, value[index], logits)
            logits = None
        total = at_least_single(total)
        if self.certain is None:
            return total
        never, always = (bits if bits.dim() == 1 else bits[index].unsqueeze(1) for bits in self.certain)
        return total.masked_fill((((words & never) | (~words & always)) != 0).any(-1), -math.inf)

    def flip_gains(self, words: Tensor, rows: slice) -> Tensor | None:
        """Returns changes ``(N, H)`` of log joints by flips, where that is cheap."""
        logits: Tensor | None = self.logits if self.logits.dim() == 1 else self.logits[rows]
        total: Tensor | None = None
        for fn, value in self.observations:
            likelihood: Any = fn
            # A class that overrides the inherited scores has no gains.
            has_gains = goes_with(likelihood, "packed_flip_gains", "packed_log_prob")
            gains: Tensor | None = likelihood.packed_flip_gains(words, value[rows], logits) if has_gains else None
            if gains is None:
                return None
            total, logits = gains if total is None else total + gains, None
        if total is None or self.certain is None:
            return total
        never, always = (self.space.unpack(bits if bits.dim() == 1 else bits[rows]).bool() for bits in self.certain)
        # A latent that is as it must be stays; one that is not has nothing to lose.
        is_wrong = torch.where(self.space.unpack(words).bool(), never, always)
        return total.masked_fill((never | always) & ~is_wrong, -math.inf).masked_fill(is_wrong, math.inf)


def _fits(logits: Tensor, likelihood: Any, value: Tensor) -> bool:
    """Whether packed scores have the precision of the program's.

    They have no forward derivatives, which those of a program have.
    """
    parameters = (logits, likelihood.weight, likelihood.scale, likelihood.bias)
    is_plain = all(forward_ad.unpack_dual(parameter).tangent is None for parameter in parameters)
    return is_plain and torch.promote_types(likelihood.weight.dtype, value.dtype) == torch.promote_types(logits.dtype, value.dtype)


def _own_likelihoods(observed: Sequence[Any], states: Tensor, num_data: int) -> list[tuple[PackedStateScorer, Tensor]] | None:
    """Returns observed distributions and their values."""
    for node in observed:
        # By attributes: in every step an instance check of the protocol would look at all of them.
        fn = node["fn"]
        takes_states = getattr(fn, "states", None) is states and getattr(fn, "has_packed_log_prob", False)
        if not takes_states or not goes_with(fn, "packed_log_prob", "log_prob") or node["value"].shape[:1] != (num_data,):
            return None
    return [(node["fn"], node["value"]) for node in observed]


def _bernoulli_logits(fn: Any, num_data: int, num_latents: int) -> Tensor | None:
    """Returns logits ``(H,)`` or ``(N, H)`` of a vector Bernoulli distribution."""
    fn, masks = unwrap(fn)
    if masks or not isinstance(fn, torch.distributions.Bernoulli) or not has_stock_density(fn):
        return None
    is_logits = "logits" in fn.__dict__
    parameter: Tensor = fn.logits if is_logits else fn.probs
    # An expanded parameter must not be turned into logits once per data point.
    if parameter.dim() == 2 and parameter.shape[0] == num_data and parameter.stride(0) == 0:
        parameter = parameter[0]
    if parameter.dim() > 2:
        return None
    logits = parameter if is_logits else probs_to_logits(parameter, is_binary=True)
    return logits.expand(num_latents) if logits.dim() <= 1 else logits.expand(num_data, num_latents)
