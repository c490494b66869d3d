"""Which modules a quantisation names: by name, by name with stars, or by a regular expression. One rule for all.

The patterns are a stranger's and the names may be a hundred thousand, so regular expressions are not run by a
backtracking matcher, which some of them would keep busy for years. All names are looked at side by side: a set of
places in their text is one long integer, and a step of the expression is a few operations on it. Whatever the
expression, nothing is tried twice, and what it may cost is bounded.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from string import ascii_letters, digits, printable

from asbuilt.errors import InputError

LONGEST = 500
MOST_REPEATS = 200
MOST_WORK, STEP = 1 << 35, 20_000  # places times steps, a step taking as long as so many places: about a second
CHARACTERS = frozenset(printable) - {"\n"}
KINDS = {"d": frozenset(digits), "w": frozenset(ascii_letters + digits + "_"), "s": frozenset(" \t\r\f\v")}
REGEX = "re:"
Bits = int


class _Text:
    """The names, one after the other: bit n of a set is the place n characters before the end."""

    def __init__(self, names: Sequence[str]) -> None:
        self.text = "".join(f"{name}\n" for name in names).encode("ascii", "replace")
        self.size, self.work, self._masks = len(self.text), 0, dict[frozenset[str], Bits]()
        self.all = (1 << self.size + 1) - 1
        self.ends = self.before(frozenset("\n"))
        self.starts = self.ends >> 1 | 1 << self.size  # the place after a name's end is where the next one starts

    def before(self, characters: frozenset[str]) -> Bits:
        """The places before one of the characters."""
        if characters not in self._masks:
            table = bytes(49 if chr(i) in characters else 48 for i in range(256))
            self._masks[characters] = int(self.text.translate(table) or b"0", 2) << 1
        return self._masks[characters]

    def spend(self) -> None:
        self.work += self.size + STEP
        if self.work > MOST_WORK:
            raise ValueError("takes too long")


# From the places after a piece of an expression to those before it.
Node = Callable[[_Text, Bits], Bits]


def _one(characters: frozenset[str]) -> Node:
    def before(text: _Text, after: Bits) -> Bits:
        text.spend()
        return (after << 1) & text.before(characters)

    return before


def _any_of(characters: frozenset[str]) -> Node:
    """A run of the characters, of none too: an addition carries through each run at once (Parabix's MatchStar)."""

    def before(text: _Text, after: Bits) -> Bits:
        text.spend()
        run = text.before(characters) >> 1
        return (((after & run) + run) ^ run) | after

    return before


def _many(node: Node) -> Node:
    def before(text: _Text, after: Bits) -> Bits:
        found = new = after
        while new:
            new = node(text, new) & ~found
            found |= new
        return found

    return before


def _chain(nodes: Sequence[Node]) -> Node:
    def before(text: _Text, after: Bits) -> Bits:
        text.spend()
        for node in reversed(nodes):
            after = node(text, after)
        return after

    return before


def _either(nodes: Sequence[Node]) -> Node:
    def before(text: _Text, after: Bits) -> Bits:
        found = 0
        for node in nodes:
            found |= node(text, after)
        return found

    return before


def _ahead(node: Node, wanted: bool) -> Node:
    return lambda text, after: after & (node(text, text.all) if wanted else ~node(text, text.all))


class _Parser:
    """Reads the part of regular expressions that names modules: no references back, no looking behind."""

    def __init__(self, said: str) -> None:
        self.said, self.at, self.depth = said, 0, 0

    def next(self, wanted: str) -> bool:
        found = self.said.startswith(wanted, self.at)
        self.at += len(wanted) if found else 0
        return found

    def take(self) -> str:
        if self.at >= len(self.said):
            raise ValueError("ends too early")
        self.at += 1
        return self.said[self.at - 1]

    def whole(self) -> Node:
        node = self.either()
        if self.at < len(self.said):
            raise ValueError("a bracket too many")
        return node

    def either(self) -> Node:
        self.depth += 1
        if self.depth > 20:
            raise ValueError("nested too deeply")
        found = [self.chain()]
        while self.next("|"):
            found.append(self.chain())
        self.depth -= 1
        return found[0] if len(found) == 1 else _either(found)

    def chain(self) -> Node:
        found = []
        while self.at < len(self.said) and self.said[self.at] not in "|)":
            found.append(self.repeated())
        return _chain(found)

    def repeated(self) -> Node:
        characters, node = self.atom()
        if characters is not None:
            node = _one(characters)
        many = None if node is None else _any_of(characters) if characters is not None else _many(node)
        assert node is not None
        assert many is not None
        if self.next("*"):
            node = many
        elif self.next("+"):
            node = _chain([node, many])
        elif self.next("?"):
            node = _either([node, _chain([])])
        elif self.next("{"):
            return self.counted(node, many)
        else:
            return node
        self.next("?")  # lazy or not, the same names match
        return node

    def counted(self, node: Node, many: Node) -> Node:
        said = self.said[self.at :].partition("}")[0]
        self.at += len(said) + 1
        low, comma, high = said.partition(",")
        if self.at > len(self.said) or not low.isdecimal() or not (high.isdecimal() or not high):
            raise ValueError("a count that is none")
        least, most = int(low[:6]), int(high[:6] or low[:6])
        if not least <= most <= MOST_REPEATS:
            raise ValueError("too many repeats")
        more = [many] if comma and not high else [_either([node, _chain([])])] * (most - least)
        return _chain([node] * least + more)

    def atom(self) -> tuple[frozenset[str] | None, Node | None]:
        """A set of characters, or a node."""
        got = self.take()
        if got == "(":
            return None, self.group()
        if got == "^":
            return None, lambda text, after: after & text.starts
        if got == "$":
            return None, lambda text, after: after & text.ends
        if got in "*+?{":
            raise ValueError("repeats nothing")
        if got == "[":
            return self.characters(), None
        if got == ".":
            return CHARACTERS, None
        return (self.escaped() if got == "\\" else frozenset(got)), None

    def group(self) -> Node:
        looks = {"?=": True, "?!": False}
        look = next((wanted for mark, wanted in looks.items() if self.next(mark)), None)
        if look is None and not self.next("?:") and self.next("?"):
            raise ValueError("a group of a kind that is not known")
        node = self.either()
        if not self.next(")"):
            raise ValueError("a bracket that stays open")
        return node if look is None else _ahead(node, look)

    def escaped(self) -> frozenset[str]:
        got = self.take()
        if got.lower() in KINDS:
            return KINDS[got] if got in KINDS else CHARACTERS - KINDS[got.lower()]
        if got in ascii_letters + digits:
            raise ValueError(f"\\{got} is not known")
        return frozenset(got)

    def characters(self) -> frozenset[str]:
        without, found, first = self.next("^"), set[str](), True
        while first or not self.next("]"):
            got, first = self.take(), False
            one = self.escaped() if got == "\\" else frozenset(got)
            if (
                len(one) == 1
                and self.said[self.at : self.at + 1] == "-"
                and self.said[self.at + 1 : self.at + 2] != "]"
            ):
                self.at += 1
                low, high = ord(next(iter(one))), ord(self.take())
                one = frozenset(map(chr, range(low, min(high, 255) + 1)))
            found |= one
        return CHARACTERS - found if without else frozenset(found)


def plain_name(name: str) -> str:
    """Returns a module's name without the prefixes of a text model inside a multimodal one."""
    return name.removesuffix(".weight").replace("language_model.", "")


def matched(patterns: Iterable[object], names: Iterable[str], field: str) -> set[str]:
    """Returns which names some pattern names.

    A pattern without stars names a module by whole pieces of its name, and what is in it; one with stars the same, from
    the name's beginning, each standing for anything; `re:` is followed by a regular expression that matches at the
    beginning. Raises InputError naming `field` for what is no pattern.
    """
    said = [_pattern(pattern, field) for pattern in patterns]
    shown = {name: plain_name(name) for name in names}
    found = _by_pieces({p for p in said if "*" not in p and not p.startswith(REGEX)}, set(shown.values()))
    ordered = sorted(set(shown.values()))
    text: _Text | None = None
    for pattern in dict.fromkeys(p for p in said if "*" in p or p.startswith(REGEX)):
        start = pattern.removesuffix("*")
        if not pattern.startswith(REGEX) and "*" not in start:
            found.update(ordered[bisect_left(ordered, start) : bisect_left(ordered, start + "\x7f")])
            continue
        text = text or _Text(ordered)
        found.update(_by_expression(pattern, text, ordered, field))
    return {name for name, plain in shown.items() if plain in found}


def _pattern(said: object, field: str) -> str:
    if not isinstance(said, str) or not said or len(said) > LONGEST or not said.isascii() or not said.isprintable():
        raise InputError(
            "not a pattern of names",
            field=field,
            value=said,
            allowed="a module's name, with * for anything, or re: and an expression",
        )
    return said if said.startswith(REGEX) else plain_name(said)


def _by_pieces(patterns: set[str], names: set[str]) -> set[str]:
    """The names of which some pieces, one after the other, are a pattern."""
    lengths: dict[str, set[int]] = {}  # by a pattern's first piece
    for pattern in patterns:
        lengths.setdefault(pattern.partition(".")[0], set()).add(pattern.count(".") + 1)
    found = set()
    for name in names:
        pieces = name.split(".")
        starts = ((i, n) for i, piece in enumerate(pieces) if piece in lengths for n in lengths[piece])
        if any(".".join(pieces[i : i + n]) in patterns for i, n in starts):
            found.add(name)
    return found


# What matches a name with one number between its dots matches it with any other: a digit is only in what `.*` matches.
OF_ANY_NUMBER = re.compile(r"(?:[A-Za-z_$^|()]|\\\.|\.\*|(?<=[A-Za-z_])\.(?=[A-Za-z_]))*")


def tells_experts_apart(said: object) -> bool:
    """Returns whether a pattern may name one expert of a stack and not another: it has a number but a layer's.

    True where that is not certain.
    """
    if not isinstance(said, str):
        return True
    if said.startswith(REGEX):
        return OF_ANY_NUMBER.fullmatch(said.removeprefix(REGEX)) is None
    start = said.removesuffix("*")
    if "*" in start:
        return any(character in digits for character in said)
    pieces = start.split(".")
    return any(piece.isdecimal() and before != "layers" for before, piece in zip(("", *pieces), pieces, strict=False))


def _by_expression(pattern: str, text: _Text, names: Sequence[str], field: str) -> set[str]:
    if pattern.startswith(REGEX):
        said = pattern.removeprefix(REGEX)
    else:
        escaped = "".join(c if c in ascii_letters + digits + "_" else f"\\{c}" for c in pattern)
        said = escaped.replace("\\*", ".*") + "(?:$|\\.)"
    try:
        places = _Parser(said).whole()(text, text.all)
    except ValueError as error:
        raise InputError(f"an expression that is not understood: {error}", field=field, value=pattern) from error
    bits, at, found = f"{places:0{text.size + 1}b}", 0, set()
    for name in names:
        if bits[at] == "1":
            found.add(name)
        at += len(name) + 1
    return found
