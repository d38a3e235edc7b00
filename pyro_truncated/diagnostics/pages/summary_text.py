"""A verdict on converted data in words, and a page with plots."""

from __future__ import annotations

import base64
import dataclasses
import functools
import html
import io
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from pyro_truncated.diagnostics.pages import idata_plots as figures
from pyro_truncated.diagnostics.pages import tensor_plots as plots
from pyro_truncated.diagnostics.prediction import (
    CrossValidation,
    cross_validate,
    likelihood_name,
    new_data_group,
    observed_name,
    predictive_p_values,
)
from pyro_truncated.diagnostics.truncation import thresholds as trust
from pyro_truncated.diagnostics.truncation.thresholds import Finding, warn_findings
from pyro_truncated.utils.arguments import Renamed
from pyro_truncated.utils.arviz_compat import get_dataset, group_names, pareto_smooth

_STYLE = """
body { font: 16px/1.55 system-ui, sans-serif; color: #1d2530; background: #f4f5f7; margin: 0; }
main { max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
section, header { background: white; border-radius: 8px; padding: 1.2rem 1.6rem; margin-bottom: 1.2rem; box-shadow: 0 1px 3px #0002; }
h1 { margin: 0 0 .4rem; font-size: 1.7rem; } h2 { margin: 0 0 .3rem; font-size: 1.2rem; }
p { margin: .3rem 0 .8rem; max-width: 46rem; } img { max-width: 100%; display: block; margin: 0 auto; }
table { border-collapse: collapse; font-size: .85rem; } td, th { padding: .15rem .8rem .15rem 0; text-align: right; }
td:first-child, th:first-child { text-align: left; } tr + tr { border-top: 1px solid #e4e7eb; }
.scroll { overflow-x: auto; } .numbers { display: flex; flex-wrap: wrap; gap: .4rem 2.2rem; margin-top: 1rem; }
.numbers b { display: block; font-size: 1.3rem; color: #2b5c8a; } .numbers span { font-size: .85rem; color: #5b6470; }
"""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of the page."""

    title: str  # heading
    text: str  # what is seen, what the numbers mean. Plain text.
    figure: Figure | None = None  # picture
    table: Sequence[Sequence[Any]] = ()  # header and rows of a table, or empty


def write_page(path: str | Path, title: str, lead: str, numbers: Mapping[str, Any], sections: Sequence[Section]) -> Path:
    """Writes one file that holds its pictures; returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    tiles = "".join(f"<div><b>{_text(value)}</b><span>{_text(name)}</span></div>" for name, value in numbers.items())
    header = f'<header><h1>{_text(title)}</h1><p>{_text(lead)}</p><div class="numbers">{tiles}</div></header>'
    body = "\n".join([header, *map(_render_section, sections)])
    # Under a temporary name first, so that no page is ever half written.
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text(
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n",
        encoding="utf-8",
    )
    os.replace(temporary, path)
    return path


def _render_section(section: Section) -> str:
    picture = ""
    if section.figure is not None:
        buffer = io.BytesIO()
        section.figure.savefig(buffer, format="png", dpi=100, bbox_inches="tight", facecolor="white")
        picture = f'<img src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}" alt="{_text(section.title)}">'
    return f"<section><h2>{_text(section.title)}</h2><p>{_text(section.text)}</p>{picture}{_table(section.table)}</section>"


def _table(rows: Sequence[Sequence[Any]]) -> str:
    if not rows:
        return ""
    lines = [
        "".join(f"<{tag}>{_text(cell)}</{tag}>" for cell in row) for row, tag in zip(rows, ["th"] + ["td"] * (len(rows) - 1), strict=True)
    ]
    return '<div class="scroll"><table>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def _text(value: Any) -> str:
    return html.escape(str(value))


@dataclasses.dataclass(frozen=True)
class Verdict(trust.CheckResult):
    """What :func:`diagnose` found.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=256).infer(y, ExhaustiveSearch(), steps=1)
        >>> idata = to_arviz(model, guide, y, num_samples=25)
        >>> verdict: Verdict = diagnose(idata, warn=False)
        Nothing speaks against this truncated posterior.
        ...
        >>> verdict.is_trusted
        True

    Attributes:
        findings: what is wrong with the truncation or the guide, and what to change.
        remarks: what else should be known: how the model predicts, what the numbers mean.
        numbers: the main numbers, readable.
        page: the report, or ``None`` if none was written.
        is_truncated: whether the posterior is that of a guide with an ``AutoTruncated`` part.
    """

    findings: Sequence[Finding]
    remarks: Sequence[str]
    numbers: dict[str, str]
    page: Path | None = None
    is_truncated: bool = True

    what: ClassVar[Renamed] = Renamed("subject")

    @property
    def subject(self) -> str:
        """What the verdict is on."""
        return "truncated posterior" if self.is_truncated else "posterior"

    def __repr__(self) -> str:
        # What a notebook shows of the value of a call that has printed the verdict already.
        return f"<Verdict: {'trusted' if self.is_trusted else f'{len(self.findings)} findings'}>"

    def __str__(self) -> str:
        head = f"Nothing speaks against this {self.subject}." if self.is_trusted else f"Do not trust this {self.subject} as it is."
        numbers = [f"  {name}: {value}" for name, value in self.numbers.items()]
        lines = [head, *numbers, *(f"- {finding}" for finding in self.findings), *(f"- {remark}" for remark in self.remarks)]
        return "\n".join([*lines, f"report: {self.page}"] if self.page else lines)


