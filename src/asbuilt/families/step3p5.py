"""The step3p5 family: gates for each head, more query heads in windows, a shared expert, clamps in late layers.

StepFun 2026, the model cards and published code of Step-3.5-Flash and Step-3.7-Flash, of which this is the text.
Published configs have one number of RoPE and of the clamps for each layer, the prediction layers after the last
included. Those have no experts, share the embedding and have heads of their own, and read streams before the norms, as
vLLM and SGLang run them (transformers has them read after the norms, and takes the model's head).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families.shared import experts, predictors
from asbuilt.families.shared.dimensions import Sizes, pre_norm, sized
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Irrelevant, Number, Only, Size, Values, but, eps
from asbuilt.families.shared.names import ATTENTION, GATED, NORMS, QK_NORMS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader, is_number
from asbuilt.families.shared.rotary import TwoRopes
from asbuilt.families.shared.sizes import FULL, MLP_BIAS, SLIDING, HeadWidth, LayerWindows, sizes
from asbuilt.families.shared.table import TensorTable, entry
from asbuilt.spec import (
    Attention,
    Block,
    ClampedGate,
    GatedMLP,
    Head,
    LanguageModel,
    MixtureOfExperts,
    Model,
    Predictor,
    RMSNorm,
    Rotary,
    Router,
    SharedEmbedding,
)

LAYERS = "num_hidden_layers"
# Other spellings of published configs.
ALSO = {
    "num_attention_groups": "num_key_value_heads",
    "moe_num_experts": "n_routed_experts",
    "num_local_experts": "n_routed_experts",
    "moe_top_k": "num_experts_per_tok",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
LISTS = ("layer_types", "mlp_layer_types", "swiglu_limits", "swiglu_limits_shared")
EACH = ("rope_theta", "partial_rotary_factors")


def build(
    router: Router,
    *,
    d_expert: int,
    d_shared: int,
    windows: Sequence[int | None],
    window_heads: int,
    local: Rotary,
    limits: Sequence[float | None],
    shared_limits: Sequence[float | None],
    predicted: Sequence[int | None] = (),
    scale: float | None = None,
    dense: Collection[int] = (),
    n_dense: int = 0,
    eps: float = 1e-5,
    bias: bool = False,
    mlp_bias: bool = False,
    **sizes: Unpack[Sizes],
) -> LanguageModel:
    """Returns the model of these sizes; layers with a window have `local` RoPE and `window_heads`.

    The experts of each layer are clamped at one of `limits`, the shared one and layers without experts, those in
    `dense`, at one of `shared_limits`; None is for no clamp. Prediction layers have the windows `predicted`.
    """
    made = sized(sizes)
    norm = RMSNorm(d=made.d_model, eps=eps, gain="offset")
    head_norm = replace(norm, d=made.head_width)
    alike: dict[str, Any] = {"bias": bias, "output_bias": bias, "scale": scale, "gating": "head"}

    def gate(limit: float | None) -> ClampedGate | None:
        return None if limit is None else ClampedGate(alpha=1.0, limit=limit, shift=False, activated=True)

    def block(window: int | None, sparse: bool, limit: float | None, shared_limit: float | None) -> Block:
        turned = made if window is None else replace(made, rotary=local, n_heads=window_heads)
        attention = turned.attention(window=window, q_norm=head_norm, k_norm=head_norm, **alike)
        mlp = made.gated(mlp_bias, clamp=gate(shared_limit))
        if not sparse:
            return pre_norm(attention, mlp, norm)
        mixture = replace(made.mixture(router, d_expert), gating=gate(limit) or "gated")
        return pre_norm(attention, replace(mixture, shared=replace(mlp, d_ff=d_shared)), norm)

    layers = [
        (window, i >= n_dense and i not in dense, limits[i], shared_limits[i]) for i, window in enumerate(windows)
    ]
    kinds = {layer: block(*layer) for layer in set(layers)}
    spec = made.model(tuple(kinds[layer] for layer in layers), norm)
    table: dict[str, Any] = {"n_vocab": spec.n_vocab, "d_model": spec.d_model}
    each = Predictor(
        embedding=SharedEmbedding(**table),
        token_norm=norm,
        stream_norm=norm,
        block=kinds[layers[0]],
        norm=norm,
        head=Head(**table),
        normed=False,
    )
    layer = {window: block(window, False, None, None) for window in set(predicted)}
    return replace(spec, predictors=tuple(replace(each, block=layer[window]) for window in predicted))


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config in transformers' keys: one object of RoPE for each kind of layer, lists of built layers."""
    said = {ALSO.get(key, key): value for key, value in config.items()}
    n = said.get(LAYERS, 45)
    more = said.get(predictors.KEY) or 0
    if not isinstance(n, int) or not isinstance(more, int):
        return said
    said |= _after(said, n, more)
    for key in (*LISTS, *EACH):
        if isinstance(said.get(key), list) and len(said[key]) == n + more:
            said[key] = said[key][:n]
    marked = said.pop("moe_layers_enum", None)
    if said.get("mlp_layer_types") is None and isinstance(marked, str | list):
        items = marked.split(",") if isinstance(marked, str) else marked
        sparse = {str(one).strip() for one in items}
        every = ["sparse" if str(i) in sparse else "dense" for i in range(n + more)]
        said["mlp_layer_types"] = every[:n]
        if said.get("mtp_layer_types") is not None and said.get("mtp_mlp_layer_types") is None:
            said["mtp_mlp_layer_types"] = every[n:]
    other = said.get("attention_other_setting")
    if said.get("num_sliding_attention_heads") is None and isinstance(other, dict) and "num_attention_heads" in other:
        said["num_sliding_attention_heads"] = other["num_attention_heads"]
    return _roped(said, n) if any(isinstance(said.get(key), list) for key in EACH) else said


