"""Diagnostics after a fit: ArviZ, truncation checks, predictions, pictures, and a verdict."""

from pyro_truncated.diagnostics.arviz.convert import to_arviz
from pyro_truncated.diagnostics.pages.idata_plots import (
    plot_activations,
    plot_comparison,
    plot_covered_mass,
    plot_effective_states,
    plot_forest,
    plot_gap,
    plot_loo_pit,
    plot_marginals,
    plot_pareto_k,
    plot_predictive_check,
    plot_restarts,
)
from pyro_truncated.diagnostics.pages.summary_text import Verdict, diagnose
from pyro_truncated.diagnostics.prediction import (
    Calibration,
    CrossValidation,
    RestartComparison,
    compare_models,
    compare_restarts,
    cross_validate,
    loo_pit,
    match_latents,
    predictive_p_values,
    simulation_based_calibration,
)
from pyro_truncated.diagnostics.truncation.coverage import Growth, covered_mass, effective_states, population_growth
from pyro_truncated.diagnostics.truncation.evidence import Evidence, ExactComparison, compare_with_enumeration, estimate_evidence
from pyro_truncated.diagnostics.truncation.thresholds import TruncationWarning
from pyro_truncated.diagnostics.truncation.truncation_report import TruncationReport, check_truncation
from pyro_truncated.utils.arviz_compat import convert_owner

__all__ = [
    "Calibration",
    "CrossValidation",
    "Evidence",
    "ExactComparison",
    "Growth",
    "RestartComparison",
    "TruncationReport",
    "TruncationWarning",
    "Verdict",
    "check_truncation",
    "compare_models",
    "compare_restarts",
    "compare_with_enumeration",
    "convert_owner",
    "covered_mass",
    "cross_validate",
    "diagnose",
    "effective_states",
    "estimate_evidence",
    "loo_pit",
    "match_latents",
    "plot_activations",
    "plot_comparison",
    "plot_covered_mass",
    "plot_effective_states",
    "plot_forest",
    "plot_gap",
    "plot_loo_pit",
    "plot_marginals",
    "plot_pareto_k",
    "plot_predictive_check",
    "plot_restarts",
    "population_growth",
    "predictive_p_values",
    "simulation_based_calibration",
    "to_arviz",
]
