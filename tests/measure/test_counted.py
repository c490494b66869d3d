"""The rows that are counted, of a small llama: the predicted side by hand, the measured side handed in."""

from __future__ import annotations

import one_mixer
import pytest
import torch

from asbuilt.families import read_config
from asbuilt.measure import counted, run
from asbuilt.nn import build
from asbuilt.nn.model import Model
from asbuilt.spec import Attention, GatedDeltaNet, RMSNorm, ShortConvolution

V, M, F, LAYERS, H, K, D = 1000, 64, 160, 2, 4, 2, 16
CONTEXT = 96
CONFIG = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": M,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": K,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
}
MATRICES = LAYERS * (2 * M * H * D + 2 * M * K * D + 3 * M * F)
PARAMETERS = 2 * V * M + MATRICES + (2 * LAYERS + 1) * M


def tiny(dtype: torch.dtype) -> Model:
    return build(read_config(CONFIG, "tiny").spec, dtype=dtype)


@pytest.fixture
def _handed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured is a number of its own for each figure."""
    numbers = {"parameters": 1, "weight_bytes": 2, "flops": 3, "prefill_peak": 6}
    for name, number in numbers.items():
        monkeypatch.setattr(run, name, lambda *_, number=number: number)
    monkeypatch.setattr(run, "cache_bytes", lambda model, batch, capacity: 1000 * batch + capacity)
    monkeypatch.setattr(run, "saved_bytes", lambda model, tokens: (10 * tokens, 11 * tokens))


@pytest.mark.usefixtures("_handed_in")
@pytest.mark.parametrize(("dtype", "name", "width"), [(torch.float32, "fp32", 4), (torch.bfloat16, "bf16", 2)])
def test_each_row(dtype: torch.dtype, name: str, width: int) -> None:
    rows = {row.figure: row for row in counted(tiny(dtype))}
    # a token attends to all 96 with full scores: 4 x heads x width x keys, and 2 FLOPs for each number of a matrix
    flops = CONTEXT * (2 * (MATRICES + V * M) + LAYERS * 4 * H * D * CONTEXT)
    per_token = 2 * LAYERS * K * D * width
    expected = {
        "parameters": ("", PARAMETERS, 1, 0.0),
        f"weights, {name}": ("bytes", PARAMETERS * width, 2, 0.0),
        "forward, 96 tokens": ("FLOPs", flops, 3, 0.0),
        "cache, 96 tokens": ("bytes", CONTEXT * per_token, 1096, 0.0),
        "cache per token": ("bytes", per_token, 1001, 0.0),
    }
    for figure, (unit, predicted, measured, tolerance) in expected.items():
        row = rows[figure]
        assert (row.unit, row.predicted, row.measured, row.tolerance) == (unit, predicted, measured, tolerance), figure
    assert rows["saved by one training step, 96 tokens"].measured == 960
    loss = rows["saved by its loss"]
    # of its logits in float32 the loss keeps the log-probabilities; targets of 8 bytes and the count beside them
    assert loss.measured == 11 * 96
    assert loss.predicted == pytest.approx(CONTEXT * V * 4, rel=0.01)
    peak = rows["peak memory of prefill, 96 tokens"]
    # a model of about a megabyte, beside which what the library packs in one is no small part
    allowed = 0.03 if dtype is torch.float32 else 2**20 / peak.predicted
    assert (peak.measured, peak.tolerance) == (6, allowed)
    held = PARAMETERS * width + CONTEXT * per_token
    # beyond what is held, at least the gate's and up's results at once, and never as much as ten such
    assert held + 2 * CONTEXT * F * width < peak.predicted < held + 20 * CONTEXT * F * width


def test_states_of_sequences_are_no_part_of_a_token() -> None:
    """A convolution's last inputs and a state beside keys and values, or nothing but them."""
    net = GatedDeltaNet(
        d_model=32,
        n_key_heads=2,
        n_value_heads=2,
        d_key=8,
        d_value=8,
        norm=RMSNorm(d=8),
        conv=ShortConvolution(channels=48, kernel=3),
    )
    attention = Attention(d_model=32, n_heads=2, n_kv_heads=1, d_head=16)
    for mixers, per_token in (((net, attention, net), 2 * 16 * 4), ((net,), 0)):
        rows = {row.figure: row for row in counted(build(one_mixer.alone(*mixers)))}
        found = rows["cache per token"]
        assert (found.predicted, found.measured, found.ok) == (per_token, per_token, True)


def test_the_allocator_is_asked() -> None:
    """The peak of two tensors held at once, of one after the other, and of a library call's result."""
    assert run.peak_bytes(lambda: (torch.empty(1000), torch.empty(500))) == 6000
    assert run.peak_bytes(lambda: [torch.empty(1000).numel(), torch.empty(500).numel()]) == 4000
    held = torch.ones(256)
    assert run.peak_bytes(lambda: held + held) == 1024


def test_saved_bytes_by_hand() -> None:
    """A second text doubles what is kept but for cosines and sines, which all texts share: 8 positions of 16, twice."""
    built = tiny(torch.float32)
    model, loss = run.saved_bytes(built, 8)
    again, _ = run.saved_bytes(built, 8, batch=2)
    assert again == 2 * model - 2 * 8 * 16 * 4
    assert loss == pytest.approx(8 * V * 4 + 8 * 8, abs=64)


def test_weights_are_counted_once_however_many_names_they_have() -> None:
    tied = build(read_config(CONFIG | {"tie_word_embeddings": True}, "tied").spec)
    assert run.parameters(tied) == PARAMETERS - V * M
    assert run.weight_bytes(tied) == 4 * (PARAMETERS - V * M)
    assert run.cache_bytes(tied, 3, 10) == 3 * 10 * 2 * LAYERS * K * D * 4


def test_flops_by_hand() -> None:
    spec = read_config(CONFIG, "tiny").spec
    each = 2 * (MATRICES + V * M) + LAYERS * 4 * H * D * 10
    assert run.flops(spec, 10) == 10 * each
    assert run.flops(spec, 10, batch=3) == 30 * each
