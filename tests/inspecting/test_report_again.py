"""The commands that a report shows: run as they stand, they make the artifact again."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from qtool.report import gather, written
from qtool.report.again import commands
from support.inspecting.reported_again import again
from support.runs import quantizing
from support.runs.killed_named import killed_named
from support.runs.quantizing import Call

OWN = """\
method: gptq
format: gptq
weights: {bits: 4, group_size: 64, symmetric: true}
gptq: {damp_percent: 0.02}
overrides:
- match: "*.v_proj"
  weights: {bits: 8}
calibration: {samples: 4, length: 64}
"""
SAME_NAME = """\
method: rtn
format: compressed-tensors
weights: {bits: 4, group_size: 32, symmetric: true}
kv_cache: {bits: 8, type: float}
"""
GGUF = "format: gguf\ntype: q4_k_m\noutput_type: q8_0\noverrides: [{match: attn_v, type: q5_k}]\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    quantizing.first_block_of_tiny(tmp_path / "model")
    quantizing.text_file(tmp_path / "text.txt")
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("recipe", "text", "options", "files"),
    [
        ("mine.yaml", OWN, ["--calibration", "text.txt", "--set", "gptq.act_order=false"], 1),
        pytest.param(
            "mine.yaml", OWN, ["--calibration", "text.txt", "--samples", "3", "--seed", "2"], 1,
            marks=pytest.mark.slow,
        ),
        ("w4g64-rtn.yaml", SAME_NAME, ["--calibration", "text.txt", "--samples", "3"], 1),
        ("w4g64-rtn", "", ["--set", "weights.group_size=32", "--max-shard-size", "300kB"], 0),
        pytest.param(
            "w4g64-gptq", "", ["--calibration", "text.txt", "--samples", "3", "--length", "64"], 0,
            marks=pytest.mark.slow,
        ),
        ("mine.yaml", GGUF, [], 1),
        ("q4_k_m", "", ["--set", "pure=true"], 0),
    ],
)  # fmt: skip
def test_they_make_it_again(
    recipe: str, text: str, options: list[str], files: int,
    root: Path, call: Call, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if text:
        (root / recipe).write_text(text)
    out = "out.gguf" if "gguf" in text or recipe.startswith("q4") else "out"
    done = call("quantize", "model", "--recipe", recipe, *options, "-o", out)
    assert done.status == 0, done.err
    lines = again(out, call, monkeypatch)
    assert sum(line.startswith("cat > ") for line in lines) == files
    assert (f"--recipe {recipe} " in lines[-1]) and len(lines) == files + 1


def test_statistics_are_measured_again(
    root: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ("--calibration", "text.txt", "--samples", 3, "--length", 64)
    recipe = ("--recipe", "w4g64-gptq")
    assert call("calibrate", "model", *recipe, *settings, "-o", "sums").status == 0
    done = call("quantize", "model", *recipe, "--stats", "sums", "-o", "out")
    assert done.status == 0, done.err
    measured, made = again("out", call, monkeypatch)
    assert measured.startswith("qtool calibrate MODEL") and "--stats" in made


def test_a_shell_reads_them(root: Path, call: Call) -> None:
    (root / "mine.yaml").write_text(GGUF)
    assert call("quantize", "model", "--recipe", "mine.yaml", "-o", "out.gguf").status == 0
    said = "\n".join(commands(Path("out.gguf"), "out.gguf")).replace(" MODEL ", " ../model ")
    run = f'qtool() {{ {shlex.quote(sys.executable)} -m qtool "$@"; }}\nset -e\n{said}\n'
    done = subprocess.run(["bash", "-c", run], cwd="again", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (root / "again/out.gguf").read_bytes() == (root / "out.gguf").read_bytes()


@pytest.mark.parametrize("name", ["../w4g64-rtn", "x y", "mine\n", "", "a" * 200])
def test_a_name_that_is_none_is_not_shown(name: str, root: Path, call: Call) -> None:
    """A record comes from a file that anybody may have written."""
    assert call("quantize", "model", "--recipe", "w4g64-rtn", "-o", "out").status == 0
    assert commands(Path("out"), "out")
    record = json.loads((root / "out/qtool.json").read_text())
    record["recipe"]["name"] = name
    (root / "out/qtool.json").write_text(json.dumps(record))
    assert commands(Path("out"), "out") == []


def test_a_recipe_that_this_version_does_not_know(root: Path, call: Call) -> None:
    assert call("quantize", "model", "--recipe", "w4g64-rtn", "-o", "out").status == 0
    record = json.loads((root / "out/qtool.json").read_text())
    record["recipe"]["later"] = {"key": 1}
    (root / "out/qtool.json").write_text(json.dumps(record))
    assert commands(Path("out"), "out") == []
    assert commands(Path("model"), "model") == []


@pytest.mark.parametrize("other", [False, True])
def test_killed_when_the_page_had_its_name(
    other: bool, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command finds it finished, wherever it lies, and with the status that it had; what
    was changed since is another."""
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 1)
    (model / "config.json").write_text("{}")  # which does not pass
    page = model / "r.html"
    killed_named(lambda: call("report", model, "-o", page), page)
    text = page.read_text()
    if other:
        (model / "notes.txt").write_text("more")
    monkeypatch.setattr(gather, "verify_artifact", None)
    said = call("report", model, "-o", page)
    assert said.status == 1 and page.read_text() == text
    assert ("it was finished already" in said.err) is not other
    assert ("exists; remove it" if other else "does not pass its checks") in said.err
    assert not [*model.glob(".*")]


def test_a_finished_page_that_is_removed_while_it_is_looked_at(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 1)
    page = tmp_path / "r.html"
    killed_named(lambda: call("report", model, "-o", page), page)
    check_free = written.check_free

    def removed(*given: Any, **more: Any) -> None:
        check_free(*given, **more)
        shutil.rmtree(tmp_path / ".r.html.partial")
        page.unlink()

    with monkeypatch.context() as patch:
        patch.setattr(written, "check_free", removed)
        said = call("report", model, "-o", page)
    assert said.status == 1 and "removed what an earlier run had finished" in said.err
    assert not page.exists() and not [*tmp_path.glob(".*")]
    assert call("report", model, "-o", page).status == 0 and page.exists()
