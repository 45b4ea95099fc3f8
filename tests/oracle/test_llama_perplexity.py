"""`qtool eval --protocol llama.cpp` against llama-perplexity: perplexity and KL divergence.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's tools, QTOOL_ORACLE_LLAMA_SOURCE its sources,
whose models/ has the vocabularies of real models.
"""

import ctypes
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import llama_quantize

from qtool.formats.gguf_file import GgufFile
from qtool.gguf.importance.measured import bos_of
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.messages.progress import Progress
from qtool.methods import activations
from qtool.native.library import default_threads
from qtool.quality.evaluate import Protocol, evaluate
from qtool.texts.source import default_text
from support.gguf import gguf_from_hf

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        llama_quantize.tools() is None, reason="QTOOL_ORACLE_LLAMA names no folder of llama.cpp"
    ),
]

LIMIT = 1e-3  # 2e-4 at most was seen
# Of llama.cpp's vocabularies, whether a text begins with BOS.
VOCABULARIES = {"llama-bpe": True, "llama-spm": True, "qwen2": False}


def said_by_theirs(
    file: Path, text: Path, windows: int, length: int, *more: object, pattern: str
) -> float:
    folder = llama_quantize.tools()
    assert folder is not None
    command = [folder / "llama-perplexity", "-m", file, "-f", text, "-c", length, *more]
    result = subprocess.run(
        [*map(str, command), "--chunks", str(windows), "-t", str(default_threads())],
        env={**os.environ, "LD_LIBRARY_PATH": str(folder)},
        capture_output=True,
        text=True,
    )
    said = result.stdout + result.stderr
    found = re.search(pattern, said)
    assert found is not None, said[-2000:]
    return float(found[1])


def theirs(file: Path, text: Path, windows: int, length: int, *more: object) -> float:
    pattern = r"Final estimate: PPL = ([\d.]+)"
    return said_by_theirs(file, text, windows, length, *more, pattern=pattern)


def ours(model: Path, text: Path, windows: int, length: int, name: str = "llama.cpp") -> float:
    protocol = Protocol(name, text, windows, length)
    (found,) = evaluate([model], None, protocol, default_threads(), Progress(quiet=True))
    return float(found.found["perplexity"])


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(default_text()[:30_000], encoding="utf-8")
    return path


def random_llama(vocabulary: str, folder: Path) -> Path:
    """A small Llama with random weights, and the tokenizer of a real model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = os.environ.get("QTOOL_ORACLE_LLAMA_SOURCE")
    if not source:
        pytest.skip("QTOOL_ORACLE_LLAMA_SOURCE is not set")
    with GgufFile.open(Path(source) / "models" / f"ggml-vocab-{vocabulary}.gguf") as file:
        metadata = dict(file.metadata)
    assert (bos_of(metadata) is not None) is VOCABULARIES[vocabulary]
    config = LlamaConfig(
        vocab_size=len(metadata["tokenizer.ggml.tokens"].value), hidden_size=64,
        intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=512, tie_word_embeddings=False,
        # Large enough for what comes before to matter.
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(3)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    # They are of another tokenizer.
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        said.pop(name, None)
    (folder / "config.json").write_text(json.dumps(said))
    (folder / "generation_config.json").unlink(missing_ok=True)
    for name, content in tokenizer_files(metadata).items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize("name", VOCABULARIES)
def test_windows_are_theirs(name: str, text: Path, tmp_path: Path) -> None:
    """Of the checkpoint and of the GGUF file, with BOS and without."""
    folder = random_llama(name, tmp_path / "model")
    gguf_from_hf.write(folder, tmp_path / "model.gguf", "f16")
    wanted = theirs(tmp_path / "model.gguf", text, 6, 128)
    for model in (folder, tmp_path / "model.gguf"):
        found = ours(model, text, 6, 128)
        print(f"PPL {name} {model.name}: {found:.4f} here, {wanted:.4f} there")
        assert abs(found / wanted - 1) < LIMIT
    # The limit tells where windows begin: that of another beginning is out of it.
    moved = tmp_path / "moved.txt"
    moved.write_text(" a" + text.read_text())
    assert abs(ours(folder, moved, 6, 128) / wanted - 1) > 5 * LIMIT


def test_smollm2(models: Path, text: Path, tmp_path: Path) -> None:
    gguf_from_hf.write(models / "smollm2-768", tmp_path / "model.gguf", "f16")
    found = ours(tmp_path / "model.gguf", text, 4, 512)
    wanted = theirs(tmp_path / "model.gguf", text, 4, 512)
    print(f"PPL smollm2-768: {found:.4f} here, {wanted:.4f} there")
    assert abs(found / wanted - 1) < LIMIT


@pytest.fixture(scope="module")
def base(models: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text, and what llama-perplexity keeps of smollm2-768 in F16 on four windows of it."""
    folder = tmp_path_factory.mktemp("base")
    (folder / "text.txt").write_text(default_text()[:30_000], encoding="utf-8")
    gguf_from_hf.write(models / "smollm2-768", folder / "f16.gguf", "f16")
    kept = folder / "base.kld"
    theirs(folder / "f16.gguf", folder / "text.txt", 4, 512, "--kl-divergence-base", kept)
    return folder / "text.txt", kept


