"""Encoders in config.json and on disk: what is refused by name, the names of early files, tied tensors stored again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asbuilt import cost
from asbuilt.catalog import find
from asbuilt.checkpoint.load import load
from asbuilt.checkpoint.save import save
from asbuilt.errors import InputError
from asbuilt.families import read_config
from asbuilt.nn import build
from asbuilt.spec import Classifier

SMALL: dict[str, Any] = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "vocab_size": 30,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
}


# What microsoft/deberta-v3-base says beside its sizes.
DISENTANGLED: dict[str, Any] = {
    "model_type": "deberta-v2",
    "layer_norm_eps": 1e-7,
    "max_relative_positions": -1,
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
}
V3 = DISENTANGLED | {"architectures": ["DebertaV2ForMaskedLM"], "position_buckets": 8}


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ({"architectures": ["BertForPreTraining"]}, "next-sentence"),
        ({"architectures": ["BertForNextSentencePrediction"]}, "other heads"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ({"is_decoder": True}, "is_decoder"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings"),
        ({"add_pooling_layer": True}, "no pooler"),
        ({"num_attention_heads": 3}, "a divisor of hidden_size"),
        ({"architectures": ["BertForQuestionAnswering"], "num_labels": 3}, "num_labels"),
        ({"architectures": ["BertForTokenClassification"], "add_pooling_layer": True}, "add_pooling_layer"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {}}, "id2label"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a"}, "num_labels": 2}, "num_labels"),
        ({"model_type": "mpnet", "architectures": ["MPNetModel"], "relative_attention_num_buckets": 16}, "num_buckets"),
        ({"model_type": "mpnet", "architectures": ["MPNetModel"], "max_position_embeddings": 2}, "more than 2"),
        ({"model_type": "mpnet", "architectures": ["MPNetModel"], "type_vocab_size": 2}, "type_vocab_size"),
        ({"model_type": "electra", "architectures": ["ElectraForPreTraining"], "summary_type": "last"}, "summary_type"),
        ({"model_type": "electra", "architectures": ["ElectraForCausalLM"]}, "other heads"),
        (V3 | {"share_att_key": False}, "separate maps of distances"),
        (V3 | {"pos_att_type": "p2p"}, "pos_att_type"),
        (V3 | {"pos_att_type": None}, "pos_att_type"),
        (V3 | {"position_buckets": 1}, "position_buckets"),
        (V3 | {"position_buckets": 30}, "2 to 29"),
        (V3 | {"relative_attention": False}, "pos_att_type"),
        (V3 | {"norm_rel_ebd": "rms_norm"}, "norm_rel_ebd"),
        (V3 | {"embedding_size": 4}, "embeddings of another width"),
        (V3 | {"attention_head_size": 8}, "heads are as wide"),
        (V3 | {"pooler_hidden_size": 4}, "pooler_hidden_size"),
        (V3 | {"pooler_hidden_act": "tanh"}, "pooler_hidden_act"),
        (V3 | {"legacy": False}, "legacy"),
        ({"model_type": "distilbert", "architectures": ["DistilBertModel"]}, "unknown key"),
        ({"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": 15}, "pad_token_id"),
        ({"model_type": "roberta", "architectures": ["RobertaModel"], "pad_token_id": None}, "pad_token_id"),
    ],
)
def test_refused_by_name(said: dict[str, Any], named: str) -> None:
    with pytest.raises(InputError, match=named):
        read_config(SMALL | said, "small")


def test_modernbert_layers_by_the_older_key() -> None:
    sizes = {key: SMALL[key] for key in ("vocab_size", "hidden_size", "num_attention_heads", "intermediate_size")}
    said = sizes | {
        "model_type": "modernbert",
        "num_hidden_layers": 5,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 500.0,
        "local_rope_theta": 50.0,
        "local_attention": 6,
    }
    spec = read_config(said, "small").spec
    bodies: list[Any] = [block.branches[0].body for block in spec.blocks]
    assert [body.window for body in bodies] == [None, 4, None, 4, None]
    assert [body.positions.theta for body in bodies] == [500.0, 50.0, 500.0, 50.0, 500.0]
    assert [block.branches[0].norm is None for block in spec.blocks] == [True, False, False, False, False]


def test_early_names_and_what_is_stored_again(tmp_path: Path) -> None:
    """gamma and beta, the tied decoder, the pooler and next-sentence head of BertForPreTraining's file, positions."""
    reading = read_config(SMALL, "small")
    save(build(reading.spec, seed=3), tmp_path, family="bert", carried=reading.carried)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    first = load(tmp_path)
    early = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors.items()
    }
    early["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"].clone()
    early["cls.predictions.decoder.bias"] = tensors["cls.predictions.bias"].clone()
    early["cls.seq_relationship.weight"] = torch.zeros(2, 8)
    early["bert.pooler.dense.weight"] = torch.zeros(8, 8)
    early["bert.embeddings.position_ids"] = torch.arange(16)[None]
    save_file(early, file)
    again = load(tmp_path)
    for (path, one), (_, other) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), path
    early["cls.predictions.decoder.bias"] += 1
    save_file(early, file)
    with pytest.raises(InputError, match="tied"):
        load(tmp_path)


