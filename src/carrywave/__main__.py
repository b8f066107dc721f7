"""Entry point of `carrywave` and `python -m carrywave`. Imports as little as possible, so that Ctrl-C during startup also exits quietly."""

import os
import signal
import sys


def main() -> None:
    """Run the command line; this is the console script."""
    try:
        # Until a command has begun, which says that they came.
        signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        _fill_gaps()
        from carrywave import heap

        heap.keep()
        from carrywave.cli.main import main as run

        run()
    except KeyboardInterrupt:  # before a command has begun, which says so itself
        sys.exit(130)
    except (MemoryError, ImportError) as error:
        if not isinstance(error, MemoryError) and "failed to map segment" not in str(error):
            raise
        os.write(2, b"carrywave: not enough memory to load the program; raise the limit (ulimit -v) or free some memory\n")
        sys.exit(74)


def _fill_gaps() -> None:
    """Open /dev/null for each closed standard stream; otherwise the next file opened would take its descriptor and receive our output."""
    for handle in (0, 1, 2):
        try:
            os.fstat(handle)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # open() returns the lowest free descriptor, which is this one
            os.set_inheritable(opened, True)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # print(file=None) would write errors to stdout


if __name__ == "__main__":
    main()
