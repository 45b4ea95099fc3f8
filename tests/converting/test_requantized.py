"""--requantize: a quantized checkpoint as a source, dequantized as it is read."""

import json
from pathlib import Path

import numpy as np
import pytest

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting.request import Request
from qtool.converting.run import convert
from qtool.converting.source import opened
from qtool.converting.targets import target
from qtool.converting.view import Plain
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.messages.progress import Progress
from qtool.verification.run import verify_artifact
from support.converting import converting
from support.gguf import gguf_from_hf, gguf_models
from support.gguf.families import later
from support.runs import quantizing
from support.runs.quantizing import Call

QUIET = Progress(quiet=True)
KINDS: dict[str, tuple[str, ...]] = {
    "gptq": ("format=gptq", "weights.symmetric=true"),
    "awq": ("format=awq", "weights.symmetric=false"),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Artifacts of one block of `tiny`, a DeepSeek V4 as it is released, and of each what
    `convert --to hf` makes of it, NAME-hf."""
    root = tmp_path_factory.mktemp("sources")
    converting.artifacts(root, KINDS)
    quantizing.quantize(root / "model", "fp8-block-hf", root / "fp8", "indivisible=dense")
    quantizing.quantize(root / "model", "w4g64-mlx-rtn", root / "mlx")
    model = gguf_models.build("deepseek-v4", root / "v4", dtype="bfloat16")
    later.as_released(model, root / "v4-numbers")
    for folder in (model, root / "v4-numbers"):
        quantizing.add_tokenizer(folder)
    for name in ("gptq", "awq", "fp8", "mlx", "v4"):
        convert(Request(root / name, target("hf"), root / f"{name}-hf"), QUIET)
    return root


def view_of(folder: Path) -> Plain:
    view = opened(folder, True)
    assert isinstance(view, Plain)
    return view


# DeepSeek V4's release


def test_numbers_of_a_release(sources: Path) -> None:
    """FP8 in blocks and four bits in groups, both with scales of powers of two."""
    artifact = Artifact.open(sources / "v4")
    kinds = {str(entry.scheme) for entry in artifact.entries.values() if entry.scheme}
    assert kinds == {"mxfp8 e4m3 128x128", "mxfp4 g32"}
    numbers, made = (Checkpoint.open(sources / name) for name in ("v4-numbers", "v4-hf"))
    assert numbers.tensors.keys() == made.tensors.keys()
    for name in numbers.tensors:
        assert numbers.raw(name).tobytes() == made.raw(name).tobytes(), name
    config = json.loads((sources / "v4-hf" / "config.json").read_text())
    assert "quantization_config" not in config and "expert_dtype" not in config


def test_engines_of_a_release(sources: Path) -> None:
    """Scales of attention's matrices are none of the KV cache's."""
    found = verify_artifact(sources / "v4", engine="vllm").findings
    assert not [one for one in found if one.check == "engine-kv-cache"]
    assert not [one for one in found if one.severity == "error" and "split" not in one.check]


# The view


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8", "mlx", "v4"])
def test_every_byte_is_that_of_the_copy(name: str, sources: Path) -> None:
    """Whole, by rows, by stretches that begin and end within rows; and in any order."""
    view, copy = opened(sources / name, True), Checkpoint.open(sources / f"{name}-hf")
    assert isinstance(view, Plain) and view.made
    assert {n: (i.dtype, i.shape) for n, i in view.tensors.items()} == {
        n: (i.dtype, i.shape) for n, i in copy.tensors.items()
    }
    for key, info in sorted(copy.tensors.items()):
        whole = copy.raw(key)
        assert np.array_equal(view.raw(key), whole)
        if info.shape and info.dtype != "I64":
            assert np.array_equal(view.float32(key), copy.float32(key))
            rows, row = info.shape[0], info.nbytes // info.shape[0]
            for first, last in ((rows // 3, rows // 2 + 1), (0, rows), (rows - 1, rows)):
                assert np.array_equal(view.part(key, first, last), whole[first * row : last * row])
            for start, stop in ((0, 1), (info.nbytes // 3, info.nbytes - 1)):
                assert np.array_equal(view.stretch(key, start, stop), whole[start:stop])
    assert view.digest() == Checkpoint.open(sources / name).digest() != copy.digest()


def test_from_several_threads(sources: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    view, copy = opened(sources / "v4", True), Checkpoint.open(sources / "v4-hf")
    names = [name for name in view.tensors if ".experts." in name][:24] * 3

    def same(name: str) -> bool:
        rows = view.tensors[name].shape[0]
        return all(
            np.array_equal(view.part(name, one, one + 1), copy.part(name, one, one + 1))
            for one in range(rows)
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(same, names))


def test_numbers_that_are_not_finite(sources: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(sources / "v4", tmp_path / "v4")
    name = "layers.0.attn.wq_a.scale"
    info = Checkpoint.open(tmp_path / "v4").tensors[name]
    with (tmp_path / "v4" / "model.safetensors").open("r+b") as file:
        file.seek(info.start)
        file.write(b"\xff")
    view = opened(tmp_path / "v4", True)
    for read in (view.raw, lambda weight: view.part(weight, 0, 2)):
        with pytest.raises(FormatError, match=r"wq_a\.weight: holds numbers that are not finite"):
            read("layers.0.attn.wq_a.weight")


# Runs


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("gptq", "w8-rtn"), ("awq", "w4g32-gptq"), ("fp8", "w4g64-awq"), ("mlx", "w8a16-ct"),
        ("v4", "w8a16-ct"),
    ],
)  # fmt: skip
def test_the_same_artifact_as_of_the_copy(
    name: str, recipe: str, sources: Path, tmp_path: Path, call: Call
) -> None:
    own = ["--samples", 4, "--length", 64] if recipe in ("w4g32-gptq", "w4g64-awq") else []
    made = ("--recipe", recipe, "--set", "indivisible=dense", *own)
    of_copy = call("quantize", sources / f"{name}-hf", *made, "-o", tmp_path / "copy")
    assert of_copy.status == 0, of_copy.err
    run = call("quantize", sources / name, *made, "--requantize", "-o", tmp_path / "out")
    assert run.status == 0, run.err
    assert "warning: the source is quantized already" in run.err
    first, second = (Checkpoint.open(tmp_path / out) for out in ("copy", "out"))
    assert first.tensors.keys() == second.tensors.keys()
    for key in first.tensors:
        assert first.raw(key).tobytes() == second.raw(key).tobytes(), key
    config = [json.loads((tmp_path / out / "config.json").read_text()) for out in ("copy", "out")]
    assert config[0] == config[1]
    record = json.loads((tmp_path / "out" / "qtool.json").read_text())
    assert record["source"]["requantized_from"] == view_of(sources / name).stored_as
    again = call("reproduce", tmp_path / "out", "--model", sources / name)
    assert again.status == 0 and "the same to the byte" in again.out, again.err + again.out


@pytest.mark.parametrize("recipe", ["q4_k_m", "q4_0-awq-gptq"])
def test_into_gguf(recipe: str, sources: Path, tmp_path: Path, call: Call) -> None:
    own = ["--samples", 4, "--length", 64] if "gptq" in recipe else []
    of_copy = call("quantize", sources / "fp8-hf", "--recipe", recipe, *own, "-o",
                   tmp_path / "copy.gguf")  # fmt: skip
    assert of_copy.status == 0, of_copy.err
    out = tmp_path / "out.gguf"
    run = call("quantize", sources / "fp8", "--recipe", recipe, *own, "--requantize", "-o", out)
    assert run.status == 0, run.err
    assert "warning: the source is quantized already" in run.err
    assert "was not needed" not in run.out + run.err
    with GgufFile.open(tmp_path / "copy.gguf") as first, GgufFile.open(out) as second:
        assert first.tensors.keys() == second.tensors.keys()
        for name in first.tensors:
            one, other = gguf_from_hf.raw(first, name), gguf_from_hf.raw(second, name)
            assert np.array_equal(one, other), name
        assert second.metadata["qtool.requantized_from"].value == "fp8 e4m3 128x128"
    again = call("reproduce", out, "--model", sources / "fp8")
    assert again.status == 0 and "the same to the byte" in again.out, again.err + again.out


@pytest.mark.parametrize("sets", [["pad_intermediate=512"], ["importance=true"]])
def test_into_gguf_otherwise(sets: list[str], sources: Path, tmp_path: Path, call: Call) -> None:
    """Padded, and with importance of the run's own; compared with the source afterwards."""
    more = [word for one in sets for word in ("--set", one)]
    more += ["--samples", "4", "--length", "64"] if "importance=true" in sets else []
    made = {}
    for name, own in (("fp8-hf", []), ("fp8", ["--requantize"])):
        made[name] = tmp_path / f"{name}.gguf"
        words = ["--recipe", "q4_0", *more, *own, "-o", made[name]]
        run = call("quantize", sources / name, *words)
        assert run.status == 0, run.err
    with GgufFile.open(made["fp8-hf"]) as first, GgufFile.open(made["fp8"]) as second:
        for name in first.tensors:
            one, other = gguf_from_hf.raw(first, name), gguf_from_hf.raw(second, name)
            assert np.array_equal(one, other), name
        assert "qtool.requantized_from" in second.metadata
    said = call("verify", made["fp8"], "--against", sources / "fp8")
    assert said.status == 0, said.out + said.err


def test_a_plan_of_a_gguf_file(sources: Path, call: Call) -> None:
    refused = call("plan", sources / "fp8", "--recipe", "q4_k_m")
    assert refused.status == 1 and "--requantize" in refused.err
    found = call("plan", sources / "fp8", "--recipe", "q4_k_m", "--requantize")
    assert found.status == 0 and "warning: the source is quantized already" in found.out


def test_statistics_of_it(sources: Path, tmp_path: Path, call: Call) -> None:
    """Measured of the view, for `--stats`; not without being told to."""
    stats, small = tmp_path / "stats", ("--samples", 4, "--length", 64)
    words = ("calibrate", sources / "fp8", "-o", stats, "--recipe", "w4g32-gptq", *small)
    assert "--requantize" in call(*words).err and not stats.exists()
    assert call(*words, "--requantize").status == 0
    own = ("--recipe", "w4g32-gptq", "--stats", stats, "--requantize", "-o", tmp_path / "out")
    run = call("quantize", sources / "fp8", *own)
    assert run.status == 0, run.err
    again = call("reproduce", tmp_path / "out", "--model", sources / "fp8")
    assert again.status == 0 and "the same to the byte" in again.out, again.err + again.out


def test_fitted(sources: Path, tmp_path: Path, call: Call) -> None:
    small = ("--samples", 2, "--length", 64, "--bits", 10, "-o", tmp_path / "fit.yaml")
    words = ("--recipe", "w4g32-gptq", *small, "--requantize")
    run = call("fit", sources / "gptq", *words)
    assert run.status == 0, run.err
    plain = call("fit", sources / "model", *words[:-2], tmp_path / "x.yaml", "--requantize")
    assert plain.status == 1 and "is not quantized" in plain.err


def test_classes_that_have_experts_in_one_tensor(tmp_path: Path) -> None:
    """What `convert --to hf` puts together is not seen one by one."""
    model = gguf_models.build("qwen3-vl-moe", tmp_path / "model", dtype="bfloat16")
    quantizing.add_tokenizer(model)
    made = quantizing.quantize(model, "w8a16-ct", tmp_path / "made", "indivisible=dense").out
    with pytest.raises(UnsupportedError, match="the model's class has them in one tensor"):
        opened(made, True)


def test_another_config_starts_over(sources: Path, tmp_path: Path) -> None:
    """What says how the numbers are stored is a part of the source."""
    import shutil

    from qtool.runs.resume import source_facts

    shutil.copytree(sources / "gptq", tmp_path / "gptq")
    before = source_facts(opened(tmp_path / "gptq", True))
    config = json.loads((tmp_path / "gptq" / "config.json").read_text())
    config["quantization_config"]["damp_percent"] = 0.5
    (tmp_path / "gptq" / "config.json").write_text(json.dumps(config))
    assert source_facts(opened(tmp_path / "gptq", True)) != before


def test_scales_of_the_cache_are_left_out_and_said(
    sources: Path, tmp_path: Path, call: Call
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file
    from torch import ones

    source = tmp_path / "source"
    shutil.copytree(sources / "fp8", source)
    (source / "qtool.json").unlink()
    state = load_file(source / "model.safetensors")
    for one in "kv":
        state[f"model.layers.0.self_attn.{one}_scale"] = ones(1)
    save_file(state, source / "model.safetensors", {"format": "pt"})
    run = call("quantize", source, "--recipe", "w8-rtn", "--requantize", "-o", tmp_path / "out")
    assert run.status == 0 and "scales of the KV cache are dropped" in run.err, run.err
    said = call("verify", tmp_path / "out", "--against", source)
    assert said.status == 0, said.out


def test_a_plan_of_it(sources: Path, call: Call) -> None:
    refused = call("plan", sources / "v4", "--recipe", "w8a16-ct")
    assert refused.status == 1 and "(`qtool quantize` with --requantize)" in refused.err
    found = call("plan", sources / "v4", "--recipe", "w8a16-ct", "--requantize")
    assert found.status == 0 and "warning: the source is quantized already" in found.out


def test_where_it_changes_nothing(sources: Path, tmp_path: Path, call: Call) -> None:
    model = sources / "model"
    for words in (("quantize", model, "-o", tmp_path / "out"), ("plan", model)):
        found = call(*words, "--recipe", "w8-rtn", "--requantize")
        assert found.status == 1 and "--requantize would change nothing" in found.err
    assert not (tmp_path / "out").exists()


def test_gpt_oss_has_recipes_of_its_own(tmp_path: Path, call: Call) -> None:
    model = gguf_models.build("gpt-oss-mxfp4", tmp_path / "model", dtype="bfloat16")
    found = call("plan", model, "--recipe", "mxfp4-gpt-oss")
    assert found.status == 1 and "--requantize" not in found.err and "--to hf" in found.err
    with pytest.raises(UnsupportedError, match="convert --to hf"):
        from qtool.converting.source import check_needed

        check_needed(model, True)
