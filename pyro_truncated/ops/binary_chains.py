r"""Exact sums over sequences of binary chains on sets of states.

A sequence has joint states :math:`s_1, \dots, s_T`, each of ``M`` binary chains with their own transitions. The sum over the product of the
sets kept at every step,

.. math:: \mathcal F = \log \sum_{s_1 \in K_1} \cdots \sum_{s_T \in K_T} \prod_t p(s_t \mid s_{t-1})\, p(y_t \mid s_t),

is a lower bound of the log evidence, and exact where the sets are full. Words have shape ``(N, T, S, W)`` and log likelihoods ``(N, T,
S)``; a member whose log likelihood is minus infinity is as good as absent.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_truncated.ops.backend import backend, gradient, save_with_context
from pyro_truncated.ops.packed_states import WORD_BITS, gather_states
from pyro_truncated.utils.arguments import describe


class PairTables(NamedTuple):
    r"""Coefficients of :math:`\log p(s \mid s') = k + \sum_m b_m s'_m + v_m s_m + c_m s'_m s_m` by octets of states, of ``K`` kinds."""

    constant: Tensor  # k, (K,)
    smallest: Tensor  # sums of products of factors are trusted from here on, (K,)
    previous: Tensor  # sums of b, (K, octets, 256)
    current: Tensor  # sums of v, (K, octets, 256)
    both: Tensor  # sums of c, and their exponentials, the factors, (K, 2, octets, 256)
    # Words of the chains that cannot go from 0 to 0, 0 to 1, 1 to 0, 1 to 1, (2, K, 4, W), and to the first from the second. Empty where
    # nothing is forbidden. These transitions count as one in the coefficients.
    forbidden: Tensor


# Terms that are so much smaller than the largest one, in nats, are lost in a sum of float64.
LOST_NATS = 45.0
# Products of float64 numbers that are larger than exp of minus this many nats lose nothing that counts.
_SAFE_NATS = 660.0


def pair_tables(log_prob: Tensor) -> PairTables:
    """The tables of log transition probabilities ``(K, M, 2, 2)``, in float64."""
    is_forbidden = log_prob == -torch.inf
    (off_off, off_on), (on_off, on_on) = (row.unbind(-1) for row in log_prob.double().masked_fill(is_forbidden, 0.0).unbind(-2))
    coefficients = torch.stack([on_off - off_off, off_on - off_off, on_on - on_off - off_on + off_off])
    filled = torch.nn.functional.pad(coefficients, (0, -log_prob.shape[1] % 8)).unflatten(2, (-1, 8, 1))
    previous, current, both = (filled * _octets(log_prob.device)).sum(3).unbind()
    smallest = (both.amax(-1).sum(-1) - _SAFE_NATS).exp()
    # Where nothing is forbidden there is nothing to look up.
    masks = torch.zeros(2, len(log_prob), 0, -(-log_prob.shape[1] // WORD_BITS), dtype=torch.int64, device=log_prob.device)
    if bool(is_forbidden.any()):
        flags = torch.nn.functional.pad(is_forbidden.flatten(2).mT, (0, -log_prob.shape[1] % WORD_BITS)).unflatten(2, (-1, WORD_BITS))
        words = (flags.long() << torch.arange(WORD_BITS, device=log_prob.device)).sum(-1)
        masks = torch.stack([words, words[:, [0, 2, 1, 3]]])
    return PairTables(off_off.sum(-1), smallest, previous, current, torch.stack([both, both.exp()], 1), masks)


@functools.cache
def _octets(device: torch.device) -> Tensor:
    """The bits of all octets, ``(8, 256)``."""
    return torch.arange(256, device=device) >> torch.arange(8, device=device).unsqueeze(1) & 1


def chances_if_full(words: Tensor, log_prob: Tensor) -> Tensor | None:
    """Transition probabilities, if sets are full, in order, and no product vanishes."""
    size = words.shape[2]
    if size.bit_length() - 1 != log_prob.shape[1] or size != 1 << log_prob.shape[1]:
        return None
    # Messages backward are normalised before a step, and what the next step multiplies must not vanish, either.
    is_safe = bool(log_prob.amin((-2, -1)).sum(-1).amin() > -_SAFE_NATS / 2)
    shared = words[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in words.stride())]
    return log_prob.double().exp() if is_safe and bool((shared[..., 0] == torch.arange(size, device=words.device)).all()) else None


def likelihoods(unary: Tensor) -> tuple[Tensor, Tensor]:
    """Likelihoods relative to the largest of their step, and its logarithm."""
    best = unary.amax(-1, keepdim=True)
    return (unary - best.clamp(min=torch.finfo(unary.dtype).min)).exp_().double(), best.squeeze(-1)


class Transitions(NamedTuple):
    """Log transition probabilities of ``M`` binary chains, of several kinds.

    The step before the first holds the state zero, so that an initial distribution is a kind of transition with equal rows.
    """

    log_prob: Tensor  # (K, M, 2, 2), from the row's value to the column's. Minus infinity is legal.
    kind: Tensor  # kind of the transition into each step, (N, T) int64. Negative beyond the end of a sequence.


class Messages(NamedTuple):
    """Messages along sequences, within the sets."""

    forward: Tensor  # log p(s_t | y_1, ..., y_t), (N, T, S)
    backward: Tensor  # log p(y_{t+1}, ..., y_T | s_t), up to a constant of each step, (N, T, S)
    log_norm: Tensor  # c_t = log p(y_t | y_1, ..., y_{t-1}), (N, T)

    def free_energy(self) -> Tensor:
        r"""The bound :math:`\mathcal F = \sum_t c_t` of every sequence, ``(N,)``."""
        return self.log_norm.sum(1)

    def log_weights(self) -> Tensor:
        """Log posterior probabilities of all members, ``(N, T, S)``."""
        joint = self.forward + self.backward
        total = joint.logsumexp(-1, keepdim=True)
        return torch.where(total > -torch.inf, joint - total, joint)


class Flips(NamedTuple):
    """Candidates ``(N, T, P)`` that differ from a member of their step."""

    member: Tensor  # position of the member
    latent: Tensor  # the one latent in which they differ
    log_mass: Tensor  # logarithm of what the candidate adds, relative to the sum over the sets

    def words(self, words: Tensor) -> Tensor:
        """The candidates ``(N, T, P, W)``, of members ``(N, T, S, W)``."""
        states = gather_states(words, self.member)
        word = torch.arange(words.shape[-1], device=words.device)
        bit = torch.ones_like(self.latent) << self.latent % WORD_BITS
        return states ^ torch.where(self.latent.unsqueeze(-1) // WORD_BITS == word, bit.unsqueeze(-1), 0)


def safe_log(probability: Tensor) -> Tensor:
    """Logarithms whose gradient is zero, not NaN, where probabilities are zero."""
    is_zero = probability == 0
    logarithm: Tensor = torch.where(is_zero, 1.0, probability).log()
    return logarithm.masked_fill(is_zero, -torch.inf)


def forward_messages(words: Tensor, unary: Tensor, transitions: Transitions) -> tuple[Tensor, Tensor]:
    """Messages ``forward`` and ``log_norm`` of :class:`Messages`."""
    _check(words, unary, transitions)
    return backend("binary_chains", words).messages(words, unary, *transitions, [True])[0]


def backward_messages(words: Tensor, unary: Tensor, transitions: Transitions) -> Tensor:
    """Messages ``backward`` of :class:`Messages`."""
    _check(words, unary, transitions)
    return backend("binary_chains", words).messages(words, unary, *transitions, [False])[0][0]


def messages(words: Tensor, unary: Tensor, transitions: Transitions) -> Messages:
    """Messages in both directions, of states ``(N, T, S, W)`` and log likelihoods ``(N, T, S)``.

    Misfitting shapes, NaN, and steps beyond a sequence's end are refused.
    """
    _check(words, unary, transitions)
    (forward, log_norm), (backward, _) = backend("binary_chains", words).messages(words, unary, *transitions, [True, False])
    return Messages(forward, backward, log_norm)


def free_energy(words: Tensor, unary: Tensor, transitions: Transitions) -> Tensor:
    r"""The bound :math:`\mathcal F` of every sequence, ``(N,)`` in float64.

    Differentiable once in ``unary``, by posterior probabilities, and in ``transitions.log_prob``, by expected numbers of transitions.
    """
    _check(words, unary, transitions)
    return _FreeEnergy.apply(words, unary, *transitions)  # type: ignore[no-untyped-call]


def expected_transitions(words: Tensor, unary: Tensor, transitions: Transitions, sums: Messages, weight: Tensor | None = None) -> Tensor:
    r"""Expected numbers of transitions of each kind and chain, ``(K, M, 2, 2)`` in float64.

    They are the gradient of the bounds, each with a ``weight (N,)``, in ``transitions.log_prob``, and divided by their row sums the M-step.
    """
    weight = torch.ones(len(words), dtype=torch.float64, device=words.device) if weight is None else weight.double()
    onward = unary.double() + sums.backward
    number, previous, current, both = backend("binary_chains", words).expected_pairs(words, sums.forward, onward, *transitions, weight)
    off_off = number.unsqueeze(-1) - previous - current + both
    counts: Tensor = torch.stack([off_off, current - both, previous - both, both], -1).unflatten(-1, (2, 2))
    # Numbers below zero are so by rounding.
    return counts.clamp(min=0.0) if bool((weight >= 0).all()) else counts


def best_path(words: Tensor, unary: Tensor, transitions: Transitions) -> tuple[Tensor, Tensor]:
    """Positions ``(N, T)`` and log joints ``(N,)`` of the most probable paths (Viterbi)."""
    _check(words, unary, transitions)
    return backend("binary_chains", words).best_path(words, unary, *transitions)


def draw_paths(words: Tensor, forward: Tensor, transitions: Transitions, uniform: Tensor) -> Tensor:
    """Draws positions ``(R, N, T)`` of paths, sampling backward with ``uniform (R, N, T)``."""
    _check(words, forward, transitions)
    if uniform.dim() != 3 or uniform.shape[1:] != words.shape[:2]:
        raise ValueError(f"uniform must have shape (R, N, T) with (N, T) = {tuple(words.shape[:2])}; got {tuple(uniform.shape)}")
    return backend("binary_chains", words).draw_paths(words, forward, *transitions, uniform)


def select(
    words: Tensor, unary: Tensor, transitions: Transitions, size: int, ahead: Tensor, *, forward: bool
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Chooses the best sets among candidates, one step after the other.

    Given the sets of both neighbours, a state contributes to :math:`e^{\mathcal F}` the product of the neighbours' messages and its own
    likelihood. So the best ``size`` distinct states are the best set. The pass takes new messages from where it comes from, and from where
    it goes the messages ``ahead`` of the first ``R`` candidates there. If these are the old sets, every choice is exact coordinate ascent,
    and the bound never falls. If they are all candidates, choices look ahead, and the bound may fall.

    Candidates are ``(N, T, C, W)``, the members first. Returns positions ``(N, T, S)``, the best first and -1 where there are too few,
    their messages ``(N, T, S)`` in the direction of the pass, and its normalisation ``(N, T)``. Where nothing is possible the first
    candidates are chosen.
    """
    _check(words, unary, transitions)
    if ahead.dim() != 3 or ahead.shape[:2] != words.shape[:2] or not 0 < ahead.shape[2] <= words.shape[2]:
        raise ValueError(f"ahead must be messages (N, T, R) of the first of {words.shape[2]} candidates; got {tuple(ahead.shape)}")
    if size < 1:
        raise ValueError(f"size must be a positive number of states; got {size}")
    return backend("binary_chains", words).select(words, unary, *transitions, size, ahead, forward)


