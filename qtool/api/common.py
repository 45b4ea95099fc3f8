"""What the functions of qtool.api share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def refuse_less(**given: tuple[int | None, int]) -> None:
    """UsageError for an option, by name, that is less than the least of the command's."""
    from qtool.errors import UsageError

    for name, (value, least) in given.items():
        if value is not None and value < least:
            raise UsageError(f"{name} {value}: expected {least} or more")


def refuse_ranks(engine: str | None, tp: int) -> None:
    """UsageError for ranks of no engine."""
    from qtool.errors import UsageError

    if engine is None and tp != 1:
        raise UsageError("--tp is asked without --engine; name the engine, such as --engine vllm")


@contextmanager
def threads_as_before() -> Iterator[None]:
    """The caller's number of torch's threads comes back after; the work has its own."""
    torch = sys.modules.get("torch")
    before = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        if torch is not None and before is not None:
            torch.set_num_threads(before)


def path_of(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
