"""Statistics, and calibration texts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from qtool.checkpoints.checkpoint import Checkpoint
from support.hostile.row import Make, Row, entry, honest, tensors

SITE = "model.layers.0.self_attn.q_proj"
Arrays = dict[str, Any]


def stats(change: Callable[[Arrays, dict[str, Any]], object], recipe: str = "w4g128-gptq") -> Make:
    """GPTQ with a file of statistics that something was done to."""

    def make(folder: Path) -> list[object]:
        rows = np.random.default_rng(0).normal(size=(200, 64)).astype(np.float32)
        names = [f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkv"]
        found: Arrays = {
            f"site.{SITE}.count": np.array([200]),
            f"site.{SITE}.gram": rows.T @ rows,
            f"site.{SITE}.mean_abs": abs(rows).mean(0),
        }
        readers: dict[str, Any] = {SITE: names}
        change(found, readers)
        path, model = folder / "stats", honest(folder)
        if found:
            record = {"source": "x", "samples": 1, "length": 8, "seed": 0}
            metadata = {
                "qtool.statistics": json.dumps(readers),
                "model_digest": Checkpoint.open(model).digest(),
                "calibration": json.dumps(record),
            }
            save_file(found, path, metadata)
        else:
            path.write_bytes(readers["bytes"])
        return ["quantize", model, "--recipe", recipe, "--set", "weights.group_size=32",
                "--stats", path, "-o", folder / "out"]  # fmt: skip

    return make


def instead(content: bytes) -> Make:
    """Other bytes in the place of statistics."""

    def run(found: Arrays, readers: dict[str, Any]) -> None:
        found.clear()
        readers["bytes"] = content

    return stats(run)


def array(name: str, value: Any) -> Make:
    return stats(lambda found, _: found.update({f"site.{SITE}.{name}": value}))


def text(content: bytes, name: str = "t.jsonl") -> Make:
    """A calibration text."""

    def make(folder: Path) -> list[object]:
        (folder / name).write_bytes(content)
        return ["calibrate", honest(folder), "-o", folder / "stats", "--calibration", folder / name,
                "--samples", 2, "--length", 16]  # fmt: skip

    return make


def _twice(_: Arrays, readers: dict[str, Any]) -> None:
    readers["another"] = readers[SITE]


GRAM = np.eye(64, dtype=np.float32)

STATS = [
    Row("statistics of another kind", instead(tensors({"w": entry()}, bytes(8))),
        "not a statistics file"),
    Row("statistics cut off", instead(tensors({"w": entry()}, bytes(7))), "truncated"),
    Row("statistics that are nothing", instead(b""), "0 bytes are too few"),
    Row("readers that are no JSON",
        instead(tensors({"__metadata__": {"qtool.statistics": "{"}, "w": entry()}, bytes(8))),
        "not valid JSON"),
    Row("readers nested too deeply",
        instead(tensors({"__metadata__": {"qtool.statistics": '{"a":' * 2000}, "w": entry()},
                        bytes(8))), "nested too deeply"),
    Row("readers that are a number", stats(lambda _, r: r.update({SITE: 7})),
        "are not a list of names"),
    Row("a reader of two inputs", stats(_twice), "reads the input of .* and of 'another'"),
    Row("a matrix of another width", array("gram", GRAM[:32, :32].copy()),
        r"expected F32 \[64, 64\]"),
    Row("a matrix that is a row", array("gram", GRAM[0].copy()), r"expected F32 \[64, 64\]"),
    Row("a matrix of doubles", array("gram", GRAM.astype(np.float64)), "is F64"),
    Row("a matrix with NaN", array("gram", GRAM * np.float32("nan")), "values that are not finite"),
    Row("a matrix with infinity", array("gram", GRAM + np.float32("inf")), "not finite"),
    Row("squares below zero", array("gram", -GRAM), "sums of squares or of sizes below zero"),
    Row("a negative number of tokens", array("count", np.array([-1])), "is -1, a number of tokens"),
    Row("a number of tokens that is none", array("count", np.array([0.5])), "expected I64"),
    Row("statistics of another model", stats(lambda _, r: r.update({SITE: ["other.weight"]})),
        "holds nothing for the input of"),
    Row("statistics for another recipe", stats(lambda f, _: f.pop(f"site.{SITE}.gram")),
        "holds no gram for the input of"),
]  # fmt: skip

TEXTS = [
    Row("a text of bytes", text(b"abc \xff\xfe", "t.txt"), "byte 4 is not UTF-8"),
    Row("a record nested too deeply", text(b'{"a":' * 200_000), "t.jsonl:1: not JSON"),
    Row("arrays nested too deeply", text(b"[" * 200_000), "t.jsonl: element 1: not JSON"),
    Row("a record of a million digits", text(b'{"text": ' + b"9" * 10**6 + b"}"), ":1: not JSON"),
    Row("a record of half a pair", text(b'{"text": "\\udc00"}\n'), "half of a surrogate pair"),
    Row("a record without a text", text(b'{"text": ["a"]}\n'), "`text` is a string"),
    Row("an array that breaks off", text(b'[{"text": "a"},', "t.json"), "the file ends within it"),
    Row("a table that is none", text(b"PAR1 PAR1", "t.parquet"), "cannot be read as Parquet"),
    Row("a text of gzip that is none", text(b"abc", "t.txt.gz"), "t.txt.gz: not gzip, or damaged"),
    Row("a text that breaks off", text(b"(\xb5/\xfd$\0", "t.txt.zst"), "ends within Zstandard"),
    Row("a text of nothing", text(b"", "t.txt"), "t.txt|tokens"),
]  # fmt: skip
