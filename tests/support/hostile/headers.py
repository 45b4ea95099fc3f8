"""safetensors files, and folders of them."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from qtool.formats.safetensors_file import INDEX_NAME
from support.hostile.row import Make, Row, edited, entry, honest, tensors

ONE = json.dumps(entry())
DENSE = b"[],"


def header(content: bytes, *command: object) -> Make:
    """A model.safetensors of these bytes."""

    def make(folder: Path) -> list[object]:
        (folder / "model.safetensors").write_bytes(content)
        return [*(command or ("inspect",)), folder]

    return make


def quantize(change: Callable[[Path], object], *more: object) -> Make:
    """`qtool quantize` of an honest model that something was done to."""

    def make(folder: Path) -> list[object]:
        model = honest(folder)
        change(model)
        return ["quantize", model, "--recipe", "w4g128-rtn", "--set", "weights.group_size=32",
                "-o", folder / "out", *more]  # fmt: skip

    return make


def weights(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """The same, of the tensors of model.safetensors."""

    def run(model: Path) -> None:
        path = model / "model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return run


def linked(name: str, to: str = "secret") -> Callable[[Path], None]:
    """A link in the model's folder to a file outside of it."""

    def run(model: Path) -> None:
        outside = model.parent / "outside"
        outside.mkdir()
        (outside / "secret").write_text('{"auth": "token of somebody"}')
        (outside / "x.jinja").write_text("secret")
        path = model / name
        path.unlink(missing_ok=True)
        path.symlink_to(outside / to if to else outside)

    return run


def index(content: Any) -> Callable[[Path], None]:
    def run(model: Path) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (model / INDEX_NAME).write_bytes(text)

    return run


