"""What the families akin to llama share: its config keys, rotary grouped-query attention, and its names on disk.

A family states its class defaults and which parts its blocks are made of; dimensions are read, built with and written
here. Windows are told by `layer_types`, or by the older keys that stand for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from asbuilt.errors import InputError
from asbuilt.families.shared.common import ACTIVATION_NAMES, MOST_LAYERS, divide, named_entries, read_layer_types
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import read_rotary, write_rotary
from asbuilt.families.shared.table import Table, entry
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    FeedForward,
    GatedMLP,
    Head,
    Mixer,
    MixtureOfExperts,
    Model,
    Norm,
    Parallel,
    Part,
    RMSNorm,
    Rotary,
    TiedHead,
    TokenEmbedding,
)

WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_pytorch_tanh"}
NO_BUFFERS = {r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"}

ATTENTION_STEMS = {f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkvo"}
GATED_STEMS = {f"ffn.body.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")}
NORM_STEMS = {"attention.norm": "input_layernorm", "ffn.norm": "post_attention_layernorm"}
QK_NORM_STEMS = {f"attention.body.{part}_norm": f"self_attn.{part}_norm" for part in "qk"}
STEMS = NORM_STEMS | ATTENTION_STEMS | GATED_STEMS

F = TypeVar("F", MLP, GatedMLP, MixtureOfExperts)


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """What all of these families are told by; d_head None means that heads turn as a whole, rotary.d_rotary wide."""

    n_vocab: int
    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_ff: int
    max_positions: int
    rotary: Rotary
    activation: Activation = "silu"
    tied: bool = False
    d_head: int | None = None
    name: str = "model"

    @property
    def head_width(self) -> int:
        """Numbers of one head."""
        return self.d_head or self.rotary.d_rotary

    @property
    def d_query(self) -> int:
        """Numbers of all heads' queries together."""
        return self.n_heads * self.head_width

    def attention(
        self,
        *,
        turned: bool = True,
        bias: bool = False,
        output_bias: bool = False,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
        window: int | None = None,
        scale: float | None = None,
    ) -> Attention:
        """Returns attention whose heads are `turned`, or have no positions; scores times `scale`, None the usual."""
        return Attention(
            d_model=self.d_model,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            d_head=self.head_width,
            positions=self.rotary if turned else None,
            bias=bias,
            output_bias=output_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            window=window,
            scale=None if scale == self.head_width**-0.5 else scale,
        )

    def whole_normed_attention(self, bias: bool, eps: float) -> Attention:
        """Returns attention with an RMSNorm over all heads' queries together, and one over all keys."""
        widths = (self.d_query, self.n_kv_heads * self.head_width)
        q_norm, k_norm = (RMSNorm(d=width, eps=eps) for width in widths)
        return self.attention(bias=bias, output_bias=bias, q_norm=q_norm, k_norm=k_norm)

    def gated(self, bias: bool = False) -> GatedMLP:
        """Returns the gated feed-forward part."""
        return GatedMLP(d_model=self.d_model, d_ff=self.d_ff, activation=self.activation, bias=bias)

    def plain(self, bias: bool = False) -> MLP:
        """Returns the feed-forward part of two matrices."""
        return MLP(d_model=self.d_model, d_ff=self.d_ff, activation=self.activation, bias=bias)

    def model(
        self, blocks: tuple[Block, ...], norm: Norm, *, embedding_scale: float = 1.0, logit_scale: float = 1.0
    ) -> Model:
        """Returns the model of these blocks, with `norm` before the head; what is looked up, and logits, are scaled."""
        return Model(
            embedding=TokenEmbedding(n_vocab=self.n_vocab, d_model=self.d_model, scale=embedding_scale),
            blocks=blocks,
            head=(TiedHead if self.tied else Head)(d_model=self.d_model, n_vocab=self.n_vocab, scale=logit_scale),
            max_positions=self.max_positions,
            norm=norm,
            name=self.name,
        )


def pre_norm(attention: Mixer, ffn: FeedForward, norm: Norm, scale: float = 1.0) -> Block:
    """Returns the block x + scale * attention(norm(x)), then the same of the feed-forward part."""
    bodies: dict[str, Mixer | FeedForward] = {"attention": attention, "ffn": ffn}
    return Block(branches=tuple(Branch(name=name, body=bodies[name], norm=norm, scale=scale) for name in bodies))


def side_by_side(attention: Attention, ffn: FeedForward, norm: Norm) -> Block:
    """Returns the block x + attention(norm(x)) + ffn(norm(x)), its one branch named `parallel`."""
    return Block(branches=(Branch(name="parallel", body=Parallel(attention=attention, ffn=ffn), norm=norm),))


