"""Published models and machines, as data in our own form, each with its source."""

from asbuilt.catalog import machines
from asbuilt.catalog.machine import Link, Machine
from asbuilt.catalog.models import Entry, find, names

__all__ = ["Entry", "Link", "Machine", "find", "machines", "names"]
