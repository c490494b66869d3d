"""The published split patterns of byte-level BPE tokenizers, by their names in `tokenizer.ggml.pre`.

A text is split by the first pattern, each piece by the next, and no merge crosses a split. The patterns are those of
the models' own `tokenizer.json`; where GGUF readers replace one because their engine lacks a feature, the original is
used here.
"""

from __future__ import annotations

from dataclasses import dataclass

from asbuilt.errors import InputError, near

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cl100k(digits: str) -> str:
    return rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}"


def _o200k(digits: str, suffix: str) -> str:
    """Splits words where lower case changes to upper case; `suffix` keeps a contraction with its word."""
    lead, upper, lower = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = f"{lead}{upper}*{lower}+{suffix}|{lead}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}"


@dataclass(frozen=True, kw_only=True)
class PreTokenizer:
    """How a text is pre-tokenized: `patterns` in sequence, and the settings of the published tokenizers."""

    patterns: tuple[str, ...]
    nfc: bool = False  # the text is normalised to NFC first
    ignore_merges: bool = False  # a piece that is itself a token is kept, whatever the merges
    add_bos: bool = False  # unless the file says otherwise


_GPT2 = PreTokenizer(patterns=(GPT2,))
_DIGITS = PreTokenizer(patterns=(r"\p{N}", GPT2))
_LLAMA3 = PreTokenizer(patterns=(_cl100k(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer(patterns=(_cl100k(r"\p{N}"),), nfc=True)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _TAIL,
)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # The fallback of GGUF readers for files that name none, written before April 2024.
    "default": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    **dict.fromkeys(("gpt-2", "gpt2", "phi-2", "olmo", "mpt", "exaone4"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    "command-r": PreTokenizer(patterns=_DIGITS.patterns, nfc=True),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), PreTokenizer(patterns=_LLAMA3.patterns)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    "deepseek-v3": PreTokenizer(patterns=_DEEPSEEK),
    "falcon": PreTokenizer(patterns=(r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")),
    "bloom": PreTokenizer(patterns=(r" ?[^(\s|.,!?…。，、।۔،)]+",)),
    "stablelm2": PreTokenizer(patterns=_QWEN2.patterns),
    "tekken": PreTokenizer(patterns=(_o200k(r"\p{N}", ""),), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer(patterns=(_o200k(r"\p{N}{1,3}", _CONTRACTION + "?"),))),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Returns the pre-tokenizer of this name; raises InputError, listing the known names, for an unknown one."""
    found = PRE_TOKENIZERS.get(name)
    if found is None:
        known = ", ".join(PRE_TOKENIZERS)
        hint = near(name, PRE_TOKENIZERS)
        raise InputError("unknown pre-tokenizer", field="tokenizer.ggml.pre", value=name, allowed=known, fix=hint)
    return found
