"""What `describe` says beside its figures: one token's way step by step, rows, images, files that hold less or more."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from safetensors.torch import load_file, save_file

from asbuilt.checkpoint.source import Source
from asbuilt.description import bill
from asbuilt.errors import InputError
from asbuilt.families import Reading, gguf_table, llama, read_config
from asbuilt.formats.gguf import GGUFFile, GGUFTensor
from asbuilt.spec import (
    Attention,
    Block,
    Branch,
    GatedMLP,
    Head,
    MixtureOfExperts,
    Model,
    RMSNorm,
    Rotary,
    Router,
    TokenEmbedding,
    weights,
)

Run = Callable[..., Result]
S, M = 5, 8
NORM = RMSNorm(d=M)


def model(*blocks: Block) -> Model:
    return Model(
        name="toy",
        embedding=TokenEmbedding(n_vocab=11, d_model=M),
        blocks=blocks,
        norm=NORM,
        max_positions=16,
        head=Head(d_model=M, n_vocab=11),
    )


def block(ffn: Any) -> Block:  # noqa: ANN401  any body
    """Two heads of 6 over one of keys, whose queries and keys are normalised and turned."""
    mixer = Attention(
        d_model=M,
        n_heads=2,
        n_kv_heads=1,
        d_head=6,
        positions=Rotary(d_rotary=4),
        q_norm=RMSNorm(d=6),
        k_norm=RMSNorm(d=6),
    )
    return Block(branches=(Branch(name="attention", body=mixer, norm=NORM), Branch(name="ffn", body=ffn, norm=NORM)))


PLAIN = block(GatedMLP(d_model=M, d_ff=10, activation="silu"))
ROUTED = block(
    MixtureOfExperts(d_model=M, d_ff=10, n_experts=4, activation="silu", router=Router(d_model=M, n_experts=4, top_k=2))
)


def described(spec: Model, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    source = Source(kind="spec", name="toy", reading=Reading(spec=spec, carried={}, dtype=None, family=""))
    return bill.describe(source, **({"seq": S, "batch": 1, "dtype": "bf16", "kv_dtype": "bf16"} | more))


# path, step, what goes in, by what, what comes out, and 2abc FLOPs of each of n products
Way = list[tuple[str, str, list[int], list[int] | None, list[int], int]]
ATTENTION: Way = [
    ("attention.norm", "RMSNorm", [8], None, [8], 0),
    ("attention.body", "q", [8], [8, 12], [12], 2 * 8 * 12),
    ("attention.body", "k", [8], [8, 6], [6], 2 * 8 * 6),
    ("attention.body", "v", [8], [8, 6], [6], 2 * 8 * 6),
    ("attention.body.q_norm", "RMSNorm", [2, 6], None, [2, 6], 0),
    ("attention.body.k_norm", "RMSNorm", [6], None, [6], 0),
    ("attention.body.positions", "RoPE applied to q and k", [4], None, [4], 0),
    ("attention.body", "scores", [2, 6], [6, 5], [2, 5], 2 * 2 * 6 * 5),
    ("attention.body", "mix", [2, 5], [5, 6], [2, 6], 2 * 2 * 5 * 6),
    ("attention.body", "o", [12], [12, 8], [8], 2 * 12 * 8),
    ("attention", "residual add", [8], None, [8], 0),
    ("ffn.norm", "RMSNorm", [8], None, [8], 0),
]
ADDED: Way = [("ffn", "residual add", [8], None, [8], 0)]
GATED: Way = [
    ("ffn.body", "gate", [8], [8, 10], [10], 160),
    ("ffn.body", "up", [8], [8, 10], [10], 160),
    ("ffn.body", "down", [10], [10, 8], [8], 160),
]
TWO_OF_FOUR: Way = [
    ("ffn.body.router", "logits", [8], [8, 4], [4], 2 * 8 * 4),
    ("ffn.body", "gate", [2, 8], [8, 10], [2, 10], 320),
    ("ffn.body", "up", [2, 8], [8, 10], [2, 10], 320),
    ("ffn.body", "down", [2, 10], [10, 8], [2, 8], 320),
]


def test_one_token_s_way_step_by_step() -> None:
    """The router comes before the experts that it chooses, norms and positions between products and scores."""
    found = described(model(PLAIN, ROUTED, PLAIN))["shapes"]
    assert [{key: value for key, value in kind.items() if key != "steps"} for kind in found] == [
        {"path": "blocks", "blocks": [0, 2], "count": 2, "seq": S},
        {"path": "blocks", "blocks": [1], "count": 1, "seq": S},
    ]
    keys = ("path", "step", "input", "by", "output", "flops")
    for kind, way in zip(found, (GATED, TWO_OF_FOUR), strict=True):
        assert kind["steps"] == [dict(zip(keys, step, strict=True)) for step in ATTENTION + way + ADDED]


def test_the_way_through_an_encoder_comes_first() -> None:
    config = {
        "model_type": "t5",
        "d_model": M,
        "d_kv": 3,
        "num_heads": 2,
        "d_ff": 10,
        "num_layers": 3,
        "num_decoder_layers": 2,
        "vocab_size": 11,
        "n_positions": 16,
        "tie_word_embeddings": True,
    }
    found = described(read_config(config, "toy").spec)["shapes"]
    told = [(kind["path"], kind["blocks"], kind["count"]) for kind in found]
    assert told == [("encoder.blocks", [0, 1, 2], 3), ("blocks", [0, 1], 2)]


def test_rows_of_equal_parts_are_one() -> None:
    """Scores of a whole text of 5: 4 x 2 x 6 x 5 FLOPs a token; a byte pair for each of 6 keys and 6 values."""
    rows = described(model(ROUTED, ROUTED))["rows"]
    own = M * 6 * (2 + 1 + 1) + 2 * 6 * M
    expected = [
        ("embedding", "TokenEmbedding", "embedding", 11 * M, 0, 0, 1),
        ("blocks.0-1.attention.norm", "RMSNorm", "norm", M, 0, 0, 2),
        ("blocks.0-1.attention.body", "Attention", "attention", own, 2 * own + 4 * 2 * 6 * S, 24, 2),
        ("blocks.0-1.attention.body.q_norm", "RMSNorm", "norm", 6, 0, 0, 2),
        ("blocks.0-1.attention.body.k_norm", "RMSNorm", "norm", 6, 0, 0, 2),
        ("blocks.0-1.ffn.norm", "RMSNorm", "norm", M, 0, 0, 2),
        ("blocks.0-1.ffn.body", "MixtureOfExperts", "ffn", 4 * 3 * M * 10, 2 * 2 * 3 * M * 10, 0, 2),
        ("blocks.0-1.ffn.body.router", "Router", "router", 4 * M, 2 * 4 * M, 0, 2),
        ("norm", "RMSNorm", "norm", M, 0, 0, 1),
        ("head", "Head", "head", 11 * M, 2 * 11 * M, 0, 1),
    ]
    keys = ("path", "part", "kind", "parameters", "flops_per_token", "cache_bytes_per_token", "count")
    assert rows == [dict(zip(keys, row, strict=True)) for row in expected]


def test_what_the_document_holds_beside_the_figures() -> None:
    found = described(model(PLAIN), seq=7, batch=2, dtype="float16", kv_dtype="fp8")
    named = {
        "name": "toy",
        "family": "",
        "context": 16,
        "seq": 7,
        "batch": 2,
        "dtype": "fp16",
        "images": 0,
        "sounds": 0,
    }
    assert {key: found[key] for key in named} == named
    assert found["cache"]["dtype"] == "fp8"
    assert "scales" in found["stored_extra"]
    assert not any(found["stored_extra"].values())
    assert found["packed"] is None
    assert found["conventions"].keys() == {
        "flops",
        "scores",
        "lookup",
        "units",
        "parameters",
        "defaults",
        "notes",
        "active_parameters",
        "quantization",
        "stored_extra",
        "encoder",
        "cache",
        "weights",
        "activations",
        "pooler",
        "decode",
    }


# Images.


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gemma-3-4b-mm", "--images", 2, "--seq", 512), None),  # 256 tokens each
        (("gemma-3-4b-mm", "--images", 2, "--seq", 511), "images: the images take 512 tokens"),
        (("gemma-3-4b-mm", "--seq", 1), None),
        (("clip-vit-base-patch32", "--images", 3), None),  # beside the text, not in it
        (("gpt2", "--images", 1), "images: this model does not read images"),
        (("gpt2", "--images", 0), None),
    ],
    ids=str,
)
def test_images_take_their_room_in_the_text(run: Run, words: tuple[object, ...], said: str | None) -> None:
    result = run("describe", *words, "--json")
    assert result.exit_code == (0 if said is None else 2), result.output
    assert (said or "") in result.stderr
    if said is None:
        assert json.loads(result.stdout)["images"] == dict(itertools.pairwise(words)).get("--images", 0)


def test_a_model_of_images_is_as_long_as_one(run: Run) -> None:
    """ViT: 14 x 14 patches and the class token."""
    for words, warned in ((), False), (("--seq", 197), False), (("--seq", 10), True):
        result = run("describe", "vit-base-patch16-224", "--json", *words)
        assert json.loads(result.stdout)["seq"] == 197
        assert (result.stderr == "warning: --seq is ignored: an image has 197 tokens\n") == warned
        assert bool(result.stderr) == warned


def test_a_whole_context_is_not_beyond_it(run: Run, checkpoint: Path) -> None:
    assert run("describe", checkpoint, "--seq", 64).stderr == ""
    assert run("describe", checkpoint, "--seq", 65).stderr == (
        "warning: --seq 65 exceeds the context length of 64 tokens\n"
    )


# Files.

SPEC = llama.build(
    n_vocab=320,
    d_model=64,
    n_layers=1,
    n_heads=4,
    n_kv_heads=2,
    d_ff=160,
    max_positions=64,
    rotary=Rotary(d_rotary=16),
    tied=False,
    name="tiny",
)


def gguf(types: tuple[str, ...], *, without: int = 0) -> Source:
    """A file whose tensors are of these types in turn, the last so many missing."""
    shapes = {path: weight.shape for path, weight, _ in weights(SPEC)}
    names = [
        (name, shape)
        for entry in gguf_table("llama", SPEC).entries
        for name, shape in zip(entry.names, entry.layout.stored_shapes([shapes[p] for p in entry.paths]), strict=True)
    ]
    tensors = {
        name: GGUFTensor(name=name, shape=shape, type=types[i % len(types)], offset=0, nbytes=4)
        for i, (name, shape) in enumerate(names[: len(names) - without])
    }
    reading = Reading(spec=SPEC, carried={}, dtype=None, family="llama")
    return Source(kind="gguf", name="x", reading=reading, gguf=GGUFFile(path=Path("x"), metadata={}, tensors=tensors))


def test_a_file_is_held_against_the_description_where_all_of_it_can_be_read() -> None:
    """One type that nobody reads, and its tensors are only counted."""

    def stored(source: Source) -> dict[str, Any]:
        return bill.describe(source, seq=4, batch=1, dtype="bf16", kv_dtype="bf16")

    whole = stored(gguf(("F32",)))
    assert (whole["parameters_stored"], whole["stored_bytes"]) == (whole["parameters"]["total"], 12 * 4)
    assert stored(gguf(("F32", "IQ9_X")))["stored_bytes"] == 12 * 4
    assert stored(gguf(("IQ9_X",), without=1))["stored_bytes"] == 11 * 4
    with pytest.raises(InputError, match="missing"):
        stored(gguf(("F32",), without=1))


def test_weights_packed_in_an_unknown_way_are_described(run: Run, checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.packed"] = tensors.pop("model.norm.weight")
    save_file(tensors, checkpoint / "model.safetensors")
    assert run("describe", checkpoint).exit_code == 2
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "magic"}}))
    said = run("describe", checkpoint, "--json")
    assert said.exit_code == 0, said.output
    packed = json.loads(said.stdout)["packed"]
    assert packed.keys() == {"format", "weight_bytes", "problem"}
    assert (packed["format"], packed["weight_bytes"]) == (None, None)
    assert "magic" in packed["problem"]


def test_the_activations_dtype_is_that_of_weights_of_16_bits_and_more() -> None:
    names = ("fp64", "float32", "bf16", "fp16", "fp8", "int4", "q4_k", "q4_k_m")
    assert [bill.activation_dtype(name) for name in names] == ["fp64", "fp32", "bf16", "fp16", *["bf16"] * 4]
