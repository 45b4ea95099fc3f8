"""What `qtool fit` chose is loaded by llama.cpp and vLLM, which predict what we predict.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's tools, QTOOL_ORACLE_VLLM a Python with vLLM.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from oracle import llama_quantize
from oracle.conftest import run
from oracle.test_llama_perplexity import ours, theirs
from oracle.test_vllm import MEAN_DIFFERENCE, evaluated_logprobs, windows

from qtool.artifact import Artifact
from qtool.calibrating.calibration import default_text
from qtool.formats.gguf_file import GgufFile
from qtool.scheme import Scheme

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


def test_vllm(
    models: Path, tmp_path: Path, vllm: Callable[..., object], quantize: Callable[..., Path]
) -> None:
    source = models / "smollm2-768"
    path = quantize(
        source, str(fitted(source, tmp_path, "--bits", "9", "--recipe", "w4a16-ct")), more=FEW
    )
    entries = Artifact.open(path).entries.values()
    assert {one.scheme.bits for one in entries if isinstance(one.scheme, Scheme)} == {4, 8}
    text = windows(source)
    request = {"model": str(path), "windows": text, "prompt": text[0][:8], "steps": 1}
    seen = vllm("vllm_logprobs.py", request)
    assert isinstance(seen, dict)
    logprobs = np.concatenate([np.array(window) for window in seen["logprobs"]])
    far = float(np.mean(np.abs(evaluated_logprobs(path, text) - logprobs)))
    print(f"fitted: mean |difference| {far:.4f} nat")
    assert far <= MEAN_DIFFERENCE
