"""MLX's modes of small floats: what mlx made of a group and of every code, files that say another
mode than they are, and conversions to the byte."""

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool import small_floats
from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.dequantize import dequantize
from qtool.errors import FormatError, RecipeError, UnsupportedError
from qtool.formats import Facts, detect, mlx
from qtool.formats.mlx_floats import MODES
from qtool.recipe.recipe import load
from qtool.scheme import Scheme
from qtool.verification.run import verify_artifact
from support.converting import converting
from support.formats.artifact_files import assert_same
from support.formats.mlx_schemes import WEIGHTS
from support.runs import quantizing

M = "model.layers.0.self_attn.q_proj"
PLAIN = mlx.choose([])
# mx.quantize(w, mode=mode) of mlx 0.32.4, of test_mlx's 32 weights / 1024: words and scales, and
# the CRC-32 of mx.dequantize in float32.
MADE: dict[str, tuple[list[int], list[int], int]] = {
    "mxfp4": ([2644091365, 2611581307, 2722141074, 2604242217], [122], 0x636DC70D),
    "nvfp4": ([2660934118, 2628358523, 3009451411, 2908333881], [14, 8], 0xAFC86A70),
    "mxfp8": ([3865245813, 3707100132, 3780934635, 3807307998, 3664567396, 3848696384, 3732170457,
               3756748252], [116], 0xD2E9B65A),
}  # fmt: skip
# The same of every code under every scale (but 255 where it is e8m0), with 0 for what is no number.
EVERY = {"mxfp4": 0x423405F7, "nvfp4": 0x7B2E7BD1, "mxfp8": 0x479F688A}
UNDER_ANOTHER = 0x23F5196F  # of nvfp4, with a global_scale of 0.37


def found_for(mode: str) -> Any:
    return detect(mlx.config(Facts({M: MODES[mode]}), PLAIN))


@pytest.mark.parametrize("mode", MODES)
def test_a_group_that_mlx_made(mode: str) -> None:
    words, scales, digest = MADE[mode]
    stored: dict[str, NDArray[Any]] = {
        f"{M}.weight": np.array([words], np.uint32), f"{M}.scales": np.array([scales], np.uint8),
    }  # fmt: skip
    quant = mlx.unpack(M, stored.__getitem__, found_for(mode))
    assert quant.scheme == MODES[mode] and zlib.crc32(quant.dequantize().tobytes()) == digest
    assert np.array_equal(dequantize(quant), quant.dequantize())
    back = mlx.pack(M, quant, PLAIN)
    assert {name: array.tolist() for name, array in back.items()} == {
        name: array.tolist() for name, array in stored.items()
    }
    specs = {s.name: (s.dtype, s.shape) for s in mlx.specs(M, quant.scheme, quant.shape, PLAIN)}
    assert specs == {
        f"{M}.weight": ("U32", (1, len(words))), f"{M}.scales": ("U8", (1, len(scales))),
    }  # fmt: skip
    weight = np.array([WEIGHTS], np.float32) / 1024
    ours = small_floats.quantize(weight, quant.scheme)
    errors = [np.square(q.dequantize() - weight).sum() for q in (ours, quant)]
    assert errors[0] <= errors[1]