def best_flips(words: Tensor, unary: Tensor, transitions: Transitions, sums: Messages, gain: Tensor, rows: slice, size: int) -> Flips:
    r"""Returns the states of largest mass one flip from a member.

    Let :math:`w_j` be weights of the previous step's states and :math:`a_m = \sum_j w_j s'_{jm}`. The left factor of a member with latent
    ``m`` flipped is that of the member times

    .. math:: (1 - a_m) \frac{A_m(0, 1 - s_m)}{A_m(0, s_m)} + a_m \frac{A_m(1, 1 - s_m)}{A_m(1, s_m)},

    and the right factor likewise, so all flips of a member cost about as much as the member. Exact, unless transitions of probability zero
    exclude a neighbour from the member but not from its flip, whose mass is then too small.

    ``gain (rows, P, M)`` is the change of the log likelihood by each flip of the first ``P`` members, ``rows`` are steps counted through
    all sequences. Returns candidates ``(1, rows, C)``.
    """
    _check(words, unary, transitions)
    expected = (rows.stop - rows.start, transitions.log_prob.shape[1])
    if gain.dim() != 3 or gain.shape[::2] != expected or gain.shape[1] > words.shape[2]:
        raise ValueError(f"gain must have shape (rows, P, M) with (rows, M) = {expected} and P members; got {tuple(gain.shape)}")
    onward = unary.double() + sums.backward
    kernels = backend("binary_chains", words)
    flips = kernels.flips(words, sums.log_weights(), gain, sums.forward, onward, *transitions, rows, size)
    return Flips(*(part.unsqueeze(0) for part in flips))


