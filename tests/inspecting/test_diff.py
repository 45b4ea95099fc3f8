"""diff of artifacts whose differences are known."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.formats.gguf_values import string, strings
from qtool.gguf_types import BY_NAME, F32
from qtool.hub import tiny_folder
from qtool.scheme import GroupQuant, Scheme
from support.formats.artifact_files import random_quant, write_folder
from support.gguf import gguf_files

Q = "model.layers.0.self_attn.q_proj"
SCHEME = Scheme(4, 32, False)


def run(*arguments: object, status: int = 0) -> str:
    result = CliRunner().invoke(app, ["diff", *map(str, arguments)])
    assert result.exit_code == status, result.output
    return result.stdout


def found(a: Path, b: Path) -> dict[str, Any]:
    said = json.loads(run(a, b, "--json"))
    assert isinstance(said, dict)
    assert said["different"] == bool(said["metadata"] or said["tensors"])
    run(a, b, "--fail-if-different", status=int(said["different"]))
    return said


def folder(
    path: Path, kind: str, quant: GroupQuant | None, dense: dict[str, Any] | None = None
) -> Path:
    path.mkdir()
    write_folder(path, kind, {Q: quant} if quant else {}, dense)
    return path


def test_nothing_differs(tmp_path: Path) -> None:
    quant = random_quant(SCHEME, 16, 64)
    one, two = (folder(tmp_path / name, "awq", quant) for name in "ab")
    said = found(one, two)
    assert not said["different"] and said["same"] == 1
    assert "no difference: 1 tensor is the same" in run(one, two)


def test_one_code_and_one_scale(tmp_path: Path) -> None:
    quant = random_quant(SCHEME, 16, 64)
    codes = quant.codes.copy()
    codes[3, 5] ^= 1
    one = folder(tmp_path / "a", "awq", quant)
    said = found(one, folder(tmp_path / "b", "awq", replace(quant, codes=codes)))
    (row,) = said["tensors"]
    values = quant.dequantize()
    step = float(quant.scale[3, 0])
    assert row["kind"] == "values" and row["differing_codes"] == 1
    assert row["numbers"]["differing_values"] == 1 and row["numbers"]["values"] == values.size
    assert row["numbers"]["max_difference"] == pytest.approx(step, rel=1e-6)
    norm = float(np.linalg.norm(values.astype(np.float64)))
    assert row["numbers"]["relative_difference"] == pytest.approx(step / norm, rel=1e-6)
    scale = quant.scale.copy()
    scale[2, 1] *= 2
    (row,) = found(one, folder(tmp_path / "c", "awq", replace(quant, scale=scale)))["tensors"]
    expected = replace(quant, scale=scale).dequantize()
    assert row["differing_codes"] == 0
    assert row["numbers"]["differing_values"] == np.count_nonzero(expected != values) > 8


def test_other_formats_of_the_same_numbers(tmp_path: Path) -> None:
    quant = random_quant(replace(SCHEME, symmetric=True), 16, 64)
    awq = folder(tmp_path / "a", "awq", quant)
    gptq = folder(tmp_path / "g", "gptq", quant)
    plain = folder(tmp_path / "d", "dense", None, {Q + ".weight": quant.dequantize()})
    for one, two in ((awq, gptq), (awq, plain), (plain, gptq)):
        (row,) = found(one, two)["tensors"]
        assert row["kind"] == "storage" and row["numbers"]["differing_values"] == 0
        assert row["numbers"]["relative_difference"] == row["numbers"]["max_difference"] == 0
        assert row["differing_codes"] == (None if plain in (one, two) else 0)
    text = run(awq, gptq)
    assert "with the same numbers, stored otherwise: 1 tensor" in text
    assert Q not in text and "tensors that are only stored otherwise have no row here" in text
    assert Q in (every := run(awq, gptq, "--all")) and "no row here" not in every


def test_tensors_and_shapes_the_worst_first(tmp_path: Path) -> None:
    one = {name: np.ones((4, 4), np.float32) for name in ("gone", "shape", "far", "near", "same")}
    two = {name: array.copy() for name, array in one.items() if name != "gone"}
    two |= {"new": np.ones(3, np.float32), "shape": np.ones((4, 5), np.float32)}
    two["far"][0, 0], two["near"][0, 0] = 9, 1.5
    one["nan"] = two["nan"] = np.array([np.nan, 1, 2], np.float32)
    two["nan"] = np.array([np.nan, 1, np.inf], np.float32)
    one["whole"], two["whole"] = np.arange(3, dtype=np.int64), np.arange(3, dtype=np.int64) * 2
    one["half"], two["half"] = np.ones(3, np.float32), np.ones(3, np.float16)
    said = found(
        folder(tmp_path / "a", "dense", None, one), folder(tmp_path / "b", "dense", None, two)
    )
    rows = {row["name"]: row for row in said["tensors"]}
    assert list(rows) == ["gone", "new", "shape", "nan", "far", "whole", "near", "half"]
    kinds = [row["kind"] for row in rows.values()]
    assert kinds == ["only-a", "only-b", "shape", *["values"] * 4, "storage"]
    assert rows["gone"]["b"] is None and rows["new"]["a"] is None
    assert rows["gone"]["a"] == {"shape": [4, 4], "dtype": "F32", "scheme": None, "bytes": 64}
    assert rows["far"]["numbers"]["max_difference"] == 8
    assert rows["far"]["numbers"]["relative_difference"] == 2
    # NaN equals NaN; what is not finite is no number
    assert rows["nan"]["numbers"] == {
        "values": 3, "differing_values": 1, "max_difference": None, "relative_difference": None
    }  # fmt: skip
    assert rows["whole"]["numbers"]["max_difference"] == 2
    assert said["same"] == 1 and said["counts"]["values"] == 4
    text = run(tmp_path / "a", tmp_path / "b")
    assert text.index("only in A") < text.index("with other numbers") < text.index("\ngone ")


def test_config_and_files_beside_it(tmp_path: Path) -> None:
    arrays = {"x": np.ones((4, 4), np.float32)}
    one, two = (folder(tmp_path / name, "dense", None, arrays) for name in "ab")
    (one / "config.json").write_text('{"a": {"b": 1, "c": [1, NaN]}, "only": {}, "t": 1}')
    (two / "config.json").write_text('{"a": {"b": 2, "c": [1, NaN]}, "t": true}')
    (one / "tokenizer.json").write_text("{}")
    (two / "tokenizer.json").write_text("{ }")
    said = found(one, two)
    assert {row["key"]: row for row in said["metadata"]}["a.b"] == {"key": "a.b", "a": 1, "b": 2}
    keys = [row["key"] for row in said["metadata"]]
    assert keys == ["a.b", "only", "t", "file tokenizer.json"]
    assert said["metadata"][1] == {"key": "only", "a": {}}
    assert said["tensors"] == [] and "metadata: 4 keys differ" in run(one, two)


def test_a_record_that_one_of_them_lacks(tmp_path: Path) -> None:
    """Is one row, and no table that hides what differs; --all lists its keys."""
    one, two = (
        folder(tmp_path / name, "dense", None, {"x": np.full((4, 4), value, np.float32)})
        for name, value in (("a", 1), ("b", 2))
    )
    record = {"recipe": {"name": "own", "bits": 4}, "qtool_version": "0.1.0"}
    (one / "qtool.json").write_text(json.dumps(record))
    text = run(one, two)
    assert "metadata: 3 keys differ" in text
    assert re.search(r"\nmetadata +A +B\nqtool.json +3 keys +-$", text.rstrip()), text
    assert re.search(r"\nqtool.json.recipe.bits +4 +-", run(one, two, "--all"))
    (two / "qtool.json").write_text(json.dumps(record | {"qtool_version": "0.2.0"}))
    assert re.search(r"\nqtool.json.qtool_version +0.1.0 +0.2.0", run(one, two))


def test_a_format_that_is_not_decoded(tmp_path: Path) -> None:
    one, two = (
        folder(tmp_path / name, "dense", None, {Q + ".weight": np.full((4, 4), n, np.uint8)})
        for n, name in enumerate("ab")
    )
    for path in (one, two):
        config = {"quantization_config": {"quant_method": "hqq"}}
        (path / "config.json").write_text(json.dumps(config))
    (row,) = found(one, two)["tensors"]
    assert row["kind"] == "undecoded" and row["numbers"] is None
    assert found(one, one)["same"] == 1


def gguf(path: Path, change: float = 0, note: str = "x", kind: str = "Q8_0") -> Path:
    values = gguf_files.weights((8, 64), 1)
    raw = values.copy()
    raw[2, 40] += change
    metadata = gguf_files.llama(1) | {
        "note": string(note), "list": strings([note] * 20),
    }  # fmt: skip
    return gguf_files.write(path, metadata, {"a": (values, F32), "b": (raw, F32)})


def test_gguf_files(tmp_path: Path) -> None:
    one, two = gguf(tmp_path / "a.gguf"), gguf(tmp_path / "b.gguf", 1, "y")
    said = found(one, two)
    assert said["names"] == "gguf" and said["same"] == 1
    (row,) = said["tensors"]
    assert row["name"] == "b" and row["differing_blocks"] == 1
    assert row["numbers"]["max_difference"] == pytest.approx(1)
    note, many = said["metadata"]
    assert note == {"key": "note", "a": "x", "b": "y"}
    assert many["a"].startswith("STRING[20] ") and many["a"] != many["b"]
    assert found(one, one)["different"] is False


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model as GGUF of several types."""
    root = tmp_path_factory.mktemp("made")
    for recipe in ("f16", "q8_0", "q4_k_m"):
        out = str(root / f"{recipe}.gguf")
        result = CliRunner().invoke(app, ["quantize", "tiny", "--recipe", recipe, "-o", out])
        assert result.exit_code == 0, result.output
    return root


