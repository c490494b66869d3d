"""Training the built model: data and batches, loss, optimizer, schedule, step, loop, checkpoints of a run.

Each piece works alone: a step is a function of a model, batches and an optimizer.
"""
