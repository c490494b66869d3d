"""The working memory of a block in training, beside all that the blocks save: declared by its parts, or a bound."""

from __future__ import annotations

from asbuilt import cost
from asbuilt.kernels.memory import memory
from asbuilt.plan.train.choices import Checkpointing
from asbuilt.spec import Block, Branch, Part, Pass

# Kinds of checkpointing that repeat a block from results of its products.
GIVEN: tuple[Checkpointing, ...] = ("selective", "megatron-selective", "torchtitan-op")


def room(part: Part, run: Pass, way: Checkpointing) -> int | None:
    """Returns the bytes that a block needs beside all that it saves; None where its bodies do not declare them.

    Forward or backward, a branch does without what the branches after it save; of a block that selective checkpointing
    repeats, results of their products are there. Forward it has its body's room, or what the body gives beside the sum;
    in a repetition the gradient of the block's result too. A repetition ends with the last saved tensor, before the
    last branch's result (`early_stop` of `torch.utils.checkpoint`).
    """
    if not isinstance(part, Block) or part.updates is not None:
        return None
    most, gone, absent = 0, 0, 0
    before = sum(_bytes(branch, run, way) for branch in part.branches)
    for branch in reversed(part.branches):
        body = memory(branch.body).room(run) if _plain(branch) else None
        if body is None:
            return None
        stream = run.rows * branch.body.d_model * run.width
        most = max(most, stream + body.backward - gone)
        summed = 0 if way != "none" and branch is part.branches[-1] else 2 * stream
        forward = max(body.again if way in GIVEN else body.forward, summed)
        most = max(most, forward + (way != "none") * stream - absent)
        before -= _bytes(branch, run, way)
        most = max(most, body.first - before - gone) if way in GIVEN else most
        gone += _bytes(branch, run)
        absent += _bytes(branch, run, way)
    return most


def _bytes(branch: Branch, run: Pass, way: Checkpointing = "full") -> int:
    """Bytes that a branch saves, or those of them that a repetition makes anew."""
    own = {key: one.nbytes(run.width) for key, one in cost.saved_tensors(branch, run).items() if not one.shared}
    dropped = cost.recomputed_tensors(branch) if way in GIVEN else own.keys()
    return sum(own[key] for key in own.keys() & dropped)


def _plain(branch: Branch) -> bool:
    """Whether a branch is a body of the normalised stream, added to it."""
    beside = (branch.side, branch.streams, branch.post_norm, branch.sum_norm, branch.beside)
    changed = branch.layer_scale or branch.gated or branch.normed or branch.stream_scale != 1.0 or branch.scale != 1.0
    unlike = branch.parallel or branch.block_input or branch.after_source
    return all(one is None for one in beside) and not changed and not unlike