def test_a_checkpoint_and_its_gguf(made: Path) -> None:
    """Names are mapped and the rows of q and k put back: nothing differs but by rounding."""
    tiny = tiny_folder()
    said = found(tiny, made / "f16.gguf")
    assert said["names"] == "checkpoint" and said["metadata"] == []
    assert len(said["tensors"]) == len(Checkpoint.open(tiny).tensors)
    assert {row["kind"] for row in said["tensors"]} == {"values", "storage"}
    worst = said["tensors"][0]["numbers"]
    assert 0 < worst["relative_difference"] < 1e-8  # bfloat16 below float16's smallest
    coarse = found(made / "q8_0.gguf", tiny)
    assert 1e-4 < coarse["tensors"][0]["numbers"]["relative_difference"] < 1e-2
    assert coarse["a"]["format"] == "gguf" and coarse["b"]["format"] == "dense"


def test_gptq_and_the_gguf_file_it_was_converted_to(tmp_path: Path) -> None:
    """Every number is the same, q's and k's rows put back and groups of 128 in blocks of 32."""
    for words in (
        ["quantize", "tiny", "--recipe", "w4g128-rtn", "-o", str(tmp_path / "gptq"),
         "--set", "format=gptq", "--set", "weights.symmetric=true"],
        ["convert", str(tmp_path / "gptq"), "--to", "gguf", "-o", str(tmp_path / "m.gguf")],
    ):  # fmt: skip
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    said = found(tmp_path / "gptq", tmp_path / "m.gguf")
    assert said["counts"]["storage"] == len(said["tensors"]) == 38 - said["same"]
    schemes = {(row["a"]["scheme"], row["b"]["scheme"]) for row in said["tensors"]}
    assert ("w4 g128 sym", "Q4_0") in schemes


