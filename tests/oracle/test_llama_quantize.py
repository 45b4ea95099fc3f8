"""Every GGUF recipe against llama-quantize: order, types, offsets, bytes, and metadata.

QTOOL_ORACLE_LLAMA names the folder of llama.cpp's tools (see llama_quantize.py); two real models
(hidden 768, where all types divide, and 576, where most do not) and made-up ones without and with
experts, each without and with importance. The models come from `models` (conftest.py); the first
run takes llama-quantize an hour on two cores, of which QTOOL_ORACLE_CACHE spares the next ones.
"""

import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from oracle import llama_quantize

from qtool.gguf.importance.imatrix import write_importance
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load, shipped
from support.gguf import gguf_files

pytestmark = [
    pytest.mark.oracle,
    pytest.mark.skipif(
        llama_quantize.tools() is None, reason="QTOOL_ORACLE_LLAMA names no folder of llama.cpp"
    ),
]

# GPTQ is none of llama.cpp's methods.
RECIPES = [
    name for name in shipped() if isinstance(one := load(name), GgufRecipe) and not one.sweeps
]
MADE_UP = {"dense": 0, "experts": 8}
Pair = tuple[Path, Path]  # a model and its importance


@pytest.fixture(scope="session")
def sources(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[str], Pair]:
    """sources(name) -> an f16 GGUF model and an importance matrix for it."""
    folder = tmp_path_factory.mktemp("sources")

    @cache
    def make(name: str) -> Pair:
        path = folder / f"{name}-f16.gguf"
        if name in MADE_UP:
            gguf_files.model(path, experts=MADE_UP[name])
            factors = folder / f"{name}-imatrix.gguf"
            write_importance(factors, gguf_files.importance(path))
            return path, factors
        checkpoint = request.getfixturevalue("models") / name
        ready = checkpoint.parent / "gguf" / path.name
        if not ready.exists():
            quantize(checkpoint, "f16", path)
            ready = path
        from pydoc_data.topics import topics

        text = folder / "text.txt"
        text.write_text("\n".join(topics.values()), encoding="utf-8")
        return ready, llama_quantize.imatrix(ready, text, folder)

    return make


def quantize(source: Path, recipe: str, out: Path, *more: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "qtool", "quantize", source, "--recipe", recipe, "-o", out]
    return subprocess.run([*map(str, command), *map(str, more)], capture_output=True, text=True)


@pytest.mark.parametrize("factors", ["plain", "importance"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*MADE_UP, "smollm2-768", "smollm2"])
def test_same_file(
    name: str, recipe: str, factors: str, sources: Callable[[str], Pair], tmp_path: Path
) -> None:
    source, imatrix = sources(name)
    chosen = imatrix if factors == "importance" else None
    out = tmp_path / "ours.gguf"
    options = ["--imatrix", chosen] if chosen else ["--set", "importance=false"]
    said = quantize(source, recipe, out, *options)
    theirs = llama_quantize.quantized(source, recipe, chosen, tmp_path)
    if theirs is None:
        reason = "stores rows in blocks of 128" if recipe == "q1_0" else "importance matrix"
        assert said.returncode == 1 and reason in said.stderr, said.stderr
        assert chosen is None or recipe == "q1_0"
        assert list(tmp_path.iterdir()) == []
        return
    assert said.returncode == 0, said.stderr
    ours = llama_quantize.described(out)
    differ = [
        (mine, other)
        for mine, other in zip(ours.tensors, theirs.tensors, strict=True)
        if mine != other
    ]
    assert not differ, f"{len(differ)} of {len(theirs.tensors)} tensors: {differ[:2]}"
    assert ours.padding == theirs.padding
    check_metadata(ours.metadata, theirs.metadata)


@pytest.mark.parametrize("again", ["q8_0", "q3_k_m", "f16", "bf16", "iq4_xs"])
@pytest.mark.parametrize("first", ["q4_k_m", "q8_0", "iq3_s", "mxfp4_moe", "f32", "bf16", "tq2_0"])
def test_requantizing(
    first: str, again: str, sources: Callable[[str], Pair], tmp_path: Path
) -> None:
    middle, out = tmp_path / "middle.gguf", tmp_path / "ours.gguf"
    quantize(sources("experts")[0], first, middle, "--set", "importance=false")
    said = quantize(middle, again, out, "--set", "importance=false", "--requantize")
    assert said.returncode == 0, said.stderr
    theirs = llama_quantize.quantized(middle, again, None, tmp_path, "--allow-requantize")
    assert theirs is not None
    ours = llama_quantize.described(out)
    assert ours.tensors == theirs.tensors and ours.padding == theirs.padding


@pytest.mark.parametrize(
    ("recipe", "sets", "options"),
    [
        ("q4_k_m", ["pure=true"], ["--pure"]),
        ("q4_k_m", ["leave_output=true"], ["--leave-output-tensor"]),
        ("q3_k_s", ["output_type=q8_0"], ["--output-tensor-type", "q8_0"]),
        ("q4_0", ["embedding_type=f16"], ["--token-embedding-type", "f16"]),
        (
            "q4_k_m",
            ["overrides=[{match: attn_v, type: q8_0}, {match: 'blk[.]0[.]', type: q5_1}]"],
            ["--tensor-type", "attn_v=q8_0", "--tensor-type", "blk[.]0[.]=q5_1"],
        ),
    ],
)
def test_options(
    recipe: str,
    sets: list[str],
    options: list[str],
    sources: Callable[[str], Pair],
    tmp_path: Path,
) -> None:
    source, out = sources("dense")[0], tmp_path / "ours.gguf"
    said = quantize(source, recipe, out, *(word for item in sets for word in ("--set", item)))
    assert said.returncode == 0, said.stderr
    theirs = llama_quantize.quantized(source, recipe, None, tmp_path, *options)
    assert theirs is not None
    ours = llama_quantize.described(out)
    assert ours.tensors == theirs.tensors and ours.padding == theirs.padding


def check_metadata(ours: dict[str, list[object]], theirs: dict[str, list[object]]) -> None:
    """llama.cpp's keys in its order, with its values, then ours."""
    file = "quantize.imatrix.file"
    if file in theirs:  # a path of the host is none of a file's business
        theirs[file][1] = Path(str(theirs[file][1])).name
    # An f16 file that qtool made has qtool's keys already, which llama-quantize copies.
    theirs = {key: value for key, value in theirs.items() if not key.startswith("qtool.")}
    count = len(theirs)
    assert list(ours.items())[:count] == list(theirs.items())
    assert all(key.startswith("qtool.") for key in list(ours)[count:])
