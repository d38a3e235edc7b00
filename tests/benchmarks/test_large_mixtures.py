"""Mixtures of many Gaussians: likelihood beside scikit-learn, and how the cost of a data point grows with the number of components.

make bench
"""

from __future__ import annotations

import pytest
import torch

from tests.benchmarks.timing import exponent
from tests.papers.experiments.large_mixtures import kmeans, mixture_data, ours, sklearn_mixture

pytestmark = pytest.mark.benchmark


@pytest.mark.parametrize(("num_components", "num_data"), [(100, 50_000), (1000, 100_000)])
@pytest.mark.parametrize("covariance", ["spherical", "diag"])
def test_likelihood_beside_scikit_learn(num_components, num_data, covariance):
    torch.set_num_threads(1)
    y, test, _ = mixture_data(num_components, num_data, covariance, 0)
    *_, found = ours(y, test, num_components, covariance, 0, 3)
    clusters = kmeans(y, test, num_components, 0)
    exact = sklearn_mixture(y, test, num_components, covariance, 0, 3)
    print(f"\nK={num_components}, N={num_data}, {covariance}: log density of test data, CPU s")
    for name, result in (("three passes", found), ("MiniBatchKMeans", clusters), ("sklearn GaussianMixture", exact)):
        print(f"  {name}: {result['log_density']:.2f}, {result['cpu']:.1f}, {result['cpu'] / found['cpu']:.2f} times ours")
    assert found["log_density"] >= clusters["log_density"]
    assert found["log_density"] >= exact["log_density"] - 0.1
    # Among a hundred components, products of matrices over all of them are faster than to look at a few.
    assert num_components < 1000 or found["cpu"] <= exact["cpu"]


def test_the_cost_of_a_data_point_hardly_grows_with_the_components():
    torch.set_num_threads(1)
    sizes = (100, 1000, 4000)
    seconds = []
    for size in sizes:
        y, test, _ = mixture_data(size, 80_000, "spherical", 0)
        seconds.append(min(result["us_per_point"] for result in list(ours(y, test, size, "spherical", 0, 3, moves=False))[1:]))
    listed = ", ".join(f"K={size} {value:.1f}" for size, value in zip(sizes, seconds, strict=True))
    print(f"\nCPU microseconds per data point and pass: {listed}; exponent {exponent(sizes, seconds):.2f}")
    assert exponent(sizes, seconds) <= 0.3
