"""The gemma3n_text family: several streams with alternating updates, low-rank residuals, vectors by layer, cut gates.

Gemma 3n (Google 2025, its model card and published code): AltUp, arXiv 2301.13310; LAuReL, arXiv 2411.07501. The last
layers read keys and values of earlier ones, as in gemma4. The language model alone, as `Gemma3nForCausalLM` stores it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families import gemma4_text
from asbuilt.families.gemma2 import ACTIVATION, SANDWICH, cap
from asbuilt.families.gemma3_text import SCALINGS
from asbuilt.families.gemma4_text import Role
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.ends import decoder_ends
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Only, Size, Values, but
from asbuilt.families.shared.names import QK_NORMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import REFUSED, ConfigReader, is_whole
from asbuilt.families.shared.rotary import TwoRopes
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, HeadWidth, LayerWindows, every_but_last, sizes
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import (
    AlternatingUpdates,
    Attention,
    Block,
    Branch,
    GatedMLP,
    LanguageModel,
    Laurel,
    Model,
    PerLayerInput,
    ProjectedStreams,
    RMSNorm,
    Rotary,
)
from asbuilt.spec.part import LARGEST_SIZE

HALF = 2**-0.5  # both the stream and what the first branch adds are divided by the root of 2
SPARSE_LAYERS, SPARSITY = 10, 0.95


def build(
    *,
    windows: Sequence[int | None],
    local: Rotary,
    n_readers: int,
    d_vector: int,
    n_vectors: int,
    n_streams: int,
    laurel_rank: int,
    widths: Sequence[int],
    sparsities: Sequence[float | None],
    eps: float = 1e-6,
    bias: bool = False,
    logit_softcap: float | None = None,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes, each layer with its own window, width of its feed-forward, and sparsity.

    Layers with a window have `local` RoPE; the last `n_readers` read keys and values of earlier ones. Each block reads
    a vector of `d_vector` numbers, of a table of `n_vectors` rows.
    """
    made = sized(sizes, activation="gelu_tanh", tied=True)
    norm, per_head = RMSNorm(d=made.d_model, eps=eps), RMSNorm(d=made.head_width, eps=eps)
    vector = PerLayerInput(d_model=made.d_model, d=d_vector, activation=made.activation)
    updates = AlternatingUpdates(n_streams=n_streams, d_model=made.d_model, norm=norm, vector=vector, vector_norm=norm)
    laurel = Laurel(d_model=made.d_model, rank=laurel_rank, norm=norm)

    def attention(window: int | None, role: Role) -> Attention:
        kind = "full" if window is None else "sliding"
        own: dict[str, Any] = {"k_norm": per_head, "v_norm": replace(per_head, gain="none")}
        own |= {"kv_name": kind if role == "lends" else None}
        if role == "reads":
            own = {"kv_from": kind}
        rotary = made.rotary if window is None else local
        alike: dict[str, Any] = {"bias": bias, "output_bias": bias, "q_norm": per_head, "scale": 1.0}
        return made.attention(window=window, positions=rotary, **alike, **own)

    def block(window: int | None, role: Role, width: int, sparsity: float | None) -> Block:
        ends: dict[str, Any] = {"norm": norm, "post_norm": norm}
        body, ffn = attention(window, role), replace(made, d_ff=width).gated(sparsity=sparsity)
        first = Branch(name="attention", body=body, beside=laurel, scale=HALF, stream_scale=HALF, **ends)
        return Block(branches=(first, Branch(name="ffn", body=ffn, **ends)), updates=updates)

    layers = [*zip(windows, gemma4_text.roles(windows, n_readers), widths, sparsities, strict=True)]
    kinds = {layer: block(*layer) for layer in dict.fromkeys(layers)}
    return made.model(
        tuple(map(kinds.__getitem__, layers)),
        norm,
        embedding_scale=made.d_model**0.5,
        logit_softcap=logit_softcap,
        per_layer=gemma4_text.vectors(made, eps, d_vector, n_vectors),
        streams=ProjectedStreams(n_streams=n_streams, d_model=made.d_model),
    )


class _Widths:
    """The width of each layer's feed-forward: one number for all, or a list of them."""

    key = "intermediate_size"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the widths."""
        n_layers, said = values["n_layers"], reader.config.get(self.key)
        if not isinstance(said, list):
            values["widths"] = (reader.size(self.key, default=16384),) * n_layers
            return
        reader.known.add(self.key)
        fits = len(said) == n_layers and all(is_whole(one) and 1 <= one <= LARGEST_SIZE for one in said)
        reader.require(self.key, fits, f"a whole number, or a list of {n_layers} of them")
        values["widths"] = tuple(said)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        return {self.key: [one.d_ff for one in _gated(parts)]}


class _Sparsities:
    """The share of each layer's gate that is cut, 0 for none; of more than ten layers the first ten cut by default."""

    key = "activation_sparsity_pattern"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the shares."""
        n_layers = values["n_layers"]
        cut = SPARSE_LAYERS if n_layers > SPARSE_LAYERS else 0
        said: Any = [SPARSITY] * cut + [0.0] * (n_layers - cut)
        reader.known.add(self.key)
        if reader.given(self.key):
            said = reader.config[self.key]
            numbers = isinstance(said, list) and all(type(one) in (int, float) and 0 <= one < 1 for one in said)
            reader.require(self.key, numbers and len(said) == n_layers, f"a list of {n_layers} numbers from 0, below 1")
        values["sparsities"] = tuple(float(one) or None for one in said)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list."""
        return {self.key: [one.sparsity or 0.0 for one in _gated(parts)]}


