"""`asbuilt plan`: what a machine holds and how fast it goes; `serve` and `train` are imported when asked for."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import click

COMMANDS = ("serve", "train")


class Plans(click.Group):
    """Imports a plan's module, `asbuilt.cli.plan_NAME`, when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Serving first."""
        return [name for name in COMMANDS if find_spec(f"asbuilt.cli.plan_{name}")]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command, None where there is none."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return getattr(import_module(f"asbuilt.cli.plan_{cmd_name}"), cmd_name)


@click.group(cls=Plans)
def plan() -> None:
    """What a machine holds, how many users and how fast, and what training takes. Nothing is run."""