def _after(said: dict[str, Any], n: int, more: int) -> dict[str, Any]:
    """Returns what lists that reach past the last layer say of the kinds of prediction layers.

    Nothing, if one has a clamp, or RoPE other than the layers of its kind.
    """
    given = {key: said.get(key) for key in (*LISTS, *EACH)}
    lists = {key: value for key, value in given.items() if isinstance(value, list) and len(value) == n + more}
    types = lists.get("layer_types")
    if not more or types is None:
        return {}
    plain = not any(one for key in LISTS[2:] for one in lists.get(key, [])[n:])
    ropes = [lists[key] for key in EACH if key in lists]
    known = all(kind in types[:n] for kind in types[n:])
    if not plain or not known or any(one[i] != one[types.index(types[i])] for one in ropes for i in range(n, n + more)):
        return {}
    mlps = lists.get("mlp_layer_types")
    found = {"mtp_layer_types": types[n:]} | ({} if mlps is None else {"mtp_mlp_layer_types": mlps[n:]})
    return {key: value for key, value in found.items() if said.get(key) is None}


def _roped(said: dict[str, Any], n: int) -> dict[str, Any]:
    """Returns the config with the base and part of each kind of layer, taken from the first layer of that kind."""
    types = said.get("layer_types") or [FULL] * n
    bases, parts = (said.get(key) for key in EACH)
    ropes: dict[str, Any] = {}
    for kind in (FULL, SLIDING):
        if kind not in types:
            continue
        i, rope = types.index(kind), {"rope_type": "default"}
        base = bases[i] if isinstance(bases, list) and i < len(bases) else bases
        rope |= {} if base is None else {"rope_theta": base}
        rope |= {"partial_rotary_factor": parts[i]} if isinstance(parts, list) and i < len(parts) else {}
        scaling = said.get("rope_scaling")
        ropes[kind] = rope | (scaling if kind == FULL and isinstance(scaling, dict) else {})
    kept = {key: value for key, value in said.items() if key not in (*EACH, "rope_scaling")}
    return kept | {"rope_parameters": ropes}


class _Limits:
    """The clamps of each layer: null, or 0, for none; no list at all is for none either."""

    def __init__(self, key: str, into: str) -> None:
        self.key, self.into = key, into

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the list."""
        n = values["n_layers"]
        said = reader.config[self.key] if reader.given(self.key) else []
        numbers = isinstance(said, list) and all(one is None or (is_number(one) and one >= 0) for one in said)
        reader.require(self.key, numbers and len(said) in (0, n), f"a list of {n} numbers of at least 0, or null")
        reader.irrelevant(self.key, "the spec says it where it clamps something")
        values[self.into] = tuple(float(one) if one else None for one in said) or (None,) * n

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the list as it was carried, if it means these clamps; else zeros for none, or null."""
        found = [self._limit(block) for block in parts.model.blocks]
        said = parts.carried.get(self.key) or [0.0] * len(found)
        same = len(said) == len(found) and all(
            one is None or (said_one or 0.0) == one for said_one, one in zip(said, found, strict=True)
        )
        if same:
            return {self.key: parts.carried.get(self.key)}
        return {self.key: [one or 0.0 for one in found]}

    def _limit(self, block: Block) -> float | None:
        """Returns the clamp of a block, 0 for none, and None where there is nothing to clamp."""
        body = block.branches[-1].body
        if self.into == "limits":
            if not isinstance(body, MixtureOfExperts):
                return None
            clamp: object = body.gating
        else:
            mlp = body.shared if isinstance(body, MixtureOfExperts) else body
            clamp = mlp.clamp if isinstance(mlp, GatedMLP) else None
        return clamp.limit if isinstance(clamp, ClampedGate) else 0.0


