"""The labels of a classifier in a config: their names, or their number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asbuilt.families.shared.reader import ConfigReader

# A classifier of more labels than this is a mistake: the largest published has 21,843.
MOST_LABELS = 10_000_000


def read_labels(reader: ConfigReader) -> int:
    """Returns how many labels there are: the names, or their number; two where neither is given."""
    named = reader.config.get("id2label")
    if named is None:
        return reader.size("num_labels", default=2, null=2, most=MOST_LABELS)
    if not isinstance(named, dict) or not named:
        raise reader.error("id2label", value=named, allowed="an object with a name for each label")
    return reader.size("num_labels", default=len(named), null=len(named), least=len(named), most=len(named))


def written_labels(n_labels: int, carried: Mapping[str, Any]) -> dict[str, Any]:
    """Returns names for so many labels; nothing where as many were carried."""
    if len(carried.get("id2label") or {}) == n_labels:
        return {}
    names = [f"LABEL_{i}" for i in range(n_labels)]
    return {
        "id2label": {str(i): label for i, label in enumerate(names)},
        "label2id": {label: i for i, label in enumerate(names)},
    }
