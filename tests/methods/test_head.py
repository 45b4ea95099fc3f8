"""The output head among the quantized matrices: asked for by name, measured, rounded some rows at a
time, and the same bytes however many these are."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import RecipeError, UnsupportedError
from qtool.formats import FORMATS
from qtool.formats.safetensors_file import TensorInfo
from qtool.hub import tiny_folder
from qtool.methods import gptq, rtn
from qtool.planning.fit import format_options
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.runs import by_rows
from qtool.scheme import Dropped, Scheme
from qtool.verification.engines.head import length_refused
from qtool.verification.engines.rules import engine_findings
from qtool.verification.matrix import hole_of_codes
from qtool.workspaces.journal import Journal
from support.formats.header_artifacts import FLOATS, group_config, stored
from support.models import header_files
from support.planning.planning import plan_of, quantized
from support.runs.quantizing import build, caller, files, quantize, text_file

HEAD = "lm_head.weight"


def named(**weights: Any) -> str:
    return f"overrides=[{{match: lm_head, weights: {json.dumps(weights)}}}]"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def longer(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with a vocabulary of 128, which engines need not pad."""
    folder = tmp_path_factory.mktemp("longer") / "model"
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 128}))
    tensors = load_file(folder / "model.safetensors")
    for name in (HEAD, "model.embed_tokens.weight"):
        tensors[name] = np.concatenate([tensors[name], tensors[name][:32] * 0.9])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = text_file(tmp_path_factory.mktemp("text") / "text.txt")
    return [
        "weights.group_size=32", f"calibration.source={text}", "calibration.samples=6",
        "calibration.length=48",
    ]  # fmt: skip


def test_a_pattern_must_name_it(tmp_path: Path) -> None:
    def plan(match: str, recipe: str = "w4g128-gptq", bits: int = 8) -> Any:
        sets = f"overrides=[{{match: '{match}', weights: {{bits: {bits}}}}}]"
        return plan_of(tmp_path / match.strip("*"), header_files.llama(), recipe, sets)

    for match in ("lm_head", "*lm_head", HEAD):
        found = plan(match)
        assert found.by_name[HEAD].action == Scheme(8, 128, True)
        assert len(quantized(found)) == 15
    assert plan("*").by_name[HEAD].reason == "output head"
    both = "overrides=[{match: lm_head, weights: {bits: 8}}, {match: lm_head, dense: true}]"
    undone = plan_of(tmp_path, header_files.llama(), "w4g128-gptq", both)
    assert undone.by_name[HEAD].scheme is None
    with pytest.raises(UnsupportedError, match="the output head, which recipes with rounded inp"):
        plan("lm_head", "w8a8-dynamic")


def test_a_copy_of_the_embedding_is_left_out_where_that_is_quantized(tmp_path: Path) -> None:
    """As in MLX's format: mlx-lm takes the embedding, and what `eval` measures is that."""
    recipe = "w4g64-mlx-rtn"
    plan = plan_of(tmp_path, header_files.llama(), recipe, tie_word_embeddings=True)
    assert "model.embed_tokens" in quantized(plan)
    assert isinstance(plan.by_name["lm_head.weight"].action, Dropped)
    plan = plan_of(tmp_path, header_files.llama(), recipe, tie_word_embeddings=False)
    assert {"model.embed_tokens", "lm_head"} < quantized(plan)


def test_a_tied_one_is_refused(tmp_path: Path) -> None:
    recipe = load("w4g128-gptq", [named(bits=8)])
    with pytest.raises(UnsupportedError, match=r"is its embedding .no tensor is a head of its own"):
        make_plan(recipe, Checkpoint.open(tiny_folder()))
    with pytest.raises(UnsupportedError, match=r"embedding .config.json says tie_word_embeddings"):
        plan_of(
            tmp_path, header_files.llama(), "w4g128-gptq", named(bits=8), tie_word_embeddings=True
        )
    other = load("w4g128-gptq", ["overrides=[{match: lm_head, dense: true}]"])
    with pytest.raises(RecipeError, match="matches no tensor"):
        make_plan(other, Checkpoint.open(tiny_folder()))


