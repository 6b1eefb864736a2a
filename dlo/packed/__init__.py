"""Streaming packed blocks: their bytes are copied as they lie in the artifact and unpacked on the device."""
