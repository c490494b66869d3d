"""Names as transformers writes them when a model is saved alone, or inside one with a head: one table reads both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers as hf

from asbuilt.checkpoint.convert import convert
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.source import open_model
from asbuilt.errors import InputError
from asbuilt.families import read_config, tensor_table
from asbuilt.families.shared.table import is_ignored

V = 61
LIKE_LLAMA: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": True,
}
KEYS: dict[str, Any] = {"num_key_value_heads": 1, "head_dim": 6}
TURNED: dict[str, Any] = {"rotary_pct": 1.0}
BERT = {key: LIKE_LLAMA[key] for key in LIKE_LLAMA if key != "tie_word_embeddings"}
# model -> (class with a head, config, what transformers puts before the names of the model inside)
WITH_HEAD: dict[str, tuple[Any, Any, str]] = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig(**LIKE_LLAMA, **KEYS), "model."),
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig(**LIKE_LLAMA, **KEYS), "model."),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config(**LIKE_LLAMA, **KEYS), "model."),
    "gemma": (hf.GemmaForCausalLM, hf.GemmaConfig(**LIKE_LLAMA, **KEYS), "model."),
    "phi3": (hf.Phi3ForCausalLM, hf.Phi3Config(**LIKE_LLAMA, num_key_value_heads=1, pad_token_id=0), "model."),
    "gpt_neox": (hf.GPTNeoXForCausalLM, hf.GPTNeoXConfig(**LIKE_LLAMA, **TURNED), "gpt_neox."),
    "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config(vocab_size=V, n_embd=12, n_layer=2, n_head=2, n_positions=16), ""),
    "mpt": (hf.MptForCausalLM, hf.MptConfig(vocab_size=V, d_model=12, n_heads=2, n_layers=2, max_seq_len=32), ""),
    "opt": (
        hf.OPTForCausalLM,
        hf.OPTConfig(
            vocab_size=V,
            hidden_size=12,
            ffn_dim=20,
            num_hidden_layers=2,
            num_attention_heads=2,
            word_embed_proj_dim=12,
            max_position_embeddings=16,
        ),
        "model.",
    ),
}
ALONE: dict[str, tuple[Any, Any, str]] = {
    "bert": (hf.BertForMaskedLM, hf.BertConfig(**BERT), "bert."),
    "roberta": (hf.RobertaForMaskedLM, hf.RobertaConfig(**BERT), "roberta."),
    "modernbert": (hf.ModernBertForMaskedLM, hf.ModernBertConfig(**BERT, pad_token_id=0), "model."),
    "vit": (
        hf.ViTForImageClassification,
        hf.ViTConfig(
            hidden_size=12, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
        ),
        "vit.",
    ),
}


def drawn(kind: Any, config: Any) -> Any:  # noqa: ANN401  classes of transformers
    model = kind(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    return model


def same_weights(a: Path, b: Path) -> bool:
    ours, theirs = (dict(load(folder).named_parameters()) for folder in (a, b))
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("family", WITH_HEAD)
def test_a_model_whose_file_was_saved_without_its_head(tmp_path: Path, family: str) -> None:
    kind, config, prefix = WITH_HEAD[family]
    model = drawn(kind, config)
    model.save_pretrained(tmp_path / "whole")
    model.base_model.save_pretrained(tmp_path / "bare")  # its own names, with the config of the whole
    (tmp_path / "bare" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    begins = [{name.partition(".")[0] for name in tiny.stored(tmp_path / folder)} for folder in ("whole", "bare")]
    assert begins[0] - {"lm_head"} == {(prefix or "transformer.")[:-1]}
    assert begins[0].isdisjoint(begins[1])
    assert same_weights(tmp_path / "whole", tmp_path / "bare")
    convert(tmp_path / "bare", tmp_path / "again")
    assert tiny.stored(tmp_path / "again").keys() == tiny.stored(tmp_path / "whole").keys()


@pytest.mark.parametrize("family", ALONE)
def test_a_model_without_head_whose_file_was_saved_with_one(tmp_path: Path, family: str) -> None:
    kind, config, prefix = ALONE[family]
    whole = drawn(kind, config)
    alone = drawn({"bert": hf.BertModel, "roberta": hf.RobertaModel}.get(family, type(whole.base_model)), config)
    alone.save_pretrained(tmp_path / "alone")
    whole.save_pretrained(tmp_path / "within")
    (tmp_path / "within" / "config.json").write_bytes((tmp_path / "alone" / "config.json").read_bytes())
    head = {name: tensor for name, tensor in tiny.stored(tmp_path / "within").items() if not name.startswith(prefix)}
    assert head
    inside = {prefix + name: tensor for name, tensor in tiny.stored(tmp_path / "alone").items()}
    tiny.rewrite(tmp_path / "within", inside | head)
    assert same_weights(tmp_path / "alone", tmp_path / "within")


@pytest.mark.parametrize(("family", "pooled"), [("bert", True), ("roberta", False), ("llama", False), ("qwen3", False)])
def test_a_trunk_saved_alone_with_the_config_of_a_class_that_has_a_head(
    tmp_path: Path, family: str, pooled: bool
) -> None:
    """As all-mpnet-base-v2 and the larger Qwen3-Embedding: the head is missing, and no name begins with the base's."""
    kind, config, _ = (WITH_HEAD | ALONE)[family]
    config = type(config)(**{**config.to_dict(), **({} if family in ALONE else {"tie_word_embeddings": False})})
    whole = drawn(kind, config)
    kinds = {"bert": hf.BertModel, "roberta": hf.RobertaModel}
    alone = kinds[family](config, add_pooling_layer=pooled) if family in kinds else whole.base_model
    alone.save_pretrained(tmp_path / "alone")
    whole.save_pretrained(tmp_path / "whole")
    (tmp_path / "alone" / "config.json").write_bytes((tmp_path / "whole" / "config.json").read_bytes())
    source = open_model(tmp_path / "alone")
    model, tokens = load(source), torch.tensor([[3, 4, 5, 6]])
    assert source.spec.gives == "stream"
    assert "no head" in source.reading.notes["architectures"]
    torch.testing.assert_close(model(tokens), alone.eval()(tokens).last_hidden_state, atol=1e-4, rtol=1e-4)
    convert(tmp_path / "alone", tmp_path / "again")
    tiny.assert_same(tiny.stored(tmp_path / "again"), tiny.stored(tmp_path / "alone"))
    # a folder that lacks its head for another reason is broken
    tensors = tiny.stored(tmp_path / "whole")
    tiny.rewrite(
        tmp_path / "whole", {name: x for name, x in tensors.items() if not name.startswith(("lm_head", "cls"))}
    )
    with pytest.raises(InputError, match="missing"):
        load(tmp_path / "whole")


