"""Quantizing into GGUF: bytes by llama-quantize's digests, sources of all kinds, and failures."""

import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from qtool import api, native_gguf
from qtool.checkpoints.gguf_models import is_gguf
from qtool.errors import FormatError, QtoolError, SourceError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_writer import GgufWriter
from qtool.gguf import pieces
from qtool.gguf.open import open_source
from qtool.gguf.source import GgufSource
from qtool.gguf_mixtures.table import FILE_TYPES
from qtool.gguf_types import BF16, BY_NAME, F16, F32, TENSOR_TYPES, BlockType
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.quantizing.gguf import quantize as gguf_quantize
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.record import CHECKSUM_KEY
from qtool.runs.gguf_request import GgufRequest, artifact_path
from qtool.runs.zeros import Zeros
from qtool.streaming.in_order import in_order
from support.gguf import gguf_files
from support.gguf.gguf_files import models
from support.places import SUPPORT

__all__ = ["models"]

DIGESTS = json.loads((SUPPORT / "gguf" / "gguf_files.json").read_text())
# These search the longest; of experts IQ2_XS and IQ3_XXS remain, and of the other model all.
SLOW = {("experts", f"iq{name}") for name in ("2_xxs", "2_s", "2_m", "3_xs", "3_s", "3_m")}


def quantize(
    source: Path,
    recipe: str,
    out: Path,
    *sets: str,
    imatrix: Path | None = None,
    requantize: bool = False,
    threads: int = 2,
) -> Summary:
    loaded = load(recipe, sets)
    assert isinstance(loaded, GgufRecipe)
    request = GgufRequest(str(source), source, loaded, out, threads, imatrix, requantize)
    return run_gguf(request, Progress(quiet=True))


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        pytest.param(name, recipe, marks=[pytest.mark.slow] if (name, recipe) in SLOW else [])
        for name in gguf_files.SMALL
        for recipe in map(str.lower, FILE_TYPES)
    ],
)
def test_bytes_of_llama_quantize(name: str, recipe: str, models: Path, tmp_path: Path) -> None:
    plain, weighed = DIGESTS[name][recipe]
    factors = models / f"{name}-imatrix.gguf"
    for digest, imatrix in ((plain, None), (weighed, factors)):
        out = tmp_path / f"{imatrix is None}.gguf"
        if digest is None:
            with pytest.raises(UnsupportedError, match="importance matrix"):
                quantize(models / f"{name}.gguf", recipe, out, "importance=false")
            assert not any(tmp_path.iterdir())
        else:
            quantize(models / f"{name}.gguf", recipe, out, "importance=false", imatrix=imatrix)
            assert sha256(gguf_files.data(out)).hexdigest() == digest


