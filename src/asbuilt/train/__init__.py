"""Training the built model: data and batches, loss, optimizer, schedule, step, loop, checkpoints of a run.

Each piece works alone: a step is a function of a model, batches and an optimizer. The package is itself callable:
`asbuilt.train(recipe)`.
"""

from asbuilt.packages import make_callable

make_callable(__name__)
