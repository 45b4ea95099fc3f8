"""What a run has finished, line by line, so that a killed one goes on where it stopped.

    journal := line*          line := crc32:8 hexadecimal digits  " "  json  "\n"
    {"fact": NAME, "value": ANY}        what the run is: recipe, source, calibration ...
    {"done": NAME, ...}                 a unit of work: checksums of what it wrote, its reports

A line counts when its checksum is right; the first that is not ends the journal, and what comes
after it is cut off. So a line half written, or written by a disk that lost power, is work to do
again and never work believed. What a line says was written is compared with the file before it is
trusted, hence no line waits for the disk.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from qtool.errors import ResumeError

_LONGEST = 1 << 28  # bytes of a journal that is read: a line a matrix, of the largest models


def as_noted(value: Any) -> Any:
    """A fact, or several, as a journal has them."""
    return json.loads(json.dumps(value))


class Journal:
    """The lines of one run; `done` has those of earlier tries in their order."""

    def __init__(self, path: Path, look: Callable[[], None] = lambda: None) -> None:
        """Read what is there and cut off what is damaged; ResumeError where it cannot be read.

        look: raises where what was done since the work began is not to be believed.
        """
        self.path = path
        self.look = look
        self.facts: dict[str, Any] = {}
        self.done: dict[str, Mapping[str, Any]] = {}
        self._begins: dict[str, int] = {}  # where each unit's line begins in the file
        self._noted: dict[str, int] = {}  # the same of facts
        self._lock = Lock()
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
            self._file = open(os.open(path, flags, 0o600), "a+b", buffering=0)  # noqa: SIM115
            self._read()
        except OSError as error:
            raise ResumeError(f"{path}: cannot be used ({error.strerror})") from None

    def _read(self) -> None:
        self._file.seek(0)
        content = self._file.read(min(_LONGEST, os.fstat(self._file.fileno()).st_size))
        good = 0
        for line in content.splitlines(keepends=True):
            entry = _entry(line)
            if entry is None:
                break
            if isinstance(entry.get("fact"), str) and "value" in entry:
                self.facts[entry["fact"]] = entry["value"]
                self._noted[entry["fact"]] = good
            elif isinstance(entry.get("done"), str):
                self.done[entry["done"]] = entry
                self._begins[entry["done"]] = good
            good += len(line)
        self._file.truncate(good)

    def agree(self, name: str, value: Any, differs: str) -> None:
        """Note what this run is; ResumeError, with the sentence `differs`, if it was another."""
        if name not in self.facts:
            self._append({"fact": name, "value": value})
            self.facts[name] = value
        elif self.facts[name] != as_noted(value):
            raise ResumeError(differs)

    def commit(self, name: str, **content: Any) -> None:
        """A unit of work is finished. Any thread may say so."""
        self.look()
        entry = {"done": name, **content}
        self._append(entry)
        self.done[name] = entry

    def forget_from(self, name: str) -> None:
        """Drop a finished unit and all that came after it: its work is to be done again.

        Also facts: they are to be noted again, or the next run would not be held to them.
        """
        position = self._begins[name]
        self._file.truncate(position)
        for later in [unit for unit, at in self._begins.items() if at >= position]:
            del self.done[later], self._begins[later]
        for fact in [fact for fact, at in self._noted.items() if at >= position]:
            del self.facts[fact], self._noted[fact]

    def _append(self, entry: Mapping[str, Any]) -> None:
        text = json.dumps(entry, separators=(",", ":")).encode()
        line = b"%08x %s\n" % (zlib.crc32(text), text)
        with self._lock:
            begin = self._file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                # Of a full disk: lines of other threads may still find room behind it.
                self._file.truncate(begin)
                raise
            if "done" in entry:
                self._begins[entry["done"]] = begin
            else:
                self._noted[entry["fact"]] = begin

    def close(self) -> None:
        """Close the file; it stays."""
        self._file.close()


def _entry(line: bytes) -> dict[str, Any] | None:
    """What a line says; None where it is damaged."""
    checksum, _, text = line.removesuffix(b"\n").partition(b" ")
    if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
        return None
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
