"""Model records, one file per model."""
