"""The end tokens that the configs beside a tokenizer declare. No library is needed."""

from __future__ import annotations

from typing import Any

from asbuilt.errors import InputError


def declared_ends(config: dict[str, Any], where: str) -> list[int]:
    """Returns the end token ids of a config.json or generation_config.json, including those of `text_config`.

    null and negative numbers mean none; raises InputError for anything else but ids.
    """
    ends: list[int] = []
    for holder in (config, config.get("text_config")):
        said = holder.get("eos_token_id") if isinstance(holder, dict) else None
        for id_ in said if isinstance(said, list) else [said]:
            if id_ is not None and type(id_) is not int:
                raise InputError(
                    field=f"{where}: eos_token_id",
                    value=said,
                    allowed="a whole number, or a list of them",
                )
            ends += [] if id_ is None or id_ < 0 else [id_]
    return ends
