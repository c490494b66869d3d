"""`python -m asbuilt` and the `asbuilt` script: what must be so before anything else is imported.

Nothing is imported from the folder one stands in, and Ctrl-C while modules load is as quiet as it is later. So this
file and the package's own `__init__` import nothing above `main`, not even `__future__`.
"""

import os
import sys


def _leave_folder() -> None:
    """Takes off the import path what `python -m` puts first: the folder one stands in, whose `json.py` would be run."""
    if not sys.flags.safe_path and sys.path and sys.path[0] in ("", os.getcwd()):
        del sys.path[0]


def main() -> None:
    """Runs the command line of this process, and exits with its code."""
    try:
        from asbuilt.cli import signals

        signals.install()
        try:
            from asbuilt.cli.main import main as run

            run()
        except SystemExit as ended:
            signals.leave(ended.code if isinstance(ended.code, int) else 1)
        except signals.Stopped:  # amid the imports above
            signals.leave(1)
    except KeyboardInterrupt:  # before the handlers are there
        os._exit(130)


if __name__ == "__main__":
    _leave_folder()
    main()
