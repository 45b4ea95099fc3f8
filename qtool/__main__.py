"""The `qtool` command, and `python -m qtool`."""

import sys


def process() -> None:
    """Import the command line and run it. Ctrl-C while it is imported ends with 130 and no more."""
    try:
        from qtool.cli import bytecode
        from qtool.cli.main import process as run
    except KeyboardInterrupt:
        sys.exit(130)
    except bytecode.ERRORS as error:
        if (said := bytecode.damaged(error)) is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        sys.exit(1)
    run()


if __name__ == "__main__":
    process()