@pytest.mark.parametrize(
    ("format_", "bits", "symmetric"),
    [
        ("gptq", 3, True), ("gptq", 4, False), ("gptq", 8, True), ("awq", 4, False),
        ("compressed-tensors", 4, False), ("compressed-tensors", 3, True),
        ("compressed-tensors", 8, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("rows", [416, 384])  # the last of four parts is shorter, and is not
def test_rows_at_a_time_are_packed_as_all_of_them(
    format_: str, bits: int, symmetric: bool, rows: int, tmp_path: Path
) -> None:  # fmt: skip
    shapes = header_files.llama() | {HEAD: (rows, 256), "model.embed_tokens.weight": (rows, 256)}
    sets = [f"format={format_}", f"weights.bits={bits}", f"weights.symmetric={symmetric}"]
    plan = plan_of(tmp_path, shapes, "w4g128-rtn", *sets, named(bits=bits), vocab_size=rows)
    head = plan.by_name[HEAD]
    values = np.random.default_rng(bits).normal(size=(rows, 256)).astype(np.float32)
    _overwrite(tmp_path, head.dtype, values)
    checkpoint = Checkpoint.open(tmp_path)
    weight = checkpoint.float32(HEAD)
    assert weight.std() > 0.5
    options = format_options(plan.recipe)

    def rounded(part: NDArray[np.float32]) -> Any:
        assert isinstance(head.action, Scheme)
        return rtn.quantize(part, None, head.action, rtn.Options()).quant

    def packed(_: Any, quant: Any) -> Any:
        return FORMATS[format_].pack("lm_head", quant, options)

    calls: list[int] = []

    def seen(part: NDArray[np.float32], first: int) -> Any:
        assert first == sum(calls)
        calls.append(len(part))
        return rounded(part)

    found = by_rows.quantize_rows(head, checkpoint, seen, packed, weights=128 * 256)
    assert calls == [128, 128, 128, 32][: -(-rows // 128)]
    whole = rounded(weight)
    expected = packed(head, whole)
    assert found.arrays.keys() == expected.keys() == {spec.name for spec in head.outputs}
    for name, array in expected.items():
        np.testing.assert_array_equal(found.arrays[name], array)
        assert found.arrays[name].dtype == array.dtype
    lost = (weight - whole.dequantize()).astype(np.float64)
    error = np.sqrt((lost**2).sum() / (weight.astype(np.float64) ** 2).sum())
    assert found.error == pytest.approx(error, rel=1e-6)


def _overwrite(folder: Path, dtype: str, values: NDArray[np.float32]) -> None:
    from qtool.formats.safetensors_file import from_float32

    info = Checkpoint.open(folder).tensors[HEAD]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(info.start)
        file.write(from_float32(values, dtype, HEAD).tobytes())


def test_gptq_sees_what_the_head_reads(model: Path, small: list[str], tmp_path: Path) -> None:
    """Its codes are those of the Gram matrix that transformers gives of the quantized blocks."""
    import torch
    from transformers import AutoModelForCausalLM

    from qtool.texts.calibration import calibration_tokens

    sets = [*small, named(bits=4)]
    run = quantize(model, "w4g128-gptq", tmp_path / "out", *sets)
    report = {layer.name: layer for layer in run.summary.layers}[HEAD]
    artifact = Artifact.open(tmp_path / "out")
    found = artifact.read(HEAD)
    blocks = {name: torch.from_numpy(np.array(v)) for name, v in artifact.dequantized()}
    original = Checkpoint.open(model).float32(HEAD)
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    theirs.load_state_dict(blocks | {HEAD: torch.from_numpy(original)})
    recipe = load("w4g128-gptq", sets)
    tokens = torch.from_numpy(calibration_tokens(recipe.calibration, model).tokens)
    seen: list[torch.Tensor] = []
    theirs.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.no_grad():
        theirs(input_ids=tokens)
    rows = seen[0].reshape(-1, original.shape[1]).double().numpy()
    gram = rows.T @ rows
    options = gptq.Options.of(recipe.gptq)
    given = gptq.factor(gram.astype(np.float32), options, len(rows))
    expected = gptq.quantize_with(original, given, found.scheme, options)
    # Sums of another order tip a code now and then.
    assert (found.codes != expected.codes).mean() < 0.002
    lost = (original - found.dequantize()).astype(np.float64)
    error = np.sqrt(np.trace(lost @ gram @ lost.T) / np.trace(original @ gram @ original.T))
    assert report.of == "outputs" and report.relative_error == pytest.approx(error, rel=1e-3)
    nearest = rtn.quantize(original, None, found.scheme, rtn.Options()).quant.dequantize()
    rounded = (original - nearest).astype(np.float64)
    assert np.trace(lost @ gram @ lost.T) < 0.8 * np.trace(rounded @ gram @ rounded.T)


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq", "w4g128-rtn", "w4a16-ct"])
def test_it_is_made_verified_and_named(
    recipe: str, longer: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    model, out = longer, tmp_path / "out"
    quantize(model, recipe, out, *small, "awq.grid=4", named(bits=4))
    call = caller(monkeypatch, capfd)
    done = call("verify", out, "--against", model, "--engine", "vllm")
    assert done.status == 0, done.out + done.err
    assert "lm_head" not in done.out
    theirs = call("verify", out, "--engine", "transformers")
    assert ("will not load lm_head" in theirs.out) == (recipe != "w4a16-ct")
    card = (out / "README.md").read_text()
    assert ("from_pretrained" in card) == (recipe == "w4a16-ct")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    if config["quant_method"] == "compressed-tensors":
        groups = [*config["config_groups"].values()]
        assert [group["targets"] for group in groups] == [["Linear"], [r"re:(?:.*\.)?lm_head$"]]
        assert groups[0]["weights"] == groups[1]["weights"] and config["ignore"] == []
    else:
        assert config["lm_head"] is True
    if recipe == "w4g128-rtn":
        scheme = Scheme(4, 32, load(recipe).scheme.symmetric)
        alone = rtn.quantize(Checkpoint.open(model).float32(HEAD), None, scheme, rtn.Options())
        np.testing.assert_array_equal(Artifact.open(out).read(HEAD).codes, alone.quant.codes)


def test_one_of_other_bits_is_converted(
    model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    quantize(
        model,
        "w4g128-rtn",
        tmp_path / "out",
        *small,
        "format=gptq",
        "weights.symmetric=true",
        named(bits=8),
    )
    call = caller(monkeypatch, capfd)
    made = tmp_path / "made"
    done = call("convert", tmp_path / "out", "--to", "compressed-tensors", "-o", made)
    assert done.status == 0 and "the same numbers" in done.out, done.err
    found, before = (Artifact.open(path).read(HEAD) for path in (made, tmp_path / "out"))
    assert found.scheme.bits == 8
    np.testing.assert_array_equal(found.codes, before.codes)
    done = call("verify", made, "--engine", "vllm")
    assert done.status == 0 and "lm_head" not in done.out, done.out


@pytest.mark.parametrize(
    ("format_", "symmetric", "says"),
    [
        ("gptq", True, "its 96 rows are no multiple of 64"),
        ("awq", False, "its 96 rows are no multiple of 64"),
        ("compressed-tensors", True, None),
        ("compressed-tensors", False, None),  # 96 zero points of 4 bits are twelve words
    ],
)
def test_engines_refuse_lengths(
    format_: str, symmetric: bool, says: str | None, model: Path, small: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    sets = [*small, f"format={format_}", f"weights.symmetric={symmetric}", named(bits=4)]
    run = quantize(model, "w4g128-rtn", tmp_path / "out", *sets)
    done = caller(monkeypatch, capfd)("verify", tmp_path / "out", "--engine", "vllm")
    assert ("error (engine-head)" in done.out) == (says is not None)
    assert any(says in warning for warning in run.summary.warnings) if says else done.status == 0
    assert says is None or says in done.out


def test_zero_points_fill_words() -> None:
    assert length_refused("compressed-tensors", 300, 4, False) is not None
    assert length_refused("compressed-tensors", 300, 4, True) is None
    assert length_refused("compressed-tensors", 300, 8, False) is None


def test_blocks_of_rows(tmp_path: Path) -> None:
    """A scale for 128 rows of the head, or for each."""
    layout, weights, inputs, tensors, *_ = next(case for case in FLOATS if "block" in str(case[1]))
    config = group_config(layout, weights, inputs) | {"ignore": []}
    config["config_groups"]["group_0"]["targets"] = ["Linear", "re:.*lm_head"]
    head = {"lm_head.weight": ("F8_E4M3", (512, 256)), "lm_head.weight_scale": ("BF16", (4, 2))}
    artifact = stored(tmp_path / "a", {**tensors, **head}, config)
    for engine in ("vllm", "sglang"):
        (one,) = [f for f in engine_findings(artifact, engine, 1) if f.check == "engine-head"]
        assert one.severity == "error" and "are for blocks of rows" in one.message
    assert length_refused("compressed-tensors", 512, 8, True) is None


def test_a_column_of_the_least_codes_is_no_hole(tmp_path: Path) -> None:
    """One input far below its neighbours, in more rows than a hole takes; and a hole."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(16384, 128)).astype(np.float32)
    weight[:, 5] = -9 - rng.random(16384)
    quant = rtn.quantize(weight, None, Scheme(4, 64, False), rtn.Options()).quant
    assert not quant.codes[:, 5].any() and quant.zero.all()
    words = FORMATS["awq"].pack("m", quant, format_options(load("w4g128-awq")))["m.qweight"]
    stored = TensorInfo("m.qweight", "I32", words.shape, 0, words.nbytes)
    raw = words.reshape(-1).view(np.uint8).copy()
    assert hole_of_codes(stored, raw, quant) == 0
    raw[3 * 8192 - 1000 : 3 * 8192 + 5000] = 0
    assert hole_of_codes(stored, raw, quant) >= 5000


@pytest.mark.parametrize("recipe", ["w4g128-gptq", "w4g128-awq-gptq-tune"])
def test_a_run_that_died_before_the_head(
    recipe: str, model: Path, small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died(BaseException):
        pass

    sets = [*small, "awq.grid=4", named(bits=4)]
    sets += ["tune.steps=2"] if "tune" in recipe else []
    quantize(model, recipe, tmp_path / "whole", *sets)
    commit = Journal.commit

    def dying(journal: Journal, name: str, **content: object) -> None:
        if name == "outside of blocks":
            raise Died
        commit(journal, name, **content)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "commit", dying)
        with pytest.raises(Died):
            quantize(model, recipe, tmp_path / "out", *sets)
    quantize(model, recipe, tmp_path / "out", *sets)
    assert files(tmp_path / "out") == files(tmp_path / "whole")
