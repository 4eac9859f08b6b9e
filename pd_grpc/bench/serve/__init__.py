"""Serving the packaged model: aggregated against 1P1D, and what the hand-over costs."""
