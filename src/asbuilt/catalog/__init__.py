"""Published models and machines as data, each with its source; `machines` is imported on first use."""

from asbuilt.catalog.models import Entry, find, names

__all__ = ["Entry", "find", "names"]
