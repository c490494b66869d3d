"""The whisper family: an encoder of mel spectrograms, and mbart's decoder, both without biases of keys.

Radford et al. 2022 (arXiv 2212.04356). The encoder's positions are sines and cosines, which its files store.
"""

from __future__ import annotations

from typing import Any

from asbuilt.families.bart import EPS, NORMS, STEMS, Kin, Stack, blocks, stack_keys
from asbuilt.families.shared.family import Family
from asbuilt.families.shared.key import Carried, Fixed, Irrelevant, Only, Size, activation
from asbuilt.families.shared.names import Names
from asbuilt.families.shared.parts import expect_whole
from asbuilt.families.shared.table import TensorTable
from asbuilt.spec import (
    Activation,
    AudioEncoder,
    EncoderDecoder,
    LayerNorm,
    LearnedPositions,
    MelEmbedding,
    Model,
    TiedHead,
    TokenEmbedding,
)

KIN = Kin(norm_first=True, key_bias=False)
CONVOLUTIONS = {"first": "conv1", "second": "conv2"}
AUGMENTED = tuple(f"mask_{axis}_{what}" for axis in ("time", "feature") for what in ("prob", "length", "min_masks"))


def build(
    *,
    n_vocab: int,
    d_model: int,
    encoder: Stack,
    decoder: Stack,
    n_mels: int,
    n_source: int,
    max_positions: int,
    activation: Activation,
    name: str = "whisper",
) -> Model:
    """Returns the model of these dimensions, which hears `n_source` tokens of `n_mels` bands."""
    return EncoderDecoder(
        encoder=tower(d_model, encoder, n_mels, n_source, activation, name="encoder"),
        embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model),
        blocks=blocks(KIN, d_model, decoder, activation, causal=True, n_source=n_source),
        head=TiedHead(d_model=d_model, n_vocab=n_vocab),
        name=name,
        **_common(d_model, max_positions),
    )


def tower(d_model: int, stack: Stack, n_mels: int, n_source: int, activation: Activation, *, name: str) -> AudioEncoder:
    """Returns the encoder of sounds, of `n_source` tokens each."""
    return AudioEncoder(
        embedding=MelEmbedding(n_mels=n_mels, n_tokens=n_source, d_model=d_model),
        blocks=blocks(KIN, d_model, stack, activation, causal=False),
        name=name,
        **_common(d_model, n_source),
    )


def _common(d_model: int, n_positions: int) -> dict[str, Any]:
    positions = LearnedPositions(n_positions=n_positions, d_model=d_model)
    return {"positions": positions, "norm": LayerNorm(d=d_model, eps=EPS), "max_positions": n_positions}


# The names of a stack, encoder or decoder.
NAMES = Names(
    stems=STEMS | {f"{branch}.norm": name for branch, name in NORMS.items()},
    outside={
        "embedding": "embed_tokens",
        "positions": "embed_positions",
        "norm": "layer_norm",
        **{f"embedding.{ours}": theirs for ours, theirs in CONVOLUTIONS.items()},
    },
    layers="layers",
)


def _names(spec: Model, family: str) -> TensorTable:
    encoder = expect_whole(spec, EncoderDecoder, family).encoder
    entries = NAMES.entries(encoder, family, "encoder.", "model.encoder.")
    entries += NAMES.entries(spec, family, prefix="model.decoder.")
    return TensorTable(entries=tuple(entries), ignored={}, duplicates={"proj_out.weight": "embedding.weight"})


FAMILY = Family(
    name="whisper",
    heads=("WhisperForConditionalGeneration",),
    encoder_decoder=True,
    keys=(  # defaults as in transformers' WhisperConfig
        Size("d_model", "d_model", default=384, also=("hidden_size",)),
        Size("vocab_size", "n_vocab", default=51865),
        stack_keys("encoder", n_layers=4, n_heads=6, d_ff=1536),
        stack_keys("decoder", n_layers=4, n_heads=6, d_ff=1536),
        Size("num_mel_bins", "n_mels", default=80, at="model.encoder.embedding.n_mels"),
        Size("max_source_positions", "n_source", default=1500, at="model.encoder.max_positions"),
        Size("max_target_positions", "max_positions", default=448),
        activation("activation_function", "gelu", tanh="gelu_new"),
        Fixed("tie_word_embeddings", True, reason="untied heads are not supported in this family"),
        Carried("decoder_start_token_id", 50257),
        Only("scale_embedding", False, reason="transformers declares this scale, and never applies it"),
        Irrelevant("training only", "activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std"),
        Irrelevant("training only", "apply_spec_augment", *AUGMENTED),
        Irrelevant("of a classifier, which this is not", "use_weighted_layer_sum", "classifier_proj_size"),
        Irrelevant("smooths the timestamps of words", "median_filter_width"),
    ),
    build=build,
    names=_names,
)
