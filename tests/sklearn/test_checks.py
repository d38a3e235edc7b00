"""scikit-learn's own checks of estimators, none of which is expected to fail."""

from __future__ import annotations

import os
from typing import Any

import pytest
from sklearn.utils.estimator_checks import estimator_checks_generator

from pyro_truncated.sklearn import (
    ActiveSetGPLVM,
    SparseCoding,
    SpikeSlabGPLVMTransformer,
    SpikeSlabRegressor,
    SubsetGPRegressor,
    TruncatedMixture,
)

QUICK: dict[str, Any] = {"n_components": 2, "max_iter": 2, "n_init": 1}
ESTIMATORS = [
    TruncatedMixture(**QUICK),
    TruncatedMixture(**QUICK, covariance_type="tied"),
    SparseCoding(**QUICK),
    SparseCoding(**QUICK, family="gaussian", offset=False),
    SparseCoding(**QUICK, family="bernoulli", binarize=0.0),
    # Linear: latents of functions that bend after three iterations take as long to find as all other checks together.
    SpikeSlabGPLVMTransformer(2, kernel="linear", max_iter=3, n_inducing=5),
    ActiveSetGPLVM(max_iter=3),
    SpikeSlabRegressor(),
    SpikeSlabRegressor(prior="independent"),
    SubsetGPRegressor(),
    SubsetGPRegressor(n_inducing=5, max_epochs=3, objective="pp"),
]


def checks(estimators: list[Any]) -> list[Any]:
    """Every check with its estimator, as what ``parametrize_with_checks`` would make of them."""
    found = []
    for estimator in estimators:
        for one, check in estimator_checks_generator(estimator):
            name = getattr(check, "func", check).__name__
            found.append(pytest.param(one, check, id=f"{estimator!r:.60}-{name}"))
    return found


@pytest.mark.nightly(keep=13)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("estimator", "check"), checks(ESTIMATORS))
def test_what_scikit_learn_asks_of_every_estimator(estimator, check):
    name = getattr(check, "func", check).__name__
    if name == "check_array_api_input" and not os.environ.get("SCIPY_ARRAY_API"):
        pytest.skip("only run with SCIPY_ARRAY_API=1 set, as by scikit-learn itself")
    check(estimator)
