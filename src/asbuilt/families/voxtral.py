"""The voxtral family: Whisper's encoder, some of its vectors joined to one and projected, in a llama text.

Liu et al. 2025 (arXiv 2507.13264). As many vectors are joined as `intermediate_size` of the encoder is times its width;
longer sounds than the encoder reads are several sounds. The head is never tied.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asbuilt.families import llama, whisper
from asbuilt.families.bart import Stack
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.image_grid import projector_entries
from asbuilt.families.shared.key import Check, Irrelevant, Only, Size, activation, depth
from asbuilt.families.shared.multimodal import TEXT as TEXT_NAMES
from asbuilt.families.shared.multimodal import Text
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.reader import REQUIRED
from asbuilt.families.shared.table import TensorTable, respelled
from asbuilt.families.shared.towers import Nested
from asbuilt.spec import (
    Activation,
    AudioLanguageModel,
    Hearing,
    LanguageModel,
    MLPProjector,
    Model,
    TiedHead,
)

# What a text's config leaves unsaid, as transformers' VoxtralConfig has it.
USUAL_TEXT = {
    "vocab_size": 131072,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
}
TEXT = replace(
    llama.FAMILY,
    keys=(*llama.FAMILY.keys, Only("sliding_window", None, reason="every layer reads all tokens, whatever it says")),
)
THETA, ROPE = 1e8, "rope_parameters"
PROJECTOR = {"layers_0": "linear_1", "layers_1": "linear_2"}


def prepared(config: dict[str, Any], name: str) -> dict[str, Any]:
    """Returns the config whose text says what it would leave to this family's defaults."""
    inner = {} if config.get("text_config") is None else config["text_config"]
    if not isinstance(inner, dict):
        return config
    rope = inner.get(ROPE)
    if isinstance(rope, dict):
        theta: dict[str, Any] = {ROPE: {"rope_theta": inner.get("rope_theta", THETA)} | rope}
    else:
        theta = {"rope_theta": inner.get("rope_theta", THETA)}
    return config | {"text_config": USUAL_TEXT | inner | theta}


def build(text: LanguageModel, sounds: dict[str, Any], placeholder: int, activation: Activation) -> Model:
    """Returns the text with sounds in it, of an encoder of these sizes."""
    d_model, d_ff = sounds["d_model"], sounds["d_ff"]
    stack = Stack(n_layers=sounds["n_layers"], n_heads=sounds["n_heads"], d_ff=d_ff)
    tower = whisper.tower(d_model, stack, sounds["n_mels"], sounds["n_source"], sounds["activation"], name="tower")
    projector = MLPProjector(widths=(d_ff, text.d_model, text.d_model), activation=activation, stack=d_ff // d_model)
    return AudioLanguageModel.of(text, Hearing(tower=tower, projector=projector, placeholder=placeholder))


def _names(spec: Model, family: str) -> TensorTable:
    whole = expect_whole(spec, AudioLanguageModel, family)
    text = TEXT.table(whole.text)
    entries = (
        *respelled(text.entries, TEXT_NAMES),
        *whisper.NAMES.entries(whole.hearing.tower, family, "hearing.tower.", "audio_tower."),
        *projector_entries(whole, "hearing.projector", PROJECTOR, "multi_modal_projector", family),
    )
    newer = (
        ("language_model.lm_head.", "lm_head."),
        ("language_model.model.", "model.language_model."),
        ("multi_modal_projector.", "model.multi_modal_projector."),
        ("audio_tower.", "model.audio_tower."),
    )
    return TensorTable(entries=entries, ignored=text.ignored, duplicates={}, spellings=(newer,))


TOWER = (  # defaults as in transformers' VoxtralEncoderConfig
    Size("hidden_size", "d_model", default=1280, also=("d_model",)),
    Size("num_attention_heads", "n_heads", default=20, also=("encoder_attention_heads",), divides="d_model"),
    depth("num_hidden_layers", 32, "encoder_layers"),
    Size("intermediate_size", "d_ff", default=5120, also=("encoder_ffn_dim",)),
    Size("num_mel_bins", "n_mels", default=128, at="model.embedding.n_mels"),
    Size("max_source_positions", "n_source", default=1500, at="model.max_positions"),
    activation("activation_function", "gelu", tanh="gelu_new"),
    Check(
        "intermediate_size",
        (
            lambda values: (
                values["d_ff"] % values["d_model"] == 0
                and values["n_source"] % (values["d_ff"] // values["d_model"]) == 0
            ),
            lambda values: (
                f"a multiple of hidden_size = {values['d_model']} by a divisor of {values['n_source']} tokens, "
                "since so many are joined"
            ),
        ),
    ),
    Only("head_dim", lambda values: values["d_model"] // values["n_heads"], reason="heads are that wide"),
    Only("num_key_value_heads", lambda values: values["n_heads"], reason="each head has keys of its own"),
    Only("scale_embedding", False, reason="transformers declares this scale, and never applies it"),
    Irrelevant("training only", "dropout", "activation_dropout", "layerdrop", "encoder_layerdrop"),
    Irrelevant("an encoder of sounds has none; left over of Whisper's config", "vocab_size"),
)
FAMILY = Family(
    name="voxtral",
    heads=("VoxtralForConditionalGeneration",),
    prepare=prepared,
    keys=(  # defaults as in transformers' VoxtralConfig
        Text(TEXT, AudioLanguageModel),
        Check(
            "text_config.tie_word_embeddings",
            (lambda values: not isinstance(values["text"].head, TiedHead), "false: transformers never ties this head"),
        ),
        Nested(key="audio_config", into="sounds", kind="voxtral_encoder", at="hearing.tower", keys=TOWER),
        Size(
            "audio_token_id",
            "placeholder",
            default=REQUIRED,
            least=0,
            must=(
                lambda values: values["placeholder"] < values["text"].n_vocab,
                lambda values: f"a token below vocab_size = {values['text'].n_vocab}",
            ),
            at="hearing.placeholder",
        ),
        replace(activation("projector_hidden_act", "gelu"), at="hearing.projector.activation"),
        Only("tie_word_embeddings", False, None, reason="transformers never ties this head"),
        Irrelevant("the text's own says it", "hidden_size", "vocab_size"),
    ),
    build=build,
    names=_names,
)
