"""Tiny checkpoints made by transformers, every parameter drawn at random: at first values a lost one would not show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

N_VOCAB, D_MODEL, N_HEADS, N_KV_HEADS, D_HEAD, D_FF = 61, 12, 3, 1, 6, 20
transformers.utils.logging.disable_progress_bar()

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 1}
LLAMA: dict[str, Any] = {
    "hidden_size": D_MODEL,
    "num_attention_heads": N_HEADS,
    "num_key_value_heads": N_KV_HEADS,
    "head_dim": D_HEAD,
    "intermediate_size": D_FF,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
}
GPT2: dict[str, Any] = {"n_embd": D_MODEL, "n_layer": 2, "n_head": N_HEADS, "n_positions": 16}

seeds = st.integers(0, 2**32 - 1)
families = st.sampled_from(["llama", "gpt2"])
dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def build(
    family: str, seed: int, *, tied: bool = False, dtype: torch.dtype = torch.float32, **more: object
) -> PreTrainedModel:
    """Returns a model whose every parameter is drawn from `seed`; `more` overrides its config."""
    torch.manual_seed(seed)
    sizes = LLAMA if family == "llama" else GPT2
    config: dict[str, Any] = {"vocab_size": N_VOCAB, "tie_word_embeddings": tied, **TOKENS, **sizes, **more}
    if family == "llama":
        made: PreTrainedModel = LlamaForCausalLM(LlamaConfig(**config))
    else:
        made = GPT2LMHeadModel(GPT2Config(**config))
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter)
    torch.nn.Module.to(made, dtype)
    return made


def write(
    folder: Path,
    family: str,
    seed: int,
    *,
    shards: bool = False,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Writes a folder as transformers does, in several shards if asked, and returns its model."""
    made = build(family, seed, tied=tied, dtype=dtype)
    made.save_pretrained(folder, max_shard_size="4kB" if shards else "5GB")
    assert (folder / INDEX).is_file() == shards
    return made


def load_strictly(folder: Path) -> PreTrainedModel:
    """Returns the model that transformers loads in the folder's dtype; fails where it finds the tensors wanting."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", output_loading_info=True)
    model, info = loaded
    assert not any(info.values()), info
    return model


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a folder, read by the library."""
    files = [folder / SINGLE] if (folder / SINGLE).is_file() else sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})


def edit_json(path: Path, **changes: object) -> None:
    """Sets keys, or removes those set to None."""
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


def assert_same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert have.keys() == want.keys()
    for name, tensor in want.items():
        assert have[name].dtype == tensor.dtype, name
        assert torch.equal(have[name], tensor), name
