"""The nemotron_h family: blocks of one branch, which is Mamba-2, attention without positions, a plain MLP or experts.

NVIDIA 2025 (arXiv 2504.03624; Nemotron 3: arXiv 2512.20848). Experts are chosen as in DeepSeek-V3, have no gate, and
in the larger models read a narrower latent vector. Prediction layers, which files name `mtp`, are not built.

transformers' class limits steps to `time_step_min` and above, when it reads a prompt and not when it decodes; NVIDIA's
code and serving engines do not, and this follows them: `time_step_limit` alone limits steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families.shared import experts, state_space
from asbuilt.families.shared.common import MOST_LAYERS
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import Where, every, first
from asbuilt.families.shared.key import (
    DROPPED,
    Flag,
    Irrelevant,
    Number,
    Only,
    Optional,
    Size,
    Values,
    activation,
)
from asbuilt.families.shared.names import NO_BUFFERS, Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import (
    MLP,
    Attention,
    Block,
    Branch,
    Head,
    LanguageModel,
    Mamba2,
    MixtureOfExperts,
    Model,
    RMSNorm,
    Router,
    TokenEmbedding,
)

LETTERS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
WORDS = {name: name for name in LETTERS.values()} | {"linear_attention": "mamba", "full_attention": "attention"}
BODIES = {Mamba2: "M", Attention: "*", MLP: "-", MixtureOfExperts: "E"}


class _Layers:
    """The kind of each layer: a list of words, or one letter each in `hybrid_override_pattern`."""

    pattern, words, count = "hybrid_override_pattern", ("layers_block_type", "layer_types"), "num_hidden_layers"

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads the kinds; raises InputError where two keys disagree."""
        kinds = ["mamba", "moe", "attention", "mlp"]
        listed = reader.spelled(*self.words)
        if reader.given(self.pattern):
            said = reader.config[self.pattern]
            ok = isinstance(said, str) and 0 < len(said) <= MOST_LAYERS and all(letter in LETTERS for letter in said)
            reader.require(self.pattern, ok, f"1 to {MOST_LAYERS} letters, each M, *, - or E")
            kinds = [LETTERS[letter] for letter in said]
        if listed is not None and reader.given(listed):
            said = reader.config[listed]
            ok = isinstance(said, list) and 0 < len(said) <= MOST_LAYERS and all(str(word) in WORDS for word in said)
            reader.require(listed, ok, f"a list of 1 to {MOST_LAYERS} words, each mamba, attention, mlp or moe")
            named = [WORDS[word] for word in said]
            same = not reader.given(self.pattern) or named == kinds
            reader.require(listed, same, f"the same layers as {self.pattern}")
            kinds = named
        reader.only(self.count, len(kinds), None, reason=f"{self.pattern} has {len(kinds)} layers")
        values["layers"], values["n_layers"] = tuple(kinds), len(kinds)

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the pattern, which older and newer readers know."""
        bodies = [block.branches[0].body for block in parts.model.blocks]
        pattern = "".join(BODIES.get(type(body), "?") for body in bodies)
        return {self.pattern: pattern, self.count: len(pattern)} | dict.fromkeys(self.words, DROPPED)


def _has(kind: str) -> Any:  # noqa: ANN401
    """Returns whether some layer is of this kind, of what was read."""
    return lambda values: kind in values["layers"]


def build(
    *,
    layers: tuple[str, ...],
    d_model: int,
    n_vocab: int,
    max_positions: int,
    eps: float,
    mlp_bias: bool,
    activation: Any,  # noqa: ANN401
    name: str = "model",
    **values: Any,  # noqa: ANN401  # those of one kind of layer
) -> LanguageModel:
    """Returns the model with one branch in each block, as `layers` says."""
    norm = RMSNorm(d=d_model, eps=eps)
    plain = {"d_model": d_model, "activation": activation, "bias": mlp_bias}

    def mamba() -> Branch:
        names = ("n_groups", "kernel", "conv_bias", "bias", "dt_min", "dt_max")
        sizes = {"n_heads": values["ssm_heads"], "d_head": values["ssm_head"], "d_state": values["d_state"]}
        own = {key: values[key] for key in names}
        body = state_space.mamba2(d_model, **sizes, output_bias=own["bias"], eps=eps, **own)
        return Branch(name="mixer", body=body, norm=norm)

    def attention() -> Branch:
        sizes = {key: values[key] for key in ("n_heads", "n_kv_heads", "d_head")}
        return Branch(name="attention", body=Attention(d_model=d_model, **sizes), norm=norm)

    def mlp() -> Branch:
        return Branch(name="ffn", body=MLP(d_ff=values["d_ff"], **plain), norm=norm)

    def moe() -> Branch:
        router: Router = values["router"]
        body = MixtureOfExperts(
            d_model=d_model,
            d_ff=values["d_expert"],
            n_experts=router.n_experts,
            activation=activation,
            router=router,
            gating="none",
            shared=MLP(d_ff=values["d_shared"], **plain),
            d_latent=values["d_latent"],
            latent_bias=mlp_bias and values["d_latent"] is not None,
        )
        return Branch(name="ffn", body=body, norm=norm)

    made = {"mamba": mamba, "attention": attention, "mlp": mlp, "moe": moe}
    blocks = {kind: Block(branches=(made[kind](),)) for kind in set(layers)}
    return LanguageModel(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=tuple(blocks[kind] for kind in layers),
        norm=norm,
        head=Head(n_vocab=n_vocab, d_model=d_model),
        max_positions=max_positions,
        name=name,
    )


MAMBA = Where(
    Mamba2,
    _has("mamba"),
    Size("mamba_num_heads", "ssm_heads", default=128, at=first(Mamba2, "n_heads")),
    Size("mamba_head_dim", "ssm_head", default=64, at=first(Mamba2, "d_head")),
    Size("ssm_state_size", "d_state", default=128, at=first(Mamba2, "d_state")),
    Size(
        "n_groups", "n_groups", also=("mamba_n_groups",), default=8, divides="ssm_heads", at=first(Mamba2, "n_groups")
    ),
    Size("conv_kernel", "kernel", also=("mamba_d_conv",), default=4, at=first(Mamba2, "conv.kernel")),
    Flag("use_conv_bias", "conv_bias", also=("mamba_conv_bias",), default=True, at=first(Mamba2, "conv.bias")),
    Flag("use_bias", "bias", default=False, at=first(Mamba2, "bias")),
    state_space.StepLimits(),
)
ATTENTION = Where(
    Attention,
    _has("attention"),
    Size("num_attention_heads", "n_heads", default=32, at=first(Attention, "n_heads")),
    Size(
        "num_key_value_heads",
        "n_kv_heads",
        default=8,
        null=lambda values: values["n_heads"],
        divides="n_heads",
        at=first(Attention, "n_kv_heads"),
    ),
    Size("head_dim", "d_head", also=("attention_head_dim",), default=128, at=first(Attention, "d_head")),
)
EXPERTS = Where(
    MixtureOfExperts,
    _has("moe"),
    experts.corrected(
        *experts.counts("n_routed_experts", "num_local_experts", n_experts=8, top_k=2),
        experts.Groups(n_group=1, topk_group=1, score="two_best"),
        scale=1.0,
    ),
    experts.expert_width(7688),
    Size("moe_shared_expert_intermediate_size", "d_shared", default=7688, at="mixture.shared.d_ff"),
    Optional("moe_latent_size", "d_latent", at="mixture.d_latent"),
)


def _activation(parts: Parts) -> Any:  # noqa: ANN401
    return next((part.activation for part in every(parts, (MLP, MixtureOfExperts))), "relu2")  # type: ignore[attr-defined]  # pyright: ignore


def _bias(parts: Parts) -> bool:
    shared = (part.shared for part in every(parts, MixtureOfExperts) if isinstance(part, MixtureOfExperts))
    return any(isinstance(part, MLP) and part.bias for part in (*every(parts, MLP), *shared))


STEMS = {
    **{f"{branch}.norm": "norm" for branch in ("mixer", "attention", "ffn")},
    **state_space.stems("mixer", "mixer"),
    **{f"attention.body.{part}": f"mixer.{part}_proj" for part in "qkvo"},
    **{f"ffn.body.{part}": f"mixer.{part}_proj" for part in ("up", "down")},
    **{f"ffn.body.shared.{part}": f"mixer.shared_experts.{part}_proj" for part in ("up", "down")},
    "ffn.body.router": "mixer.gate",
    "ffn.body.router.correction": "mixer.gate.e_score_correction_bias",
    "ffn.body.into_latent": "mixer.fc1_latent_proj",
    "ffn.body.from_latent": "mixer.fc2_latent_proj",
}

NAMES = Names(
    stems=STEMS,
    outside={"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    layers="backbone.layers",
    experts={part: f"mixer.experts.{{}}.{part}_proj.weight" for part in ("up", "down")},
    ignored=NO_BUFFERS | {r"mtp\..*": "layers for multi-token prediction, which are not built"},
)


def names(spec: Model, family: str) -> TensorTable:
    """Returns the table; transformers' modules, and what it saved for a while, begin with `model`."""
    return replace(NAMES(spec, family), spellings=((("backbone.", "model."),),))


