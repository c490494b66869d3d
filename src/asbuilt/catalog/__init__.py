"""Published models and machines, as data in our own form, each with its source; `machines` only when asked for."""

from asbuilt.catalog.models import Entry, find, names

__all__ = ["Entry", "find", "names"]
