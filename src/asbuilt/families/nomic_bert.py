"""The nomic_bert family: bert with RoPE in place of positions, gated feed-forwards, and no biases in its blocks.

Nussbaum et al. 2024 (arXiv 2402.01613); nomic-embed-text is published under it. Names on disk are those of its own
code, whose configs spell most keys as GPT-2's do. There the gate is the second of two matrices.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Unpack

from asbuilt.families import bert
from asbuilt.families.shared.dimensions import Sizes, sized
from asbuilt.families.shared.ends import End
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Check, Irrelevant, Only, Size, activation, depth, eps
from asbuilt.families.shared.names import Fused, Names
from asbuilt.families.shared.rotary import Rope
from asbuilt.families.shared.sizes import HeadWidth
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import Block, Branch, HeadTransform, LayerNorm, Model, TextEncoder, TiedHead, TypeEmbedding

STEMS = {
    "attention.body.o": "attn.out_proj",
    "attention.sum_norm": "norm1",
    "ffn.body.up": "mlp.fc11",
    "ffn.body.gate": "mlp.fc12",
    "ffn.body.down": "mlp.fc2",
    "ffn.sum_norm": "norm2",
}
OUTSIDE = {
    "embedding": "nomic_bert.embeddings.word_embeddings",
    "types": "nomic_bert.embeddings.token_type_embeddings",
    "embedding_norm": "nomic_bert.emb_ln",
    "head.transform.dense": "cls.predictions.transform.dense",
    "head.transform.norm": "cls.predictions.transform.layer_norm",
    "head": "cls.predictions",
}
# The keys of the family's own code, and what transformers calls them.
OLDER = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "activation_function": "hidden_act",
}


def build(*, n_types: int, eps: float, masked: bool = True, **sizes: Unpack[Sizes]) -> Model:
    """Returns the model of these sizes, `masked` with the masked language model's head."""
    made = sized(sizes)
    d_model, norm = made.d_model, LayerNorm(d=made.d_model, eps=eps)
    bodies = {"attention": made.attention(causal=False), "ffn": made.gated()}
    both = tuple(Branch(name=name, body=body, sum_norm=norm) for name, body in bodies.items())
    transform = HeadTransform(d_model=d_model, activation=made.activation, eps=eps)
    return made.whole(
        TextEncoder,
        (Block(branches=both),) * made.n_layers,
        None,
        types=TypeEmbedding(n_types=n_types, d_model=d_model),
        embedding_norm=norm,
        head=TiedHead(d_model=d_model, n_vocab=made.n_vocab, bias=True, transform=transform) if masked else None,
    )


def _newer(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config with transformers' keys in place of the older ones, where it has none of the former."""
    renamed = {OLDER.get(key, key) if OLDER.get(key) not in config else key: said for key, said in config.items()}
    return renamed | ({"hidden_act": "silu"} if renamed.get("hidden_act") == "swiglu" else {})


def _names(spec: Model, family: str) -> TensorTable:
    own = Names(
        stems=STEMS,
        outside=OUTSIDE,
        layers="nomic_bert.encoder.layers",
        fused={"attn.Wqkv": Fused.qkv()},
        ignored=bert.BUFFERS | {r"(.*\.)?rotary_emb\.inv_freq": "rotary frequencies, computed from the config"},
    )
    again = {"cls.predictions.decoder.weight": "embedding.weight", "cls.predictions.decoder.bias": "head.bias"}
    older, in_memory = (("nomic_bert.", "bert."),), (("nomic_bert.encoder.", "nomic_bert."),)  # of transformers' model
    duplicates = again if spec.head is not None else {}
    return replace(own(spec, family), duplicates=duplicates, spellings=(older, in_memory))


def _ends(name: str) -> dict[str, End]:
    pooled = {"head": "classifier", "head.transform.dense": "nomic_bert.pooler.dense"}
    return {
        f"{name}Model": End(),
        f"{name}ForSequenceClassification": End(labels="first", transform=bert.pooler("tanh"), stems=pooled),
        f"{name}ForTokenClassification": End(labels="all", stems={"head": "classifier"}),
    }


FAMILY = Family(
    name="nomic_bert",
    prefix="nomic_bert.",
    heads=("NomicBertForMaskedLM", "NomicBertForPreTraining"),  # the second in the family's own code
    ends=_ends,
    causal=False,
    prepare=_newer,
    keys=(  # defaults as in transformers' NomicBertConfig
        *bert.MASKED,
        Size("hidden_size", "d_model", default=768),
        Size("num_attention_heads", "n_heads", default=12),
        HeadWidth(),
        Size("max_position_embeddings", "max_positions", default=2048),
        Rope(theta=1000.0),
        Size("vocab_size", "n_vocab", default=30528),
        depth("num_hidden_layers", 12),
        Size("intermediate_size", "d_ff", default=3072),
        Size("type_vocab_size", "n_types", default=2, at="types.n_types"),
        replace(eps("layer_norm_eps", 1e-12), at="first.sum_norm.eps"),
        activation(default="silu", tanh="gelu_new"),
        Size("pad_vocab_size_multiple", "multiple", default=1, at=lambda parts: 1),
        Check(
            "pad_vocab_size_multiple",
            (lambda values: values["n_vocab"] % values.pop("multiple") == 0, "a divisor of vocab_size"),
        ),
        Irrelevant(
            "how it is computed or trained, not what",
            *("attention_probs_dropout_prob", "dense_seq_output", "use_flash_attn", "use_xentropy", "fused_bias_fc"),
            *("fused_dropout_add_ln", "reorder_and_upcast_attn", "max_trained_positions"),
            *(f"summary_{key}" for key in ("type", "use_proj", "activation", "proj_to_labels", "first_dropout")),
        ),
        Only("causal", False, reason="attention of this family is bidirectional"),
        Only("prenorm", False, reason="norms follow the sums in this family"),
        Only("use_rms_norm", False, None, reason="norms are LayerNorm in this family"),
        Only("parallel_block", False, reason="branches follow each other in this family"),
        Only("parallel_block_tied_norm", False, reason="branches follow each other in this family"),
        Only("qkv_proj_bias", False, reason="blocks of this family have no biases"),
        *(Only(f"mlp_fc{n}_bias", False, reason="blocks of this family have no biases") for n in (1, 2)),
        Only("scale_attn_weights", True, reason="scores are scaled in this family"),
        Only("scale_attn_by_inverse_layer_idx", False, reason="all layers of this family are alike"),
        Only("rotary_emb_fraction", 1.0, reason="RoPE covers whole heads in this family"),
        Only("rotary_emb_interleaved", False, reason="RoPE pairs a head's halves in this family"),
        Only("rotary_emb_scale_base", None, reason="RoPE is not scaled by distance in this family"),
        Only("rotary_scaling_factor", None, reason="RoPE is not scaled beyond the trained length"),
    ),
    build=build,
    names=_names,
)