def test_a_pooler_that_is_not_stored(tmp_path: Path) -> None:
    """The config can say so; else the tensor is missed by name."""
    said = SMALL | {"architectures": ["BertModel"], "add_pooling_layer": False}
    reading = read_config(said, "small")
    save(build(reading.spec), tmp_path, family="bert", carried=reading.carried)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["add_pooling_layer"] is False
    assert "pooler" not in dict(load(tmp_path).spec.children())
    del written["add_pooling_layer"]
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match=r"missing: pooler\.dense"):
        load(tmp_path)


# as it stands in nomic-ai/nomic-embed-text-v1.5, whose code has names of its own
NOMIC: dict[str, Any] = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "n_embd": 768,
    "n_head": 12,
    "n_inner": 3072,
    "n_layer": 12,
    "n_positions": 8192,
    "pad_vocab_size_multiple": 64,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_scaling_factor": None,
    "scale_attn_weights": True,
    "type_vocab_size": 2,
    "use_rms_norm": False,
    "vocab_size": 30528,
}


def test_nomic_bert_by_the_keys_of_its_own_code() -> None:
    spec = read_config(NOMIC, "nomic-embed-text-v1.5").spec
    assert spec == find("nomic-embed-text-v1.5").spec()
    with_head = read_config(NOMIC | {"architectures": ["NomicBertForPreTraining"]}, "nomic").spec
    assert cost.total_parameters(with_head) == 137_354_304
    for key, value in (("n_embd", 760), ("rotary_emb_fraction", 0.5), ("qkv_proj_bias", True), ("prenorm", True)):
        with pytest.raises(InputError, match=key if key != "n_embd" else "hidden_size"):
            read_config(NOMIC | {key: value}, "nomic")
    with pytest.raises(InputError, match="pad_vocab_size_multiple"):
        read_config(NOMIC | {"pad_vocab_size_multiple": 100}, "nomic")


@pytest.mark.parametrize(
    ("said", "labels", "weights"),
    [
        ({"architectures": ["BertForSequenceClassification"], "num_labels": 1}, "first", {"classifier.weight": (1, 8)}),
        ({"architectures": ["BertForTokenClassification"]}, "all", {"classifier.weight": (2, 8)}),
        ({"architectures": ["BertForMultipleChoice"], "num_labels": 4}, "first", {"classifier.weight": (1, 8)}),
        ({"architectures": ["BertForQuestionAnswering"]}, "span", {"qa_outputs.weight": (2, 8)}),
    ],
)
def test_what_labels(said: dict[str, Any], labels: str, weights: dict[str, Any], tmp_path: Path) -> None:
    """A class says what is labelled, its file has the tensors, and it is written under the same class."""
    reading = read_config(SMALL | said, "small")
    head = reading.spec.head
    assert isinstance(head, Classifier)
    assert head.labels == labels
    save(build(reading.spec), tmp_path, family="bert", carried=reading.carried)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: tuple(stored[name].shape) for name in weights} == weights
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == said["architectures"]
    assert load(tmp_path).spec.changed(name="small") == reading.spec


# the published configs, but for what only training reads
DISTILBERT: dict[str, Any] = {
    "activation": "gelu",
    "architectures": ["DistilBertForMaskedLM"],
    "dim": 768,
    "hidden_dim": 3072,
    "max_position_embeddings": 512,
    "model_type": "distilbert",
    "n_heads": 12,
    "n_layers": 6,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": 30522,
}
MPNET: dict[str, Any] = {
    "architectures": ["MPNetForMaskedLM"],
    "hidden_act": "gelu",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 514,
    "model_type": "mpnet",
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 1,
    "relative_attention_num_buckets": 32,
    "vocab_size": 30527,
}


