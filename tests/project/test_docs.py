"""The documentation: generated pages are up to date, links lead somewhere, examples run.

A block of commands under `<!-- run -->` runs in the slow suite, all of a page in one empty folder
and in order, and Python under `<!-- run: python -->` with them; one under `<!-- run: quick -->` in
the default suite, in this process. What a page shows under `<!-- output -->` is printed by the
block before it: every word and integer as it stands, fractions nearly (of calibrated models
they depend on the CPU), seconds as they come.
"""

import ast
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import yaml

import qtool
from support.places import ROOT
from support.runs.quantizing import caller

DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md")])
MARK = re.compile(r"<!-- (run|run: python|run: quick|output) -->")
FRACTION = re.compile(r"[0-9]+\.[0-9]+")
NEARLY = 0.05  # of a fraction that calibration had a part in


def marked(page: Path) -> Iterator[tuple[str, str]]:
    """Indented blocks under a mark, in order, with the mark."""
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        mark = MARK.fullmatch(line.strip())
        if mark is None:
            continue
        following = lines[number + 1 :]
        while following and not following[0].strip():
            following.pop(0)
        found = []
        for one in following:
            if one.strip() and not one.startswith("    "):
                break
            found.append(one[4:])
        assert found, f"{page.name}: nothing after line {number + 1}"
        yield mark[1], "\n".join(found).strip() + "\n"


def blocks(page: Path) -> Iterator[tuple[bool, str]]:
    """Blocks of commands marked to be run, in order, and whether they are quick."""
    return ((mark == "run: quick", text) for mark, text in marked(page) if mark != "output")


def assert_printed(shown: str, printed: str) -> None:
    """Every line that a page shows is among those that were printed."""
    lines = [line.split() for line in printed.splitlines()]
    timed = False
    for line in filter(str.strip, shown.splitlines()):
        words = line.split()
        timed = words[-1] == "seconds" or (timed and len(words) > 1)
        most = len(words) - 1 if timed and words[-1] != "seconds" else len(words)
        assert any(
            len(one) == len(words) and all(map(_agree, words[:most], one)) for one in lines
        ), f"shown, and not printed:\n{line}\n{printed}"


def _agree(shown: str, printed: str) -> bool:
    if FRACTION.split(shown) != FRACTION.split(printed):
        return False
    pairs = zip(FRACTION.findall(shown), FRACTION.findall(printed), strict=True)
    return all(
        len(a.partition(".")[2]) == len(b.partition(".")[2])
        and abs(float(a) - float(b)) <= NEARLY * max(float(a), float(b))
        for a, b in pairs
    )


def test_what_a_page_shows_is_compared() -> None:
    printed = "recipe  bits  KLD  seconds\nrtn  4.00  0.50  9.1\nsize 2,697,304 bytes (x.weight)\n"
    assert_printed("recipe bits KLD seconds\nrtn  4.00 0.51 77.3\n", printed)
    assert_printed("size 2,697,304 bytes (x.weight)", printed)
    for wrong in (
        "size 2,697,305 bytes (x.weight)",
        "size 2,697,304 bytes",
        "rtn 4.00 0.55 9.1",
        "rtn 4.00 0.5 9.1",
        "recipe bits KLD seconds\nrtn 4.30 0.50 9.1",
    ):
        with pytest.raises(AssertionError, match="shown, and not printed"):
            assert_printed(wrong, printed)


def test_what_a_page_shows_stands_behind_what_is_run() -> None:
    for page in PAGES:
        marks = [mark for mark, _ in marked(page)]
        for before, mark in zip(["", *marks], marks, strict=False):
            assert mark != "output" or before.startswith("run"), page.name


def has(page: Path, quick: bool) -> bool:
    return any(is_quick == quick for is_quick, _ in blocks(page))


