"""Log joints of many discrete states under any vectorised Pyro model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Set
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pyro_truncated.ops import is_vectorised, raise_if
from pyro_truncated.program.call import Call
from pyro_truncated.program.candidate_runs import CandidateRuns, Conditional, RunMode, sum_block
from pyro_truncated.program.layout import Layout
from pyro_truncated.program.packed_scoring import PackedModel
from pyro_truncated.program.probe import Probe
from pyro_truncated.states.population import Moments
from pyro_truncated.utils.budget import budget_on, memory_budget
from pyro_truncated.utils.constraints import at_least_single


@dataclasses.dataclass(frozen=True)
class RowScorer:
    """Scores states of some data points.

    Under several draws of other latents at once scores are means.
    """

    log_joint: LogJoint  # the scorer of all
    rows: slice  # which data points

    def __call__(self, words: Tensor) -> Tensor:
        """Log joints ``(N, C)`` of packed states ``(N, C, num_words)`` of these rows."""
        scores = self.log_joint.score(words, self.rows)
        return scores if scores.dim() == 2 else scores.flatten(0, -3).mean(0)

    def with_moments(self, words: Tensor) -> tuple[Tensor, Moments | None]:
        """Returns the same, and the moments of observations where known."""
        scorer = self.log_joint
        tells = (scorer.packed_model is None or scorer.layout.is_linear) and not scorer.is_vectorized
        return scorer.score_with_moments(words) if tells else (self(words), None)

    def flip_gains(self, words: Tensor) -> Tensor | None:
        """Returns the change ``(N, H)`` by each flip, where it is known cheaply."""
        scorer = self.log_joint
        if scorer.packed_model is None or scorer.known_levels is not None:
            return None
        with memory_budget(scorer.memory_budget):
            gains = scorer.packed_model.flip_gains(words, self.rows)
        return None if gains is None or gains.dim() > 2 else gains


class LogJoint(Probe):
    r"""Scores states of a (sub)batch's data points: :math:`\log p(y_n, z, s)`.

    Everything but the states ``s`` is held fixed.

    The model is run once as a probe when this object is made. The probe fixes the subsamples of
    plates and shows whether the states can be scored packed (see :meth:`packed_model`). If it is made
    under enabled gradients, it serves searches and gradients alike. Otherwise :meth:`score` runs
    the model with the discrete sites set to a tensor of candidate states in a new left-most
    dimension. It sums the log probabilities of the sites inside the data plates over every other
    plate. Masks are kept, except at the discrete sites. A latent that is summed out has a
    distribution whether masked or not; otherwise each of its values would count as a whole. Pyro's
    enumeration does the same. Of the scales, only the ratio to that of the discrete sites is kept.
    So :attr:`scale` times the sum over data points is the scaled objective.

    With a ``conditional``, its continuous latents are drawn given the states, and their log density
    is subtracted: :math:`\log p(y_n, z, s) - \log q(z \mid s)`. This is :math:`\log p(y_n, s)` for
    every ``z`` when the conditional is exact.

    Attributes:
        takes_gradients: whether it was made under enabled gradients.
    """

    def __init__(
        self,
        call: Call,
        layout: Layout,
        *,
        values: Mapping[str, Any] | None = None,
        conditional: Conditional | None = None,
        memory_budget: int | None = None,
        run_mode: RunMode = "together",
    ) -> None:
        super().__init__(call, layout, values)
        self._check_common_scale(layout.sites)
        self.conditional = conditional
        self.memory_budget = budget_on(self.device) if memory_budget is None else memory_budget
        self.run_mode = run_mode
        self.takes_gradients = torch.is_grad_enabled()

    # --- scoring ---

    def score(self, words: Tensor, rows: slice | Tensor | None = None) -> Tensor:
        """Returns log joints ``(N, C)`` of packed states ``(N, C, num_words)``.

        They are as differentiable as the model.

        ``rows`` restricts the data points to a slice of the batch, or to those at some positions.
        This is only possible where the model has :attr:`packed_model` states.
        """
        if rows is not None and self.packed_model is None and words.shape[0] != self.num_data:
            raise ValueError(f"this model can only be scored on all {self.num_data} data points of the batch at once; got {len(words)}")
        with memory_budget(self.memory_budget):
            log_joint = self.packed_model.score(words, rows) if self.packed_model is not None else self._score_dense(words)
        if self.known_levels is not None:
            log_joint = log_joint.masked_fill(self.known_levels.contradicts(words), -math.inf)
        self._check_finite(log_joint, words)
        return log_joint

    def score_with_moments(self, words: Tensor) -> tuple[Tensor, Moments | None]:
        """Returns log joints by runs of the model, and moments where known.

        States are ``(N, C, num_words)``, and moments those of the observations in them.

        Of so many runs moments are those of every so many-th data point, each run's of others: together as many as one run has.
        """
        if self.known_levels is not None or torch.is_grad_enabled():
            return self.score(words), None
        blocks, scores, moments = words.split(self.candidates_per_run(), 1), [], []
        with memory_budget(self.memory_budget):
            for first, block in enumerate(blocks):
                terms, block_moments = self.runs.log_probs_and_moments(block, slice(first, None, len(blocks)))
                scores.append(self._sum_up(terms))
                moments.append(block_moments)
        log_joint = torch.cat(scores, 1)
        self._check_finite(log_joint, words)
        known = [block_moments for block_moments in moments if block_moments is not None]
        return log_joint, Moments.concatenate(known) if len(known) == len(moments) else None

    @cached_property
    def packed_model(self) -> PackedModel | None:
        """Returns how to score packed states directly, or ``None``."""
        # First needed by a search, perhaps, but kept for the gradient.
        with torch.set_grad_enabled(self.takes_gradients):
            return None if self.conditional is not None else PackedModel.from_probe(self)

    @property
    def runs(self) -> CandidateRuns:
        """Runs of the model on candidate states of all data points."""
        return CandidateRuns(self, self.conditional, self.run_mode, self.uncovered_latents)

    def _score_dense(self, words: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return self._score_possible(words)
        return torch.cat([self._score_block(block) for block in words.split(self.candidates_per_run(), 1)], 1)

    def _score_possible(self, words: Tensor) -> Tensor:
        """Returns scores with impossible states replaced by the best.

        Densities of impossible states may be anything and would spoil gradients.
        """
        scores = self._score_block(words)
        if scores.dim() != 2 or (is_vectorised(scores) and not self.layout.sites_to_check):
            return scores
        impossible = scores.detach() == -math.inf
        if not bool(impossible.any()):
            return scores
        best = scores.detach().argmax(-1).reshape(-1, 1, 1).expand(-1, 1, words.shape[-1])
        scores = self._score_block(torch.where(impossible.unsqueeze(-1), words.gather(1, best), words))
        return scores.masked_fill(impossible, -math.inf)

    def _score_block(self, words: Tensor) -> Tensor:
        return self._sum_up(self.runs.log_probs(words))

    def _sum_up(self, terms: Mapping[str, Tensor]) -> Tensor:
        """Log joints ``(N, C)`` from the log probabilities of sites."""
        total = at_least_single(sum_block(terms))
        names: Set[str] = self.layout.sites_to_check
        if not is_vectorised(total) and bool(total.isnan().any()):
            names = names | (self.layout.sites.keys() - self.observed_sites)
        for name in names & terms.keys():
            # What depends on an impossible value may be anything, NaN too.
            impossible = sum_block({"": torch.zeros_like(total), name: terms[name].detach()}) == -math.inf
            total = total.masked_fill(impossible, -math.inf)
        return total.movedim(0, -1)

    def _check_finite(self, log_joint: Tensor, words: Tensor) -> None:
        if log_joint.numel():
            raise_if(~(log_joint.detach().max() < math.inf), lambda: self._complain(log_joint, words))

    def _complain(self, log_joint: Tensor, words: Tensor) -> None:
        kind = "NaN" if bool(log_joint.isnan().any()) else "+inf"
        flat = (log_joint.isnan() | (log_joint == math.inf)).reshape(-1, log_joint.shape[-1]).nonzero()[0]
        culprits = ""
        if words.shape[0] == self.num_data:
            with torch.no_grad():
                terms = self.runs.log_probs(words[:, flat[1] : flat[1] + 1])
            bad = [name for name, term in terms.items() if not bool((term < math.inf).all())]
            culprits = f" at site {', '.join(repr(name) for name in bad)}" if bad else ""
        raise ValueError(
            f"the log joint is {kind}{culprits} for a state of data point {int(flat[0])} of the batch. "
            "Check the model's parameters and data (missing values need a distribution that allows them)."
        )

    # --- blocks that fit into memory ---

    def row_blocks(self, states_per_row: int, proposed_per_row: int = 0) -> list[slice]:
        """Returns slices of data points within the memory budget."""
        if self.packed_model is None:
            return [slice(0, self.num_data)]
        # Words and log joints of the candidates, about three copies of each; on a device, what one state of every data point takes.
        per_row = max(1, 3 * states_per_row * 8 * (self.layout.space.num_words + 1))
        if self.device.type != "cpu":
            # Ten numbers per word of a state, and as many more, are held where states are sorted and
            # selected.
            sorted_per_row = 80 * (self.layout.space.num_words + 1) * proposed_per_row
            per_row = max(per_row, 16 * self.packed_model.numbers_per_state, sorted_per_row)
        step = max(1, self.memory_budget // per_row)
        return [slice(start, min(start + step, self.num_data)) for start in range(0, self.num_data, step)]

    def gradient_blocks(self, num_states: int) -> Iterator[tuple[slice, slice]]:
        """Yields blocks of data points and states within the memory budget."""
        step = self.candidates_per_run()
        if self.packed_model is not None or step >= num_states:
            yield from ((rows, slice(None)) for rows in self.row_blocks(num_states))
            return
        yield from ((slice(0, self.num_data), slice(start, start + step)) for start in range(0, num_states, step))

    def candidates_per_run(self) -> int:
        """Returns how many candidates per data point a run may hold."""
        largest = self.num_data * self.layout.space.num_latents
        for fn in (node["fn"] for node in self.nodes.values()):
            # As many as a value has, unless the distribution says fewer.
            size = math.prod(fn.event_shape)
            largest = max(largest, math.prod(fn.batch_shape) * min(size, getattr(fn, "numbers_per_state", size)))
        # Each allocates a few copies of its largest site: 32 bytes a number.
        return max(1, self.memory_budget // (32 * largest))
