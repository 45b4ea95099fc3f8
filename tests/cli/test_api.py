"""qtool from Python: what `import qtool` gives, and that it does what the commands do."""

import inspect
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import qtool
from qtool.api.words import told
from qtool.cli.main import app
from qtool.errors import QtoolError, SourceError, UsageError
from qtool.workspaces import naming
from support.runs.quantizing import first_blocks_of_tiny

NAME = "model.layers.0.mlp.up_proj.weight"


def test_importing_it_imports_little() -> None:
    script = (
        "import sys, qtool; assert 'quantize' in qtool.__all__; print(qtool.__version__); "
        "print(sorted({'numpy', 'torch', 'typer', 'huggingface_hub', 'rich'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert result.stdout.split("\n")[:2] == [qtool.__version__, "[]"]
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        qtool.nothing  # noqa: B018
    assert all(getattr(qtool, name) is not None for name in qtool.__all__)


def test_quantize_open_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    made = qtool.quantize("tiny", "w8-rtn", tmp_path / "a", changes=["weights.group_size=64"])
    assert made.artifact == str(tmp_path / "a") and made.json()["layers"]
    by_command = tmp_path / "b"
    asked = ["tiny", "--recipe", "w8-rtn", "--set", "weights.group_size=64", "-o", str(by_command)]
    assert CliRunner().invoke(app, ["quantize", *asked]).exit_code == 0
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (by_command / name).read_bytes()
    model, source = qtool.open(made.artifact), qtool.open("tiny")
    assert model.format.startswith(("awq", "gptq", "compressed"))
    assert source.format == "dense" and model.tensors[NAME].scheme is not None
    exact, near = source.float32(NAME), model.float32(NAME)
    assert exact.shape == near.shape == model.tensors[NAME].shape and near.dtype == np.float32
    assert 0 < np.abs(exact - near).max() < 0.05 * np.abs(exact).max()
    codes = model.codes(NAME)
    assert codes is not None and codes.codes.max() <= 255 and source.codes(NAME) is None
    assert np.array_equal(codes.dequantize(), near)
    with pytest.raises(SourceError, match="has no tensor 'nothing'"):
        model.float32("nothing")
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    found = qtool.evaluate(made.artifact, text, against="tiny", windows=1, length=32)
    assert found.found["kld"]["mean"] < 0.1 and found.json()["size_bytes"] > 0
    said = capsys.readouterr()
    assert said.out == said.err == ""


def test_the_callers_threads_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        qtool.generate("tiny", "def main(", tokens=1, threads=2)
        assert torch.get_num_threads() == 3
        qtool.evaluate("tiny", text, windows=1, length=32, threads=2)
        assert torch.get_num_threads() == 3
        qtool.quantize(
            "tiny", "w4g128-awq", tmp_path / "a", samples=1, length=16, calibration=text,
            changes=["awq.grid=1"],
        )  # fmt: skip
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_gguf_and_a_modelfile(tmp_path: Path) -> None:
    made = qtool.quantize("tiny", "q4_k_m", tmp_path / "t.gguf", modelfile=True)
    model = qtool.open(made.artifact)
    assert model.format == "gguf" and model.metadata["general.architecture"] == "llama"
    name = "blk.0.ffn_up.weight"
    assert model.float32(name).shape == tuple(model.tensors[name].shape)
    assert (tmp_path / "t.Modelfile").read_text().startswith("FROM ./t.gguf\n")
    with pytest.raises(QtoolError, match=r"^modelfile=True would change nothing"):
        qtool.quantize("tiny", "w4g128-rtn", tmp_path / "x", modelfile=True)


def test_one_change_is_a_text(tmp_path: Path) -> None:
    made = qtool.quantize("tiny", "w8-rtn", tmp_path / "a", changes="weights.group_size=64")
    assert "64" in made.layers[0].scheme


def test_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writes what the command does, from the same costs."""
    costs, model = tmp_path / "costs.json", first_blocks_of_tiny(tmp_path / "model", 2)
    found = qtool.fit(
        model, tmp_path / "a.yaml", "q4_k_m", size="1MB", samples=1, length=32, costs=costs
    )
    assert found.json()["size_bytes"] == found.made.size_bytes <= 1e6 and found.loss > 0
    out = tmp_path / "b.yaml"
    asked = [str(model), "--recipe", "q4_k_m", "--size", "1MB", "--samples", "1", "--length", "32"]
    assert CliRunner().invoke(
        app, ["fit", *asked, "--costs", str(costs), "-o", str(out), "--json"]
    ).exit_code == 0  # fmt: skip
    assert found.out.read_bytes() == out.read_bytes()
    with pytest.raises(QtoolError, match=r"^give either size, such as .* or bits, such"):
        qtool.fit(model, tmp_path / "c.yaml")
    for bad in (float("nan"), -3, 100, "5"):
        with pytest.raises(
            QtoolError, match=f"^bits.*: expected a number( from 0.1 to 32|, found '{bad}')"
        ):
            qtool.fit(model, tmp_path / "c.yaml", bits=bad)  # type: ignore[arg-type]
    few = {"samples": 1, "length": 32, "types": ["q3_k", "q6_k"]}
    other = qtool.fit(model, tmp_path / "d.yaml", "q4_k_m", size=1_000_000, **few)
    assert {one.name for one in other.chosen.values()} <= {"Q3_K", "Q6_K"}
    assert other.made.size_bytes <= 1e6
    capsys.readouterr()
    qtool.fit(model, tmp_path / "c.yaml", "q4_k_m", bits=5, samples=1, length=32, costs=costs)
    said = capsys.readouterr()
    assert said.out == said.err == ""


def test_errors_are_qtools() -> None:
    with pytest.raises(QtoolError, match="no such file or folder"):
        qtool.open("/nothing/here")
    with pytest.raises(QtoolError, match="no such text file"):
        qtool.evaluate("tiny", "/nothing/here.txt")
    with pytest.raises(QtoolError, match="no hub id"):
        qtool.download("nothing")
    text = Path(__file__)
    for call, said in (
        (lambda: qtool.evaluate("tiny", text, windows=0), "windows 0: expected 1 or more"),
        (lambda: qtool.evaluate("tiny", text, length=4), "length 4: expected 8 or more"),
        (lambda: qtool.generate("tiny", "def", tokens=0), "tokens 0: expected 1 or more"),
        (lambda: qtool.generate("tiny", "def", threads=-1), "threads -1: expected"),
        (lambda: qtool.quantize("tiny", "w8-rtn", "x", threads=-1), "threads -1: expected"),
    ):
        with pytest.raises(QtoolError, match=said):
            call()


def test_plan_verify_convert_compare(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "cache"))
    planned = qtool.plan("tiny", "w4g128-rtn", changes="weights.group_size=64", engine="vllm", tp=2)
    made = qtool.quantize("tiny", "w4g128-rtn", tmp_path / "a", changes="weights.group_size=64")
    assert planned.size_bytes == made.size_bytes
    assert planned.bits_per_weight == made.bits_per_weight
    said_of = planned.json()["findings"]
    assert [one.check for one in planned.findings] == [one["check"] for one in said_of]
    assert qtool.plan("tiny", "q4_k_m").size_bytes == qtool.quantize(
        "tiny", "q4_k_m", tmp_path / "b.gguf"
    ).size_bytes  # fmt: skip
    verdict = qtool.verify(made.artifact, against="tiny", engine="vllm")
    assert verdict.ok and len(verdict.layers) == 28
    other = qtool.convert(made.artifact, "gptq-v2", tmp_path / "c")
    assert other.certificate.exact and Path(other.artifact) == tmp_path / "c"
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 40)
    names = [made.artifact, tmp_path / "b.gguf"]
    found = qtool.compare(names, text, against="tiny", windows=1, length=32)
    assert [one.artifact for one in found.found] == [str(name) for name in names]
    assert found.front <= set(map(str, names)) and not found.failed
    assert [row["front"] for row in found.json()["artifacts"]].count(True) == len(found.front)
    said = capsys.readouterr()
    assert said.out == said.err == ""


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    for call, said in (
        (
            lambda: qtool.plan("tiny", "w4g128-rtn", tp=2),
            '^tp is asked without engine; .* engine="vllm"$',
        ),
        (lambda: qtool.plan("tiny", "w4g128-rtn", threads=0), "threads 0: expected 1 or more"),
        (lambda: qtool.convert("tiny", "gptq", tmp_path / "a", dtype="int8"), '^dtype="int8": '),
        (lambda: qtool.convert("tiny", "gptq", tmp_path / "a", assume="v3"), '^assume="v3": '),
        (lambda: qtool.compare([], "text.txt", against="tiny"), "none are named"),
        (lambda: qtool.verify("tiny", tp=2), '^tp is asked without engine; .* engine="vllm"$'),
    ):
        with pytest.raises(QtoolError, match=said):
            call()


@pytest.mark.parametrize(
    ("said", "told_there"),
    [
        ("x: exists; choose another -o, or give --replace",
         "x: exists; choose another out, or give replace=True"),
        ("--max-ram: '2x' is no size", "max_ram: '2x' is no size"),
        ("--device tpu: expected auto, cpu or cuda", 'device="tpu": expected auto, cpu or cuda'),
        ("-o f.txt: a recipe's file", "out=\"f.txt\": a recipe's file"),
        ("take `--set gptq.act_order=false`", 'take `changes=["gptq.act_order=false"]`'),
        ("leave --device out, or end what else", "leave device out, or end what else"),
        ("a chat, which --calibration takes; here", "a chat, which calibration takes; here"),
        ("none of --recipe (q4_0, q4_1) is", "none of recipe (q4_0, q4_1) is"),
        ("first (qtool convert FILE --to hf -o D)", "first (qtool convert FILE --to hf -o D)"),
        ("-o out: exists", 'out="out": exists'),
        ("with --set a.b=1 --set 'c.d=x y' goes", 'with changes=["a.b=1", "c.d=x y"] goes'),
        ("--set a=[b, c]: a: it is", 'changes=["a=[b, c]"]: a: it is'),
        (
            "--set a=[{b: '*.c', d: {e: [2, 8]}}], --set f={g: 4, h: i}: do not go",
            "changes=[\"a=[{b: '*.c', d: {e: [2, 8]}}]\"], changes=[\"f={g: 4, h: i}\"]: do not go",
        ),
        ("write --set a=[b", 'write changes=["a=[b"]'),
        ("with --set 'a.b=\"é\"' goes", 'with changes=["a.b=\\"é\\""] goes'),
        ("--set a: expected key=value", "changes: a: expected key=value"),
        ("this command with --samples 4 --calibration '/a b.txt' goes on with it",
         'this call with samples=4 calibration="/a b.txt" goes on with it'),
        ("--calibration FILE takes it (--samples, --length)",
         "calibration FILE takes it (samples, length)"),
        # Of engines, of other commands, and in names.
        ("unless told --dtype float16", "unless told --dtype float16"),
        ("`qtool calibrate MODEL -o STATS --samples 4` and --samples 4",
         "`qtool calibrate MODEL -o STATS --samples 4` and samples=4"),
        ("a--replace/b-o: no such file", "a--replace/b-o: no such file"),
    ],
)  # fmt: skip
def test_errors_in_the_words_of_python(said: str, told_there: str) -> None:
    named = inspect.signature(qtool.quantize).parameters
    flags = {name: isinstance(one.default, bool) for name, one in named.items()}
    assert told(said, flags) == told_there


def test_notes_of_errors_in_the_words_of_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that the command prints."""

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(naming, "give_name", full)
    with pytest.raises(QtoolError, match="the disk is full") as error:
        qtool.quantize("tiny", "w8-rtn", tmp_path / "a")
    (note,) = error.value.__notes__
    assert note.endswith("the same call goes on from there, fresh=True starts over")
    with pytest.raises(QtoolError) as error:
        CliRunner().invoke(
            app, ["quantize", "tiny", "--recipe", "w8-rtn", "-o", str(tmp_path / "b")],
            catch_exceptions=False,
        )  # fmt: skip
    (note,) = error.value.__notes__
    assert note.endswith("the same command goes on from there, --fresh starts over")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"threads": "2"}, "threads: expected an integer, found '2'"),
        ({"samples": 1.5}, "samples: expected an integer, found 1.5"),
        ({"samples": True}, "samples: expected an integer, found True"),
        ({"replace": 1}, "replace: expected True or False, found 1"),
        ({"max_shard_size": 500}, "max_shard_size: expected a text, found 500"),
        ({"max_ram": 1.5}, "max_ram: expected a text or an integer, found 1.5"),
        ({"calibration": ["a", "b"]}, "calibration: expected a text or a path, found ['a', 'b']"),
        ({"seed": -1}, "seed=-1: expected 0 to 4,294,967,295"),
        ({"length": 4}, "length=4: expected 8 to 1,048,576"),
        ({"changes": [("a.b", 4)]}, "changes: expected a list of texts, found [('a.b', 4)]"),
        ({"changes": {"a.b": 4}}, "changes: expected a list of texts, found {'a.b': 4}"),
    ],
)
def test_arguments_of_other_types(given: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        qtool.quantize("tiny", "w4g128-rtn", tmp_path / "out", **given)
    assert str(error.value) == said and not list(tmp_path.iterdir())


def test_arguments_that_there_are_not() -> None:
    with pytest.raises(TypeError, match=r"quantize\(\) .*'recip'"):
        qtool.quantize("tiny", recip="w4g128-rtn")


def test_what_is_a_number_or_a_list(tmp_path: Path) -> None:
    """Numbers of numpy, tuples and sets."""
    for number, changes in enumerate([("weights.group_size=64",), {"weights.group_size=64"}]):
        made = qtool.quantize(
            "tiny", "w4g128-rtn", tmp_path / str(number), threads=np.int64(1), changes=changes
        )
        assert Path(made.artifact).is_dir()
