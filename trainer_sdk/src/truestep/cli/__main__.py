"""``python -m truestep.cli``: the command line where no entry point is installed."""

from truestep.cli import main

main()
