"""Published models, as data in our own form, each with its source."""

from asbuilt.catalog.models import Entry, find, names

__all__ = ["Entry", "find", "names"]
