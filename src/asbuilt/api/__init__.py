"""The public functions: each accepts anything that names a model, and returns an object that displays itself."""
