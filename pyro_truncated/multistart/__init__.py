"""Multi-start optimisation: restarts of a model until two agree."""

from pyro_truncated.multistart.best_start import best_start
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.learn_report import LearnReport
from pyro_truncated.multistart.moves import Move
from pyro_truncated.multistart.multi_start import ConvergenceWarning, DisagreeingStartsWarning, learn
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
