"""What each `general.architecture` means: keys, names and layouts as llama.cpp's converter and reader have them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asbuilt.families.gguf.engine import (
    Architecture,
    Both,
    Flag,
    Header,
    Heads,
    Irrelevant,
    Key,
    Number,
    Only,
    Rope,
    Size,
    Stored,
    Vocabulary,
    Window,
    Writing,
)
from asbuilt.families.gguf.layouts import PerHead
from asbuilt.families.gguf.scaling import read_base, read_gguf_scaling, rope_factors, rows_of, shortest
from asbuilt.families.gguf.tables import EXPERTS_GATE_UP, GATE_UP, PREDICTOR, QKV, attention_at
from asbuilt.families.shared.common import MOST_LAYERS
from asbuilt.families.shared.table import Chain, Concat, EachExpert, Entry, Interleave, Transpose, entry
from asbuilt.spec import Attention, LanguageModel, LatentAttention, LongRope, Model, YaRN

if TYPE_CHECKING:
    from asbuilt.formats.gguf import GGUFFile

DIMENSIONS: tuple[Key, ...] = (
    Size("block_count", "num_hidden_layers", most=MOST_LAYERS),
    Size("context_length", "max_position_embeddings"),
    Size("embedding_length", "hidden_size"),
    Size("feed_forward_length", "intermediate_size"),
    Vocabulary(),
)
RMS = Number("attention.layer_norm_rms_epsilon", "rms_norm_eps", most=1.0)
LAYER_NORM = "attention.layer_norm_epsilon"
USUAL: tuple[Key, ...] = (*DIMENSIONS, Heads(), Rope(), RMS)
LAYOUT = Irrelevant("tensor_data_layout", "a note of early converters")
BIASED = Stored("attention_bias", ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias"))
NO_EXPERTS: tuple[Key, ...] = tuple(
    Only(key, (0,), "a mixture of experts is not read in this family") for key in ("expert_count", "expert_used_count")
)


def _has_experts(file: GGUFFile) -> bool:
    count = file.metadata.get("llama.expert_count")
    return isinstance(count, int) and count > 0


def _llama_biases(spec: Model, file: GGUFFile) -> Model:
    """Returns the model with biases of q, k and v apart from that of o, as a llama's config cannot say it."""
    output = "blk.0.attn_output.bias" in file.tensors
    blocks = []
    for block in spec.blocks:
        first = block.branches[0]
        assert isinstance(first.body, Attention)
        body = replace(first.body, output_bias=output)
        blocks.append(replace(block, branches=(replace(first, body=body), *block.branches[1:])))
    return replace(spec, blocks=tuple(blocks))


LLAMA = Architecture(
    name="llama",
    family="llama",
    keys=(*NO_EXPERTS, LAYOUT, *USUAL, BIASED, Stored("mlp_bias", ("blk.0.ffn_gate.bias",))),
    adjacent=True,
    may_join=(QKV,),
    when=lambda file: not _has_experts(file),
    finish=_llama_biases,
)
QWEN2 = Architecture(name="qwen2", family="qwen2", keys=USUAL, may_join=(QKV,))
QWEN3 = Architecture(name="qwen3", family="qwen3", keys=(*USUAL, BIASED), may_join=(QKV,))
GRANITE = Architecture(
    name="granite",
    family="granite",
    keys=(
        *NO_EXPERTS,
        *USUAL,
        BIASED,
        Stored("mlp_bias", ("blk.0.ffn_gate.bias",)),
        Number("embedding_scale", "embedding_multiplier", default=1.0),
        Number("residual_scale", "residual_multiplier", default=1.0),
        Number("attention.scale", "attention_multiplier"),
        Number("logit_scale", "logits_scaling", default=1.0),
    ),
    adjacent=True,
    may_join=(QKV,),
)
COMMAND_R = Architecture(
    name="command-r",
    family="cohere",
    keys=(
        *DIMENSIONS,
        Heads(),
        Rope(),
        Number(LAYER_NORM, "layer_norm_eps", most=1.0),
        Number("logit_scale", "logit_scale"),
        BIASED,
    ),
    adjacent=True,
    may_join=(QKV,),
)
OLMO2 = Architecture(name="olmo2", family="olmo2", keys=(*USUAL, BIASED), may_join=(QKV,))