def diagnose(
    idata: Any,
    path: str | Path | None = None,
    *,
    weight: Tensor | None = None,
    image_shape: tuple[int, int] | None = None,
    warn: bool = True,
) -> Verdict:
    """Prints a verdict on a converted posterior, and can write a page.

    The truncation is judged by the groups ``truncated_posterior`` and ``training``, guides of other kinds by the Pareto index of their
    draws' importance weights (Yao, Vehtari, Simpson and Gelman 2018). Predictions are judged by leave-one-out cross-validation on the
    marginal likelihood, its transforms, and predictive p-values. Checks whose group is missing are left out.

    Example:
        >>> y = linear_bars(20, 4, mean_active=2.0).data
        >>> model = BinarySparseCoding(16, 8).initialize(y)
        >>> guide = AutoTruncated(model, num_states=256).infer(y, ExhaustiveSearch(), steps=1)
        >>> verdict = diagnose(to_arviz(model, guide, y, num_samples=25), warn=False)
        Nothing speaks against this truncated posterior.
        ...

    Args:
        idata: from :func:`~pyro_truncated.to_arviz`, or read back from a netCDF file.
        path: the page, such as ``"diagnosis.html"``. Default: none is written.
        weight: dictionary ``(D, H)`` to show as images, for image models.
        image_shape: height and width of the images. Default: square.
        warn: whether to issue a :class:`TruncationWarning` if something is wrong with the truncation.

    Returns:
        The verdict that was printed.

    Raises:
        ValueError: if the data hold no posterior.

    Warns:
        TruncationWarning: saying what is wrong with the truncation and what to change.
    """
    groups = set(group_names(idata))
    if "posterior" not in groups:
        raise ValueError(f"the data have no group posterior, only {sorted(groups)}; convert a model and its guide with to_arviz")
    is_truncated = "truncated_posterior" in groups
    findings, numbers = _judge_truncation(idata) if is_truncated else _judge_guide(idata, groups)
    findings = [*_judge_numbers(idata, groups), *findings]
    remarks = [] if numbers else ["The guide has no importance weights to judge it by: it has no density, or is a point estimate."]
    remarks += _remarks_on_training(idata) if "training" in groups else []
    validation = _validate(idata, groups)
    if validation is not None:
        numbers["elpd (PSIS-LOO), nats"] = f"{validation.elpd:.1f} ± {validation.se:.1f}"
        remarks += [f"Leave-one-out: {caveat}." for caveat in validation.caveats]
    remarks += _remarks_on_predictions(idata, groups)
    verdict = Verdict(findings, remarks, numbers, is_truncated=is_truncated)
    if path is not None:
        sections = _sections(idata, groups, weight, image_shape)
        lead = " ".join([str(verdict).partition("\n")[0], *map(str, findings), *remarks])
        page = write_page(path, f"Diagnosis of a {verdict.subject}", lead, numbers, sections)
        verdict = dataclasses.replace(verdict, page=page)
    print(verdict)
    if warn:
        warn_findings(verdict.findings, subject=verdict.subject)
    return verdict


