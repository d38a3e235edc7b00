"""Restoration of images and signals from the damaged data alone."""

from pyro_truncated.restoration.noise_checks import VaryingNoiseWarning
from pyro_truncated.restoration.patch_mixture import PatchMixture
from pyro_truncated.restoration.patch_model import Pursuit
from pyro_truncated.restoration.restore import Restored, denoise, inpaint
from pyro_truncated.restoration.windows import Patches

__all__ = ["PatchMixture", "Patches", "Pursuit", "Restored", "VaryingNoiseWarning", "denoise", "inpaint"]
