"""From a model and its guide to ArviZ."""
