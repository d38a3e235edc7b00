"""Training: the ELBO, the loop around ``svi.step``, starting points and checkpoints."""

from pyro_truncated.training.best_start import best_start
from pyro_truncated.training.checkpoint import CheckpointWarning
from pyro_truncated.training.elbo import Truncated_ELBO
from pyro_truncated.training.loop import Training, fit
from pyro_truncated.training.restarts import Restarts, fit_restarts

__all__ = ["CheckpointWarning", "Restarts", "Training", "Truncated_ELBO", "best_start", "fit", "fit_restarts"]
