"""What families with images of any size share: multi-axis RoPE, the tower's keys and parts, names on disk.

Wang et al. 2024, Qwen2-VL (arXiv 2409.12191); Bai et al. 2025, Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL
(arXiv 2511.21631). Norms of towers and mergers have an epsilon of 1e-6 in the published code, which no key says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import ceil, lcm
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.dimensions import pre_norm, sized
from asbuilt.families.shared.key import Check, Irrelevant, Only, Size, Values, activation, depth
from asbuilt.families.shared.multimodal import placeholder
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import TIED, ConfigReader
from asbuilt.families.shared.rotary import KINDS, Kinds, Rope
from asbuilt.families.shared.table import Entry, TensorTable, entry, respelled
from asbuilt.spec import (
    Attention,
    GridPatches,
    GridPositions,
    GridVision,
    ImageEncoder,
    LanguageModel,
    LayerNorm,
    MLPProjector,
    Model,
    Norm,
    Part,
    Plane,
    Rotary,
    Scaling,
    Sections,
    VisionLanguageModel,
    Windowed,
    stored_weights,
)

EPS = 1e-6
# Images whose costs are declared have at least this many patches per side.
USUAL_SIDE = 32
SECTIONS, INTERLEAVED = "mrope_section", "mrope_interleaved"


def _known(kind: Callable[..., Scaling | None]) -> Callable[..., Scaling | None]:
    def read(inner: ConfigReader, *sizes: int) -> Scaling | None:
        inner.known.update((SECTIONS, INTERLEAVED))
        return kind(inner, *sizes)

    return read


# `mrope` is the older name of unscaled frequencies; scalings by a text's length have no meaning beside images.
MROPE: Kinds = {name: _known(kind) for name, kind in KINDS.items() if name in ("default", "linear", "yarn", "llama3")}
MROPE |= {"mrope": MROPE["default"]}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class MultiAxisRope(Rope):
    """The keys of RoPE whose pairs belong to time, rows and columns, `sections` by default."""

    sections: tuple[int, int, int] = (16, 24, 24)
    interleaved: bool = False
    kinds: Kinds | None = field(default_factory=lambda: MROPE)

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the keys; raises InputError for sections that are not all pairs."""
        super().read(reader, values)
        rotary, inner = values["rotary"], reader.nested("rope_parameters", "rope_scaling")
        said = list(self.sections) if inner is None else inner.config.get(SECTIONS, list(self.sections))
        place = reader if inner is None else inner
        n = rotary.d_rotary // 2
        ok = isinstance(said, list) and len(said) == 3 and all(type(x) is int and 0 <= x <= n for x in said)
        if not ok or sum(said) != n:
            raise place.error(SECTIONS, value=said, allowed=f"three whole numbers whose sum is {n}, half of a head")
        place.only(INTERLEAVED, self.interleaved, reason="this family's code has this order, whatever a config says")
        last = max(3 * said[1] - 2, 3 * said[2] - 1)
        if self.interleaved and last >= n:
            raise place.error(SECTIONS, value=said, allowed="sections of rows and columns that end within all pairs")
        values["rotary"] = replace(
            rotary, axes=Sections(pairs=(said[0], said[1], said[2]), interleaved=self.interleaved)
        )

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys, in the older spelling."""
        written, axes = super().write(parts), self.at(parts).axes
        sections = parts.expect(axes, Sections, "blocks.0.attention.body.positions.axes")
        inner = {"rope_type": "default", **(written["rope_scaling"] or {}), SECTIONS: [*sections.pairs]}
        return written | {"rope_scaling": inner | ({INTERLEAVED: True} if sections.interleaved else {})}


class TowerRope:
    """The RoPE base of a tower, whose pairs are rotated by rows and columns."""

    key, usual = "rope_parameters", 10000.0

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the base."""
        d_head = values["d_model"] // values["n_heads"]
        allowed = "such that heads are a multiple of 4 wide (RoPE by row and column)"
        reader.require(reader.names["n_heads"], d_head % 4 == 0, allowed)
        inner = reader.nested(self.key)
        values["theta"] = self.usual
        if inner is not None:
            inner.only("rope_type", "axial", reason="a tower's RoPE is by row and column")
            values["theta"] = inner.number("rope_theta", default=self.usual, above=1.0)
            inner.finish()

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the object."""
        path = "" if parts.around is parts else "vision.tower."
        rotary = parts.expect(_attention(parts).positions, Rotary, f"{path}blocks.0.attention.body.positions")
        return {self.key: {"rope_type": "axial", "rope_theta": float(rotary.theta)}}


def tower_keys(
    *, d_model: int, d_ff: int | None, act: str, patch_size: int, n_layers: int, width: str = "hidden_size"
) -> tuple[Any, ...]:
    """Returns the keys of a tower with these class defaults; no `d_ff` is a multiple of the width, `mlp_ratio`."""
    wide = Size("intermediate_size", "d_ff", default=d_ff) if d_ff is not None else _Ratio()
    return (
        Size(width, "d_model", default=d_model),
        Size("num_heads", "n_heads", default=16, divides="d_model", at=lambda parts: _attention(parts).n_heads),
        depth("depth", n_layers),
        wide,
        activation(default=act),
        Size("in_channels", "channels", default=3, at="model.embedding.channels"),
        Only("in_chans", lambda values: values["channels"], reason="in_channels says it"),
        Size("patch_size", "patch_size", default=patch_size, most=2**10, at="model.embedding.patch_size"),
        Only("spatial_patch_size", lambda values: values["patch_size"], reason="patch_size says it"),
        Size("temporal_patch_size", "frames", default=2, most=2**10, at="model.embedding.frames"),
        Size("spatial_merge_size", "merge", default=2, most=2**10, at=lambda parts: _vision(parts).projector.merge),
        TowerRope(),
    )


class _Ratio:
    """The width of the feed-forward, as a multiple of the stream's."""

    key = "mlp_ratio"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["d_ff"] = values["d_model"] * reader.size(self.key, default=4, most=2**10)

    def write(self, parts: Parts) -> dict[str, Any]:
        return {self.key: parts.d_ff // parts.d_model}


class OutWidth(Size):
    """The width of the projector's output, which is the text's."""

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the width."""
        return {self.key: _vision(parts).projector.d_out}


def _attention(parts: Parts) -> Attention:
    body = parts.mixer
    inner = body.attention if isinstance(body, Windowed) else body
    return parts.expect(inner, Attention, "vision.tower.blocks.0.attention.body")


def _vision(parts: Parts) -> GridVision:
    return parts.around.expect(parts.around.whole(VisionLanguageModel).vision, GridVision, "vision")


def build(
    text: LanguageModel,
    images: Mapping[str, Any],
    *,
    placeholder: int,
    norm: type[Norm] = LayerNorm,
    gated: bool = False,
    patch_bias: bool = False,
    side: int | None = None,
    window: int | None = None,
    whole: Collection[int] = (),
    taps: tuple[int, ...] = (),
) -> Model:
    """Returns the text with images of any size in it, of a tower of the sizes `images`.

    Positions are `side` x `side` learned ones; with a `window` blocks attend within squares of as many patches per
    side, but those in `whole`. `taps` are blocks of the tower whose output is added after the text's first ones.
    """
    sizes = {"d_model", "n_heads", "n_layers", "d_ff", "activation"}
    made = sized({name: images[name] for name in sizes}, n_vocab=0, max_positions=1)
    d_model, merge = made.d_model, images["merge"]
    unit = lcm(merge, window or 1)
    embedding = GridPatches(
        image_size=ceil(USUAL_SIDE / unit) * unit * images["patch_size"],
        patch_size=images["patch_size"],
        channels=images["channels"],
        frames=images["frames"],
        d_model=d_model,
        bias=patch_bias,
    )
    rotary = Rotary(d_rotary=made.head_width, theta=images["theta"], axes=Plane())
    attention = made.attention(causal=False, cached=False, bias=True, output_bias=True, positions=rotary)
    ffn, normed = made.gated(True) if gated else made.plain(True), norm(d=d_model, eps=EPS)
    everywhere = pre_norm(attention, ffn, normed)
    within = everywhere
    if window is not None:
        within = pre_norm(Windowed(d_model=d_model, attention=attention, side=window), ffn, normed)
    tower = ImageEncoder(
        name="tower",
        embedding=embedding,
        positions=None if side is None else GridPositions(n_side=side, d_model=d_model),
        blocks=tuple(everywhere if i in whole else within for i in range(made.n_layers)),
        max_positions=embedding.n_tokens,
    )
    wide = d_model * merge**2
    projector = MLPProjector(
        widths=(wide, wide, text.d_model), activation="gelu", bias=True, merge=merge, norm=norm(d=d_model, eps=EPS)
    )
    merger = replace(projector, norm=norm(d=wide, eps=EPS))
    vision = GridVision(
        tower=tower, projector=projector, placeholder=placeholder, taps=taps, mergers=(merger,) * len(taps)
    )
    return VisionLanguageModel.of(text, vision)


# Keys around text and tower that only processors and videos need.
AROUND = Irrelevant(
    "tokens that the processor puts around images, or that stand for videos",
    *("vision_start_token_id", "vision_end_token_id", "vision_token_id", "video_token_id"),
)
SAME_WIDTH = Check(
    "vision_config",
    (
        lambda values: values["images"].pop("d_out") == values["text"].d_model,
        lambda values: f"one whose output is as wide as the text, {values['text'].d_model}",
    ),
)


def image_token(default: int) -> Size:
    """Returns the key of the token that images replace, in the spelling of these families."""
    return replace(placeholder(default), key="image_token_id", also=("image_token_index",))


# Keys beside a flat text that are not the text's.
_OUTER = """
    architectures model_type vision_config image_token_id image_token_index video_token_id vision_start_token_id
    vision_end_token_id vision_token_id tie_word_embeddings dtype torch_dtype transformers_version quantization_config
    _name_or_path auto_map
"""


def nested_text(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns a config whose text is nested, as newer ones are: the first stated its keys beside the tower's."""
    outer = {*_OUTER.split()}
    if config.get("text_config") is None:
        inner = {key: value for key, value in config.items() if key not in outer and key != "text_config"}
        config = {key: value for key, value in config.items() if key in outer} | {"text_config": inner}
    return same_tie(config)


def same_tie(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a config that says in both places whether embeddings are tied, where one of them says it."""
    inner = config.get("text_config")
    if not isinstance(inner, dict) or (TIED in config) == (TIED in inner):
        return config
    said = {TIED: config[TIED] if TIED in config else inner[TIED]}
    return config | said | {"text_config": inner | said}


def fix_kind(config: dict[str, Any], *kinds: str) -> dict[str, Any]:
    """Returns the config with the tower's own `model_type`: the first release's tower had that of the whole."""
    tower = config.get("vision_config")
    if isinstance(tower, dict) and tower.get("model_type") in kinds[1:]:
        return config | {"vision_config": tower | {"model_type": kinds[0]}}
    return config


# From the tower's paths to names, and those of a merger; a window's attention has the names of attention.
STEMS = {
    "attention.norm": "norm1",
    "attention.body.o": "attn.proj",
    "ffn.norm": "norm2",
    **{f"ffn.body.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}
OUTSIDE = {"embedding": "patch_embed.proj", "positions": "pos_embed"}


def table(
    spec: VisionLanguageModel,
    text: TensorTable,
    family: str,
    *,
    merger: Mapping[str, str],
    mlp: Mapping[str, str] | None = None,
    beginnings: tuple[tuple[str, str], ...] = (),
    spellings: tuple[tuple[tuple[str, str], ...], ...] = (),
    prefix: str = "model.visual.",
) -> TensorTable:
    """Returns the table of a text's, a tower and its projectors, whose parts are called as in `merger`."""
    vision = spec.vision
    tower = vision.tower.replace_where(Windowed, _unwindowed) if _windowed(vision.tower) else vision.tower
    names = Names(
        stems=STEMS | dict(mlp or {}), outside=OUTSIDE, layers="blocks", fused={"attn.qkv": Fused.qkv()}, ignored={}
    )
    entries = names.entries(tower, family, "vision.tower.", prefix)
    projectors = [("vision.projector", f"{prefix}merger")]
    for i in range(len(getattr(vision, "mergers", ()))):
        projectors.append((f"vision.mergers.{i}", f"{prefix}deepstack_merger_list.{i}"))
    for path, stem in projectors:
        entries += projector_entries(spec, path, merger, stem, family)
    entries = [replace(one, paths=tuple(_path(path, vision.tower) for path in one.paths)) for one in entries]
    return TensorTable(
        entries=(*respelled(text.entries, beginnings), *entries),
        ignored=text.ignored,
        duplicates=text.duplicates,
        spellings=spellings,
    )


def projector_entries(spec: Model, path: str, names: Mapping[str, str], stem: str, family: str) -> list[Entry]:
    """Returns the entries of the projector at a path, whose parts are called as in `names`, below `stem`."""
    entries = []
    for name, _, _ in stored_weights(spec.at(path)):
        part, _, kind = name.rpartition(".")
        if part not in names:
            raise InputError(f"{family} files have no name for this weight", field=f"{path}.{name}")
        entries.append(entry(f"{path}.{name}", f"{stem}.{names[part]}.{kind}"))
    return entries


def _unwindowed(part: Part) -> Part:
    assert isinstance(part, Windowed)
    return part.attention


def _windowed(tower: ImageEncoder) -> bool:
    return any(isinstance(part, Windowed) for part in tower.mixers)


def _path(path: str, tower: ImageEncoder) -> str:
    """Returns the path of attention in a tower whose windows are parts of their own."""
    begin, between, end = path.partition(".attention.body.")
    if not between:
        return path
    body = tower.blocks[int(begin.rpartition(".")[2])].branches[0].body
    return f"{begin}{between}attention.{end}" if isinstance(body, Windowed) else path