def _judge_truncation(idata: Any) -> tuple[list[Finding], dict[str, str]]:
    data = get_dataset(idata, "truncated_posterior")
    # Guides in rows, data points in columns.
    values = {str(name): data[name].values.reshape(data.sizes.get("chain", 1), -1) for name in data.data_vars}
    num_states = data.sizes["state"]
    bound, effective = values["support_mass_bound"], values["effective_states"]
    reference, gap = trust.free_energy_gap(values)
    outside = np.fmax(values.get("gain_by_size", gap), gap)
    findings = trust.judge_coverage(bound, effective, num_states, data.attrs.get("num_joint_states"), outside=outside)
    numbers = {
        "free energy per data point": f"{values['free_energy'].mean():.4g}",
        "covered mass, at most": f"{bound.mean():.3g}",
        "effective states": f"{np.median(effective):.3g} of {num_states}",
    }
    if "gain_by_size" in values:
        findings += trust.judge_growth(values["gain_by_search"], values["gain_by_size"], num_states, data.attrs.get("num_joint_states"))
        numbers["nats gained by twice the states"] = f"{values['gain_by_size'].mean():.3g}"
    if reference:
        findings += trust.judge_gap(gap, reference)
        numbers[f"gap to {reference}"] = f"{gap.mean():.3g}"
    if "log_evidence_is_reliable" in values and "log_evidence_exact" not in values:
        findings += trust.judge_estimate(values["log_evidence_is_reliable"].astype(bool), values["log_evidence_possible_draws"])
    return findings, numbers


def _judge_guide(idata: Any, groups: set[str]) -> tuple[list[Finding], dict[str, str]]:
    """Importance weights of the draws, where these are no point estimates."""
    if "sample_stats" not in groups or get_dataset(idata, "posterior").attrs.get("point_estimates_only"):
        return [], {}
    stats = get_dataset(idata, "sample_stats")
    if "log_weight" not in stats:
        return [], {}
    log_weight = stats["log_weight"].values.reshape(1, -1)
    shape = float(pareto_smooth(log_weight)[1][0])
    numbers = {"evidence lower bound": f"{log_weight.mean():.5g}", "Pareto index of the guide's weights": f"{shape:.2f}"}
    return trust.judge_guide(shape, log_weight), numbers


def _judge_numbers(idata: Any, groups: set[str]) -> list[Finding]:
    """A finding if draws, bounds, weights or likelihoods are NaN or infinite."""
    posterior, lost = get_dataset(idata, "posterior"), []
    for site, draws in posterior.items():
        if draws.dtype.kind == "f" and draws.size:
            # Padding has no draws at all.
            missing = draws.isnull().mean([dim for dim in ("chain", "draw") if dim in draws.dims])
            lost += [f"draws of {site}"] * bool(not np.isfinite(draws).any() or ((missing > 0) & (missing < 1)).any())
    counted = [("truncated_posterior", "free_energy"), ("sample_stats", "log_weight")]
    counted += [("log_likelihood", str(name)) for name in (get_dataset(idata, "log_likelihood") if "log_likelihood" in groups else ())]
    for group, name in counted:
        if group in groups and name in (data := get_dataset(idata, group)):
            values = data[name].values
            # Some of them may be impossible, not all.
            number = np.count_nonzero(~(values < np.inf)) if np.isfinite(values).any() else values.size
            lost += [f"{number} of {values.size} numbers in {name} ({group})"] * bool(number)
    advice = "Look for parameters that are not finite, and train anew, at a lower learning rate."
    return [Finding(f"NaN or infinite are {', '.join(lost)}.", advice)] if lost else []


def _remarks_on_training(idata: Any) -> list[str]:
    training = get_dataset(idata, "training")
    curves = training["free_energy"].values if "free_energy" in training else np.zeros((1, 1))
    is_finite = np.isfinite(curves).any(1)
    remarks = [] if is_finite.all() else [f"{np.count_nonzero(~is_finite)} of {len(curves)} restarts have no finite free energy."]
    curves = curves[is_finite]
    if not len(curves):
        return remarks
    ends = np.array([curve[np.isfinite(curve)][-1] for curve in curves])
    num_data = _num_data(idata)
    if len(ends) > 1:
        remarks.append(f"{len(ends)} restarts end within {np.ptp(ends) / num_data:.3g} nats per data point of each other.")
    best = curves[ends.argmax()]
    best = best[np.isfinite(best)]
    tenth = len(best) // 10
    if tenth:
        slope = (best[-1] - best[-1 - tenth]) / num_data
        remarks.append(f"The last tenth of the training gained {slope:.3g} nats per data point.")
    return remarks


