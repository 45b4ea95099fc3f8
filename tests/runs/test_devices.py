"""Outputs that are devices: nobody is told to remove one."""

import pytest

from support.runs import quantizing
from support.runs.bad_models import assert_one_sentence
from support.runs.quantizing import Call


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return quantizing.caller(monkeypatch, capfd)


@pytest.mark.parametrize(
    "words",
    [
        ["quantize", "tiny", "--recipe", "q8_0", "-o", "/dev/null"],
        ["calibrate", "tiny", "-o", "/dev/null"],
    ],
)
def test_a_device(words: list[str], call: Call) -> None:
    assert_one_sentence(call(*words), "/dev/null: is no plain file, but a device")
