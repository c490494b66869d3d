"""The conformer that hears for Gemma 4, and its block, also Gemma 3n's: config keys, how it is built, names on disk.

Half-step feed-forwards around attention to the tokens just before and a convolution module, over a spectrogram that two
convolutions have made a quarter as long. Defaults are as in transformers' Gemma4AudioConfig.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.families.shared.key import Flag, Key, Number, Size, Values, activation, depth
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_number, is_whole
from asbuilt.families.shared.sizes import RMS_EPS
from asbuilt.families.shared.table import Entry, entry
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    AudioEncoder,
    Block,
    Branch,
    ConvolutionModule,
    Hearing,
    Linear,
    MelSubsampling,
    MLPProjector,
    RelativeProjection,
    RMSNorm,
    ShortConvolution,
    SoftplusScale,
    VisionLanguageModel,
)
from asbuilt.spec.linear import transform_maps

# Most tokens of a sound, 30 seconds of 25 tokens each, as the processor's settings have it: configs do not say.
MOST_TOKENS = 750
NORM_EPS = 1e-6  # of all norms but those after convolutions and before the projection
# Keys are multiplied by log2(1 + e), queries by factors log2(1 + e^w), so that all are as they were at w = 0.
KEY_SCALE = math.log(1 + math.e) / math.log(2)
# A clamp of the stream at this or more is left out: no trained model's stream is anywhere near.
UNREACHED = 1e6
# How far below the soft cap a masked score is, at least: then it adds nothing in float32.
FAR_BELOW = 1e3


def hearing(
    *,
    d_model: int,
    n_layers: int,
    n_heads: int,
    activation: Activation,
    channels: tuple[int, int],
    kernel: int,
    branch_scale: float,
    window: int,
    softcap: float,
    clipped: bool,
    eps: float,
    d_between: int,
    d_text: int,
    placeholder: int,
) -> Hearing:
    """Returns the tower of these sizes, with maps to `d_between` and on to a text of width `d_text`."""
    attention = local_attention(d_model, n_heads, window, softcap, KEY_SCALE)
    made = block(attention, activation=activation, kernel=kernel, branch_scale=branch_scale, eps=eps)
    tower = AudioEncoder(
        embedding=MelSubsampling(n_mels=channels[0], n_tokens=MOST_TOKENS, channels=channels, d_model=d_model, eps=eps),
        blocks=(transform_maps(made, lambda _, one: replace(one.plain, clipped=clipped)),) * n_layers,
        max_positions=MOST_TOKENS,
        name="tower",
    )
    projector = MLPProjector(
        widths=(d_between, d_text),
        activation="gelu",
        first=MLPProjector(widths=(d_model, d_between), activation="gelu", bias=True),
        norm=RMSNorm(d=d_between, eps=eps, gain="none"),
    )
    return Hearing(tower=tower, projector=projector, placeholder=placeholder)


def block(attention: Attention, *, activation: Activation, kernel: int, branch_scale: float, eps: float) -> Block:
    """Returns half-step feed-forwards around an attention and a convolution module, whose norms have `eps`."""
    d_model = attention.d_model
    norm = RMSNorm(d=d_model, eps=NORM_EPS)
    return Block(
        branches=(
            _half("ffn_in", d_model, activation, branch_scale),
            Branch(name="attention", norm=norm, body=attention, post_norm=norm),
            Branch(name="conv", norm=replace(norm, eps=eps), body=_convolution(d_model, kernel, activation, eps)),
            replace(_half("ffn_out", d_model, activation, branch_scale), sum_norm=norm),
        )
    )


def _half(name: str, d_model: int, activation: Activation, scale: float) -> Branch:
    norm = RMSNorm(d=d_model, eps=NORM_EPS)
    body = MLP(d_model=d_model, d_ff=4 * d_model, activation=activation)
    return Branch(name=name, norm=norm, body=body, post_norm=norm, scale=scale)


def local_attention(d_model: int, n_heads: int, window: int, softcap: float, key_scale: float = 1.0) -> Attention:
    """Returns attention to the token itself and those just before it, whose keys have a factor that distances lack."""
    d_head = d_model // n_heads
    positions = RelativeProjection(
        d_model=d_model, n_heads=n_heads, d_head=d_head, window=window, scale=1 / key_scale, endpoint=True
    )
    return Attention(
        d_model=d_model,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        d_head=d_head,
        q_norm=SoftplusScale(d=d_head),
        positions=positions,
        window=window,
        softcap=softcap,
        scale=d_head**-0.5 / math.log(2) * key_scale,
        cached=False,
    )


def _convolution(d_model: int, kernel: int, activation: Activation, eps: float) -> ConvolutionModule:
    return ConvolutionModule(
        d_model=d_model,
        conv=ShortConvolution(channels=d_model, kernel=kernel, activation=None, cached=False),
        norm=RMSNorm(d=d_model, eps=eps),
        activation=activation,
    )


def branch(parts: Parts, name: str) -> Branch:
    """Returns the branch of that name; raises InputError where there is none."""
    found = next((one for one in parts.model.blocks[0].branches if one.name == name), None)
    return parts.expect(found, Branch, f"blocks.0.{name}")


def local(parts: Parts) -> Attention:
    """Returns the attention; raises InputError where there is none."""
    return parts.expect(branch(parts, "attention").body, Attention, "blocks.0.attention.body")


def embedding(parts: Parts) -> MelSubsampling:
    """Returns the convolutions of frames; raises InputError where there are none."""
    return parts.expect(parts.model.embedding, MelSubsampling, "embedding")


def module(parts: Parts) -> ConvolutionModule:
    """Returns the convolution module; raises InputError where there is none."""
    return parts.expect(branch(parts, "conv").body, ConvolutionModule, "blocks.0.conv.body")


def _between(parts: Parts) -> int:
    hears = parts.around.whole(VisionLanguageModel).hearing
    return parts.expect(hears, Hearing, "hearing").projector.widths[0]


class _Channels:
    """The channels of both convolutions; the first number is that of the bands too, as transformers counts them."""

    key = "subsampling_conv_channels"

    def read(self, reader: ConfigReader, values: Values) -> None:
        found = reader.config.get(self.key, [128, 32])
        reader.known.add(self.key)
        fits = isinstance(found, list) and len(found) == 2 and all(is_whole(n) and 1 <= n <= 2**16 for n in found)
        reader.require(self.key, fits and found[0] % 4 == 0, "two whole numbers, the first a multiple of 4")
        values["channels"] = tuple(found)

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: [*embedding(parts).channels]}


class _Chunks:
    """How far tokens look back: transformers cuts the sequence into chunks, which change nothing but distances.

    Distances count from the middle of what a chunk sees, which is the token itself only for some chunk sizes.
    """

    chunk, left, right = (f"attention_{name}" for name in ("chunk_size", "context_left", "context_right"))

    def read(self, reader: ConfigReader, values: Values) -> None:
        left = reader.size(self.left, default=13, least=2)
        reader.only(self.right, 0, reason="tokens attend to none after them")
        chunk = reader.size(self.chunk, default=12)
        fits = chunk in (left - 1, left)
        reader.require(self.chunk, fits, f"{left - 1} or {left}, beside {self.left} = {left}: others shift distances")
        reader.irrelevant(self.chunk, "how the computation is divided")
        values["window"] = left - 1

    def write(self, parts: Parts) -> dict[str, Any]:
        window = local(parts).window or 0
        chunk = parts.carried.get(self.chunk, window)
        return {self.left: window + 1, self.chunk: chunk if chunk in (window, window + 1) else window}


class _Clamps:
    """Values that only take part where numbers overflow: what clamps the stream, and what masks scores."""

    stream, masked = "gradient_clipping", "attention_invalid_logits_value"

    def read(self, reader: ConfigReader, values: Values) -> None:
        clamp, hidden = reader.config.get(self.stream, 1e10), reader.config.get(self.masked, -1e9)
        ok = is_number(clamp) and clamp >= UNREACHED
        reader.require(self.stream, ok, f"at least {UNREACHED:g}: smaller numbers would clamp the stream itself")
        most = -values["softcap"] - FAR_BELOW
        ok = is_number(hidden) and hidden <= most
        reader.require(self.masked, ok, f"at most {most:g}, far below the soft cap: masked tokens add nothing")
        reader.irrelevant(self.stream, "no stream gets there")
        reader.irrelevant(self.masked, "masked tokens add nothing")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {}


KEYS: tuple[Key, ...] = (
    Size("hidden_size", "d_model", default=1024),
    depth("num_hidden_layers", 12),
    Size("num_attention_heads", "n_heads", default=8, divides="d_model", at=lambda parts: local(parts).n_heads),
    activation(),
    _Channels(),
    Size("conv_kernel_size", "kernel", default=5, most=2**10, at=lambda parts: module(parts).conv.kernel),
    Number("residual_weight", "branch_scale", default=0.5),
    _Chunks(),
    Number("attention_logit_cap", "softcap", default=50.0, at=lambda parts: local(parts).softcap),
    _Clamps(),
    Flag("use_clipped_linears", "clipped", default=True, at=lambda parts: local(parts).maps["q"].plain.clipped),
    replace(RMS_EPS, at=lambda parts: embedding(parts).eps),
    Size("output_proj_dims", "d_between", default=1536, at=_between),
)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Sounds(Nested):
    """`audio_config` and the placeholder of sounds; without the first, or with null, there is no tower."""

    token: str = "audio_token_id"
    usual: int = 258881

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads both, or neither."""
        if reader.nested(self.key) is None:
            values[self.into] = None
            reader.irrelevant(self.token, "the placeholder of sounds, which are not read")
            return
        super().read(reader, values)
        values[self.into]["placeholder"] = reader.size(self.token, default=self.usual, null=self.usual, least=0)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns both, or null."""
        heard = parts.whole(VisionLanguageModel).hearing
        if heard is None:
            return {self.key: None}
        return {**super().write(parts), self.token: heard.placeholder}


_HALF = {"norm": "pre_layer_norm", "body.up": "ffw_layer_1.linear", "body.down": "ffw_layer_2.linear"}
_HALF |= {"post_norm": "post_layer_norm"}
STEMS = {
    **{f"ffn_in.{path}": f"feed_forward1.{name}" for path, name in _HALF.items()},
    "attention.norm": "norm_pre_attn",
    **{f"attention.body.{part}": f"self_attn.{part}_proj.linear" for part in "qkv"},
    "attention.body.o": "self_attn.post.linear",
    "attention.body.positions": "self_attn.relative_k_proj",
    "attention.body.q_norm.weight": "self_attn.per_dim_scale",
    "attention.post_norm": "norm_post_attn",
    "conv.norm": "lconv1d.pre_layer_norm",
    "conv.body.x": "lconv1d.linear_start.linear",
    "conv.body.conv": "lconv1d.depthwise_conv1d",
    "conv.body.norm": "lconv1d.conv_norm",
    "conv.body.o": "lconv1d.linear_end.linear",
    **{f"ffn_out.{path}": f"feed_forward2.{name}" for path, name in _HALF.items()},
    "ffn_out.sum_norm": "norm_out",
}
_STEPS = {
    f"embedding.{part}_{i}": f"subsample_conv_projection.layer{i}.{part}" for i in range(2) for part in ("conv", "norm")
}
NAMES = Names(
    stems=STEMS
    | {  # the bounds of a clipped map, whose matrix alone is in `linear`
        f"{path}.{bound}": f"{name.removesuffix('.linear')}.{bound}"
        for path, name in STEMS.items()
        if name.endswith(".linear")
        for bound in Linear(d_in=1, d_out=1, clipped=True).buffers()
    },
    outside={"embedding": "subsample_conv_projection.input_proj_linear", **_STEPS},
    layers="layers",
)


def entries(hears: Hearing, family: str) -> tuple[Entry, ...]:
    """Returns the entries of the tower and its projector, in files of Gemma 4."""
    first, last = "hearing.projector.first.layers_0", "hearing.projector.layers_0.weight"
    return (
        *NAMES.entries(hears.tower, family, "hearing.tower.", "model.audio_tower."),
        *(entry(f"{first}.{kind}", f"model.audio_tower.output_proj.{kind}") for kind in ("weight", "bias")),
        entry(last, "model.embed_audio.embedding_projection.weight"),
    )
