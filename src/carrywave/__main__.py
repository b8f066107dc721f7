"""`carrywave`, and `python -m carrywave`: the command line. Little is loaded here, so that Ctrl-C in the first moment ends quietly too."""

import sys

from carrywave import heap


def main() -> None:
    """The console script."""
    heap.keep()
    try:
        from carrywave.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
