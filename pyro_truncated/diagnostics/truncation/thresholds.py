"""When not to trust a truncated posterior: warning and limits."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

COVERED_LIMIT = 0.9  # mean upper bound on the covered mass
GROWTH_LIMIT = 0.1  # nats per data point gained by more search, or by twice the states
GAP_LIMIT = 0.2  # nats per data point between log evidence and bound
EXHAUSTED_LIMIT = 0.5  # effective states, as a share of the population
PARETO_LIMIT = 0.7  # tail index of importance weights
RELEVANT_NATS = 0.01  # mass outside a population, or variation of weights, below which no tail index matters
ENUMERATED_LIMIT = 2**12  # states of a space that is enumerated unasked
MAX_SHARE_BEYOND = 0.1  # share of the data points that may be beyond a limit


class TruncationWarning(UserWarning):
    """A truncated posterior, or a number from it, should not be trusted.

    The message says why, and what to change.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0, noise=20.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> model.scale = torch.tensor(20.0)
        >>> guide = AutoTruncated(model, num_states=2).infer(y, ExhaustiveSearch(), steps=1)
        >>> with warnings.catch_warnings(record=True, action="always") as caught:
        ...     report = check_truncation(guide, y)
        >>> [warning.category.__name__ for warning in caught]
        ['TruncationWarning']
    """


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something a check found wrong."""

    problem: str  # what was measured, and what it means
    advice: str  # what to change

    def __str__(self) -> str:
        return f"{self.problem} {self.advice}"


class CheckResult:
    """A result of checks that is trusted unless something was found wrong."""

    findings: Sequence[Finding]

    @property
    def is_trusted(self) -> bool:
        """Whether nothing was found wrong."""
        return not self.findings


def warn_findings(findings: Sequence[Finding], stacklevel: int = 3, subject: str = "truncated posterior") -> None:
    """Issues one :class:`TruncationWarning` that holds all findings, if there are any."""
    if findings:
        lines = " ".join(str(finding) for finding in findings)
        warnings.warn(f"do not trust this {subject} as it is. {lines}", TruncationWarning, stacklevel=stacklevel)


def judge_guide(shape: float, log_weights: np.ndarray) -> list[Finding]:
    """Findings from the tail index of a guide's importance weights."""
    if shape <= PARETO_LIMIT or np.ptp(log_weights) <= RELEVANT_NATS:
        return []
    problem = f"The draws of the guide do not follow the posterior: their importance weights have a Pareto index of {shape:.2f} (> 0.7)."
    return [Finding(problem, "Train longer, or take a guide that can follow it (AutoMultivariateNormal, say, in the place of AutoNormal).")]


def judge_coverage(
    covered_mass: np.ndarray, effective: np.ndarray, num_states: int, space_size: int | None = None, *, outside: np.ndarray | None = None
) -> list[Finding]:
    """Findings from bounds of covered mass and effective numbers of states.

    Each is ``(N,)`` or ``(guides, N)``. ``outside`` is the most that any check has found outside of each population, in nats.
    """
    findings = []
    if not covered_mass.mean() >= COVERED_LIMIT:
        worst = int(covered_mass.argmin() % covered_mass.shape[-1])
        findings.append(
            Finding(
                f"The populations cover at most {covered_mass.mean():.0%} of the posterior mass on average (data point {worst}: "
                f"at most {covered_mass.min():.1%}), because states next to theirs are missing.",
                "Search longer (more steps, search_steps), propose more (parents, children, generations), or keep more states.",
            )
        )
    with np.errstate(divide="ignore"):
        outside = -np.log(covered_mass) if outside is None else np.fmax(outside, -np.log(covered_mass))
    exhausted_share = ((effective > EXHAUSTED_LIMIT * num_states) & ~(outside <= RELEVANT_NATS)).mean()
    if exhausted_share > MAX_SHARE_BEYOND and num_states > 1 and (space_size is None or num_states < space_size):
        findings.append(
            Finding(
                f"{exhausted_share:.0%} of the data points spread their posterior over more than half of their {num_states} states.",
                f"Keep more: num_states={_twice(num_states, space_size)}.",
            )
        )
    return findings


def _twice(num_states: int, space_size: int | None) -> int:
    return min(2 * num_states, space_size or 2 * num_states)


def judge_growth(by_search: np.ndarray, by_size: np.ndarray, num_states: int, space_size: int | None = None) -> list[Finding]:
    """Findings from what more search or twice the states gain, in nats."""
    findings = []
    if not by_search.mean() <= GROWTH_LIMIT:
        findings.append(
            Finding(
                f"More search gains {by_search.mean():.2f} nats per data point: the search has not converged.",
                "Train longer, or propose more per step (search_steps, parents, children, generations, crossover=True).",
            )
        )
    if not by_size.mean() <= GROWTH_LIMIT:
        more = _twice(num_states, space_size)
        findings.append(
            Finding(
                f"{more} states gain {by_size.mean():.2f} nats per data point: the populations are too small.",
                f"Keep all states there are: num_states={more}." if more == space_size else "Double num_states until the gain is small.",
            )
        )
    return findings


def free_energy_gap(values: Mapping[str, np.ndarray]) -> tuple[str, np.ndarray]:
    """The exact or estimated log evidence, or minus infinity, and the gap."""
    for name, reference in (("log_evidence_exact", "the exact log evidence"), ("log_evidence", "the estimated log evidence")):
        if name in values:
            return reference, values[name] - values.get("free_energy_checked", values["free_energy"])
    return "", np.array(-np.inf)


def judge_gap(gap: np.ndarray, reference: str) -> list[Finding]:
    """A finding from the gap of the bound, in nats."""
    if gap.mean() <= GAP_LIMIT:
        return []
    worst = int(gap.argmax() % gap.shape[-1])
    return [
        Finding(
            f"The bound is {gap.mean():.2f} nats per data point below {reference} (data point {worst}: {gap.max():.2f}).",
            "Keep more states, or search longer or with more variety.",
        )
    ]


def judge_estimate(is_reliable: np.ndarray, possible_draws: np.ndarray) -> list[Finding]:
    """Findings from estimates of the evidence that are unreliable."""
    findings: list[Finding] = []
    if (~is_reliable).mean() <= MAX_SHARE_BEYOND:
        return findings
    is_blind = ~is_reliable & (possible_draws == 0)
    few, none = (~is_reliable & ~is_blind).mean(), is_blind.mean()
    if none > 0:
        findings.append(
            Finding(
                f"The estimated evidence of {none:.0%} of the data points is not reliable: no draw outside their populations, nor from the "
                "prior, has positive probability.",
                "Write hard constraints as soft ones first (a large negative number in place of -inf), or enumerate the possible states.",
            )
        )
    if few > 0:
        findings.append(
            Finding(
                f"The estimated evidence of {few:.0%} of the data points rests on few draws of large weight: much more may be missing.",
                "Estimate with more samples, or keep more states.",
            )
        )
    return findings
