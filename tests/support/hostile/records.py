"""What artifacts and folders of a matrix say of their own making."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qtool import __version__
from support.hostile.row import Make, Row, honest

GOOD = {"source": "file", "samples": 2, "length": 16, "seed": 0, "digest": f"sha256:{'0' * 64}"}
RECORD: dict[str, Any] = {
    "qtool_version": __version__,
    "recipe": {"name": "r", "method": "gptq", "format": "gptq",
               "weights": {"bits": 4, "group_size": 32}},
    "source": {"name": None, "digest": f"sha256:{'0' * 64}", "files": {}},
    "calibration": GOOD,
}  # fmt: skip


def record(change: Mapping[str, Any] | bytes) -> Make:
    """An artifact with this record is to be made again."""

    def make(folder: Path) -> list[object]:
        (folder / "a").mkdir()
        content = change if isinstance(change, bytes) else json.dumps({**RECORD, **change}).encode()
        (folder / "a/qtool.json").write_bytes(content)
        return ["reproduce", folder / "a", "--model", honest(folder)]

    return make


def measured(**keys: Any) -> Make:
    """With these keys in its record of calibration; those that are None are left out."""
    said = {key: value for key, value in {**GOOD, **keys}.items() if value is not None}
    return record({"calibration": said})


RECORDS = [
    Row("a record of nothing", record(b""), r"qtool\.json: not valid JSON"),
    Row("a record that is a list", record(b"[]"), "expected a JSON object, found a list"),
    Row("a record of nothing but lists", record(b'{"a":[' + b"[]," * 100_000 + b"0]}"),
        "JSON so dense"),
    Row("a record without a recipe", record({"recipe": None}), "records no recipe that has a name"),
    Row("a recipe of no format",
        record({"recipe": {"name": "r"}, "source": {"name": None}, "calibration": None}),
        "its recipe:1: format: "),
    Row("a source that is a text", record({"source": "x"}), "names no source"),
    Row("another version", record({"qtool_version": [1] * 1000}), "was made by qtool .{,60}, and"),
    Row("a calibration that is a list", record({"calibration": [1]}),
        r"qtool\.json: calibration is \[1\]; expected an object"),
    Row("one without a source", measured(source=None), r"\.source is null; expected a text"),
    Row("a source that is a number", measured(source=7), r"calibration\.source is 7"),
    Row("a source with NUL", measured(source="a\0b"), r"calibration\.source is .a.u0000b"),
    Row("samples that are a text", measured(samples="2"), r'calibration\.samples is "2"; expected'),
    Row("samples that are true", measured(samples=True), r"calibration\.samples is true"),
    Row("no samples at all", measured(samples=0), "expected 1 to 1000000"),
    Row("10^30 samples", measured(samples=10**30), r"calibration\.samples is 10000.*to 1000000"),
    Row("a negative length", measured(length=-16), r"calibration\.length is -16; expected 1 to"),
    Row("a seed of a half", measured(seed=0.5), r"calibration\.seed is 0\.5; expected an integer"),
    Row("a digest that is none", measured(digest="sha256:x"), r'calibration\.digest is "sha256:x"'),
    Row("aware of a text", measured(error_aware="no"), r"error_aware is .no.; expected true or"),
]  # fmt: skip


def matrix(content: bytes) -> Make:
    """A folder of a matrix, with this matrix.json."""

    def make(folder: Path) -> list[object]:
        (folder / "all").mkdir()
        (folder / "all/matrix.json").write_bytes(content)
        return ["matrix", honest(folder), "--recipes", "w8-rtn", "-o", folder / "all"]

    return make


def says(value: Any) -> Make:
    return matrix(json.dumps({"made_of": value}).encode())


def locked_by(change: Callable[[Path], object]) -> Make:
    """A folder of a matrix, with something where its lock goes."""

    def make(folder: Path) -> list[object]:
        command = matrix(b'{"made_of": {}}')(folder)
        change(folder / "all/.matrix")
        return command

    return make


NOT_OURS = "was not made by qtool"
MATRICES = [
    Row("a matrix of nothing", matrix(b""), r"matrix\.json: not valid JSON .*another -o"),
    Row("a matrix that is a list", matrix(b"[]"), "expected a JSON object, found a list"),
    Row("a matrix of nothing but lists", matrix(b'{"a":[' + b"[]," * 100_000 + b"0]}"),
        "JSON so dense"),
    Row("a matrix without what it is made of", matrix(b"{}"), "not written by `qtool matrix`"),
    Row("made of a list", says([]), "not written by `qtool matrix`"),
    Row("made of texts", says({"w8-rtn": "x"}), "not written by `qtool matrix`"),
    Row("a file for its work", locked_by(lambda work: work.write_text("x")), NOT_OURS),
    Row("a link for its work", locked_by(lambda work: work.symlink_to("/etc")), NOT_OURS),
    Row("somebody's work", locked_by(lambda work: (work.mkdir(), (work / "x").write_text("x"))),
        NOT_OURS),
]  # fmt: skip