FAMILY = Family(
    name="nemotron_h",
    heads=("NemotronHForCausalLM",),
    keys=(  # defaults as in transformers' NemotronHConfig
        Size("vocab_size", "n_vocab", default=131072),
        Size("hidden_size", "d_model", default=4096),
        Size("max_position_embeddings", "max_positions", default=4096),
        _Layers(),
        Number("layer_norm_epsilon", "eps", also=("norm_eps", "rms_norm_eps"), default=1e-5, most=1.0),
        Only("tie_word_embeddings", False, None, reason="files of this family store a head"),
        MAMBA,
        ATTENTION,
        Where(MLP, _has("mlp"), Size("intermediate_size", "d_ff", default=21504, at=first(MLP, "d_ff"))),
        EXPERTS,
        Flag("mlp_bias", "mlp_bias", default=False, at=_bias),
        replace(activation("mlp_hidden_act", "relu2"), at=_activation),
        state_space.silu("mamba_hidden_act"),
        state_space.INITIAL,
        state_space.COMPUTED,
        Irrelevant("the heads of Mamba-2 and their width say it", "expand", "time_step_rank"),
        Irrelevant("attention has no positions", "rope_theta", "partial_rotary_factor"),
        Irrelevant("how it is computed, not what", "moe_shared_expert_overlap"),
        Irrelevant(
            "prediction layers are not built",
            "num_nextn_predict_layers",
            "mtp_hybrid_override_pattern",
            "mtp_layers_block_type",
        ),
        Only("mamba_ssm_cache_dtype", "float32", None, reason="states are float32"),
        Only("mamba_proj_bias", False, None, reason="use_bias says it"),
        Only("attention_bias", False, None, reason="attention of this family has no biases"),
        Only("sliding_window", None, reason="attention of this family has no windows"),
        Only("n_shared_experts", 1, None, reason="moe_shared_expert_intermediate_size says how wide it is"),
    ),
    build=build,
    names=names,
    prefix="backbone.",
)
