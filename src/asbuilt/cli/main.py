"""`asbuilt`: finds the command, and turns what a person did wrong into one message and exit code 2."""

from __future__ import annotations

import io
import os
import sys
from importlib import import_module
from typing import Any

import click

from asbuilt.errors import InputError

# command -> the module that holds it under the same name; in the order of `--help`
COMMANDS = ("describe", "plan", "models", "machines", "measure", "generate", "embed", "convert", "diff")
# What the `torch` extra installs: one of these missing is a matter of installation, any other a fault of ours.
EXTRA = ("torch", "safetensors", "numpy", "tokenizers", "gguf", "minijinja", "psutil")
PLOTS = "matplotlib"  # and that, the `plots` extra
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Refused(click.ClickException):
    """Input that cannot be used: the message on stderr, and exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """Imports a command's module when the command is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The commands in the order in which they are first needed."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command, None where there is none."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(f"asbuilt.cli.{cmd_name}"), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  as click has it
        """Runs the command; InputError and a missing extra become `Refused`."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise Refused(str(error)) from error
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in (*EXTRA, PLOTS):
                raise
            fix = f"pip install 'asbuilt[{'plots' if missing == PLOTS else 'torch'}]'"
            raise Refused(f"this command needs {missing}, which is not installed: {fix}") from error
        except KeyboardInterrupt:
            ctx.exit(INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="asbuilt")
def cli() -> None:
    """One description of a transformer: what it costs, the model itself, and the measured figure beside the predicted.

    MODEL is a catalogue name (`asbuilt models`), a config.json, a checkpoint folder, a .gguf file, or a hub id.
    """


def main() -> None:
    """Runs the command line of this process; exits 0, 1 where the answer is no, 2 where the input was wrong."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal of another alphabet shows what it can
            stream.reconfigure(errors="replace")
    try:
        cli.main(prog_name="asbuilt")
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except BrokenPipeError:  # `asbuilt ... | head`: nobody listens any more, which is no fault
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