@pytest.mark.parametrize(
    ("mode", "digest", "whole"),
    [*((mode, digest, None) for mode, digest in EVERY.items()), ("nvfp4", UNDER_ANOTHER, 0.37)],
)
def test_every_code_under_every_scale(mode: str, digest: int, whole: float | None) -> None:
    scheme = MODES[mode]
    columns = max(1 << scheme.bits, scheme.group_size)
    codes = np.tile((np.arange(columns) % (1 << scheme.bits)).astype(np.uint8), (256, 1))
    packed = codes if scheme.bits == 8 else codes[:, ::2] | codes[:, 1::2] << np.uint8(4)
    groups = columns // scheme.group_size
    stored: dict[str, NDArray[Any]] = {
        f"{M}.weight": np.ascontiguousarray(packed).view(np.uint32),
        f"{M}.scales": np.repeat(np.arange(256, dtype=np.uint8)[:, None], groups, 1),
    }
    if whole is not None:
        stored[f"{M}.global_scale"] = np.array(whole, np.float32)
    quant = mlx.unpack(M, stored.__getitem__, found_for(mode))
    with np.errstate(all="ignore"):
        values = quant.dequantize()[: 256 if mode == "nvfp4" else 255]
    assert zlib.crc32(np.where(np.isnan(values), np.float32(0), values).tobytes()) == digest
    if whole is not None:
        with pytest.raises(FormatError, match="nvfp4 without a scale of the whole matrix"):
            mlx.pack(M, quant, PLAIN)


U8, U32 = np.uint8, np.uint32


@pytest.mark.parametrize(
    ("mode", "change", "sentence"),
    [
        ("mxfp4", {"scales": np.ones((2, 2), np.float16)}, "mxfp4, and the tensors are of mode "
         "affine"),
        ("nvfp4", {}, "says mode nvfp4, and the tensors are of mode mxfp4"),
        ("mxfp8", {}, "says mode mxfp8, and the tensors are of mode mxfp4"),
        ("affine", {}, r"says mode affine, and the tensors are of mode mxfp4 \(scales are uint8 "
         r"\[2, 2\]\); correct its table `quantization`"),
        ("mxfp4", {"weight": np.zeros((2, 8), np.int32)}, "expected uint32 words"),
        ("mxfp4", {"scales": np.zeros((2, 3), U8)}, "of mode unknown"),
        ("mxfp4", {"scales": np.zeros((2, 0), U8)}, "of mode unknown"),
        ("mxfp4", {"scales": np.zeros((3, 2), U8)}, r"the shape is \[3, 2\]; expected \[2, 2\]"),
        ("mxfp4", {"weight": np.zeros((0, 8), U32), "scales": np.zeros((0, 2), U8)}, "is empty"),
        ("mxfp4", {"biases": np.zeros((2, 2), np.float16)}, "has biases, which mode mxfp4 has not"),
        ("mxfp4", {"global_scale": np.float32([1])}, "expected one float32 number, of mode nvfp4"),
    ],
)  # fmt: skip
def test_files_that_lie(mode: str, change: dict[str, Any], sentence: str) -> None:
    stored = {"weight": np.zeros((2, 8), U32), "scales": np.full((2, 2), 127, U8)} | change
    tensors = {f"{M}.{last}": array for last, array in stored.items()}
    one = MODES.get(mode) or Scheme(4, 32, False, "bfloat16", outer="offset")
    found = detect(mlx.config(Facts({M: one}), PLAIN))
    with pytest.raises(FormatError, match=sentence):
        mlx.unpack(M, tensors.__getitem__, found)


def test_tables() -> None:
    """A module's own table says its mode, or is affine."""
    affine = Scheme(6, 64, False, "bfloat16", outer="offset")
    table = mlx.config(Facts({"a": MODES["mxfp4"], "b": MODES["mxfp4"], "c": affine}), PLAIN)
    assert table == {
        "group_size": 32, "bits": 4, "mode": "mxfp4",
        "c": {"group_size": 64, "bits": 6, "mode": "affine"},
    }  # fmt: skip
    assert detect(table).label == "mlx mxfp4"
    words, scales = np.zeros((1, 8), U32), np.zeros((1, 1), np.float16)
    look = {"c.weight": words, "c.scales": scales, "c.biases": scales}.get
    for own in ({"bits": 4}, {}):
        assert str(mlx.scheme_in("c", look, detect(table | {"c": own}))[0]) == "w4 g64 asym"
    with pytest.raises(FormatError, match="says mode mxfp4"):
        mlx.scheme_in("c", look, detect({**table, "c": None}))
    for own, sentence in (
        ({"mode": "nf4"}, "its mode is nf4; expected affine, mxfp4, nvfp4, mxfp8"),
        ({"mode": "mxfp4", "bits": 8}, "mxfp4 has 4 bits and groups of 32, and the config says 8"),
    ):
        with pytest.raises(FormatError, match=sentence):
            mlx.scheme_in("c", look, detect(table | {"c": own}))
    assert detect({"bits": 8, "group_size": 32, "mode": "mxfp4"}).scheme is None
    assert detect({"bits": 4, "group_size": 32, "mode": "nf4"}).scheme is None


