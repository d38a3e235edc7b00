"""Decoders on active sets, from latents or functions to observations."""
