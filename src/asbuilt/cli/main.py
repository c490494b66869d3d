"""`asbuilt`: finds the command, and turns what a person did wrong into one message and exit code 2."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any, NoReturn

import click

from asbuilt.cli import signals, streams
from asbuilt.errors import InputError
from asbuilt.shown import cut, line, size

# command -> the module that holds it under the same name; in the order of `--help`
COMMANDS = ("describe", "plan", "models", "machines", "measure", "generate", "embed", "convert", "diff")
# What the `torch` extra installs: one of these missing is a matter of installation, any other a fault of ours.
EXTRA = ("torch", "safetensors", "numpy", "tokenizers", "gguf", "minijinja", "psutil")
PLOTS = "matplotlib"  # and that, the `plots` extra
# How torch and numpy say how much could not be had.
ASKED = re.compile(r"(?:tried to allocate|Unable to allocate) ([0-9]+(?:\.[0-9]+ [KMGTPE]iB)?)", re.IGNORECASE)
INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN = 1  # nothing was wrong with the input, and there is no answer


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
        except (MemoryError, RuntimeError) as error:
            wanted = ASKED.search(str(error))
            if wanted is None and not isinstance(error, MemoryError):
                raise
            raise Refused(_out_of_memory(wanted and wanted[1])) from error
        except (KeyboardInterrupt, signals.Stopped):
            ctx.exit(signals.exit_code(INTERRUPTED))

    def main(self, *args: Any, **settings: Any) -> NoReturn:  # noqa: ANN401
        """Runs the command and exits: click's own way, but for who prints a refusal and which codes there are."""
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
    """Says what was asked for, where the library that asked said so, and what there is."""
    from asbuilt import memory

    needed = "" if wanted is None else f": {size(int(wanted)) if wanted.isdigit() else wanted} more were needed"
    free = memory.free()
    have = "" if free is None else f", {size(free)} are free"
    return f"there is not enough memory{needed}{have}; take a smaller model, a shorter text or a narrower --dtype"


def _refuse(error: click.ClickException) -> int:
    """Says on stderr what was wrong, on one line: the words that were typed are in it as they may be shown."""
    if not isinstance(error, click.exceptions.NoArgsIsHelpError):
        message = line(cut(error.format_message()))
        error.format_message = lambda: message
    error.show()
    return error.exit_code


def _lost(lost: streams.Lost) -> int:
    """Says that the answer could not be written, unless its reader has what it wanted."""
    if lost.exit_code != streams.READER_LEFT:
        print(f"Error: {lost}", file=sys.stderr)
    return lost.exit_code


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="asbuilt")
def cli() -> None:
    """One description of a transformer: what it costs, the model itself, and the measured figure beside the predicted.

    MODEL is a catalogue name (`asbuilt models`), a config.json, a checkpoint folder, a .gguf file, or a hub id.
    """


def main() -> NoReturn:
    """Runs the command line of this process.

    Exits 0, 1 where the answer is no or cannot be written, 2 where the input was wrong, 128 + n by a signal, and with
    SIGPIPE's 141 where the reader of stdout left.
    """
    try:
        streams.guard()
        cli.main(prog_name="asbuilt")
    except streams.Lost as lost:
        code = _lost(lost)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else BROKEN
    except BaseException:
        if not signals.exit_code(0):  # else some library made another error of it
            raise
        code = INTERRUPTED
    signals.done()
    sys.exit(signals.exit_code(code))
