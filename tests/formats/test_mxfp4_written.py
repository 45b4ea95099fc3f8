"""gpt-oss's own MXFP4 as qtool writes it: names, numbers, what loads it, what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact, one_by_one
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.float_codes import TABLES
from qtool.formats import mxfp4, mxfp4_experts
from qtool.formats.facts import Options
from qtool.quantizing.plan import Asked, foresee
from qtool.recipe.recipe import load
from qtool.scheme import GroupQuant
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf, gguf_models
from support.gguf.families import sparse
from support.models.mxfp4_models import GPTQ, LAYER, RTN, plain, written
from support.runs import quantizing
from support.verification.verifying import serious

__all__ = ["plain", "written"]


SIZES = {"gate_up_proj": (5, 64, 192), "down_proj": (5, 96, 64)}  # as a plain checkpoint has them


def released(folder: Path) -> Path:
    return gguf_models.build("gpt-oss-mxfp4", folder, dtype="bfloat16")


def stacks(folder: Path) -> dict[str, NDArray[np.float32]]:
    """Experts as a plain checkpoint has them, in float32."""
    artifact = Artifact.open(folder)
    return {n: artifact.read(n) for n, e in artifact.entries.items() if e.stacked}  # type: ignore[misc]


def wrong(folder: Path) -> list[str]:
    """What `verify` has to say."""
    return [one.message for one in serious(folder)]


# The format


def test_an_expert_is_a_part_of_its_stack(tmp_path: Path) -> None:
    """The names and bytes of a released checkpoint, expert by expert; and back."""
    checkpoint = Checkpoint.open(released(tmp_path / "model"))
    parts = mxfp4.apart(checkpoint.tensors)
    assert {stored for stored, _ in parts.values()} == {*checkpoint.tensors}
    name = "model.layers.1.mlp.experts.2.gate_up_proj"
    whole = checkpoint.array(f"{LAYER.format(1)}.gate_up_proj_blocks")
    stored, info = parts[f"{name}.blocks"]
    assert info.shape == whole.shape[1:] == (192, 2, 16)
    assert mxfp4.stack_of(info.name) == (stored, 2)
    seen = one_by_one(Artifact.of(checkpoint)).checkpoint
    for expert in range(4):
        part = f"{LAYER.format(1)}.{expert}.gate_up_proj.blocks"
        assert np.array_equal(seen.array(part), whole[expert])
    assert mxfp4.stack_of("model.layers.1.mlp.experts.gate_up_proj_bias") is None


def test_codes_by_hand() -> None:
    """One row of 64: the first number in the low nibble, scales as powers of two from 127 on."""
    codes = np.zeros((1, 64), np.uint8)
    codes[0, :2], codes[0, 63] = (2, 15), 7
    scale = np.array([[2.0, 0.25]], np.float32)
    quant = GroupQuant(mxfp4.SCHEME, codes, scale, np.zeros((1, 2), np.uint8))
    packed = mxfp4.pack("m", quant, Options(""))
    assert packed["m.scales"].tolist() == [[128, 125]]
    blocks = packed["m.blocks"]
    assert blocks.shape == (1, 2, 16) and blocks[0, 0, 0] == 0xF2 and blocks[0, 1, 15] == 0x70
    found = mxfp4.unpack("m", packed.__getitem__, mxfp4.detect({"quant_method": "mxfp4"}))  # type: ignore[arg-type]
    assert np.array_equal(found.codes, codes) and np.array_equal(found.scale, scale)
    values = found.dequantize()
    assert values[0, :2].tolist() == [2.0, -12.0] and values[0, 63] == 1.5


def test_another_scheme_is_not_stored() -> None:
    scheme = load("nvfp4").scheme  # type: ignore[union-attr]
    assert "not nvfp4" in str(mxfp4.supports(scheme, (4, 64), Options("")))
    assert "not divisible" in str(mxfp4.supports(mxfp4.SCHEME, (4, 48), Options("")))


# The artifact


def test_named_and_shaped_as_released(plain: Path, written: Path, tmp_path: Path) -> None:
    source, made = Checkpoint.open(plain), Checkpoint.open(written)
    model = released(tmp_path / "model")
    assert made.tensors.keys() == Checkpoint.open(model).tensors.keys()
    for block in range(2):
        for kind, (experts, inputs, outputs) in SIZES.items():
            name = f"{LAYER.format(block)}.{kind}"
            assert name not in made.tensors
            blocks, scales = (made.tensors[f"{name}_{last}"] for last in ("blocks", "scales"))
            assert (blocks.dtype, blocks.shape) == ("U8", (experts, outputs, inputs // 32, 16))
            assert (scales.dtype, scales.shape) == ("U8", (experts, outputs, inputs // 32))
    for name in source.tensors.keys() & made.tensors.keys():
        assert source.raw(name).tobytes() == made.raw(name).tobytes()
    table = json.loads((model / "config.json").read_text())["quantization_config"]
    assert json.loads((written / "config.json").read_text())["quantization_config"] == table


def test_numbers_are_those_of_every_expert(plain: Path, written: Path) -> None:
    """Read as the definition of the format has it: every number the nearest one of its scale, and
    every scale the better one of the two about the largest number."""
    source, made = Checkpoint.open(plain), Checkpoint.open(written)
    table = np.float64(TABLES["e2m1"])

    def errors(groups: NDArray[np.float64], power: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.abs(groups[..., None] - table * power[..., None, None]).min(axis=-1)

    for block in range(2):
        for kind, (_, inputs, outputs) in SIZES.items():
            name = f"{LAYER.format(block)}.{kind}"
            groups = source.float32(name).astype(np.float64).transpose(0, 2, 1)
            groups = groups.reshape(5, outputs, inputs // 32, 32)
            blocks, scales = made.array(f"{name}_blocks"), made.array(f"{name}_scales")
            power = np.exp2(scales.astype(np.float64) - 127)
            nibbles = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(groups.shape)
            found = np.abs(groups - table[nibbles] * power[..., None])
            assert np.array_equal(found, errors(groups, power))
            usual = np.exp2(np.floor(np.log2(np.abs(groups).max(axis=-1))) - 2)
            each = [(errors(groups, one) ** 2).sum(-1) for one in (usual, 2 * usual)]
            assert np.array_equal((found**2).sum(-1), np.minimum(*each))


def test_a_model_that_was_made_plain_is_itself_again(tmp_path: Path) -> None:
    """Numbers that MXFP4 can hold are held: released, made plain, written."""
    model = released(tmp_path / "model")
    back = sparse.unpacked(model)
    made = quantizing.quantize(back, RTN, tmp_path / "written")
    before, after = stacks(model), stacks(made.out)
    assert before.keys() == after.keys() and len(after) == 4
    for name, values in before.items():
        assert np.array_equal(values, after[name])
    assert {layer.relative_error for layer in made.summary.layers} == {0.0}


def test_what_transformers_loads(written: Path, tmp_path: Path) -> None:
    """Its own reading of the blocks: nothing missing, nothing unused, the dequantized logits."""
    import torch
    from transformers import AutoModelForCausalLM, Mxfp4Config

    dense = quantizing.write_dense(written, tmp_path / "dense")
    tokens, logits = torch.arange(3, 40)[None], []
    for folder, more in ((written, {"quantization_config": Mxfp4Config(dequantize=True)}),
                         (dense, {})):  # fmt: skip
        options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, **more}
        model, said = AutoModelForCausalLM.from_pretrained(folder, **options)
        assert not any(said.values()), said
        with torch.no_grad():
            logits.append(model(tokens).logits)
    assert torch.equal(*logits)


def test_rounding_by_what_experts_read(plain: Path, written: Path, tmp_path: Path) -> None:
    """GPTQ leaves less of an error in what experts give, by their own inputs, than rounding."""
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = [f"calibration.source={text}", "calibration.samples=8", "calibration.length=128"]
    run = quantizing.quantize(plain, GPTQ, tmp_path / "gptq", *sets)
    opened = one_by_one(Artifact.open(run.out))
    assert len(run.quants) == 20
    for name, quant in run.quants.items():
        found = opened.read(name)
        assert isinstance(found, GroupQuant)
        assert np.array_equal(found.codes, quant.codes) and np.array_equal(found.scale, quant.scale)
    layers = {one.name: one for one in run.summary.layers}
    assert len(layers) == 20 and wrong(run.out) == []
    measured = [one.relative_error for one in layers.values() if one.of == "outputs"]
    assert len(measured) > 10 and max(measured) < 0.09
    nearest = verify_artifact(written, against=plain)
    assert min(layer.relative_error for layer in nearest.layers) > 0.1


def test_the_same_in_many_files_and_by_parts(plain: Path, written: Path, tmp_path: Path) -> None:
    """Blocks and scales of a stack in different files, experts a few rows at a time."""
    run = quantizing.quantize(plain, RTN, tmp_path / "out", max_shard_bytes=20_000)
    assert len([*run.out.glob("*.safetensors")]) > 5
    made, whole = Checkpoint.open(run.out), Checkpoint.open(written)
    assert made.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        assert made.raw(name).tobytes() == whole.raw(name).tobytes()
    assert wrong(run.out) == []


def test_dying_between_blocks(
    plain: Path, written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's parts of stacks are taken over as they lie in the files."""
    from qtool.workspaces.journal import Journal

    class Died(BaseException):
        pass

    commit, done = Journal.commit, []

    def counted(journal: Journal, name: str, **content: object) -> None:
        if name == "block 1":
            raise Died
        commit(journal, name, **content)
        done.append(name)

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(Journal, "commit", counted)
        quantizing.quantize(plain, RTN, tmp_path / "out")
    assert "block 0" in done and not (tmp_path / "out").exists()
    again = quantizing.quantize(plain, RTN, tmp_path / "out")
    assert not any(".layers.0." in name for name in again.quants) and again.quants
    assert quantizing.files(again.out) == quantizing.files(written)


