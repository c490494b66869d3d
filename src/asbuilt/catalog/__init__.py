"""Published models and machines as data, each with its source; both are imported on first use."""

from typing import TYPE_CHECKING

from asbuilt.packages import on_first_use

if TYPE_CHECKING:
    from asbuilt.catalog.models import Entry, find, names

PUBLIC = {
    "Entry": "asbuilt.catalog.models",
    "find": "asbuilt.catalog.models",
    "names": "asbuilt.catalog.models",
}
__all__ = ["Entry", "find", "names"]

if not TYPE_CHECKING:  # a checker would take every name for one
    __getattr__ = on_first_use(__name__, PUBLIC)