def _gemma_scale(deepest: int) -> Key:
    """Reads by what power scores are scaled: the head's width, but in the deepest published model d_model / n_heads."""

    def read(header: Header) -> None:
        config = header.config
        per_head = config["hidden_size"] // config["num_attention_heads"]
        scalar = per_head if config["num_hidden_layers"] == deepest else header.d_head
        header.says("query_pre_attn_scalar", scalar, "attention.key_length")

    return Both(read)


def _every(pattern: int, *, full_last: bool = True) -> Key:
    """Reads layers of which the last of every `pattern` sees all tokens, and the others a window."""

    def read(header: Header) -> None:
        kinds = ("sliding_attention", "full_attention")
        layers = range(header.config["num_hidden_layers"])
        header.says("layer_types", [kinds[(i + 1) % pattern == 0] for i in layers], "block_count")

    return Both(read)


def _gemma3_rope(header: Header) -> None:
    """Reads the base and scaling of layers that see all tokens, and the base of those with a window."""
    rope = header.key("rope")
    size = header.reader.size(f"{rope}.dimension_count", default=header.d_head)
    header.reader.require(f"{rope}.dimension_count", size == header.d_head, f"{header.d_head}, the whole head")
    header.says("rope_theta", read_base(header.reader, rope), "rope.freq_base")
    header.says("rope_local_base_freq", read_base(header.reader, rope, "freq_base_swa"), "rope.freq_base_swa")
    scaling = read_gguf_scaling(header.reader, rope, header.config["max_position_embeddings"])
    if scaling is not None:
        header.says("rope_scaling", _written(scaling), "rope.scaling")


def _write_gemma3_rope(writing: Writing) -> None:
    """Says the base of layers with a window beside the other."""
    if (rotary := writing.rotary) is not None:
        writing.turns(rotary)
    writing.says_number("rope.freq_base_swa", writing.config.get("rope_local_base_freq"))


def _written(scaling: Any) -> dict[str, Any] | None:  # noqa: ANN401  one of the scalings of spec
    from asbuilt.families.shared.rotary import write_rotary
    from asbuilt.spec import Rotary

    return write_rotary(Rotary(d_rotary=2, scaling=scaling), 1)["rope_scaling"]


GEMMA = Architecture(name="gemma", family="gemma", keys=(*USUAL, BIASED), plus_one=True, may_join=(QKV,))
GEMMA2 = Architecture(
    name="gemma2",
    family="gemma2",
    keys=(
        *USUAL,
        BIASED,
        _gemma_scale(46),
        _every(2),
        Size("attention.sliding_window", "sliding_window", default=4096),
        Number("attn_logit_softcapping", "attn_logit_softcapping", default=50.0),
        Number("final_logit_softcapping", "final_logit_softcapping", default=30.0),
    ),
    plus_one=True,
    may_join=(QKV,),
)
GEMMA3 = Architecture(
    name="gemma3",
    family="gemma3_text",
    keys=(
        *DIMENSIONS,
        Heads(),
        Both(_gemma3_rope, _write_gemma3_rope),
        RMS,
        BIASED,
        _gemma_scale(62),
        _every(6),
        Size("attention.sliding_window", "sliding_window"),
    ),
    plus_one=True,
    may_join=(QKV,),
)


