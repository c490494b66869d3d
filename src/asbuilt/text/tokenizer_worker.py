"""The `tokenizers` library, and the process in which it runs an untrusted tokenizer.json (`asbuilt.text.worker`).

A file of a few lines can double a text forty times, contain a pattern that backtracks exponentially, or trip an
assertion in the library. `Engine` is the part of the library that asbuilt needs, with plain values as arguments and
results, in either process.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import Unigram

from asbuilt.errors import InputError
from asbuilt.files import read_text
from asbuilt.text.worker import Request, Worker, serve

LARGEST_FILE = 1 << 26  # bytes; the largest published is 34 MB
MOST_ENTRIES = 1 << 20  # tokens, and merges; XLM-V has 901,629 of the first, Gemma 3 514,906 of the second
LARGEST_ID = 1 << 32

# Measured per byte of the file: SmolLM2's takes 26 bytes and 0.08 µs, XLM-V's 41 bytes and 0.2 µs.
LOAD_MEMORY, LOAD_MEMORY_PER_BYTE = 48 << 20, 48
LOAD_SECONDS, LOAD_SECONDS_PER_BYTE = 0.8, 4e-7
# A token of a text takes about 150 bytes, and a character can be four tokens.
TEXT_MEMORY, TEXT_MEMORY_PER_BYTE = 48 << 20, 1200
TEXT_SECONDS, TEXT_SECONDS_PER_BYTE = 0.8, 1e-5


class Engine:
    """A tokenizer of the library in this process. Any method may raise, with a message for the user."""

    def __init__(self, inner: Tokenizer) -> None:
        inner.no_padding()
        inner.no_truncation()
        self.inner = inner

    def facts(self) -> dict[str, Any]:
        """Returns `added` tokens (id, content, special, lstrip, rstrip), the `decoder`, and the `unknown` id."""
        added = [
            (id_, token.content, token.special, token.lstrip, token.rstrip)
            for id_, token in self.inner.get_added_tokens_decoder().items()
        ]
        decoder = self.inner.decoder
        steps = None if decoder is None else json.loads(decoder.__getstate__())
        return {"added": added, "decoder": steps, "unknown": self._unknown()}

    def _unknown(self) -> int | None:
        model = self.inner.model
        if isinstance(model, Unigram):  # which has the id only in its state, before the vocabulary
            return json.loads(model.__getstate__().partition(b',"vocab"')[0] + b"}").get("unk_id")
        token = getattr(model, "unk_token", None)
        return None if token is None else self.inner.token_to_id(token)

    def n_vocab(self) -> int:
        """Returns the largest id, plus one."""
        return max(self.inner.get_vocab().values(), default=-1) + 1

    def encode(self, text: str, special: bool, wrap: bool) -> tuple[list[int], list[int]]:
        """Returns the ids, and the positions of those that wrapping added."""
        self.inner.encode_special_tokens = not special
        encoding = self.inner.encode(text, add_special_tokens=wrap)
        mask = encoding.special_tokens_mask if wrap else []
        return encoding.ids, [at for at, wrapping in enumerate(mask) if wrapping]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        """Returns the text of the ids."""
        return self.inner.decode([id_ for id_ in ids if 0 <= id_ < LARGEST_ID], skip_special_tokens=skip_special)

    def token(self, id_: int) -> str | None:
        """Returns a token's text."""
        return self.inner.id_to_token(id_) if 0 <= id_ < LARGEST_ID else None

    def id(self, token: str) -> int | None:
        """Returns a token's id."""
        return self.inner.token_to_id(token)

    def pieces(self, text: str) -> list[str]:
        """Returns the pre-tokens of a text, as the vocabulary spells them."""
        normalizer, cuts = self.inner.normalizer, self.inner.pre_tokenizer
        text = text if normalizer is None else normalizer.normalize_str(text)
        return [text] if cuts is None else [piece for piece, _ in cuts.pre_tokenize_str(text)]

    def saved(self) -> str:
        """Returns the text of a tokenizer.json."""
        return self.inner.to_str(pretty=False)


class Distant:
    """A tokenizer.json in a separate process; each method raises WorkerError if it fails or exceeds its limits."""

    def __init__(self, path: Path, nbytes: int) -> None:
        load = Request(
            said={"load": str(path.absolute()), "nbytes": nbytes},
            seconds=LOAD_SECONDS + LOAD_SECONDS_PER_BYTE * nbytes,
            memory=LOAD_MEMORY + LOAD_MEMORY_PER_BYTE * nbytes,
            keeps=True,
        )
        self._worker = Worker("tokenizer_worker", "the tokenizer", load)
        self._load = load

    def _ask(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Sends a request whose limits grow with the file."""
        said = {"method": method, "arguments": arguments}
        return self._worker.ask(Request(said=said, seconds=self._load.seconds, memory=self._load.memory))

    def _ask_of(self, nbytes: int, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Sends a request whose limits grow with a text of `nbytes` bytes."""
        return self._worker.ask(
            Request(
                said={"method": method, "arguments": arguments},
                seconds=TEXT_SECONDS + TEXT_SECONDS_PER_BYTE * nbytes,
                memory=TEXT_MEMORY + TEXT_MEMORY_PER_BYTE * nbytes,
            )
        )

    def facts(self) -> dict[str, Any]:
        """As `Engine.facts`."""
        return self._ask("facts")

    def n_vocab(self) -> int:
        """As `Engine.n_vocab`."""
        return self._ask("n_vocab")

    def encode(self, text: str, special: bool, wrap: bool) -> tuple[list[int], list[int]]:
        """As `Engine.encode`."""
        ids, wrapping = self._ask_of(len(text.encode()), "encode", text, special, wrap)
        return ids, wrapping

    def decode(self, ids: list[int], skip_special: bool) -> str:
        """As `Engine.decode`."""
        return self._ask_of(16 * len(ids), "decode", ids, skip_special)

    def token(self, id_: int) -> str | None:
        """As `Engine.token`."""
        return self._ask_of(0, "token", id_)

    def id(self, token: str) -> int | None:
        """As `Engine.id`."""
        return self._ask_of(len(token), "id", token)

    def pieces(self, text: str) -> list[str]:
        """As `Engine.pieces`."""
        return self._ask_of(len(text.encode()), "pieces", text)

    def saved(self) -> str:
        """As `Engine.saved`."""
        return self._ask("saved")


Library = Engine | Distant


# The child's side.


def load(path: Path, nbytes: int) -> Engine:
    """Returns the tokenizer of a file of `nbytes` bytes; raises InputError, and whatever the library raises."""
    text = read_text(path, nbytes)
    # Each token follows a colon or a bracket, as do merges, so this is an upper bound.
    entries = max(text.count(":"), text.count("["))
    if entries > MOST_ENTRIES + MOST_ENTRIES // 8:
        raise InputError("too many tokens or merges", value=entries, allowed=f"at most {MOST_ENTRIES:,}")
    return Engine(Tokenizer.from_str(text))


def main() -> None:
    """Loads the file that a request names, and answers other requests with the methods of the last loaded one."""
    engine: list[Engine] = []

    def answer(request: dict[str, Any]) -> Any:  # noqa: ANN401
        if "load" in request:
            engine[:] = [load(Path(request["load"]), request["nbytes"])]
            return None
        return getattr(engine[0], request["method"])(*request["arguments"])

    serve(answer)
