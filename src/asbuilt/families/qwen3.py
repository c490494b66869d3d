"""The qwen3 family: llama's blocks with an RMSNorm over each head's query and key, and qwen2's windows.

Yang et al. 2025 (arXiv 2505.09388). Heads are 128 wide whatever hidden_size / num_attention_heads is.
"""

from __future__ import annotations

from asbuilt.families.qwen2 import WINDOWS
from asbuilt.families.shared.dimensions import Dimensions, pre_norm
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Only
from asbuilt.families.shared.names import QK_NORMS, STEMS, Names
from asbuilt.families.shared.sizes import ATTENTION_BIAS, RMS_EPS, DualChunks, sizes
from asbuilt.spec import Model, RMSNorm

# Keys that say again what the family always is, or that only other programs read.
AGAIN = (
    Only("qkv_bias", lambda values: values["bias"], reason="what attention_bias says"),
    Only("use_qk_norm", True, reason="each head's queries and keys are normed in this family"),
    DualChunks(),
)


def build(
    dimensions: Dimensions, *, eps: float = 1e-6, bias: bool = False, windows: tuple[int | None, ...] = ()
) -> Model:
    """Returns the model of these dimensions; `windows` has one for each layer, or is empty where none has any."""
    norm, of_head = RMSNorm(d=dimensions.d_model, eps=eps), RMSNorm(d=dimensions.head_width, eps=eps)
    ffn = dimensions.gated()
    attentions = [
        dimensions.attention(bias=bias, output_bias=bias, q_norm=of_head, k_norm=of_head, window=w)
        for w in windows or (None,) * dimensions.n_layers
    ]
    return dimensions.model(tuple(pre_norm(attention, ffn, norm) for attention in attentions), norm)


FAMILY = Family(
    name="qwen3",
    heads=("Qwen3ForCausalLM",),
    keys=(  # defaults as in transformers' Qwen3Config
        sizes(
            n_vocab=151936, d_model=4096, d_ff=22016, n_layers=32, n_heads=32, n_kv_heads=32, d_head=128, context=32768
        ),
        RMS_EPS,
        ATTENTION_BIAS,
        *AGAIN,
        WINDOWS,
    ),
    build=build,
    names=Names(stems=STEMS | QK_NORMS),
)