def masses(words: Tensor, unary: Tensor, transitions: Transitions, sums: Messages, states: Tensor, likelihood: Tensor) -> Tensor:
    """Log masses ``(N, T, C)`` of states ``(N, T, C, W)`` with log ``likelihood (N, T, C)``.

    Of members they are log posterior probabilities; NaN where no path through the sets is possible.
    """
    _check(words, unary, transitions)
    _check(states, likelihood, transitions)
    onward = unary.double() + sums.backward
    kernel = backend("binary_chains", words).masses
    of_members: Tensor = kernel(words, unary, words, sums.forward, onward, *transitions)
    of_states: Tensor = kernel(states, likelihood, words, sums.forward, onward, *transitions)
    log_masses: Tensor = of_states - of_members.logsumexp(-1, keepdim=True)
    return log_masses


def block_posteriors(unary: Tensor, transitions: Transitions, block: Tensor) -> Tensor:
    r"""Exact log posteriors ``(N, T, 2**k)`` of the joint configurations of a ``block (N, k)``.

    Bit ``i`` of a position is the value of ``block[i]``. A step costs :math:`k 2^k`, by Kronecker products.
    """
    _check_block(unary, block)
    return backend("binary_chains", unary).block_posteriors(unary, *transitions, block)


def draw_blocks(unary: Tensor, transitions: Transitions, block: Tensor, uniform: Tensor) -> Tensor:
    r"""Draws configurations ``(N, T)`` as in :func:`block_posteriors`, with ``uniform (N, T)``."""
    _check_block(unary, block)
    return backend("binary_chains", unary).draw_blocks(unary, *transitions, block, uniform)


