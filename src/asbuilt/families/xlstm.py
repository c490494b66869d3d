"""The xlstm family: xLSTM 7B, the mLSTM in the place of attention. Beck et al. 2025 (arXiv 2503.13427).

The sLSTM of the first paper (arXiv 2405.04517), whose hidden state its gates read, is in no model of this family.
transformers 5.24 computes the mLSTM itself where the package xlstm is not installed; it gives its cache's states the
dtype of the weights, and keys a multiple of 64 wide whatever the layers have, so that it continues texts only where
these agree.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.hybrid import block, first
from asbuilt.families.shared.key import Irrelevant, Number, Only, Size, Value, Values, depth, eps
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import Parts
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.state_space import UNLIMITED
from asbuilt.families.shared.table import Layout, Reshaped, TensorTable
from asbuilt.spec import GatedMLP, Head, HeadNorm, LanguageModel, MatrixLSTM, Model, RMSNorm, TokenEmbedding
from asbuilt.spec.matrix_lstm import LARGEST_CAP
from asbuilt.spec.part import LARGEST_SIZE


def build(
    *,
    n_vocab: int,
    d_model: int,
    n_layers: int,
    n_heads: int,
    d_keys: int,
    d_values: int,
    d_ff: int,
    eps: float,
    cell_eps: float,
    cap: float,
    logit_softcap: float,
    name: str = "model",
) -> LanguageModel:
    """Returns the model of these sizes; `d_keys` and `d_values` are those of all heads together."""
    norm, d_value = RMSNorm(d=d_model, eps=eps), d_values // n_heads
    mixer = MatrixLSTM(
        d_model=d_model,
        n_heads=n_heads,
        d_key=d_keys // n_heads,
        d_value=d_value,
        norm=HeadNorm(d=d_value, n_heads=n_heads, eps=eps),
        cap=cap,
        eps=cell_eps,
    )
    return LanguageModel(
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=(block(mixer, GatedMLP(d_model=d_model, d_ff=d_ff, activation="silu"), norm),) * n_layers,
        norm=norm,
        head=Head(d_model=d_model, n_vocab=n_vocab, softcap=logit_softcap),
        max_positions=UNLIMITED,
        name=name,
    )


FACTORS = "carried, since several factors are the same width, rounded down"


def factor(width: int, d_model: int) -> float:
    """Returns a factor with which int(d_model * factor) is the width."""
    found = width / d_model
    return found if int(d_model * found) == width else math.nextafter(found, math.inf)


@dataclass(frozen=True, eq=False, repr=False)
class Width(Value):
    """A width of all heads together, as a factor on the stream's, rounded down."""

    def get(self, reader: ConfigReader, default: Any, null: Any, values: Values) -> int:  # noqa: ANN401
        """Returns the width."""
        return int(values["d_model"] * reader.number(self.key, default=default))

    def check(self, reader: ConfigReader, name: str, values: Values) -> None:
        """Raises InputError where the heads do not divide it."""
        width, heads = values[self.into], values["n_heads"]
        whole = 0 < width <= LARGEST_SIZE and width % heads == 0
        reader.require(
            name, whole, f"a factor that makes hidden_size = {values['d_model']} a multiple of {heads} heads"
        )

    def write(self, parts: Parts) -> dict[str, Any]:
        """Returns the factor, as it was read if it still gives the width."""
        width, said = self.found(parts), parts.carried.get(self.key)
        kept = said is not None and int(parts.d_model * said) == width
        return {self.key: said if kept else factor(width, parts.d_model)}


class _Again:
    """A key that repeats what another says, or is missing or null."""

    def __init__(self, key: str, into: str, repeats: str) -> None:
        self.key, self.into, self.repeats = key, into, repeats

    def read(self, reader: ConfigReader, values: Values) -> None:
        reader.only(self.key, values[self.into], None, reason=f"it repeats {self.repeats}")

    def write(self, parts: Parts) -> dict[str, Any]:
        return {} if parts.carried.get(self.key) is None else {self.key: getattr(parts, self.into)}


INNER = {"ffn_proj_factor": 2.667, "ffn_round_up_to_multiple_of": 64}  # both keys with their defaults


class _Inner:
    """The feed-forward's width: a factor on the stream's, rounded up to a multiple.

    Both keys are carried, since several pairs say the same.
    """

    def read(self, reader: ConfigReader, values: Values) -> None:
        (key, wide), (of, multiple) = INNER.items()
        wide, multiple = reader.number(key, default=wide), reader.size(of, default=multiple)
        values["d_ff"] = rounded_up(values["d_model"] * wide, int(multiple))
        reader.require(key, 0 < values["d_ff"] <= LARGEST_SIZE, f"a factor that makes a width of 1 to {LARGEST_SIZE}")
        for name in INNER:
            reader.irrelevant(name, "carried, since several pairs of a factor and a multiple are the same width")

    def write(self, parts: Parts) -> dict[str, Any]:
        wide, multiple = (parts.carried.get(name, usual) for name, usual in INNER.items())
        if rounded_up(parts.d_model * wide, int(multiple)) == parts.d_ff:
            return {}
        return dict(zip(INNER, (factor(parts.d_ff, parts.d_model), 1), strict=True))


