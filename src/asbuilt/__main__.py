"""`python -m asbuilt` and the `asbuilt` script: what must happen before anything else is imported.

Nothing is imported from the current directory, and Ctrl-C while modules load prints no traceback. Therefore neither
this file nor the package's `__init__` imports anything above `main`, not even `__future__`.
"""

import os
import sys


def _leave_folder() -> None:
    """Removes the current directory, which `python -m` puts first, from the import path: its `json.py` would be run."""
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
        except signals.Stopped:  # during the imports above
            signals.leave(1)
    except KeyboardInterrupt:  # before the handlers are installed
        os._exit(130)


if __name__ == "__main__":
    _leave_folder()
    main()