def test_from_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that lie there in MXFP4 come back as they were."""
    from qtool.converting.gguf_to_hf import checkpoint_folder
    from qtool.gguf.from_hf import source as from_hf
    from qtool.gguf.to_hf import files
    from qtool.messages.progress import Progress

    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    monkeypatch.setattr(files, "tokenizer_files", lambda _: {})
    model = released(tmp_path / "model")
    file = tmp_path / "file.gguf"
    gguf_from_hf.write(model, file, "bf16")
    with checkpoint_folder(file, tmp_path / "made", Progress(quiet=True), requantize=True) as back:
        made = quantizing.quantize(back, RTN, tmp_path / "out").out
    before, after = stacks(model), stacks(made)
    assert before.keys() == after.keys()
    assert all(np.array_equal(values, after[name]) for name, values in before.items())


# What `verify` sees


def test_verify_looks_into_every_expert(plain: Path, written: Path) -> None:
    found = verify_artifact(written, against=plain)
    assert len(found.layers) == 20
    assert {layer.name for layer in found.layers} >= {
        f"{LAYER.format(1)}.4.{kind}.weight" for kind in SIZES
    }
    assert wrong(written) == []


def rewrite(written: Path, out: Path, name: str, change: Any) -> Path:
    """A copy with one tensor changed."""
    import shutil

    shutil.copytree(written, out)
    made = Checkpoint.open(written)
    names = {"U8": np.uint8, "BF16": np.uint16}
    import torch
    from safetensors.torch import save_file as save

    tensors = {}
    for key, info in made.tensors.items():
        array = made.raw(key).view(names[info.dtype]).reshape(info.shape)
        array = change(array.copy()) if key == name else array
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        tensors[key] = tensor if info.dtype == "U8" else tensor.view(torch.bfloat16)
    save(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def test_experts_of_another_model(plain: Path, written: Path, tmp_path: Path) -> None:
    """Two experts in each other's places are told by the source."""
    name = f"{LAYER.format(0)}.down_proj_blocks"
    damaged = rewrite(written, tmp_path / "copy", name, lambda a: a[[1, 0, 2, 3, 4]])
    said = [one for one in verify_artifact(damaged, against=plain).findings
            if one.severity == "error" and "digests" not in one.check]  # fmt: skip
    assert said and any("experts.1.down_proj" in one.name + one.message for one in said)


