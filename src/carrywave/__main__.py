"""`python -m carrywave` is the command line."""

from carrywave.cli.main import main

if __name__ == "__main__":
    main()