def test_a_recipe(tmp_path: Path) -> None:
    """Any recipe of these types; the embedding has integers as the recipe says."""
    model = quantizing.build("llama", tmp_path / "model")
    run = quantizing.quantize(model, "nvfp4", tmp_path / "out", "format=mlx", "mlx.head=6")
    config = json.loads((run.out / "config.json").read_text())["quantization"]
    assert config == {
        "group_size": 16, "bits": 4, "mode": "nvfp4",
        "lm_head": {"group_size": 64, "bits": 6, "mode": "affine"},
    }  # fmt: skip
    assert verify_artifact(run.out, against=model, engine="mlx-lm").findings == ()
    artifact = Artifact.open(run.out)
    for name, quant in run.quants.items():
        read = artifact.read(name)
        assert_same(read, replace(quant, scheme=read.scheme))  # type: ignore[union-attr,arg-type]
    dense = converting.run(run.out, "hf", tmp_path / "dense", dtype="float32")
    name = f"{M}.weight"
    assert np.array_equal(Checkpoint.open(dense).float32(name), artifact.read(name).dequantize())  # type: ignore[union-attr]
    item = "weights={type: fp8, bits: 8, group_size: -1, symmetric: true}"
    with pytest.raises(RecipeError, match="mlx stores no fp8"):
        load("nvfp4", ["format=mlx", item])


def test_there_and_back(tmp_path: Path) -> None:
    """MXFP4 and MXFP8 of compressed-tensors to the byte; NVFP4 there has a scale more, which MLX's
    gets: of 1."""
    model = quantizing.build("llama", tmp_path / "model")
    for kind in ("mxfp4", "mxfp8"):
        sets = (f"weights.type={kind}", f"weights.bits={kind[-1]}")
        ours = quantizing.quantize(model, "mxfp4", tmp_path / kind, *sets).out
        made = converting.run(ours, "mlx", tmp_path / f"{kind}-mlx")
        assert detect(json.loads((made / "config.json").read_text())["quantization"]).layout == kind
        back = converting.run(made, "compressed-tensors", tmp_path / f"{kind}-back")
        before, after = Checkpoint.open(ours), Checkpoint.open(back)
        assert before.tensors.keys() == after.tensors.keys()
        assert all(np.array_equal(before.raw(n), after.raw(n)) for n in before.tensors)
    mine = quantizing.quantize(model, "nvfp4", tmp_path / "mine", "format=mlx").out
    made = converting.run(mine, "compressed-tensors", tmp_path / "made")
    assert verify_artifact(made, engine="vllm").ok
    one, other = Artifact.open(mine), Artifact.open(made)
    for name in (name for name in Checkpoint.open(model).tensors if name.endswith("_proj.weight")):
        left, right = one.read(name), other.read(name)
        assert right.outer == 1 and right.scheme.outer == "divides"  # type: ignore[union-attr]
        assert np.array_equal(left.dequantize(), right.dequantize())  # type: ignore[union-attr]
    ours = quantizing.quantize(model, "nvfp4", tmp_path / "nvfp4").out
    for target in ("mlx", "gptq"):
        with pytest.raises(UnsupportedError, match="stored as nvfp4 g16"):
            converting.run(ours, target, tmp_path / "no")