def read_dimensions(reader: ConfigReader, defaults: Mapping[str, Any]) -> Dimensions:
    """Returns the dimensions of a config; `defaults` are the class's, by key, `rope_theta` only where it is not 10000.

    A default of None for `num_key_value_heads` means as many as heads, and for `head_dim` (or none at all)
    hidden_size / num_attention_heads; with one for `partial_rotary_factor` only that part of a head turns. Raises
    InputError naming the key at fault.
    """
    d_model = reader.size("hidden_size", default=defaults["hidden_size"])
    n_heads = reader.size("num_attention_heads", default=defaults["num_attention_heads"])
    d_head = head_width(reader, d_model, n_heads, defaults.get("head_dim"))
    context = reader.size("max_position_embeddings", default=defaults["max_position_embeddings"])
    rotary = read_rotary(
        reader,
        d_head,
        context,
        default_theta=defaults.get("rope_theta", 10000.0),
        partial=defaults.get("partial_rotary_factor"),
    )
    usual = defaults["num_key_value_heads"]
    kv_heads = reader.size("num_key_value_heads", default=usual or n_heads, null=n_heads, derived=usual is None)
    divide(reader, n_heads, "num_attention_heads", kv_heads, "num_key_value_heads")
    return Dimensions(
        n_vocab=reader.size("vocab_size", default=defaults["vocab_size"]),
        d_model=d_model,
        n_layers=reader.size("num_hidden_layers", default=defaults["num_hidden_layers"], most=MOST_LAYERS),
        n_heads=n_heads,
        n_kv_heads=kv_heads,
        d_ff=reader.size("intermediate_size", default=defaults["intermediate_size"]),
        max_positions=context,
        rotary=rotary,
        activation=reader.choice("hidden_act", choices=ACTIVATION_NAMES, default=defaults["hidden_act"]),
        tied=reader.flag("tie_word_embeddings", default=defaults["tie_word_embeddings"]),
        d_head=d_head,
        name=reader.where,
    )


def head_width(reader: ConfigReader, d_model: int, n_heads: int, default: int | None = None) -> int:
    """Returns d_head, even because pairs of numbers turn.

    Missing means `default`; where that is None, missing and null mean hidden_size / num_attention_heads.
    """
    if default is not None or reader.given("head_dim"):
        d_head = reader.size("head_dim", default=default or d_model)
        reader.require("head_dim", d_head % 2 == 0, "an even number: rotary positions turn pairs")
        return d_head
    d_head = divide(reader, d_model, "hidden_size", n_heads, "num_attention_heads")
    if d_head % 2:
        raise reader.error(
            "head_dim",
            "missing, and hidden_size / num_attention_heads is odd",
            value=d_head,
            allowed="an even number: rotary positions turn pairs",
        )
    return d_head


def first_parts(spec: Model, family: str, ffn_kind: type[F]) -> tuple[Attention, F]:
    """Returns attention and feed-forward part of the first block; raises InputError where the spec has others."""
    named = {branch.name: branch for branch in spec.blocks[0].branches}
    if list(named) != ["attention", "ffn"]:
        raise InputError(f"{family} has two branches", field="blocks.0", value=list(named), allowed="attention, ffn")
    bodies = {f"{name}.body": branch.body for name, branch in named.items()}
    return _expected(bodies, family, ffn_kind)


def first_parallel_parts(spec: Model, family: str, ffn_kind: type[F]) -> tuple[Attention, F]:
    """Returns the same of a block whose two parts stand side by side."""
    names = [branch.name for branch in spec.blocks[0].branches]
    if names != ["parallel"]:
        raise InputError(f"{family} has one branch", field="blocks.0", value=names, allowed="parallel")
    body = spec.blocks[0].branches[0].body
    if not isinstance(body, Parallel):
        raise wrong_part(family, "blocks.0.parallel.body", body, Parallel)
    bodies: dict[str, Part] = {"parallel.body.attention": body.attention, "parallel.body.ffn": body.ffn}
    return _expected(bodies, family, ffn_kind)


def _expected(bodies: Mapping[str, Part], family: str, ffn_kind: type[F]) -> tuple[Attention, F]:
    """Returns the two parts by path in the first block, attention first; raises InputError where one is another."""
    (path, attention), (ffn_path, ffn) = bodies.items()
    if not isinstance(attention, Attention):
        raise wrong_part(family, f"blocks.0.{path}", attention, Attention)
    if not isinstance(ffn, ffn_kind):
        raise wrong_part(family, f"blocks.0.{ffn_path}", ffn, ffn_kind)
    return attention, ffn


def wrong_part(family: str, path: str, value: Part | None, kind: type[Part]) -> InputError:
    """Returns the InputError that says which kind of part the family has at `path`."""
    return InputError(f"{family} has {kind.__name__} here", field=path, value=repr(value))


def final_norm(spec: Model, family: str, kind: type[Norm]) -> Norm:
    """Returns the norm before the head, whose epsilon is the whole model's; raises InputError for another kind."""
    if not isinstance(spec.norm, kind):
        raise wrong_part(family, "norm", spec.norm, kind)
    return spec.norm


