"""The ports of the four actors on the real store, checkpoints, models and devices: plain blocking code."""
