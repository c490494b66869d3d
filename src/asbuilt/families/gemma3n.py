"""The gemma3n family: a MobileNet-V5 that sees, a conformer that hears, and a gemma3n_text with tokens of both.

Google 2025, its model card and published code. Images are square, of the size that the network was made for, which no
config says. A sound takes as many tokens however short it is. Some token ids are those of images, or of sounds: they
have rows of their own, which pass through the same map.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families import gemma3n_text
from asbuilt.families.shared import conformer, mobilenet
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, Key, Number, Only, Size, Values, depth, tied
from asbuilt.families.shared.multimodal import IMAGE_DELIMITERS, SAME_TIE, Text, placeholder, vision_of
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts, expect, expect_whole
from asbuilt.families.shared.reader import ConfigReader, is_number, is_whole
from asbuilt.families.shared.sizes import RMS_EPS
from asbuilt.families.shared.table import TensorTable, entry, respelled
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import (
    AudioEncoder,
    ConvolvedPatches,
    Hearing,
    LanguageModel,
    MelSubsampling,
    MLPProjector,
    Model,
    OwnTokens,
    RMSNorm,
    TiedHead,
    Vision,
    VisionLanguageModel,
    stored_weights,
)
from asbuilt.spec.own_tokens import Through
from asbuilt.spec.part import LARGEST_SIZE

NETWORK = "mobilenetv5_300m_enc"


def build(
    text: LanguageModel, images: dict[str, Any], sounds: dict[str, Any], *, placeholder: int, heard: int, n_sound: int
) -> VisionLanguageModel:
    """Returns the text with images and sounds of `n_sound` tokens in it, in the places of two tokens."""
    tower = mobilenet.tower(mobilenet.NETWORKS[images["network"]])
    eps = images["eps"] / tower.d_model  # as good as vectors times the root of their width
    vision = Vision(tower=tower, projector=_projector(tower.d_model, text, images, eps), placeholder=placeholder)
    reduction, ids = sounds["reduction"], {"n_rows", "first", "reduction"}
    hears = _tower(**{key: sounds[key] for key in sounds.keys() - ids}, n_tokens=n_sound * reduction)
    projector = replace(_projector(hears.d_model, text, sounds, sounds["eps"]), every=reduction)
    hearing = Hearing(tower=hears, projector=projector, placeholder=heard, filled=True)
    own = (_own("vision", tower.d_model, text, images), _own("hearing", hears.d_model, text, sounds))
    return VisionLanguageModel.of(text, vision, hearing, own)


def _projector(wide: int, text: LanguageModel, said: dict[str, Any], eps: float) -> MLPProjector:
    """Returns a norm, a map to the text's width, and a norm without gain."""
    return MLPProjector(
        widths=(wide, text.d_model),
        activation="gelu",
        norm=RMSNorm(d=wide, eps=eps),
        post_norm=RMSNorm(d=text.d_model, eps=said["eps"], gain="none"),
    )


def _own(through: Through, wide: int, text: LanguageModel, said: dict[str, Any]) -> OwnTokens:
    norm = RMSNorm(d=wide, eps=said["eps"])
    ids = {"first": said["first"], "n_rows": said["n_rows"]}
    return OwnTokens(through=through, **ids, d_table=wide, d_model=text.d_model, norm=norm)


def _tower(
    *,
    n_mels: int,
    n_tokens: int,
    channels: tuple[int, int],
    d_model: int,
    n_layers: int,
    n_heads: int,
    kernel: int,
    branch_scale: float,
    window: int,
    softcap: float,
    eps: float,
    group_eps: float,
) -> AudioEncoder:
    """Returns the conformer of these sizes."""
    embedding = MelSubsampling(
        n_mels=n_mels,
        n_tokens=n_tokens,
        channels=channels,
        d_model=d_model,
        eps=group_eps,
        ahead=True,
        cumulative=True,
    )
    attention = conformer.local_attention(d_model, n_heads, window, softcap)
    block = conformer.block(attention, activation="silu", kernel=kernel, branch_scale=branch_scale, eps=eps)
    return AudioEncoder(embedding=embedding, blocks=(block,) * n_layers, max_positions=n_tokens, name="tower")


def _hearing(parts: Parts) -> Hearing:
    return parts.expect(parts.whole(VisionLanguageModel).hearing, Hearing, "hearing")


def _own_of(parts: Parts, through: Through) -> OwnTokens:
    """Returns the tokens of images, or of sounds; raises InputError where the spec has none."""
    found = parts.around.whole(VisionLanguageModel).own_tokens
    return parts.expect(next((one for one in found if one.through == through), None), OwnTokens, "own_tokens")


def _ids(through: Through, first: int) -> tuple[Key, ...]:
    """Returns the keys of the token ids of images, or of sounds."""
    return (
        Size("vocab_size", "n_rows", default=128, at=lambda parts: _own_of(parts, through).n_rows),
        Size("vocab_offset", "first", default=first, least=0, at=lambda parts: _own_of(parts, through).first),
    )


