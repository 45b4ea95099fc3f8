"""GGUF files whose matrices of NVFP4 have a second scale, read by every command."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from converting import converted, first_block, run
from numpy.typing import NDArray
from nvfp4_models import model, rounded, their_numbers
from safetensors.torch import load_file

from qtool.convert import nvfp4
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.open import open_source
from qtool.gguf.quantize import run_gguf
from qtool.gguf.request import GgufRequest
from qtool.gguf.second_scales import with_scales
from qtool.gguf.source import as_floats
from qtool.recipe.recipe import load
from qtool.runs.progress import Progress
from qtool.verification.finding import Verdict
from qtool.verification.run import verify_artifact


def verify(file: Path, against: Path | None = None) -> Verdict:
    return verify_artifact(file, against=against, threads=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first block of `tiny`, and it as NVFP4 in GGUF."""
    root = tmp_path_factory.mktemp("made")
    source = first_block(root / "model")
    return source, run(rounded(source, root / "nvfp4"), "gguf", root / "file.gguf")


def quantized(
    source: Path, out: Path, *sets: str, recipe: str = "q4_k_m", again: bool = True
) -> Path:
    run_gguf(
        GgufRequest("org/model", source, load(recipe, sets), out, 1, requantize=again),
        Progress(quiet=True),
    )
    return out


def types(file: Path) -> dict[str, str]:
    with GgufFile.open(file) as opened:
        return {name: info.type.name for name, info in opened.tensors.items()}


def values(file: Path, name: str) -> NDArray[np.float32]:
    """A matrix as qtool reads it, second scale and all."""
    with closing(open_source(file)) as source:
        tensor = next(t for t in with_scales(source).tensors if t.name == name)
        return as_floats(tensor, np.ascontiguousarray(tensor.read(0, tensor.rows)))


def edited(file: Path, out: Path, name: str, value: float) -> Path:
    """A tensor's first number is another one."""
    out.write_bytes(file.read_bytes())
    reader = gguf.GGUFReader(out, "r+")
    next(t for t in reader.tensors if t.name == name).data[0] = value
    reader.data.flush()
    return out