class _Readers:
    """How many of the last layers read keys and values of the last layer before them of their kind."""

    key = "num_kv_shared_layers"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the number; raises InputError where a kind of layer has none to read from."""
        values["n_readers"] = n = reader.size(self.key, default=15, least=0)
        first, windows = values["n_layers"] - n, values["windows"]
        lent = first > 0 and {*windows[first:]} <= {*windows[:first]}
        reader.require(self.key, lent, "fewer than the layers, with one of each kind before them")

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the number."""
        return {self.key: sum(one.kv_from is not None for one in parts.attentions)}


def _gated(parts: Parts) -> list[GatedMLP]:
    """Returns the feed-forward of each layer."""
    bodies = [(i, branch.body) for i, block in enumerate(parts.model.blocks) for branch in block.branches[1:2]]
    return [parts.expect(body, GatedMLP, f"blocks.{i}.ffn.body") for i, body in bodies]


def _updates(parts: Parts) -> AlternatingUpdates:
    return parts.expect(parts.model.blocks[0].updates, AlternatingUpdates, "blocks.0.updates")


def _laurel(parts: Parts) -> Laurel:
    return parts.expect(parts.first.beside, Laurel, "blocks.0.attention.beside")


def usual_layers(reader: ConfigReader, values: Values) -> Sequence[bool]:
    """Returns which layers have a window where none are listed: all but every fifth."""
    return every_but_last(values["n_layers"], 5)


STEMS = (
    SANDWICH
    | QK_NORMS
    | {
        "attention.beside.left": "laurel.linear_left",
        "attention.beside.right": "laurel.linear_right",
        "attention.beside.norm": "laurel.post_laurel_norm",
        "updates.norm": "altup.router_norm",
        "updates.router": "altup.modality_router.weight",
        "updates.prediction": "altup.prediction_coefs.weight",
        "updates.correction": "altup.correction_coefs.weight",
        "updates.vector_scale": "altup.correct_output_scale",
        "updates.vector.gate": "per_layer_input_gate",
        "updates.vector.down": "per_layer_projection",
        "updates.vector_norm": "post_per_layer_input_norm",
    }
)
NAMES = Names(
    stems=STEMS,
    outside=gemma4_text.WHOLE,
    rows={
        "streams.into": "model.altup_projections.{}.weight",
        "streams.out": "model.altup_unembed_projections.{}.weight",
    },
)


def _names(spec: Model, family: str) -> TensorTable:
    return replace(NAMES, ignored=gemma4_text.ignored(spec))(spec, family)


FAMILY = Family(
    name="gemma3n_text",
    heads=("Gemma3nForCausalLM",),
    ends=lambda name: decoder_ends("Gemma3nText"),
    padding=0,
    keys=(  # defaults as in transformers' Gemma3nTextConfig
        *but(
            sizes(n_vocab=262400, d_model=2048, d_ff=16384, n_layers=35, n_heads=8, n_kv_heads=2, context=32768),
            d_head=HeadWidth(256),
            n_kv_heads={"null": REFUSED},
            rotary=TwoRopes(("rope_theta", 1_000_000.0), ("rope_local_base_freq", 10_000.0), kinds=SCALINGS),
            d_ff=None,
            activation=ACTIVATION,
            tied={"default": True},
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        LayerWindows(default=512, usual=usual_layers, required=True),
        _Widths(),
        _Sparsities(),
        _Readers(),
        Size("hidden_size_per_layer_input", "d_vector", default=256, at="model.per_layer.d"),
        Size("vocab_size_per_layer_input", "n_vectors", default=262144, at="model.per_layer.n_vocab"),
        Size(
            "altup_num_inputs", "n_streams", default=4, least=2, most=2**10, at=lambda parts: _updates(parts).n_streams
        ),
        Size("laurel_rank", "laurel_rank", default=64, at=lambda parts: _laurel(parts).rank),
        Only("altup_active_idx", 0, reason="the first stream is the one that blocks compute on"),
        Only("altup_correct_scale", True, reason="what reads the corrected stream always reads it scaled"),
        Irrelevant("training only: weights of streams are clipped, and have a learning rate", "altup_coef_clip"),
        Irrelevant("training only", "altup_lr_multiplier"),
        Only("query_pre_attn_scalar", 1, 256, reason="scores of this family are not scaled, whatever it says"),
        cap("final_logit_softcapping", "logit_softcap", 30.0),
    ),
    build=build,
    names=_names,
)
