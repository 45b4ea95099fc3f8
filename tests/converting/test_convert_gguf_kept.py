"""`qtool convert` to GGUF of codes that are no integers with zeros: MLX's and MXFP4."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.converting.blocks import MXFP4, BlockMatrix, pack
from qtool.errors import UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.scheme import GroupQuant, Scheme
from support.converting.converting import (
    assert_read_alike,
    converted,
    first_block,
    run,
    types,
)
from support.runs import quantizing


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("bits", "size"), [(4, 32), (4, 64), (4, 128), (3, 64), (2, 32)])
def test_codes_of_mlx_with_their_biases_become_q4_1(
    bits: int, size: int, dtype: str, tmp_path: Path
) -> None:
    model = first_block(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"dtype": dtype, "torch_dtype": dtype}))
    tensors = load_file(model / "model.safetensors")
    as_dtype = {name: one.to(getattr(torch, dtype)) for name, one in tensors.items()}
    save_file(as_dtype, model / "model.safetensors", metadata={"format": "pt"})
    sets = (f"weights.bits={bits}", f"weights.group_size={size}", "mlx.head=4", "mlx.embedding=4")
    source = quantizing.quantize(model, "w4g64-mlx-rtn", tmp_path / "mlx", *sets).out
    file = run(source, "gguf", tmp_path / "file.gguf")
    found = types(file)
    assert found["blk.0.ffn_up.weight"] == found["token_embd.weight"] == "Q4_1"
    assert_read_alike(file, source)
    with GgufFile.open(file) as opened:
        assert opened.metadata["general.file_type"].value == 3


def test_mxfp4_becomes_ggufs(tmp_path: Path) -> None:
    model = first_block(tmp_path / "model")
    source = quantizing.quantize(model, "mxfp4", tmp_path / "mxfp4").out
    file = run(source, "gguf", tmp_path / "file.gguf")
    assert types(file)["blk.0.attn_q.weight"] == "MXFP4"
    assert_read_alike(file, source)
    with GgufFile.open(file) as opened:
        assert opened.metadata["general.file_type"].value == 38


def test_scales_of_mxfp4_are_exponents_to_the_last() -> None:
    exponents = np.array([[0, 1, 2, 126, 127, 254]], np.int32)
    scale = np.ldexp(np.float32(1), exponents - 127).astype(np.float32)
    codes = np.random.default_rng(0).integers(0, 16, (1, 192)).astype(np.uint8)
    scheme = Scheme(4, 32, True, "e8m0", "e2m1")
    quant = GroupQuant(scheme, codes, scale, np.zeros((1, 6), np.uint8))
    raw = pack(quant, MXFP4)
    assert raw.reshape(6, 17)[:, 0].tolist() == exponents[0].tolist()
    found = BlockMatrix(raw, MXFP4).dequantize()
    np.testing.assert_array_equal(found, quant.dequantize())


def test_what_q4_1_cannot_hold_is_said_and_encoded_anew(tmp_path: Path) -> None:
    model = first_block(tmp_path / "model")
    wide = quantizing.quantize(model, "w4g64-mlx-rtn", tmp_path / "mlx", "mlx.embedding=6").out
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight has 6-bit codes with biases"):
        run(wide, "gguf", tmp_path / "file.gguf")
    found = types(run(wide, "gguf", tmp_path / "file.gguf", lossy=True))
    assert found["token_embd.weight"] == "Q8_0" and found["blk.0.attn_q.weight"] == "Q4_1"
    outliers = quantizing.quantize(model, "int8-llmint8", tmp_path / "int8").out
    with pytest.raises(UnsupportedError, match="scales of two factors, which no type has"):
        run(outliers, "gguf", tmp_path / "int8.gguf")
    with pytest.raises(UnsupportedError, match="scales of two factors, not of one"):
        run(outliers, "gptq", tmp_path / "int8-gptq")
    found = types(run(outliers, "gguf", tmp_path / "int8.gguf", lossy=True))
    assert found["blk.0.attn_q.weight"] == "Q8_0"
    exact = {"mlx": "biases", "mxfp4": "of which Q8_0 has no codes"}
    sets = ("mlx.head=4", "mlx.embedding=4")
    four = quantizing.quantize(model, "w4g64-mlx-rtn", tmp_path / "mlx4", *sets).out
    six = quantizing.quantize(model, "mxfp4", tmp_path / "mxfp4").out
    for source, said in ((four, exact["mlx"]), (six, exact["mxfp4"])):
        with pytest.raises(UnsupportedError, match=f"{said}.*--to gguf holds"):
            run(source, "gguf-q8_0", tmp_path / "q8.gguf")
        out = tmp_path / f"{source.name}-q8.gguf"
        assert types(run(source, "gguf-q8_0", out, lossy=True))["blk.0.attn_q.weight"] == "Q8_0"
    small = quantizing.quantize(model, "fp8-block", tmp_path / "fp8").out
    for lossy in (False, True):
        with pytest.raises(UnsupportedError, match="of whose numbers no type has codes"):
            run(small, "gguf", tmp_path / "fp8.gguf", lossy=lossy)


def edited_mlx(tmp_path: Path, bits: int, key: str, value: float) -> Path:
    """One matrix has bfloat16 scales and biases, one of which is `value`."""
    model = first_block(tmp_path / "model")
    sets = (f"weights.bits={bits}", "mlx.head=4", "mlx.embedding=4")
    source = quantizing.quantize(model, "w4g64-mlx-rtn", tmp_path / "mlx", *sets).out
    tensors = load_file(source / "model.safetensors")
    for each in ("scales", "biases"):
        name = f"model.layers.0.mlp.up_proj.{each}"
        tensors[name] = tensors[name].to(torch.bfloat16)
    tensors[f"model.layers.0.mlp.up_proj.{key}"][3, 1] = value
    save_file(tensors, source / "model.safetensors", metadata={"format": "mlx"})
    (source / "qtool.json").unlink()
    return source


def test_biases_that_float16_rounds(tmp_path: Path) -> None:
    source = edited_mlx(tmp_path, 4, "biases", 3.1e-7)
    with pytest.raises(UnsupportedError, match=r"bfloat16 biases \(mlx\), which float16 rounds"):
        run(source, "gguf", tmp_path / "file.gguf")
    made = converted(source, "gguf", tmp_path / "file.gguf", lossy=True)
    (rounded,) = made.certificate.rounded
    assert rounded.name.endswith("up_proj.weight") and 0 < rounded.relative_error < 1e-6


@pytest.mark.parametrize(
    ("bits", "key", "value", "said"),
    [
        (4, "biases", 1e5, "has minimums beyond float16"),
        (4, "scales", 1e5, "scales up to 9.98e"),
        (6, "scales", 1e5, "scales up to 9.98e"),
        (4, "biases", float("nan"), "biases that are NaN or infinite: it is damaged; fetch"),
        (6, "biases", float("inf"), "biases that are NaN or infinite"),
        (6, "biases", 1e8, "has weights up to 1e\\+08, for which scales of Q8_0, float16, do not"),
    ],
)
def test_nothing_becomes_infinite(
    bits: int, key: str, value: float, said: str, tmp_path: Path
) -> None:
    """Not with --lossy either, whatever else is rounded."""
    source = edited_mlx(tmp_path, bits, key, value)
    with pytest.raises(UnsupportedError, match=said):
        run(source, "gguf", tmp_path / "file.gguf", lossy=True)
    assert not (tmp_path / "file.gguf").exists()
