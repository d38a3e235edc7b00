"""Training: the ELBO, and the loop around ``svi.step`` with its checkpoints."""

from pyro_truncated.training.checkpoint import CheckpointWarning
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.loop import Restarts, Training, fit, fit_restarts
from pyro_truncated.utils.annealing import cooling

__all__ = [
    "CheckpointWarning",
    "Restarts",
    "Training",
    "Truncated_ELBO",
    "cooling",
    "fit",
    "fit_restarts",
]
