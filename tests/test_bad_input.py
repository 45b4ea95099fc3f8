"""What users get wrong: one sentence, exit status 1, and no folder left, not even a hidden one."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import quantizing
from quantizing import Call, Called
from safetensors.numpy import load_file, save_file

import qtool
from qtool.formats import safetensors_writer

RECIPES = ("w4g128-rtn", "w4g128-gptq", "w4g128-awq")
Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good model, and good.txt inside of it."""
    folder = quantizing.build("llama", tmp_path_factory.mktemp("original"))
    quantizing.text_file(folder / "good.txt", 8000)
    return folder


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return quantizing.caller(monkeypatch, capfd)


def arguments(model: Path, recipe: str, out: Path, *more: object) -> list[str]:
    small = ["--samples", 4, "--length", 64, "--calibration", model / "good.txt"]
    group = ["--set", "weights.group_size=32"]
    return [str(a) for a in ("quantize", model, "--recipe", recipe, *group, *small, *more,
                             "-o", out)]  # fmt: skip


def snapshot(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


KEPT = "what is finished is kept ("


def assert_goes_on(
    said: Called, tmp_path: Path, before: set[str], call: Call, arguments: list[str]
) -> None:
    """What a run left is hidden and said, and once the cause is gone the same command goes on."""
    left = snapshot(tmp_path) - before
    assert all(path.startswith(".out.partial") for path in left)
    assert (KEPT in said.err) == bool(left)
    assert call(*arguments).status == 0
    assert not any(path.startswith(".") for path in snapshot(tmp_path))


def assert_one_sentence(said: Called, *parts: str) -> None:
    """Exit status 1, nothing on stdout, and one `error: ` line that holds `parts`."""
    assert said.status == 1 and said.out == ""
    lines = said.err.splitlines()
    if lines and lines[-1].startswith(KEPT):
        lines.pop()
    assert lines and lines[-1].startswith("error: "), said.err
    # Notes of the plan and lines of progress may come before it, and nothing else.
    usual = ("note: ", "warning: ", "  block ")
    before = [line for line in lines[:-1] if not line.startswith(usual)]
    assert not before, said.err
    assert "Traceback" not in said.err
    for part in parts:
        assert part in lines[-1], said.err


def test_the_good_model_works(model: Path, tmp_path: Path, call: Call) -> None:
    """Else every failure below could be one of the fixture."""
    for recipe in RECIPES:
        assert call(*arguments(model, recipe, tmp_path / recipe)).status == 0


def replace(model: Path, name: str, index: tuple[int, ...], value: float, dtype: Any) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors[name] = tensors[name].astype(dtype)
    tensors[name][index] = value
    save_file(tensors, model / "model.safetensors")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    ("name", "index", "value", "dtype"),
    [
        (Q, (5, 7), float("nan"), np.float32),
        (Q, (0, 63), float("inf"), np.float16),
        (NORM, (9,), float("-inf"), np.float32),
    ],
)
def test_no_number(
    recipe: str, name: str, index: tuple[int, ...], value: float, dtype: Any,
    model: Path, tmp_path: Path, call: Call,
) -> None:  # fmt: skip
    replace(model, name, index, value, dtype)
    before = snapshot(tmp_path)
    said = call(*arguments(model, recipe, tmp_path / "out"))
    where = f"tensor {name!r} holds {value} at {list(index)}"
    assert_one_sentence(said, str(model / "model.safetensors"), where, "must be finite")
    assert snapshot(tmp_path) == before


