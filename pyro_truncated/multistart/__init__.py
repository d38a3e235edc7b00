"""Multi-start optimisation: restarts of a model until two agree."""

from pyro_truncated.multistart.config import LearnConfig, LearnReport
from pyro_truncated.multistart.moves import Move
from pyro_truncated.multistart.multi_start import ConvergenceWarning, DisagreeingStartsWarning, best_start, learn
from pyro_truncated.multistart.solution import Solution

__all__ = [
    "ConvergenceWarning",
    "DisagreeingStartsWarning",
    "LearnConfig",
    "LearnReport",
    "Move",
    "Solution",
    "best_start",
    "learn",
]