class _Kinds(experts.LayerKinds):
    """Which layers have experts: all but the first three, unless the list says otherwise."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the list."""
        values["n_dense"] = 3
        super().read(reader, values)
        some = values["n_dense"] < values["n_layers"]
        reader.require(LAYERS, some, "more than 3, such that some layer has experts")


class _Predicted:
    """Prediction layers: their number, windows and feed-forwards, carried since a folder may leave them out."""

    types, mlps = "mtp_layer_types", "mtp_mlp_layer_types"
    reason = "the spec says it where they are stored"
    note = "prediction layers are not built: only those without experts are, whose attention is as that of other layers"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the windows of those that are built into `predicted`."""
        count = reader.size(predictors.KEY, default=0, null=0, least=0, most=predictors.MOST)
        types, mlps = (reader.config.get(key) for key in (self.types, self.mlps))
        for key, said, kinds in ((self.types, types, (FULL, SLIDING)), (self.mlps, mlps, ("dense", "sparse"))):
            ok = isinstance(said, list) and len(said) == count and all(word in kinds for word in said)
            reader.require(key, said is None or ok, f"{count} of {', '.join(kinds)}")
        window = next((one for one in values["windows"] if one is not None), None)
        words = types or []
        built = types is not None and all(word == "dense" for word in mlps or [])
        built = built and (window is not None or SLIDING not in words)
        values["predicted"] = tuple(window if word == SLIDING else None for word in words) if built else ()
        for key in (predictors.KEY, self.types, self.mlps):
            if count and not built:
                reader.note(key, self.reason, self.note)
            else:
                reader.irrelevant(key, self.reason)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the keys; of a model without such layers what was carried."""
        layers = getattr(parts.model, "predictors", ())
        keys = (predictors.KEY, self.types, self.mlps)
        if not layers:
            return {key: parts.carried[key] for key in keys if key in parts.carried}
        bodies = [parts.expect(one.block.branches[0].body, Attention, "predictors.block") for one in layers]
        types = [FULL if body.window is None else SLIDING for body in bodies]
        return dict(zip(keys, (len(layers), types, ["dense"] * len(layers)), strict=True))


class _LayerHeads:
    """The heads of layers with windows, said again for each of them."""

    key = "per_layer_config"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the object; raises InputError where it says something else."""
        said = reader.config.get(self.key)
        heads = {"num_attention_heads": values["window_heads"]}
        want = {str(i): heads for i, window in enumerate(values["windows"]) if window is not None}
        same = said is None or (isinstance(said, dict) and {str(key): own for key, own in said.items()} == want)
        reader.require(self.key, same, f"{heads} for each layer with a window, as num_sliding_attention_heads says")
        reader.known.add(self.key)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the object."""
        found = enumerate(parts.attentions)
        return {self.key: {str(i): {"num_attention_heads": one.n_heads} for i, one in found if one.window is not None}}


