"""The mllama family: a llama text, some of whose layers read an image by cross-attention alone, and a tower of tiles.

Llama 3.2 Vision; Dubey et al. 2024, Llama 3 (arXiv 2407.21783), section 7. One image for each text is read here, which
all tokens from its placeholder on attend to, as transformers' processor prepares it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families import llama
from asbuilt.families.shared.dimensions import Sizes, pre_norm, residual, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only, Size, Values, activation, but, depth, eps
from asbuilt.families.shared.multimodal import TEXT as TEXT_NAMES
from asbuilt.families.shared.multimodal import Text
from asbuilt.families.shared.names import ATTENTION, GATED, NORMS, Names
from asbuilt.families.shared.parts import Parts, expect_whole
from asbuilt.families.shared.reader import ConfigReader, is_whole
from asbuilt.families.shared.sizes import DerivedHeadWidth, sizes
from asbuilt.families.shared.table import Entry, TensorTable, entry, respelled
from asbuilt.families.shared.towers import SMALL, TOWER_IRRELEVANT, Nested, Pixels
from asbuilt.spec import (
    Block,
    Branch,
    CrossAttention,
    ImageEncoder,
    LanguageModel,
    LayerNorm,
    MLPProjector,
    Model,
    RMSNorm,
    TiledVision,
    TileEmbedding,
    TilePatches,
    TilePositions,
    TokenEmbedding,
    VisionLanguageModel,
)
from asbuilt.spec.part import MOST_BLOCKS

# Rows of the embedding's table after the vocabulary's; the placeholder of images is the first of them.
EXTRA = 8
USUAL_TILINGS = ((1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
# The epsilon of the norms before and after the first stack of the tower, which no config says.
OUTER_EPS = 1e-5
# The number of which a tile's tokens are padded to a multiple, which no config says.
MULTIPLE = 8


def build_text(*, crossing: tuple[int, ...], eps: float, **given: Any) -> LanguageModel:  # noqa: ANN401  # `Sizes`
    """Returns the text of these sizes; layers in `crossing` attend to an image in place of the text."""
    own: Sizes = given  # type: ignore[assignment]  # pyright: ignore
    made = sized(own)
    norm, head_norm = RMSNorm(d=made.d_model, eps=eps), RMSNorm(d=made.head_width, eps=eps)
    cross = CrossAttention(
        d_model=made.d_model,
        d_source=made.d_model,
        n_heads=made.n_heads,
        n_kv_heads=made.n_kv_heads,
        d_head=made.head_width,
        q_norm=head_norm,
        k_norm=head_norm,
    )
    reading = Block(
        branches=(
            Branch(name="cross", norm=norm, body=cross, gated=True),
            Branch(name="ffn", norm=norm, body=made.gated(), gated=True, after_source=True),
        )
    )
    plain = residual(made.attention(), made.gated(), norm, None)
    blocks = tuple(reading if i in crossing else plain for i in range(made.n_layers))
    spec = made.model(blocks, norm, d_source=made.d_model if crossing else None)
    assert isinstance(spec.embedding, TokenEmbedding)
    return replace(spec, embedding=replace(spec.embedding, extra=EXTRA))


def build_tower(
    *,
    image_size: int,
    patch_size: int,
    channels: int,
    tilings: tuple[tuple[int, int], ...],
    n_tiles: int,
    n_global: int,
    eps: float,
    **sizes: Any,  # noqa: ANN401  # those of `Dimensions`
) -> ImageEncoder:
    """Returns the tower: a stack of blocks, vectors of tiles on its normed output, and `n_global` gated blocks."""
    d_model, n_places = sizes["d_model"], (image_size // patch_size) ** 2 + 1
    tiles = TileEmbedding(d_model=d_model, n_tilings=len(tilings), n_tiles=n_tiles)
    places = TilePositions(d_model=d_model, n_positions=n_places, n_tilings=len(tilings), n_tiles=n_tiles)
    outer = LayerNorm(d=d_model, eps=OUTER_EPS)
    embedding = TilePatches(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        d_model=d_model,
        tilings=tilings,
        n_tiles=n_tiles,
        multiple=MULTIPLE,
        tiles=tiles,
        positions=places,
        norm=outer,
    )
    made = sized(sizes, n_vocab=0, max_positions=embedding.n_tokens, name="tower")
    attention = made.attention(causal=False, cached=False)
    plain = pre_norm(attention, made.plain(True), LayerNorm(d=d_model, eps=eps))
    gated = Block(branches=tuple(replace(branch, gated=True) for branch in plain.branches))
    middle = Branch(name="tiles", norm=outer, body=tiles, normed=True)
    first = replace(gated, branches=(middle, *gated.branches))
    blocks = (*(plain,) * made.n_layers, first, *(gated,) * (n_global - 1))
    return made.whole(ImageEncoder, blocks, None, embedding=embedding, head=None)


def build(text: LanguageModel, images: dict[str, Any], *, placeholder: int) -> Model:
    """Returns the text with an image beside it, of a tower as `build_tower` takes it, and `taps` of its blocks."""
    taps: tuple[int, ...] = images.pop("taps")
    tower = build_tower(**images)
    projector = MLPProjector(widths=((1 + len(taps)) * tower.d_model, text.d_model), activation="gelu", bias=True)
    vision = TiledVision(tower=tower, projector=projector, placeholder=placeholder, taps=taps)
    return VisionLanguageModel.of(sourced(text, vision.n_made), vision)


def sourced(text: LanguageModel, n_source: int | None) -> LanguageModel:
    """Returns the text with cross-attention to as many vectors."""
    again = {id(block): _sourced(block, n_source) for block in text.blocks}
    return replace(text, blocks=tuple(again[id(block)] for block in text.blocks))


def _sourced(block: Block, n_source: int | None) -> Block:
    if not block.crosses:
        return block
    return block.replace_where(CrossAttention, n_source=n_source)


class _Crossing:
    """Which layers attend to an image, and not to the text."""

    key, into = "cross_attention_layers", "crossing"
    usual = (3, 8, 13, 18, 23, 28, 33, 38)

    def read(self, reader: ConfigReader, values: Values) -> None:
        n = values["n_layers"]
        said = reader.config[self.key] if reader.given(self.key) else [*self.usual]
        whole = isinstance(said, list) and all(is_whole(i) and 0 <= i < n for i in said)
        allowed = f"ascending numbers of layers, 0 to {n - 1}, and not all of them nor none"
        reader.require(self.key, whole and said == sorted({*said}) and 0 < len(said) < n, allowed)
        values[self.into] = tuple(said)

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: [i for i, block in enumerate(parts.model.blocks) if block.crosses]}


class _Tilings:
    """The tilings that an image may have, and how many tiles at most."""

    key, most = "supported_aspect_ratios", "max_num_tiles"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["n_tiles"] = n = reader.size(self.most, default=4, most=2**10)
        said = reader.config[self.key] if reader.given(self.key) else [[*tiling] for tiling in USUAL_TILINGS]
        pairs = isinstance(said, list) and all(isinstance(one, list) and len(one) == 2 for one in said)
        whole = pairs and all(is_whole(side) and side > 0 for one in said for side in one)
        fits = whole and len(said) > 0 and all(one[0] * one[1] <= n for one in said)
        allowed = f"pairs of rows and columns of at most {n} tiles ({self.most}), each once, [1, 1] among them"
        once = fits and len({tuple(one) for one in said}) == len(said) and [1, 1] in said
        reader.require(self.key, once, allowed)
        values["tilings"] = tuple((one[0], one[1]) for one in said)

    def write(self, parts: Parts) -> dict[str, Any]:
        found = parts.expect(parts.model.embedding, TilePatches, "vision.tower.embedding")
        return {self.key: [[*tiling] for tiling in found.tilings], self.most: found.n_tiles}


class _Taps:
    """Which blocks' output is joined with the tower's, and how wide all are together."""

    key, wide = "intermediate_layers_indices", "vision_output_dim"
    usual = (3, 7, 15, 23, 30)

    def read(self, reader: ConfigReader, values: Values) -> None:
        n = values["n_layers"]
        said = reader.config[self.key] if reader.given(self.key) else [*self.usual]
        whole = isinstance(said, list) and len(said) > 0 and all(is_whole(i) and 0 <= i < n for i in said)
        reader.require(self.key, whole, f"one or more numbers of layers, 0 to {n - 1}")
        values["taps"] = tuple(said)
        joined = values["d_model"] * (1 + len(said))
        found = reader.size(self.wide, default=7680)
        reader.require(self.wide, found == joined, f"{joined}, the output's and {len(said)} layers' numbers together")

    def write(self, parts: Parts) -> dict[str, Any]:
        vision = _vision(parts.around.whole(VisionLanguageModel), parts.family)
        return {self.key: [*vision.taps], self.wide: vision.d_seen}


def _vision(whole: VisionLanguageModel, family: str) -> TiledVision:
    if not isinstance(whole.vision, TiledVision):
        raise InputError(f"{family} needs TiledVision here", field="vision", value=repr(whole.vision))
    return whole.vision


def _global(parts: Parts) -> int:
    """Returns how many blocks there are from the one on that adds vectors of tiles."""
    return len(parts.model.blocks) - _middle(parts.model, parts.family)


def _middle(tower: Model, family: str) -> int:
    """Returns the number of the block that adds vectors of tiles; raises InputError where none does."""
    found = (i for i, block in enumerate(tower.blocks) if isinstance(block.branches[0].body, TileEmbedding))
    middle = next(found, None)
    if middle is None:
        raise InputError(f"{family} needs a block that adds vectors of tiles", field="vision.tower.blocks")
    return middle


class _Text(Text):
    """The text, which knows how many vectors an image has from the tower alone."""

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the text's own config."""
        inner = self.family.write(
            sourced(parts.whole(VisionLanguageModel).text, None), parts.carried.get(self.key, {}), None
        )
        del inner["architectures"]
        return {self.key: inner}


