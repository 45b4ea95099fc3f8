"""The recipe that `sample` names next: one that takes the model it wrote a text with."""

from pathlib import Path

import pytest

from qtool.gguf.from_hf import source as from_hf
from qtool.hub import tiny_folder
from qtool.quantizing.advised import calibrated
from support.gguf import gguf_models
from support.models import gpt_oss
from support.runs import quantizing

OWN = ["--recipe", "mxfp4-gpt-oss-gptq"]
IMPORTANCE = ["--recipe", "q4_k_m", "--set", "importance=true"]


def test_what_takes_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert calibrated(str(tiny_folder())) == ["--recipe", "w4g128-awq-gptq"]
    narrow = quantizing.build("llama", tmp_path / "narrow")  # no group divides its widths
    assert calibrated(str(narrow)) is None
    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    plain = gpt_oss.plain(tmp_path / "plain")
    assert calibrated(str(plain)) == OWN
    released = gguf_models.build("gpt-oss-mxfp4", tmp_path / "released", dtype="bfloat16")
    assert calibrated(str(released)) == IMPORTANCE


def test_a_quantized_model(tmp_path: Path) -> None:
    made = quantizing.quantize(tiny_folder(), "fp8-dynamic", tmp_path / "fp8").out
    assert calibrated(str(made)) == ["--recipe", "w4g128-awq-gptq", "--requantize"]


def test_the_line_of_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    call = quantizing.caller(monkeypatch, capfd)
    model, out = gpt_oss.plain(tmp_path / "plain"), tmp_path / "own.jsonl"
    said = call("sample", model, "--samples", 1, "--length", 8, "-o", out)
    line = f"next: qtool quantize {model} {' '.join(OWN)} --calibration {out}"
    assert said.out.splitlines()[-1] == f"{line} --samples 1 --length 8"
