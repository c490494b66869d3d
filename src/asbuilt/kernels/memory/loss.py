"""What a cross-entropy holds besides the logits that it reads."""

from __future__ import annotations

from typing import Literal, get_args

# Of a vocabulary's logits, and of the similarities of pairs, which are always contrasted alike.
Loss = Literal["pytorch", "asbuilt", "contrastive"]
LOSSES: tuple[Loss, ...] = tuple(name for name in get_args(Loss) if name != "contrastive")
# Tensors of the logits' size, in float32, that are allocated at once. PyTorch's, when its backward pass starts: log
# probabilities, their gradient, and the gradient of the logits. asbuilt's (train/loss.py): the logits and their log
# probabilities, whose place the gradient takes; where a head's logits in float32 are one product's, all is in their
# place. That of pairs (train/contrastive.py): log probabilities by image and by text, and those two gradients of one of
# them. Measured, in tests/plan/test_training_reality.py and tests/api/test_measure_training.py.
LOGITS_ALIVE: dict[Loss, int] = {"pytorch": 3, "asbuilt": 2, "contrastive": 4}
IN_PLACE = 1
