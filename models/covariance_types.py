"""The kinds of covariances by name."""

from __future__ import annotations

from pyro_truncated.models.covariances import Covariances, Diagonal, Full, Spherical, Tied
from pyro_truncated.models.low_rank import LowRank

COVARIANCES = {"full": Full, "diag": Diagonal, "spherical": Spherical, "tied": Tied, "low-rank": LowRank}


def make_covariances(covariance: str, num_observed: int, rank: int | None, shared_noise: bool) -> Covariances:
    """The kind of that name.

    Raises:
        ValueError: if there is none, or for a rank that is missing, out of range, or given for another kind.
    """
    if covariance not in COVARIANCES:
        raise ValueError(f"covariance must be one of {tuple(COVARIANCES)}; got {covariance!r}")
    if covariance != "low-rank":
        if rank is not None or shared_noise:
            raise ValueError(f"rank and shared_noise are for covariance='low-rank'; got rank={rank} for covariance={covariance!r}")
        kind: Covariances = COVARIANCES[covariance]()
        return kind
    if rank is None or not 0 < rank < num_observed:
        raise ValueError(f"rank must be a number of directions below num_observed={num_observed} for covariance='low-rank'; got {rank}")
    return LowRank(rank, is_shared=shared_noise)
