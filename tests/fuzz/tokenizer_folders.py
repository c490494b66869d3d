"""Mutated tokenizer folders: each reads a text or is refused with one message, within its budget.

`python tests/fuzz/tokenizer_folders.py --count 50000 --seed 1` takes small tokenizers of every kind that the library
knows, with the configurations beside them, and mutates what is in them, their steps repeated many times over among it. Prints
what happened, and exits with 1 at the first that escaped or took more than a second of CPU time or 100 MB.
"""

# ruff: noqa: E501  tables

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent))
from configs import MUTATIONS, holder, places
from running import run

from asbuilt.errors import InputError
from asbuilt.text import tokenizer
from asbuilt.text.chat import encode_chat, turn_ends
from asbuilt.text.tokenizer import Tokenizer
from asbuilt.text.tokenizer_worker import Distant
from asbuilt.text.worker import Worker

SLOWEST, LARGEST = 1.0, 100 << 20
AGAIN = 200  # draws by one process
MOST_DECODED = 4096  # tokens: what decoding them may take grows with their number, and a text may become 80,000
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
GROW = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPACES = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
NORMALIZERS: list[Any] = [
    None,
    GROW,
    {"type": "NFKD"},
    {"type": "Prepend", "prepend": "▁"},
    {"type": "Lowercase"},
    {"type": "StripAccents"},
    {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": True,
        "strip_accents": None,
        "lowercase": True,
    },
    {"type": "Replace", "pattern": {"Regex": "(a|b)+c?"}, "content": "cab"},
    {"type": "Nmt"},
    {"type": "Strip", "strip_left": True, "strip_right": True},
    {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
]
CUTS: list[Any] = [
    None,
    BYTES,
    SPACES,
    {"type": "Whitespace"},
    {"type": "BertPreTokenizer"},
    {"type": "Digits", "individual_digits": True},
    {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Split", "pattern": {"Regex": r"\p{L}+|\s+(?!\S)|."}, "behavior": "MergedWithNext", "invert": True},
    {"type": "Punctuation", "behavior": "Contiguous"},
    {"type": "CharDelimiterSplit", "delimiter": "a"},
    {"type": "UnicodeScripts"},
    {"type": "FixedLength", "length": 2},
]
VOCAB = {token: i for i, token in enumerate(["<u>", *"abcdeĠ▁ 1", "ab", "##b", "##c", "<0x41>"])}
MODELS: list[Any] = [
    {
        "type": "BPE",
        "dropout": None,
        "unk_token": "<u>",
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": VOCAB,
        "merges": [["a", "b"]],
    },
    {
        "type": "WordPiece",
        "unk_token": "<u>",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": VOCAB,
    },
    {"type": "WordLevel", "unk_token": "<u>", "vocab": VOCAB},
    {
        "type": "Unigram",
        "unk_id": 0,
        "byte_fallback": False,
        "vocab": [[token, -float(i)] for token, i in VOCAB.items()],
    },
]
PIECES = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
BEHIND: list[Any] = [
    None,
    BYTES,
    {
        "type": "TemplateProcessing",
        "single": PIECES,
        "pair": PIECES,
        "special_tokens": {"<s>": {"id": "<s>", "ids": [20], "tokens": ["<s>"]}},
    },
    {"type": "BertProcessing", "sep": ["<s>", 20], "cls": ["<s>", 20]},
    {
        "type": "RobertaProcessing",
        "sep": ["<s>", 20],
        "cls": ["<s>", 20],
        "trim_offsets": True,
        "add_prefix_space": False,
    },
]
DECODERS: list[Any] = [
    None,
    BYTES,
    SPACES,
    GROW,
    {"type": "WordPiece", "prefix": "##", "cleanup": True},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
    {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    {"type": "CTC", "pad_token": "a", "word_delimiter_token": "b", "cleanup": True},
    {"type": "BPEDecoder", "suffix": "b"},
]
LISTED = {
    "normalizer": "normalizers",
    "pre_tokenizer": "pretokenizers",
    "post_processor": "processors",
    "decoder": "decoders",
}
POOLS = {"normalizer": NORMALIZERS, "pre_tokenizer": CUTS, "post_processor": BEHIND, "decoder": DECODERS}
ADDED = [
    {
        "id": 20 + i,
        "content": content,
        "single_word": False,
        "lstrip": i == 1,
        "rstrip": False,
        "normalized": i == 2,
        "special": i < 2,
    }
    for i, content in enumerate(("<s>", "</s>", "<tool>"))
]
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
BESIDE = {
    "tokenizer_config": {
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "lstrip": False},
        "add_bos_token": True,
        "chat_template": TEMPLATE,
        "model_max_length": 512,
        "tokenizer_class": "LlamaTokenizer",
    },
    "generation_config": {"eos_token_id": [21, 22], "pad_token_id": 0},
    "config": {"eos_token_id": 21, "text_config": {"eos_token_id": [21]}},
    "special_tokens_map": {"bos_token": "<s>", "unk_token": "<u>"},
}
TEXTS = ["", "ab cab 1", "a" * 30 + "!", "é<s>日本 🎉</s>", "a" * 40 + "b", "abc " * 300, "\ufdfa\x00\ud7ff"]


def tokenizer_json(draw: random.Random) -> dict[str, Any]:
    """A file of drawn parts, some of them lists of one step again and again."""
    made: dict[str, Any] = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": ADDED}
    for part, pool in POOLS.items():
        steps = [draw.choice(pool) for _ in range(draw.choice((1, 1, 2, 3)))]
        steps = [step for step in steps if step is not None] * draw.choice((1, 1, 1, 8, 40))
        made[part] = None if not steps else steps[0] if len(steps) == 1 else {"type": "Sequence", LISTED[part]: steps}
    return deepcopy(made | {"model": draw.choice(MODELS)})


def mutate(said: dict[str, Any], draw: random.Random) -> None:
    """Changes one to three places."""
    for _ in range(draw.choice((0, 1, 1, 2, 3))):
        if found := places(said):
            path = draw.choice(found)
            draw.choice(MUTATIONS)(holder(said, path), path[-1], draw)


def written(folder: Path, draw: random.Random) -> str:
    """Writes a drawn folder, and returns what is in it."""
    documents = {"tokenizer": tokenizer_json(draw)} | deepcopy(BESIDE)
    said = []
    for name, document in documents.items():
        if name == "tokenizer" or draw.random() < 0.5:
            if draw.random() < 0.6:
                mutate(document, draw)
            text = json.dumps(document, ensure_ascii=draw.random() < 0.5)
            if draw.random() < 0.03:
                at = draw.randrange(len(text))
                text = text[:at] + draw.choice(("", '"', "\\ud800", "NaN", "[" * 99)) + text[at + 1 :]
            (folder / f"{name}.json").write_bytes(text.encode(errors="surrogatepass"))
            said.append(f"{name}: {text[:3000]}")
    return "\n".join(said)


class Shared(Distant):
    """A tokenizer.json in a process that others were read in before: 50,000 processes would take hours to start."""

    worker = Worker("tokenizer_worker", "the tokenizer")

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path, nbytes)
        self._worker = self.worker

    def facts(self) -> dict[str, Any]:
        """The first thing that is asked."""
        self._worker.ask(self._load)
        return super().facts()


def used(worker: Worker) -> int:
    """Returns the most bytes that the worker's process ever held, 0 where there is none."""
    try:
        status = Path(f"/proc/{worker.pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def tried(folder: Path) -> str:
    """Reads the folder and does with the tokenizer what asbuilt does."""
    try:
        read = Tokenizer.from_file(folder)
        turn_ends(read)
    except InputError:
        return "refused"
    outcome = "read"
    for text in TEXTS:
        try:
            ids = read.encode(text, wrap=True)
            read.decode(ids[:MOST_DECODED])
            assert sum(map(len, read.wrapped(text))) == len(ids)
            encode_chat(read, [{"role": "user", "content": text}])
        except InputError:
            outcome = "read, and a text refused"
    return outcome


def fuzz(count: int, seed: int) -> Counter[str]:
    """Runs `count` cases; raises AssertionError naming the case that broke the rule."""
    draw, outcomes, worker = random.Random(seed), Counter[str](), Shared.worker
    tried_before = 0
    with mock.patch.object(tokenizer, "Distant", Shared):
        for number in range(count):
            folder = Path(tempfile.mkdtemp(prefix="fuzz"))
            try:
                said = written(folder, draw)
                case = f"case {number} of seed {seed}:\n{said}"
                start = time.process_time()
                try:
                    outcomes[tried(folder)] += 1
                except Exception as error:
                    raise AssertionError(f"{type(error).__name__}: {error} escaped from {case}") from error
                spent = time.process_time() - start
                assert spent < SLOWEST, f"{spent:.1f} s for {case}"
                held = used(worker)
                assert held < LARGEST + (30 << 20), f"{held >> 20} MiB for {case}"
            finally:
                shutil.rmtree(folder)
            tried_before += 1
            if tried_before % AGAIN == 0:
                worker.close()
    return outcomes


if __name__ == "__main__":
    run(fuzz, __doc__)
