"""EAGLE-3 draft folders: the config of a llama of one layer, with keys of its own, and names of tensors.

Layout as EAGLE's own code, vLLM and SGLang read it: `fc` fuses three streams, `midlayer` is the layer, `lm_head` scores
`draft_vocab_size` tokens, `d2t` are their offsets, `t2d` marks them. The embedding is the other model's where absent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from asbuilt.errors import InputError
from asbuilt.families.shared.family import Family
from asbuilt.spec import (
    Attention,
    FusedPredictor,
    GatedMLP,
    Head,
    LanguageModel,
    RMSNorm,
    TokenEmbedding,
    stored_weights,
)
from asbuilt.spec.part import LARGEST_SIZE

CLASSES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
# What `eagle_config` may say: what all three programs assume.
ASSUMED: dict[str, bool] = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}
LAYERS = "eagle_aux_hidden_state_layer_ids"
# Keys of the model that it drafts for, which say nothing where windows are off.
WINDOWS: dict[str, tuple[object, ...]] = {"use_sliding_window": (False,), "sliding_window": (None,)}
# The tensors by path, without `.weight`.
NAMES = {
    "embedding": "embed_tokens",
    "fuse": "fc",
    "token_norm": "midlayer.input_layernorm",
    "stream_norm": "midlayer.hidden_norm",
    "attention.q": "midlayer.self_attn.q_proj",
    "attention.k": "midlayer.self_attn.k_proj",
    "attention.v": "midlayer.self_attn.v_proj",
    "attention.o": "midlayer.self_attn.o_proj",
    "ffn_norm": "midlayer.post_attention_layernorm",
    "ffn.gate": "midlayer.mlp.gate_proj",
    "ffn.up": "midlayer.mlp.up_proj",
    "ffn.down": "midlayer.mlp.down_proj",
    "norm": "norm",
    "head": "lm_head",
}
OFFSETS, MARKS = "d2t", "t2d"


@dataclass(frozen=True, kw_only=True)
class Eagle3:
    """What a folder's config says: the layer, and after how many blocks it reads streams, None if unsaid."""

    part: FusedPredictor
    layers: tuple[int, ...] | None = None


def is_eagle3(config: dict[str, Any]) -> bool:
    """Returns whether a config describes such a draft layer."""
    classes = config.get("architectures")
    return isinstance(classes, list) and any(name in CLASSES for name in classes)


def read(config: dict[str, Any], name: str, llama: Family) -> Eagle3:
    """Returns what the config says; raises InputError naming the key at fault, as `read_config` does."""
    rest = dict(config)
    drafted = _size(rest.pop("draft_vocab_size", None), f"{name}: draft_vocab_size")
    target = _size(rest.pop("target_hidden_size", None), f"{name}: target_hidden_size")
    normed = rest.pop("norm_before_residual", False)
    if not isinstance(normed, bool):
        raise InputError(field=f"{name}: norm_before_residual", value=normed, allowed="true or false")
    layers = _layers(rest.pop("eagle_config", None), f"{name}: eagle_config")
    for key, allowed in WINDOWS.items():
        if rest.get(key) in allowed:
            rest.pop(key, None)
            rest.pop("max_window_layers", None)
    spec = llama.read(rest | {"architectures": ["LlamaForCausalLM"]}, name).spec
    assert isinstance(spec, LanguageModel)
    if spec.n_layers != 1:
        raise InputError(field=f"{name}: num_hidden_layers", value=spec.n_layers, allowed="1, the draft layer")
    attention, ffn = (branch.body for branch in spec.blocks[0].branches)
    norm, d_model = spec.norm, spec.d_model
    assert isinstance(spec.embedding, TokenEmbedding)
    assert isinstance(attention, Attention)
    assert isinstance(ffn, GatedMLP)
    assert isinstance(norm, RMSNorm)
    part = FusedPredictor(
        embedding=spec.embedding,
        d_target=target or d_model,
        token_norm=norm,
        stream_norm=norm,
        attention=replace(attention, d_input=2 * d_model),
        ffn_norm=norm,
        ffn=ffn,
        norm=norm,
        head=Head(d_model=d_model, n_vocab=drafted or spec.n_vocab),
        normed=normed,
    )
    return Eagle3(part=part, layers=layers)


def _size(value: object, field: str) -> int | None:
    if value is not None and (type(value) is not int or not 1 <= value <= LARGEST_SIZE):
        raise InputError(field=field, value=value, allowed="a whole number from 1 to 2^31-1, or null")
    return value


def _layers(said: object, field: str) -> tuple[int, ...] | None:
    """Returns the block numbers in `eagle_config`; raises InputError for whatever it says otherwise than assumed."""
    if said is None:
        return None
    if not isinstance(said, dict):
        raise InputError(field=field, value=said, allowed="a JSON object")
    for key, value in said.items():
        if key != LAYERS and (key not in ASSUMED or value is not ASSUMED[key]):
            allowed = f"{str(ASSUMED[key]).lower()}" if key in ASSUMED else f"one of {', '.join((*ASSUMED, LAYERS))}"
            raise InputError(field=f"{field}.{key}", value=value, allowed=allowed)
    found = said.get(LAYERS)
    if not found:
        return None
    if not isinstance(found, list) or len(found) != 3 or any(type(one) is not int for one in found):
        raise InputError(field=f"{field}.{LAYERS}", value=found, allowed="three whole numbers")
    return tuple(found)


def after_blocks(n_layers: int, said: tuple[int, ...] | None) -> tuple[int, int, int]:
    """Returns after how many of a model's blocks its streams are read: 2, half, and all but 3.

    Engines read given numbers in two ways, as these or as one less; others than these are refused, since which is meant
    cannot be known.
    """
    usual = 2, n_layers // 2, n_layers - 3
    if n_layers < 4 or len({*usual}) < 3:
        raise InputError(
            "too few blocks for an EAGLE-3 draft layer", field="draft", value=n_layers, allowed="at least 6"
        )
    if said is not None and said not in (usual, tuple(at - 1 for at in usual)):
        allowed = f"{[*usual]} for {n_layers} blocks"
        raise InputError("engines disagree about other layers", field=LAYERS, value=[*said], allowed=allowed)
    return usual


def names(part: FusedPredictor, stored: Collection[str]) -> dict[str, str]:
    """Returns the stored names by path; raises InputError for missing and unexpected tensors.

    The layer may be named `layers.0` too, names may begin with `model.`, and the embedding may be absent.
    """
    usual = {_usual(name): name for name in stored}
    found = {path: _stored(path) for path, _, _ in stored_weights(part)}
    absent = [name for path, name in found.items() if name not in usual and path != "embedding.weight"]
    unread = [name for short, name in usual.items() if short not in found.values() and short != MARKS]
    if absent or unread:
        said = [f"{word}: {', '.join(few[:5])}" for word, few in (("missing", absent), ("unexpected", unread)) if few]
        raise InputError(f"the tensors are not those of such a layer: {'; '.join(said)}", field="draft")
    return {path: usual[name] for path, name in found.items() if name in usual}


def _stored(path: str) -> str:
    """Returns the usual name of the tensor at a path."""
    stem, _, kind = path.rpartition(".")
    return f"{NAMES[stem]}.{kind}" if stem else OFFSETS


def _usual(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name