def test_names_that_begin_both_ways_are_refused(tmp_path: Path) -> None:
    tiny.write(tmp_path / "made", "llama", 3)
    tensors = tiny.stored(tmp_path / "made")
    inner = [name for name in tensors if name.startswith("model.")]
    for some in (inner[:1], inner[1:], inner):
        bare = {name.removeprefix("model."): tensors[name].clone() for name in some}
        kept = {name: tensor for name, tensor in tensors.items() if name not in some or some is inner}
        tiny.rewrite(tmp_path / "made", kept | bare)
        with pytest.raises(InputError, match=f"{len(some) if some is not inner[1:] else 1} unexpected|unexpected"):
            load(tmp_path / "made")


def t5(folder: Path, *, tied: bool) -> dict[str, torch.Tensor]:
    sizes: dict[str, Any] = {"vocab_size": V, "d_model": 12, "d_kv": 6, "d_ff": 20, "num_layers": 2, "num_heads": 2}
    config = hf.T5Config(**sizes | {"pad_token_id": 0, "decoder_start_token_id": 0, "tie_word_embeddings": tied})
    drawn(hf.T5ForConditionalGeneration, config).save_pretrained(folder)
    return tiny.stored(folder)


@pytest.mark.parametrize(
    "names",
    [
        ["decoder.embed_tokens.weight"],
        ["encoder.embed_tokens.weight"],
        ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"],
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_table_stored_only_under_the_name_of_its_ties(tmp_path: Path, names: list[str], tied: bool) -> None:
    tensors = t5(tmp_path / "made", tied=tied)
    t5_bare = tmp_path / "bare"
    t5_bare.mkdir()
    (t5_bare / "config.json").write_bytes((tmp_path / "made" / "config.json").read_bytes())
    table = tensors.pop("shared.weight")
    tiny.rewrite(t5_bare, tensors | {name: table.clone() for name in names})
    assert same_weights(tmp_path / "made", t5_bare)
    convert(t5_bare, tmp_path / "again")
    assert torch.equal(tiny.stored(tmp_path / "again")["shared.weight"], table)
    if len(names) == 2:
        tiny.rewrite(t5_bare, tensors | {names[0]: table, names[1]: table + 1})
        with pytest.raises(InputError, match=r"embed_tokens.weight is tied to embedding.weight.*different values"):
            load(t5_bare)


def test_a_tied_head_alone_is_the_table(tmp_path: Path) -> None:
    tiny.write(tmp_path / "made", "llama", 4, tied=True)
    tiny.write(tmp_path / "other", "llama", 4, tied=True)
    tensors = tiny.stored(tmp_path / "made")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    tiny.rewrite(tmp_path / "made", tensors)
    assert same_weights(tmp_path / "made", tmp_path / "other")


def test_metadata_of_null_is_none(tmp_path: Path) -> None:
    tiny.write(tmp_path / "made", "llama", 5)
    content = (tmp_path / "made" / tiny.SINGLE).read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length]) | {"__metadata__": None}
    text = json.dumps(header).encode()
    before = {name: tensor.clone() for name, tensor in tiny.stored(tmp_path / "made").items()}
    (tmp_path / "made" / tiny.SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])
    convert(tmp_path / "made", tmp_path / "out")
    tiny.assert_same(tiny.stored(tmp_path / "out"), before)


def test_what_carries_nothing_is_known_with_the_prefix_and_without() -> None:
    """BertForMaskedLM leaves a pooler aside, whose name begins as the other names of its file do."""
    table = tensor_table("bert", read_config({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "x").spec)
    for name, ignored in (
        ("bert.pooler.dense.weight", True),
        ("pooler.dense.weight", True),
        ("cls.seq_relationship.bias", True),
        ("bert.poolers.dense.weight", False),
        ("encoder.pooler.dense.weight", False),
    ):
        assert is_ignored(table, name) is ignored, name
