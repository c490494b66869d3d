"""Tables as Markdown and as HTML, to the letter."""

from __future__ import annotations

from asbuilt.plan.render import Table, html, markdown

TABLES = [
    Table("First <of> two", ("what", "many", "both"), [("a|b", 1200, 3), ("c<d", 0.5, "four")]),
    Table("Second", ("empty",), []),
]


def test_markdown() -> None:
    """A column of numbers alone is set to the right; bars in cells are escaped."""
    assert (
        markdown(TABLES)
        == """\
### First <of> two

| what | many | both |
| --- | ---: | --- |
| a\\|b | 1,200 | 3 |
| c<d | 0.5 | four |

### Second

| empty |
| --- |
"""
    )


def test_html() -> None:
    assert html(TABLES) == (
        "<table><caption>First &lt;of&gt; two</caption>"
        "<thead><tr><th>what</th><th>many</th><th>both</th></tr></thead><tbody>"
        '<tr><td style="text-align:left">a|b</td><td style="text-align:right">1,200</td>'
        '<td style="text-align:left">3</td></tr>'
        '<tr><td style="text-align:left">c&lt;d</td><td style="text-align:right">0.5</td>'
        '<td style="text-align:left">four</td></tr></tbody></table>'
        "<table><caption>Second</caption><thead><tr><th>empty</th></tr></thead><tbody></tbody></table>"
    )
