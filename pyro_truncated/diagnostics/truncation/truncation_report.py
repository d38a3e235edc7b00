"""All checks of a truncation on one page, with a verdict."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_truncated import ops
from pyro_truncated.diagnostics.truncation import thresholds as trust
from pyro_truncated.diagnostics.truncation.coverage import (
    MOST_MOVES,
    Growth,
    broadcast_answer,
    certificate,
    find_truncated_guide,
    plain,
    population_growth,
    score_populations,
    set_up_part,
)
from pyro_truncated.diagnostics.truncation.evidence import Evidence, ExactComparison, compare_with_enumeration, estimate_evidence
from pyro_truncated.diagnostics.truncation.thresholds import Finding, warn_findings
from pyro_truncated.distributed.shards import find_part
from pyro_truncated.guide.chain_batch import ChainBatch
from pyro_truncated.guide.product_batch import ProductBatch
from pyro_truncated.guide.product_posterior import ProductPosterior
from pyro_truncated.guide.set_search import NodeScores, ScoredSets
from pyro_truncated.guide.truncated_posterior import TruncatedPosterior
from pyro_truncated.program.call import Call
from pyro_truncated.search import AutomaticSearch, Search
from pyro_truncated.search.conditional import Moves
from pyro_truncated.sequences import BlockSearch, ChainPosterior
from pyro_truncated.states.population import initial_population
from pyro_truncated.utils.arguments import check_count
from pyro_truncated.utils.parameter_store import spare_random_numbers


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """What was measured of the sets of some nodes.

    Attributes:
        sites: names of their sites.
        num_states: states of each set.
        space: number of states there are, readable.
        is_exact: whether the sets hold all of them.
        effective_states: the exponential of the entropy of each node's marginal, ``(rows,)``.
        addition: nats that the neighbours of its states would add to the evidence, for each set alone, ``(rows,)``: exact.
    """

    sites: tuple[str, ...]
    num_states: int
    space: str
    is_exact: bool
    effective_states: Tensor
    addition: Tensor


@dataclasses.dataclass(frozen=True)
class ProductReport(trust.CheckResult):
    r"""What :func:`check_truncation` measured of a posterior on a product of sets.

    Joint states with exactly one node outside its set are disjoint events, so that

    .. math:: \log p(y) \ge \log \Big(e^{\mathcal F} + \sum_v \sum_{s \notin K_v} e^{\mathrm{score}_v(s)}\Big),

    where the score of a state is what it adds to :math:`e^{\mathcal F}`.

    Attributes:
        free_energy: the bound of each member of the plates that all nodes share, ``(N,)``.
        certified: the larger bound above, ``(N,)``.
        searched: the bound after more search.
        doubled: the bound with sets of twice the size.
        exact: the log evidence, of full sets, where these are small; ``None`` elsewhere.
        nodes: what was measured of the nodes, by group.
        findings: what is wrong, and what to change. Empty if nothing is.
    """

    free_energy: Tensor
    certified: Tensor
    searched: Tensor
    doubled: Tensor
    exact: Tensor | None
    nodes: Sequence[NodeReport]
    findings: Sequence[Finding] = ()

    @property
    def covered_mass(self) -> Tensor:
        """An upper bound on the mass of the product, ``(N,)``."""
        return (self.free_energy - self.certified).exp()

    def __str__(self) -> str:
        lines = [
            f"{len(self.free_energy)} data points, a set of states for each node of the factor graph",
            f"nats gained by more search      {float((self.searched - self.free_energy).mean()):.3g} in the mean",
            f"nats gained by twice the states {float((self.doubled - self.searched).mean()):.3g} in the mean",
            f"covered mass, at most           {float(self.covered_mass.min()):.3g} at worst",
        ]
        if self.exact is not None:
            lines.append(f"gap to the log evidence, exact  {float((self.exact - self.free_energy).mean()):.3g} in the mean")
        for node in self.nodes:
            name = ", ".join(node.sites[:3]) + (", ..." if len(node.sites) > 3 else "")
            if node.is_exact:
                lines.append(f"  {name}: all {node.space} states, exact")
                continue
            lines.append(
                f"  {name}: {node.num_states} of {node.space} states, {float(node.effective_states.mean()):.2g} effective, "
                f"one set more complete adds at most {float(node.addition.max()):.2g} nats"
            )
        verdict = [f"- {finding}" for finding in self.findings] or ["nothing speaks against this truncated posterior"]
        return "\n".join([*lines, *verdict])


@torch.no_grad()
def check_product(
    guide: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, search: Search | None, steps: int, warn: bool
) -> ProductReport:
    """The checks of a posterior on a product of sets, see :func:`check_truncation`."""
    steps = check_count("steps", steps)
    search = AutomaticSearch() if search is None else search
    part = find_truncated_guide(guide)
    call = Call(part.model, args, kwargs)
    with poutine.block(), spare_random_numbers():
        batch = part.batch(call, part.other_values(call, median=True))
        if isinstance(batch, ChainBatch):
            return _add_findings(_check_chains(batch, steps), part.num_states, warn)
        assert isinstance(batch, ProductBatch)
        sets = batch.sets()
        free_energy = batch.evidence(sets)
        nodes = [_node_report(batch, sets, number) for number in range(len(sets))]
        certified = _certify(batch, free_energy, nodes)
        seek = batch.set_search(is_new=True)
        searched_sets = seek.improve(sets, search, steps).sets
        searched = torch.maximum(batch.evidence(searched_sets), free_energy)
        start = [_double(batch, words, number) for number, words in enumerate(searched_sets)]
        doubled_sets = seek.improve(start, search, steps).sets
        doubled = torch.maximum(batch.evidence(doubled_sets), searched)
        product = batch.scorer.product
        size = {node: own.space.size for node, own in enumerate(product.node_layouts)}
        cliques = [math.prod(size[member] for member in (node, *others)) for node, others in enumerate(product.graph.separators)]
        largest = max(*size.values(), *cliques)
        exact = plain(batch.evidence(full_sets(batch))) if largest <= trust.ENUMERATED_LIMIT else None
        cut = [Finding(*problem) for problem in part.layout.find_problems(ProductPosterior([batch]).marginals())]
    report = ProductReport(plain(free_energy), plain(certified), plain(searched), plain(doubled), exact, nodes, cut)
    return _add_findings(report, part.num_states, warn)


def _add_findings(report: ProductReport, num_states: int, warn: bool) -> ProductReport:
    report = dataclasses.replace(report, findings=(*report.findings, *_node_findings(report, num_states)))
    if warn:
        warn_findings(report.findings, stacklevel=5)
    return report


def _check_chains(batch: ChainBatch, steps: int) -> ProductReport:
    posterior = batch.posterior()
    size, space = posterior.num_states, posterior.space
    free_energy = posterior.free_energy()
    blocks = BlockSearch(4, generator=torch.Generator().manual_seed(0))

    def improve(start: ChainPosterior) -> Tensor:
        for _ in range(0 if start.is_complete else steps):
            start.improve_(2).search_(blocks)
        return start.free_energy()

    searched = torch.maximum(improve(batch.posterior()), free_energy)
    moves = posterior.transitions
    doubled = searched if posterior.is_complete else torch.maximum(improve(ChainPosterior(batch.scorer, moves, 2 * size)), searched)
    # All pairs of states of two steps are summed over.
    exact = plain(ChainPosterior(batch.scorer, moves, space.size).free_energy()) if space.size <= 2**8 else None
    effective, additions = posterior.effective_states().double().flatten(), posterior.best_additions().double().flatten()
    site = batch.scorer.product.site.name
    node = NodeReport((site,), size, space.readable_size, posterior.is_complete, plain(effective), plain(additions))
    certified = free_energy if posterior.is_complete else posterior.certificate()
    return ProductReport(plain(free_energy), plain(certified), plain(searched), plain(doubled), exact, [node])


def full_sets(batch: ProductBatch) -> list[Tensor]:
    """Sets of all states there are."""
    scorer = batch.scorer
    groups = scorer.product.groups
    words = [group.space.enumerate(scorer.device).expand(scorer.num_rows(number), -1, -1) for number, group in enumerate(groups)]
    return [scorer.insert_known_values(own, number) for number, own in enumerate(words)]


def _node_report(batch: ProductBatch, sets: list[Tensor], number: int) -> NodeReport:
    scorer, group = batch.scorer, batch.scorer.product.groups[number]
    population = batch.rescore()[number]
    is_exact = sets[number].shape[1] >= group.space.size
    addition = torch.zeros(len(population), dtype=torch.float64)
    if not is_exact:
        moves = Moves(group.space, scorer.device, MOST_MOVES)
        best = population.take(population.weights().topk(1, -1).indices)
        neighbours = moves.neighbours(best)
        is_new = ~ops.find_duplicates(torch.cat([sets[number], neighbours], 1))[:, sets[number].shape[1] :]
        scored_sets = ScoredSets.from_scorer(scorer, sets)
        scores = NodeScores(scored_sets, number)(neighbours).masked_fill(~is_new, -torch.inf).logsumexp(-1)
        evidence = scored_sets.rows(scorer.product.evidence_by_node(scored_sets.messages), number).squeeze(-1)
        addition = torch.nn.functional.softplus(scores - evidence)
    effective = population.effective_states().double()
    sites = tuple(name for layout in group.layouts for name in layout.sites)
    return NodeReport(sites, sets[number].shape[1], group.space.readable_size, is_exact, plain(effective), plain(addition))


def _certify(batch: ProductBatch, free_energy: Tensor, nodes: Sequence[NodeReport]) -> Tensor:
    """The bound that states outside of single sets add to."""
    scorer, product = batch.scorer, batch.scorer.product
    total = free_energy.new_zeros(scorer.sizes)
    for number, report in enumerate(nodes):
        parts = scorer.split_nodes(torch.expm1(report.addition.to(total.device)), number)
        for node, rows in zip(product.groups[number].nodes, parts, strict=True):
            total = total + scorer.sum_by_data(node, rows)
    return free_energy + torch.log1p(total.flatten())


def _double(batch: ProductBatch, words: Tensor, number: int) -> Tensor:
    """A set with as many other states, or all there are."""
    space = batch.scorer.product.groups[number].space
    size = min(2 * words.shape[1], space.size)
    others = initial_population(space, len(words), size, batch.populations.stores[number].stream(0), words.device)
    first = torch.zeros(words.shape[:2], dtype=torch.float64, device=words.device)
    union, _ = ops.select_top(words, first, others, -1.0 - torch.rand(others.shape[:2]).double().to(words.device), size)
    return batch.scorer.insert_known_values(union, number)


def _node_findings(report: ProductReport, num_states: int) -> list[Finding]:
    by_search, by_size = (report.searched - report.free_energy).numpy(), (report.doubled - report.searched).numpy()
    findings = []
    if report.exact is not None:
        findings += trust.judge_gap((report.exact - report.free_energy).numpy(), "the exact log evidence")
    findings += trust.judge_growth(by_search, by_size, num_states)
    # Effective states are counted for each node, below.
    findings += trust.judge_coverage(report.covered_mass.numpy(), np.zeros(1), num_states)
    broad = [node for node in report.nodes if not node.is_exact and float(node.effective_states.mean()) > node.num_states / 4]
    if broad and findings:
        problem = f"The posteriors of {', '.join(broad[0].sites[:3])} are spread over {float(broad[0].effective_states.mean()):.3g} states."
        findings.append(Finding(problem, "If larger sets do not help, they are too broad for sets: sample, or use a mean field."))
    return findings


@dataclasses.dataclass(frozen=True)
class TruncationReport(trust.CheckResult):
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
    def nats_outside(self) -> Tensor:
        """The most that checks found outside each population, in nats, ``(N,)``."""
        bounds = [-self.covered_mass.log(), self.growth.doubled - self.growth.free_energy]
        if self.exact is not None:
            bounds.append(self.exact.gap)
        elif self.evidence is not None:
            bounds.append(self.evidence.gap.masked_fill(~self.evidence.is_reliable, math.inf))
        return torch.stack(bounds).amax(0)

    def arrays(self) -> dict[str, np.ndarray]:
        """The numbers by name, each ``(N,)``; :func:`~pyro_truncated.to_arviz` stores them.

        ``free_energy_checked`` is the bound that the log evidence compares with, as the checks hold other latents at their medians.
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
        for name, values, worst in self._columns():
            at = int(values.argmin() if worst == "min" else values.argmax())
            rows.append((name, f"{float(values.mean()):.3g}", f"{float(values.median()):.3g}", f"{float(values[at]):.3g}", str(at)))
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

    ``print`` shows the answer on one page. It runs :func:`covered_mass`, :func:`population_growth`, :func:`effective_states`,
    :func:`estimate_evidence` and, in spaces of up to 4096 states, :func:`compare_with_enumeration`. The populations stay as they are. For
    large data choose a part of them: ``check_truncation(guide.infer(y[:200], search), y[:200])``. Where data are spread over processes
    (:func:`pyro_truncated.distributed.shard`), all must call it, and all get the same report.

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
    num_parents = None if num_parents is None else check_count("num_parents", num_parents)
    if find_part(args, kwargs) is not None:
        settings: dict[str, Any] = {"search": search, "steps": steps, "num_samples": num_samples, "num_parents": num_parents, "warn": warn}
        return broadcast_answer(functools.partial(check_truncation, **settings), guide, args, kwargs)
    if set_up_part(guide, args, kwargs).product is not None:
        return check_product(guide, args, kwargs, search=search, steps=steps, warn=warn)
    _, log_joint, population = score_populations(guide, args, kwargs)
    growth = population_growth(guide, *args, search=search, steps=steps, **kwargs)
    with warnings.catch_warnings(action="ignore", category=trust.TruncationWarning):  # it is one of the findings
        evidence = estimate_evidence(guide, *args, num_samples=num_samples, **kwargs) if num_samples else None
    report = TruncationReport(
        num_states=population.num_states,
        space=population.space.readable_size,
        free_energy=plain(population.free_energy()),
        covered_mass=plain(certificate(log_joint, population, num_parents)),
        effective_states=plain(population.effective_states().double()),
        growth=growth,
        evidence=evidence,
        exact=compare_with_enumeration(guide, *args, **kwargs) if population.space.size <= trust.ENUMERATED_LIMIT else None,
    )
    marginals = TruncatedPosterior(population, log_joint.layout, log_joint.sizes).marginals()
    cut = [Finding(*problem) for problem in log_joint.layout.find_problems(marginals)]
    report = dataclasses.replace(report, findings=(*cut, *_findings(report, population.space.size)))
    if warn:
        warn_findings(report.findings)
    return report


def _findings(report: TruncationReport, space_size: int) -> list[Finding]:
    outside = report.nats_outside.numpy()
    findings = trust.judge_coverage(
        report.covered_mass.numpy(), report.effective_states.numpy(), report.num_states, space_size, outside=outside
    )
    findings += trust.judge_growth(report.growth.by_search.numpy(), report.growth.by_size.numpy(), report.num_states, space_size)
    if report.exact is not None:
        findings += trust.judge_gap(report.exact.gap.numpy(), "the exact log evidence")
    elif report.evidence is not None:
        findings += trust.judge_gap(report.evidence.gap.numpy(), "the estimated log evidence")
        findings += trust.judge_estimate(report.evidence.is_reliable.numpy(), report.evidence.possible_draws.numpy())
    return findings
