"""Every architecture, recipe and kind of artifact on the emulated GPU, in the order of streams."""

import re
from pathlib import Path
from typing import Any

import pytest

import qtool
from qtool.cuda.device import Device
from qtool.errors import UnsupportedError
from qtool.recipe.file import shipped
from qtool.recipe.recipe import Recipe, load
from qtool.transforms import awq
from support.cuda.cuda_emulation import emulator
from support.cuda.emulated_cuda import Cuda
from support.cuda.emulated_gpu import cuda, gpu
from support.gguf import gguf_from_hf
from support.models import arch_models, gpt_oss
from support.models.small_models import checkpoint
from support.runs import quantizing

__all__ = ["cuda", "emulator", "gpu"]
pytestmark = pytest.mark.slow

RECIPES = [name for name in shipped() if isinstance(load(name), Recipe)]
RECIPES.remove("w4-gptq-rotated-learned")  # there as w4-gptq-rotated, and slow to learn
GGUF = ["q2_k", "q3_k_m", "q5_k_m", "q6_k", "q8_0", "iq4_xs", "q4_0", "q5_1", "tq2_0", "mxfp4_moe"]

SWEPT = ["q4_k_m-awq-gptq", "q4_0-awq-gptq", "iq4_xs-awq-gptq", "iq3_s-awq-gptq"]


def changes(recipe: str, text: Path) -> list[str]:
    """For a model 64 wide, with few scales to search: a thread of the emulated grid is a loop."""
    loaded = load(recipe)
    assert isinstance(loaded, Recipe)
    found = [f"calibration.source={text}", "calibration.length=32", "calibration.samples=6"]
    found += ["indivisible=dense"] if "g" in recipe or "qserve" in recipe else []
    scheme = None if loaded.weights is None else loaded.scheme
    if scheme is not None and scheme.group_size > 32 and scheme.rows == 1:
        found.append("weights.group_size=32")
    return found + (["awq.grid=1"] if "awq" in recipe else [])


def used(out: Path, text: Path, **options: Any) -> None:
    qtool.evaluate(
        out, text, windows=1, length=64, cache=False, threads=1, device="cuda", **options
    )
    qtool.generate(out, "a b", tokens=2, threads=1, device="cuda")


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_ways_back(name: str, cuda: Cuda, gpu: Device, tmp_path: Path) -> None:
    """Through blocks, for what tokens count and how rows compensate for each other."""
    source, text = checkpoint(tmp_path, name).path, quantizing.text_file(tmp_path / "text.txt")
    more = ["gptq.mse=false", "gptq.guided=0.5", "gptq.yaqa=2"]
    given = [*changes("w4g32-gptq", text), *more]
    made = qtool.quantize(
        source, "w4g32-gptq", tmp_path / "out", changes=given, threads=2, device="cuda"
    )
    assert cuda.ways_back and cuda.devices == {1}
    (said,) = (note for note in made.notes if note.startswith("rows of matrices compensated"))
    fed, blocks = re.findall(r"in (\d+) of (\d+) blocks", said)[0]
    assert fed == blocks


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_architectures(name: str, cuda: Cuda, gpu: Device, tmp_path: Path) -> None:
    source, text = checkpoint(tmp_path, name).path, quantizing.text_file(tmp_path / "text.txt")
    out = tmp_path / "out"
    given = [*changes("w4g32-gptq", text), "gptq.mse=false"]
    qtool.quantize(source, "w4g32-gptq", out, changes=given, threads=2, device="cuda")
    qtool.evaluate(
        out, text, against=source, windows=1, length=16, cache=False, threads=1, device="cuda"
    )
    assert cuda.devices == {1}


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str, cuda: Cuda, gpu: Device, tmp_path: Path) -> None:
    text, out = quantizing.text_file(tmp_path / "text.txt"), tmp_path / "out"
    source: str | Path = "tiny"
    if recipe != "fp8-block":
        source = gpt_oss.source_for(recipe, checkpoint(tmp_path, "llama").path, tmp_path / "model")
    given = changes(recipe, text)
    qtool.quantize(source, recipe, out, changes=given, threads=2, device="cuda")
    used(out, text)


@pytest.mark.parametrize("recipe", GGUF)
def test_gguf(recipe: str, cuda: Cuda, gpu: Device, tmp_path: Path) -> None:
    text, out = quantizing.text_file(tmp_path / "text.txt"), tmp_path / "x.gguf"
    without = ["importance=false"]
    qtool.quantize("tiny", recipe, out, threads=2, device="cuda", changes=without)
    used(out, text, protocol="llama.cpp")
    assert cuda.devices == {1}


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_swept_architectures(
    name: str, cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into GGUF, where llama.cpp knows them: several threads work on an input, or on experts."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    source, text = checkpoint(tmp_path, name).path, quantizing.text_file(tmp_path / "text.txt")
    given = ["method=gptq", f"calibration.source={text}", "calibration.length=32"]
    out, given = tmp_path / "x.gguf", [*given, "calibration.samples=8"]
    try:
        qtool.quantize(source, "q4_0", out, changes=given, threads=3, device="cuda")
    except UnsupportedError as error:
        assert "GGUF" in str(error) or "llama.cpp" in str(error)
        return
    assert "quantize_sweep_levels" in cuda.launched and cuda.devices == {1}


@pytest.mark.parametrize("recipe", SWEPT)
def test_swept(
    recipe: str, cuda: Cuda, gpu: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few scales are searched, on the shipped model: no other has blocks of 256 weights."""
    monkeypatch.setattr(awq, "_WEIGHT_EXPONENTS", (0.0,))
    text, out = quantizing.text_file(tmp_path / "text.txt"), tmp_path / "x.gguf"
    given: dict[str, Any] = {"calibration": str(text), "samples": 4, "length": 64, "threads": 3}
    qtool.quantize("tiny", recipe, out, device="cuda", **given)
    lattice = recipe.startswith(("iq2", "iq3"))
    assert ("quantize_sweep_levels" in cuda.launched) or lattice
    used(out, text, protocol="llama.cpp")
    assert cuda.devices == {1}