class _Pair:
    """Two numbers, or two pairs of them, one for each convolution, that may be nothing else."""

    def __init__(self, key: str, usual: int) -> None:
        self.key, self.allowed = key, [[usual, usual], [usual, usual]]

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.only(self.key, self.allowed, reason="the convolutions that are built")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {}


class _Channels:
    """The channels of both convolutions."""

    key = "sscp_conv_channel_size"

    def read(self, reader: ConfigReader, values: Values) -> None:
        found = reader.config.get(self.key, [128, 32])
        reader.known.add(self.key)
        fits = isinstance(found, list) and len(found) == 2 and all(is_whole(n) and 1 <= n <= 2**16 for n in found)
        reader.require(self.key, fits, "two whole numbers from 1 to 65536")
        values["channels"] = tuple(found)

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: [*conformer.embedding(parts).channels]}


class _Clamp:
    """What clamps the stream, where numbers overflow."""

    key = "gradient_clipping"

    def read(self, reader: ConfigReader, values: Values) -> None:
        clamp = reader.config.get(self.key, 1e10)
        ok = is_number(clamp) and clamp >= conformer.UNREACHED
        reader.require(self.key, ok, f"at least {conformer.UNREACHED:g}: smaller numbers would clamp the stream itself")
        reader.irrelevant(self.key, "no stream gets there")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {}


SOUNDS: tuple[Key, ...] = (  # defaults as in transformers' Gemma3nAudioConfig
    *_ids("hearing", 262272),
    Size("input_feat_size", "n_mels", default=128, most=2**16, at=lambda parts: conformer.embedding(parts).n_mels),
    Size("hidden_size", "d_model", default=1536, must=(lambda values: values["d_model"] % 2 == 0, "an even number")),
    depth("conf_num_hidden_layers", 12),
    Size(
        "conf_num_attention_heads",
        "n_heads",
        default=8,
        divides="d_model",
        at=lambda parts: conformer.local(parts).n_heads,
    ),
    _Channels(),
    Number("sscp_conv_group_norm_eps", "group_eps", default=1e-3, at=lambda parts: conformer.embedding(parts).eps),
    _Pair("sscp_conv_kernel_size", 3),
    _Pair("sscp_conv_stride_size", 2),
    Size("conf_conv_kernel_size", "kernel", default=5, most=2**10, at=lambda p: conformer.module(p).conv.kernel),
    Number("conf_residual_weight", "branch_scale", default=0.5, at=lambda p: conformer.branch(p, "ffn_in").scale),
    Size("conf_attention_context_left", "window", default=13, at=lambda parts: conformer.local(parts).window),
    Only("conf_attention_context_right", 0, reason="tokens attend to none after them"),
    Irrelevant("how the computation is divided", "conf_attention_chunk_size"),
    Number("conf_attention_logit_cap", "softcap", default=50.0, at=lambda parts: conformer.local(parts).softcap),
    Size(
        "conf_reduction_factor",
        "reduction",
        default=4,
        most=2**10,
        at=lambda parts: _hearing(parts.around).projector.every,
    ),
    _Clamp(),
    replace(RMS_EPS, at=lambda parts: conformer.branch(parts, "conv").norm.eps),  # type: ignore[union-attr]  # pyright: ignore
)


class _Network:
    """The network by its name, and the options that timm would build it with, of which there are none."""

    key = "architecture"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["network"] = reader.choice(
            self.key, choices={name: name for name in mobilenet.NETWORKS}, default=NETWORK
        )
        wide = mobilenet.NETWORKS[values["network"]].d_model
        reader.only("hidden_size", wide, reason=f"vectors of {values['network']} are that wide")
        reader.only("model_args", None, {}, reason="the network is built as its name says")

    def write(self, parts: Parts) -> dict[str, Any]:
        made = parts.model.embedding
        return {self.key: mobilenet.named(made, parts.family), "hidden_size": made.d_model}


IMAGES: tuple[Key, ...] = (  # defaults as in transformers' Gemma3nVisionConfig
    *_ids("vision", 262144),
    _Network(),
    replace(RMS_EPS, at=lambda parts: _own_of(parts, "vision").norm.eps),
    Irrelevant("the network has no classes", "num_classes", "label_names", "pretrained_cfg", "num_labels"),
    Irrelevant("vectors are never averaged over an image in a text", "do_pooling", "global_pool"),
)


class _Tokens:
    """How many tokens an image and a sound take: the first follows from the network."""

    key, seen = "audio_soft_tokens_per_image", "vision_soft_tokens_per_image"

    def read(self, reader: ConfigReader, values: Values) -> None:
        most = 2**14 // values["sounds"]["reduction"]
        values["n_sound"] = reader.size(self.key, default=188, null=188, most=max(1, most))
        n = mobilenet.NETWORKS[values["images"]["network"]].n_side ** 2
        same = reader.size(self.seen, default=256, null=256) == n
        reader.require(self.seen, same, f"{n}, the vectors that the network makes of an image")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: _hearing(parts).n_tokens, self.seen: vision_of(parts).n_tokens}