def test_encoding_anew_multiplies_by_it(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = made
    with pytest.raises(UnsupportedError, match=r"quantized already, as NVFP4.*--requantize"):
        quantized(file, tmp_path / "no.gguf", again=False)
    out = quantized(file, tmp_path / "q8.gguf", recipe="q8_0")
    found = types(out)
    assert found["blk.0.ffn_up.weight"] == "Q8_0" and "blk.0.ffn_up.scale" not in found
    with GgufFile.open(out) as opened:
        assert not [key for key in opened.metadata if "tensor_extra" in key]
    there = their_numbers(file)["blk.0.ffn_up.weight"]
    here = their_numbers(out)["blk.0.ffn_up.weight"]
    assert np.linalg.norm(here - there) < 0.01 * np.linalg.norm(there)
    assert verify(out, file).ok


def test_matrices_that_are_copied_keep_it(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, file = made
    sets = ("overrides=[{match: ffn_, dense: true}]",)
    out = quantized(file, tmp_path / "some.gguf", *sets, recipe="q6_k")
    found = types(out)
    assert found["blk.0.ffn_up.weight"] == "NVFP4" and found["blk.0.ffn_up.scale"] == "F32"
    assert found["blk.0.attn_q.weight"] == "Q6_K" and "blk.0.attn_q.scale" not in found
    with GgufFile.open(out) as opened:
        told = list(opened.metadata["general.tensor_extra.name"].value)
        assert sorted(told) == [f"blk.0.ffn_{one}.weight" for one in ("down", "gate", "up")]
        assert list(opened.metadata["general.tensor_extra.prec_a4"].value) == [False] * 3
    np.testing.assert_array_equal(
        values(out, "blk.0.ffn_up.weight"), values(file, "blk.0.ffn_up.weight")
    )
    for against in (file, source):
        verdict = verify(out, against)
        errors = [f for f in verdict.findings if f.severity == "error"]
        assert not [f for f in errors if f.check != "layer-error"], errors
    exact = {one.name: one.relative_error for one in verify(out, file).layers}
    assert "blk.0.ffn_up.weight" not in exact and 0 < exact["blk.0.attn_q.weight"] < 0.03


def test_the_file_is_as_near_to_its_source_as_it_is(made: tuple[Path, Path]) -> None:
    source, file = made
    verdict = verify(file, source)
    assert verdict.ok and "scales" in verdict.checks
    (down,) = [one for one in verdict.layers if one.name == "blk.0.ffn_down.weight"]
    assert down.scheme == "NVFP4" and 0.05 < down.relative_error < 0.1
    assert verdict.unquantized_share < 0.5


def test_a_checkpoint_of_it_has_the_numbers(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = made
    folder = tmp_path / "hf"
    conversion = converted(file, "hf", folder, dtype="float32")
    assert conversion.dequantized == {"NVFP4": 7} and conversion.certificate.exact
    dropped = {name for name, _ in conversion.certificate.dropped}
    assert len(dropped) == 7 and "blk.0.attn_q.scale" in dropped
    name = "model.layers.0.mlp.up_proj.weight"
    np.testing.assert_array_equal(
        load_file(folder / "model.safetensors")[name], values(file, "blk.0.ffn_up.weight")
    )
    usual = tmp_path / "usual"
    run(file, "hf", usual)
    assert json.loads((usual / "config.json").read_text())["torch_dtype"] == "float16"
    with pytest.raises(UnsupportedError, match=r"NVFP4 with a second scale.*--to hf"):
        run(file, "compressed-tensors", tmp_path / "ct")


def test_gptq_rounds_what_it_reads(made: tuple[Path, Path], tmp_path: Path) -> None:
    _, file = made
    sets = ("method=gptq", "calibration.samples=2", "calibration.length=64")
    out = quantized(file, tmp_path / "gptq.gguf", *sets, recipe="q4_0")
    there, here = (values(one, "blk.0.ffn_up.weight") for one in (file, out))
    assert 0 < np.linalg.norm(here - there) < 0.2 * np.linalg.norm(there)
    assert "blk.0.ffn_up.scale" not in types(out)


@pytest.mark.parametrize(("number", "said"), [(np.nan, "not finite"), (np.inf, "not finite")])
def test_damaged_ones_are_told(
    made: tuple[Path, Path], number: float, said: str, tmp_path: Path
) -> None:
    file = edited(made[1], tmp_path / "damaged.gguf", "blk.0.ffn_up.scale", number)
    errors = [f.message for f in verify(file).findings if f.severity == "error"]
    assert any(f"blk.0.ffn_up.scale is {said}" in message for message in errors)
    with pytest.raises(FormatError, match=rf"ffn_up.scale is {said}"):
        quantized(file, tmp_path / "out.gguf")


def test_a_larger_one_is_far_from_the_source(made: tuple[Path, Path], tmp_path: Path) -> None:
    source, file = made
    wrong = edited(file, tmp_path / "wrong.gguf", "blk.0.ffn_up.scale", 1.0)
    found = [f for f in verify(wrong, source).findings if f.severity == "error"]
    assert "blk.0.ffn_up.weight is off by" in found[0].message


def test_one_of_another_shape_is_none(made: tuple[Path, Path]) -> None:
    with closing(open_source(made[1])) as source:
        longer = replace(
            next(t for t in source.tensors if t.name == "blk.0.ffn_up.scale"),
            shape=(3,),
            read=lambda *_: np.ones(3, np.float32).view(np.uint8)[None],
        )
        tensors = [longer if t.name == longer.name else t for t in source.tensors]
        with pytest.raises(FormatError, match=r"ffn_up.scale is F32 \[3\], expected F32 \[1\]"):
            with_scales(replace(source, tensors=tuple(tensors)))


def test_llama_cpp_forgets_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file as convert_hf_to_gguf.py makes it of Qwen2, which qtool refuses to."""
    source = rounded(model("Qwen2", tmp_path / "model"), tmp_path / "nvfp4")
    monkeypatch.setattr(nvfp4, "is_applied", lambda *_: True)
    file = run(source, "gguf", tmp_path / "file.gguf")
    (found,) = [f for f in verify(file).findings if f.check == "scales"]
    assert found.severity == "error" and "6 second scales" in found.message
    assert "llama.cpp does not multiply in qwen2" in found.message
    mended = quantized(file, tmp_path / "mended.gguf", recipe="q8_0")
    assert not [f for f in verify(mended).findings if f.severity == "error"]
