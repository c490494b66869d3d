"""A tiny checkpoint with a byte tokenizer and a chat template, chats drawn at random, and what their tokens must be."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
from byte_tokenizer import write_tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from asbuilt.train.recipe import Recipe, loads

CONTROLS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CONTEXT = 120
Chat = list[dict[str, str]]


def checkpoint(folder: Path, template: str | None = TEMPLATE) -> Path:
    """Writes a Llama of width 32 with every weight drawn, and its tokenizer."""
    folder.mkdir()
    write_tokenizer(folder)
    made = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(list(CONTROLS))
    made.save(str(folder / "tokenizer.json"))
    said = {"eos_token": "</s>"} | ({} if template is None else {"chat_template": template})
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    end = made.token_to_id("</s>")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        vocab_size=made.get_vocab_size(),
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.25)  # gains around 1
    model.save_pretrained(folder)
    return folder


def theirs(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def token(folder: Path, text: str) -> int:
    found = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(text)
    assert found is not None
    return found


def spelt(folder: Path, chat: Chat, last: bool = False) -> tuple[list[int], list[bool]]:
    """The tokens of a chat, one for each byte, and which are an answer's: counted here, not read off a template."""
    read = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    answers: list[bool] = []
    for number, message in enumerate(chat):
        inside = read.encode(message["content"], add_special_tokens=False).ids
        ids += [token(folder, f"<|{message['role']}|>"), *inside, token(folder, "<|end|>")]
        counts = message["role"] == "assistant" and (not last or number == len(chat) - 1)
        answers += [False, *[counts] * (len(inside) + 1)]
        ids += read.encode("\n", add_special_tokens=False).ids
        answers += [False]
    return ids, answers


def words(least: int = 1, most: int = 9) -> str:
    return "".join(random.choices("abc é", k=random.randint(least, most)))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def chat(turns: int) -> Chat:
    said = [{"role": "system", "content": words()}] if random.random() < 0.5 else []
    return said + [message for _ in range(turns) for message in (user(words()), assistant(words()))]


def lines(file: Path, documents: list[dict[str, Any]]) -> Path:
    file.write_text("".join(f"{json.dumps(one)}\n" for one in documents), encoding="utf-8")
    return file


def chats(folder: Path, n: int = 5) -> Path:
    """A file of chats of one and two turns."""
    return lines(folder / "chats.jsonl", [{"messages": chat(1 + i % 2)} for i in range(n)])


def preferences(folder: Path, n: int = 5) -> Path:
    """A file of pairs of different answers."""
    pairs = [{"prompt": words(), "chosen": f"{words()}x", "rejected": f"{words()}y"} for _ in range(n)]
    return lines(folder / "pairs.jsonl", pairs)


def recipe(folder: Path, out: str, *changes: str, **tune: object) -> Recipe:
    """A recipe of six steps on the folder's checkpoint `base` and chats, made when they are not there."""
    base = folder / "base"
    if not base.exists():
        checkpoint(base)
    if not any(change.startswith(("data.chat", "data.preferences", "data.text")) for change in changes):
        file = folder / "chats.jsonl"
        changes = (f"data.chat={file if file.exists() else chats(folder)}", *changes)
    usual = [
        f"model.source={base}",
        "model.weights=true",
        f"data.context={CONTEXT}",
        "data.batch=2",
        "data.validation=0.2",
        "optimizer.lr=0.01",
        "schedule.warmup=0",
        "run.steps=6",
        "run.save_every=2",
        "run.validate_every=3",
        "run.log_every=1",
        f"run.out={folder / out}",
    ]
    said = [f"tune.{key}={json.dumps(value)}" for key, value in tune.items()]
    return loads("", changes=[*usual, *said, *changes])