def _apart(values: Values) -> bool:
    """Returns whether token ids of the text, of images and of sounds follow each other up to the last."""
    images, sounds = values["images"], values["sounds"]
    follow = images["first"] + images["n_rows"] == sounds["first"]
    return follow and sounds["first"] + sounds["n_rows"] == values["text"].n_vocab


def _beyond(name: str) -> Check:
    """Returns the check that a placeholder has no vectors by layer of its own."""

    def fits(values: Values) -> bool:
        return name in values and values[name] >= values["text"].per_layer.n_vocab

    key = "image_token_id" if name == "placeholder" else "audio_token_id"
    return Check(key, (fits, "a token id at or above text_config.vocab_size_per_layer_input"))


STEMS = {
    **{
        f"{own}.{path}": f"{theirs}.{name}"
        for own, theirs in (("ffn_in", "ffw_layer_start"), ("ffn_out", "ffw_layer_end"))
        for path, name in {
            "norm": "pre_layer_norm",
            "body.up": "ffw_layer_1",
            "body.down": "ffw_layer_2",
            "post_norm": "post_layer_norm",
        }.items()
    },
    "attention.norm": "attention.pre_attn_norm",
    **{f"attention.body.{part}": f"attention.attn.{part}_proj" for part in "qkv"},
    "attention.body.o": "attention.post",
    "attention.body.positions": "attention.attn.relative_position_embedding.pos_proj",
    "attention.body.q_norm.weight": "attention.attn.per_dim_scale",
    "attention.post_norm": "attention.post_norm",
    "conv.norm": "lconv1d.pre_layer_norm",
    "conv.body.x": "lconv1d.linear_start",
    "conv.body.conv": "lconv1d.depthwise_conv1d",
    "conv.body.norm": "lconv1d.conv_norm",
    "conv.body.o": "lconv1d.linear_end",
    "ffn_out.sum_norm": "norm",
}
STEPS = {
    f"embedding.{own}_{i}": f"subsample_conv_projection.conv_{i}.{own}" for i in range(2) for own in ("conv", "norm")
}
NAMES = Names(
    stems=STEMS,
    outside={"embedding": "subsample_conv_projection.input_proj_linear", **STEPS},
    layers="conformer",
)
TEXT = (("model.", "model.language_model."),)


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    text = gemma3n_text.FAMILY.table(whole.text)
    network = expect(whole.vision.tower.embedding, ConvolvedPatches, "vision.tower.embedding", family)
    for path, _, _ in stored_weights(whole.vision.tower):
        if not path.startswith("embedding."):
            raise InputError(f"{family} files have no name for this weight", field=f"vision.tower.{path}")
    hears, own = expect(whole.hearing, Hearing, "hearing", family), []
    for i, one in enumerate(whole.own_tokens):
        name = "model.embed_vision" if one.through == "vision" else "model.embed_audio"
        own += [
            entry(f"own_tokens.{i}.weight", f"{name}.embedding.weight"),
            entry(f"own_tokens.{i}.norm.weight", f"{name}.hard_embedding_norm.weight"),
            entry(f"{one.through}.projector.norm.weight", f"{name}.soft_embedding_norm.weight"),
            entry(f"{one.through}.projector.layers_0.weight", f"{name}.embedding_projection.weight"),
        ]
    entries = (
        *respelled(text.entries, TEXT),
        *mobilenet.entries(network, "vision.tower.embedding.", "model.vision_tower.timm_model."),
        *NAMES.entries(hears.tower, family, "hearing.tower.", "model.audio_tower."),
        *own,
    )
    again = {"lm_head.weight": "embedding.weight"} if isinstance(whole.head, TiedHead) else {}
    return TensorTable(entries=entries, ignored=text.ignored, duplicates=again)


FAMILY = Family(
    name="gemma3n",
    heads=("Gemma3nForConditionalGeneration",),
    keys=(  # defaults as in transformers' Gemma3nConfig
        IMAGE_DELIMITERS,
        Irrelevant("tokens that the processor puts around sounds", "boa_token_id", "eoa_token_id"),
        tied(True),
        Text(gemma3n_text.FAMILY),
        SAME_TIE,
        Nested(key="vision_config", into="images", kind="gemma3n_vision", at="vision.tower", keys=IMAGES),
        Nested(key="audio_config", into="sounds", kind="gemma3n_audio", at="hearing.tower", keys=SOUNDS),
        _Tokens(),
        Check(
            "audio_config",
            (
                _apart,
                "vocab_offset at the end of vision_config's, and at vocab_size before the end of text_config's",
            ),
        ),
        replace(placeholder(262145), key="image_token_id", also=("image_token_index",)),
        Size(
            "audio_token_id",
            "heard",
            default=262273,
            most=LARGEST_SIZE,
            least=0,
            must=(
                lambda values: values["heard"] != values["placeholder"],
                "another token than image_token_id",
            ),
            at="hearing.placeholder",
        ),
        _beyond("placeholder"),
        _beyond("heard"),
    ),
    build=build,
    names=_names,
)
