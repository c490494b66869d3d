"""Models of the Hugging Face hub, by id: descriptions and safetensors, never code and never pickle.

`huggingface_hub` downloads and caches them, in the same place as for transformers (`HF_HOME`, `HF_HUB_CACHE`; it also
honours `HF_ENDPOINT`, `HF_TOKEN` and `HF_HUB_OFFLINE`). Files appear only when complete; interrupted downloads resume.
"""

from __future__ import annotations

import glob
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from asbuilt.errors import InputError
from asbuilt.formats.safetensors import INDEX, PICKLES, SINGLE, pickle_error, shards_of

PART = r"[A-Za-z0-9][\w.-]{0,95}"
ID = re.compile(rf"({PART}/{PART})(?:@([A-Za-z0-9][\w./-]{{0,127}}))?", re.ASCII)
# What may be downloaded, by name: a pattern such as *.json would include anything else in the repository.
DESCRIPTIONS = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
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
INSIDE = re.compile(r"\d{1,2}_[A-Za-z]{1,40}/config\.json")  # the modules of a sentence encoder
LARGEST = 128 << 20  # bytes of a config or tokenizer file; the largest published tokenizer.json has 35 MB
NEEDED = "huggingface_hub"


def fetch(name: str, *, weights: bool) -> Path:
    """Returns the folder of a model's files, with its weights if `weights`; `name` is ORG/MODEL or ORG/MODEL@REVISION.

    Cached files are not downloaded again, and are used if the hub cannot be reached. Raises InputError for what the hub
    does not have or does not serve, for weights that are only pickled, and if the disk is too small.
    """
    found = ID.fullmatch(name)
    assert found, f"not an id: {name}"
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars
    except ImportError as error:
        raise InputError(
            "not in the catalogue, and downloading it from the hub needs huggingface_hub",
            field="MODEL",
            value=name,
            fix=f"pip install {NEEDED}",
        ) from error
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        info = HfApi(endpoint=_endpoint()).model_info(found[1], revision=found[2], files_metadata=True)
    except Exception as error:  # huggingface_hub's exception classes have changed between versions
        if not _unreachable(error):
            raise _refused(name, error) from error
        return _cached(name, weights)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = [file for file in sizes if file in DESCRIPTIONS or INSIDE.fullmatch(file)]
    for file in wanted:
        if sizes[file] > LARGEST:
            raise InputError(
                "too large for a config file",
                field=f"{name}: {file}",
                value=sizes[file],
                allowed=f"at most {LARGEST:,} bytes",
            )
    folder = _fetched(name, wanted, sizes)
    return folder if not weights else _fetched(name, _weights(name, folder, sizes), sizes)


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _weights(name: str, folder: Path, sizes: Iterable[str]) -> list[str]:
    """Returns the files with the weights, in transformers' order of preference."""
    if SINGLE in sizes:
        return [SINGLE]
    if (folder / INDEX).exists():
        return shards_of(folder / INDEX)
    pickles = sorted(file for file in sizes if file.endswith(PICKLES))
    if pickles:
        raise pickle_error(name, pickles[0])
    raise InputError(f"the hub has neither {SINGLE} nor {INDEX} for this model", field="MODEL", value=name)


def _fetched(name: str, files: list[str], sizes: dict[str, int]) -> Path:
    """Returns the folder with the files; raises InputError if one is not as listed by the hub."""
    lacking = [file for file in files if file not in sizes]
    if lacking:
        raise InputError(f"{INDEX} names {lacking[0][:80]}, which the hub does not have", field="MODEL", value=name)
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
                f"the download of {file} is incomplete",
                field="MODEL",
                value=name,
                allowed=f"{sizes[file]:,} bytes, and has {have or 0:,}",
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
            f"not enough disk space: {nbytes:,} bytes are needed, {free:,} are free",
            field="MODEL",
            value=name,
            fix="free some, or set HF_HOME to a folder on another disk",
        )


def _snapshot(name: str, files: list[str], *, here: bool) -> Path:
    """Returns the cache folder with the files, which are downloaded unless `here`."""
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
    """Returns the folder of earlier downloads; raises InputError if `weights` are requested but incomplete."""
    try:
        folder = _snapshot(name, [], here=True)
    except Exception as error:
        raise _refused(name, error) from error
    files = shards_of(folder / INDEX) if (folder / INDEX).exists() else [SINGLE]
    lacking = [file for file in files if weights and not (folder / file).exists()]
    if lacking:
        raise InputError(
            f"the hub cannot be reached, and {lacking[0]} is not in the local cache",
            field="MODEL",
            value=name,
            fix=f"connect, or remove {folder}",
        )
    return folder


def _kinds(error: BaseException) -> set[str]:
    """Returns the class names of the error and its causes."""
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
    """Returns the InputError for the library's error, with what to do about it."""
    kinds = _kinds(error)
    page = f"{_endpoint() or 'https://huggingface.co'}/{name.partition('@')[0]}"
    for kind, problem, fix in (
        ("GatedRepoError", "access to this model must be requested", f"request it at {page}, then set HF_TOKEN"),
        ("RepositoryNotFoundError", "the hub has no such model, or it is private", "check its name, or set HF_TOKEN"),
        ("RevisionNotFoundError", "the model has no such revision", f"see {page}/tree/main"),
        (
            "LocalEntryNotFoundError",
            "the hub cannot be reached, and the model is not in the local cache",
            "connect, or give a folder",
        ),
    ):
        if kind in kinds:
            return InputError(problem, field="MODEL", value=name, fix=fix)
    said = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return InputError(f"download failed: {said[:200]}", field="MODEL", value=name, fix="try again later")
