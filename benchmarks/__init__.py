"""Measurements with goals: ``python -m benchmarks SUITE``."""
