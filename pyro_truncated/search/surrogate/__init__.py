"""Searches for expensive scores, which learn what to score."""
