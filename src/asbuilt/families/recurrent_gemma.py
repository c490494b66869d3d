"""The recurrent_gemma family: Griffin's gated recurrences, with local attention in every third layer.

Botev et al. 2024 (RecurrentGemma, arXiv 2404.07839). The feed-forward is half as wide as `intermediate_size` says.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from asbuilt.families.gemma2 import cap
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Key, Only, Optional, Size, Values, activation, but
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, DerivedHeadWidth, sizes
from asbuilt.spec import RGLRU, Block, Branch, LanguageModel, RMSNorm, ShortConvolution

RECURRENT, ATTENTION = "recurrent", "attention"
CONTEXT = 8192  # tokens that the published models were trained on; no key says it, and nothing limits it


def build(
    *,
    recurrent: Sequence[bool],
    d_rnn: int | None,
    kernel: int,
    window: int,
    eps: float = 1e-6,
    bias: bool = False,
    logit_softcap: float | None = None,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes: the `recurrent` layers of width `d_rnn`, the others attention with a window."""
    made = sized(sizes)
    made, d_rnn = replace(made, d_ff=made.d_ff // 2), d_rnn or made.d_model
    norm = RMSNorm(d=made.d_model, eps=eps, gain="offset")
    conv = ShortConvolution(channels=d_rnn, kernel=kernel, bias=True, activation=None)
    recurrence = RGLRU(
        d_model=made.d_model, d_rnn=d_rnn, n_heads=made.n_heads, conv=conv, activation=made.activation, bias=True
    )
    first = {
        True: Branch(name="recurrence", norm=norm, body=recurrence),
        False: Branch(name="attention", norm=norm, body=made.attention(bias=bias, output_bias=True, window=window)),
    }
    ffn = Branch(name="ffn", norm=norm, body=made.gated(True))
    blocks = {kind: Block(branches=(branch, ffn)) for kind, branch in first.items()}
    scale = _bfloat16(made.d_model**0.5)
    return made.model(tuple(blocks[one] for one in recurrent), norm, embedding_scale=scale, logit_softcap=logit_softcap)


def _bfloat16(value: float) -> float:
    """Returns the nearest bfloat16 number: in that precision the reference keeps the embedding's scale."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


@dataclass(frozen=True, eq=False, repr=False)
class _Kinds:
    """The kinds of layer, repeated to the model's depth; published files spell the key with an underscore before it."""

    into = "recurrent"
    keys = ("block_types", "_block_types")

    def read(self, reader: ConfigReader, values: Values) -> None:
        key = reader.spelled(*self.keys)
        kinds = [RECURRENT, RECURRENT, ATTENTION] if key is None else reader.config[key]
        allowed = f"a list of {RECURRENT} and {ATTENTION}"
        ok = isinstance(kinds, list) and len(kinds) > 0 and all(kind in (RECURRENT, ATTENTION) for kind in kinds)
        reader.require(key or self.keys[0], ok, allowed)
        for one in self.keys:
            reader.irrelevant(one, "carried, since what is repeated may be said longer or shorter")
        values[self.into] = self._layers(kinds, values["n_layers"])

    @staticmethod
    def _layers(kinds: Sequence[str], n_layers: int) -> tuple[bool, ...]:
        return tuple(kinds[i % len(kinds)] == RECURRENT for i in range(n_layers))

    def write(self, parts: Parts) -> dict[str, Any]:
        found = tuple(block.branches[0].name == "recurrence" for block in parts.model.blocks)
        for key in self.keys:
            if key in parts.carried and self._layers(parts.carried[key], parts.n_layers) == found:
                return {key: parts.carried[key]}
        return {self.keys[0]: [RECURRENT if one else ATTENTION for one in found]}


class _Context:
    """The context, which no key says."""

    into = "max_positions"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values[self.into] = CONTEXT

    def write(self, parts: Parts) -> dict[str, Any]:
        return {}


def _recurrent(parts: Parts) -> list[RGLRU]:
    return [body for block in parts.model.blocks if isinstance(body := block.branches[0].body, RGLRU)]


def _heads(parts: Parts) -> int:
    """Returns the heads, which a model without attention has too: blocks of its gates."""
    recurrences = _recurrent(parts)
    return recurrences[0].n_heads if recurrences else parts.attention.n_heads


STEMS = {
    "attention.norm": "temporal_pre_norm",
    "recurrence.norm": "temporal_pre_norm",
    "ffn.norm": "channel_pre_norm",
    **{f"attention.body.{name}": f"temporal_block.{name}_proj" for name in "qkvo"},
    **{f"ffn.body.{name}": f"mlp_block.{name}_proj" for name in ("gate", "up", "down")},
    "recurrence.body.y": "temporal_block.linear_y",
    "recurrence.body.x": "temporal_block.linear_x",
    "recurrence.body.o": "temporal_block.linear_out",
    "recurrence.body.conv": "temporal_block.conv_1d",
    "recurrence.body.decay": "temporal_block.rg_lru.recurrent_param",
    **{
        f"recurrence.body.{gate}_gate{stem}": f"temporal_block.rg_lru.{gate}_gate{stem or '_weight'}"
        for gate in ("input", "recurrent")
        for stem in ("", "_bias")
    },
}


def _keys() -> tuple[Key, ...]:
    """Returns the keys; defaults as in transformers' RecurrentGemmaConfig."""
    found = but(
        sizes(n_vocab=256000, d_model=2560, d_ff=7680, n_layers=26, n_heads=10, context=CONTEXT),
        d_head=DerivedHeadWidth(even=True),
        max_positions=_Context(),
        rotary={"partial": 0.5},
        n_heads={"at": _heads},
        d_ff={"least": 2, "at": lambda parts: 2 * parts.ffn.d_ff},
        activation=replace(activation("hidden_activation", "gelu_pytorch_tanh"), at="ffn.activation"),
        tied={"default": True},
    )
    return (
        *found,
        RMS_EPS,
        ATTENTION_BIAS,
        _Kinds(),
        # a model whose layers are all attention has neither
        Optional("lru_width", "d_rnn", default=None, at=lambda parts: next((r.d_rnn for r in _recurrent(parts)), None)),
        Size("conv1d_width", "kernel", default=4, at=lambda parts: next((r.conv.kernel for r in _recurrent(parts)), 4)),
        Size("attention_window_size", "window", default=2048),
        cap("logits_soft_cap", "logit_softcap", 30.0),
        Only("embeddings_scale_by_sqrt_dim", True, reason="the embedding is always scaled"),
        Only("head_dim", lambda values: values["d_head"], reason="the class takes hidden_size / num_attention_heads"),
        Irrelevant("initialisation only", "w_init_variance_scale", "final_w_init_variance_scale"),
    )


FAMILY = Family(
    name="recurrent_gemma",
    heads=("RecurrentGemmaForCausalLM",),
    keys=_keys(),
    build=build,
    names=Names(
        stems=STEMS, outside={"embedding": "model.embed_tokens", "norm": "model.final_norm", "head": "lm_head"}
    ),
)
