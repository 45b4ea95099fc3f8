"""`plan --calibration`: what `quantize` does with it, as far as no text is cut into tokens."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from qtool.cli.main import app

WORDS = "some words that are read\n" * 200


def run(command: str, recipe: str, *more: str) -> Result:
    return CliRunner().invoke(app, [command, "tiny", "--recipe", recipe, *more])


def warnings(*more: str) -> list[str]:
    result = run("plan", "w4g64-gptq", "--json", *more)
    assert result.exit_code == 0, result.output
    found: list[str] = json.loads(result.stdout)["warnings"]
    return found


@pytest.mark.parametrize("text", ["text.txt", ""])
def test_refused_as_quantize_does(text: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(WORDS)
    asked = ("--calibration", str(tmp_path / text) if text else "", "--imatrix", "x.gguf")
    planned = run("plan", "q4_k_m", *asked)
    made = run("quantize", "q4_k_m", *asked, "-o", str(tmp_path / "out.gguf"))
    assert planned.exit_code == made.exit_code == 1
    assert str(planned.exception) == str(made.exception)
    assert str(made.exception).startswith("--calibration would change nothing")


def test_a_text_that_is_not_there(tmp_path: Path) -> None:
    asked = ("--calibration", str(tmp_path / "no.txt"))
    planned = run("plan", "w4g64-gptq", *asked)
    made = run("quantize", "w4g64-gptq", *asked, "-o", str(tmp_path / "out"))
    assert planned.exit_code == made.exit_code == 1
    assert str(planned.exception) == str(made.exception)
    assert "no.txt: no such file" in str(made.exception)


@pytest.mark.parametrize(
    ("recipe", "out", "unless"),
    [("w4g128-rtn", "out", ""), ("q4_k_m", "out.gguf", " without `importance: true`")],
)
def test_one_that_is_not_read_is_noted_and_not_in_the_models_card(
    recipe: str, out: str, unless: str, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)
    note = "note: settings of calibration (samples, source) are not used: "
    note += f"recipe {recipe} looks at no activations{unless}\n"
    asked = ("--calibration", str(path), "--samples", "3")
    planned = run("plan", recipe, *asked)
    assert planned.exit_code == 0 and note in planned.stdout
    made = run("quantize", recipe, *asked, "-o", str(tmp_path / out))
    assert made.exit_code == 0 and note in made.output
    card = tmp_path / out / "README.md"
    assert not card.exists() or "settings of calibration" not in card.read_text()


def test_a_text_that_is_too_short_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text(WORDS)  # 5000 bytes
    asked = ("--calibration", str(path), "--length", "100")
    assert not [one for one in warnings(*asked, "--samples", "50") if "bytes" in one]
    (said,) = (one for one in warnings(*asked, "--samples", "51") if "bytes" in one)
    assert "has 5,000 bytes, too few for 51 samples of 100 tokens" in said
    chats = tmp_path / "text.jsonl"  # to which a template may add
    chats.write_text('{"text": "a"}\n')
    assert not [one for one in warnings("--calibration", str(chats)) if "bytes" in one]


def test_times_are_for_so_many_threads() -> None:
    one = run("plan", "w4g64-gptq", "--threads", "1").stdout
    two = run("plan", "w4g128-rtn", "--threads", "2").stdout
    assert re.search(r"estimated: peak memory \d+ MiB, time \d+ s with 1 thread\n", one)
    assert re.search(r"estimated: peak memory [\d.]+ MiB, time under 1 s with 2 threads\n", two)
