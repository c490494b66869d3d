"""Words that options of a training run take, apart from the modules that know what they mean: help needs only these."""

from __future__ import annotations

from typing import Literal

# asbuilt's own words, then Megatron-LM's selective recomputation (arXiv 2205.05198, section 5), of attention's scores,
# and torchtitan's list of operations, whose results it keeps: attention's, and those of every other product.
Checkpointing = Literal["none", "selective", "full", "megatron-selective", "torchtitan-op"]
OWN_CHECKPOINTING: tuple[Checkpointing, ...] = ("none", "selective", "full")
CHECKPOINTING: tuple[Checkpointing, ...] = (*OWN_CHECKPOINTING, "megatron-selective", "torchtitan-op")

Offload = Literal["none", "optimizer", "activations", "all"]
OFFLOADS: tuple[Offload, ...] = ("none", "optimizer", "activations", "all")
