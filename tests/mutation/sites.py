"""Deliberate errors in a Python file: each a small edit of its source, found on its syntax tree.

Operators and comparisons are exchanged, conditions negated, numbers and keys changed, one side of a sum dropped, a
guard or a call removed. What only words a message (text handed to an exception, help texts, docstrings, f-strings),
what only states types and the flags of dataclasses are left alone.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}
NAMES = {"max": "min", "min": "max", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil", "sum": "max"}
# Text handed to these is for a person to read.
SPOKEN = re.compile(r"(Error|Warning|option|argument|echo|require|say|warn|help|command|secho)$")
KEY = re.compile(r"[A-Za-z][A-Za-z0-9_.\-]*")


@dataclass(frozen=True)
class Error:
    """One deliberate error: the text between two offsets of a file's bytes, and what stands there instead."""

    start: int
    end: int
    line: int
    old: str
    new: str

    def applied(self, source: bytes) -> bytes:
        """Returns the file's bytes with the error in them."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def errors(source: bytes) -> list[Error]:
    """Returns every error that can be made in a file, in the order of its lines; each still compiles."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node, new in _edits(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        error = Error(start, end, node.lineno, source[start:end].decode(), new)
        if error.old != error.new and _compiles(error.applied(source)):
            found.append(error)
    return sorted(found, key=lambda error: (error.start, error.end, error.new))


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutated", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


Node = ast.expr | ast.stmt


def _edits(tree: ast.AST) -> Iterator[tuple[Node, str]]:
    """Yields a node and the source that takes its place, for all of a tree that does something."""
    for child in _children(tree):
        if isinstance(child, ast.expr):
            yield from ((child, _bracketed(new)) for new in _expression(child, tree))
        elif isinstance(child, ast.stmt):
            yield from ((child, new) for new in _statement(child))
        yield from _edits(child)


def _children(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom) or _only_for_types(node):
        return
    skipped: list[object] = [getattr(node, "annotation", None), getattr(node, "returns", None)]
    if isinstance(node, ast.Call) and SPOKEN.search(ast.unparse(node.func)):
        skipped += [*node.args, *(keyword for keyword in node.keywords if keyword.arg != "default")]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("cast", "TypeVar", "NewType"):
        skipped += node.args[:1]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dataclass":
        return
    if isinstance(node, ast.Raise):
        return
    for child in ast.iter_child_nodes(node):
        if not any(child is skip for skip in skipped) and not _documentation(child):
            yield child


def _only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def _documentation(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _bracketed(source: str) -> str:
    return source if re.fullmatch(r"[\w.]+|'[^']*'", source) else f"({source})"


def _expression(node: ast.expr, parent: ast.AST) -> Iterator[str]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARE:
            yield ast.unparse(ast.Compare(node.left, [COMPARE[type(op)]()], node.comparators))
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))
            if isinstance(node.op, ast.Add | ast.Sub):
                yield ast.unparse(node.left)
        case ast.BoolOp():
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield ast.unparse(ast.BoolOp(other, node.values))
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield ast.unparse(node.operand)
        case ast.IfExp():
            yield ast.unparse(ast.IfExp(node.test, node.orelse, node.body))
        case ast.Name(id=name, ctx=ast.Load()) if name in NAMES and isinstance(parent, ast.Call):
            yield NAMES[name]
        case ast.Attribute(attr=name) if name in NAMES and isinstance(parent, ast.Call) and parent.func is node:
            yield ast.unparse(ast.Attribute(node.value, NAMES[name], ast.Load()))
        case ast.Constant(value=bool(value)):
            yield repr(not value)
        case ast.Constant(value=int(value)):
            yield repr(value + 1)
            if value > 2:
                yield repr(value // 2)
        case ast.Constant(value=float(value)):
            yield repr(2 * value)
        case ast.Constant(value=str(value)) if KEY.fullmatch(value) and _is_key(parent):
            yield repr(value + "x")


def _is_key(parent: ast.AST) -> bool:
    """Tells whether a text is looked up, compared or handed on, so that another would do something else."""
    return isinstance(parent, ast.Subscript | ast.Dict | ast.Compare | ast.Call | ast.keyword)


def _statement(node: ast.stmt) -> Iterator[str]:
    match node:
        case ast.Raise() | ast.AugAssign() | ast.Expr(value=ast.Call()):
            yield "pass"
        case ast.If() if not _only_for_types(node):
            yield f"if not ({ast.unparse(node.test)}):" + _from_body(node)


def _from_body(node: ast.If) -> str:
    """What follows the condition, written again; comments are lost, which changes nothing."""
    first, *rest = ast.unparse(node).splitlines()
    assert first.endswith(":")
    indent = " " * node.col_offset
    return "".join(f"\n{indent}{line}" for line in rest)
