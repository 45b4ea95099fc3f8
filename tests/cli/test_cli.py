"""The command line: exit statuses, one sentence for a failure, and a quick start."""

import errno
import itertools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qtool import __version__
from qtool.cli import main as cli
from qtool.errors import FormatError
from support.models import header_files


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python -m qtool` in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "qtool", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100", **environment},
        timeout=60,
    )


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """The exit status of `qtool` in this process."""
    monkeypatch.setattr(sys, "argv", ["qtool", *arguments])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    return int(caught.value.code or 0)


HEAVY = {"torch", "transformers", "pydantic", "huggingface_hub", "numpy", "rich"}


@pytest.mark.parametrize(
    ("arguments", "allowed"),
    [
        (["--help"], set()),
        (["plan", "MODEL", "--recipe", "w8-rtn", "--json"], {"pydantic", "numpy"}),
    ],
)
def test_little_is_imported(arguments: list[str], allowed: set[str], tmp_path: Path) -> None:
    header_files.write(tmp_path / "m", header_files.llama())
    script = (
        "import sys; from qtool.cli.main import main\n"
        "try: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    )
    arguments = [str(tmp_path / "m") if word == "MODEL" else word for word in arguments]
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0 and result.stdout
    assert set(result.stderr.split()) & HEAVY <= allowed


def test_what_is_refused_at_once_imports_little(tmp_path: Path) -> None:
    script = (
        "import sys; from qtool.cli.main import main\ntry: main()\nfinally: print(*sys.modules)"
    )
    words = ["quantize", "tiny", "--recipe", "w4g128-rtn", "-o", str(tmp_path / "x")]
    result = subprocess.run(
        [sys.executable, "-c", script, *words, "--imatrix", "x"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert result.returncode == 1 and "--imatrix would change nothing" in result.stderr
    assert not set(result.stdout.split()) & {"torch", "transformers"}


def test_module_runs() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout) == (0, f"qtool {__version__}\n")


def test_help_names_every_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, "--help") == 0
    said = capsys.readouterr().out
    for command in ("quantize", "plan", "inspect", "recipes"):
        assert f"\n  {command} " in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["quantize"],
        ["plan", "tiny"],
        ["plan", "tiny", "--recipe", "w8-rtn", "--wrong"],
        ["quantize", "tiny", "--recipe", "w8-rtn", "--samples", "many"],
    ],
)
def test_usage_errors_are_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Usage:" in err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["plan", "./missing", "--recipe", "w8-rtn"], "error: ./missing: no such file or folder"),
        (["plan", "MODEL", "--recipe", "w9"], "error: recipe 'w9' does not exist"),
        (
            ["plan", "MODEL", "--recipe", "w8-rtn", "--set", "a=1"],
            "error: --set a=1: a: unknown key",
        ),
        (["recipes", "w9"], "error: recipe 'w9' does not exist"),
    ],
)
def test_failures_are_1_and_one_sentence(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    header_files.write(tmp_path / "m", header_files.llama())
    arguments = [str(tmp_path / "m") if word == "MODEL" else word for word in arguments]
    assert call(monkeypatch, *arguments) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(sentence) and err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (FormatError("x.safetensors: wrong"), 1, "error: x.safetensors: wrong\n"),
        (OSError(errno.ENOSPC, "No space left", "/a/b"), 1, "error: /a/b: the disk is full; "),
        (OSError(errno.ENOSPC, "No space left"), 1, "error: what is written to is full; free"),
        (PermissionError(errno.EACCES, "Permission denied", "/a"), 1, "error: /a: Permission den"),
        (MemoryError(), 1, "error: not enough memory"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_printed_in_one_place(
    error: BaseException,
    status: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    assert call(monkeypatch) == status
    assert capsys.readouterr().err.startswith(said)
    monkeypatch.setenv("QTOOL_DEBUG", "1")
    with pytest.raises(type(error)):
        cli.main()


@pytest.mark.parametrize(
    "option", ["model", "-o", pytest.param("--calibration", marks=pytest.mark.slow)]
)
def test_names_that_are_no_utf8_are_refused_before_any_work(option: str, tmp_path: Path) -> None:
    """Records cannot hold them: a statement of provenance was a traceback after all the work."""
    name = os.fsdecode(os.fsencode(tmp_path) + b"/lat\xfcn")
    out, *text = {"-o": (name,), "--calibration": ("x", "--calibration", name)}.get(option, ("x",))
    result = run(
        "quantize", name if option == "model" else "tiny", "--recipe", "w4g128-gptq",
        "-o", str(tmp_path / out), *text, "--provenance",
    )  # fmt: skip
    assert result.returncode == 1 and result.stderr.count("\n") == 1
    assert "UTF-8" in result.stderr and "Traceback" not in result.stderr
    assert not list(tmp_path.iterdir())


def test_closed_streams_lead_nowhere() -> None:
    """Of --json stdout has one object or none; the sentence went there where stderr was closed."""
    program = [sys.executable, "-m", "qtool"]
    refused = [*program, "inspect", "/nothing/here", "--json"]
    for command, closed, status in (
        (refused, "2>&-", 1), (refused, "<&- 2>&-", 1), ([*program, "recipes"], ">&- 2>&-", 0),
    ):  # fmt: skip
        script = f"{shlex.join(command)} {closed}"
        result = subprocess.run(["sh", "-c", script], capture_output=True, timeout=60)
        assert (result.returncode, result.stdout) == (status, b"")


def test_a_bug_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_recipes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  w4g128-awq ") and "start here" in line for line in lines)
    groups = [lines[0], *(after for line, after in itertools.pairwise(lines) if not line)]
    assert groups[0].startswith("safetensors") and len(groups) == 7
    # The larger first.
    assert [line.split()[0] for line in lines if " q4_k" in line[:7]] == [
        "q4_k_m", "q4_k_m-awq-gptq", "q4_k_s"
    ]  # fmt: skip
    assert call(monkeypatch, "recipes", "--json") == 0
    found = {item["name"]: item for item in json.loads(capsys.readouterr().out)["recipes"]}
    assert len(found) == len(lines) - 2 * len(groups) + 1
    assert found["iq2_xs"]["calibrates"] and found["iq2_xs"]["format"] == "gguf"
    assert call(monkeypatch, "recipes", "Q4_K", "--json") == 0
    assert json.loads(capsys.readouterr().out)["type"] == "q4_k_m"
    assert call(monkeypatch, "recipes", "w4g128-awq") == 0
    assert "\nmethod: awq\n" in capsys.readouterr().out
    assert call(monkeypatch, "recipes", "--schema") == 0
    assert json.loads(capsys.readouterr().out)["title"] == "qtool recipe"


def test_plan_for_people_and_for_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(header_files.write(tmp_path / "m", header_files.llama(layers=30, kv=96)))
    assert call(monkeypatch, "plan", folder, "--recipe", "w4g128-awq") == 0
    said = capsys.readouterr().out
    assert "model.layers.{0-29}.mlp.down_proj.weight" in said and "w4 g128 asym" in said
    assert "210 quantized, 63 dense, 0 dropped" in said
    assert "1.2% of the weights left unquantized" in said
    assert "note: 60 of 210 matrices" in said
    assert len(said.splitlines()) < 30
    assert call(monkeypatch, "plan", folder, "--recipe", "w4g128-awq", "--all") == 0
    assert len(capsys.readouterr().out.splitlines()) > 270
    assert call(monkeypatch, "plan", folder, "--recipe", "w4g128-awq", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tensors"]) == 273 and found["size_bytes"] > 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["quantize", "-o", "FULL"], "the output folder exists and is not empty"),
        (["quantize", "-o", "FULL/mine"], "a file is in the way"),
        (["quantize", "--max-shard-size", "many"], "'many' is no size"),
        (["quantize", "--max-shard-size", "0"], "a size of '0' holds nothing"),
        (["quantize", "--stats", "s", "--seed", "1", "--samples", "4"], "--samples, --seed would"),
        (["plan", "--max-ram", "lots"], "--max-ram: 'lots' is no size"),
        (["calibrate", "-o", "FULL/mine"], "exists; remove it"),
    ],
)
def test_what_can_be_told_before_a_download_is(
    arguments: list[str],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "mine").write_text("mine")
    monkeypatch.setattr("qtool.hub.download", lambda *_: pytest.fail("downloaded"))
    command, *more = [word.replace("FULL", str(tmp_path)) for word in arguments]
    monkeypatch.chdir(tmp_path)
    status = 2 if "--max-" in arguments[1] else 1  # for what is no size whatever the model
    assert call(monkeypatch, command, "some/model", "--recipe", "w8-rtn", *more) == status
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--seed", "-1", "--seed -1: expected 0 to 4,294,967,295"),
        ("--length", "2000000", "--length 2000000: expected 8 to 1,048,576"),
        ("--samples", f"{10**20}", f"--samples {10**20}: expected 1 to 1,000,000"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        ["calibrate", "tiny"],
        ["quantize", "tiny", "--recipe", "w4g128-awq"],
        ["quantize", "tiny", "--recipe", "q4_k_m-awq-gptq"],
        ["fit", "tiny", "--size", "2MB"],
        ["matrix", "tiny", "--recipes", "w8-rtn"],
        ["plan", "tiny", "--recipe", "w8-rtn"],
    ],
)
def test_a_number_that_no_recipe_may_have_is_told_of_its_option(
    command: list[str],
    option: str,
    value: str,
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if (command[0], option) == ("plan", "--seed"):
        pytest.skip("has none")
    out = [] if command[0] == "plan" else ["-o", str(tmp_path / "s.yaml")]
    assert call(monkeypatch, *command, *out, option, value) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        (("--calibration", "a", "--calibration=b"), "mixed by a YAML file that names them"),
        (("--recipe", "q8_0"), "`qtool matrix` takes several recipes"),
    ],
)
def test_an_input_is_named_once(
    given: tuple[str, ...], instead: str, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    assert call(monkeypatch, "plan", "tiny", "--recipe", "w8-rtn", *given) == 2
    assert f"{given[0]} is given more than once" in (said := capsys.readouterr().err)
    assert instead in said


def test_other_options_may_be_given_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ("--set", "weights.bits=4", "--set", "weights.group_size=64", "--threads=1")
    words = ("plan", "tiny", "--recipe", "w8-rtn", *sets, "--json", "--json", "--threads=2")
    assert call(monkeypatch, *words) == 0
    assert "w4 g64" in capsys.readouterr().out


def test_texts_in_one_argument_are_told_how_to_be_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    both = f"{tmp_path / 'a.txt'},{tmp_path / 'b.txt'}"
    words = ("quantize", "tiny", "--recipe", "w4g128-gptq", "--calibration", both)
    assert call(monkeypatch, *words) == 1
    assert "several files are named by a YAML file" in capsys.readouterr().err
