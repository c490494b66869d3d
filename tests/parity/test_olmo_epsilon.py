"""olmo's epsilon is fixed at 1e-5, too small to be seen beside a stream of O(1): here the stream is far smaller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cases import CASES
from harness import asbuilt_loads, check, compare, ours, random_tokens, theirs, transformers_loads, transformers_saves
from safetensors.torch import load_file, save_file

from asbuilt.spec import LayerNorm


def test_epsilon(tmp_path: Path) -> None:
    case = CASES["olmo"]
    rng = case.random("epsilon")
    transformers_saves(case.config("untied"), rng.randrange(2**32), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"] *= 1e-3
    save_file(tensors, file, metadata={"format": "pt"})
    mine = asbuilt_loads(tmp_path)
    tokens = random_tokens(rng, mine.spec.n_vocab)
    want = theirs(transformers_loads(tmp_path), tokens)
    check("olmo", "a small stream", ours(mine, tokens), want)
    assert isinstance(mine.spec.norm, LayerNorm)
    block = mine.spec.blocks[0]
    first = replace(block.branches[0], norm=replace(mine.spec.norm, eps=2 * mine.spec.norm.eps))
    other = replace(mine.spec, blocks=(replace(block, branches=(first, *block.branches[1:])), *mine.spec.blocks[1:]))
    assert compare(ours(asbuilt_loads(tmp_path, other), tokens), want).first == "blocks.0"