def _phi3_rope(header: Header) -> None:
    """Reads the two lists of divisors, for short and long contexts, where the file has them."""
    reader, file, context = header.reader, header.file, header.config["max_position_embeddings"]
    rope = header.key("rope")
    size = reader.size(f"{rope}.dimension_count", default=header.d_head)
    even = size <= header.d_head and size % 2 == 0
    reader.require(f"{rope}.dimension_count", even, f"an even part of the {header.d_head} numbers of a head")
    header.says("rope_theta", read_base(reader, rope), "rope.freq_base")
    header.says("partial_rotary_factor", size / header.d_head, "rope.dimension_count")
    original = reader.size(f"{rope}.scaling.original_context_length", default=context)
    header.says("original_max_position_embeddings", original, "rope.scaling.original_context_length")
    attention = shortest(reader.number(f"{rope}.scaling.attn_factor", default=1.0, most=1e6))
    short, long = (rope_factors(file, size // 2, f"rope_factors_{kind}.weight") for kind in ("short", "long"))
    if short is None or long is None:
        reader.require(f"{rope}.scaling.attn_factor", attention == 1.0, "1 without rope_factors_short and _long")
        return
    lists = {"short_factor": list(short), "long_factor": list(long), "attention_factor": attention}
    header.says("rope_scaling", {"type": "longrope", **lists}, "rope.scaling")


def _write_phi3_rope(writing: Writing) -> None:
    """Says base and part turned, and where there are two lists of divisors those and their context."""
    rotary, config = writing.rotary, writing.config
    if rotary is None:
        return
    writing.turns(replace(rotary, scaling=None))
    context = config.get("original_max_position_embeddings") or config["max_position_embeddings"]
    writing.says("rope.scaling.original_context_length", context)
    if isinstance(scaling := rotary.scaling, LongRope):
        writing.says_number("rope.scaling.attn_factor", config["rope_scaling"].get("attention_factor"))
        for kind in ("short", "long"):
            writing.values[f"rope_factors_{kind}.weight"] = getattr(scaling, f"{kind}_factors")


PHI3 = Architecture(
    name="phi3",
    family="phi3",
    keys=(
        *NO_EXPERTS,
        *DIMENSIONS,
        Heads(width=""),
        Both(_phi3_rope, _write_phi3_rope),
        RMS,
        Window(),
    ),
    joined=(QKV, GATE_UP),
)


def _positions(header: Header) -> None:
    """Reads how many positions the table has, of which the context may use fewer."""
    context = header.config["n_ctx"]
    stored = rows_of(header.file, "position_embd.weight", context)
    header.reader.require(header.key("context_length"), context <= stored, f"at most the {stored} positions stored")
    header.says("n_positions", stored, "context_length")


# llama.cpp computes the tanh form of gelu for this family, which is the published one
GPT2 = Architecture(
    name="gpt2",
    family="gpt2",
    keys=(
        Size("block_count", "n_layer", most=MOST_LAYERS),
        Size("context_length", "n_ctx"),
        Size("embedding_length", "n_embd"),
        Size("feed_forward_length", "n_inner", otherwise=lambda config: 4 * config["n_embd"]),
        Vocabulary(),
        Heads(d_model="n_embd", n_heads="n_head", kv="", width=""),
        Both(_positions),
        Number(LAYER_NORM, "layer_norm_epsilon", most=1.0),
    ),
    joined=(QKV,),
)


EXPERT_WIDTH = Size("expert_feed_forward_length", "moe_intermediate_size")
TOP_K = Size("expert_used_count", "num_experts_per_tok")
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3  # llama.cpp's numbers of the functions that score experts
BY_SOFTMAX = Only("expert_gating_func", (SOFTMAX,), "experts of this family are scored by softmax")
BY_SIGMOID = Only("expert_gating_func", (SIGMOID,), "experts of this family are scored by sigmoid")
UNSCALED = Only("expert_weights_scale", (1.0, 0), "what experts give is not scaled in this family")

MIXTRAL = Architecture(
    name="llama",
    family="mixtral",
    keys=(LAYOUT, *USUAL, Size("expert_count", "num_local_experts"), TOP_K),
    adjacent=True,
    may_join=(QKV,),
    when=_has_experts,
)
QWEN3MOE = Architecture(
    name="qwen3moe",
    family="qwen3_moe",
    keys=(
        *USUAL,
        BIASED,
        Size("expert_count", "num_experts"),
        TOP_K,
        EXPERT_WIDTH,
        BY_SOFTMAX,
        UNSCALED,
        Only("expert_weights_norm", (True,), "the weights of chosen experts sum to 1 in this family"),
    ),
    constants={"norm_topk_prob": True},  # llama.cpp always does so, as all published models do
    may_join=(QKV,),
)
OLMOE = Architecture(
    name="olmoe",
    family="olmoe",
    keys=(
        *USUAL,
        BIASED,
        Size("expert_count", "num_experts"),
        TOP_K,
        BY_SOFTMAX,
        UNSCALED,
        Only("expert_weights_norm", (False,), "the weights of chosen experts are as scored in this family"),
        Only("attention.clamp_kqv", (0,), "clipped queries, keys and values are not read"),
    ),
    constants={"norm_topk_prob": False},
    may_join=(QKV,),
)


def _without_predictors(header: Header) -> None:
    """Counts the layers without those that predict further tokens, which are read where they are stored whole."""
    key = header.key("nextn_predict_layers")
    n, layers = header.reader.size(key, default=0, least=0), header.config["num_hidden_layers"]
    header.reader.require(key, n < layers, f"less than block_count = {layers}")
    wanted = (f"blk.{layers - 1 - i}.{stem}.weight" for i in range(n) for stem in PREDICTOR.values())
    whole = all(header.stores(name) for name in wanted)
    header.says("num_hidden_layers", layers - n, "block_count")
    header.says("num_nextn_predict_layers", n if whole else 0, "nextn_predict_layers")


def _write_predictors(writing: Writing) -> None:
    """Counts the layers with those that predict further tokens."""
    n = len(writing.spec.predictors) if isinstance(writing.spec, LanguageModel) else 0
    writing.says("block_count", writing.config["num_hidden_layers"] + n)
    writing.says("nextn_predict_layers", n or None)


PREDICTORS = Both(_without_predictors, _write_predictors)
ROUTED: tuple[Key, ...] = (
    Size("leading_dense_block_count", "first_k_dense_replace", default=0, least=0),
    Size("expert_count", "n_routed_experts"),
    TOP_K,
    EXPERT_WIDTH,
    Size("expert_shared_count", "n_shared_experts"),
)
GROUPED: tuple[Key, ...] = (
    Number("expert_weights_scale", "routed_scaling_factor", default=1.0),
    Size("expert_group_count", "n_group", default=1),
    Size("expert_group_used_count", "topk_group", default=1),
)
NORMED = Flag("expert_weights_norm", "norm_topk_prob", default=False)
GLM4MOE = Architecture(
    name="glm4moe",
    family="glm4_moe",
    keys=(
        *DIMENSIONS,
        PREDICTORS,
        Heads(),
        Rope(fraction="partial_rotary_factor"),
        RMS,
        BIASED,
        Stored("use_qk_norm", ("blk.0.attn_q_norm.weight",)),
        *ROUTED,
        *GROUPED,
        NORMED,
        BY_SIGMOID,
    ),
    names={"ffn.norm": "post_attention_norm"},
    may_join=(QKV,),
    predicts=True,
)


def _explicit_scaling(header: Header) -> None:
    """Says how positions are scaled as the published model does, whose ramp is not widened to whole pairs.

    llama.cpp widens it for all models alike. A config silent about scaling would mean another one.
    """
    scaling = header.config.setdefault("rope_scaling", {"rope_type": "default"})
    if scaling["rope_type"] == "yarn":
        header.config["rope_scaling"] = {**scaling, "truncate": False}


GPT_OSS = Architecture(
    name="gpt-oss",
    family="gpt_oss",
    keys=(
        *USUAL,
        Both(_explicit_scaling),
        _every(2),
        Window(),
        BIASED,
        Size("expert_count", "num_local_experts"),
        TOP_K,
        Size("expert_feed_forward_length", "intermediate_size"),
        Only("expert_gating_func", (SOFTMAX_OF_CHOSEN,), "experts are weighed by softmax over the chosen ones"),
    ),
    names={"ffn.norm": "post_attention_norm"},
    may_join=(QKV,),
)


def _llama4_norms(header: Header) -> None:
    """Reads whether queries and keys are normed: llama.cpp tells it by the published numbers of experts."""
    header.says("use_qk_norm", header.config["num_local_experts"] != 128, "expert_count")


def _llama4_step(config: Mapping[str, Any]) -> int | None:
    """Returns how many layers apart those with experts are, where a config lists them."""
    layers = config.get("moe_layers")
    return layers[0] + 1 if layers else None


LLAMA4 = Architecture(
    name="llama4",
    family="llama4_text",
    keys=(
        *USUAL,
        BIASED,
        Size("feed_forward_length", "intermediate_size_mlp"),
        Size("expert_feed_forward_length", "intermediate_size"),
        Size("expert_count", "num_local_experts"),
        TOP_K,
        Both(_llama4_norms),
        Size("interleave_moe_layer_step", "interleave_moe_layer_step", otherwise=_llama4_step),
        Only("expert_shared_count", (1,), "each layer with experts has one that all tokens take"),
        BY_SIGMOID,
    ),
    adjacent=True,
    may_join=(QKV,),
)
DEEPSEEK = Architecture(
    name="deepseek",
    family="deepseek",
    keys=(*USUAL, BIASED, *ROUTED, BY_SOFTMAX, UNSCALED),
    adjacent=True,
    may_join=(QKV,),
)


def _latent(header: Header) -> None:
    """Reads heads, ranks and widths; newer files count one key head, and say the widths of a head beside it."""
    reader, config = header.reader, header.config
    header.says("num_attention_heads", reader.size(header.key("attention.head_count")), "attention.head_count")
    n_heads, newer = config["num_attention_heads"], header.given("attention.key_length_mla")
    kv_heads = reader.size(header.key("attention.head_count_kv"), default=n_heads)
    allowed = "1" if newer else f"head_count = {n_heads}"
    reader.require(header.key("attention.head_count_kv"), kv_heads == (1 if newer else n_heads), allowed)
    header.says("num_key_value_heads", n_heads, "attention.head_count_kv")
    q_rank = reader.size(header.key("attention.q_lora_rank"), default=0, least=0)
    header.says("q_lora_rank", q_rank or None, "attention.q_lora_rank")
    rank, rope = reader.size(header.key("attention.kv_lora_rank")), reader.size(header.key("rope.dimension_count"))
    header.says("kv_lora_rank", rank, "attention.kv_lora_rank")
    header.says("qk_rope_head_dim", rope, "rope.dimension_count")
    key, value = (f"attention.{one}_length" + "_mla" * newer for one in ("key", "value"))
    for kept, of_cache in (("key", rank + rope), ("value", rank)) if newer else ():
        held = header.key(f"attention.{kept}_length")
        reader.require(held, reader.size(held, default=of_cache) == of_cache, f"{of_cache}, what the cache keeps")
    width = reader.size(header.key(key))
    reader.require(header.key(key), width > rope, f"more than rope.dimension_count = {rope}")
    header.says("qk_nope_head_dim", width - rope, key)
    header.says("v_head_dim", reader.size(header.key(value)), value)


def _write_latent(writing: Writing) -> None:
    """Says one key head, which the cache keeps, and the widths of a head beside it."""
    config = writing.config
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    for suffix, value in {
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rope,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rope,
        "attention.value_length_mla": config["v_head_dim"],
    }.items():
        writing.says(suffix, value)


def _latent_rope(header: Header) -> None:
    """Reads base and scaling; `yarn_log_multiplier` is a tenth of mscale, which both mscales of a config are."""
    reader, rope = header.reader, header.key("rope")
    header.says("rope_theta", read_base(reader, rope), "rope.freq_base")
    scaling = read_gguf_scaling(reader, rope, header.config["max_position_embeddings"], log_multiplier=True)
    key = f"{rope}.scaling.yarn_log_multiplier"
    if not isinstance(scaling, YaRN):
        reader.only(key, 0, reason="goes with yarn")
    if scaling is None:
        return
    mscale = shortest(10 * shortest(reader.number(key))) if isinstance(scaling, YaRN) else None
    more = {} if mscale is None else {"mscale": mscale, "mscale_all_dim": mscale}
    header.says("rope_scaling", (_written(scaling) or {}) | more, "rope.scaling")


def _write_latent_rope(writing: Writing) -> None:
    """Says base and scaling, and a tenth of both mscales."""
    scaling = writing.config.get("rope_scaling") or {}
    mscale = scaling.get("mscale_all_dim", 0) / 10
    if (rotary := writing.rotary) is not None:
        writing.turns(rotary, log_multiplier=mscale)


def _latent_entries(spec: Model, here: str, there: str, stored: Collection[str]) -> list[Entry]:
    """The maps from the latent to keys and values, as one map or as one matrix for each head."""
    attention = attention_at(spec, here)
    if not isinstance(attention, LatentAttention):
        return []
    down, rope, k_up, v_up = (f"{here}attention.body.{part}.weight" for part in ("kv_down", "k_rope", "k_up", "v_up"))
    both = Concat((attention.kv_rank, attention.d_rope))
    joined, heads = Entry(paths=(down, rope), names=(f"{there}attn_kv_a_mqa.weight",), layout=both), attention.n_heads
    if f"{there}attn_kv_b.weight" in stored:
        together = Interleave(heads, (attention.d_nope, attention.d_value))
        return [joined, Entry(paths=(k_up, v_up), names=(f"{there}attn_kv_b.weight",), layout=together)]
    return [
        joined,
        entry(k_up, f"{there}attn_k_b.weight", Chain((PerHead(heads), EachExpert(Transpose())))),
        entry(v_up, f"{there}attn_v_b.weight", PerHead(heads)),
    ]


def _limited(header: Header) -> None:
    """Says how groups limit the choice, where there are any."""
    limited = header.config["n_group"] > header.config["topk_group"]
    header.says("topk_method", "group_limited_greedy" if limited else "greedy", "expert_group_count")


LATENT_NAMES = {
    "attention.body.q_down": "attn_q_a",
    "attention.body.q_norm": "attn_q_a_norm",
    "attention.body.q_up": "attn_q_b",
    "attention.body.kv_norm": "attn_kv_a_norm",
}
LATENT_KEYS: tuple[Key, ...] = (
    *DIMENSIONS,
    Both(_latent, _write_latent),
    Both(_latent_rope, _write_latent_rope),
    RMS,
    *ROUTED,
    *GROUPED,
    NORMED,
)


def _by_sigmoid(file: GGUFFile) -> bool:
    return file.metadata.get("deepseek2.expert_gating_func") == SIGMOID


DEEPSEEK2 = Architecture(
    name="deepseek2",
    family="deepseek_v2",
    keys=(*LATENT_KEYS, Both(_limited), BY_SOFTMAX),
    names=LATENT_NAMES,
    may_join=(EXPERTS_GATE_UP,),
    more=_latent_entries,
    when=lambda file: not _by_sigmoid(file),
)
DEEPSEEK3 = Architecture(
    name="deepseek2",
    family="deepseek_v3",
    keys=(*LATENT_KEYS, PREDICTORS, BY_SIGMOID),
    names=LATENT_NAMES,
    may_join=(EXPERTS_GATE_UP,),
    more=_latent_entries,
    predicts=True,
    when=_by_sigmoid,
)

STARCODER2 = Architecture(
    name="starcoder2",
    family="starcoder2",
    keys=(
        *DIMENSIONS,
        Heads(),
        Rope(),
        Number(LAYER_NORM, "norm_epsilon", most=1.0),
        Stored("use_bias", ("blk.0.attn_q.bias", "blk.0.attn_qkv.bias")),
    ),
    may_join=(QKV,),
    unsaid={"window": "attention to all tokens"},
)
# A file does not say which gelu: GPT-NeoX-20B has the tanh form, which llama.cpp takes for all, Pythia the exact one.
GPTNEOX = Architecture(
    name="gptneox",
    family="gpt_neox",
    constants={"hidden_act": "gelu_new"},
    keys=(
        *DIMENSIONS,
        LAYOUT,
        Heads(kv="", width=""),
        Rope(theta="rotary_emb_base", fraction="rotary_pct"),
        Number(LAYER_NORM, "layer_norm_eps", most=1.0),
        Flag("use_parallel_residual", "use_parallel_residual", default=True),
        Stored("attention_bias", ("blk.0.attn_qkv.bias",)),
    ),
    joined=(QKV,),
    unsaid={"activation": "the tanh form of gelu"},
)


def _falcon_generation(header: Header) -> None:
    """Says which of the family's kinds of block the file has: its norms and key heads tell."""
    kv_heads, two = header.config.pop("num_kv_heads"), header.stores("blk.0.attn_norm_2.weight")
    newer = two or kv_heads > 1
    header.config |= {"new_decoder_architecture": newer, "multi_query": not newer, "parallel_attn": True}
    header.config |= {"num_ln_in_parallel_attn": 2 if two else 1}
    if newer:
        header.says("num_kv_heads", kv_heads, "attention.head_count_kv")


def _write_falcon_heads(writing: Writing) -> None:
    """Says how many key heads there are: one where all queries share it."""
    if writing.config.get("multi_query") and not writing.config.get("new_decoder_architecture"):
        writing.says("attention.head_count_kv", 1)


def _falcon_norms(spec: Model, here: str, there: str, stored: Collection[str]) -> list[Entry]:
    """Where attention has a norm of its own, that is the second."""
    if len(spec.blocks[0].branches) == 1:
        return []
    return [
        entry(f"{here}{branch}.norm.{kind}", f"{there}{name}.{kind}")
        for branch, name in (("attention", "attn_norm_2"), ("ffn", "attn_norm"))
        for kind in ("weight", "bias")
    ]


# Published models have the exact gelu; llama.cpp computes the tanh form for this family and for mpt.
FALCON = Architecture(
    name="falcon",
    family="falcon",
    keys=(
        Size("block_count", "num_hidden_layers", most=MOST_LAYERS),
        Size("context_length", "max_position_embeddings"),
        Size("embedding_length", "hidden_size"),
        Size("feed_forward_length", "ffn_hidden_size"),
        Vocabulary(),
        LAYOUT,
        Heads(kv="num_kv_heads", width=""),
        Both(_falcon_generation, _write_falcon_heads),
        Rope(),
        Number(LAYER_NORM, "layer_norm_epsilon", most=1.0),
        Stored("bias", ("blk.0.attn_qkv.bias",)),
    ),
    joined=(QKV,),
    more=_falcon_norms,
)
BLOOM = Architecture(
    name="bloom",
    family="bloom",
    keys=(
        Size("block_count", "n_layer", most=MOST_LAYERS),
        Size("context_length", "seq_length"),
        Size("embedding_length", "hidden_size"),
        Size("feed_forward_length", "n_inner", otherwise=lambda config: 4 * config["hidden_size"]),
        Vocabulary(),
        Heads(n_heads="n_head", kv="", width=""),
        Number(LAYER_NORM, "layer_norm_epsilon", most=1.0),
    ),
    joined=(QKV,),
)


def _mpt_width(header: Header) -> None:
    """Reads that the feed-forward part is 4 times as wide as the stream, and the slope of ALiBi."""
    d_model, key = header.config["d_model"], header.key("feed_forward_length")
    header.reader.require(key, header.reader.size(key) == 4 * d_model, f"{4 * d_model}, 4 times embedding_length")
    slope = header.reader.number(header.key("attention.max_alibi_bias"), default=8.0)
    header.says("attn_config", {"alibi": True, "alibi_bias_max": slope}, "attention.max_alibi_bias")


def _write_mpt_width(writing: Writing) -> None:
    """Says the width of the feed-forward part and the slope."""
    writing.says("feed_forward_length", 4 * writing.config["d_model"])
    writing.says_number("attention.max_alibi_bias", writing.config["attn_config"].get("alibi_bias_max", 8.0))


# The published models have the exact gelu, as those of falcon.
MPT = Architecture(
    name="mpt",
    family="mpt",
    keys=(
        Size("block_count", "n_layers", most=MOST_LAYERS),
        Size("context_length", "max_seq_len"),
        Size("embedding_length", "d_model"),
        Vocabulary(),
        Heads(d_model="d_model", n_heads="n_heads", kv="", width=""),
        Both(_mpt_width, _write_mpt_width),
        Number(LAYER_NORM, "layer_norm_epsilon", most=1.0),
        Only("attention.clamp_kqv", (0,), "clipped queries, keys and values are not read"),
    ),
    joined=(QKV,),
)
PHI2 = Architecture(
    name="phi2",
    family="phi",
    keys=(
        *DIMENSIONS,
        Heads(width=""),
        Rope(fraction="partial_rotary_factor"),
        Number(LAYER_NORM, "layer_norm_eps", most=1.0),
    ),
    may_join=(QKV,),
)
SMOLLM3 = Architecture(name="smollm3", family="smollm3", keys=(*USUAL, BIASED), adjacent=True, may_join=(QKV,))


def _olmo_eps(header: Header) -> None:
    """Reads the epsilon of norms, which is fixed in this family."""
    key = header.key(LAYER_NORM)
    eps = shortest(header.reader.number(key, most=1.0))
    header.reader.require(key, eps == 1e-5, "1e-05, as every norm of this family has")


OLMO = Architecture(
    name="olmo",
    family="olmo",
    keys=(
        *DIMENSIONS,
        Heads(),
        Rope(),
        Both(_olmo_eps, lambda writing: writing.says_number(LAYER_NORM, 1e-5)),
        Only("attention.clamp_kqv", (0,), "clipped queries, keys and values are not read"),
    ),
    adjacent=True,
    may_join=(QKV,),
)


def _bert_tables(header: Header) -> None:
    """Reads the rows of the tables of positions and of token types."""
    context, key = header.config["max_position_embeddings"], header.key("context_length")
    stored = rows_of(header.file, "position_embd.weight", context)
    header.reader.require(key, context <= stored, f"at most the {stored} positions stored")
    header.says("max_position_embeddings", stored, "context_length")
    header.says("type_vocab_size", rows_of(header.file, "token_types.weight", 2), "token_types.weight")


def _write_bert_tables(writing: Writing) -> None:
    """Says how many token types there are, as its converter does."""
    writing.metadata["tokenizer.ggml.token_type_count"] = writing.config["type_vocab_size"]


# Files of RoBERTa's kind are written so too: their table of positions begins with the first that is used.
BERT = Architecture(
    name="bert",
    family="bert",
    keys=(
        *DIMENSIONS,
        Heads(kv="", width=""),
        Number(LAYER_NORM, "layer_norm_eps", most=1.0),
        Only("attention.causal", (False,), "tokens of this family see those after them"),
        Irrelevant("pooling_type", "how a sentence's vector is made of the states"),
        Both(_bert_tables, _write_bert_tables),
    ),
    constants={"architectures": ["BertModel"], "add_pooling_layer": False},  # files hold no head and no pooler
    names={"attention.sum_norm": "attn_output_norm", "ffn.sum_norm": "layer_output_norm"},
    may_join=(QKV,),
)


def _t5_feed_forward(header: Header) -> None:
    """Reads the kind of feed-forward part: with a gate it is T5 1.1's, without it the first T5's."""
    gated = header.stores("enc.blk.0.ffn_gate.weight")
    header.says("feed_forward_proj", "gated-gelu" if gated else "relu", "feed_forward_length")


def _t5_eps(header: Header) -> None:
    """Reads the epsilon of norms, which files say under both names."""
    keys = [header.key(f"attention.layer_norm_{kind}epsilon") for kind in ("rms_", "")]
    found = [shortest(header.reader.number(key, most=1.0)) for key in keys if header.given(key.partition(".")[2])]
    header.reader.require(keys[1], len(set(found)) == 1, f"the same as {keys[0]}")
    header.says("layer_norm_epsilon", found[0], "attention.layer_norm_rms_epsilon")


def _t5_decoder(header: Header) -> None:
    """Reads how deep the decoder is, as deep as the encoder where the file does not say, and what it begins with."""
    layers = header.config["num_layers"]
    key = header.key("decoder_block_count")
    header.says("num_decoder_layers", header.reader.size(key, default=layers, most=MOST_LAYERS), "decoder_block_count")
    if header.given("decoder_start_token_id"):
        start = header.reader.size(header.key("decoder_start_token_id"), least=0)
        header.says("decoder_start_token_id", start, "decoder_start_token_id")


def _write_t5_eps(writing: Writing) -> None:
    """Says the epsilon under both names."""
    for kind in ("rms_", ""):
        writing.says_number(f"attention.layer_norm_{kind}epsilon", writing.config["layer_norm_epsilon"])


def _write_t5_decoder(writing: Writing) -> None:
    """Says how deep the decoder is and what it begins with."""
    for suffix, key in (("decoder_block_count", "num_decoder_layers"), ("decoder_start_token_id",) * 2):
        writing.says(suffix, writing.config.get(key))


T5 = Architecture(
    name="t5",
    family="t5",
    keys=(
        Size("block_count", "num_layers", most=MOST_LAYERS),
        Size("context_length", "n_positions"),
        Size("embedding_length", "d_model"),
        Size("feed_forward_length", "d_ff"),
        Vocabulary(),
        Heads(d_model="d_model", n_heads="num_heads", kv="", width="d_kv"),
        Size("attention.relative_buckets_count", "relative_attention_num_buckets"),
        Both(_t5_eps, _write_t5_eps),
        Both(_t5_decoder, _write_t5_decoder),
        Both(_t5_feed_forward),
    ),
    names={"attention.body.o": "attn_o"},
    ignored={r"dec\.blk\.0\.cross_attn_rel_b\.weight": "cross-attention has no positions"},
    sides=("dec.", "enc."),
)

ARCHITECTURES: tuple[Architecture, ...] = (
    LLAMA,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3MOE,
    GEMMA,
    GEMMA2,
    GEMMA3,
    PHI2,
    PHI3,
    OLMO,
    OLMO2,
    OLMOE,
    GRANITE,
    COMMAND_R,
    SMOLLM3,
    STARCODER2,
    DEEPSEEK,
    DEEPSEEK2,
    DEEPSEEK3,
    GLM4MOE,
    GPT_OSS,
    LLAMA4,
    GPTNEOX,
    FALCON,
    BLOOM,
    MPT,
    GPT2,
    BERT,
    T5,
)
