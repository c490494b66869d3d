"""Checkpoints: the formats weights are kept in, read and written without trusting what a file says of itself."""
