"""One description of a transformer, many readings: costs, model, checkpoints, caches, measured beside predicted."""
