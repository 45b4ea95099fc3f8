"""The `qtool` command, and `python -m qtool`."""

import sys

from qtool.bytecode import ERRORS, damaged


def process() -> None:
    """Import the command line and run it. Ctrl-C while it is imported ends with 130 and no more."""
    try:
        from qtool.cli.main import process as run
    except KeyboardInterrupt:
        sys.exit(130)
    except ERRORS as error:
        if (said := damaged(error)) is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(1)
    run()


if __name__ == "__main__":
    process()
