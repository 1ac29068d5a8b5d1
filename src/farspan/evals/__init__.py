"""Evaluations: each takes a model and never knows how it was extended."""