@pytest.fixture(scope="module")
def generate() -> Any:
    spec = spec_from_file_location("generate", DOCS / "generate.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["recipes.md", "cli.md"])
def test_generated_pages_are_up_to_date(name: str, generate: Any) -> None:
    made = generate.PAGES[name]()
    assert made == (DOCS / name).read_text(encoding="utf-8"), f"docs/{name}: run `make docs`"


def test_references_are_complete(generate: Any) -> None:
    recipes, cli = (DOCS / "recipes.md").read_text(), (DOCS / "cli.md").read_text()
    for path in (ROOT / "recipes").glob("*.yaml"):
        assert f"| `{path.stem}` |" in recipes
    for name in generate.commands():
        assert f"## qtool {name}\n" in cli
    assert "`weights.group_size`" in recipes and "`overrides[].match`" in recipes


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"
    index = (DOCS / "README.md").read_text()
    assert all(f"({page.name})" in index for page in DOCS.glob("*.md") if page.name != "README.md")


def test_recipes_that_pages_name_exist() -> None:
    known = {path.stem for path in (ROOT / "recipes").glob("*.yaml")}
    for page in PAGES:
        for words in re.findall(r"--recipes? ([a-z][\w.,{}-]*)", page.read_text(encoding="utf-8")):
            for name in words.split(","):
                if name.strip(".") and not name.endswith(".yaml"):
                    assert name in known, f"{page.name}: recipe {name}"


@pytest.mark.parametrize("page", [p for p in PAGES if has(p, True)], ids=lambda p: p.name)
def test_quick_examples(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    call = caller(monkeypatch, capfd)
    for _, text in filter(lambda block: block[0], blocks(page)):
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line)
            assert words[0] == "qtool"
            into = words.index(">") if ">" in words else len(words)
            said = call(*words[1:into])
            assert said.status == 0 and said.out, f"{line}: {said.err}"
            for target in words[into + 1 :]:
                Path(target).write_text(said.out)


def environment(folder: Path) -> dict[str, str]:
    """qtool and python on the PATH, those of these tests."""
    bin_ = folder / "bin"
    bin_.mkdir()
    (bin_ / "qtool").write_text(f'#!/bin/sh\nexec {sys.executable} -m qtool "$@"\n')
    (bin_ / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for path in bin_.iterdir():
        path.chmod(0o755)
    found = {**os.environ, "PATH": f"{bin_}:{os.environ['PATH']}", "COLUMNS": "100"}
    if "site-packages" not in sys.modules["qtool"].__file__:  # type: ignore[operator]
        found["PYTHONPATH"] = str(ROOT)
    return found


def shell(text: str, folder: Path, variables: dict[str, str]) -> str:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=folder,
        env=variables,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if has(p, False)], ids=lambda p: p.name)
