"""Checkpoints: reading and writing weight files, which are treated as untrusted."""
