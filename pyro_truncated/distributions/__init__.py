"""Likelihoods that score many states cheaply and give expected sufficient statistics."""

import importlib
from typing import Any

from pyro_truncated.distributions.chains import BinaryChains, CategoricalChains
from pyro_truncated.distributions.components import (
    Component,
    ComponentLowRankNormal,
    ComponentMultivariateNormal,
    ComponentNormal,
    categorical,
)
from pyro_truncated.distributions.deferred_validation import NormalOrMissing, defer_validation
from pyro_truncated.distributions.linear import LinearSuperposition
from pyro_truncated.distributions.maximum import (
    BernoulliMaximum,
    ExponentialMaximum,
    FamilyMaximum,
    GammaMaximum,
    MaximumSlabs,
    MaximumSuperposition,
    PiecewiseGaussian,
    PoissonMaximum,
)
from pyro_truncated.distributions.noisy_or import NoisyOrSuperposition
from pyro_truncated.distributions.slabs import CorrelatedSlabSuperposition, SpikeSlabSuperposition
from pyro_truncated.distributions.superposition import Superposition
from pyro_truncated.ops.components import component_products, component_sums
from pyro_truncated.utils.constraints import or_missing

__all__ = [
    "ActiveSet",
    "ActiveSetGaussianProcess",
    "ActiveSetPosterior",
    "BernoulliMaximum",
    "BinaryChains",
    "Canvas",
    "CategoricalChains",
    "Component",
    "ComponentLowRankNormal",
    "ComponentMultivariateNormal",
    "ComponentNormal",
    "CorrelatedSlabSuperposition",
    "DepthOrder",
    "ExponentialMaximum",
    "FamilyMaximum",
    "GammaMaximum",
    "GivenActiveSet",
    "LinearSuperposition",
    "MaximumSlabs",
    "MaximumSuperposition",
    "NoisyOrSuperposition",
    "NormalOrMissing",
    "OccludedScene",
    "PiecewiseGaussian",
    "PoissonMaximum",
    "Positions",
    "SceneParameters",
    "SpikeSlabSuperposition",
    "Superposition",
    "categorical",
    "component_products",
    "component_sums",
    "defer_validation",
    "or_missing",
]

# They live with their features, which stand above this floor, and are loaded when first asked for (PEP 562).
_ELSEWHERE = {
    **dict.fromkeys(("ActiveSetGaussianProcess", "ActiveSetPosterior"), "pyro_truncated.gp.active_set_distributions"),
    "GivenActiveSet": "pyro_truncated.gp.active_set_distributions",
    "ActiveSet": "pyro_truncated.gp.active_sets",
    **dict.fromkeys(("DepthOrder", "Positions"), "pyro_truncated.scenes.occlusion"),
    **dict.fromkeys(("Canvas", "OccludedScene", "SceneParameters"), "pyro_truncated.scenes.occlusion"),
}


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        value = globals()[name] = getattr(importlib.import_module(_ELSEWHERE[name]), name)
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
