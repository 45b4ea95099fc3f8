"""What `qtool fit` chose is what llama.cpp and vLLM take it for.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's tools, QTOOL_ORACLE_VLLM a Python with vLLM.
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from oracle import llama_quantize
from oracle.conftest import run
from oracle.test_llama_perplexity import ours, theirs

from qtool.artifacts.artifact import Artifact
from qtool.formats.gguf_file import GgufFile
from qtool.scheme import Scheme
from qtool.texts.source import default_text

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

FEW = ("--samples", "8", "--length", "256")
# Each token's inputs are rounded to 8 bits at another place in a sum: as test_llama_perplexity.
NEAR = 5e-3


def fitted(model: Path, folder: Path, *asked: str) -> Path:
    out = folder / "fitted.yaml"
    run([sys.executable, "-m", "qtool", "fit", str(model), *asked, *FEW, "-o", str(out)])
    return out


@pytest.mark.skipif(
    llama_quantize.tools() is None, reason="QTOOL_ORACLE_LLAMA names no folder of llama.cpp"
)
def test_llama_cpp(models: Path, tmp_path: Path) -> None:
    model, out = models / "smollm2-768", tmp_path / "out.gguf"
    recipe = fitted(model, tmp_path, "--bits", "3.8")
    command = [sys.executable, "-m", "qtool", "quantize", str(model), "--recipe", str(recipe)]
    run([*command, *FEW, "-o", str(out)])
    with GgufFile.open(out) as file:
        assert len({one.type.name for one in file.tensors.values()}) > 4
    text = tmp_path / "text.txt"
    text.write_text(default_text()[:30_000], encoding="utf-8")
    found, wanted = ours(out, text, 4, 512), theirs(out, text, 4, 512)
    print(f"PPL fitted: {found:.4f} here, {wanted:.4f} there")
    assert abs(found / wanted - 1) < NEAR


@pytest.mark.parametrize("recipe", ["w4a16-ct", "w4g64-gptq"])
def test_vllm(
    recipe: str,
    models: Path,
    tmp_path: Path,
    vllm: Callable[..., object],
    quantize: Callable[..., Path],
) -> None:
    """Its classes take each layer to have the bits that were chosen. (Its kernels for a CPU have 4
    bits only, so that no product can be compared.)"""
    source = models / "smollm2-768"
    path = quantize(
        source, str(fitted(source, tmp_path, "--bits", "9", "--recipe", recipe)), more=FEW
    )
    expected: dict[str, int] = {}
    for entry in Artifact.open(path).entries.values():
        if isinstance(entry.scheme, Scheme):
            fused = re.sub(r"\.[qkv]_proj$", ".qkv_proj", entry.module)
            fused = re.sub(r"\.(gate|up)_proj$", ".gate_up_proj", fused)
            assert expected.setdefault(fused, entry.scheme.bits) == entry.scheme.bits
    assert set(expected.values()) == {4, 8} and len(expected) == 4 * 30
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    found = vllm("vllm_layer_bits.py", {"config": config, "layers": [*expected]})
    assert found == [*expected.values()]
