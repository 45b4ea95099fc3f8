"""What a run says at its end."""

from pathlib import Path

from typer.testing import CliRunner

from qtool import api
from qtool.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.runs.summary import by_kind


def test_notes_of_many_layers_are_one_line() -> None:
    zero = (
        "the input of model.layers.{}.self_attn.o_proj.weight: {} of 768 channels are always zero"
    )
    notes = [zero.format(n, 192) for n in range(30)]
    notes += [zero.format(30, 64), "1 layer is rounded coarsely: model.layers.2.mlp.up_proj"]
    assert by_kind(notes) == [f"{zero.format('*', 192)} (30 layers)", *notes[30:]]


def test_scales_and_the_text_are_told(tmp_path: Path) -> None:
    made = api.quantize("tiny", "kv-fp8", tmp_path / "a", samples=1, length=16)
    n = len(scales(tmp_path / "a")) // 2
    said = "\n".join(made.lines())
    assert f"note: {2 * n} scales of keys and values, of {n} layers, were measured" in said
    assert "calibrated on Python's own documentation, which is good for trying only" in said
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 20, encoding="utf-8")
    made = api.quantize(
        "tiny", "kv-fp8", tmp_path / "b", calibration=str(text), samples=1, length=16
    )
    assert not any("documentation" in note for note in made.notes)
    made = api.quantize("tiny", "w8-rtn", tmp_path / "c")
    assert not any("documentation" in note or "scales of keys" in note for note in made.notes)


def scales(folder: Path) -> list[str]:
    names = Checkpoint.open(folder).tensors
    return [name for name in names if name.endswith(("k_scale", "v_scale"))]


def test_plan_advises_and_a_run_says_one_thing(tmp_path: Path) -> None:
    """Advice on --dtype is no line above a command without it."""
    note = "unless told --dtype float16"
    planned = CliRunner().invoke(app, ["plan", "tiny", "--recipe", "w4g128-gptq"])
    assert note in " ".join(planned.output.split())
    made = CliRunner().invoke(
        app, ["quantize", "tiny", "--recipe", "w4g64-rtn", "-o", str(tmp_path / "x")]
    )
    assert made.exit_code == 0 and "next: vllm serve" in made.output
    assert "--dtype" not in made.output
    assert note in (tmp_path / "x" / "README.md").read_text(encoding="utf-8")