def test_a_matrix_is_read_once(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for what is no number takes no second reading of the file."""
    read: list[str] = []
    raw = quantizing.pipeline.Checkpoint.raw

    def count(checkpoint: Any, name: str) -> Any:
        if checkpoint.folder == model:
            read.append(name)
        return raw(checkpoint, name)

    monkeypatch.setattr(quantizing.pipeline.Checkpoint, "raw", count)
    assert call(*arguments(model, "w4g128-rtn", tmp_path / "out")).status == 0
    assert len(read) == len(set(read)) and Q in read


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_number_in_a_row_that_no_text_uses(
    recipe: str, model: Path, tmp_path: Path, call: Call
) -> None:
    replace(model, EMBEDDING, (95, 3), float("nan"), np.float32)
    said = call(*arguments(model, recipe, tmp_path / "out"))
    assert_one_sentence(said, f"tensor {EMBEDDING!r} holds nan at [95, 3]")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", RECIPES)
def test_truncated_file(recipe: str, model: Path, tmp_path: Path, call: Call) -> None:
    path = model / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    before = snapshot(tmp_path)
    said = call(*arguments(model, recipe, tmp_path / "out"))
    assert_one_sentence(said, str(path), "bytes")
    assert snapshot(tmp_path) == before


def no_weights(model: Path) -> list[str]:
    (model / "model.safetensors").unlink()
    return ["no *.safetensors file here"]


def pickle_only(model: Path) -> list[str]:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    return ["pytorch_model.bin", "a Python pickle", "save_pretrained"]


def empty_file(model: Path) -> list[str]:
    (model / "model.safetensors").write_bytes(b"")
    return [str(model / "model.safetensors")]


def missing_shard(model: Path) -> list[str]:
    index = {"weight_map": {Q: "model-00001-of-00001.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    return ["model-00001-of-00001.safetensors", "missing"]


def broken_config(model: Path) -> list[str]:
    (model / "config.json").write_text("{")
    return [str(model / "config.json")]


def already_quantized(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq"}
    (model / "config.json").write_text(json.dumps(config))
    return ["already quantized", "awq"]


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-gptq"])
@pytest.mark.parametrize(
    "damage",
    [no_weights, pickle_only, empty_file, missing_shard, broken_config, already_quantized],
)
def test_no_model(
    damage: Callable[[Path], list[str]], recipe: str, model: Path, tmp_path: Path, call: Call
) -> None:
    parts = damage(model)
    before = snapshot(tmp_path)
    assert_one_sentence(call(*arguments(model, recipe, tmp_path / "out")), *parts)
    assert snapshot(tmp_path) == before


def no_config(model: Path) -> list[str]:
    (model / "config.json").unlink()
    return ["no config.json"]


def no_tokenizer(model: Path) -> list[str]:
    (model / "tokenizer.json").unlink()
    return [str(model), "no tokenizer"]


def large_tokenizer(model: Path) -> list[str]:
    path = model / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] = {c: i + 50 for c, i in content["model"]["vocab"].items()}
    path.write_text(json.dumps(content))
    return ["its tokenizer gives the id", "vocabulary of 96"]


def other_config(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))
    return [".weight", "96", "128", "config"]


def too_few_tensors(model: Path) -> list[str]:
    tensors = load_file(model / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, model / "model.safetensors")
    return [f"no tensor for {NORM!r}", "incomplete"]


def unknown_architecture(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "frobnicator", "architectures": ["FrobnicatorForCausalLM"]}
    (model / "config.json").write_text(json.dumps(config))
    return [str(model / "config.json"), "'frobnicator'", "RTN can quantize it"]


def too_deep(model: Path) -> list[str]:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    return ["model.layers.3", "config.json"]


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq"])
@pytest.mark.parametrize(
    "damage",
    [
        no_config,
        no_tokenizer,
        large_tokenizer,
        other_config,
        too_few_tensors,
        unknown_architecture,
        too_deep,
    ],
)
def test_no_forward_pass(
    damage: Callable[[Path], list[str]], recipe: str, model: Path, tmp_path: Path, call: Call
) -> None:
    """Calibrated methods explain why they cannot run it; rounding to nearest still does."""
    parts = damage(model)
    before = snapshot(tmp_path)
    assert_one_sentence(call(*arguments(model, recipe, tmp_path / "out")), *parts)
    assert snapshot(tmp_path) == before
    assert call(*arguments(model, "w4g128-rtn", tmp_path / "rtn")).status == 0


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        (["--set", "weights.bitz=4"], ["--set weights.bitz=4", "unknown key", "bits"]),
        (["--set", "method=magic"], ["--set method=magic", "'magic' is unknown", "gptq"]),
        (["--set", "weights.bits=9"], ["weights.bits", "8"]),
        (["--set", "weights.group_size=128"], ["64", "not divisible by group_size 128"]),
        (["--samples", "5000"], ["enough for", "but 5000 are asked for", "--samples"]),
        (["--calibration", "/nonexistent/x.txt"], ["/nonexistent/x.txt", "no such file"]),
        (["--stats", "/nonexistent/s"], ["/nonexistent/s"]),
        (["--max-shard-size", "many"], ["'many' is no size"]),
        (["--device", "cuda"], ["no NVIDIA GPU is here", "leave --device out"]),
        (["--device", "tpu"], ["--device tpu", "auto, cpu or cuda"]),
    ],
)
def test_what_cannot_be_asked_for(
    more: list[str], parts: list[str], model: Path, tmp_path: Path, call: Call
) -> None:
    before = snapshot(tmp_path)
    given = arguments(model, "w4g128-gptq", tmp_path / "out", *more)
    assert_one_sentence(call(*given), *parts)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-gptq"])
def test_missing_model(recipe: str, tmp_path: Path, call: Call) -> None:
    missing = tmp_path / "missing"
    said = call("quantize", missing, "--recipe", recipe, "-o", tmp_path / "out")
    assert_one_sentence(said, f"{missing}: no such file or folder")
    said = call("quantize", f"{missing}.safetensors", "--recipe", recipe, "-o", tmp_path / "out")
    assert_one_sentence(said, "missing.safetensors: no such file or folder")
    assert not list(tmp_path.iterdir())


def test_recipe_files(model: Path, tmp_path: Path, call: Call) -> None:
    """The sentence names file, line and key."""
    path = tmp_path / "mine.yaml"
    path.write_text("method: gptq\nformat: gptq\nweights:\n  bits: 4\n  grup_size: 32\n")
    said = call("quantize", model, "--recipe", path, "-o", tmp_path / "out")
    assert_one_sentence(said, f"{path}:5: weights.grup_size: unknown key; did you mean group_size?")
    said = call("quantize", model, "--recipe", "w4g128-gtpq", "-o", tmp_path / "out")
    assert_one_sentence(said, "recipe 'w4g128-gtpq' does not exist", "w4g128-gptq")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-gptq"])
def test_taken_names(recipe: str, model: Path, tmp_path: Path, call: Call) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert call(*arguments(model, recipe, out)).status == 0  # an empty folder is no harm
    files = quantizing.files(tmp_path)
    said = call(*arguments(model, recipe, out))
    assert_one_sentence(said, str(out), "exists and is not empty")
    file = tmp_path / "file"
    file.write_text("mine")
    said = call(*arguments(model, recipe, file))
    assert_one_sentence(said, str(file), "a file is in the way")
    said = call(*arguments(model, recipe, file / "below"))
    assert_one_sentence(said, str(file / "below"), "cannot be made")
    assert quantizing.files(tmp_path) == files | {"file": b"mine"}


def test_a_link_to_an_empty_folder(model: Path, tmp_path: Path, call: Call) -> None:
    """The artifact goes where the link leads, and the link stays."""
    real, link = tmp_path / "disk" / "real", tmp_path / "link"
    real.mkdir(parents=True)
    link.symlink_to(real)
    said = call(*arguments(model, "w4g128-rtn", link))
    assert said.status == 0, said.err
    assert link.is_symlink() and (real / "qtool.json").is_file()
    assert snapshot(tmp_path / "disk") >= {"real", "real/model.safetensors"}
    assert {path.name for path in tmp_path.iterdir()} == {"disk", "link", "model"}


def test_a_mount_point_is_refused_before_the_work(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "mounted"
    out.mkdir()
    monkeypatch.setattr("qtool.runs.staging.os.path.ismount", lambda path: str(path) == str(out))
    monkeypatch.setattr(
        "qtool.runs.pipeline.Checkpoint.open", lambda _: pytest.fail("work was done")
    )
    said = call(*arguments(model, "w4g128-rtn", out))
    assert_one_sentence(said, f"{out}: is a mount point", "inside it")


def test_a_name_that_cannot_be_given(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names what was asked for, not the hidden folder."""

    def refuse(one: Path, *_: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy", str(one))

    monkeypatch.setattr("qtool.runs.staging.os.rename", refuse)
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    said = call(*asked)
    assert_one_sentence(said, f"{tmp_path / 'out'}: the finished folder cannot be given this name")
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_parent(model: Path, tmp_path: Path, call: Call) -> None:
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o500)
    said = call(*arguments(model, "w4g128-rtn", parent / "out"))
    assert_one_sentence(said, str(parent / "out"), "cannot be made")


def test_a_place_where_nothing_can_be_made(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(tmp_path))

    monkeypatch.setattr("qtool.runs.workspace.Path.mkdir", refuse)
    before = snapshot(tmp_path)
    said = call(*arguments(model, "w4g128-rtn", tmp_path / "new" / "out"))
    assert_one_sentence(said, str(tmp_path / "new" / "out"), "cannot be made: Permission denied")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("after", [0, 20_000, 80_000])
def test_full_disk(
    recipe: str, after: int, model: Path, tmp_path: Path, call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    left = after
    pwrite = os.pwrite

    def fill(descriptor: int, data: Any, position: int) -> int:
        nonlocal left
        if left < len(data):
            raise OSError(errno.ENOSPC, "No space left on device")
        left -= len(data)
        return pwrite(descriptor, data, position)

    monkeypatch.setattr(safetensors_writer.os, "pwrite", fill)
    before = snapshot(tmp_path)
    asked = arguments(model, recipe, tmp_path / "out")
    said = call(*asked)
    assert_one_sentence(said, str(tmp_path), "the disk is full")
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


def test_disk_that_is_full_at_the_end(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors fit, the tokenizer does not."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    said = call(*asked)
    assert_one_sentence(said, f"{tmp_path / 'out'}: the disk is full")
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))
sys.argv = ["qtool", *sys.argv[1:]]
from qtool.cli.main import main
main()
"""


def test_files_that_may_not_grow(model: Path, tmp_path: Path) -> None:
    """A limit of the operating system, in a process of its own: no stand-in is involved."""
    before = snapshot(tmp_path)
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, *arguments(model, "w4g128-rtn", tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = Called(result.returncode, result.stdout, result.stderr)
    assert_one_sentence(said, "cannot be written", "File too large")
    assert snapshot(tmp_path) == before


def test_interrupted(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(quantizing.Sink, "close", stop)
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    said = call(*asked)
    assert said.status == 130 and "Traceback" not in said.err
    monkeypatch.undo()
    assert_goes_on(said, tmp_path, before, call, asked)


STOPPED = """
import os, signal, sys
from qtool.runs.sink import Sink
from qtool.cli.main import main
number = signal.Signals[sys.argv[1]]
signal.signal(number, signal.SIG_DFL)  # a signal that nohup ignores stays ignored otherwise
Sink.close = lambda *_: os.kill(os.getpid(), number)
sys.argv = ["qtool", *sys.argv[2:]]
main()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_ended_by_a_signal(name: str, model: Path, tmp_path: Path, call: Call) -> None:
    """As job schedulers and closed terminals do: the work is kept, and the status tells."""
    before = snapshot(tmp_path)
    asked = arguments(model, "w4g128-rtn", tmp_path / "out")
    result = subprocess.run(
        [sys.executable, "-c", STOPPED, name, *asked],
        # The package under test, not whatever the working folder holds.
        cwd=model,
        env={**os.environ, "PYTHONPATH": str(Path(qtool.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 128 + signal.Signals[name] and "Traceback" not in result.stderr
    said = Called(result.returncode, result.stdout, result.stderr)
    assert_goes_on(said, tmp_path, before, call, asked)


def test_a_failed_run_closes_its_files(
    model: Path, tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace(model, Q, (5, 7), float("nan"), np.float32)
    sinks: list[quantizing.Sink] = []
    made = quantizing.Sink.__init__

    def remember(sink: quantizing.Sink, *given: Any) -> None:
        made(sink, *given)
        sinks.append(sink)

    monkeypatch.setattr(quantizing.Sink, "__init__", remember)
    assert call(*arguments(model, "w4g128-rtn", tmp_path / "out")).status == 1
    (sink,) = sinks
    assert not sink.writer._files


def test_bugs_leave_no_artifact(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not explained away, and still no half artifact has the name of a whole one."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(quantizing.Sink, "close", fail)
    before = snapshot(tmp_path)
    with pytest.raises(ZeroDivisionError):
        quantizing.quantize(model, "w4g128-rtn", tmp_path / "out", "weights.group_size=32")
    assert all(path.startswith(".out.partial") for path in snapshot(tmp_path) - before)