def test_gguf_types(made: Path) -> None:
    said = found(made / "q8_0.gguf", made / "q4_k_m.gguf")
    worst = said["tensors"][0]
    assert worst["a"]["scheme"] == "Q8_0" and worst["b"]["scheme"] in BY_NAME
    assert worst["differing_blocks"] is None
    assert 0.05 < worst["numbers"]["relative_difference"] < 0.3
    assert said["same"] == 9  # the norms
    assert "more tensors; --all lists them" not in run(made / "q8_0.gguf", made / "q4_k_m.gguf")


def test_long_tables_are_cut(tmp_path: Path) -> None:
    arrays = {f"t{number:02}": np.ones(2, np.float32) for number in range(40)}
    one = folder(tmp_path / "a", "dense", None, arrays)
    two = folder(tmp_path / "b", "dense", None, {"t00": arrays["t00"]})
    text = run(one, two)
    assert "9 more tensors; --all lists them" in text and "t30" in text and "t31" not in text
    assert "t39" in run(one, two, "--all") and "more tensors" not in run(one, two, "--all")


def test_memory_is_a_million_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every read is bounded, whatever the tensor's size."""
    from qtool.formats import safetensors_file as st

    arrays = {"x": np.ones((64, 32), np.float32)}
    one = folder(tmp_path / "a", "dense", None, arrays)
    arrays["x"][40, 3] = 2
    two = folder(tmp_path / "b", "dense", None, arrays)
    import qtool.diff.diff

    largest = 0
    read = st.read_range

    def watched(path: Path, info: Any) -> Any:
        nonlocal largest
        largest = max(largest, info.nbytes)
        return read(path, info)

    monkeypatch.setattr(st, "read_range", watched)
    monkeypatch.setattr(qtool.diff.diff, "_AT_ONCE", 256)
    (row,) = found(one, two)["tensors"]
    assert largest == 8 * 32 * 4 and row["numbers"]["values"] == 64 * 32
    assert row["numbers"]["differing_values"] == 1