CROSSING = {
    "cross.norm": NORMS["attention.norm"],
    **{f"cross.body.{part}": f"cross_attn.{part}_proj" for part in "qkvo"},
    **{f"cross.body.{part}_norm": f"cross_attn.{part}_norm" for part in "qk"},
    "cross.gate": "cross_attn_attn_gate",
    "ffn.gate": "cross_attn_mlp_gate",
}
TEXT = replace(
    llama.FAMILY,
    name="mllama_text_model",
    heads=("MllamaForCausalLM",),
    keys=(  # defaults as in transformers' MllamaTextConfig
        *but(
            sizes(
                n_vocab=128256,
                d_model=4096,
                d_ff=14336,
                n_layers=40,
                n_heads=32,
                n_kv_heads=8,
                theta=500000.0,
                context=131072,
            ),
            d_head=DerivedHeadWidth(even=True),
            tied=None,
        ),
        eps("rms_norm_eps", 1e-5),
        _Crossing(),
        Only("tie_word_embeddings", False, None, reason="transformers never ties this head"),
        Only("attention_bias", False, None, reason="this family has no biases"),
        Only("mlp_bias", False, None, reason="this family has no biases"),
    ),
    build=build_text,
    names=Names(stems=NORMS | ATTENTION | GATED | CROSSING),
)
TOWER_NAMES = Names(
    stems={
        "attention.norm": "input_layernorm",
        **ATTENTION,
        "attention.gate": "gate_attn",
        "ffn.norm": "post_attention_layernorm",
        "ffn.body.up": "mlp.fc1",
        "ffn.body.down": "mlp.fc2",
        "ffn.gate": "gate_ffn",
        "tiles.norm": "tiles.layernorm_post",
        "tiles.body": "tiles.post_tile_positional_embedding.embedding",
        "tiles.body.gate": "tiles.post_tile_positional_embedding.gate",
    },
    outside={
        "embedding": "patch_embedding",
        "embedding.class_token": "class_embedding",
        "embedding.tiles": "pre_tile_positional_embedding.embedding",
        "embedding.tiles.gate": "pre_tile_positional_embedding.gate",
        "embedding.positions": "gated_positional_embedding.tile_embedding",
        "embedding.positions.positions": "gated_positional_embedding.embedding",
        "embedding.positions.gate": "gated_positional_embedding.gate",
        "embedding.norm": "layernorm_pre",
    },
    layers="transformer.layers",
)
TOWER_PREFIX = "vision_model."


