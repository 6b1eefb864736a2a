"""Patterns to copy."""
