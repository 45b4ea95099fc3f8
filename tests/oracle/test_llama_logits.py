"""llama.cpp loads what is written from checkpoints and computes what transformers does.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's libraries, QTOOL_ORACLE_LLAMA_SOURCE its sources;
a C compiler is needed too.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from support.gguf import gguf_from_hf, gguf_models
from support.gguf.families import (
    gemma4,
    hybrid,
    later,
    newest,
    recent,
    remote,
    rotated,
    seeing,
    sparse,
)

pytestmark = pytest.mark.oracle

HERE = Path(__file__).parent
PROMPTS = 5
LENGTH = 24  # beyond the windows of 8 tokens
LIMIT = 1e-3  # mean |difference| by the range of the logits; 6e-4 at most was seen
PACKED_LIMIT = 4e-3  # the same where inputs of MXFP4 are rounded to 8 bits; 1.7e-3 was seen


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that prints llama.cpp's logits."""
    libraries = os.environ.get("QTOOL_ORACLE_LLAMA")
    source = os.environ.get("QTOOL_ORACLE_LLAMA_SOURCE")
    if not libraries or not source:
        pytest.skip("QTOOL_ORACLE_LLAMA and QTOOL_ORACLE_LLAMA_SOURCE are not both set")
    out = tmp_path_factory.mktemp("program") / "llama_logits"
    code = str(HERE / "readers" / "llama_logits.c")
    command = ["cc", "-O1", "-o", str(out), code, f"-I{source}/include", f"-I{source}/ggml/include"]
    run([*command, f"-L{libraries}", "-lllama", "-lggml", "-lggml-base", f"-Wl,-rpath,{libraries}"])
    return out


def of_llama(
    program: Path, file: Path, prompts: NDArray[np.int64], vocabulary: int
) -> NDArray[np.float32]:
    out = file.with_suffix(".logits")
    run([str(program), str(file), str(out), *(",".join(map(str, p)) for p in prompts)])
    return np.fromfile(out, np.float32).reshape(*prompts.shape, vocabulary)


def of_transformers(folder: Path, prompts: NDArray[np.int64]) -> NDArray[np.float32]:
    import torch
    from transformers import AutoConfig

    auto = gguf_models.auto_model(AutoConfig.from_pretrained(folder))
    model: Any = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.from_numpy(prompts)).logits.numpy()
    return logits


def divide_by_one_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp bounds Gemma 3n's gates by a deviation with n - 1 in place of n: of 16384 gates the
    same, and of a few hundred not."""
    import torch

    usual = torch.std

    def std(gates: Any, **options: Any) -> Any:
        return usual(gates, **{**options, "unbiased": True})

    monkeypatch.setattr(torch, "std", std)


def difference(mine: NDArray[np.float32], reference: NDArray[np.float32]) -> float:
    return float(np.abs(mine - reference).mean() / np.ptp(reference))


@pytest.mark.parametrize("name", gguf_models.MODELS)
def test_random_models(
    name: str,
    program: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    record_property: Any,
) -> None:
    gguf_from_hf.no_vocabulary(monkeypatch)
    exact = name in (
        *hybrid.NOT_ROUNDED,
        *recent.NOT_ROUNDED,
        *gemma4.NOT_ROUNDED,
        *newest.NOT_ROUNDED,
        *later.NOT_ROUNDED,
    )
    if name.startswith("gemma3n"):
        divide_by_one_less(monkeypatch)
    if name in newest.CHOSEN_WITH_FLASH:
        monkeypatch.setenv("FLASH_ATTENTION", "1")
    if name in rotated.ROTATED:
        rotated.rotate_as_there(name, monkeypatch)
    folder = gguf_models.build(name, tmp_path / name, dtype="float32" if exact else "float16")
    length = later.LONGER.get(name, LENGTH)
    prompts = np.random.default_rng(7).integers(3, gguf_models.VOCABULARY, (PROMPTS, length))
    gguf_from_hf.write(folder, tmp_path / "model.gguf", "f32" if exact else "f16")
    vocabulary = gguf_models.MODELS[name][1].get("vocab_size", gguf_models.VOCABULARY)
    given = seeing.GIVEN.get(name, slice(None))
    mine = of_llama(program, tmp_path / "model.gguf", prompts, vocabulary)[..., given]
    assert np.isfinite(mine).all()
    if name in remote.UNLIKE:
        return
    if name in remote.MODELS:
        folder = gguf_models.build(name, tmp_path / "like", dtype="float16", renamed=False)
    packed = name in sparse.PACKED
    if packed:
        folder = sparse.unpacked(folder)
    theirs = of_transformers(folder, prompts)[..., given]
    found = difference(mine, theirs)
    record_property("difference", found)
    print(f"LOGITS {name} {found:.2e}")
    assert found < (PACKED_LIMIT if packed else LIMIT)
    # Tokens in another order are told apart: the bound is no empty one.
    assert difference(mine[::-1], theirs) > 50 * LIMIT


def test_smollm2(program: Path, models: Path, tmp_path: Path) -> None:
    gguf_from_hf.write(models / "smollm2", tmp_path / "model.gguf", "f16")
    prompts = np.random.default_rng(7).integers(20, 40000, (PROMPTS, LENGTH))
    mine = of_llama(program, tmp_path / "model.gguf", prompts, 49152)
    found = difference(mine, of_transformers(models / "smollm2", prompts))
    print(f"LOGITS smollm2 {found:.2e}")
    assert found < LIMIT
