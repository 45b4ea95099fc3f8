"""The `qtool` command: the table of subcommands, and the one place where errors are printed.

Exit status: 0 success, 1 failure, 2 usage, 130 interrupted. `QTOOL_DEBUG=1` shows tracebacks.
Nothing heavy is imported here: each command imports what it needs when it runs.
"""

import errno
import os
import sys
from typing import Annotated

import typer

from qtool import __version__
from qtool.cli.calibrate import calibrate
from qtool.cli.inspect import inspect
from qtool.cli.plan import plan
from qtool.cli.quantize import quantize
from qtool.cli.recipes import recipes
from qtool.errors import QtoolError

app = typer.Typer(
    name="qtool",
    help="Quantize Hugging Face decoder models into artifacts that engines load.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qtool {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    pass


for _command in (quantize, calibrate, plan, inspect, recipes):
    app.command()(_command)


def _sentence(error: QtoolError | OSError | MemoryError) -> str:
    if isinstance(error, QtoolError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory; `qtool plan` estimates what a run needs"
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{where}the disk is full; free some space, or give another folder with -o"
    return f"{where}{error.strerror or error}"


def main() -> None:
    """Run the command line and exit."""
    debug = os.environ.get("QTOOL_DEBUG", "") not in ("", "0")
    try:
        app()
    except (QtoolError, OSError, MemoryError) as error:
        if debug:
            raise
        print(f"error: {_sentence(error)}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        if debug:
            raise
        sys.exit(130)
