"""`asbuilt.measure(model, training=True)`: what training takes as planned, beside a step as measured."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import asbuilt
from asbuilt import InputError, decoder
from asbuilt.api import training
from asbuilt.families import gpt2, read_config
from asbuilt.spec import Model
from asbuilt.train import loss

SIZES: dict[str, Any] = {"d_model": 64, "n_layers": 2, "n_heads": 4, "n_vocab": 4096, "max_positions": 96}
MIXTRAL = {
    "model_type": "mixtral",
    "vocab_size": 4096,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 96,
}
T5 = {"model_type": "t5", "vocab_size": 4096, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}


def clip(n_vocab: int = 1000, *, context: int = 96, side: int = 4, layers: int = 2) -> Model:
    """A CLIP of width 64 with images of `side` x `side` patches."""
    towers = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 256}
    text = towers | {"num_hidden_layers": 2, "max_position_embeddings": context, "vocab_size": n_vocab}
    vision = towers | {"num_hidden_layers": layers, "image_size": 8 * side, "patch_size": 8}
    text["eos_token_id"] = n_vocab - 1
    config = {"model_type": "clip", "projection_dim": 32, "text_config": text, "vision_config": vision}
    return read_config(config, "clip").spec


KINDS = ("none", "selective", "full")


def specs() -> dict[str, Model]:
    return {
        "gpt2": gpt2.build(**SIZES),
        "llama": decoder(**SIZES, n_kv_heads=2),
        "mixtral": read_config(MIXTRAL, "mixtral").spec,
        "t5": read_config(T5, "t5").spec,
        "clip": clip(),
    }


@dataclass(frozen=True)
class Speeds:
    """What a calibration says, as far as a plan reads it."""

    rate: float = 1e11
    read_bandwidth: float = 1e10
    machine: dict[str, Any] = field(
        default_factory=lambda: {"processor": "drawn", "threads": 1, "memory_bytes": 1 << 34}
    )
    rates: dict[str, Any] = field(default_factory=lambda: {"fp32": {"product_rate": 1e11}})


@pytest.fixture(autouse=True)
def _calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "calibrate", lambda **_: Speeds())
    monkeypatch.setattr(training, "STEPS", 2)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "t5", "clip"])
def test_memory_and_flops_are_as_planned(name: str) -> None:
    """State exactly; saved bytes, peak and FLOPs within the stated tolerance, in all three kinds of checkpointing."""
    spec, batch = specs()[name], random.randint(2, 4)
    made = asbuilt.measure(spec, training=True, batch=batch, seq=random.choice([64, 96]))
    assert made.ok, [(row.figure, row.error) for row in made.rows if not row.ok]
    rows = {row.figure: row for row in made.rows}
    assert len(rows) == 1 + 4 * len(KINDS)
    state = rows["weights, gradients and AdamW's moments"]
    assert state.tolerance == 0.0
    assert state.measured == 16 * sum(p.numel() for p in asbuilt.build(spec).parameters())
    saved = [rows[f"saved by a forward pass, {kind}"].measured for kind in KINDS]
    assert saved[0] > saved[1] > saved[2] > 0
    peaks = [rows[f"peak memory of a step, {kind}"] for kind in KINDS]
    assert all(row.tolerance == 0.03 and row.measured > state.measured for row in peaks)
    assert rows["FLOPs of a step, full"].measured > rows["FLOPs of a step, none"].measured
    assert all(rows[f"training, {kind}"].timed for kind in KINDS)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_peak_of_a_chunked_loss(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps the gradients of its input and of the head, tied or not, beside those of all batches before."""
    chunk = SIZES["n_vocab"] * random.randint(20, 60)
    monkeypatch.setattr(loss, "CHUNK", chunk)
    made = asbuilt.measure(specs()[name], training=True, batch=2, seq=96)
    assert made.ok, [(row.figure, row.error) for row in made.rows if not row.ok]


@pytest.mark.parametrize(
    ("spec", "batch", "seq", "where"),
    [
        (clip(300), 8, 96, "text"),
        (clip(300, side=7, layers=3), 6, 16, "image"),
        (clip(9000), 2, 24, "gradient_peak"),
        (clip(300, side=2, layers=1, context=4), 700, 4, "loss_peak"),
    ],
)
def test_the_peak_of_pairs(spec: Model, batch: int, seq: int, where: str) -> None:
    """It is in a block of either tower, while that of images runs or after it; in the loss; or at the token table."""
    made = asbuilt.measure(spec, training=True, batch=batch, seq=seq)
    assert made.ok, [(row.figure, row.error) for row in made.rows if not row.ok]
    assert all(row.tolerance <= 0.03 for row in made.rows if not row.timed)
    machine = training.from_calibration(training.asdict(Speeds()))  # type: ignore[call-overload]
    stage = training._planned(spec, machine, batch, seq, "none").trial.fullest
    if where.endswith("peak"):
        assert getattr(stage, where) == stage.temporary > stage.recompute_peak
    else:
        assert stage.temporary == stage.recompute_peak
        tower = stage.section.kinds[0][0]
        assert (stage.largest is tower) == (where == "image")
    assert {row.unit for row in made.rows if row.timed} == {"pairs/s"}


QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
}


NEOX = {
    "model_type": "gpt_neox",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "use_parallel_residual": False,
}


