"""Labels of texts beside transformers', each as if alone, and by the names of the config."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random

import pytest
import torch
from byte_tokenizer import write_tokenizer
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
)

from asbuilt.checkpoint.load import load
from asbuilt.errors import InputError
from asbuilt.generate.classify import classify, label_ids

SIZES = {"vocab_size": 300, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "max_position_embeddings": 48}


@torch.inference_mode()
def test_a_reranker_scores_pairs_of_texts_of_any_length(tmp_path: Path) -> None:
    config = BertConfig(**SIZES, num_labels=1)  # type: ignore[arg-type]
    theirs, rng = BertForSequenceClassification(config).eval(), Random(3)
    theirs.save_pretrained(tmp_path)
    ids = [[rng.randrange(1, 300) for _ in range(n)] for n in (7, 31, 18)]
    types = [[int(i > len(row) // 2) for i in range(len(row))] for row in ids]
    have = label_ids(load(tmp_path), ids, types)
    for row, kinds, score in zip(ids, types, have, strict=True):
        want = theirs(torch.tensor([row]), token_type_ids=torch.tensor([kinds])).logits[0]
        torch.testing.assert_close(score, want, atol=1e-5, rtol=1e-4)


@torch.inference_mode()
def test_texts_are_labelled_by_name(tmp_path: Path) -> None:
    names = {0: "sad", 1: "glad", 2: "neither"}
    config = LlamaConfig(**SIZES, id2label=names, pad_token_id=299, bos_token_id=None, eos_token_id=None)  # type: ignore[arg-type]
    theirs = LlamaForSequenceClassification(config).eval()
    theirs.save_pretrained(tmp_path)
    n_tokens, _ = write_tokenizer(tmp_path)
    assert n_tokens < 299
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    texts = ["so it goes", "what a day", "x"]
    found = classify(tmp_path, texts)
    assert found.names == ("sad", "glad", "neither")
    for text, scores, best in zip(texts, found.scores, found.best, strict=True):
        want = theirs(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0]
        torch.testing.assert_close(scores, want, atol=1e-5, rtol=1e-4)
        assert best == names[int(want.argmax())]
    with pytest.raises(InputError, match=r"texts\.1: does not fit .*got 49; must be 1 to 48 tokens"):
        classify(tmp_path, ["a", "b" * 48])


def test_what_does_not_label_texts_is_refused(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES).to_dict()  # type: ignore[arg-type]
    for kind in ("LlamaForCausalLM", "LlamaModel", "LlamaForTokenClassification"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [kind]}))
        with pytest.raises(InputError, match="does not label texts"):
            classify(tmp_path, ["x"])
