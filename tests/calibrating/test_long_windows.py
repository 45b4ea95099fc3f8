"""Windows and samples that are longer than a model's positions: said once, and the work goes on."""

import json
from pathlib import Path

import pytest

from support.runs import quantizing


@pytest.mark.parametrize("positions", [16, 32])
def test_they_are_warned_of(
    positions: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    call = quantizing.caller(monkeypatch, capfd)
    model = quantizing.first_block_of_tiny(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    config["max_position_embeddings"] = positions
    (model / "config.json").write_text(json.dumps(config))
    text = quantizing.text_file(tmp_path / "text.txt", 4000)
    measured = call("eval", model, "--text", text, "--windows", 2, "--length", 32)
    made = call(
        "quantize", model, "--recipe", "w4g64-awq", "--calibration", text, "--samples", 4,
        "--length", 32, "-o", tmp_path / "out",
    )  # fmt: skip
    for done, what in ((measured, "windows"), (made, "calibration samples")):
        assert done.status == 0, done.err
        told = f"{what} of 32 tokens, and config.json says that the model has 16 positions"
        assert done.err.count(told) == (positions < 32)
