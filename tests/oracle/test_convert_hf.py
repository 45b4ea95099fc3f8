"""Checkpoints as GGUF: tensors and metadata equal to convert_hf_to_gguf.py's, in f16 and bf16.

QTOOL_ORACLE_LLAMA_SOURCE names the folder of llama.cpp's sources; its converter runs in the Python
of the tests, which needs torch and transformers.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from qtool.formats.gguf_file import GgufFile
from qtool.gguf.from_gguf import gguf_source
from qtool.gguf.source import as_floats
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.gguf_types import I32
from support.gguf import gguf_from_hf, gguf_models
from support.gguf.families import later, llamas, sparse, states

pytestmark = pytest.mark.oracle

# StableLM: its generator returns where it should yield, and norms of heads are lost. OLMo 2: it
# writes no head, and llama.cpp does not load such a file. GPT-2: it takes four widths for n_inner.
# StarCoder: so it does there, and one head of keys. Bamba: it rearranges whole heads, of which a
# half is rotated, so that other elements turn together.
# DeepSeek V4: it takes experts in four bits alone; see below.
# Baichuan: it calls itself without end for all but one matrix.
# GLM: it takes 1e-5 for rms_norm_eps, 10000 for rope_theta, and the width for the length of texts.
_FAILS_THERE = (
    "stablelm-12b", "olmo2-tied", "gpt2-inner", "glm-own", "starcoder-heads", "bamba",
    *sparse.FAILS_THERE, *later.FAILS_THERE,
    *llamas.FAILS_THERE,
)  # fmt: skip
_NAMES = [name for name in gguf_models.MODELS if name not in _FAILS_THERE]
# Where dtypes make a difference: norms plus one, routers, biases.
_DTYPES = ("gemma2", "mixtral", "qwen2-moe", "qwen3.5", "llama-biases-tied")
_SOURCES = [(name, "float32") for name in _NAMES] + [
    (name, dtype) for name in _DTYPES for dtype in ("float16", "bfloat16")
]
_BOS = "tokenizer.ggml.add_bos_token"
_REAL = ("smollm2", "smollm2-768")

Converted = Callable[[str, str, str], tuple[Path, GgufFile]]


@pytest.fixture(scope="module")
def source() -> str:
    named = os.environ.get("QTOOL_ORACLE_LLAMA_SOURCE")
    if not named:
        pytest.skip("QTOOL_ORACLE_LLAMA_SOURCE is not set: it names llama.cpp's source folder")
    return named


def convert(source: str, jobs: list[list[str]], *, vocabulary: bool) -> None:
    request = {"source": source, "jobs": jobs, "vocabulary": vocabulary}
    script = Path(__file__).parent / "readers" / "convert_hf.py"
    command = [sys.executable, str(script), json.dumps(request)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-4000:]


@pytest.fixture(scope="module")
def random_models(source: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """NAME-DTYPE folders, and NAME-DTYPE.KIND.gguf of the converter."""
    root = tmp_path_factory.mktemp("random")
    jobs = []
    # Gemma 3's rows are cut to the tokenizer's size.
    tokens = {str(i): i for i in range(gguf_models.VOCABULARY)}
    for name, dtype in _SOURCES:
        folder = gguf_models.build(name, root / f"{name}-{dtype}", dtype=dtype)
        tokenizer = {"model": {"vocab": tokens}, "added_tokens": []}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        jobs += [[str(folder), kind, f"{folder}.{kind}.gguf"] for kind in ("f16", "bf16")]
    convert(source, jobs, vocabulary=False)
    return root


def numbers_of(file: GgufFile, name: str) -> NDArray[Any]:
    """In float32, or as integers."""
    tensor = next(t for t in gguf_source(file).tensors if t.name == name)
    raw = tensor.read(0, tensor.rows)
    return raw if tensor.type == I32 else as_floats(tensor, np.ascontiguousarray(raw))


def compare(ours: GgufFile, theirs: GgufFile, beyond: set[str]) -> None:
    """The same tensors in types and bytes, and the same keys beside our own."""
    assert set(ours.tensors) == set(theirs.tensors)
    architecture = str(ours.metadata["general.architecture"].value)
    for name, info in theirs.tensors.items():
        # The converter states leading axes of one; llama-quantize, as we do, does not.
        assert ours.tensors[name].shape == stored_shape(info.shape), name
        if architecture == "dbrx" and name.endswith(".ffn_gate_inp.weight"):
            continue  # in float32, as all routers are; this one alone is rounded there
        assert ours.tensors[name].type == info.type, name
        mine, other = gguf_from_hf.raw(ours, name), gguf_from_hf.raw(theirs, name)
        if name.endswith(".ssm_a") and architecture in states.OF_RATES:
            # Thousands of powers, which are rounded once here, and by torch a bit more often.
            assert np.abs(mine.view(np.int32) - other.view(np.int32)).max() <= 1, name
        else:
            assert np.array_equal(mine, other), name
    kept = {k: v for k, v in ours.metadata.items() if not k.startswith("qtool.")}
    # Phi 2 says add_bos_token among its sizes.
    known = {k: v for k, v in theirs.metadata.items() if k in kept or k != _BOS}
    assert set(kept) - set(known) == beyond
    for key, value in known.items():
        assert gguf_from_hf.stated(kept[key]) == gguf_from_hf.stated(value), key


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("name", "dtype"), _SOURCES)
def test_random_models(
    name: str,
    dtype: str,
    kind: str,
    random_models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qtool.gguf.from_hf.source.tokenizer_metadata", lambda *_: {})
    ours = gguf_from_hf.write(random_models / f"{name}-{dtype}", tmp_path / "ours.gguf", kind)
    theirs = GgufFile.open(random_models / f"{name}-{dtype}.{kind}.gguf")
    # The converter forgets the file type of GPT-NeoX.
    beyond = {"general.file_type"} - set(theirs.metadata)
    compare(ours, theirs, beyond | gguf_models.SAID_BEYOND.get(name, set()))


def test_a_head_that_is_said_to_be_tied_and_differs(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both write it; what transformers computes with it does not depend on config.json either."""
    folder = gguf_models.build("qwen2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = 3 * tensors["model.embed_tokens.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs = tmp_path / "theirs.gguf"
    convert(source, [[str(folder), "f16", str(theirs)]], vocabulary=False)
    monkeypatch.setattr("qtool.gguf.from_hf.source.tokenizer_metadata", lambda *_: {})
    ours = gguf_from_hf.write(folder, tmp_path / "ours.gguf", "f16")
    assert "output.weight" in ours.tensors
    compare(ours, GgufFile.open(theirs), set())


def test_keys_and_values_that_nothing_reads(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Released E2B has them in blocks that share; the converter writes them, and that is all."""
    folder = gguf_models.build("gemma4-e2b", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for name in ("k_proj", "v_proj", "k_norm"):
        one = tensors[f"model.layers.1.self_attn.{name}.weight"]
        tensors[f"model.layers.4.self_attn.{name}.weight"] = one
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    vocabulary = {str(i): i for i in range(gguf_models.VOCABULARY)}
    tokenizer = {"model": {"vocab": vocabulary}, "added_tokens": []}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    convert(source, [[str(folder), "f16", str(tmp_path / "theirs.gguf")]], vocabulary=False)
    monkeypatch.setattr("qtool.gguf.from_hf.source.tokenizer_metadata", lambda *_: {})
    ours = gguf_from_hf.write(folder, tmp_path / "ours.gguf", "f16")
    theirs = GgufFile.open(tmp_path / "theirs.gguf")
    beyond = {f"blk.4.attn_{name}.weight" for name in ("k", "v", "k_norm")}
    assert set(theirs.tensors) - set(ours.tensors) == beyond
    assert set(ours.tensors) <= set(theirs.tensors)


def test_deepseek_v4_as_released(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts in four bits, which the converter keeps so, and all else in its own dtype: the same
    tensors by their numbers, and the same keys."""
    folder = gguf_models.build("deepseek-v4", tmp_path / "model", dtype="bfloat16")
    later.in_four_bits(folder, tmp_path / "plain" / "model")
    convert(source, [[str(folder), "bf16", str(tmp_path / "theirs.gguf")]], vocabulary=False)
    theirs = GgufFile.open(tmp_path / "theirs.gguf")
    monkeypatch.setattr("qtool.gguf.from_hf.source.tokenizer_metadata", lambda *_: {})
    ours = gguf_from_hf.write(tmp_path / "plain" / "model", tmp_path / "ours.gguf", "bf16")
    assert set(ours.tensors) == set(theirs.tensors)
    for name, info in theirs.tensors.items():
        assert ours.tensors[name].shape == stored_shape(info.shape), name
        mine, other = (numbers_of(file, name) for file in (ours, theirs))
        assert np.array_equal(mine, other), name
    kept = {k: v for k, v in ours.metadata.items() if not k.startswith("qtool.")}
    there = {k: v for k, v in theirs.metadata.items() if k != "tokenizer.chat_template"}
    assert set(kept) == set(there)
    for key in set(kept) - {"general.file_type", "general.size_label"}:
        assert gguf_from_hf.stated(kept[key]) == gguf_from_hf.stated(there[key]), key


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("name", _REAL)
def test_smollm2(name: str, kind: str, source: str, models: Path, tmp_path: Path) -> None:
    """All keys, the tokenizer's too."""
    theirs = tmp_path / "theirs.gguf"
    convert(source, [[str(models / name), kind, str(theirs)]], vocabulary=True)
    ours = gguf_from_hf.write(models / name, tmp_path / "ours.gguf", kind)
    compare(ours, GgufFile.open(theirs), set())
