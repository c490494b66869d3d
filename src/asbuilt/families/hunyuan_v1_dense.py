"""The hunyuan_v1_dense family: llama with a norm of each head's queries and keys after RoPE, whose base may be raised.

Tencent Hunyuan 2025, the model cards and published code of Hunyuan 0.5B to 7B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from asbuilt.families import llama
from asbuilt.families.shared.key import Irrelevant, Key, Only, Values, but, eps
from asbuilt.families.shared.names import STEMS, Names
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.families.shared.rotary import KINDS, MOST_FACTOR, Rope, read_rotary
from asbuilt.families.shared.sizes import ATTENTION_BIAS, NullableHeadWidth, sizes
from asbuilt.spec import Scaling

QK_NORMS = {"attention.body.q_norm": "self_attn.query_layernorm", "attention.body.k_norm": "self_attn.key_layernorm"}


class RaisedRope(Rope):
    """The RoPE keys; `dynamic` with an `alpha` is a base times alpha^(d / (d - 2)), whatever the length of a text."""

    def read(self, reader: ConfigReader, values: Values) -> None:
        """Reads RoPE; the base is written as it is used."""
        found, width = {"alpha": 1.0}, values["d_head"]

        def raised(inner: ConfigReader, *given: int) -> Scaling | None:
            if not inner.given("alpha"):
                return KINDS["dynamic"](inner, *given)
            found["alpha"] = inner.number("alpha", most=MOST_FACTOR)
            inner.require("alpha", width > 2, "none unless heads have more than 2 numbers")
            inner.irrelevant("factor", "alpha says it")
            for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
                inner.irrelevant(key, "of YaRN, which this is not")
            return None

        kinds: dict[str, Callable[..., Scaling | None]] = {**KINDS, "dynamic": raised}
        rotary = read_rotary(reader, width, values["max_positions"], default_theta=self.theta, kinds=kinds)
        base = rotary.theta if found["alpha"] == 1.0 else rotary.theta * found["alpha"] ** (width / (width - 2))
        values["rotary"] = replace(rotary, theta=base)


def keys(**usual: Any) -> tuple[Key, ...]:  # noqa: ANN401
    """Returns the keys that both kinds of the family share; `usual` are the class's sizes."""
    return (
        *but(sizes(**usual), d_head=NullableHeadWidth(), rotary=RaisedRope()),
        eps("rms_norm_eps", 1e-5),
        ATTENTION_BIAS,
        Irrelevant("head_dim says it", "attention_head_dim"),
        Only("mlp_bias", False, reason="feed-forward parts have no biases here"),
        Only("use_qk_norm", True, reason="each head's queries and keys are normed in this family"),
        Only("use_cla", False, reason="keys and values shared between layers are not supported in this family"),
        Irrelevant("of keys and values shared between layers, which are not used", "cla_share_factor"),
        Only("use_rotary_pos_emb", True, reason="this family has RoPE"),
        Only("use_mla", False, reason="latent attention is not supported in this family"),
        Only("norm_type", "rms", "hf_rms", reason="this family has RMSNorm"),
        Only("add_classification_head", False, reason="only the language model's head is read"),
        Irrelevant("of a classifier, which is not read", "class_num", "pool_type"),
        Irrelevant("how logits are computed, not what", "enable_lm_head_fp32"),
        Irrelevant("token numbers: the tokenizer uses them", "org_vocab_size", "pad_id", "im_end_id", "im_start_id"),
        Irrelevant("token numbers: the tokenizer uses them", "text_start_id", "text_end_id", "mask_init_id", "sep_id"),
        Irrelevant("token numbers: the tokenizer uses them", "eod_token_id", "im_newline_id"),
    )


BUILD = partial(llama.build, head_norms=True, rotate_first=True)
FAMILY = replace(
    llama.FAMILY,
    name="hunyuan_v1_dense",
    heads=("HunYuanDenseV1ForCausalLM",),
    padding=0,
    # defaults as in transformers' HunYuanDenseV1Config
    keys=keys(n_vocab=290943, d_model=4096, d_ff=11008, n_layers=32, n_heads=32, context=2048),
    build=BUILD,
    names=Names(stems=STEMS | QK_NORMS),
)