def _check_block(unary: Tensor, block: Tensor) -> None:
    if unary.dim() != 3 or block.dim() != 2 or unary.shape[2] != 2 ** block.shape[1]:
        raise ValueError(f"unary must have shape (N, T, 2**k) for blocks (N, k) = {tuple(block.shape)}; got {tuple(unary.shape)}")


class _FreeEnergy(torch.autograd.Function):
    """Log evidence of the sets of states of each sequence."""

    @staticmethod
    def forward(ctx: Any, words: Tensor, unary: Tensor, log_prob: Tensor, kind: Tensor) -> Tensor:
        """Returns the bounds ``(N,)``: sums of log normalisers over steps."""
        ((forward, log_norm),) = backend("binary_chains", words).messages(words, unary, log_prob, kind, [True])
        save_with_context(ctx, words, unary, log_prob, kind, forward, log_norm)
        return log_norm.sum(1)

    @staticmethod
    @gradient
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, Tensor, None]:
        """Gradients: posterior probabilities ``(N, T, S)`` and expected transitions ``(K, M, 2, 2)``."""
        words, unary, log_prob, kind, forward, log_norm = ctx.saved_tensors
        transitions = Transitions(log_prob, kind)
        ((backward, _),) = backend("binary_chains", words).messages(words, unary, log_prob, kind, [False])
        sums = Messages(forward, backward, log_norm)
        weights = sums.log_weights().exp() * (kind >= 0).unsqueeze(-1) * grad.double().view(-1, 1, 1)
        counts = expected_transitions(words, unary, transitions, sums, grad)
        return None, weights, counts, None


def _check(words: Tensor, unary: Tensor, transitions: Transitions) -> None:
    """Refuses what does not fit together."""
    log_prob, kind = transitions
    if words.dim() != 4 or words.dtype != torch.int64:
        raise ValueError(f"words must be packed states (N, T, S, W) of type int64; got {words.dtype} of shape {tuple(words.shape)}")
    if unary.shape != words.shape[:3]:
        raise ValueError(f"unary must have shape {tuple(words.shape[:3])}, one number for each state; got {tuple(unary.shape)}")
    if log_prob.dim() != 4 or log_prob.shape[2:] != (2, 2) or -(-log_prob.shape[1] // WORD_BITS) != words.shape[-1]:
        raise ValueError(
            f"log_prob must have shape (K, M, 2, 2) with M chains that fill {words.shape[-1]} words; got {tuple(log_prob.shape)}"
        )
    if kind.shape != words.shape[:2] or kind.dtype != torch.int64:
        raise ValueError(f"kind must be int64 of shape (N, T) = {tuple(words.shape[:2])}; got {kind.dtype} of shape {tuple(kind.shape)}")
    if not unary.numel():
        return
    lowest, highest = kind.aminmax()
    if highest >= len(log_prob) or (lowest < 0 and bool(((kind[:, 1:] >= 0) & (kind[:, :-1] < 0)).any())):
        raise ValueError(f"kind must be below {len(log_prob)}, and negative only beyond the end of a sequence; got up to {int(highest)}")
    # The largest of numbers with NaN is NaN.
    if not unary.amax() < torch.inf:
        raise ValueError(f"unary must be log likelihoods, finite or minus infinity; got {describe(unary)}")
