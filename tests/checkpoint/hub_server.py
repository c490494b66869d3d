"""A stand-in for the Hugging Face hub: enough of its protocol to list a repository and give its files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


def sha_of(repo: str, revision: str) -> str:
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class Hub:
    """Repositories by id, each its revisions, each its files; `asked` is what was asked for."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, dict[str, bytes]]] = {}
        self.refused: dict[str, tuple[int, str]] = {}  # a repository's status and X-Error-Code
        self.cut: dict[str, int] = {}  # after how many bytes a file's connection breaks, once
        self.listed: dict[str, int] = {}  # sizes of files that are listed otherwise than they are
        self.asked: list[str] = []
        self.endpoint = ""

    @property
    def fetched(self) -> set[str]:
        """The files whose content was asked for."""
        return {path.partition("/resolve/")[2].partition("/")[2] for path in self.asked if path.startswith("GET /org")}


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        sha = ""

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(f"{self.command} {path}")
            api = re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            found = api or file
            repo = found[1] if found else ""
            if repo in hub.refused or repo not in hub.repos:
                return self.refuse(*hub.refused.get(repo, (404, "RepoNotFound")))
            revision = (api[3] if api else file[2] if file else None) or "main"
            known = hub.repos[repo]
            revision = next((name for name in known if revision in (name, sha_of(repo, name))), "")
            if not revision:
                return self.refuse(404, "RevisionNotFound")
            files, self.sha = known[revision], sha_of(repo, revision)
            if api:
                return self.say(self.listing(repo, files, tree=api[2] == "tree"))
            if file and file[3] not in files:
                return self.refuse(404, "EntryNotFound")
            return self.give(file[3] if file else "", files)

        def listing(self, repo: str, files: dict[str, bytes], *, tree: bool) -> object:
            sizes = {name: hub.listed.get(name, len(data)) for name, data in files.items()}
            if tree:
                return [{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()]
            siblings = [{"rfilename": name, "size": size, "blobId": name} for name, size in sizes.items()]
            return {
                "_id": "x",
                "id": repo,
                "sha": self.sha,
                "private": False,
                "siblings": siblings,
                "tags": [],
                "downloads": 0,
                "likes": 0,
            }

        def say(self, document: object) -> None:
            data = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def give(self, name: str, files: dict[str, bytes]) -> None:
            data = files[name]
            first = int((re.fullmatch(r"bytes=(\d+)-.*", self.headers.get("Range") or "") or [0, 0])[1])
            self.send_response(206 if first else 200)
            self.send_header("X-Repo-Commit", self.sha)
            self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
            self.send_header("Accept-Ranges", "bytes")
            if first:
                self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
            self.send_header("Content-Length", str(len(data) - first))
            self.end_headers()
            if self.command == "GET":
                last = hub.cut.pop(name, len(data))
                self.wfile.write(data[first:last])
                if last < len(data):
                    self.close_connection = True

        def refuse(self, status: int, code: str) -> None:
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("X-Error-Message", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

    return Handler


@contextmanager
def served() -> Iterator[Hub]:
    """Gives a hub at an address of this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
