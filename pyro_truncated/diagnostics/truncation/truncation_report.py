"""All checks of a truncation on one page, with a verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_truncated.diagnostics.truncation import findings as trust
from pyro_truncated.diagnostics.truncation.coverage import Growth, certificate, population_growth
from pyro_truncated.diagnostics.truncation.evidence import Evidence, estimate_evidence
from pyro_truncated.diagnostics.truncation.exact import ExactComparison, compare_with_enumeration
from pyro_truncated.diagnostics.truncation.findings import Finding, warn_findings
from pyro_truncated.diagnostics.truncation.product_report import ProductReport, check_product
from pyro_truncated.diagnostics.truncation.scoring import broadcast_answer, is_on_product, plain, scored_populations
from pyro_truncated.distributed.shards import is_spread
from pyro_truncated.search import Search


@dataclasses.dataclass(frozen=True)
class TruncationReport:
    """What :func:`check_truncation` measured, for each of ``N`` data points.

    Example:
        >>> y = linear_bars(20, 3, mean_active=2.0, noise=5.0).data
        >>> model = BinarySparseCoding(9, 6).initialize(y)
        >>> guide = AutoTruncated(model, num_states=16).infer(y, ExhaustiveSearch(), steps=1)
        >>> report = check_truncation(guide, y, steps=2, num_samples=0, warn=False)
        >>> report.covered_mass.shape
        torch.Size([20])

    Attributes:
        num_states: states per data point, ``S``.
        space: number of states there are, readable.
        free_energy: the bound, ``(N,)``.
        covered_mass: upper bound on the posterior mass of the population, ``(N,)``.
        effective_states: number of states that carry the posterior, ``(N,)``.
        growth: free energies after more search, and with twice the states.
        evidence: importance-sampling estimate of the log evidence, or ``None``.
        exact: comparison with enumeration where the space is small, or ``None``.
        findings: what is wrong, and what to change. Empty if nothing is.
    """

    num_states: int
    space: str
    free_energy: Tensor
    covered_mass: Tensor
    effective_states: Tensor
    growth: Growth
    evidence: Evidence | None
    exact: ExactComparison | None
    findings: Sequence[Finding] = ()

    @property
    def is_trusted(self) -> bool:
        """Whether no check found anything wrong.

        The checks see what lies near the populations and what their searches and draws find.
        """
        return not self.findings

    @property
    def nats_outside(self) -> Tensor:
        """Returns the most that checks found outside each population, in nats, ``(N,)``.

        It is infinite where an estimate is not reliable.
        """
        found = [-self.covered_mass.log(), self.growth.doubled - self.growth.free_energy]
        if self.exact is not None:
            found.append(self.exact.gap)
        elif self.evidence is not None:
            found.append(self.evidence.gap.masked_fill(~self.evidence.is_reliable, math.inf))
        return torch.stack(found).amax(0)

    def arrays(self) -> dict[str, np.ndarray]:
        """The numbers by name, each ``(N,)``; :func:`~pyro_truncated.to_arviz` stores them.

        ``free_energy_checked`` is the bound that the log evidence compares with. The checks hold
        other latents at their medians, while ``free_energy`` is a mean over draws of them.
        """
        arrays = {
            "free_energy_checked": self.free_energy,
            "gain_by_search": self.growth.by_search,
            "gain_by_size": self.growth.by_size,
        }
        if self.evidence is not None:
            arrays |= {f"log_evidence{end}": getattr(self.evidence, name) for end, name in _EVIDENCE.items()}
        if self.exact is not None:
            arrays |= {"log_evidence_exact": self.exact.log_evidence, "marginal_error": self.exact.marginal_error}
        return {name: values.numpy() for name, values in arrays.items()}

    def __str__(self) -> str:
        rows = [("data point:", "mean", "median", "worst", "at")]
        rows += [_row(name, values, worst) for name, values, worst in self._columns()]
        widths = [max(len(row[i]) for row in rows) for i in range(5)]
        table = [
            "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))])
            for row in rows
        ]
        verdict = [f"- {finding}" for finding in self.findings] or ["nothing speaks against this truncated posterior"]
        title = f"{len(self.free_energy)} data points, {self.num_states} of {self.space} states each"
        return "\n".join([title, *table, *verdict])

    def _columns(self) -> list[tuple[str, Tensor, str]]:
        """Name, values, and which end is the bad one."""
        columns = [
            ("covered mass, at most", self.covered_mass, "min"),
            ("effective states", self.effective_states, "max"),
            ("nats gained by more search", self.growth.by_search, "max"),
            ("nats gained by twice the states", self.growth.by_size, "max"),
        ]
        if self.evidence is not None:
            columns.append(("gap to the log evidence, estimated", self.evidence.gap, "max"))
        if self.exact is not None:
            columns += [
                ("gap to the log evidence, exact", self.exact.gap, "max"),
                ("covered mass, exact", self.exact.covered_mass, "min"),
                ("error of the marginals", self.exact.marginal_error, "max"),
                ("error of the pairwise marginals", self.exact.pair_error, "max"),
            ]
        return columns


_EVIDENCE = {
    "": "log_evidence",
    "_lower": "lower",
    "_upper": "upper",
    "_pareto_k": "pareto_k",
    "_possible_draws": "possible_draws",
    "_is_reliable": "is_reliable",
}


def _row(name: str, values: Tensor, worst: str) -> tuple[str, str, str, str, str]:
    at = int(values.argmin() if worst == "min" else values.argmax())
    return name, f"{float(values.mean()):.3g}", f"{float(values.median()):.3g}", f"{float(values[at]):.3g}", str(at)


@torch.no_grad()
def check_truncation(
    guide: Any,
    *args: Any,
    search: Search | None = None,
    steps: int = 10,
    num_samples: int = 400,
    num_parents: int | None = None,
    warn: bool = True,
    **kwargs: Any,
) -> TruncationReport | ProductReport:
    """Checks a truncated posterior and says whether to trust it.

    ``print`` shows the answer on one page.

    ``print`` shows the answer on one page.

    It runs :func:`covered_mass`, :func:`population_growth`, :func:`effective_states`, :func:`estimate_evidence` and, in spaces of up to
    4096 states, :func:`compare_with_enumeration`. Nothing is trained, and the populations stay as they are. For large data choose a part
    of them: ``check_truncation(guide.infer(y[:200], search), y[:200])``. Where data are spread over
    processes (:func:`pyro_truncated.distributed.shard`), all must call it. The first one brings the
    populations together and checks all, and all get the same report.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=64).infer(y, ExhaustiveSearch(), steps=1)
        >>> report = check_truncation(guide, y, steps=2, num_samples=100, warn=False)
        >>> bool((report.covered_mass >= report.exact.covered_mass - 1e-6).all())
        True

    Args:
        guide: an ``AutoTruncated``, or an ``AutoGuideList`` that holds one; latents of other guides are held at their medians.
        *args: the model's arguments.
        search: looks for better states; give the one that the guide was trained with, or a stronger one.
        steps: search steps.
        num_samples: draws per data point for the estimate of the evidence; 0 leaves it out.
        num_parents: states whose neighbours the certificate visits. Default: all.
        warn: whether to issue a :class:`TruncationWarning` if something is wrong.
        **kwargs: the model's keyword arguments.

    Returns:
        The report; of a guide that has a set of states for each node of the model's factor graph a :class:`ProductReport`.

    Warns:
        TruncationWarning: saying what is wrong and what to change.
    """
    if is_spread(args, kwargs):
        settings: dict[str, Any] = {"search": search, "steps": steps, "num_samples": num_samples, "num_parents": num_parents, "warn": warn}
        return broadcast_answer(functools.partial(check_truncation, **settings), guide, args, kwargs)
    if is_on_product(guide, args, kwargs):
        return check_product(guide, args, kwargs, search=search, steps=steps, warn=warn)
    _, log_joint, population = scored_populations(guide, args, kwargs)
    report = TruncationReport(
        num_states=population.num_states,
        space=population.space.readable_size,
        free_energy=plain(population.free_energy()),
        covered_mass=plain(certificate(log_joint, population, num_parents)),
        effective_states=plain(population.effective_states().double()),
        growth=population_growth(guide, *args, search=search, steps=steps, **kwargs),
        # Its warning is one of the findings.
        evidence=trust.silently(lambda: estimate_evidence(guide, *args, num_samples=num_samples, **kwargs)) if num_samples else None,
        exact=compare_with_enumeration(guide, *args, **kwargs) if population.space.size <= trust.ENUMERATED_LIMIT else None,
    )
    report = dataclasses.replace(report, findings=tuple(_findings(report, population.space.size)))
    if warn:
        warn_findings(report.findings)
    return report


def _findings(report: TruncationReport, space_size: int) -> list[Finding]:
    outside = report.nats_outside.numpy()
    found = trust.judge_coverage(
        report.covered_mass.numpy(), report.effective_states.numpy(), report.num_states, space_size, outside=outside
    )
    found += trust.judge_growth(report.growth.by_search.numpy(), report.growth.by_size.numpy(), report.num_states, space_size)
    if report.exact is not None:
        found += trust.judge_gap(report.exact.gap.numpy(), "the exact log evidence")
    elif report.evidence is not None:
        found += trust.judge_gap(report.evidence.gap.numpy(), "the estimated log evidence")
        found += trust.judge_estimate(report.evidence.is_reliable.numpy(), report.evidence.possible_draws.numpy())
    return found
