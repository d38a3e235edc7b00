"""When not to trust a truncated posterior: the warning, and the limits at which checks raise it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

COVERED_LIMIT = 0.9  # mean upper bound on the covered mass
GROWTH_LIMIT = 0.1  # nats per data point gained by more search, or by twice the states
GAP_LIMIT = 0.5  # nats per data point between log evidence and bound
EXHAUSTED_LIMIT = 0.5  # effective states, as a share of the population
PARETO_LIMIT = 0.7  # tail index of importance weights


class TruncationWarning(UserWarning):
    """A truncated posterior, or a number computed from it, should not be trusted; the message says why, and what to change."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something a check found wrong.

    Attributes:
        problem: what was measured, and what it means.
        advice: what to change.
    """

    problem: str
    advice: str

    def __str__(self) -> str:
        return f"{self.problem} {self.advice}"


def warn_of(findings: Sequence[Finding], stacklevel: int = 3) -> None:
    """Issues one :class:`TruncationWarning` that holds all findings, if there are any."""
    if findings:
        lines = "; ".join(str(finding) for finding in findings)
        warnings.warn(f"do not trust this truncated posterior as it is: {lines}", TruncationWarning, stacklevel=stacklevel)
