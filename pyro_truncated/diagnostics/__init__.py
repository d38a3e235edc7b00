"""What to look at after a fit: conversion to ArviZ."""

from pyro_truncated.diagnostics.convert import to_arviz

__all__ = ["to_arviz"]
