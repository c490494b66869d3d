"""Which format each weight of a GGUF file is written in: as asked for by name, by mixture and by path.

Vectors, norms, biases, routers, and tables other than the tokens' are float32, which llama.cpp computes in. The head,
and a token table that is also the head, are in Q6_K where the format asked for is narrower. A file type such as Q4_K_M
is the mixture of formats that `asbuilt.cost.mixtures` bills. Rows that do not divide into blocks take the next format
that holds them.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass

from asbuilt.cost.mixtures import MIXTURES, find_mixture, formats
from asbuilt.dtypes import GGML_TYPES, short_name
from asbuilt.errors import InputError, near, one_of
from asbuilt.families.shared.table import Entry
from asbuilt.spec import Model, Part, Weight, stored_weights

FLOATS = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
ENCODABLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4")
# What a format gives way to where rows do not divide into its blocks: of 256 numbers, then of 32.
INSTEAD = {"q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0"}
WIDER = ("bf16", "fp16", "fp32", "q8_0", "q6_k")  # formats that a head is written in as asked
HEAD = "q6_k"
# The mixtures of which all formats are written: those of llama.cpp without IQ formats.
WRITTEN = tuple(name for name in MIXTURES if name.startswith(("q", "mostly_q", "mxfp4")))
# llama.cpp's numbers of file types (`general.file_type`): of mixtures, and of what most tensors of other files are.
MIXTURE_TYPES = {"mostly_q2_k": 10, "q3_k_s": 11, "q3_k_m": 12, "q3_k_l": 13, "q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16}
MIXTURE_TYPES |= {"q5_k_m": 17, "mostly_q6_k": 18, "q2_k_s": 21, "mxfp4_moe": 38}
FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8, "Q5_1": 9, "Q2_K": 10, "Q3_K": 11}
FILE_TYPES |= {"Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "IQ2_XXS": 19, "IQ2_XS": 20, "IQ3_XXS": 23, "IQ1_S": 24}
FILE_TYPES |= {"IQ4_NL": 25, "IQ3_S": 26, "IQ2_S": 28, "IQ4_XS": 30, "IQ1_M": 31, "BF16": 32, "TQ1_0": 36}
FILE_TYPES |= {"TQ2_0": 37, "MXFP4": 38, "NVFP4": 39}


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Which format weights are written in: `common`, or that of the last of `rules`, (glob of paths, format).

    `common` may be a mixture, such as q4_k_m. None keeps the format that a weight is stored in.
    """

    common: str | None = None
    rules: tuple[tuple[str, str], ...] = ()


def format_named(name: str, what: str = "format", *, mixtures: bool = False) -> str:
    """Returns our name of a format that can be written (q4_0, fp16); raises InputError naming `what`."""
    found = short_name(name)
    if found in FLOATS or found in ENCODABLE:
        return found
    mixture = find_mixture(name)
    if mixtures and mixture is not None and mixture[0] in WRITTEN:
        return mixture[0]
    known = [*FLOATS, *ENCODABLE, *(WRITTEN if mixtures else ())]
    raise InputError("cannot be written", field=what, value=name, allowed=one_of(known), fix=near(found, known))


def file_type(mixture: str | None, most: str) -> int | None:
    """Returns llama.cpp's number of a mixture, or of a file of which most is in one type; None if it has none."""
    return MIXTURE_TYPES.get(mixture or "", FILE_TYPES.get(most))


def kept_wide(path: str, weight: Weight, owner: Part) -> bool:
    """Returns whether a weight is always written in float32: vectors, routers, and tables other than of tokens."""
    table = weight.role == "table" and not path.endswith("embedding.weight")
    return weight.role in ("bias", "gain") or table or owner.kind == "router"


def fitting(kind: str, shape: tuple[int, ...]) -> str:
    """Returns the type, or what it gives way to where rows do not divide into its blocks."""
    blocks = {found.name: found.block for found in GGML_TYPES.values()}
    while shape and shape[-1] % blocks[kind]:
        kind = INSTEAD.get(kind.lower(), "f16").upper()
    return kind


class Wanted:
    """Which format is asked for each weight of a model, whose file has the tensors `entries`."""

    def __init__(self, asked: Formats, spec: Model, entries: Sequence[Entry]) -> None:
        paths = [path for path, _, _ in stored_weights(spec)]
        self._ruled: dict[str, str] = {}
        for glob, format in asked.rules:
            self._ruled |= dict.fromkeys(matching(glob, paths), format_named(format, "by"))
        common = None if asked.common is None else format_named(asked.common, mixtures=True)
        self.mixture = common if common in WRITTEN else None
        self._of: dict[str, str | None] = dict.fromkeys(paths, common)
        if self.mixture is not None:
            self._of |= formats(spec, self.mixture, MIXTURES[self.mixture], joined=any(map(_joined, entries)))
        self._of |= self._ruled

    def as_said(self, path: str) -> bool:
        """Returns whether a weight's format holds for a head too: where a rule or a mixture says it."""
        return path in self._ruled or self.mixture is not None

    def of(self, entry: Entry) -> str | None:
        """Returns the format of a tensor; raises InputError where its weights are asked for in several."""
        found = {path: self._of[path] for path in entry.paths}
        if len(set(found.values())) > 1:
            said = {path: format or "as stored" for path, format in found.items()}
            allowed = "one format for weights that lie in one tensor of a GGUF file"
            raise InputError(field="by", value=said, allowed=allowed)
        return found[entry.paths[0]]


def _joined(entry: Entry) -> bool:
    """Returns whether a tensor is several maps of an attention side by side."""
    names = {path.removesuffix(".weight").rpartition(".")[2] for path in entry.paths if path.endswith(".weight")}
    return names >= {"q", "k", "v"}


def matching(glob: str, paths: Sequence[str]) -> list[str]:
    """Returns the paths of weights that match, or of which the part that holds them does; InputError if none does."""
    found = [
        path for path in paths if any(fnmatch.fnmatchcase(one, glob) for one in (path, path.removesuffix(".weight")))
    ]
    if not found:
        raise InputError("no weight has such a path", field="by", value=glob, fix=near(glob, paths))
    return found
