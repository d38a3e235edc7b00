"""Published ways to choose inducing inputs, for comparison with the default one."""

from pyro_truncated.gp.subset.published.baselines import (
    GreedyVarianceSearch,
    InformativeVectorSearch,
    KMeansSearch,
    RandomSearch,
    TitsiasSearch,
)

__all__ = ["GreedyVarianceSearch", "InformativeVectorSearch", "KMeansSearch", "RandomSearch", "TitsiasSearch"]