def _only_pickle(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n(S'touch ran'\ntR.")


def _pickle_file(folder: Path) -> list[object]:
    path = folder / "model.pt"
    path.write_bytes(b"\x80\x04.")
    return ["plan", path, "--recipe", "w4g128-rtn"]


def _not_a_number(found: dict[str, Any]) -> None:
    found["model.layers.1.mlp.up_proj.weight"][3, 5] = np.nan


def _too_large(found: dict[str, Any]) -> None:
    found["model.layers.1.mlp.up_proj.weight"][0] = 3e38


def _folder_for_a_file(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "model.safetensors").mkdir()


def _pipe(name: str) -> Callable[[Path], None]:
    def run(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return run


def _no_weights(then: Callable[[Path], object]) -> Callable[[Path], None]:
    def run(model: Path) -> None:
        (model / "model.safetensors").unlink()
        then(model)

    return run


def _pair(folder: Path) -> list[object]:
    """verify and diff see the second file of two."""
    for name, content in (("a", tensors({"w": entry()}, bytes(8))), ("b", tensors({}, b""))):
        (folder / f"{name}.safetensors").write_bytes(content)
    return ["diff", folder / "a.safetensors", folder / "b.safetensors"]


def _shard_twice(model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "a.safetensors").write_bytes(content)
    names = load_file(model / "model.safetensors")
    index({"weight_map": dict.fromkeys(names, "b.safetensors")})(model)


HEADERS = [
    Row("a header of nothing but lists", header(tensors(b'{"w":[' + DENSE * 100_000 + b"0]}")),
        "JSON so dense that they would take"),
    Row("a shape of 4000 digits",
        header(tensors(b'{"w":{"dtype":"F32","shape":[' + b"9" * 4000 + b"," + b"9" * 4000 +
                       b'],"data_offsets":[0,8]}}', bytes(8))), "expected a list of counts"),
    Row("offsets of 4300 digits",
        header(tensors(b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,' + b"9" * 4300 + b"]}}",
                       bytes(8))), r"expected \[begin, end\]"),
    Row("64 dimensions of 2^62", header(tensors({"w": entry(shape=[2**62] * 64)}, bytes(8))),
        "but its data_offsets hold 8"),
    Row("half a surrogate pair in a name",
        header(tensors(f'{{"\\ud800": {ONE}}}'.encode(), bytes(8))), "half of a surrogate pair"),
    Row("half a pair in the metadata",
        header(tensors(f'{{"__metadata__": {{"a": "\\uDFFF"}}, "w": {ONE}}}'.encode(), bytes(8))),
        "half of a surrogate pair"),
    Row("a name that clears the screen",
        header(tensors({"\x1b[2J\x1b]0;gotcha\x07": entry("F33")}, bytes(8))), r"\\x1b\[2J"),
    Row("a name of two lines", header(tensors({"a\nerror: b": entry("F33")}, bytes(8))), r"\\n"),
    Row("a name written backwards", header(tensors({"\u202etxt.exe": entry("F33")}, bytes(8))),
        r"\\u202e"),
    Row("a name of a million letters", header(tensors({"x" * 10**6: entry("F33")}, bytes(8))),
        r"xxx \[\.\.\.\] xxx"),
    Row("a byte order mark", header(tensors(b'\xef\xbb\xbf{"w": 1}')), "does not begin with"),
    Row("NaN for a shape",
        header(tensors(b'{"w":{"dtype":"F32","shape":[NaN],"data_offsets":[0,8]}}', bytes(8))),
        r"shape \[nan\]"),
    Row("a page of HTML", header(b"<!DOCTYPE html><html>Access denied</html>" * 9),
        "a web page, not the file itself"),
    Row("a zip file of another tool", header(b"PK\x03\x04" + bytes(400), "plan", "--recipe",
                                             "w4g128-rtn"),
        "no safetensors file, or a truncated one"),
    Row("the second of two", _pair, "holds no tensors"),
    Row("weights that are no numbers", quantize(weights(_not_a_number)),
        r"up_proj\.weight' holds nan at \[3, 5\]"),
    Row("weights that overflow", quantize(weights(_too_large)), "up_proj"),
    Row("nothing but a pickle", quantize(_only_pickle), "a Python pickle, which can run any code"),
    Row("a pickle by its name", _pickle_file, "a Python pickle, which can run any code"),
    Row("a folder in the place of a file", quantize(_folder_for_a_file), "Is a directory"),
    Row("a pipe in the place of a file", quantize(_pipe("model.safetensors")), "too few|no such"),
    Row("a device in the place of a file",
        quantize(_no_weights(lambda m: (m / "model.safetensors").symlink_to("/dev/zero"))),
        "0 bytes are too few"),
]  # fmt: skip

INDEXES = [
    Row("a pipe in the place of an index",
        quantize(_pipe("other.safetensors.index.json")), "not a file; expected one of JSON"),
    Row("an index out of the folder", quantize(index({"weight_map": {"w": "../../x.safetensors"}})),
        "leads out of the folder"),
    Row("an index to an absolute name",
        quantize(index({"weight_map": {"w": "/etc/x.safetensors"}})), "leads out of the folder"),
    Row("an index through a folder and back",
        quantize(index({"weight_map": {"w": "a/../../x.safetensors"}})), "leads out of the folder"),
    Row("an index of Windows",
        quantize(index({"weight_map": {"w": "C:\\\\x.safetensors"}})), "leads out of the folder"),
    Row("an index that ends its names early",
        quantize(index({"weight_map": {"w": "model.safetensors\0.txt"}})), "leads out"),
    Row("an index of a name that no disk holds",
        quantize(index({"weight_map": {"w": "x" * 300 + ".safetensors"}})),
        "longer than a file's name can be"),
    Row("an index of pickles", quantize(index({"weight_map": {"w": "pytorch_model.bin"}})),
        "a Python pickle"),
    Row("an index of a file that is not there",
        quantize(_shard_twice), r"b\.safetensors: named by .*, but missing"),
    Row("an index that promises more",
        quantize(index({"weight_map": {"x.weight": "model.safetensors"}})), "lacks 'x.weight'"),
    Row("an index of numbers", quantize(index({"weight_map": {"w": 7}})), "'w' is 7, not a name"),
    Row("an index without a map", quantize(index({"metadata": {}})), "has no weight_map"),
    Row("an index that is a list", quantize(index([1])), "expected a JSON object, found a list"),
    Row("an index without an end", quantize(index(b'{"weight_map": {"w": ')), "not valid JSON"),
    Row("an index nested too deeply", quantize(index(b'{"weight_map":' * 2000)),
        "nested too deeply"),
    Row("an index that names a tensor twice",
        quantize(index(b'{"weight_map": {"w": "a.safetensors", "w": "b.safetensors"}}')),
        "'w' comes twice"),
    Row("two indexes", quantize(lambda m: [(m / f"{n}.safetensors.index.json").write_text("{}")
                                           for n in "ab"]), "several indexes"),
]  # fmt: skip

LINKS = [
    Row("a link to a secret as tokenizer", quantize(linked("tokenizer.txt")),
        r"tokenizer\.txt: a link to .*/outside/secret, where no other part"),
    Row("a link to a secret as config", quantize(linked("config.json")), "a link to"),
    Row("a link to a secret as licence", quantize(linked("LICENSE.md")), "a link to"),
    Row("a link to a folder of secrets", quantize(linked("additional_chat_templates", "")),
        "a link to"),
    Row("a link to a secret as provenance", quantize(linked("qtool.json")), "a link to"),
    Row("a link to a secret as code",
        quantize(lambda m: [edited(m / "config.json", {"auto_map": {"AutoConfig": "c.X"}}),
                            linked("c.py")(m)]), "a link to"),
]  # fmt: skip
