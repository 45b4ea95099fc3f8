"""What an unfinished run left, changed: the run goes on and ends the same, or says why not."""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Left:
    """`change` is done to the hidden folder; `says` is part of what is said on stderr. `status` 0:
    the run ends with the bytes of one that was never interrupted."""

    name: str
    change: Change
    says: str
    status: int = 0


def line(said: Any) -> bytes:
    """A line of a journal with its right checksum."""
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def lines(change: Callable[[list[bytes]], object]) -> Change:
    """The journal's lines, changed in place."""

    def run(folder: Path) -> None:
        path = folder / "journal"
        found = path.read_bytes().splitlines(keepends=True)
        change(found)
        path.write_bytes(b"".join(found))

    return run


def fact(name: str, value: object) -> Change:
    """One of the facts, another one."""

    def run(found: list[bytes]) -> None:
        at = next(n for n, one in enumerate(found) if json.loads(one[9:]).get("fact") == name)
        found[at] = line({"fact": name, "value": value})

    return lines(run)


def deep(brackets: int) -> object:
    found: object = 0
    for _ in range(brackets):
        found = [found]
    return found


def first(**keys: object) -> Change:
    """The first finished unit, with keys put over; None takes one away."""

    def run(found: list[bytes]) -> None:
        at = next(n for n, one in enumerate(found) if "done" in json.loads(one[9:]))
        said = json.loads(found[at][9:]) | keys
        found[at] = line({key: value for key, value in said.items() if value is not None})

    return lines(run)


def no_checksums(found: list[bytes]) -> None:
    """Every checksum of every unit is null."""
    for at, one in enumerate(found):
        said = json.loads(one[9:])
        if "done" in said:
            found[at] = line(said | {"checksums": dict.fromkeys(said["checksums"])})


def weights(folder: Path) -> None:
    """A byte of what the first unit wrote."""
    path = folder / "artifact" / "model.safetensors"
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    name = "model.layers.0.input_layernorm.weight"
    content[8 + length + header[name]["data_offsets"][0]] ^= 1
    path.write_bytes(content)


def _instead(make: Callable[[Path], object]) -> Change:
    def run(folder: Path) -> None:
        (folder / "journal").unlink()
        make(folder / "journal")

    return run


GOES_ON = "going on with an earlier run: 2 of 4 steps are finished"
ONE_LESS = "going on with an earlier run: 1 of 4 steps"
ANEW = "^(?!.*going on)"
OTHER = "an unfinished run \\(2 steps\\) is kept beside it.* not the one that began it: {}"
LEFT = [
    Left("nothing", lambda _: None, GOES_ON),
    Left("a last line cut off", lines(lambda found: found.append(found.pop()[:-9])), ONE_LESS),
    Left("a last line of another checksum",
         lines(lambda found: found.append(b"00000000" + found.pop()[8:])), ONE_LESS),
    Left("a line of bytes", lines(lambda found: found.append(b"\xff\xfe\x00\n")), GOES_ON),
    Left("a line that is no JSON", lines(lambda found: found.append(line(b"{"))), GOES_ON),
    Left("a line nested too deeply", lines(lambda found: found.append(line(b"[" * 10**5))),
         GOES_ON),
    Left("a line that is a list", lines(lambda found: found.append(line([1]))), GOES_ON),
    Left("a unit that is none", lines(lambda found: found.append(line({"done": "block 10000"}))),
         "going on"),
    Left("a unit that wrote nothing", first(checksums={}), ONE_LESS + "|" + ANEW),
    Left("a unit of other checksums", first(checksums={"lm_head.weight": 1}), "" + ANEW),
    Left("a unit whose checksums are text", first(checksums="x"), ANEW),
    Left("a unit without checksums", first(checksums=None), ANEW),
    Left("a unit without layers", first(layers=None), ANEW),
    Left("a unit whose layers are numbers", first(layers=[1, 2]), ANEW),
    Left("a unit with a layer too many keys", first(layers=[{"name": "x", "y": 1}]), ANEW),
    Left("a unit whose notes are a number", first(notes=7), ANEW),
    Left("a unit whose error is text",
         first(layers=[{"name": "x", "scheme": "y", "relative_error": "z"}]), ANEW),
    Left("units of null checksums", lines(no_checksums), ANEW),
    Left("lines out of their order", lines(lambda found: found.reverse()), ""),
    Left("weights that changed on the disk", weights, ANEW),
    Left("weights that are gone", lambda f: (f / "artifact" / "model.safetensors").unlink(), ANEW),
    Left("a journal of nothing", _instead(lambda path: path.write_bytes(b"")), ANEW),
    Left("a run of a later version", fact("version of qtool", "99.0"),
         OTHER.format("version of qtool was 99.0, is "), 1),
    Left("a run of another recipe", fact("recipe", {"name": "evil\x1b[2J"}),
         OTHER.format("recipe was evil"), 1),
    Left("a run of a recipe of 900 brackets", fact("recipe", {"bits": deep(900)}),
         OTHER.format("recipe was not set"), 1),
    Left("a run of another source", fact("source", [[{}, "x", 1]]), OTHER.format("source: "), 1),
    Left("a run of files that are none", fact("source", [["x"] * 4, [7] * 4, None]),
         OTHER.format("source: "), 1),
    Left("a run of another layout", fact("layout of its files", "0" * 64),
         OTHER.format("layout of its files has other content"), 1),
    Left("a journal that is a link", _instead(lambda path: path.symlink_to("/etc/passwd")),
         "was not made by qtool", 1),
    Left("a journal that is a pipe", _instead(os.mkfifo), "was not made by qtool", 1),
]  # fmt: skip
