"""Tables of a plan as Markdown and as HTML; the command line prints them itself."""

from asbuilt.tables import Cell, Table, html, markdown, shown

__all__ = ["Cell", "Table", "html", "markdown", "shown"]