def _tower_entries(tower: ImageEncoder, family: str) -> tuple[Entry, ...]:
    """Returns the tower's entries: blocks from the middle one on are the second stack, and its tiles stand outside."""
    middle, layers = _middle(tower, family), f"{TOWER_PREFIX}transformer.layers."
    second = [
        (f"{layers}{i}.", f"{TOWER_PREFIX}global_transformer.layers.{i - middle}.")
        for i in range(middle, tower.n_layers)
    ]
    entries = TOWER_NAMES.entries(tower, family, "vision.tower.", TOWER_PREFIX)
    return respelled(entries, ((f"{layers}{middle}.tiles.", TOWER_PREFIX), *second))


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, VisionLanguageModel, family)
    text = TEXT.table(whole.text)
    held = ("weight", "bias")
    projector = [entry(f"vision.projector.layers_0.{name}", f"multi_modal_projector.{name}") for name in held]
    newer = (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("vision_model.", "model.vision_model."),
    )
    return TensorTable(
        entries=(*respelled(text.entries, TEXT_NAMES), *_tower_entries(whole.vision.tower, family), *projector),
        ignored=text.ignored,
        spellings=(newer,),
    )


TOWER = (  # defaults as in transformers' MllamaVisionConfig
    *TOWER_IRRELEVANT,
    Pixels("image_size", "image_size", default=448, most=2**14, at="model.embedding.image_size"),
    Pixels("patch_size", "patch_size", default=14, most=2**14, must=SMALL, at="model.embedding.patch_size"),
    Size("num_channels", "channels", default=3, at="model.embedding.channels"),
    Size("hidden_size", "d_model", default=1280),
    depth("num_hidden_layers", 32),
    Size("num_global_layers", "n_global", default=8, most=MOST_BLOCKS, at=_global),
    Size("attention_heads", "n_heads", default=16, also=("num_attention_heads",), divides="d_model"),
    Size("intermediate_size", "d_ff", default=5120),
    eps("norm_eps", 1e-5),
    activation(default="gelu"),
    _Tilings(),
    _Taps(),
)
FAMILY = Family(
    name="mllama",
    heads=("MllamaForConditionalGeneration",),
    keys=(  # defaults as in transformers' MllamaConfig
        _Text(TEXT),
        Nested(
            key="vision_config",
            into="images",
            kind="mllama_vision_model",
            at="vision.tower",
            keys=but(
                TOWER, n_layers={"at": lambda parts: _middle(parts.model, parts.family)}, eps={"at": "first.norm.eps"}
            ),
        ),
        Size(
            "image_token_index",
            "placeholder",
            default=128256,
            also=("image_token_id",),
            least=0,
            must=(
                lambda values: values["placeholder"] < values["text"].n_rows,
                lambda values: f"a token below {values['text'].n_rows}, the rows of the embedding",
            ),
            at="vision.placeholder",
        ),
        Only("tie_word_embeddings", False, None, reason="transformers never ties this head"),
    ),
    build=build,
    names=_names,
)
