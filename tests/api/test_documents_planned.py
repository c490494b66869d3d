"""Rows of documents that are kept apart: what training them takes as planned, beside a step as measured."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_measure_training import Speeds

from asbuilt import InputError
from asbuilt.api import training
from asbuilt.families import gpt2, read_config
from asbuilt.plan.train import TrainPlan, train
from asbuilt.spec import Model
from asbuilt.train.recompute import recompute_blocks
from asbuilt.train.settings import CHECKPOINTING

BATCH, SEQ, LAYERS, WIDTH = 2, 224, 3, 32
MISTRAL = {
    "model_type": "mistral",
    "vocab_size": 4096,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": SEQ,
    "sliding_window": 32,
}
SIZES: dict[str, Any] = {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": 4, "max_positions": SEQ}
MACHINE = training.from_calibration(training.asdict(Speeds()))  # type: ignore[call-overload]


def specs() -> dict[str, Model]:
    """A GPT whose peak is in the loss and one whose peak is in a block, and a model with a window."""
    return {
        "gpt2": gpt2.build(**SIZES, n_vocab=4096),
        "narrow": gpt2.build(**SIZES, n_vocab=64),
        "mistral": read_config(MISTRAL, "mistral").spec,
    }


def planned(spec: Model, kind: Any, *, documents: bool) -> TrainPlan:  # noqa: ANN401
    return train(
        spec,
        MACHINE,
        seq=SEQ,
        batch=BATCH,
        accumulate=training.ACCUMULATE,
        dtype="fp32",
        checkpointing=kind,
        loss="asbuilt",
        documents=documents,
    )


def documents() -> torch.Tensor:
    """Numbers of documents of random lengths (B, T)."""
    begins = torch.rand(BATCH, SEQ) < random.uniform(0.02, 0.3)
    return begins.cumsum(1)


@pytest.mark.parametrize("name", ["gpt2", "narrow", "mistral"])
def test_masks_of_documents_are_as_planned(name: str) -> None:
    """Saved bytes, peak and FLOPs in all three kinds; the mask is more than all that they may differ by."""
    spec = specs()[name]
    made = training.Measured(spec, BATCH, SEQ)
    made.batches = [replace(made.batches[0], documents=documents())] * training.ACCUMULATE
    made.step()
    for kind in CHECKPOINTING:
        recompute_blocks(made.model, kind)
        plan, plain = (planned(spec, kind, documents=on) for on in (True, False))
        stage, before = plan.trial.fullest, plain.trial.fullest
        saved, peak = made.saved_bytes(), made.peak_bytes()
        assert stage.activations + stage.outside == pytest.approx(saved, rel=0.0 if kind == "none" else 0.03), kind
        assert plan.per_device_bytes == pytest.approx(peak, rel=0.03), kind
        assert training._flops(plan) == pytest.approx(made.flops(), rel=1e-12), kind
        more = stage.outside - before.outside
        mask = 4 * BATCH * SEQ * SEQ - (4 * SEQ * SEQ if name == "mistral" else 0)
        assert more > mask > 0.03 * (saved if name != "mistral" else 0)
        assert plan.flops_per_token == plain.flops_per_token  # scores are computed in full


def test_a_mask_is_one_for_all_layers() -> None:
    """Of one width and kind, however many layers there are: 4 bytes for each pair of tokens of each sequence."""
    outside = []
    for n_layers in (1, 5):
        sizes: dict[str, Any] = {**SIZES, "n_layers": n_layers, "n_vocab": 64}
        made = train(gpt2.build(**sizes), MACHINE, seq=SEQ, batch=BATCH, dtype="fp32", documents=True)
        outside.append(made.trial.fullest.outside)
    assert outside[0] == outside[1] > 4 * BATCH * SEQ * SEQ


@pytest.mark.parametrize("name", ["mamba-130m", "t5-small", "clip-vit-base-patch32", "bert-base-uncased"])
def test_documents_are_refused_where_they_are_not_kept_apart(name: str) -> None:
    if name == "bert-base-uncased":  # an encoder keeps them apart
        assert train(name, MACHINE, documents=True).trial.options.documents
        return
    with pytest.raises(InputError, match="documents"):
        train(name, MACHINE, documents=True)