def few_characters(name: str, **changes: Any) -> Model:  # noqa: ANN401  any size
    """A model of few characters, whose blocks need more than the loss."""
    n_vocab = random.randint(16, 64)
    if name in ("gpt2", "llama"):
        sizes: dict[str, Any] = {**SIZES, "n_vocab": n_vocab, **changes}
        return gpt2.build(**sizes) if name == "gpt2" else decoder(**sizes)
    config = {"mixtral": MIXTRAL, "qwen3": QWEN3, "t5": T5, "gpt_neox": NEOX}[name]
    return read_config({**config, "vocab_size": n_vocab, **changes}, name).spec


@pytest.mark.parametrize(
    ("name", "changes", "batch", "seq"),
    [
        ("gpt2", {}, 2, 96),
        ("llama", {"n_kv_heads": 2}, 2, 96),
        ("llama", {"n_kv_heads": 4}, 1, 8),  # gradients of matrices
        ("llama", {"n_kv_heads": 2, "d_head": 48, "d_ff": 64}, 2, 96),  # heads are wider than all else
        ("qwen3", {"head_dim": 64}, 2, 96),
        ("qwen3", {"head_dim": 16, "intermediate_size": 192}, 3, 64),
        ("qwen3", {"head_dim": 64, "intermediate_size": 128}, 2, 96),
        ("gpt_neox", {"rotary_pct": 0.25}, 2, 96),
        ("gpt_neox", {"rotary_pct": 0.75, "intermediate_size": 16, "vocab_size": 16}, 2, 96),  # in RoPE of parts
        ("mixtral", {}, 2, 96),
        ("mixtral", {}, 4, 96),
        ("mixtral", {"intermediate_size": 48}, 4, 96),
        ("mixtral", {"num_local_experts": 8}, 1, 16),
        ("mixtral", {"intermediate_size": 256}, 4, 64),
        ("t5", {}, 2, 96),
        ("t5", {"num_layers": 4}, 3, 64),
        ("t5", {"d_ff": 512, "feed_forward_proj": "gated-gelu"}, 2, 32),
    ],
)
def test_the_peak_where_a_block_is_largest(name: str, changes: dict[str, Any], batch: int, seq: int) -> None:
    """It is in a feed-forward, in RoPE or attention, or at gradients of matrices: within a hundredth."""
    spec = few_characters(name, **changes)
    made, machine = training.Measured(spec, batch, seq), training.from_calibration(training.asdict(Speeds()))  # type: ignore[call-overload]
    for kind in KINDS:
        plan = training._planned(spec, machine, batch, seq, kind)
        stage = plan.trial.fullest
        assert stage.moment.kind == "block"
        assert not stage.largest.bounded
        training.recompute_blocks(made.model, kind)
        made.step()
        assert plan.per_device_bytes == pytest.approx(made.peak_bytes(), rel=0.01), kind


def test_a_repetition_ends_before_its_last_result() -> None:
    """PyTorch stops it when all that was saved is there again: the result and the sum would be the most."""
    spec = few_characters("llama", n_kv_heads=4, d_ff=32)
    made, machine = training.Measured(spec, 2, 96), training.from_calibration(training.asdict(Speeds()))  # type: ignore[call-overload]
    plan = training._planned(spec, machine, 2, 96, "full")
    assert plan.trial.fullest.moment.kind == "block"
    training.recompute_blocks(made.model, "full")
    made.step()
    assert plan.per_device_bytes == pytest.approx(made.peak_bytes(), rel=0.01)


def test_the_peak_at_the_norm_before_the_head() -> None:
    """Of narrow blocks it is there: the product of its gradient and its input, and the result, beside the gradient."""
    spec = few_characters("llama", d_ff=16)
    made, machine = training.Measured(spec, 2, 96), training.from_calibration(training.asdict(Speeds()))  # type: ignore[call-overload]
    plan = training._planned(spec, machine, 2, 96, "none")
    stage = plan.trial.fullest
    assert stage.norm_peak == stage.temporary == 2 * (2 * 96 * 64 * 4)
    assert plan.per_device_bytes == pytest.approx(made.peak_bytes(), rel=0.01)


def test_the_weights_do_not_move_and_the_flops_are_three_forward_passes() -> None:
    spec = decoder(**SIZES)
    made = training.Measured(spec, 2, 16)
    before = [p.detach().clone() for p in made.model.parameters()]
    made.step()
    assert all(torch.equal(a, b) for a, b in zip(before, made.model.parameters(), strict=True))
    rows, width, hidden = 2 * 16, SIZES["d_model"], spec.blocks[0].branches[1].body.d_ff  # type: ignore[union-attr]
    block = 4 * width * width + 3 * width * hidden
    products = SIZES["n_layers"] * block + width * SIZES["n_vocab"]
    scores = SIZES["n_layers"] * 2 * 16 * width  # of one token: a row of scores and its mix, all heads together
    assert made.flops() == training.ACCUMULATE * 3 * rows * 2 * (products + scores)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"seq": 97}, "seq"),
        ({"batch": 0}, "batch"),
        ({"dtype": "bf16"}, "dtype"),
        ({"kv_dtype": "bf16"}, "kv_dtype"),
        ({"training": False, "seq": 8}, "seq"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_name(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InputError) as caught:
        asbuilt.measure(specs()["gpt2"], **{"training": True, **changes})
    assert caught.value.field == field


def test_models_without_a_loss_on_tokens_are_refused() -> None:
    with pytest.raises(InputError, match="read tokens and predict"):
        asbuilt.measure("llava-1.5-7b", training=True)
    with pytest.raises(InputError, match="and this machine has"):
        asbuilt.measure("llama-3.1-405b", training=True)