class _OtherSetting(Irrelevant):
    """What a published config says of layers with windows, of which only the heads may differ."""

    def __init__(self) -> None:
        super().__init__("num_sliding_attention_heads, as it is written, says it", "attention_other_setting")

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the object."""
        inner = reader.nested(self.keys[0])
        if inner is not None:
            inner.only("attention_type", SLIDING, reason="layers with windows alone have other heads")
            inner.only("num_attention_heads", values["window_heads"], reason="num_sliding_attention_heads says it")
            inner.only("num_attention_groups", values["n_kv_heads"], reason="all layers have as many key heads")
            for key in ("head_dim", "true_head_dim"):
                inner.only(key, values["d_head"], reason="heads of all layers are as wide")
            inner.finish()
        super().read(reader, values)


def _heads(windowed: bool) -> Any:  # noqa: ANN401
    """Returns what finds the heads of layers with or without windows; those of the others where there are none."""

    def found(parts: Parts) -> int:
        own = [layer.n_heads for layer in parts.attentions if (layer.window is not None) == windowed]
        return own[0] if own else parts.n_heads

    return found


def _mlp_bias(parts: Parts) -> bool:
    """Returns whether layers without experts, or shared experts, have biases."""
    first = parts.dense or parts.mixture.shared
    return parts.expect(first, GatedMLP, "blocks.0.ffn.body").bias


def _query_scalar(parts: Parts) -> float:
    """Returns 1 over the squared factor on scores, as a whole number where it is one."""
    scale = parts.attention.scale
    if scale is None:
        return parts.d_head
    whole = round(scale**-2)
    return whole if _scale(whole) == scale else scale**-2


def _scale(said: float) -> float:
    return said**-0.5


# What a prediction layer has: a block without experts, and what stands around it.
PREDICTOR = r"(self_attn|mlp|input_layernorm|post_attention_layernorm|enorm|hnorm|eh_proj|transformer\.shared_head)\..*"
NAMES = Names(
    stems=NORMS
    | ATTENTION
    | GATED
    | QK_NORMS
    | {"attention.body.gate": "self_attn.g_proj"}
    | {f"ffn.body.shared.{part}": f"share_expert.{part}_proj" for part in ("gate", "up", "down")}
    | {"ffn.body.router": "moe.gate", "ffn.body.router.correction": "moe.router_bias"},
    stacked=lambda part: [entry(name, f"moe.{name}_proj.weight") for name in ("gate", "up", "down")],
)


BESIDE = {part: name for part, name in predictors.NAMES.items() if part != "embedding"} | {
    "norm": "transformer.shared_head.norm",
    "head": "transformer.shared_head.output",
}


def table(spec: Model, family: str) -> TensorTable:
    """Returns the table, which leaves out prediction layers after the last layer that are not built."""
    if list(spec.extras()):
        return predictors.named(NAMES, BESIDE)(spec, family)
    after = "|".join(str(spec.n_layers + i) for i in range(predictors.MOST))
    found = NAMES(spec, family)
    return replace(found, ignored={**found.ignored, rf"model\.layers\.({after})\.{PREDICTOR}": "not built"})


FAMILY = Family(
    name="step3p5",
    heads=("Step3p5ForCausalLM",),
    prepare=prepared,
    padding=1,
    keys=(  # defaults as in transformers' Step3p7TextConfig
        Only("hidden_act", "silu", "swigluoai", reason="gates are silus, whatever a config says"),
        *but(
            sizes(n_vocab=128815, d_model=4096, d_ff=11264, n_layers=45, n_heads=64, n_kv_heads=8, context=128000),
            d_head=HeadWidth(128),
            rotary=TwoRopes(("rope_theta", 10000.0), ("rope_theta", 10000.0), partial=1.0),
            activation=None,
            d_ff=experts.dense,
            n_heads={"at": _heads(False)},
        ),
        Size(
            "num_sliding_attention_heads",
            "window_heads",
            default=lambda values: values["n_heads"],
            null=lambda values: values["n_heads"],
            derived=True,
            must=(
                lambda values: values["window_heads"] % values["n_kv_heads"] == 0,
                lambda values: f"a multiple of num_key_value_heads = {values['n_kv_heads']}",
            ),
            at=_heads(True),
        ),
        experts.TRAINING,
        experts.routed(
            *experts.counts("n_routed_experts", n_experts=288, top_k=8),
            replace(experts.routed_scale(1.0), key="moe_router_scaling_factor"),
            Only("moe_router_activation", "sigmoid", reason="this family scores by sigmoid"),
            Only("use_moe_router_bias", True, reason="scores of this family are always corrected for the choice"),
            Only("norm_expert_weight", True, reason="weights are always divided by their sum"),
            scoring="sigmoid",
            correction=True,
            renormalise=True,
        ),
        experts.expert_width(1280),
        Size("share_expert_dim", "d_shared", default=1280, at="mixture.shared.d_ff"),
        eps("rms_norm_eps", 1e-5),
        Only("attention_bias", False, None, reason="gates without biases beside maps with are not supported"),
        replace(MLP_BIAS, at=_mlp_bias),
        Number(
            "query_pre_attn_scalar",
            "scale",
            default=lambda values: values["d_head"],
            null=lambda values: values["d_head"],
            make=_scale,
            at=_query_scalar,
        ),
        LayerWindows(default=None, usual=lambda _, values: [False] * values["n_layers"]),
        _LayerHeads(),
        _OtherSetting(),
        _Kinds(),
        _Limits("swiglu_limits", "limits"),
        _Limits("swiglu_limits_shared", "shared_limits"),
        Only("use_head_wise_attn_gate", True, reason="each head of this family has a gate"),
        Only("zero_centered", True, reason="gains of this family's norms are stored less 1"),
        Only("use_moe", True, reason="mlp_layer_types says which layers have experts"),
        Only("att_impl_type", "GQA", reason="the only attention of this family"),
        Only("use_mfa", False, reason="the only attention of this family"),
        Only("use_rope_layers", [], None, reason="all layers have RoPE"),
        Only("yarn_only_types", [FULL], reason="RoPE of layers without windows alone is scaled"),
        Only("gating", True, "per-head", reason="each head of this family has a gate"),
        Only("use_bidirectional_attention", False, reason="all attention is causal"),
        _Predicted(),
        Irrelevant("queries and keys are always normed, whatever a config says", "use_qk_norm"),
        Irrelevant("precision of the router's product", "need_fp32_gate"),
        Irrelevant("mlp_layer_types says it", "moe_layer_offset", "moe_every_n_layer"),
        Irrelevant("max_position_embeddings says it", "max_seq_len"),
    ),
    build=build,
    names=table,
)
