"""`python -m asbuilt`."""

from asbuilt.cli.main import main

main()
