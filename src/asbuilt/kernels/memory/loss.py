"""What a cross-entropy holds besides the logits that it reads."""

from __future__ import annotations

from typing import Literal, get_args

Loss = Literal["pytorch", "asbuilt"]
LOSSES: tuple[Loss, ...] = get_args(Loss)
# Tensors of the logits' size, in float32, that are allocated at once. PyTorch's, when its backward pass starts: log
# probabilities, their gradient, and the gradient of the logits. asbuilt's (train/loss.py): the logits and their log
# probabilities, whose place the gradient takes; where a head's logits in float32 are one product's, all is in their
# place. Measured, in tests/plan/test_training_reality.py and tests/api/test_measure_training.py.
LOGITS_ALIVE: dict[Loss, int] = {"pytorch": 3, "asbuilt": 2}
IN_PLACE = 1