def test_published_configs() -> None:
    assert read_config(DISTILBERT, "distilbert-base-uncased").spec == find("distilbert-base-uncased").spec()
    masked = read_config(MPNET, "all-mpnet-base-v2").spec
    assert cost.total_parameters(masked) == 109_518_527
    assert read_config(MPNET | {"architectures": ["MPNetModel"]}, masked.name).spec == find(masked.name).spec()


BASE: dict[str, Any] = {
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "num_hidden_layers": 12,
}
V3_BASE = BASE | DISENTANGLED
V3_BASE |= {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "vocab_size": 128100}
ELECTRA_SMALL = BASE | {
    "architectures": ["ElectraForPreTraining"],
    "embedding_size": 128,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "layer_norm_eps": 1e-12,
    "model_type": "electra",
    "num_attention_heads": 4,
    "type_vocab_size": 2,
    "vocab_size": 30522,
}


def test_published_configs_of_deberta_and_electra() -> None:
    """The totals are transformers' own, of these configs."""
    small, large = read_config(ELECTRA_SMALL, "small").spec, read_config(V3_BASE, "base").spec
    assert replace(small, name="electra-small-discriminator") == find("electra-small-discriminator").spec()
    assert replace(large, name="deberta-v3-base") == find("deberta-v3-base").spec()
    assert [cost.total_parameters(spec) for spec in (small, large)] == [13_549_057, 184_551_780]


# What microsoft/deberta-v2-xlarge says beside v3's kind of keys.
V2_XLARGE = DISENTANGLED | {
    "attention_head_size": 64,
    "attention_probs_dropout_prob": 0.1,
    "conv_act": "gelu",
    "conv_kernel_size": 3,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 1536,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 512,
    "num_attention_heads": 24,
    "num_hidden_layers": 24,
    "pooler_dropout": 0,
    "pooler_hidden_act": "gelu",
    "pooler_hidden_size": 1536,
    "vocab_size": 128100,
}


def test_v2_xlarge_convolves_its_embeddings() -> None:
    """Beside the same without it: a matrix for each of three tokens, their bias, and a norm."""
    spec = read_config(V2_XLARGE, "xlarge").spec
    assert replace(spec, name="deberta-v2-xlarge") == find("deberta-v2-xlarge").spec()
    without = read_config(V2_XLARGE | {"conv_kernel_size": 0}, "xlarge").spec
    assert cost.total_parameters(spec) - cost.total_parameters(without) == 3 * 1536**2 + 3 * 1536
    assert [branch.name for branch in spec.blocks[0].branches] == ["attention", "ffn", "convolution"]
    assert spec.blocks[1] == without.blocks[0]


@pytest.mark.parametrize("said", [{"conv_kernel_size": 2}, {"conv_groups": 2}, {"conv_act": "swoosh"}])
def test_refused_convolutions(said: dict[str, Any]) -> None:
    with pytest.raises(InputError) as refused:
        read_config(V2_XLARGE | said, "xlarge")
    assert next(iter(said)) in str(refused.value)


def test_deberta_heads_under_the_names_of_its_authors(tmp_path: Path) -> None:
    """The head is read, the rest of what their files hold left aside."""
    reading = read_config(SMALL | V3, "small")
    save(build(reading.spec, seed=3), tmp_path, family="deberta-v2", carried=reading.carried)
    first, file = load(tmp_path), tmp_path / "model.safetensors"
    own = {"cls.predictions.transform.": "lm_predictions.lm_head.", "cls.predictions.": "lm_predictions.lm_head."}
    theirs: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(file).items():
        stem = next((stem for stem in own if name.startswith(stem)), "")
        theirs[own.get(stem, "") + name.removeprefix(stem)] = tensor
    theirs["mask_predictions.dense.weight"] = torch.zeros(8, 8)
    theirs["deberta.embeddings.position_embeddings.weight"] = torch.zeros(16, 8)
    assert not any(name.startswith("cls.") for name in theirs)
    save_file(theirs, file)
    again = load(tmp_path)
    for (path, one), (_, other) in zip(first.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other), path
