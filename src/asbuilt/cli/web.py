"""`asbuilt web`: the local page, where a model and a machine are chosen, and numbers changed."""

from __future__ import annotations

import sys

import click

from asbuilt.cli.opening import allow_unread_option, opened
from asbuilt.cli.output import say

PORT = 8765


@click.command()
@click.argument("model", required=False)
@click.option("--port", type=click.IntRange(0, 65535), default=PORT, show_default=True, help="0 for any free port.")
@click.option("--no-open", is_flag=True, help="Do not open a browser.")
@allow_unread_option
def web(model: str | None, port: int, no_open: bool, allow_unread: tuple[str, ...]) -> None:
    """Show costs and plans on a local page, of MODEL first; served to this machine alone, until Ctrl-C."""
    from asbuilt.web.server import HOST, listening, run

    source = None if model is None else opened(model, allow_unread)
    made = listening(port)
    url = f"http://{HOST}:{made.getsockname()[1]}/"
    say(f"{url}  (Ctrl-C ends it)")
    sys.stdout.flush()  # who started it waits for the address
    if not no_open:
        import webbrowser

        webbrowser.open(url)
    run(source, made)
