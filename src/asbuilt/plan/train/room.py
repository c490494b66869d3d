"""The working memory of a block in training, beside all that the blocks save: declared by its parts, or a bound."""

from __future__ import annotations

from asbuilt import cost
from asbuilt.kernels.memory import memory
from asbuilt.spec import Block, Branch, Part, Pass


def room(part: Part, run: Pass, *, again: bool) -> int | None:
    """Returns the bytes that a block needs beside what it saves; None where its bodies do not declare them.

    Forward or backward, a branch does without what the branches after it save. Forward it has its body's room, or what
    the body gives beside the sum; a block that is repeated (`again`) the gradient of its result too.
    """
    if not isinstance(part, Block) or part.updates is not None:
        return None
    most, after = 0, 0
    for branch in reversed(part.branches):
        body = memory(branch.body).room(run) if _plain(branch) else None
        if body is None:
            return None
        stream = run.rows * branch.body.d_model * run.width
        forward = max(body.forward, 2 * stream) + again * stream
        most = max(most, max(forward, stream + body.backward) - after)
        own = (tensor for tensor in cost.saved_tensors(branch, run).values() if not tensor.shared)
        after += sum(tensor.nbytes(run.width) for tensor in own)
    return most


def _plain(branch: Branch) -> bool:
    """Whether a branch is a body of the normalised stream, added to it."""
    beside = (branch.side, branch.streams, branch.post_norm, branch.sum_norm, branch.beside)
    changed = branch.layer_scale or branch.gated or branch.normed or branch.stream_scale != 1.0 or branch.scale != 1.0
    unlike = branch.parallel or branch.block_input or branch.after_source
    return all(one is None for one in beside) and not changed and not unlike
