"""Models of the Hugging Face hub, by id: descriptions and safetensors, never code and never pickle.

`huggingface_hub` fetches and keeps them, where transformers looks too (`HF_HOME`, `HF_HUB_CACHE`; `HF_ENDPOINT`,
`HF_TOKEN` and `HF_HUB_OFFLINE` are its own). A file has its name when it is whole; one that was interrupted is resumed.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from asbuilt.checkpoint.safetensors import INDEX, PICKLES, SINGLE, pickle_error, shards_of
from asbuilt.errors import InputError

PART = r"[A-Za-z0-9][\w.-]{0,95}"
ID = re.compile(rf"({PART}/{PART})(?:@([A-Za-z0-9][\w./-]{{0,127}}))?", re.ASCII)
# What may be fetched, by name: a pattern such as *.json would fetch whatever else lies there.
DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "source.spm",
    "target.spm",
    "target_vocab.json",
    "chat_template.jinja",
    "chat_template.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
INSIDE = re.compile(r"\d{1,2}_[A-Za-z]{1,40}/config\.json")  # the steps of a sentence encoder
LARGEST = 128 << 20  # bytes of a description; the largest published tokenizer.json takes 35 MB
NEEDED = "huggingface_hub"


def fetch(name: str, *, weights: bool) -> Path:
    """Returns the folder of a model's files, `name` being ORG/MODEL or ORG/MODEL@REVISION; with weights where asked.

    What is in the cache is not fetched again, and is used where the hub cannot be reached. Raises InputError for what
    the hub does not have or does not give, for weights that are only pickled, and where the disk has too little room.
    """
    found = ID.fullmatch(name)
    assert found, f"not an id: {name}"
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise InputError(
            "not in the catalogue, and to fetch it from the hub needs a library",
            field="MODEL",
            value=name,
            fix=f"pip install {NEEDED}",
        ) from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        info = HfApi(endpoint=_endpoint()).model_info(found[1], revision=found[2], files_metadata=True)
    except Exception as error:  # each reason is an exception of its own there, and which they are has changed
        if not _unreachable(error):
            raise _refused(name, error) from error
        return _cached(name, weights)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = [file for file in sizes if file in DESCRIPTIONS or INSIDE.fullmatch(file)]
    for file in wanted:
        if sizes[file] > LARGEST:
            raise InputError(
                "too large for a description",
                field=f"{name}: {file}",
                value=sizes[file],
                allowed=f"at most {LARGEST:,} bytes",
            )
    folder = _fetched(name, wanted, sizes)
    return folder if not weights else _fetched(name, _weights(name, folder, sizes), sizes)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _weights(name: str, folder: Path, sizes: Iterable[str]) -> list[str]:
    """Returns the files that hold the weights, in the order in which transformers looks."""
    if SINGLE in sizes:
        return [SINGLE]
    if (folder / INDEX).exists():
        return shards_of(folder / INDEX)
    pickles = sorted(file for file in sizes if file.endswith(PICKLES))
    if pickles:
        raise pickle_error(name, pickles[0])
    raise InputError("no weights in safetensors at the hub", field="MODEL", value=name, allowed=f"{SINGLE}, or {INDEX}")


def _fetched(name: str, files: list[str], sizes: dict[str, int]) -> Path:
    """Returns the folder with the files in it; raises InputError where one is not what the hub has listed."""
    lacking = [file for file in files if file not in sizes]
    if lacking:
        raise InputError(f"the hub has no {lacking[0][:80]}, which {INDEX} names", field="MODEL", value=name)
    folder = _here(name)
    new = [file for file in files if folder is None or not (folder / file).exists()]
    _require_room(name, sum(sizes[file] for file in new))
    try:
        folder = _snapshot(name, files, here=False)
    except Exception as error:
        raise _refused(name, error) from error
    for file in files:
        have = (folder / file).stat().st_size if (folder / file).exists() else None
        if have != sizes[file]:
            raise InputError(
                f"{file} was not fetched whole",
                field="MODEL",
                value=name,
                allowed=f"{sizes[file]:,} bytes, not {have or 0:,}",
                fix="try again",
            )
    return folder


def _require_room(name: str, nbytes: int) -> None:
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE)
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if nbytes > free:
        raise InputError(
            f"the disk is too full: {nbytes:,} bytes are needed, and {free:,} are free",
            field="MODEL",
            value=name,
            fix="make room, or set HF_HOME to a folder elsewhere",
        )


def _snapshot(name: str, files: list[str], *, here: bool) -> Path:
    """Returns the folder of the cache that has the files, fetched unless all are to be `here`."""
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    patterns = [glob.escape(file) for file in files] or ["config.json"]
    return Path(
        snapshot_download(
            repo, revision=revision or None, allow_patterns=patterns, endpoint=_endpoint(), local_files_only=here
        )
    )


def _here(name: str) -> Path | None:
    try:
        return _snapshot(name, [], here=True)
    except Exception:
        return None


def _cached(name: str, weights: bool) -> Path:
    """Returns what an earlier run has fetched; raises InputError where the weights are wanted and not all there."""
    try:
        folder = _snapshot(name, [], here=True)
    except Exception as error:
        raise _refused(name, error) from error
    files = shards_of(folder / INDEX) if (folder / INDEX).exists() else [SINGLE]
    lacking = [file for file in files if weights and not (folder / file).exists()]
    if lacking:
        raise InputError(
            f"the hub cannot be reached, and its cache lacks {lacking[0]}",
            field="MODEL",
            value=name,
            fix=f"connect, or remove {folder}",
        )
    return folder


def _kinds(error: BaseException) -> set[str]:
    """The names of the error's classes, and of those it came from."""
    kinds: set[str] = set()
    while error is not None:
        kinds |= {kind.__name__ for kind in type(error).__mro__}
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    return kinds


def _unreachable(error: Exception) -> bool:
    names = {"OfflineModeIsEnabled", "ConnectionError", "ConnectError", "TimeoutException", "Timeout", "ReadTimeout"}
    status = getattr(getattr(error, "response", None), "status_code", 0)
    return bool(names & _kinds(error)) or status >= 500


def _refused(name: str, error: Exception) -> InputError:
    """Returns what the library's error means, and what to do about it."""
    kinds = _kinds(error)
    page = f"{_endpoint() or 'https://huggingface.co'}/{name.partition('@')[0]}"
    for kind, problem, fix in (
        ("GatedRepoError", "its authors give it only to who has asked them", f"ask at {page}, then set HF_TOKEN"),
        ("RepositoryNotFoundError", "the hub has no such model, or only for some", "look at its name; set HF_TOKEN"),
        ("RevisionNotFoundError", "the hub's model has no such revision", f"see {page}/tree/main"),
        (
            "LocalEntryNotFoundError",
            "the hub cannot be reached, and its cache has no such model",
            "connect, or give a folder",
        ),
    ):
        if kind in kinds:
            return InputError(problem, field="MODEL", value=name, fix=fix)
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InputError(f"the hub could not give it: {said[:200]}", field="MODEL", value=name, fix="try again later")
