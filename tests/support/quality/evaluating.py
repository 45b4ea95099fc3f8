"""`qtool eval` of small artifacts of the shipped model."""

import json
from pathlib import Path

import pytest

from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.quantizing import pipeline
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.request import Request
from support.runs import quantizing
from support.runs.quantizing import Call

WINDOWS, LENGTH = 3, 48


def artifacts(folder: Path) -> Path:
    """text.txt, and tiny as AWQ, GPTQ and GGUF, in a folder."""
    quantizing.text_file(folder / "text.txt")
    # 8 bits lose so little that its divergence is partly the rounding of a forward pass.
    for name, chosen in (("awq", load("w4g128-rtn")), ("gptq", load("w8-rtn", ["weights.bits=4"]))):
        request = Request("tiny", tiny_folder(), chosen, folder / name, None, 1, 1 << 30)
        pipeline.run(request, Progress(quiet=True))
    gguf = GgufRequest("tiny", tiny_folder(), load("q4_k_m"), folder / "q4.gguf", 1)
    run_gguf(gguf, Progress(quiet=True))
    return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return artifacts(tmp_path_factory.mktemp("root"))


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    """With a cache of its own."""
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    return call


def evaluated(call: Call, root: Path, name: str, *more: object) -> dict[str, object]:
    said = call("eval", root / name, "--text", root / "text.txt", "--windows", WINDOWS, "--length",
                LENGTH, "--json", *more)  # fmt: skip
    assert said.status == 0, said.err
    found: dict[str, object] = json.loads(said.out)
    return found


_FOUND: dict[Path, dict[str, object]] = {}


def against_tiny(call: Call, root: Path) -> dict[str, object]:
    """Of the AWQ artifact, with all figures; evaluated once for whoever only looks at them."""
    if root not in _FOUND:
        _FOUND[root] = evaluated(call, root, "awq", "--against", "tiny")
    return _FOUND[root]
