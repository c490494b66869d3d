"""The zamba2 family: Mamba-2 in every layer, and before some of them a transformer whose weights several layers share.

Zyphra 2024 (arXiv 2411.15242). The shared transformers, used in turns, read the stream and the embedding, and their
result is added to what Mamba-2 reads. Each use has a map and low-rank maps of its own. Embedding and head are tied.

transformers' class limits steps to `time_step_min` and above, when it reads a prompt and not when it decodes; this
limits none.

The first published configs, of Zyphra's own branch of transformers 4.43, spell many keys otherwise (`state_size`,
`lora_rank`); they are read, and written as transformers spells them. Weights stored beside them have other names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared import state_space
from asbuilt.families.shared.dimensions import sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import first
from asbuilt.families.shared.key import Flag, Irrelevant, Only, Size, Values, but, eps
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import divide, four_times, sizes
from asbuilt.families.shared.table import Concat, Entry, TensorTable, entry
from asbuilt.spec import (
    Block,
    Branch,
    LanguageModel,
    Mamba2,
    Model,
    RMSNorm,
    Rotary,
    SharedTransformer,
    SideTransformer,
)

GATED_EPS = 1e-5  # of the norm inside Mamba-2, which no key says


def build(
    *,
    attends: tuple[bool, ...],
    n_shared: int,
    rank: int,
    adapts_attention: bool,
    rotary: Rotary | None,
    bias: bool,
    eps: float,
    ssm_heads: int,
    ssm_head: int,
    d_state: int,
    n_groups: int,
    kernel: int,
    **sizes: Any,  # noqa: ANN401
) -> LanguageModel:
    """Returns the model of these sizes; `attends` says which layers have one of the `n_shared` transformers.

    Low-rank maps of `rank` stand beside the feed-forward of each use, and beside q, k and v if it `adapts_attention`.
    """
    made = sized(sizes, rotary=rotary)
    norm, wide = RMSNorm(d=made.d_model, eps=eps), 2 * made.d_model
    mamba: dict[str, Any] = {"n_heads": ssm_heads, "d_head": ssm_head, "d_state": d_state, "n_groups": n_groups}
    mixer = state_space.mamba2(
        made.d_model, **mamba, kernel=kernel, conv_bias=True, bias=bias, output_bias=bias, eps=GATED_EPS
    )
    transformer = SharedTransformer(
        norm=RMSNorm(d=wide, eps=eps),
        attention=made.attention(d_input=wide, scale=(made.head_width / 2) ** -0.5),
        ffn_norm=norm,
        ffn=made.gated(bias),
    )
    plain, uses = Branch(name="mixer", body=mixer, norm=norm), sum(attends)
    ranks = {"rank": rank, "attention_rank": rank if adapts_attention else None}
    blocks, use = [], 0
    for attend in attends:
        side = SideTransformer(shared=_shared(transformer, use, uses, n_shared), **ranks) if attend else None
        blocks.append(Block(branches=(replace(plain, side=side),)))
        use += attend
    return made.model(tuple(blocks), norm)


def _shared(transformer: SharedTransformer, use: int, uses: int, n_shared: int) -> SharedTransformer:
    """Returns the transformer as the use of this number has it: that of the use `n_shared` before, if there is one."""
    name = f"memory_{use % n_shared}"
    if use >= n_shared:
        return replace(transformer, weights_from=name)
    return replace(transformer, weights_name=name if use + n_shared < uses else None)


def _sides(spec: Model) -> list[tuple[int, SideTransformer]]:
    """Returns the layers that have a transformer, and those."""
    found = ((i, branch.side) for i, block in enumerate(spec.blocks) for branch in block.branches)
    return [(i, side) for i, side in found if side is not None]


class _Layers:
    """`layers_block_type`: `hybrid` for layers that have a shared transformer, `g` at first; others changed their name.

    A model without such layers has no use for the keys of transformers.
    """

    key, count = "layers_block_type", "num_hidden_layers"
    words: Mapping[str, bool] = MappingProxyType(
        {"hybrid": True, "mamba": False, "linear_attention": False, "g": True, "m": False}
    )
    usual = "m" + 7 * "mmmmmh" + "mmmmh" + "mmmh" + "mm"

    def read(self, reader: ConfigReader, values: Values) -> None:
        usual = ["hybrid" if letter == "h" else "mamba" for letter in self.usual]
        name = reader.spelled(self.key, "layer_types") or self.key
        said = reader.config[name] if reader.given(name) else usual
        n_layers = reader.size(self.count, default=len(usual))
        ok = isinstance(said, list) and len(said) == n_layers and all(str(word) in self.words for word in said)
        reader.require(name, ok, f"a list of {n_layers} words, each hybrid or mamba")
        values["attends"], values["n_layers"] = tuple(self.words[word] for word in said), n_layers
        reader.require(name, any(values["attends"]), "a list with a hybrid layer")

    def write(self, parts: Parts) -> dict[str, Any]:
        attends = {i for i, _ in _sides(parts.model)}
        words = ["hybrid" if i in attends else "mamba" for i in range(parts.n_layers)]
        return {self.key: words, self.count: parts.n_layers}


class _Shared:
    """`num_mem_blocks`: how many transformers there are, which layers use in turns."""

    key = "num_mem_blocks"

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.irrelevant(self.key, "carried, since more than there are uses are as many")
        values["n_shared"] = reader.size(self.key, default=1)

    def write(self, parts: Parts) -> dict[str, Any]:
        sides = [side for _, side in _sides(parts.model)]
        own, said = sum(side.shared.weights_from is None for side in sides), parts.carried.get(self.key)
        return {} if said is not None and min(said, len(sides)) == own else {self.key: own}


class _Width:
    """Mamba-2's heads, together `mamba_expand` times as wide as the stream; at first their width was said."""

    keys = heads, expand = "n_mamba_heads", "mamba_expand"
    first, width = "expansion_factor", "mamba_headdim"

    def read(self, reader: ConfigReader, values: Values) -> None:
        whole = reader.size(self.expand, self.first, default=2) * values["d_model"]
        expand = reader.spelled(self.expand, self.first) or self.expand
        if reader.given(self.first) and reader.given(self.width) and not reader.given(self.heads):
            values["ssm_head"] = reader.size(self.width)
            values["ssm_heads"] = divide(reader, whole, f"{expand} * hidden_size", values["ssm_head"], self.width)
            reader.names["ssm_heads"] = self.width
            return
        values["ssm_heads"] = reader.size(self.heads, default=8)
        values["ssm_head"] = divide(reader, whole, f"{expand} * hidden_size", values["ssm_heads"], self.heads)
        reader.names["ssm_heads"] = self.heads

    def write(self, parts: Parts) -> dict[str, Any]:
        part = first(Mamba2)(parts)
        return {self.heads: part.n_heads, self.expand: part.d_inner // parts.d_model}


class _HeadWidth:
    """Heads of attention are together twice as wide as the stream, which no key says."""

    into = "d_head"

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["d_head"] = divide(
            reader, 2 * values["d_model"], "2 * hidden_size", values["n_heads"], reader.names["n_heads"]
        )
        for key in ("head_dim", "attention_head_dim"):
            reader.only(key, values["d_head"], None, reason="heads are together twice as wide as the stream")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {}


class _Derived:
    """What transformers computes from other keys, and takes from a config that says otherwise; they must agree."""

    of_values: Mapping[str, Callable[[Values], Any]] = MappingProxyType(
        {
            "attention_hidden_size": lambda values: 2 * values["d_model"],
            "hybrid_layer_ids": lambda values: [i for i, attends in enumerate(values["attends"]) if attends],
            "mamba_headdim": lambda values: values["ssm_head"],
        }
    )
    keys = tuple(of_values)

    def read(self, reader: ConfigReader, values: Values) -> None:
        for key, value in self.of_values.items():
            reader.only(key, value(values), reason="other keys say it")

    def write(self, parts: Parts) -> dict[str, Any]:
        attends = {i for i, _ in _sides(parts.model)}
        values: Values = {"d_model": parts.d_model, "ssm_head": first(Mamba2, "d_head")(parts)}
        values["attends"] = [i in attends for i in range(parts.n_layers)]
        return {key: value(values) for key, value in self.of_values.items() if key in parts.carried}


class _Positions:
    """`use_mem_rope`: whether attention has RoPE on whole heads."""

    key, rope = "use_mem_rope", Rope()
    keys = (key, "rope_theta", "rope_scaling", "rope_parameters")

    def read(self, reader: ConfigReader, values: Values) -> None:
        values["rotary"] = None
        if reader.flag(self.key, default=False):
            reader.require(self.key, values["d_head"] % 2 == 0, "false for heads of an odd width")
            self.rope.read(reader, values)
            return
        for key in self.keys[1:]:
            reader.unused(key, "attention has no positions")

    def write(self, parts: Parts) -> dict[str, Any]:
        positions = _transformer(parts).attention.positions
        if not isinstance(positions, Rotary):
            return {self.key: False}
        return self.rope.write(_Turned(parts.model, parts.family, parts.carried, positions)) | {self.key: True}


class _Turned(Parts):
    """Parts whose RoPE is this one."""

    def __init__(self, model: Model, family: str, carried: Any, rotary: Rotary) -> None:  # noqa: ANN401
        super().__init__(model, family, carried)
        self._rotary = rotary

    @property
    def rotary(self) -> Rotary:
        return self._rotary


def _side(parts: Parts) -> SideTransformer:
    """Returns the first layer's that has one; raises InputError where none has."""
    sides = _sides(parts.model)
    if not sides:
        raise InputError(f"{parts.family} needs a transformer beside some layer", field="blocks")
    return sides[0][1]


def _transformer(parts: Parts) -> SharedTransformer:
    return _side(parts).shared


def _of(field: str) -> Any:  # noqa: ANN401
    """Returns what finds a field of the transformers, or of what stands beside them."""

    def found(parts: Parts) -> Any:  # noqa: ANN401
        part: Any = _side(parts)
        for name in field.split("."):
            part = getattr(part, name)
        return part

    return found


MIXER, SHARED = "mamba", "shared_transformer"
STEMS = {"mixer.norm": "input_layernorm", **state_space.stems("mixer", MIXER)}
AT = "mixer.side.shared"
HYBRID = {
    **{path: f"mamba_decoder.{name}" for path, name in STEMS.items()},
    "mixer.side.project": "linear",
    f"{AT}.norm": f"{SHARED}.input_layernorm",
    **{f"{AT}.attention.{part}": f"{SHARED}.self_attn.{part}_proj" for part in "qkvo"},
    f"{AT}.ffn_norm": f"{SHARED}.pre_ff_layernorm",
    f"{AT}.ffn.down": f"{SHARED}.feed_forward.down_proj",
}
BESIDE = {f"{part}_{end}": (part, i) for part in "qkv" for i, end in enumerate(("down", "up"))}
ADAPTED = tuple(f"mixer.side.{name}" for name in ("adapt", "adapt_gate", "adapt_up", *BESIDE))


class _Names(Names):
    """Names of layers of either kind; the low-rank maps are named by `names`."""

    def inside(self, block: Block, path: str, prefix: str, family: str) -> list[Entry]:
        """See `Names.inside`."""
        if block.branches[0].side is None:
            return super().inside(block, path, prefix, family)
        fused = {f"{SHARED}.feed_forward.gate_up_proj": Fused(stems=(f"{AT}.ffn.gate", f"{AT}.ffn.up"))}
        return Names(stems=HYBRID, fused=fused, elsewhere=ADAPTED).inside(block, path, prefix, family)


NAMES = _Names(
    stems=STEMS, outside={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"}
)


def names(spec: Model, family: str) -> TensorTable:
    """Returns the table: low-rank maps are stored with the transformer that they stand beside, by their use's number.

    What later uses share may be stored again.
    """
    table, sides = NAMES(spec, family), _sides(spec)
    owners = [i for i, side in sides if side.shared.weights_from is None]
    entries, again, ignored = list(table.entries), dict(table.duplicates), dict(table.ignored)
    for use, (i, side) in enumerate(sides):
        owner, at = owners[use % len(owners)], f"blocks.{i}.mixer.side"
        stored = f"model.layers.{owner}.{SHARED}.feed_forward.gate_up_proj_adapter_list.{use}"
        if side.attention_rank is not None:
            lists = f"model.layers.{owner}.{SHARED}.self_attn.linear_{{}}_adapter_list.{use}.{{}}.weight"
            entries += [entry(f"{at}.{path}.weight", lists.format(*place)) for path, place in BESIDE.items()]
        if side.rank is not None:
            entries.append(entry(f"{at}.adapt.weight", f"{stored}.0.weight"))
            paths, wide = (f"{at}.adapt_gate.weight", f"{at}.adapt_up.weight"), side.shared.ffn.d_ff
            entries.append(Entry(paths=paths, names=(f"{stored}.1.weight",), layout=Concat((wide, wide))))
        if i == owner:
            continue
        begin = f"model.layers.{owner}.{SHARED}."
        for one in table.entries:
            if one.names[0].startswith(begin) and len(one.paths) == 1:
                again[f"model.layers.{i}.{SHARED}.{one.names[0].removeprefix(begin)}"] = one.paths[0]
        pattern = rf"model\.layers\.{i}\.{SHARED}\.(feed_forward\.gate_up_proj|self_attn\.linear_[qkv]_adapter_list).*"
        ignored[pattern] = "weights that layers share, stored again"
    return replace(table, entries=tuple(entries), duplicates=again, ignored=ignored)


FAMILY = Family(
    name="zamba2",
    heads=("Zamba2ForCausalLM",),
    keys=(  # defaults as in transformers' Zamba2Config
        *but(
            sizes(n_vocab=32000, d_model=2560, d_ff=0, n_layers=54, n_heads=32, context=4096, act="gelu", ties=True),
            n_heads={"at": _of("shared.attention.n_heads")},
            n_kv_heads={"at": _of("shared.attention.n_kv_heads")},
            d_head=_HeadWidth(),
            rotary=None,
            n_layers=_Layers(),
            d_ff={
                "also": ("ffn_hidden_size",),
                "default": four_times,
                "null": four_times,
                "derived": True,
                "at": _of("shared.ffn.d_ff"),
            },
            tied=lambda key: replace(key, must=(lambda values: values["tied"], "true: else no weights are shared")),
            activation={"at": _of("shared.ffn.activation")},
        ),
        eps("rms_norm_eps", 1e-5),
        _Shared(),
        Size("adapter_rank", "rank", also=("lora_rank",), default=128, at=_of("rank")),
        _Positions(),
        Flag("add_bias_linear", "bias", default=False, at=first(Mamba2, "bias")),
        _Width(),
        Size("mamba_d_state", "d_state", also=("state_size",), default=64, at=first(Mamba2, "d_state")),
        Size("mamba_ngroups", "n_groups", default=1, divides="ssm_heads", at=first(Mamba2, "n_groups")),
        Size("mamba_d_conv", "kernel", also=("conv_dimension",), default=4, at=first(Mamba2, "conv.kernel")),
        _Derived(),
        Irrelevant("nothing reads it", "kv_channels", "num_query_groups", "ft_lora"),
        *(
            Only(key, True, reason="each use of a feed-forward has low-rank maps of its own")
            for key in ("use_shared_mlp_adapter", "use_shared_block_lora")
        ),
        Only("gated_linear_unit", True, reason="feed-forwards of this family are gated"),
        Only("sliding_window", None, reason="attention of this family has no window"),
        Only("time_step_limit", None, [0.0, math.inf], reason="steps have no limits in this family"),
        Flag(
            "use_shared_attention_adapter",
            "adapts_attention",
            also=("use_shared_attention_lora",),
            default=False,
            at=lambda parts: _side(parts).attention_rank is not None,
            must=(
                lambda values: not values["adapts_attention"] or values["n_kv_heads"] in (None, values["n_heads"]),
                "false unless num_key_value_heads is num_attention_heads",
            ),
        ),
        Only("use_long_context", False, reason="a rescaled RoPE base is not built"),
        state_space.COMPUTED,
        state_space.INITIAL,
        Irrelevant("the convolution always has a bias", "use_conv_bias"),
        Irrelevant("how it is computed, not what", "use_mem_eff_path"),
    ),
    build=build,
    padding=0,
    names=names,
)
