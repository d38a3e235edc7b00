"""Decoders on active sets: from latents, or from functions of the data, to observations."""
