"""The page as one file that works offline: its own modules, style and documents, and no address of anything else.

The modules are those that `asbuilt web` serves, each wrapped in a function in place of what a browser would fetch. A
policy in the file allows this one script and style, so that nothing in a model's names can run or be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from asbuilt.files import json_text, write_whole
from asbuilt.shown import cut, line
from asbuilt.tables import Table, shown

PAGE = Path(__file__).parent / "page"
ENTRY = "file.js"
TITLE = 200  # characters: names are untrusted
IMPORT = re.compile(r'^import (?:\* as (\w+)|(\{ [\w$, ]+ \})) from "\./(\w+)\.js";$', re.MULTILINE)
EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const) ([\w$]+))", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Document:
    """A JSON document, and the command that prints it, "" where none does."""

    data: Mapping[str, Any]
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is drawn together, by kind: describe, serve, curves, train, measure; `tables` are drawn as they are."""

    title: str
    documents: Mapping[str, Document] = field(default_factory=dict)
    tables: Sequence[Table] = ()


def save(path: Path, command: str, cases: Sequence[Case]) -> None:
    """Writes the file, completely or not at all; raises InputError naming `html` if it cannot be written."""
    write_whole(path, document(command, cases).encode(), "html")


def document(command: str, cases: Sequence[Case]) -> str:
    """Returns the file's text; `command` is the one that asked for it."""
    page = (PAGE / "index.html").read_text(encoding="utf-8")
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    script = bundle(ENTRY)
    title = html.escape(cut(line(cases[0].title), TITLE))
    before, _, rest = page.partition("<form")
    after = rest.partition("</form>")[2]
    page = f"{before}{after}{_data(command, cases)}"
    for old, new in (
        ("<title>asbuilt</title>", f"{_policy(script, style)}\n<title>{title} · asbuilt</title>"),
        ('<link rel="stylesheet" href="style.css">', f"<style>{style}</style>"),
        ('<script type="module" src="main.js"></script>', f'<script type="module">{script}</script>'),
        ('<div class="page">', '<div class="page alone">'),
    ):
        assert page.count(old) == 1, old
        page = page.replace(old, new)
    return page


def bundle(entry: str) -> str:
    """Returns a module of the page and those that it imports as one script, the imported ones first."""
    found: dict[str, str] = {}
    _add(entry.removesuffix(".js"), found)
    script = "\n".join(found.values())
    assert "</script" not in script
    assert "<!--" not in script
    return script


def _add(name: str, found: dict[str, str]) -> None:
    """Adds the module after those that it imports, as a constant that holds what it exports."""
    source = (PAGE / f"{name}.js").read_text(encoding="utf-8")
    for imported in IMPORT.findall(source):
        if imported[2] not in found:
            _add(imported[2], found)
    body = IMPORT.sub(lambda one: f"const {one[1] or one[2]} = of_{one[3]};", source)
    exported = ", ".join(EXPORT.findall(body))
    body = EXPORT.sub("", body)
    assert not re.search(r"^(import|export)\b", body, re.MULTILINE), f"{name}.js imports or exports in another form"
    found[name] = f"const of_{name} = (() => {{\n{body}\nreturn {{ {exported} }};\n}})();"


def _policy(script: str, style: str) -> str:
    scripts, styles = _digest(script), _digest(style)
    allowed = f"default-src 'none'; script-src '{scripts}'; style-src '{styles}'; img-src data:; base-uri 'none'"
    return f'<meta http-equiv="content-security-policy" content="{allowed}; form-action \'none\'">'


def _digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _data(command: str, cases: Sequence[Case]) -> str:
    """Returns the documents as blocks of JSON, and one block that says which is which."""
    blocks: list[str] = []

    def block(data: object) -> str:
        blocks.append(_block(f"data-{len(blocks)}", data))
        return f"data-{len(blocks) - 1}"

    said = [
        {
            "title": cut(line(case.title), TITLE),
            "documents": {
                kind: {"id": block(one.data), "command": one.command} for kind, one in case.documents.items()
            },
            "tables": [_table(table) for table in case.tables if table.rows],
        }
        for case in cases
    ]
    about = _block("about", {"command": command, "version": _version(), "cases": said})
    return "\n".join([*blocks, about, ""])


def _version() -> str:
    """Returns asbuilt's version, "" where it is not installed."""
    try:
        return metadata.version("asbuilt")
    except metadata.PackageNotFoundError:
        return ""


def _table(table: Table) -> dict[str, Any]:
    rows = [[shown(cell) for cell in row] for row in table.rows]
    return {"title": table.title, "columns": table.columns, "rows": rows}


def _block(name: str, data: object) -> str:
    """Returns JSON that no text in it can end early: in JSON "<" occurs only within strings."""
    text = json_text(data).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'
