"""Families known from papers alone: their equations, written out in plain PyTorch, against the built model."""

from __future__ import annotations

import math
from typing import Any

import pytest
import strategies
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from asbuilt import cost
from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table, write_config
from asbuilt.nn.model import Model

HEADS, D_HEAD, D_MODEL, D_FF, N_VOCAB, LAYERS, TOKENS = 3, 4, 10, 7, 11, 2, 9
SIZES = {
    "vocab_size": N_VOCAB,
    "hidden_size": D_MODEL,
    "num_attention_heads": HEADS,
    "head_dim": D_HEAD,
    "num_hidden_layers": LAYERS,
    "intermediate_size": D_FF,
}
PALM: dict[str, Any] = {"model_type": "palm", **SIZES}
CHINCHILLA: dict[str, Any] = {"model_type": "chinchilla", **SIZES}


def made(config: dict[str, Any]) -> tuple[Model, dict[str, Tensor], Tensor]:
    model = strategies.randomised(read_config(config, "model").spec, 1)
    return model, dict(model.named_parameters()), torch.arange(TOKENS).remainder(N_VOCAB)


def causal_softmax(scores_HTS: Tensor) -> Tensor:
    ahead = torch.ones(scores_HTS.shape[-2:], dtype=torch.bool).triu(1)
    return scores_HTS.masked_fill(ahead, -torch.inf).softmax(-1)


def turned(x_HTD: Tensor) -> Tensor:
    """Rotary positions, numbers i and i + D/2 as one complex number."""
    half = D_HEAD // 2
    angle = torch.arange(TOKENS)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    spun = torch.complex(x_HTD[..., :half], x_HTD[..., half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((spun.real, spun.imag), -1)


@torch.no_grad()
def test_palm() -> None:
    """y = x + MLP(LayerNorm(x)) + Attention(LayerNorm(x)), one key and value for all heads, logits over sqrt(d)."""
    model, w, tokens = made(PALM)
    x = w["embedding.weight"][tokens]
    for i in range(LAYERS):
        at = f"blocks.{i}.both."
        n = F.layer_norm(x, (D_MODEL,), eps=1e-5) * w[f"{at}norm.weight"]
        q = turned((n @ w[f"{at}body.attention.q.weight"].T).view(TOKENS, HEADS, D_HEAD).transpose(0, 1))
        k = turned((n @ w[f"{at}body.attention.k.weight"].T)[None])
        v = n @ w[f"{at}body.attention.v.weight"].T
        mixed = (causal_softmax(q @ k.transpose(1, 2) / math.sqrt(D_HEAD)) @ v).transpose(0, 1).flatten(1)
        gated = F.silu(n @ w[f"{at}body.ffn.gate.weight"].T) * (n @ w[f"{at}body.ffn.up.weight"].T)
        x = x + mixed @ w[f"{at}body.attention.o.weight"].T + gated @ w[f"{at}body.ffn.down.weight"].T
    want = F.layer_norm(x, (D_MODEL,), eps=1e-5) * w["norm.weight"] @ w["embedding.weight"].T / math.sqrt(D_MODEL)
    torch.testing.assert_close(model(tokens[None])[0], want, rtol=1e-6, atol=1e-6)  # our tables are made in float32


@torch.no_grad()
def test_chinchilla() -> None:
    """Scores (q_i k_j + q_i W r_(i-j)) / sqrt(D), r the sinusoids of the distance; norms before each branch."""
    model, w, tokens = made(CHINCHILLA)
    frequencies = 10000.0 ** (-torch.arange(0, D_MODEL, 2) / D_MODEL)
    x = w["embedding.weight"][tokens]
    for i in range(LAYERS):
        at = f"blocks.{i}."
        n = normed(x, w[f"{at}attention.norm.weight"])
        q, k, v = (
            (n @ w[f"{at}attention.body.{name}.weight"].T).view(TOKENS, HEADS, D_HEAD).transpose(0, 1) for name in "qkv"
        )
        scores = q @ k.transpose(1, 2)
        for query in range(TOKENS):
            for key in range(query + 1):
                angles = (query - key) * frequencies
                far = w[f"{at}attention.body.positions.weight"] @ torch.cat((angles.sin(), angles.cos())).double()
                scores[:, query, key] += (q[:, query] * far.view(HEADS, D_HEAD)).sum(-1)
        mixed = (causal_softmax(scores / math.sqrt(D_HEAD)) @ v).transpose(0, 1).flatten(1)
        x = x + mixed @ w[f"{at}attention.body.o.weight"].T
        hidden = F.gelu(normed(x, w[f"{at}ffn.norm.weight"]) @ w[f"{at}ffn.body.up.weight"].T)
        x = x + hidden @ w[f"{at}ffn.body.down.weight"].T
    want = normed(x, w["norm.weight"]) @ w["embedding.weight"].T
    torch.testing.assert_close(model(tokens[None])[0], want, rtol=1e-6, atol=1e-6)


def normed(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain


SIZE = st.integers(1, 9)


@given(SIZE, SIZE, SIZE, SIZE, SIZE, SIZE)
def test_counts_by_hand(v: int, m: int, n: int, h: int, d: int, f: int) -> None:
    m, d = 2 * m, 2 * d
    sizes = {
        "vocab_size": v,
        "hidden_size": m,
        "num_hidden_layers": n,
        "num_attention_heads": h,
        "head_dim": d,
        "intermediate_size": f,
    }
    palm = cost.total_parameters(read_config({"model_type": "palm", **sizes}, "x").spec)
    assert palm == v * m + n * (2 * m * h * d + 2 * m * d + 3 * m * f + m) + m
    chinchilla = cost.total_parameters(read_config({"model_type": "chinchilla", **sizes}, "x").spec)
    assert chinchilla == v * m + n * (5 * m * h * d + 2 * m * f + 2 * m) + m


@pytest.mark.parametrize("config", [PALM, CHINCHILLA])
def test_written_reads_back_and_there_are_no_tensors(config: dict[str, Any]) -> None:
    spec = read_config(config, "model").spec
    family = config["model_type"]
    assert read_config(write_config(family, spec, {}, None), "model").spec == spec
    with pytest.raises(InputError, match="no checkpoints"):
        tensor_table(family, spec)


@pytest.mark.parametrize(
    ("config", "key", "value"),
    [
        (PALM, "bias", True),
        (PALM, "parallel_block", False),
        (PALM, "hidden_act", "relu"),
        (PALM, "head_dim", 3),
        (PALM, "num_key_value_heads", 2),
        (CHINCHILLA, "relative_position", "rotary"),
        (CHINCHILLA, "hidden_size", 9),
        (CHINCHILLA, "num_hidden_layers", 10**9),
        (CHINCHILLA, "window", 4),
    ],
)
def test_refused_by_name(config: dict[str, Any], key: str, value: object) -> None:
    with pytest.raises(InputError, match=key):
        read_config(config | {key: value}, "model")
