"""Evaluations: each takes a loaded model, independent of how it was extended."""
