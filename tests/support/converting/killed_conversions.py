"""Conversions that die."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtool.formats.gguf_writer import GgufWriter
from qtool.formats.safetensors_file import StreamWriter
from qtool.workspaces.journal import Journal

KILLED = 9


def killed(work: Callable[[], None], after: int, *, half: bool = True) -> None:
    """Do the work in a process that ends, without any handler, when so many steps are finished, and
    half of the next one is written."""
    child = os.fork()
    if child == 0:
        count = 0

        def counted(kind: type[Any]) -> Callable[..., None]:
            write = kind._write

            def put(writer: Any, *given: Any) -> None:
                *where, data = given
                if count > after:
                    write(writer, *where, data[: len(data) // 2])
                    os._exit(KILLED)
                write(writer, *where, data)

            return put

        commit = Journal.commit

        def committed(journal: Journal, name: str, **content: object) -> None:
            nonlocal count
            commit(journal, name, **content)
            count += 1
            if count == after and not half:
                os._exit(KILLED)
            if count == after:
                count += 1  # the next write is the last

        try:
            for kind in (StreamWriter, GgufWriter):
                setattr(kind, "_write", counted(kind))  # noqa: B010
            setattr(Journal, "commit", committed)  # noqa: B010
            work()
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == KILLED


def steps(out: Path) -> list[str]:
    journal = Journal(out.with_name(f".{out.name}.partial") / "journal")
    journal.close()
    return list(journal.done)