@pytest.mark.parametrize(
    ("recipe", "limit"), [("q4_k_m", 0.03), ("q4_0", 0.03), ("q5_1", 0.03), ("q8_0", 0.06)]
)
def test_divergence(
    recipe: str, limit: float, base: tuple[Path, Path], models: Path, tmp_path: Path
) -> None:
    """Their sums are in another order, which leads to other codes of inputs here and there.

    Of q8_0, whose divergence of 0.005 comes from those codes, that alone moves it by 4 %.
    """
    text, kept = base
    file = tmp_path / "model.gguf"
    gguf_from_hf.write(models / "smollm2-768", file, recipe)
    wanted = said_by_theirs(
        file, text, 4, 512, "--kl-divergence-base", kept, "--kl-divergence",
        pattern=r"Mean    KLD: +([\d.]+)",
    )  # fmt: skip
    protocol = Protocol("llama.cpp", text, 4, 512)
    reference, quiet = models / "smollm2-768", Progress(quiet=True)
    (found,) = evaluate([file], reference, protocol, default_threads(), quiet, cache=True)
    mean = found.found["kld"]["mean"]
    print(f"KLD {recipe}: {mean:.6f} here, {wanted:.6f} there ({mean / wanted - 1:+.2%})")
    assert abs(mean / wanted - 1) < limit


@pytest.mark.parametrize(
    ("name", "size", "function"),
    [("q8_K", 256, activations.q8_of_256), ("q8_0", 32, activations.q8_of_32)],
)
def test_inputs_are_rounded_as_theirs(
    name: str, size: int, function: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Bit for bit what ggml-cpu makes of rows, read from its blocks."""
    folder = llama_quantize.tools()
    assert folder is not None
    ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(folder / "libggml-cpu.so"))
    library.ggml_cpu_init()  # fills the table that float16 is read by
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((64, 1024)) * np.exp2(rng.integers(-9, 9, (64, 1)))).astype(np.float32)
    x[3, 256:600] = 0
    nbytes = {"q8_K": 4 + 256 + 32, "q8_0": 2 + 32}[name]
    blocks = np.zeros((x.size // size, nbytes), np.uint8)
    getattr(library, f"quantize_row_{name}")(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(blocks.ctypes.data), ctypes.c_int64(x.size)
    )
    start = 4 if name == "q8_K" else 2
    stored = np.float32 if name == "q8_K" else np.float16
    step = np.ascontiguousarray(blocks[:, :start]).view(stored).astype(np.float32)
    codes = np.ascontiguousarray(blocks[:, start : start + size]).view(np.int8)
    expected = (codes.astype(np.float32) * step).reshape(x.shape)
    found = function(torch.from_numpy(x)).numpy()
    assert np.count_nonzero(expected) > x.size / 2
    np.testing.assert_array_equal(found, expected)