def test_blocks_of_scales(tmp_path: Path) -> None:
    """Rows of a matrix whose scales are shared by several rows."""
    from qtool.diff.sides import part_of

    for scheme in (replace(SCHEME, rows=8), replace(SCHEME, rows=-1, group_size=-1)):
        rng = np.random.default_rng(1)
        grid = scheme.grid((16, 64))
        quant = GroupQuant(
            scheme,
            rng.integers(0, 16, (16, 64), dtype=np.uint8),
            rng.uniform(0.1, 1, grid).astype(np.float16),
            rng.integers(0, 16, grid, dtype=np.uint8),
        )
        expected = quant.dequantize()
        for first, last in ((0, 16), (3, 11), (8, 9)):
            assert np.array_equal(part_of(quant, first, last).dequantize(), expected[first:last])


def test_errors_say_which_side_is_meant(tmp_path: Path) -> None:
    shutil.copytree(tiny_folder(), tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"x")
    broken, gone, words = str(tmp_path / "m"), str(tmp_path / "gone"), str(tmp_path / "words")
    (tmp_path / "words").mkdir()
    quants = {Q: random_quant(Scheme(4, 32, False), 64, 64)}
    write_folder(tmp_path / "words", "awq", quants, {})
    config = json.loads((tmp_path / "words" / "config.json").read_text())
    config["quantization_config"]["group_size"] = 16
    (tmp_path / "words" / "config.json").write_text(json.dumps(config))
    for pair, said in (
        (("tiny", broken), f"B: {broken}/model.safetensors: 1 bytes are too few"),
        ((broken, "tiny"), f"A: {broken}/model.safetensors: 1 bytes are too few"),
        ((gone, "tiny"), f"A: {gone}: no such file"),
        (("tiny", words), f"B: {words}: {Q}.qzeros: the shape is"),
    ):
        result = CliRunner().invoke(app, ["diff", *pair])
        assert str(result.exception).startswith(said)
