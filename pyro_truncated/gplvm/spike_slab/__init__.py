"""Spike-and-slab GP-LVM and manifold relevance determination."""
