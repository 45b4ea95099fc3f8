"""What tests of rotations have in common."""

from pathlib import Path

from support.runs import quantizing

CENTERED = ("opt", "gpt_neox", "stablelm")


def quiet(_: str) -> None:
    pass


def settings(models: Path) -> list[str]:
    text = models / "text.txt"
    if not text.exists():
        quantizing.text_file(text)
    return [f"calibration.source={text}", "calibration.samples=4", "calibration.length=64"]
