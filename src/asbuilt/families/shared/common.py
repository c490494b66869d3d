"""What all families share: the keys every config may carry, the spellings of activations, the check of a writer."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable
from dataclasses import fields
from itertools import chain
from typing import Any

from asbuilt.dtypes import STORED_FLOATS
from asbuilt.errors import InputError, one_of
from asbuilt.families.shared.reader import ConfigReader
from asbuilt.spec import Activation, Model, Part
from asbuilt.spec.part import MOST_BLOCKS

# The list of blocks is explicit, so their number is bounded before it is made.
MOST_LAYERS = MOST_BLOCKS

ACTIVATION_NAMES: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "relu2": "relu2",
    "gelu": "gelu",
    "quick_gelu": "quick_gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_fast": "gelu_tanh",  # writes sqrt(2/pi) out to ten digits, the same function to float32 rounding
}

_DTYPE_NAMES = {name: dtype for dtype in STORED_FLOATS.values() for name in (dtype, f"torch.{dtype}")}

# reason -> keys, of any config
IRRELEVANT = {
    reason: tuple(keys.split())
    for reason, keys in {
        "names where the config came from": """
            _name_or_path name_or_path _commit_hash transformers_version model_name finetuning_task unsloth_version
            unsloth_fixed license internal_version
        """,
        "token numbers: the tokenizer and generation use them": """
            bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
            decoder_start_token_id forced_bos_token_id forced_eos_token_id tokenizer_class prefix model_max_length
            padding_idx
        """,
        "training only": """
            initializer_range attention_dropout hidden_dropout hidden_dropout_prob dropout resid_pdrop resid_dropout
            embd_pdrop attn_pdrop classifier_dropout gradient_checkpointing label_smoothing neftune_noise_alpha
            router_aux_loss_coef router_z_loss_coef z_loss_coefficient aux_loss_alpha seq_aux
        """,
        "what transformers returns or how it computes, not what": """
            use_cache output_attentions output_hidden_states output_past return_dict torchscript use_bfloat16
            tf_legacy_loss chunk_size_feed_forward _attn_implementation attn_implementation
            _attn_implementation_autoset _flash_attn_2_enabled use_flash_attention_2 experts_implementation
            is_decoder is_composition tie_last_hidden_states cache_implementation keys_to_ignore_at_inference xla_device
            output_router_logits num_logits_to_keep pretraining_tp pretraining_pp
        """,
        "names code or settings of other programs": """
            custom_pipelines transformers.js_config
        """,
        "settings of generation, left in older configs": """
            max_length max_new_tokens min_length do_sample early_stopping num_beams num_beam_groups
            diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
            no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
            return_dict_in_generate remove_invalid_values exponential_decay_length_penalty suppress_tokens
            begin_suppress_tokens task_specific_params min_new_tokens max_time min_p penalty_alpha
            renormalize_logits forced_decoder_ids guidance_scale force_words_ids
        """,
        "describe a classifier, and the head here is the language model's": """
            id2label label2id num_labels _num_labels problem_type
        """,
    }.items()
}


# Where a config says how the weights beside it are stored.
QUANTIZATION = ("quantization_config", "compression_config", "quantization")


def read_common(
    reader: ConfigReader,
    family: str,
    heads: tuple[str, ...] | None,
    *,
    encoder_decoder: bool = False,
    causal: bool = True,
) -> str | None:
    """Reads what every config may carry and returns the stored dtype, None where it is not said.

    `heads` are the class names of the language model, the usual one first; None for a tower, whose class the whole
    model's decides. Raises InputError for another class, and for
    an encoder unless the family is one of `encoder_decoder` models, for none if it is, and for bidirectional attention
    unless the family is not `causal`. How weights are quantised is not what the model is: `read_config`
    keeps it beside.
    """
    reader.known.add("model_type")
    for reason, keys in IRRELEVANT.items():
        for key in keys:
            reader.irrelevant(key, reason)
    _check_architectures(reader, heads)
    reader.irrelevant("auto_map", f"names code beside the weights, which is never imported: {family} is known here")
    for key in QUANTIZATION:
        said = reader.config[key] if reader.given(key) else {"": None}
        reader.require(key, isinstance(said, dict) and bool(said), "an object that says how weights are packed")
        method = said.get("quant_method") if isinstance(said, dict) else None
        reader.require(key, method is None or isinstance(method, str), "an object whose quant_method is a name")
    if encoder_decoder:
        reader.only("is_encoder_decoder", True, reason="only the model with encoder and decoder is read")
    else:
        reader.only("is_encoder_decoder", False, None, reason="only the decoder-only model is read")
    reader.only(
        "is_causal", causal, None, reason=f"attention of this family is {'causal' if causal else 'bidirectional'}"
    )
    reader.only("add_cross_attention", False, None, reason="cross-attention is not supported in this family")
    reader.only("cross_attention_hidden_size", None, reason="cross-attention is not supported in this family")
    reader.only("tie_encoder_decoder", False, None, reason="only the decoder-only model is read")
    reader.only("pruned_heads", {}, None, reason="pruned heads change the shapes of single layers")
    return _dtype(reader)


def _check_architectures(reader: ConfigReader, heads: tuple[str, ...] | None) -> None:
    if heads is None:
        reader.irrelevant("architectures", "the whole model's class decides what a tower is built as")
        return
    if not reader.given("architectures"):
        return  # the causal language model is meant
    named = reader.config["architectures"]
    if not isinstance(named, list) or len(named) != 1 or named[0] not in heads:
        allowed = one_of(f'["{head}"]' for head in heads)
        raise reader.error("architectures", "other heads are not supported", value=named, allowed=allowed)


def _dtype(reader: ConfigReader) -> str | None:
    name = reader.spelled("dtype", "torch_dtype")
    if name is None or reader.config[name] is None:
        return None
    return reader.choice(name, choices=_DTYPE_NAMES)


def read_layer_types(
    reader: ConfigReader, usual: tuple[str, ...], allowed: tuple[str, ...] = ("full_attention", "sliding_attention")
) -> tuple[str, ...]:
    """Returns `layer_types`, the attention of each layer by name; `usual` where it is missing or null.

    Raises InputError unless it is a list of one of `allowed` for each of the layers.
    """
    if not reader.given("layer_types"):
        return usual
    named = reader.config["layer_types"]
    ok = isinstance(named, list) and len(named) == len(usual) and all(name in allowed for name in named)
    reader.require("layer_types", ok, f"a list of {len(usual)} values, each {one_of(allowed)}")
    return tuple(named)


def divide(reader: ConfigReader, total: int, key: str, parts: int, parts_key: str) -> int:
    """Returns total / parts; raises InputError naming both keys where that leaves a remainder."""
    if total % parts:
        raise reader.error(parts_key, value=parts, allowed=f"a divisor of {key} = {total}")
    return total // parts


def require_same(wanted: Model, got: Model, family: str) -> None:
    """Raises InputError naming the first path and field in which the spec and what its config reads back as differ."""
    found = difference(wanted, got, "")
    if found is not None:
        path, here, there = found
        raise InputError(f"a {family} config cannot express this", field=path, value=repr(here), allowed=repr(there))


def difference(
    wanted: object,
    got: object,
    path: str,
    same: Callable[[object, object], bool] = operator.eq,
    skip: Collection[str] = (),
) -> tuple[str, object, object] | None:
    """Returns (path, wanted, got) of the first difference between two specs, names aside; None where they agree.

    `same` tells of two values whether they count as equal; fields of the names `skip` are passed over.
    """
    if same(wanted, got):
        return None
    pairs: Iterable[tuple[str, object, object]] = ()
    if isinstance(wanted, Model) and isinstance(got, Model):
        # blocks first: they tell most of a model, and its name nothing
        names = [f.name for f in fields(wanted) if f.name not in ("blocks", "name") and hasattr(got, f.name)]
        shared = ((name, getattr(wanted, name), getattr(got, name)) for name in ("blocks", *names))
        pairs = chain(shared, [("model", type(wanted).__name__, type(got).__name__)])
    elif isinstance(wanted, Part) and type(wanted) is type(got):
        names = [f.name for f in fields(wanted) if f.name not in skip]  # type: ignore[arg-type]  # every concrete part is a dataclass
        pairs = ((name, getattr(wanted, name), getattr(got, name)) for name in names)
    elif isinstance(wanted, tuple) and isinstance(got, tuple) and len(wanted) == len(got):
        pairs = ((str(i), a, b) for i, (a, b) in enumerate(zip(wanted, got, strict=True)))
    else:
        return path, wanted, got
    found = (difference(a, b, f"{path}.{name}" if path else name, same, skip) for name, a, b in pairs)
    return next((one for one in found if one is not None), None)


def config_of(fields_of_family: dict[str, Any], carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
    """Returns a config: what the family writes, then what was carried; the older `torch_dtype` is read everywhere."""
    made = fields_of_family | {key: value for key, value in carried.items() if key not in fields_of_family}
    return made | ({"torch_dtype": dtype} if dtype else {})
