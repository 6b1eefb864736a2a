"""Records of known models."""
