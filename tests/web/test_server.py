"""The server: what it answers, and to whom."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from click.testing import CliRunner

from asbuilt.checkpoint.source import open_model
from asbuilt.cli.main import cli
from asbuilt.errors import InputError

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from asbuilt.web import questions, server

GIVEN = open_model("smollm2-135m")
JSON = ("content-type", "application/json")


def scope(
    path: str, method: str = "POST", headers: Iterable[tuple[str, str]] = (JSON,), host: str = "localhost"
) -> dict[str, Any]:
    lines = [(k.encode(), v.encode()) for k, v in (("host", host), *headers)]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": lines,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 1),
    }


def call(
    path: str,
    body: bytes = b"",
    method: str = "POST",
    headers: Iterable[tuple[str, str]] = (JSON,),
    host: str = "localhost",
) -> tuple[int, dict[str, str], bytes]:
    """Returns the status, headers and body of one request, in process."""
    sent: list[Any] = []
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:  # noqa: ANN401
        return pieces.pop() if pieces else {"type": "http.disconnect"}

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    asyncio.run(server.app(GIVEN)(scope(path, method, headers, host), receive, send))
    head = {k.decode(): v.decode() for k, v in sent[0]["headers"]}
    return sent[0]["status"], head, b"".join(message.get("body", b"") for message in sent[1:])


def ask(kind: str, asked: object) -> tuple[int, dict[str, Any]]:
    status, _, body = call(f"/api/{kind}", json.dumps(asked).encode())
    return status, json.loads(body)


def test_a_search_whose_asker_has_left_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    may_end = threading.Event()

    def answer(_: str, asked: object, __: object) -> dict[str, Any]:
        begun.append(asked)
        assert may_end.wait(60)
        return {"asked": asked}

    monkeypatch.setattr(server, "answer", answer)

    async def one(app: Any, number: int, *, stays: bool) -> int:  # noqa: ANN401
        pieces = [{"type": "http.request", "body": b"[%d]" % number, "more_body": False}]
        sent: list[Any] = []

        async def receive() -> Any:  # noqa: ANN401
            if pieces:
                return pieces.pop()
            if stays:
                await asyncio.Event().wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:  # noqa: ANN401
            sent.append(message)

        await app(scope("/api/layouts"), receive, send)
        return sent[0]["status"]

    async def all_at_once() -> list[int]:
        app = server.app(GIVEN)
        asked = [asyncio.create_task(one(app, i, stays=i != 1)) for i in range(3)]
        while not begun:
            await asyncio.sleep(0.01)
        may_end.set()
        return list(await asyncio.gather(*asked))

    assert asyncio.run(all_at_once()) == [200, 400, 200]
    assert begun == [[0], [2]]


def test_it_answers_with_the_documents() -> None:
    asked = {"model": "gpt2", "gpu": "l4"}
    assert ask("serve", asked) == (200, json.loads(json.dumps(questions.answer("serve", asked))))
    assert ask("describe", {})[1]["name"] == GIVEN.name
    status, _, body = call("/api/catalogue", method="GET")
    assert (status, json.loads(body)["given"]) == (200, GIVEN.name)


def test_invalid_input_is_a_message_by_field() -> None:
    status, found = ask("serve", {"model": "gpt2", "gpu": "l5"})
    assert status == 400
    assert found["error"]["field"] == "gpu"
    assert found["error"]["message"].startswith("gpu: unknown machine (got 'l5'")


@pytest.mark.parametrize("body", [b"", b"{", b"[" * 100_000, b'{"model": NaN}', b"\xff", b"[1" + b"0" * 5000 + b"]"])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    assert call("/api/describe", body)[0] == 400


def test_questions_are_bounded_and_typed() -> None:
    long = json.dumps({"config": {"_": "x" * server.LARGEST_BODY}}).encode()
    status, _, body = call("/api/describe", long)
    assert (status, json.loads(body)["error"]["field"]) == (400, "question")
    assert call("/api/describe", b"{}", headers=[("content-type", "text/plain")])[0] == 400
    assert call("/api/describe", b"{}", headers=[])[0] == 400
    assert call("/api/nothing", b"{}")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8765", "127.0.0.1.evil.example", "10.0.0.1", ""])
def test_another_host_is_refused(host: str) -> None:
    for path, method in (("/api/describe", "POST"), ("/api/catalogue", "GET"), ("/", "GET")):
        assert call(path, b"{}", method, host=host)[0] == 400


def test_the_page_is_allowed_its_own_files_only() -> None:
    status, head, body = call("/", method="GET")
    assert (status, head["content-type"]) == (200, "text/html; charset=utf-8")
    assert "default-src 'none'" in head["content-security-policy"]
    assert b"http://" not in body.replace(b"http://www.w3.org", b"")
    assert b"https://" not in body
    assert call("/../server.py", method="GET")[0] == 404
    assert call("/%2e%2e/server.py", method="GET")[0] == 404


def test_a_port_in_use_is_one_message() -> None:
    taken = server.listening(0)
    port = str(taken.getsockname()[1])
    with taken:
        assert CliRunner().invoke(cli, ["web", "--no-open", "--port", port]).exit_code == 2
        with pytest.raises(InputError, match=r"port: is in use \(got [0-9]+\); give another --port"):
            server.listening(int(port))
