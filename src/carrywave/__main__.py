"""`carrywave`, and `python -m carrywave`: the command line. Little is loaded here, so that Ctrl-C in the first moment ends quietly too."""

import os
import sys

from carrywave import heap


def main() -> None:
    """The console script."""
    _fill_gaps()
    heap.keep()
    try:
        from carrywave.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


def _fill_gaps() -> None:
    """Open what was closed of stdin, stdout and stderr, or the next file would take its number, and with it what is printed."""
    for handle in (0, 1, 2):
        try:
            os.fstat(handle)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free, so this one
            os.set_inheritable(opened, True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # without it, errors would be printed to stdout


if __name__ == "__main__":
    main()