def test_threads_and_pieces_change_no_byte(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = models / "experts.gguf"
    one = quantize(source, "q4_k_m", tmp_path / "1.gguf", threads=1)
    five = quantize(source, "q4_k_m", tmp_path / "5.gguf", threads=5)
    assert (tmp_path / "1.gguf").read_bytes() == (tmp_path / "5.gguf").read_bytes()
    assert one.layers == five.layers
    monkeypatch.setattr(pieces, "CACHED_WEIGHTS", 256)
    quantize(source, "q4_k_m", tmp_path / "rows.gguf")
    assert (tmp_path / "rows.gguf").read_bytes() == (tmp_path / "5.gguf").read_bytes()
    monkeypatch.setattr(pieces, "PIECE_WEIGHTS", 1000)
    quantize(source, "q4_k_m", tmp_path / "small.gguf")
    assert gguf_files.data(tmp_path / "small.gguf") == gguf_files.data(tmp_path / "5.gguf")


@pytest.mark.parametrize("type_", [F32, BF16], ids=lambda type_: type_.name)
@pytest.mark.parametrize("recipe", ["q4_k_m", "q8_0", "f16", "bf16", "f32"])
def test_other_floats_as_a_source(type_: BlockType, recipe: str, tmp_path: Path) -> None:
    source = gguf_files.model(tmp_path / "x.gguf", layers=1, type_=type_)
    quantize(source, recipe, tmp_path / "y.gguf")
    with GgufFile.open(source) as before, GgufFile.open(tmp_path / "y.gguf") as after:
        for name, info in after.tensors.items():
            stored = before.tensors[name]
            raw = before.read_rows(name, 0, info.rows)
            found = after.read_rows(name, 0, info.rows)
            if stored.type == info.type:
                assert (raw == found).all()
                continue
            if stored.type == BF16:
                values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            else:
                values = raw.view(np.float32)
            if info.type == F16:
                assert (values.astype(np.float16).view(np.uint8) == found).all()
            elif info.type == F32:
                assert (values.view(np.uint8) == found).all()
            elif info.type == BF16:
                cut = values.view(np.uint32)
                rounded = (cut + 0x7FFF + ((cut >> 16) & 1)) >> 16
                assert (rounded.astype(np.uint16).view(np.uint8) == found).all()
            else:
                assert (native_gguf.encode(values, info.type) == found).all()


def test_numbers_that_are_no_weights_are_copied(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    tensors = {
        "token_embd.weight": (gguf_files.weights((8, 256), 1), F32),
        "ids": (draw.integers(0, 1000, (600, 1024)).astype(np.float32), TENSOR_TYPES[27]),
        "table": (draw.standard_normal((3, 5)).astype(np.float32), TENSOR_TYPES[28]),
        "output_norm.weight": (np.ones(256, np.float32), F32),
    }
    source = gguf_files.write(tmp_path / "x.gguf", gguf_files.llama(1), tensors)
    quantize(source, "q4_k_m", tmp_path / "y.gguf")
    with GgufFile.open(source) as before, GgufFile.open(tmp_path / "y.gguf") as after:
        for name, type_ in (("ids", "I64"), ("table", "F64")):
            assert after.tensors[name].type.name == type_
            rows = after.tensors[name].rows
            assert (before.read_rows(name, 0, rows) == after.read_rows(name, 0, rows)).all()


def test_requantizing_is_asked_for_and_said(models: Path, tmp_path: Path) -> None:
    first, out = tmp_path / "q8_0.gguf", tmp_path / "q4_0.gguf"
    quantize(models / "dense.gguf", "q8_0", first)
    with pytest.raises(UnsupportedError, match="--requantize"):
        quantize(first, "q4_0", out)
    assert not out.exists()
    summary = quantize(first, "q4_0", out, requantize=True)
    assert any("quantized already (Q8_0)" in warning for warning in summary.warnings)
    header = gguf_files.header(out)
    assert header.metadata["qtool.requantized_from"].value == "Q8_0"
    with GgufFile.open(first) as before, GgufFile.open(out) as after:
        name = "blk.1.ffn_up.weight"
        info = after.tensors[name]
        middle = native_gguf.dequantize(
            before.read_rows(name, 0, info.rows), BY_NAME["Q8_0"], info.in_features
        )
        found = after.read_rows(name, 0, info.rows)
        assert (native_gguf.encode(middle, BY_NAME["Q4_0"]) == found).all()
    assert not summary.notes
    # The same types again: copied, and nothing is lost.
    summary = quantize(first, "q8_0", tmp_path / "again.gguf", requantize=True)
    assert "--requantize was not needed" in summary.notes[0]
    assert gguf_files.data(tmp_path / "again.gguf") == gguf_files.data(first)


def test_errors_of_tensors_are_reported(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.gguf"
    summary = quantize(models / "experts.gguf", "q3_k_m", out)
    found = {layer.name: layer for layer in summary.layers}
    with GgufFile.open(models / "experts.gguf") as before, GgufFile.open(out) as after:
        expected = [i for i in after.tensors.values() if i.type != before.tensors[i.name].type]
        assert list(found) == [info.name for info in expected]
        for info in expected:
            raw = before.read_rows(info.name, 0, info.rows)
            values = raw.view(np.float16).astype(np.float64)
            blocks = after.read_rows(info.name, 0, info.rows)
            back = native_gguf.dequantize(blocks, info.type, info.in_features)
            error = np.linalg.norm(values - back) / np.linalg.norm(values)
            assert found[info.name].scheme == info.type.name
            assert math.isclose(found[info.name].relative_error, error, rel_tol=1e-9)
    assert summary.size_bytes == out.stat().st_size and summary.format == "gguf"
    assert json.loads(json.dumps(summary.json()))["tensors"]["quantized"] == len(expected)


def test_source_checksum(models: Path, tmp_path: Path) -> None:
    def of(source: Path, recipe: str) -> str:
        out = tmp_path / f"{source.stem}-{recipe}.gguf"
        quantize(source, recipe, out)
        return str(gguf_files.header(out).metadata[CHECKSUM_KEY].value)

    known = of(models / "dense.gguf", "q4_0")
    assert len(known) == 16 and int(known, 16) and known == of(models / "dense.gguf", "f16")
    changed = tmp_path / "changed.gguf"
    changed.write_bytes((models / "dense.gguf").read_bytes())
    with changed.open("r+b") as file:
        file.seek(gguf_files.header(changed).tensors[-1].start)
        file.write(b"\x01")
    assert known != of(changed, "q4_0")


def test_a_checkpoint_gives_what_its_gguf_file_gives(tmp_path: Path) -> None:
    quantize(tiny_folder(), "q4_k_m", tmp_path / "direct.gguf")
    quantize(tiny_folder(), "bf16", tmp_path / "same.gguf")  # its own dtype
    quantize(tmp_path / "same.gguf", "q4_k_m", tmp_path / "again.gguf")
    assert gguf_files.data(tmp_path / "direct.gguf") == gguf_files.data(tmp_path / "again.gguf")
    headers = [gguf_files.header(tmp_path / f"{name}.gguf") for name in ("direct", "again")]
    for key, value in headers[0].metadata.items():
        # What a model is called by; and the same weights have the same checksum.
        assert key == "qtool.source" or headers[1].metadata[key] == value, key


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("recipe", ["q4_k_m", "f16", "f32"])
def test_weights_that_are_not_finite(value: float, recipe: str, tmp_path: Path) -> None:
    source = gguf_files.model(tmp_path / "x.gguf", layers=1)
    info = next(i for i in gguf_files.header(source).tensors if i.name == "blk.0.ffn_up.weight")
    with source.open("r+b") as file:
        file.seek(info.start + 2 * (300 * info.in_features + 7))
        file.write(np.float16(value).tobytes())
    with pytest.raises(SourceError, match=r"blk\.0\.ffn_up\.weight: row 300 has a weight that is"):
        quantize(source, recipe, tmp_path / "new" / "y.gguf")
    assert [*tmp_path.iterdir()] == [source]


def test_weights_that_do_not_fit(tmp_path: Path) -> None:
    tensors = {
        "token_embd.weight": (np.full((8, 256), 1e30, np.float32), F32),
        "output_norm.weight": (np.ones(256, np.float32), F32),
    }
    source = gguf_files.write(tmp_path / "x.gguf", gguf_files.llama(1), tensors)
    for recipe in ("f16", "q8_0"):
        with pytest.raises(FormatError, match=r"token_embd\.weight: .* too large for"):
            quantize(source, recipe, tmp_path / "y.gguf")
    assert [*tmp_path.iterdir()] == [source]


def test_what_reads_back_otherwise_is_not_kept(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = GgufWriter.finish

    def spoil(writer: GgufWriter) -> None:
        put(writer)
        position = writer.layout.starts[5] + 3
        byte = os.pread(writer._descriptor, 1, position)
        os.pwrite(writer._descriptor, bytes([byte[0] ^ 16]), position)

    monkeypatch.setattr(GgufWriter, "finish", spoil)
    with pytest.raises(FormatError, match="reads back with other bytes"):
        quantize(models / "dense.gguf", "q4_0", tmp_path / "x.gguf")
    assert not any(tmp_path.iterdir())


def test_the_error_of_the_first_piece_is_told() -> None:
    def work(number: int) -> None:
        seen.append(number)
        if number in (40, 41, 700):
            time.sleep(0.02 * (number == 40))  # the later one fails first
            raise QtoolError(str(number))

    seen: list[int] = []
    for _ in range(5):
        with pytest.raises(QtoolError, match=r"^40$"):
            in_order(1000, 4, lambda: work, range)
    in_order(0, 4, lambda: work, range)
    seen.clear()
    steps: list[int] = []

    def shown(count: int) -> Iterator[int]:
        for step in range(count):
            yield step
            steps.append(step)

    in_order(1000, 4, lambda: seen.append, shown)
    assert sorted(seen) == list(range(1000)) and steps == list(range(200))


def test_names(models: Path) -> None:
    recipe = load("q4_0")
    assert isinstance(recipe, GgufRecipe)
    assert artifact_path("a/m-f16.gguf", recipe, None) == Path("m-f16-q4_0.gguf")
    assert artifact_path("x-00001-of-00003.gguf", recipe, None) == Path("x-q4_0.gguf")
    assert artifact_path("owner/name", recipe, None) == Path("name-q4_0.gguf")
    assert artifact_path("a", recipe, Path("x")) == Path("x")
    with pytest.raises(SourceError, match="holds 4 GGUF models"):
        open_source(models)


def test_a_gguf_file_by_any_name(models: Path, tmp_path: Path) -> None:
    """As some programs keep them: told by its first bytes, as `inspect` does."""
    blob = tmp_path / "sha256-0123"
    blob.write_bytes((models / "dense.gguf").read_bytes())
    quantize(blob, "q4_0", tmp_path / "x.gguf")
    quantize(models / "dense.gguf", "q4_0", tmp_path / "y.gguf")
    assert (tmp_path / "x.gguf").read_bytes() == (tmp_path / "y.gguf").read_bytes()
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "m-00002-of-00003.gguf").write_bytes(blob.read_bytes())
    assert is_gguf(tmp_path / "alone")
    assert not is_gguf(tiny_folder()) and not is_gguf(tmp_path / "nothing")


@pytest.mark.parametrize("fails", [False, True])
def test_a_source_is_closed_at_the_end(
    fails: bool, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def opening(path: Path, requantize: bool, watch: Zeros | None) -> GgufSource:
        opened.append(open_source(path, requantize, watch))
        return opened[0]

    monkeypatch.setattr(gguf_quantize, "open_source", opening)
    if fails:
        monkeypatch.setattr(gguf_quantize, "_encode", _failing)
    with pytest.raises(QtoolError, match="failing") if fails else nullcontext():
        quantize(models / "dense.gguf", "q4_0", tmp_path / "x.gguf")
    with pytest.raises(ValueError, match="has been closed"):
        opened[0].tensors[0].read(0, 1)


def _failing(*_: object) -> None:
    raise QtoolError("failing")


def test_a_name_that_does_not_say_gguf(models: Path, tmp_path: Path) -> None:
    source = models / "dense.gguf"
    said = "is one GGUF file; most programs know them by a name that ends in .gguf"
    made = api.quantize(source, "q8_0", tmp_path / "x")
    assert f"{tmp_path / 'x'} {said}" in made.notes
    assert api.quantize(source, "q8_0", tmp_path / "x.gguf").notes == []


def test_what_is_not_written_is_said(tmp_path: Path) -> None:
    """By name and reason: on the screen, a line for each reason, and in --json."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = shutil.copytree(tiny_folder(), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    rotary = [f"model.layers.{block}.self_attn.rotary_emb.inv_freq" for block in range(4)]
    tensors |= {name: torch.ones(8) for name in [*rotary, "mtp.norm.weight"]}
    save_file(tensors, folder / "model.safetensors")
    plain = quantize(tiny_folder(), "q4_0", tmp_path / "plain.gguf")
    assert plain.dropped == [] and not any("not written" in line for line in plain.lines())
    summary = quantize(folder, "q4_0", tmp_path / "x.gguf")
    assert gguf_files.data(tmp_path / "x.gguf") == gguf_files.data(tmp_path / "plain.gguf")
    said = [line for line in summary.lines() if line.startswith("not written")]
    assert said == [
        f"not written: {', '.join(rotary[:3])} and 1 more (llama.cpp computes it itself)",
        "not written: mtp.norm.weight (multi-token prediction: files of llama.cpp's llama lack it)",
    ]
    found = json.loads(json.dumps(summary.json()))["dropped"]
    assert [item["name"] for item in found] == [*rotary, "mtp.norm.weight"]
    assert found[0]["reason"] == "llama.cpp computes it itself"
    done = subprocess.run(
        [sys.executable, "-m", "qtool", "plan", str(folder), "--recipe", "q4_0"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert all(line in done.stdout.splitlines() for line in said)
