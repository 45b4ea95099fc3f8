"""No test leaves the machine: a connection that is not loopback fails the test that made it."""

import gc
import os
import secrets
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.long_tests import mark
from support.places import SUPPORT
from support.remembered_ids import remembered

if TYPE_CHECKING:
    from support.runs.quantizing import Call

# Before a library with threads is there: they are as many as processes ask for, most matrices are
# small, and threads that wait would spin while others have work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

GUARD = SUPPORT / "guard"
# There from the first connection that is refused: a run that is killed leaves nothing.
_LOG = Path(tempfile.gettempdir()) / f"qtool-guard-{secrets.token_hex(8)}"


def pytest_configure() -> None:
    """Guard this process and, by PYTHONPATH, those that tests start."""
    os.environ["QTOOL_TEST_GUARD"] = str(_LOG)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(GUARD), *([before] if before else [])])
    sys.path.insert(0, str(GUARD))
    try:
        sys.modules.pop("sitecustomize", None)
        __import__("sitecustomize")
    finally:
        sys.path.remove(str(GUARD))


def pytest_runtest_logfinish(nodeid: str) -> None:
    """What a kernel does to a GPU's memory that it must not stays an error of its process: of
    several on a GPU, this one ends, so that another takes over the tests that are left."""
    torch = sys.modules.get("torch")
    several = os.environ.get("QTOOL_TEST_DEVICE") == "cuda" and "PYTEST_XDIST_WORKER" in os.environ
    if several and torch is not None and torch.cuda.is_initialized():
        try:
            torch.cuda.synchronize()
        except Exception:
            os._exit(1)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported and collected stays: garbage is looked for neither meanwhile nor there."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000, 10, 50)  # what tests leave is little beside what they import


@pytest.hookimpl(tryfirst=True)  # before marks are asked for
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark(config, items)


def pytest_unconfigure() -> None:
    """Nothing stays in the folder for temporary files."""
    _LOG.unlink(missing_ok=True)


@pytest.fixture(autouse=True, scope="session")
def texts_are_cut_once() -> Iterator[None]:
    """The tokenizers are other people's; what they make of a text does not change."""
    with remembered():
        yield


@pytest.fixture(autouse=True, scope="session")
def commands_are_built_once() -> Iterator[None]:
    """typer makes every command anew of its function, whichever is asked for."""
    import typer.main
    import typer.testing

    built = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", built)
        patch.setattr(typer.testing, "_get_command", built)
        yield


@pytest.fixture(autouse=True, scope="session")
def no_disk_is_waited_for() -> Iterator[None]:
    """No test takes the power away; of what is closed nothing can be synced still."""
    from qtool.workspaces import staging

    def synced(descriptor: int) -> None:
        os.fstat(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", synced)
        patch.setattr(staging, "sync", synced)
        yield


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> "Call":
    """call("quantize", folder, ...) runs the command line in this process, and has what it said."""
    from support.runs.quantizing import caller

    return caller(monkeypatch, capfd)


@pytest.fixture(autouse=True)
def stays_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where something was refused; tests with marks of their own may go where they like."""
    if any(request.node.get_closest_marker(mark) for mark in ("slow", "oracle", "gpu")):
        monkeypatch.delenv("QTOOL_TEST_GUARD", raising=False)
        yield
        return
    yield
    if _LOG.exists():
        refused = _LOG.read_text(encoding="utf-8")
        _LOG.unlink()
        pytest.fail(f"connections outside of loopback:\n{refused}")
