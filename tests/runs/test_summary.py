"""What a run says at its end."""

import json
from dataclasses import replace
from pathlib import Path

from typer.testing import CliRunner

from qtool import api
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import app
from qtool.messages.numbered import by_kind
from qtool.messages.summary import LayerReport


def test_notes_of_many_layers_are_one_line() -> None:
    zero = (
        "the input of model.layers.{}.self_attn.o_proj.weight: {} of 768 channels are always zero"
    )
    notes = [zero.format(n, 192) for n in range(30)]
    notes += [zero.format(30, 64), "1 layer is rounded coarsely: model.layers.2.mlp.up_proj"]
    assert by_kind(notes) == [f"{zero.format('*', 192)} (30 layers)", *notes[30:]]


def test_notes_of_one_layer_are_not_told_as_of_many() -> None:
    experts = [f"model.layers.0.mlp.experts.{n}.up_proj: odd" for n in range(8)]
    assert by_kind(experts) == ["model.layers.*.mlp.experts.*.up_proj: odd (8 times)"]
    assert by_kind(["same", "same"]) == ["same (2 times)"]
    versions = ["torch 2.1.0 differs", "torch 2.9.0 differs"]
    assert by_kind(versions) == versions


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


def test_a_run_and_verify_count_alike(tmp_path: Path) -> None:
    """And a share of something else says so."""
    dense = ('overrides=[{match: "*.down_proj", dense: true}]',)
    made = api.quantize("tiny", "w8-rtn", tmp_path / "a", changes=dense)
    (line,) = [one for one in made.lines() if one.startswith("tensors: ")]
    share = line.partition("dropped; ")[2].removesuffix(" left unquantized")
    assert share.endswith("% of the weights") and share != "14.3% of the weights"
    said = CliRunner().invoke(app, ["verify", str(tmp_path / "a")]).stdout.splitlines()
    assert f": gptq, {share} unquantized, " in said[-1]
    (told,) = [one for one in said if one.startswith("warning (unquantized): ")]
    assert "% of the weights in the blocks' linear layers, which alone are counted here" in told
    cache = ("kv_cache={bits: 8, type: float}",)
    made = api.quantize("tiny", "w8a16-ct", tmp_path / "b", changes=cache, samples=1, length=16)
    verdict = api.verify(tmp_path / "b")
    assert scales(tmp_path / "b") and verdict.unquantized_share == made.unquantized_share


def test_what_errors_are_of(tmp_path: Path) -> None:
    """Of outputs where a method asked for sums of inputs, of weights else; of each where both."""
    few = {"samples": 1, "length": 64}
    for number, (chosen, sets, of) in enumerate((
        ("w8-rtn", (), "weights"),
        ("w8a8-smoothquant", ("smooth.alpha=0.5",), "weights"),
        ("w8a8-smoothquant", ("smooth.grid=1",), "outputs"),
    )):  # fmt: skip
        out = tmp_path / str(number)
        made = api.quantize("tiny", chosen, out, changes=sets, **few)
        lines = [line for line in made.lines() if line.startswith("relative error")]
        assert len(lines) == 1 and lines[0].startswith(f"relative error of {of}: median 0.0")
        assert {layer.of for layer in made.layers} == {of}
        assert {row["of"] for row in json.loads((out / "qtool.json").read_text())["layers"]} == {of}
        assert f".weight` | {of} | 4 | 0.0" in (out / "README.md").read_text()
    layers = [LayerReport("a", "w4", 0.2, "outputs"), LayerReport("b", "w4", 0.3, "weights"),
              LayerReport("c", "w4", 0.1, "outputs")]  # fmt: skip
    said = "\n".join(replace(made, layers=layers).lines())
    assert "relative error of outputs, 2 of the layers: median 0.2000, worst 0.2000 (a)\n" in said
    assert "relative error of weights, 1 of the layers: median 0.3000, worst 0.3000 (b)\n" in said


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
