"""A tokenizer of bytes, written beside checkpoints that tests make."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors


def write_tokenizer(folder: Path) -> tuple[int, int]:
    """Writes one token per byte and an end token, which is put behind every text; returns their number and the last."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("</s>", special=True)])
    end = made.token_to_id("</s>")
    assert end is not None
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return made.get_vocab_size(), end
