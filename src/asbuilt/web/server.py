"""The server of the page: loopback only, its own files and JSON answers, nothing else.

A page of another site cannot ask it: the Host must be this machine's (DNS rebinding), and a question must be JSON,
which a browser sends elsewhere only with a permission that is never given.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
from pathlib import Path
from typing import Any, NoReturn

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asbuilt.checkpoint.source import Source
from asbuilt.errors import InputError
from asbuilt.files import json_text
from asbuilt.web.questions import ANSWERS, SLOW, answer, catalogue

HOST = "127.0.0.1"
HOSTS = [HOST, "localhost"]
PAGE = Path(__file__).parent / "page"
LARGEST_BODY = 1 << 20  # bytes of a question: a config.json and its options
AT_ONCE, SLOW_AT_ONCE = 2, 1  # questions that are worked on
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Headers:
    """Adds the headers that keep the page to itself."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request."""

        async def headed(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    *((k.encode(), v.encode()) for k, v in HEADERS.items()),
                ]
            await send(message)

        await self.app(scope, receive, headed)


def app(given: Source | None = None) -> Starlette:
    """Returns the application; `given` is the model that the page shows first."""

    gates = {False: asyncio.Semaphore(AT_ONCE), True: asyncio.Semaphore(SLOW_AT_ONCE)}

    async def ask(request: Request) -> Response:
        kind = request.path_params["kind"]
        if kind not in ANSWERS:
            return _json(_refusal(InputError("unknown question", field="question", value=kind)), 404)
        try:
            asked = await _body(request)
            gate = gates[kind in SLOW]
            waited = gate.locked()
            async with gate:
                if waited and await request.is_disconnected():  # another number was typed meanwhile
                    return Response(status_code=400)
                return _json(await run_in_threadpool(answer, kind, asked, given))
        except InputError as error:
            return _json(_refusal(error), 400)
        except ClientDisconnect:
            return Response(status_code=400)

    async def choices(_: Request) -> Response:
        return _json(catalogue(given))

    return Starlette(
        routes=[
            Route("/api/catalogue", choices, methods=["GET"]),
            Route("/api/{kind}", ask, methods=["POST"]),
            Mount("/", StaticFiles(directory=PAGE, html=True)),
        ],
        middleware=[Middleware(Headers), Middleware(TrustedHostMiddleware, allowed_hosts=HOSTS, www_redirect=False)],
    )


async def _body(request: Request) -> object:
    """Returns the question; raises InputError for one that is too long or not JSON."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        raise InputError("must be sent as application/json", field="question")
    read = bytearray()
    async for piece in request.stream():
        read += piece
        if len(read) > LARGEST_BODY:
            raise InputError("too long", field="question", allowed=f"at most {LARGEST_BODY:,} bytes")
    try:
        return json.loads(read, parse_constant=_not_json)
    except (ValueError, RecursionError) as error:
        raise InputError("not JSON", field="question", allowed="one JSON object") from error


def _not_json(name: str) -> NoReturn:
    raise ValueError(name)


def _refusal(error: InputError) -> dict[str, Any]:
    return {"error": {"field": error.field, "message": str(error)}}


def _json(document: dict[str, Any], status: int = 200) -> Response:
    """Returns the document as the command line prints it."""
    return Response(json_text(document), status, media_type="application/json")


def listening(port: int) -> socket.socket:
    """Returns a socket on this machine alone, port 0 any free one; raises InputError if the port cannot be had."""
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((HOST, port))
        made.listen()
    except OSError as error:
        made.close()
        problem = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used: {error.strerror}"
        raise InputError(problem, field="port", value=port, fix="give another --port, or 0 for any free one") from error
    return made


def run(given: Source | None, made: socket.socket) -> None:
    """Serves the page until it is interrupted."""
    settings = uvicorn.Config(app(given), log_level="warning", access_log=False, server_header=False, lifespan="off")
    uvicorn.Server(settings).run(sockets=[made])