def rounded_up(width: float, multiple: int) -> int:
    """Returns the width rounded up to a multiple, as the published code does."""
    return int((width + multiple - 1) // multiple * multiple)


MIXER = {
    "q": "q",
    "k": "k",
    "v": "v",
    "gate": "ogate_preact",
    "input_gate": "igate_preact",
    "forget_gate": "fgate_preact",
    "norm": "multihead_norm",
    "o": "out_proj",
}
STEMS = {
    "mixer.norm": "norm_mlstm",
    "ffn.norm": "norm_ffn",
    **{f"mixer.body.{ours}": f"mlstm_layer.{theirs}" for ours, theirs in MIXER.items()},
    "ffn.body.gate": "ffn.proj_up_gate",
    "ffn.body.up": "ffn.proj_up",
    "ffn.body.down": "ffn.proj_down",
}


def _capped(softcap: float | None) -> float:
    """Returns the cap of a head; raises InputError for one without."""
    if softcap is None:
        raise InputError("xlstm needs a cap on logits here", field="head.softcap", value=None)
    return softcap


def _names(spec: Model, family: str) -> TensorTable:
    """Returns the names; gains of heads are stored as one vector."""
    bodies = (branch.body for block in spec.blocks for branch in block.branches)
    mixer = next((body for body in bodies if isinstance(body, MatrixLSTM)), None)
    layouts: dict[str, Layout] = {}
    if mixer is not None:
        layouts["mixer.body.norm"] = Reshaped((mixer.n_heads, mixer.d_value), (mixer.d_output,))
    outside = {"embedding": "backbone.embeddings", "norm": "backbone.out_norm", "head": "lm_head"}
    return Names(stems=STEMS, outside=outside, layers="backbone.blocks", layouts=layouts, ignored={})(spec, family)


FAMILY = Family(
    name="xlstm",
    prefix="backbone.",
    heads=("xLSTMForCausalLM",),
    padding=1,
    keys=(  # defaults as in transformers' xLSTMConfig
        Size("vocab_size", "n_vocab", default=50304),
        Size("hidden_size", "d_model", default=4096),
        _Again("embedding_dim", "d_model", "hidden_size"),
        depth("num_hidden_layers", 32),
        _Again("num_blocks", "n_layers", "num_hidden_layers"),
        Size("num_heads", "n_heads", default=8, at=first(MatrixLSTM, "n_heads")),
        Width("qk_dim_factor", "d_keys", default=0.5, carried=FACTORS, at=first(MatrixLSTM, "d_keys")),
        Width("v_dim_factor", "d_values", default=1.0, carried=FACTORS, at=first(MatrixLSTM, "d_output")),
        _Inner(),
        eps("norm_eps", 1e-6),
        Number("eps", "cell_eps", default=1e-6, at=first(MatrixLSTM, "eps")),
        Number("gate_soft_cap", "cap", default=15.0, most=LARGEST_CAP, at=first(MatrixLSTM, "cap")),
        Number("output_logit_soft_cap", "logit_softcap", default=30.0, back=_capped),
        Only("tie_word_embeddings", False, reason="this family has a head of its own"),
        Only("use_bias", False, reason="RMSNorms with biases are not supported"),
        Only("add_out_norm", True, reason="transformers norms the last layer's stream whatever this says"),
        Only("add_post_blocks_norm", True, reason="this family has a norm after the last layer"),
        Only("add_post_norm", False, reason="this family has no norms after branches"),
        Only("add_qk_norm", False, reason="this family has no norms of q and k"),
        Only("weight_mode", "single", reason="transformers cannot build models whose maps are stored as one"),
        Irrelevant(
            "how it is computed, not what",
            "norm_reduction_force_float32",
            "chunkwise_kernel",
            "sequence_kernel",
            "step_kernel",
            "mode",
            "chunk_size",
            "return_last_states",
            "autocast_kernel_dtype",
            "inference_state_dtype",
            "max_inference_chunksize",
            "add_forward_backend_padding",
        ),
        Irrelevant("only of training and its initial weights", "add_embedding_dropout", "igate_bias_init_range"),
        Irrelevant("norm_eps is what is read", "cell_norm_eps"),
        Irrelevant("v_dim_factor and num_heads say it", "head_dim"),
        Irrelevant("widths are factors on the stream's", "mlstm_round_up_to_multiple_of"),
        Irrelevant("of the tokenizer", "force_bos_token_insert"),
    ),
    build=build,
    names=_names,
)
