"""Restoration of images and signals from the damaged data alone."""

from pyro_truncated.restoration.patches import Patches
from pyro_truncated.restoration.pursuit import Pursuit
from pyro_truncated.restoration.restore import Restored, denoise, inpaint

__all__ = ["Patches", "Pursuit", "Restored", "denoise", "inpaint"]
