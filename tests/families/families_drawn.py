"""Configs of the two families, drawn by hypothesis: small dimensions, every field varied."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

WIDTHS = st.sampled_from([2, 4, 6, 8, 16])
EPS = st.sampled_from([1e-6, 1e-5, 3e-4])
FACTORS = st.floats(1.0, 64.0)
ACTIVATIONS = st.sampled_from(["silu", "swish", "relu", "gelu", "gelu_new", "gelu_pytorch_tanh"])


@st.composite
def scalings(draw: st.DrawFn, d_head: int, context: int) -> dict[str, Any] | None:
    """A rope_scaling object of any kind that is read, or null."""
    kinds = ["none", "default", "linear", "yarn", "llama3", "longrope", *(["dynamic"] if d_head > 2 else [])]
    kind = draw(st.sampled_from(kinds))
    spelling = draw(st.sampled_from(["rope_type", "type"]))
    scaling: dict[str, Any] = {spelling: kind}
    if kind == "none":
        return None
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        scaling["factor"] = draw(FACTORS)
    if kind in ("yarn", "llama3"):
        scaling["original_max_position_embeddings"] = draw(st.integers(1, context))
    if kind == "llama3":
        scaling |= {"low_freq_factor": draw(st.floats(0.5, 1.0)), "high_freq_factor": draw(st.floats(1.5, 8.0))}
    if kind == "yarn":
        optional: dict[str, st.SearchStrategy[Any]] = {
            "beta_fast": st.none() | st.floats(8.0, 64.0),
            "beta_slow": st.none() | st.floats(0.5, 4.0),
            "mscale": st.floats(0.5, 2.0),
            "mscale_all_dim": st.floats(0.5, 2.0),
            "attention_factor": st.none() | st.floats(0.5, 2.0),
            "truncate": st.booleans(),
        }
        scaling |= draw(st.fixed_dictionaries({}, optional=optional))
    if kind == "longrope":
        factors = draw(st.lists(st.floats(1.0, 64.0), min_size=d_head // 2, max_size=d_head // 2))
        scaling |= {"short_factor": factors, "long_factor": factors, "attention_factor": 1.0}
    return scaling


@st.composite
def llama_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A llama config.json, older or newer spelling, with or without each optional key."""
    heads, kv_heads = draw(st.sampled_from([(4, 1), (4, 2), (6, 3), (3, 3)]))
    d_head = draw(WIDTHS)
    context = draw(st.integers(8, 4096))
    config: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": draw(st.integers(1, 300)),
        "hidden_size": heads * d_head,
        "intermediate_size": draw(st.integers(1, 64)),
        "num_hidden_layers": draw(st.integers(1, 4)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": context,
        "rms_norm_eps": draw(EPS),
        "hidden_act": draw(ACTIVATIONS),
        "attention_bias": draw(st.booleans()),
        "mlp_bias": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "initializer_range": 0.02,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
    }
    if draw(st.booleans()):
        d_head = draw(WIDTHS)
        config["head_dim"] = d_head
    theta, scaling = draw(st.sampled_from([500.0, 10000, 1e6])), draw(scalings(d_head, context))
    if draw(st.booleans()):
        return config | {"rope_theta": theta, "rope_scaling": scaling, "torch_dtype": "float16"}
    return config | {"rope_parameters": {"rope_theta": theta, **(scaling or {})}, "dtype": "float16"}


@st.composite
def gpt2_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A gpt2 config.json."""
    heads, d_head, positions = draw(st.integers(1, 4)), draw(st.integers(1, 9)), draw(st.integers(1, 2048))
    return {
        "model_type": "gpt2",
        "vocab_size": draw(st.integers(1, 300)),
        "n_embd": heads * d_head,
        "n_head": heads,
        "n_layer": draw(st.integers(1, 4)),
        "n_inner": draw(st.none() | st.integers(1, 64)),
        "n_positions": positions,
        "n_ctx": draw(st.integers(1, positions)),
        "layer_norm_epsilon": draw(EPS),
        "activation_function": draw(ACTIVATIONS),
        "scale_attn_weights": draw(st.booleans()),
        "scale_attn_by_inverse_layer_idx": draw(st.booleans()),
        "tie_word_embeddings": draw(st.booleans()),
        "summary_type": "cls_index",
    }
