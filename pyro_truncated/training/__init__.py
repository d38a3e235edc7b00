"""Training: the ELBO, the loop around ``svi.step``, starting points and checkpoints."""

from pyro_truncated.training.best_start import best_start
from pyro_truncated.training.checkpoint import CheckpointWarning
from pyro_truncated.training.config import LearnConfig
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.learn_report import LearnReport
from pyro_truncated.training.learning import ConvergenceWarning, DisagreeingStartsWarning, learn
from pyro_truncated.training.loop import Restarts, Training, fit, fit_restarts
from pyro_truncated.utils.annealing import cooling

__all__ = [
    "CheckpointWarning",
    "ConvergenceWarning",
    "DisagreeingStartsWarning",
    "LearnConfig",
    "LearnReport",
    "Restarts",
    "Training",
    "Truncated_ELBO",
    "best_start",
    "cooling",
    "fit",
    "fit_restarts",
    "learn",
]
