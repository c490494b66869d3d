"""Direct preference optimisation: the chosen answer of a pair becomes likelier than the rejected one.

Rafailov et al. 2023 (arXiv 2305.18290), equation 7. With ln p of an answer summed over its tokens, the margin of a pair
is h = beta * ((ln p - ln p_0 of the chosen answer) - (ln p - ln p_0 of the rejected one)), and its loss is
-(1 - s) ln sigmoid(h) - s ln sigmoid(-h), where s is the probability that the preference is the wrong way round
(`smoothing`). p_0 is the model at the start of the run, with adapters the one without them. It does not change, so
ln p_0 is computed once, before the first step, and no second model is held.

Shapes: pairs B, rows 2B, tokens T, model width M, targets N.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from asbuilt.nn.model import Model
from asbuilt.train.batch import IGNORED, Batch, Preferences
from asbuilt.train.loss import Loss, chunk_rows, headless


def preference_loss(model: Model, batch: Preferences, *, rows: int | None = None) -> Loss:
    """Returns the summed loss of a batch's pairs; the head runs on so many targets at once."""
    gained = answer_log_probabilities(model, batch, rows=rows) - batch.reference
    chosen_B, rejected_B = gained.chunk(2)
    margin_B = batch.beta * (chosen_B - rejected_B)
    right_B, wrong_B = F.logsigmoid(margin_B), F.logsigmoid(-margin_B)
    total = -((1.0 - batch.smoothing) * right_B + batch.smoothing * wrong_B).sum()
    return Loss(total, total.detach())


def answer_log_probabilities(model: Model, batch: Batch, *, rows: int | None = None) -> Tensor:
    """Returns ln p of each row's targets, (2B,) in float64: the logits of a chunk are computed again backward."""
    with headless(model):
        x_BTM = model(batch.ids, **batch.inputs)
    kept_BT = batch.targets != IGNORED
    x_NM, targets_N, rows_N = x_BTM[kept_BT], batch.targets[kept_BT], kept_BT.nonzero()[:, 0]
    size = rows or chunk_rows(model.spec.n_vocab)

    def measured(x_NM: Tensor, targets_N: Tensor) -> Tensor:
        logits_NV = model.scores(x_NM)
        wide_NV = logits_NV.to(torch.promote_types(logits_NV.dtype, torch.float32))
        return -F.cross_entropy(wide_NV, targets_N, reduction="none")

    made = x_NM.new_zeros(len(batch.ids), dtype=torch.float64)
    for x, targets, at in zip(x_NM.split(size), targets_N.split(size), rows_N.split(size), strict=True):
        found = checkpoint(measured, x, targets, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(found, Tensor)
        made = made.index_add(0, at, found.double())
    return made
