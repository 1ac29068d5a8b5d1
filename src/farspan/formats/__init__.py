"""Export formats: each is written, read back and compared with the live model."""
