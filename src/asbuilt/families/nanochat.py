"""The nanochat family: norms without weights, also after the embedding and over heads; relu squared; capped logits.

Karpathy 2025, the published code of nanochat. Its RoPE turns the other way, which is the usual one on heads with their
halves swapped, and so are its query and key matrices on disk.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from asbuilt.families import llama
from asbuilt.families.gemma2 import cap
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import expect
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, sizes
from asbuilt.families.shared.table import Layout, SwappedHalves
from asbuilt.spec import Attention, Block, LanguageModel, RMSNorm


def build(*, logit_softcap: float | None = None, **values: Any) -> LanguageModel:  # noqa: ANN401
    """Returns the model, its logits capped at `logit_softcap`; other `values` are those of `llama.build`.

    Heads are normed after RoPE, which differs from before where its cosines and sines have a factor.
    """
    norms, stretched = partial(RMSNorm, gain="none"), values["rotary"].attention_factor != 1.0
    spec = llama.build(norms=norms, head_norms=True, rotate_first=stretched, gated=False, **values)
    return replace(spec, embedding_norm=spec.norm, head=replace(spec.head, softcap=logit_softcap))


def _swapped(keys: bool, block: Block, rows: tuple[int, ...]) -> Layout:
    body = block.branches[0].body
    attention = expect(body, Attention, "blocks.0.attention.body", "nanochat")
    return SwappedHalves(attention.n_kv_heads if keys else attention.n_heads)


def _theirs(part: str) -> Fused:
    return Fused(stems=(f"attention.body.{part}",), join=partial(_swapped, part == "k"))


FAMILY = replace(
    llama.FAMILY,
    name="nanochat",
    heads=("NanoChatForCausalLM",),
    keys=(  # defaults as in transformers' NanoChatConfig
        *sizes(n_vocab=50304, d_model=768, d_ff=8192, n_layers=12, n_heads=6, context=2048, act="relu2"),
        RMS_EPS,
        ATTENTION_BIAS,
        cap("final_logit_softcapping", "logit_softcap", 15.0),
    ),
    build=build,
    names=Names(
        stems={
            "attention.body.v": "self_attn.v_proj",
            "attention.body.o": "self_attn.o_proj",
            "ffn.body.up": "mlp.fc1",
            "ffn.body.down": "mlp.fc2",
        },
        fused={f"self_attn.{part}_proj": _theirs(part) for part in "qk"},
    ),
)