def attentions(spec: Model) -> list[Attention]:
    """Returns the attention of every block's first branch, where it is one or stands beside another part."""
    bodies = [block.branches[0].body for block in spec.blocks]
    found = [body.attention if isinstance(body, Parallel) else body for body in bodies]
    return [body for body in found if isinstance(body, Attention)]


def write_dimensions(spec: Model, family: str, head: str, ffn: FeedForward) -> dict[str, Any]:
    """Returns the keys that `read_dimensions` reads, of the first layer; where none turns, any rotary will do."""
    layers = attentions(spec)
    if not layers:
        raise wrong_part(family, "blocks.0", spec.blocks[0], Attention)
    attention, turned = layers[0], (layer.positions for layer in layers)
    usual = Rotary(d_rotary=attention.d_head)
    rotary = next((positions for positions in turned if isinstance(positions, Rotary)), usual)
    return {
        "architectures": [head],
        "model_type": family,
        "vocab_size": spec.n_vocab,
        "hidden_size": spec.d_model,
        "intermediate_size": ffn.d_ff,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads,
        "head_dim": attention.d_head,
        "hidden_act": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": isinstance(spec.head, TiedHead),
        **write_rotary(rotary, spec.max_positions),
    }


def table(spec: Model, stems: dict[str, str], family: str, elsewhere: tuple[str, ...] = ()) -> Table:
    """Returns the names of a checkpoint folder's tensors, those within blocks by `stems`, all stored as built.

    Stems in `elsewhere` have entries of their own.
    """
    tied = isinstance(spec.head, TiedHead)
    entries = [entry("embedding.weight", "model.embed_tokens.weight")]
    if spec.norm is not None:
        entries += [entry(f"norm.{name}", f"model.norm.{name}") for name in spec.norm.holds()]
    if not tied:
        entries.append(entry("head.weight", "lm_head.weight"))
    for i, block in enumerate(spec.blocks):
        entries += named_entries(block, f"blocks.{i}.", stems, f"model.layers.{i}.", {}, family, elsewhere)
    duplicates = {"lm_head.weight": "embedding.weight"} if tied else {}
    return Table(entries=tuple(entries), ignored=NO_BUFFERS, duplicates=duplicates)


def read_chunked(reader: ConfigReader) -> None:
    """Reads `dual_chunk_attention_config`, which Qwen's million-token models carry for engines that can do it.

    transformers does not read it, and attends as usual. Parameters, FLOPs of all scores and cache are the same. An et
    al. 2024 (arXiv 2402.17463): within chunk_size - local_size tokens the two are one and the same.
    """
    key = "dual_chunk_attention_config"
    inner = reader.nested(key)
    if inner is None:
        reader.known.add(key)
        return
    chunk, local = inner.size("chunk_size"), inner.size("local_size")
    inner.require("local_size", local < chunk, f"less than chunk_size = {chunk}")
    inner.irrelevant("original_max_position_embeddings", "told by the chunks")
    for name in (
        "sparse_attention_config",
        "sparse_attention_enabled",
        "sparse_attention_threshold",
        "sparse_attention_last_q",
    ):
        inner.irrelevant(name, "which scores an engine leaves out")
    inner.finish()
    note = f"attention is whole, as in transformers: engines that chunk it differ beyond {chunk - local} tokens"
    reader.note(key, "transformers does not read it", note)


def read_window(reader: ConfigReader, default: int | None) -> int | None:
    """Returns `sliding_window`, `default` where it is missing; null means none."""
    if reader.given("sliding_window"):
        return reader.size("sliding_window")
    return None if "sliding_window" in reader.config else default


def layer_windows(reader: ConfigReader, window: int | None, usual: list[bool]) -> tuple[int | None, ...]:
    """Returns each layer's window, where `use_sliding_window` may switch them all off.

    `usual` tells the layers that have one unless `layer_types` says otherwise. Keys are carried too, so that what a
    config without windows says about them is written again. Raises InputError for a sliding layer without a window.
    """
    used = reader.flag("use_sliding_window", default=False)
    for key in ("use_sliding_window", "sliding_window"):
        reader.irrelevant(key, "told by layer_types as it is written")
    size = window if used else None
    types = ("sliding_attention" if size is not None and slides else "full_attention" for slides in usual)
    sliding = [kind == "sliding_attention" for kind in read_layer_types(reader, tuple(types))]
    if any(sliding) and size is None:
        raise reader.error("layer_types", "sliding_attention needs use_sliding_window and a sliding_window")
    return tuple(size if slides else None for slides in sliding)


def write_windows(spec: Model, carried: dict[str, Any]) -> dict[str, Any]:
    """Returns the keys that `layer_windows` reads; where no layer has a window, those that were carried."""
    windows = [layer.window for layer in attentions(spec)]
    window = next((w for w in windows if w is not None), None)
    unused = {key: carried[key] for key in ("use_sliding_window", "sliding_window") if key in carried}
    types = ["full_attention" if w is None else "sliding_attention" for w in windows]
    written = {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": types}
    return written | (unused if window is None else {})