def _num_data(idata: Any) -> int:
    if "truncated_posterior" in group_names(idata):
        bound = get_dataset(idata, "truncated_posterior")["free_energy"]
        return int(bound.size // bound.sizes.get("chain", 1))
    observed = get_dataset(idata, "observed_data") if "observed_data" in group_names(idata) else {}
    return max((int(observed[name].size) for name in observed), default=1)


def _validate(idata: Any, groups: set[str]) -> CrossValidation | None:
    if "log_likelihood" not in groups or len(get_dataset(idata, "log_likelihood").data_vars) != 1:
        return None
    return cross_validate(idata)


def _remarks_on_predictions(idata: Any, groups: set[str]) -> list[str]:
    remarks = []
    for group, subject in (("posterior_predictive", "repeated data points"), ("marginal_predictive", "new data points")):
        if group not in groups or len(get_dataset(idata, group).data_vars) != 1:
            continue
        p_values = predictive_p_values(idata, group=group)
        extreme = [f"{name} (p = {p:.3f})" for name, p in p_values.items() if min(p, 1 - p) < 0.005]
        sizes = get_dataset(idata, group).sizes
        number = sizes.get("chain", 1) * sizes.get("draw", 1)
        if number < 100:
            remarks.append(f"Drawn {subject} are too few, {number}, to tell whether they reproduce the data: at least 100 are.")
        elif extreme:
            remarks.append(f"Drawn {subject} do not reproduce the data's {', '.join(extreme)}.")
        else:
            remarks.append(f"Drawn {subject} reproduce the data's {', '.join(p_values)}.")
    return remarks


def _sections(idata: Any, groups: set[str], weight: Tensor | None, image_shape: tuple[int, int] | None) -> list[Section]:
    """The pictures for which there is something to show."""
    sections = []
    if "training" in groups and "free_energy" in get_dataset(idata, "training"):
        sections.append(
            _section("Training", "The free energy, higher is better; restarts should end together.", figures.plot_restarts, idata)
        )
    if "truncated_posterior" in groups:
        sections += _sections_on_states(idata)
    if weight is not None:
        text = "What each latent adds to an observation; grey is zero."
        sections.append(_section("Dictionary", text, lambda _, ax: plots.plot_dictionary(weight, ax, shape=image_shape), idata))
    if figures.global_names(idata):
        sections.append(_section("Weights", "Intervals of the global latents.", figures.plot_forest, idata))
    return sections + _sections_on_predictions(idata, groups)


def _sections_on_states(idata: Any) -> list[Section]:
    data, sections = get_dataset(idata, "truncated_posterior"), []
    text = (
        "An upper bound on the posterior mass of each population, from the states next to its own. Low values prove that much is missing; "
        "high ones do not prove that nothing is."
    )
    sections.append(_section("Is the population large enough?", text, figures.plot_covered_mass, idata))
    text = "How many states carry each posterior. Close to the number kept, more states are needed."
    sections.append(_section("Effective number of states", text, figures.plot_effective_states, idata))
    if "log_evidence" in data or "log_evidence_exact" in data:
        text = "What the bound lacks of the log evidence of each data point."
        sections.append(_section("Gap of the bound", text, figures.plot_gap, idata))
    sections.append(_section("Which latents are on?", "Expected number of active latents per data point.", figures.plot_activations, idata))
    sections.append(_section("Activations", "Probabilities of the first data points' latents.", figures.plot_marginals, idata))
    return sections


def _sections_on_predictions(idata: Any, groups: set[str]) -> list[Section]:
    sections = []
    for group, text in (
        ("posterior_predictive", "Data points as they were inferred, drawn again: a check of reconstruction, kind to the model."),
        ("marginal_predictive", "New data points: what the model expects before it sees one."),
    ):
        if group in groups and len(get_dataset(idata, group).data_vars) == 1:
            table = [("statistic", "p"), *((name, f"{p:.3f}") for name, p in predictive_p_values(idata, group=group).items())]
            draw = functools.partial(figures.plot_predictive_check, group=group)
            sections.append(_section(f"Does it predict? {group.replace('_', ' ').capitalize()}", text, draw, idata, table))
    validation = _validate(idata, groups)
    if validation is None:
        return sections
    if not validation.is_plug_in:
        text = "Tail indices of leave-one-out cross-validation on the marginal likelihood; above 0.7 it cannot be relied on."
        sections.append(_section("Influential data points", text, figures.plot_pareto_k, idata))
    unseen = new_data_group(idata)
    if unseen is not None and len(get_dataset(idata, unseen).data_vars) == 1:
        num_data = get_dataset(idata, "log_likelihood")[likelihood_name(idata)][0, 0].size
        features = get_dataset(idata, "observed_data")[observed_name(idata, unseen)].size // num_data
        most = 16
        note = f" The first {most} of {features} features." if features > most else ""
        draw = functools.partial(figures.plot_loo_pit, features=range(min(features, most)))
        text = f"Leave-one-out transforms feature by feature; inside the band they are compatible with a uniform distribution.{note}"
        sections.append(_section("Calibration of predictions", text, draw, idata))
    return sections


def _section(title: str, text: str, draw: Callable[[Any, Axes], Any], idata: Any, table: Sequence[Sequence[Any]] = ()) -> Section:
    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    draw(idata, figure.subplots())
    return Section(title, text, figure, table=table)
