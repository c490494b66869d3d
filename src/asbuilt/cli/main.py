"""`asbuilt`: finds the command, and turns invalid input into one message and exit code 2."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from asbuilt.cli import signals, streams
from asbuilt.errors import InputError
from asbuilt.shown import cut, line, size

# Each is an attribute of the module of the same name; in the order of `--help`.
COMMANDS = (
    "describe",
    "plan",
    "models",
    "machines",
    "measure",
    "generate",
    "chat",
    "embed",
    "convert",
    "quantize",
    "tokenizer",
    "diff",
    "train",
    "web",
)
# What the `torch` extra installs: if one of these is missing, the message says how to install it.
EXTRA = ("torch", "safetensors", "numpy", "tokenizers", "gguf", "minijinja", "psutil")
# What other extras install.
OTHERS = {"matplotlib": "plots", "starlette": "web", "uvicorn": "web"}
# How torch and numpy report the size of a failed allocation.
ASKED = re.compile(r"(?:tried to allocate|Unable to allocate) ([0-9]+(?:\.[0-9]+ [KMGTPE]iB)?)", re.IGNORECASE)
INTERRUPTED = 130  # 128 + SIGINT, the shells' convention
BROKEN = 1  # the input was valid, but there is no answer


class Refused(click.ClickException):
    """Invalid input: a message on stderr, and exit code 2."""

    exit_code = 2


class Commands(click.Group):
    """A group that imports a command's module only when that command is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Returns the commands in the order of `--help`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Returns the command, None if there is none of this name."""
        if cmd_name not in COMMANDS:
            return None
        return getattr(import_module(f"asbuilt.cli.{cmd_name}"), cmd_name)

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401  as click declares
        """Runs the command; InputError, a missing extra and running out of memory become `Refused`."""
        try:
            return super().invoke(ctx)
        except InputError as error:
            raise Refused(str(error)) from error
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing not in (*EXTRA, *OTHERS):
                raise
            fix = f"pip install 'asbuilt[{OTHERS.get(missing, 'torch')}]'"
            raise Refused(f"this command needs {missing}, which is not installed: {fix}") from error
        except (MemoryError, RuntimeError) as error:
            wanted = ASKED.search(str(error))
            if wanted is None and not isinstance(error, MemoryError):
                raise
            raise Refused(_out_of_memory(wanted and wanted[1])) from error
        except (KeyboardInterrupt, signals.Stopped):
            ctx.exit(signals.exit_code(INTERRUPTED))

    def main(self, *args: Any, **settings: Any) -> NoReturn:  # noqa: ANN401
        """Runs the command and exits, as click does but with asbuilt's error messages and exit codes."""
        sys.exit(self._code(*args, **settings))

    def _code(self, *args: Any, **settings: Any) -> int:  # noqa: ANN401
        try:
            code = super().main(*args, **(settings | {"standalone_mode": False}))
            sys.stdout.flush()
        except click.ClickException as error:
            return _refuse(error)
        except streams.Lost as lost:
            return _lost(lost)
        except (click.Abort, KeyboardInterrupt, signals.Stopped):
            return signals.exit_code(INTERRUPTED)
        return code if isinstance(code, int) else 0


def _out_of_memory(wanted: str | None) -> str:
    """Returns the message: how much was requested, if the library reported it, and how much is free."""
    from asbuilt import memory

    needed = "" if wanted is None else f": {size(int(wanted)) if wanted.isdigit() else wanted} more was needed"
    free = memory.free()
    have = "" if free is None else f", {size(free)} are free"
    return f"not enough memory{needed}{have}; use a smaller model, a shorter text or a narrower --dtype"


def _refuse(error: click.ClickException) -> int:
    """Prints what was wrong as one line on stderr, with the user's input escaped, and returns the exit code."""
    if not isinstance(error, click.exceptions.NoArgsIsHelpError):
        message = line(cut(error.format_message()))
        error.format_message = lambda: message
    error.show()
    return error.exit_code


def _lost(lost: streams.Lost) -> int:
    """Reports that the output could not be written, unless its reader closed the pipe; returns the exit code."""
    if lost.exit_code != streams.READER_LEFT:
        print(f"Error: {lost}", file=sys.stderr)
    return lost.exit_code


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="asbuilt")
def cli() -> None:
    """Describe a transformer once: its costs, the model itself, and measured figures beside predicted ones.

    MODEL is a catalogue name (`asbuilt models`), a config.json, a checkpoint folder, a .gguf file, or a hub id.
    """


def main() -> NoReturn:
    """Runs the command line of this process.

    Exit codes: 0; 1 if the answer is no or cannot be written; 2 for invalid input; 128 + n after signal n; 141
    (SIGPIPE) if the reader of stdout closed it.
    """
    try:
        streams.guard()
        cli.main(prog_name="asbuilt")
    except streams.Lost as lost:
        code = _lost(lost)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else BROKEN
    except BaseException:
        if not signals.exit_code(0):  # a library may have turned the signal into another error
            raise
        code = INTERRUPTED
    signals.done()
    sys.exit(signals.exit_code(code))
