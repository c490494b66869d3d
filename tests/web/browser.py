"""A headless Chromium, spoken to over the DevTools protocol: what the tests of the page need of it, no more."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0",
    "--no-first-run", "--no-default-browser-check", "--disable-background-networking", "--disable-sync",
    "--disable-component-update", "--disable-extensions", "--hide-scrollbars", "--disable-features=Translate",
)  # fmt: skip
LONGEST = 120.0  # seconds for anything, on a busy machine too


def found() -> str | None:
    """Returns the path of a browser, None if there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab; `requests` are the addresses that it asked for, `faults` what it said on the console."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.number = socket, 0
        self.requests: list[str] = []
        self.faults: list[str] = []
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **given: Any) -> dict[str, Any]:  # noqa: ANN401
        """Returns the result of a command; raises RuntimeError where the browser refuses it."""
        self.number += 1
        self.socket.send(json.dumps({"id": self.number, "method": method, "params": given}))
        while True:
            message = json.loads(self.socket.recv(timeout=LONGEST))
            self._note(message.get("method", ""), message.get("params", {}))
            if message.get("id") == self.number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(said["exceptionDetails"]))
        elif method == "Log.entryAdded" and said["entry"]["level"] == "error":
            self.faults.append(said["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "assert"):
            self.faults.append(json.dumps(said["args"]))

    def run(self, script: str) -> Any:  # noqa: ANN401
        """Returns the value of an expression in the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in result:
            raise RuntimeError(json.dumps(result["exceptionDetails"]))
        return result["result"].get("value")

    def wait(self, script: str) -> None:
        """Waits until an expression is true; raises TimeoutError if it never is."""
        ends = time.monotonic() + LONGEST
        while not self.run(f"Boolean({script})"):
            if time.monotonic() > ends:
                raise TimeoutError(f"{script}; {self.faults}")
            time.sleep(0.05)

    def open(self, url: str) -> None:
        """Opens an address, and waits until the figures are drawn."""
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.drawn(0)

    def drawn(self, after: int) -> int:
        """Waits for figures drawn later than question number `after`; returns theirs."""
        self.wait(
            f"Number(document.body?.dataset.drawn ?? 0) > {after} && "
            "document.querySelector('#status')?.textContent === ''"
        )
        return self.run("Number(document.body.dataset.drawn)")

    def type(self, selector: str, value: str) -> None:
        """Replaces what an input or a select holds, as a person would, and waits for the answer."""
        before = self.run("Number(document.body.dataset.drawn)")
        said = f"Object.assign(document.querySelector({json.dumps(selector)}), {{value: {json.dumps(value)}}})"
        self.run(f"for (const name of ['input', 'change']) {said}.dispatchEvent(new Event(name, {{bubbles: true}}))")
        self.drawn(before)

    def check(self, selector: str) -> None:
        """Ticks a box, as a person would, and waits for the answer."""
        before = self.run("Number(document.body.dataset.drawn)")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")
        self.drawn(before)

    def size(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Sets the window's size in CSS pixels and the system's theme."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Writes the whole page as a PNG."""
        made = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Yields a page of a fresh browser whose profile is in `folder`."""
    path = found()
    assert path is not None
    process = subprocess.Popen(
        [path, *FLAGS, f"--user-data-dir={folder}", "about:blank"], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        with connect(_address(process), max_size=None, open_timeout=LONGEST) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        process.wait(LONGEST)


def _address(process: subprocess.Popen[bytes]) -> str:
    """Returns the address of the first tab, which the browser's own address on stderr leads to."""
    import urllib.request

    assert process.stderr is not None
    for line in process.stderr:
        if heard := re.search(rb"ws://([0-9.]+:[0-9]+)/", line):
            with urllib.request.urlopen(f"http://{heard[1].decode()}/json", timeout=LONGEST) as listed:
                return next(tab["webSocketDebuggerUrl"] for tab in json.load(listed) if tab["type"] == "page")
    raise RuntimeError("the browser ended before it listened")
