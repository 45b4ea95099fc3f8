"""Conversions as other people's readers see them: both sides are the same numbers.

GPTQModel and compressed-tensors read safetensors, gguf-py and llama.cpp read GGUF. The last ones
get a real model, of QTOOL_TEST_MODELS or built from the package index.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from oracle import llama_quantize
from oracle.test_llama_perplexity import ours, theirs
from safetensors.numpy import load_file

from qtool.artifacts.artifact import Artifact
from qtool.texts.source import default_text

pytestmark = pytest.mark.oracle

RTN = ("w4g128-rtn", "format=gptq")
# What is quantized, and the formats that it becomes one after the other.
WAYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "symmetric": ((*RTN, "weights.symmetric=true"), ("awq", "compressed-tensors", "gguf", "gptq")),
    "asymmetric": (("w4g128-rtn",), ("gptq-v2", "compressed-tensors", "awq")),
    "eight": ((*RTN, "weights.symmetric=true", "weights.bits=8"), ("gguf", "gptq-v2")),
    "three": ((*RTN, "weights.symmetric=true", "weights.bits=3"), ("compressed-tensors",)),
}


def convert(source: Path, to: str, out: Path, *more: str) -> Path:
    command = [sys.executable, "-m", "qtool", "convert", source, "--to", to, "-o", out, *more]
    said = subprocess.run([*map(str, command), "--json"], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["exact"] is True
    return out


@pytest.fixture(scope="module")
def made(
    quantize: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[tuple[str, Path]]]:
    """way -> (format, artifact) of each station."""
    root = tmp_path_factory.mktemp("converted")
    found = {}
    for way, (arguments, stations) in WAYS.items():
        first = quantize("tiny", *arguments)
        reached = [("awq" if way == "asymmetric" else "gptq", first)]
        for number, to in enumerate(stations):
            out = root / f"{way}-{number}{'.gguf' if to == 'gguf' else ''}"
            reached.append((to, convert(reached[-1][1], to, out)))
        found[way] = reached
    return found


def test_gptqmodel_dequantizes_all_stations_to_the_same_float16(
    made: dict[str, list[tuple[str, Path]]], gptqmodel: Callable[..., object], tmp_path: Path
) -> None:
    request, seen = [], []
    for way, stations in made.items():
        for number, (kind, path) in enumerate(stations):
            if kind.startswith(("gptq", "awq")):
                out = tmp_path / f"{way}-{number}.safetensors"
                request.append([str(path), f"{kind.partition('-')[0]}_torch", str(out)])
                seen.append((way, out))
    gptqmodel("gptqmodel_weights.py", request)
    first: dict[str, dict[str, np.ndarray]] = {}
    for way, out in seen:
        found = load_file(out)
        expected = first.setdefault(way, found)
        assert found.keys() == expected.keys() and found
        for name, value in expected.items():
            np.testing.assert_array_equal(found[name], value, err_msg=f"{out.name} {name}")
    assert len(seen) > 2 * len(first)


def test_compressed_tensors_dequantizes_to_our_numbers(
    made: dict[str, list[tuple[str, Path]]],
    compressed_tensors: Callable[..., object],
    tmp_path: Path,
) -> None:
    for way, stations in made.items():
        for kind, path in stations:
            if kind != "compressed-tensors":
                continue
            out = tmp_path / f"{way}.safetensors"
            count = compressed_tensors("ct_artifact.py", [str(path), str(out)])
            theirs = load_file(out)
            ours = Artifact.open(stations[0][1])
            names = [name for name, entry in ours.entries.items() if entry.scheme is not None]
            assert count == len(names) == 28
            for name in names:
                value = ours.read(name)
                assert not isinstance(value, np.ndarray)
                np.testing.assert_array_equal(theirs[name], value.dequantize(), err_msg=name)


def their_order(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as llama.cpp has them."""
    halves = values.reshape(heads, 2, len(values) // heads // 2, values.shape[1])
    return halves.swapaxes(1, 2).reshape(values.shape)


GGUF_NAMES = {
    "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


@pytest.fixture(scope="module")
def real(
    models: Path, quantize: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A real model as symmetric GPTQ in groups of 128, and as GGUF."""
    source = quantize(models / "smollm2-768", *RTN, "weights.symmetric=true")
    return source, convert(source, "gguf", tmp_path_factory.mktemp("real") / "model.gguf")


def test_gguf_py_reads_a_real_model(real: tuple[Path, Path]) -> None:
    source, file = real
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    artifact = Artifact.open(source)
    config = artifact.checkpoint.config
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    compared = 0
    for name, entry in artifact.entries.items():
        if entry.scheme is None:
            continue
        value = artifact.read(name)
        assert not isinstance(value, np.ndarray)
        block, part = name.split(".")[2], name.split(".")[-2]
        tensor = theirs[f"blk.{block}.{GGUF_NAMES[part]}.weight"]
        assert tensor.tensor_type == gguf.GGMLQuantizationType.Q4_0
        expected = value.dequantize()
        if part in heads:
            expected = their_order(expected, heads[part])
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(found, expected, err_msg=name)
        compared += 1
    assert compared == 7 * config["num_hidden_layers"]


@pytest.mark.skipif(
    llama_quantize.tools() is None, reason="QTOOL_ORACLE_LLAMA names no folder of llama.cpp"
)
def test_llama_cpp_runs_a_real_model(real: tuple[Path, Path], tmp_path: Path) -> None:
    """As good as the artifact by our own measure; llama.cpp rounds activations to 8 bits."""
    source, file = real
    text = tmp_path / "text.txt"
    text.write_text(default_text()[:30_000], encoding="utf-8")
    by_llama = theirs(file, text, 2, 256)
    assert by_llama == pytest.approx(ours(source, text, 2, 256), rel=0.01)
    assert by_llama == pytest.approx(ours(file, text, 2, 256), rel=0.01)
    folder = llama_quantize.tools()
    assert folder is not None
    command = [folder / "llama-completion", "-m", file, "-p", "The capital of France is", "-n", "8"]
    said = subprocess.run(
        [*map(str, command), "--temp", "0", "-no-cnv", "-t", "1"],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert said.returncode == 0, said.stderr[-2000:]
    assert "Paris" in said.stdout
