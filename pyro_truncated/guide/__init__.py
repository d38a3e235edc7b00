"""The guide: exact posteriors renormalised on small populations of states."""

from pyro_truncated.guide.auto_truncated import AutoTruncated

__all__ = ["AutoTruncated"]
