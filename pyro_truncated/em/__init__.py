"""Closed-form M-steps, and EM by Gibbs sampling over selected latents."""

from pyro_truncated.em.closed_form import ClosedForm, ClosedFormModel
from pyro_truncated.em.gibbs import GibbsDraws, GibbsEM, GibbsGuide, GibbsModel

__all__ = ["ClosedForm", "ClosedFormModel", "GibbsDraws", "GibbsEM", "GibbsGuide", "GibbsModel"]