def test_scales_that_are_no_numbers(written: Path, tmp_path: Path) -> None:
    name = f"{LAYER.format(1)}.gate_up_proj_scales"

    def change(array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        array[3, 7, 1] = mxfp4_experts.NAN
        return array

    damaged = rewrite(written, tmp_path / "copy", name, change)
    found = [one for one in verify_artifact(damaged).findings if one.severity == "error"]
    assert any("experts.3.gate_up_proj" in one.name + one.message for one in found)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "transformers", "mlx-lm"])
@pytest.mark.parametrize("tp", [1, 2])
def test_engines_of_a_plan_and_of_what_it_makes(
    plain: Path, written: Path, engine: str, tp: int
) -> None:
    planned = foresee(Asked(str(plain), RTN, engine=engine, tp=tp))
    found = verify_artifact(written, engine=engine, tp=tp)
    checks = [(one.severity, one.name) for one in planned.findings if one.severity == "error"]
    assert checks == [(one.severity, one.name) for one in found.findings if one.severity == "error"]
    assert not checks or (engine, tp) == ("mlx-lm", 2)


# What is measured


def test_statistics_and_importance_of_one_pass(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts one by one for `--stats`, and in one tensor for an importance matrix: the numbers of
    either alone."""
    from qtool.gguf.from_hf import source as from_hf
    from qtool.messages.progress import Progress
    from qtool.quantizing.calibrate import ImportanceFile, calibrate, opened
    from qtool.recipe.recipe import Calibration

    monkeypatch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
    text = quantizing.text_file(tmp_path / "text.txt")
    settings = Calibration(source=str(text), samples=4, length=64)
    quiet, needs = Progress(quiet=True), frozenset({"gram", "mean_abs", "max_abs", "square"})
    stats = tmp_path / "stats.safetensors"
    with opened(plain, tmp_path / "both") as (model, target):
        assert target is not None
        both = calibrate(model, stats, settings, needs, 1, quiet, target)
        fused = ImportanceFile(tmp_path / "alone", target.source)
        alone = calibrate(Checkpoint.open(plain), None, settings, frozenset(), 1, quiet, fused)
    assert both.importance is not None and alone.importance is not None
    for name, wanted in (("sums", alone.importance.sums), ("counts", alone.importance.counts)):
        found = getattr(both.importance, name)
        assert found.keys() == wanted.keys() and any("_exps" in tensor for tensor in wanted)
        assert all(np.array_equal(found[tensor], row) for tensor, row in wanted.items())
    sets = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=64"]
    off = ["gptq.guided=0", "gptq.yaqa=0", *sets]
    given = quantizing.quantize(plain, GPTQ, tmp_path / "given", *off, stats=stats).out
    assert wrong(given) == []
    first = quantizing.quantize(plain, GPTQ, tmp_path / "own", *off).out
    one = f"{LAYER.format(0)}.gate_up_proj_blocks"  # no quantized block comes before
    assert Checkpoint.open(given).raw(one).tobytes() == Checkpoint.open(first).raw(one).tobytes()
