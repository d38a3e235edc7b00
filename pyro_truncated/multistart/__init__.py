"""Multi-start optimisation: restarts of a model until two agree."""

from pyro_truncated.multistart.best_start import best_start
from pyro_truncated.multistart.config import LearnConfig
from pyro_truncated.multistart.learn_report import LearnReport
from pyro_truncated.multistart.learning import ConvergenceWarning, DisagreeingStartsWarning, learn

__all__ = [
    "ConvergenceWarning",
    "DisagreeingStartsWarning",
    "LearnConfig",
    "LearnReport",
    "best_start",
    "learn",
]
