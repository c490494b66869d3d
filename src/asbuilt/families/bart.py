"""The bart family: encoder and decoder with learned positions, LayerNorm on each sum and on the embedding.

Lewis et al. 2020 (arXiv 1910.13461). Its kin differ in where they norm and in their positions: marian is the model of
2017, mbart norms before each branch. All add a buffer to the logits, which no published model has filled.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from asbuilt.families.shared.common import (
    ACTIVATION_NAMES,
    MOST_LAYERS,
    config_of,
    divide,
    named_entries,
    read_common,
    require_same,
)
from asbuilt.families.shared.fused import branches, expect
from asbuilt.families.shared.reader import ConfigReader, Reading
from asbuilt.families.shared.table import Entry, Leading, Table, entry
from asbuilt.spec import (
    MLP,
    Activation,
    Attention,
    Block,
    Branch,
    CrossAttention,
    LayerNorm,
    LearnedPositions,
    Model,
    SharedEmbedding,
    Sinusoids,
    TiedHead,
    TokenEmbedding,
)

WRITTEN_ACTIVATIONS: dict[str, str] = {"gelu_tanh": "gelu_new"}
OFFSET = 2  # rows of the table before that of position 0
EPS = 1e-5  # PyTorch's own; no config says another

STEMS = {
    **{f"attention.body.{part}": f"self_attn.{part}_proj" for part in "qkv"},
    **{f"cross.body.{part}": f"encoder_attn.{part}_proj" for part in "qkv"},
    "attention.body.o": "self_attn.out_proj",
    "cross.body.o": "encoder_attn.out_proj",
    "ffn.body.up": "fc1",
    "ffn.body.down": "fc2",
}
NORMS = {"attention": "self_attn_layer_norm", "cross": "encoder_attn_layer_norm", "ffn": "final_layer_norm"}
COMPUTED = {r"model\.(en|de)coder\.embed_positions\.weight": "computed: sines and cosines"}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """What encoder and decoder may differ in."""

    n_layers: int
    n_heads: int
    d_ff: int


@dataclass(frozen=True, kw_only=True)
class Kin:
    """A family of this kind: how its models norm, where tokens stand, and its class defaults by key of the config.

    With `two_vocabularies` the encoder may have an embedding of its own.
    """

    family: str
    heads: tuple[str, ...]
    defaults: dict[str, Any]
    sinusoids: bool = False
    norm_first: bool = False
    embedding_norm: bool = False
    two_vocabularies: bool = False

    def build(
        self,
        *,
        n_vocab: int,
        d_model: int,
        encoder: Stack,
        decoder: Stack,
        max_positions: int,
        activation: Activation,
        scaled: bool,
        n_source: int | None = None,
        name: str = "",
    ) -> Model:
        """Returns the model of these dimensions; `scaled` multiplies embeddings by sqrt(d_model).

        `n_source` is the vocabulary of an encoder that does not share the embedding.
        """
        norm = LayerNorm(d=d_model, eps=EPS)
        positions = LearnedPositions(n_positions=max_positions, d_model=d_model, offset=OFFSET)
        scale = math.sqrt(d_model) if scaled else 1.0
        shared = SharedEmbedding(n_vocab=n_vocab, d_model=d_model, scale=scale)
        own = TokenEmbedding(n_vocab=n_source or n_vocab, d_model=d_model, scale=scale)
        common: dict[str, Any] = {
            "positions": Sinusoids(n_positions=max_positions, d_model=d_model) if self.sinusoids else positions,
            "embedding_norm": norm if self.embedding_norm else None,
            "norm": norm if self.norm_first else None,
            "max_positions": max_positions,
        }
        return Model(
            encoder=Model(
                embedding=shared if n_source is None else own,
                blocks=(self._block(d_model, encoder, activation, causal=False),) * encoder.n_layers,
                name="encoder",
                **common,
            ),
            embedding=TokenEmbedding(n_vocab=n_vocab, d_model=d_model, scale=scale),
            blocks=(self._block(d_model, decoder, activation, causal=True),) * decoder.n_layers,
            head=TiedHead(d_model=d_model, n_vocab=n_vocab, shift=True),
            name=name or self.family,
            **common,
        )

    def _block(self, d_model: int, stack: Stack, activation: Activation, *, causal: bool) -> Block:
        norm, heads, width = LayerNorm(d=d_model, eps=EPS), stack.n_heads, d_model // stack.n_heads
        own = Attention(
            d_model=d_model, n_heads=heads, n_kv_heads=heads, d_head=width, causal=causal, bias=True, output_bias=True
        )
        cross = CrossAttention(
            d_model=d_model, d_source=d_model, n_heads=heads, d_head=width, bias=True, output_bias=True
        )
        ffn = MLP(d_model=d_model, d_ff=stack.d_ff, activation=activation, bias=True)
        bodies = {"attention": own, **({"cross": cross} if causal else {}), "ffn": ffn}
        before, after = (norm, None) if self.norm_first else (None, norm)
        return Block(branches=tuple(Branch(name=n, body=b, norm=before, sum_norm=after) for n, b in bodies.items()))

    def read(self, config: dict[str, Any], name: str) -> Reading:
        """Returns what a config.json of this family says; `name` becomes the model's name and stands in messages.

        Raises InputError naming the key at fault.
        """
        reader = ConfigReader(config, name)
        dtype = read_common(reader, self.family, self.heads, encoder_decoder=True)
        self._pass_over(reader)
        defaults = self.defaults
        d_model = reader.size("d_model", "hidden_size", default=defaults["d_model"])
        sizes: dict[str, Any] = {
            "n_vocab": reader.size("vocab_size", default=defaults["vocab_size"]),
            "encoder": _read_stack(reader, "encoder", d_model, defaults),
            "decoder": _read_stack(reader, "decoder", d_model, defaults),
            "max_positions": reader.size("max_position_embeddings", default=1024),
            "activation": reader.choice("activation_function", choices=ACTIVATION_NAMES, default="gelu"),
            "scaled": reader.flag("scale_embedding", default=False),
        }
        sizes |= self._read_vocabularies(reader, sizes["n_vocab"])
        reader.finish()
        spec = self.build(d_model=d_model, name=name, **sizes)
        start = {key: defaults[key] for key in ("decoder_start_token_id",) if key in defaults}
        return Reading(
            spec=spec,
            carried=start | reader.carried,
            dtype=dtype,
            family=self.family,
            defaults=reader.defaults,
            notes=reader.notes,
        )

    def _pass_over(self, reader: ConfigReader) -> None:
        for key in ("activation_dropout", "encoder_layerdrop", "decoder_layerdrop", "init_std", "classif_dropout"):
            reader.irrelevant(key, "training only")
        for key in ("student_encoder_layers", "student_decoder_layers", "replacing_rate"):
            reader.irrelevant(key, "how a smaller model was taught by this one")
        for key in ("force_bos_token_to_be_generated", "extra_pos_embeddings", "save_step"):
            reader.irrelevant(key, "a setting of older code that no present one reads")
        reader.only("tie_word_embeddings", True, reason="heads of their own are not read in this family")
        fixed = {
            "add_bias_logits": False,
            "add_final_layer_norm": self.norm_first,
            "normalize_before": self.norm_first,
            "normalize_embedding": self.embedding_norm,
            "static_position_embeddings": self.sinusoids,
        }
        for key, value in fixed.items():
            reader.only(key, value, reason=f"{self.family} has only this")

    def _read_vocabularies(self, reader: ConfigReader, n_vocab: int) -> dict[str, int]:
        """Returns the decoder's vocabulary and the encoder's where a config may tell them apart."""
        if not self.two_vocabularies:
            return {}
        decoder = reader.size("decoder_vocab_size", default=n_vocab, null=n_vocab)
        if not reader.flag("share_encoder_decoder_embeddings", default=True):
            return {"n_vocab": decoder, "n_source": n_vocab}
        reader.require("decoder_vocab_size", decoder == n_vocab, f"vocab_size = {n_vocab}, since they are shared")
        return {}

    def write(self, spec: Model, carried: dict[str, Any], dtype: str | None) -> dict[str, Any]:
        """Returns a config.json that `read` reads back as `spec`; raises InputError naming what it cannot express."""
        encoder = expect(spec.encoder, Model, "encoder", self.family)
        ffn = expect(spec.blocks[0].branches[-1].body, MLP, "blocks.0.ffn.body", self.family)
        shared = isinstance(encoder.embedding, SharedEmbedding)
        written: dict[str, Any] = {
            "architectures": [self.heads[0]],
            "model_type": self.family,
            "vocab_size": encoder.n_vocab,
            "d_model": spec.d_model,
            **_write_stack("encoder", encoder, ("attention", "ffn"), self.family),
            **_write_stack("decoder", spec, ("attention", "cross", "ffn"), self.family),
            "activation_function": WRITTEN_ACTIVATIONS.get(ffn.activation, ffn.activation),
            "max_position_embeddings": spec.max_positions,
            "scale_embedding": getattr(spec.embedding, "scale", 1.0) != 1.0,
            "is_encoder_decoder": True,
            "tie_word_embeddings": True,
        }
        if self.two_vocabularies:
            vocabulary = spec.n_vocab
            written |= {"decoder_vocab_size": vocabulary, "share_encoder_decoder_embeddings": shared}
        config = config_of(written, carried, dtype)
        require_same(spec, self.read(config, spec.name).spec, self.family)
        return config

    def table(self, spec: Model) -> Table:
        """Returns the names and layouts of a checkpoint folder's tensors."""
        encoder = expect(spec.encoder, Model, "encoder", self.family)
        shared = isinstance(encoder.embedding, SharedEmbedding)
        own = "model.shared.weight" if shared else "model.decoder.embed_tokens.weight"
        entries = [entry("embedding.weight", own)]
        entries += [] if shared else [entry("encoder.embedding.weight", "model.encoder.embed_tokens.weight")]
        for stack, place, stored in ((encoder, "encoder.", "model.encoder."), (spec, "", "model.decoder.")):
            entries += self._stack_entries(stack, place, stored)
        if isinstance(spec.head, TiedHead) and spec.head.shift:
            entries.append(entry("head.shift", "final_logits_bias", Leading(1)))
        again: list[str] = ["lm_head.weight"]
        again += [f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder") if shared]
        duplicates = dict.fromkeys(again, "embedding.weight")
        return Table(entries=tuple(entries), ignored=COMPUTED if self.sinusoids else {}, duplicates=duplicates)

    def _stack_entries(self, stack: Model, place: str, stored: str) -> list[Entry]:
        entries = []
        if isinstance(stack.positions, LearnedPositions):
            entries.append(entry(f"{place}positions.weight", f"{stored}embed_positions.weight"))
        for part, called in (("embedding_norm", "layernorm_embedding"), ("norm", "layer_norm")):
            norm = getattr(stack, part)
            entries += [entry(f"{place}{part}.{n}", f"{stored}{called}.{n}") for n in (norm.holds() if norm else ())]
        where = "norm" if self.norm_first else "sum_norm"
        stems = STEMS | {f"{branch}.{where}": called for branch, called in NORMS.items()}
        for i, block in enumerate(stack.blocks):
            entries += named_entries(block, f"{place}blocks.{i}.", stems, f"{stored}layers.{i}.", {}, self.family)
        return entries


def _read_stack(reader: ConfigReader, stack: str, d_model: int, defaults: dict[str, Any]) -> Stack:
    """Returns the dimensions of one stack; the encoder's may be spelled as a decoder-only model's are."""
    also = {"layers": ("num_hidden_layers",), "attention_heads": ("num_attention_heads",)} if stack == "encoder" else {}
    n_layers = reader.size(f"{stack}_layers", *also.get("layers", ()), default=defaults["layers"], most=MOST_LAYERS)
    heads = f"{stack}_attention_heads"
    n_heads = reader.size(heads, *also.get("attention_heads", ()), default=defaults["attention_heads"])
    divide(reader, d_model, "d_model", n_heads, heads)
    return Stack(n_layers=n_layers, n_heads=n_heads, d_ff=reader.size(f"{stack}_ffn_dim", default=defaults["ffn_dim"]))


def _write_stack(stack: str, model: Model, names: tuple[str, ...], family: str) -> dict[str, Any]:
    found = branches(model, family, names)
    attention = expect(found[0].body, Attention, f"{stack} attention", family)
    ffn = expect(found[-1].body, MLP, f"{stack} ffn", family)
    return {
        f"{stack}_layers": model.n_layers,
        f"{stack}_attention_heads": attention.n_heads,
        f"{stack}_ffn_dim": ffn.d_ff,
    }


BIG: dict[str, Any] = {"d_model": 1024, "layers": 12, "attention_heads": 16, "ffn_dim": 4096}
KIN = Kin(
    family="bart",
    heads=("BartForConditionalGeneration",),
    defaults={**BIG, "vocab_size": 50265, "decoder_start_token_id": 2},
    embedding_norm=True,
)
read, write, table = KIN.read, KIN.write, KIN.table
