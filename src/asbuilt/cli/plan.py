"""`asbuilt plan`: capacity, speed and cost of serving and training; each command is imported when it is used."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import click

# Each with its line in the help, so that it need not be imported to be listed.
COMMANDS = {
    "serve": "Plan serving MODEL on machine NAME: whether it fits, how many users, how fast.",
    "train": "Plan training MODEL: memory, FLOPs, time, money.",
}


class Plans(click.Group):
    """A group that imports `asbuilt.cli.plan_NAME` only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the commands in the order of `--help`."""
        return [name for name in COMMANDS if find_spec(f"asbuilt.cli.plan_{name}")]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands with their lines."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, COMMANDS[name]) for name in self.list_commands(ctx)])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command, None if there is none of this name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return getattr(import_module(f"asbuilt.cli.plan_{cmd_name}"), cmd_name)


@click.group(cls=Plans)
def plan() -> None:
    """Plan serving and training: memory, users, speed and cost on given machines. Nothing is run."""