def test_examples(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    variables = environment(tmp_path)
    printed = ""
    for mark, text in marked(page):
        if mark == "output":
            assert_printed(text, printed)
        else:
            python = mark == "run: python"
            printed = shell(f"python - <<'END'\n{text}END" if python else text, folder, variables)


def test_python_page_names_what_the_functions_take() -> None:
    """Every `name=default` of its tables is a parameter with that default, and none is left out."""
    page = (DOCS / "python.md").read_text(encoding="utf-8")
    said: dict[str, list[str]] = {
        "quantize": ["out=None"],
        "fit": ["recipe='q4_k_m-awq-gptq'", "quiet=True"],
        "evaluate": ["quiet=True"],
        "compare": ["quiet=True"],
        "generate": ["quiet=True"],
        "plan": [],
        "sample": ["quiet=True"],
        "verify": ["quiet=True"],
        "convert": ["quiet=True"],
    }
    name = ""
    for line in page.splitlines():
        if found := re.match(r"\| of `(\w+)` \|", line):
            name = found[1]
        elif name and line.startswith("| `"):
            said[name] += line.split("`")[1].split(", ")
        elif not line.startswith("|"):
            name = ""
    for name, given in said.items():
        parameters = inspect.signature(getattr(qtool, name)).parameters.values()
        # progress takes an object of the commands' own.
        known = {p.name: p.default for p in parameters if p.default is not p.empty}
        known.pop("progress", None)
        read = {key: ast.literal_eval(value) for key, _, value in (p.partition("=") for p in given)}
        assert read == known, name


def github() -> dict[str, Any]:
    found = yaml.safe_load((DOCS / "ci/github-actions.yml").read_text())
    assert isinstance(found, dict)
    return found


def gitlab() -> dict[str, Any]:
    found = yaml.safe_load((DOCS / "ci/gitlab-ci.yml").read_text())
    assert isinstance(found, dict)
    return found["quantize"]  # type: ignore[no-any-return]


def steps(which: str) -> tuple[list[str], dict[str, str]]:
    """The commands of a pipeline without installation and publishing, and its variables."""
    if which == "github":
        job = github()["jobs"]["quantize"]
        runs = {one["name"]: one["run"] for one in job["steps"] if "run" in one}
        assert list(runs) == ["Install", "Quantize", "Verify", "Evaluate", "Report", "Publish"]
        return [runs[name] for name in list(runs)[1:-1]], job["env"]
    job = gitlab()
    assert "qtool push" in job["script"][-1]
    return job["script"], job["variables"]  # publishes nothing where REPOSITORY is empty


def installing(which: str) -> str:
    if which == "gitlab":
        return "\n".join(gitlab()["before_script"])
    steps = github()["jobs"]["quantize"]["steps"]
    (found,) = (one["run"] for one in steps if one.get("name") == "Install")
    return str(found)


@pytest.mark.parametrize("which", ["github", "gitlab"])
def test_pipelines_install_qtool_in_any_repository(which: str, tmp_path: Path) -> None:
    """By pip, in a folder with nothing of qtool in it, from an index that has this version."""
    index, elsewhere = tmp_path / "index", tmp_path / "elsewhere"
    index.mkdir()
    elsewhere.mkdir()
    name = f"qtool-{qtool.__version__}"
    with zipfile.ZipFile(index / f"{name}-py3-none-any.whl", "w") as wheel:
        about = f"Metadata-Version: 2.1\nName: qtool\nVersion: {qtool.__version__}\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        wheel.writestr(
            f"{name}.dist-info/WHEEL",
            "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    _, variables = steps(which)
    own = environment(tmp_path) | {
        "QTOOL": variables["QTOOL"],
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_FIND_LINKS": str(index),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_TARGET": str(tmp_path / "site"),
    }
    shell(installing(which), elsewhere, own)
    assert (tmp_path / "site" / f"{name}.dist-info").is_dir()


def test_both_pipelines_do_the_same() -> None:
    def words(which: str) -> list[list[str]]:
        found, _ = steps(which)
        return [shlex.split(one.replace("\\\n", " ")) for one in found if "push" not in one]

    assert words("github") == words("gitlab")
    publish = github()["jobs"]["quantize"]["steps"][-1]
    assert publish["run"] in gitlab()["script"][-1] and "HF_TOKEN" in publish["env"]
    # Each option is one that there is.
    from typer.main import get_command

    from qtool.cli.main import app

    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    for line in [*words("github"), shlex.split(publish["run"])]:
        known = {opt for p in commands[line[1]].params for opt in (*p.opts, *p.secondary_opts)}
        assert {word for word in line if word.startswith("-")} <= known, line


@pytest.mark.slow
@pytest.mark.parametrize("which", ["github", "gitlab"])
def test_pipelines_run_as_plain_shell(which: str, tmp_path: Path) -> None:
    """On tiny; and the job fails where the artifact is worse than allowed."""
    from pydoc_data.topics import topics

    found, variables = steps(which)
    text = tmp_path / "calibration.txt"
    text.write_text("\n".join(topics[name] for name in sorted(topics))[:150_000])
    small = {"MODEL": "tiny", "RECIPE": "w4g64-awq", "SAMPLES": "8", "LENGTH": "128",
             "WINDOWS": "4", "REPOSITORY": ""}  # fmt: skip
    own = environment(tmp_path) | {k: str(v) for k, v in variables.items()} | small
    for command in found:
        shell(command, tmp_path, own)
    figures = json.loads((tmp_path / "artifact.eval.json").read_text())
    assert figures["failed"] == [] and 0 < figures["kld"]["mean"] < 0.5
    assert json.loads((tmp_path / "verify.json").read_text())["ok"]
    assert (tmp_path / "report.html").is_file()
    assert (tmp_path / "artifact.provenance.json").is_file()
    evaluate = next(one for one in found if "qtool eval" in one)
    with pytest.raises(AssertionError, match="failed: "):
        shell(evaluate, tmp_path, own | {"LIMIT": "kld>0.000001"})
