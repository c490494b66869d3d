"""The rwkv family: RWKV-4, time mixing and channel mixing in the place of attention and feed-forward.

Peng et al. 2023 (arXiv 2305.13048). transformers halves weights and streams every few layers where it runs, which
changes nothing but the numbers' range.
"""

from __future__ import annotations

from dataclasses import replace

from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Flag, Irrelevant, Optional, Size, depth, eps
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.table import Layout, Leading
from asbuilt.spec import (
    Block,
    Branch,
    ChannelMixing,
    Head,
    LanguageModel,
    LayerNorm,
    TiedHead,
    TimeMixing,
    TokenEmbedding,
    TokenShift,
)

LAST_EPS = 1e-5  # of the last norm, PyTorch's own, whatever the config says


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    max_positions: int,
    eps: float,
    d_state: int | None = None,
    d_ff: int | None = None,
    tied: bool = False,
    name: str = "rwkv",
) -> LanguageModel:
    """Returns the model of these sizes; `d_state` None means d_model channels, `d_ff` None 4 d_model."""
    norm = LayerNorm(d=d_model, eps=eps)
    time = TimeMixing(
        d_model=d_model,
        d_state=d_state or d_model,
        shift=TokenShift(d_model=d_model, targets=("k", "v", "r")),
    )
    shift = TokenShift(d_model=d_model, targets=("up", "r"), belongs="ffn")
    channel = ChannelMixing(d_model=d_model, d_ff=d_ff or 4 * d_model, shift=shift)
    block = Block(branches=(Branch(name="time", norm=norm, body=time), Branch(name="channel", norm=norm, body=channel)))
    return LanguageModel(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        embedding_norm=norm,
        blocks=(block,) * n_layers,
        norm=LayerNorm(d=d_model, eps=LAST_EPS),
        head=(TiedHead if tied else Head)(d_model=d_model, n_vocab=n_vocab),
        max_positions=max_positions,
        name=name,
    )


def _time(parts: Parts) -> TimeMixing:
    return parts.expect(parts.first.body, TimeMixing, "blocks.0.time.body")


def _channel(parts: Parts) -> ChannelMixing:
    return parts.expect(parts.last.body, ChannelMixing, "blocks.0.channel.body")


MIXED = {"k": "key", "v": "value", "r": "receptance", "up": "key"}
STEMS = {
    "time.norm": "ln1",
    "channel.norm": "ln2",
    **{f"time.body.{ours}": f"attention.{MIXED[ours]}" for ours in "kvr"},
    "time.body.o": "attention.output",
    "time.body.decay": "attention.time_decay",
    "time.body.first": "attention.time_first",
    **{f"time.body.shift.{ours}": f"attention.time_mix_{MIXED[ours]}" for ours in "kvr"},
    "channel.body.up": "feed_forward.key",
    "channel.body.r": "feed_forward.receptance",
    "channel.body.down": "feed_forward.value",
    **{f"channel.body.shift.{ours}": f"feed_forward.time_mix_{MIXED[ours]}" for ours in ("up", "r")},
}
LAYOUTS: dict[str, Layout] = {path: Leading(2) for path in STEMS if ".shift." in path}
FAMILY = Family(
    name="rwkv",
    prefix="rwkv.",
    heads=("RwkvForCausalLM",),
    keys=(  # defaults as in transformers' RwkvConfig
        Size("hidden_size", "d_model", default=4096),
        Size("vocab_size", "n_vocab", default=50277),
        depth("num_hidden_layers", 32),
        # what the model was trained on: nothing limits a text
        Size("context_length", "max_positions", default=1024, also=("max_position_embeddings",)),
        Optional("attention_hidden_size", "d_state", default=None, at=lambda parts: _time(parts).d_state),
        Optional("intermediate_size", "d_ff", default=None, at=lambda parts: _channel(parts).d_ff),
        replace(eps("layer_norm_epsilon", 1e-5), at="first.norm.eps"),
        Flag("tie_word_embeddings", "tied", default=False),
        Irrelevant("halves weights and streams alike", "rescale_every"),
    ),
    build=build,
    names=Names(
        stems=STEMS,
        outside={
            "embedding": "rwkv.embeddings",
            "embedding_norm": "rwkv.blocks.0.pre_ln",
            "norm": "rwkv.ln_out",
            "head": "head",
        },
        layers="rwkv.blocks",
        layouts=LAYOUTS,
        ignored={},
    ),
)
