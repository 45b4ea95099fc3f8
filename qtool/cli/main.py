"""The `qtool` command: the table of subcommands, and the one place where errors are printed.

Exit status: 0 success, 1 failure, 2 usage, 130 interrupted, 143 terminated (128 + the signal).
`QTOOL_DEBUG=1` shows tracebacks.
Nothing heavy is imported here: each command imports what it needs when it runs.
"""

import atexit
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Annotated

import typer

from qtool import __version__
from qtool.cli.bench import bench
from qtool.cli.calibrate import calibrate
from qtool.cli.command import Command
from qtool.cli.compare import compare
from qtool.cli.convert import convert
from qtool.cli.diff import diff
from qtool.cli.doctor import doctor
from qtool.cli.download import download
from qtool.cli.eval import evaluate
from qtool.cli.fit import fit
from qtool.cli.generate import generate
from qtool.cli.inspect import inspect
from qtool.cli.matrix import matrix
from qtool.cli.plan import plan
from qtool.cli.push import push
from qtool.cli.quantize import quantize
from qtool.cli.recipes import recipes
from qtool.cli.report import report
from qtool.cli.reproduce import reproduce
from qtool.cli.sample import sample
from qtool.cli.schema import schema
from qtool.cli.verify import verify
from qtool.errors import TOO_LARGE, QtoolError, UsageError
from qtool.messages.printable import printable

app = typer.Typer(
    name="qtool",
    help="Quantize Hugging Face decoder models into artifacts that engines load.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"qtool {__version__}")
        raise typer.Exit


_FIRST = """\
qtool {version} turns language models into quantized files that engines load.

Try it on the small model that comes with it; nothing is downloaded:
  qtool quantize tiny --recipe w4g128-awq
  qtool inspect tiny-w4g128-awq

Then MODEL is a folder, a GGUF file, a hub id such as Qwen/Qwen3-0.6B, or an alias such as llama-7b:
  qtool plan MODEL --recipe w4g128-awq      what will be made, how large, in how much memory
  qtool quantize MODEL --recipe q4_k_m      for llama.cpp, Ollama and LM Studio

  qtool recipes     which recipe for what
  qtool doctor      what is installed here, and what is missing
  qtool --help      every command
"""


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_say_version, is_eager=True, help="print the version"),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(_FIRST.format(version=__version__), nl=False)


for _command in (quantize, calibrate, fit, plan, inspect, diff, convert, recipes, bench):
    app.command(cls=Command)(_command)
app.command("eval", cls=Command)(evaluate)
app.command(cls=Command)(generate)
app.command(cls=Command)(sample)
app.command(cls=Command)(compare)
app.command(cls=Command)(schema)
app.command(cls=Command)(verify)
app.command(cls=Command)(report)
app.command(cls=Command)(matrix)
app.command(cls=Command)(reproduce)
app.command(cls=Command)(download)
app.command(cls=Command)(push)
app.command(cls=Command)(doctor)


_LONGEST = 2000  # characters of a message: names in files may be of any length


def _shown(error: QtoolError | OSError | MemoryError) -> str:
    """The sentence, its middle left out where a file made it too long to read."""
    text = printable(_sentence(error))
    half = _LONGEST // 2
    return text if len(text) <= _LONGEST else f"{text[:half]} [...] {text[-half:]}"


def _sentence(error: QtoolError | OSError | MemoryError) -> str:
    if isinstance(error, QtoolError):
        return str(error)
    if isinstance(error, MemoryError):
        return "not enough memory; `qtool plan` estimates what a run needs"
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        if not where:  # not of a file that was named; it may be stdout
            return "what is written to is full; free some space, or write elsewhere"
        return f"{where}the disk is full; free some space, or give another folder with -o"
    if error.errno == errno.EFBIG:
        return f"{where}{TOO_LARGE}"
    return f"{where}{error.strerror or error}"


def _say_notes(error: BaseException) -> None:
    """What was added to an error on its way: what is kept, and how to go on."""
    for note in getattr(error, "__notes__", ()):
        print(printable(note), file=sys.stderr)


class _EndedBySignal(BaseException):
    """Raised where the work stands, so that what it has half made is removed on the way out."""


_waiting: list[int] = []  # signals that came while torch was being loaded


def _end(number: int, _: FrameType | None) -> None:
    if _loads_torch():  # C++ that is being loaded would abort on what is raised in it
        if _waiting:
            os._exit(128 + number)
        _waiting.append(number)
        threading.Thread(target=_send_again, args=(number,), daemon=True).start()
        return
    signal.signal(number, signal.SIG_DFL)  # a second one ends the process at once
    raise _EndedBySignal(number)


def _loads_torch() -> bool:
    spec = getattr(sys.modules.get("torch"), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


def _send_again(number: int) -> None:
    """A signal, when it may raise."""
    while _loads_torch():
        time.sleep(0.01)
    os.kill(os.getpid(), number)


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP raise in the body, unless the caller has other plans."""
    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler):
            before[number] = signal.signal(number, _end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_closed_streams() -> None:
    """A standard stream that the caller closed leads nowhere. Left closed, its number would be that
    of the next file opened, into which libraries then print; and print() without stderr takes
    stdout, which --json promises to one object."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number is free
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def main() -> None:
    """Run the command line and exit."""
    _open_closed_streams()
    debug = os.environ.get("QTOOL_DEBUG", "") not in ("", "0")
    try:
        with _signals_raise():
            app()
    except (QtoolError, OSError, MemoryError) as error:
        if debug:
            raise
        print(f"error: {_shown(error)}", file=sys.stderr)
        _say_notes(error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except _EndedBySignal as ended:
        _say_notes(ended)
        sys.exit(128 + int(ended.args[0]))
    except KeyboardInterrupt:
        if debug:
            raise
        sys.exit(130)


def process() -> None:
    """main(), and the end of the process with it: taking apart what Python and torch have loaded
    takes up to a second, and frees nothing that the system does not free anyway."""
    try:
        main()
        status = 0
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        status = ended.code or 0
    if any(not one.daemon for one in threading.enumerate() if one is not threading.main_thread()):
        sys.exit(status)  # they are waited for
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # Python says so in its own way
        sys.exit(status)
    atexit._run_exitfuncs()
    os._exit(status)
