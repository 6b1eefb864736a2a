"""Artifacts on a remote: fetched into the local store, pushed from it."""
