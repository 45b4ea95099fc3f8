"""What other tools write, beside the model that it was made of: no false alarm, no false word."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.cli.verify import lines
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.gguf import GgufRecipe
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.verification.against.source_tensors import check_quantized
from qtool.verification.finding import Verdict
from qtool.verification.run import verify_artifact
from support.formats import other_tools as other
from support.runs.quantizing import first_blocks_of_tiny, quantize, text_file
from support.verification.verifying import but_digests

UP = "model.layers.0.mlp.up_proj.weight"
NORMS = ("input_layernorm", "post_attention_layernorm")


def norms() -> dict[str, NDArray[np.float64]]:
    rng = np.random.default_rng(3)
    return {
        f"model.layers.{block}.{name}.weight": 1 + 0.3 * rng.standard_normal(other.HIDDEN)
        for block in range(2)
        for name in NORMS
    }


def said(verdict: Verdict) -> list[tuple[str, str]]:
    return [(f.severity, f.message) for f in but_digests(verdict.findings)]


@pytest.mark.parametrize("stored", ["BF16", "F16"])
def test_norms_cast_to_another_dtype_are_no_folds(stored: str, tmp_path: Path) -> None:
    """A float16 model that was loaded in bfloat16, as llm-compressor's usually are, and stored in
    that or in float16."""
    there = {name: ("F16", norm.astype(np.float16)) for name, norm in norms().items()}
    source = other.folder(tmp_path / "source", other.model(other.dense) | there, {})
    here = {name: other.bfloat16(norm.astype(np.float16)) for name, norm in norms().items()}
    if stored == "F16":
        here = {name: ("F16", (words.astype("<u4") << 16).view("<f4").astype(np.float16))
                for name, (_, words) in here.items()}  # fmt: skip
    tensors = other.model(other.pack_quantized) | here
    verdict = verify_artifact(
        other.folder(tmp_path / "out", tensors, other.CT), against=source, threads=1
    )
    assert not said(verdict)
    assert all(layer.relative_error < 0.2 for layer in verdict.layers) and verdict.layers


def test_zeros_of_a_cache_of_integers_have_a_place(tmp_path: Path) -> None:
    """llm-compressor's asymmetric 8-bit cache."""
    cache = {
        f"model.layers.{block}.self_attn.{kind}": tensor
        for block in range(2)
        for half in "kv"
        for kind, tensor in (
            (f"{half}_scale", other.bfloat16(np.full(1, 0.1))),
            (f"{half}_zero_point", ("I8", np.full(1, -3, np.int8))),
        )
    }
    scheme = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "tensor",
              "dynamic": False}  # fmt: skip
    config = {**other.CT, "config_groups": {}, "kv_cache_scheme": scheme}
    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    path = other.folder(tmp_path / "out", other.model(other.dense) | cache, config)
    assert not said(verify_artifact(path, against=source, threads=1))


def two_of_four(weight: NDArray[np.float32]) -> NDArray[np.float32]:
    fours = weight.reshape(len(weight), -1, 4).copy()
    np.put_along_axis(fours, np.abs(fours).argsort(axis=2)[..., :2], 0, axis=2)
    return 1.1 * fours.reshape(weight.shape)


def test_rows_of_zeros_may_have_the_scale_0(tmp_path: Path) -> None:
    """bitsandbytes' int8 of a model with heads that are 0; with other codes the scale is lost."""

    def empty(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        weight[8:16] = 0
        return other.int8(module, weight)

    tensors = other.model(empty)
    name = "model.layers.0.mlp.up_proj"
    scales = tensors[f"{name}.SCB"][1].copy()
    for module in {name.rpartition(".")[0] for name in tensors if name.endswith(".SCB")}:
        tensors[f"{module}.SCB"][1][8:16] = 0
    path = other.folder(tmp_path / "out", tensors, other.INT8)
    assert not said(verify_artifact(path, threads=1))
    scales[16] = 0
    tensors[f"{name}.SCB"] = ("F32", scales)
    path = other.folder(tmp_path / "lost", tensors, other.INT8)
    ((severity, words),) = said(verify_artifact(path, threads=1))
    assert severity == "error" and "1 of 512 scales is 0" in words


def test_rows_that_are_clipped_are_no_folds(tmp_path: Path) -> None:
    """AutoRound's search shrinks ranges: all rows become a little smaller."""

    def shrunk(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        return other.gptq()(module, 0.912 * weight)

    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    path = other.folder(tmp_path / "out", other.model(shrunk), other.GPTQ)
    assert not said(verify_artifact(path, against=source, threads=1))


@pytest.mark.parametrize("store", [other.dense, other.pack_quantized, other.int8])
def test_pruned_matrices_are_told_of_and_not_called_another_models(
    store: other.Store, tmp_path: Path
) -> None:
    """As SparseGPT leaves them, quantized afterwards or not."""
    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    config = {other.dense: {}, other.pack_quantized: other.CT, other.int8: other.INT8}[store]
    tensors = other.model(lambda module, weight: store(module, two_of_four(weight)))
    verdict = verify_artifact(other.folder(tmp_path / "out", tensors, config), against=source)
    ((severity, words),) = said(verdict)
    assert severity == "note" and words.startswith("14 matrices") and "pruned" in words
    lost = other.model(lambda module, weight: store(module, two_of_four(weight[::-1])))
    verdict = verify_artifact(other.folder(tmp_path / "other", lost, config), against=source)
    assert not verdict.ok


@pytest.mark.parametrize(("store", "packing"), [(other.gptq(), "gptq"), (other.awq, "awq")])
def test_what_is_not_read_is_no_other_model(
    store: other.Store, packing: str, tmp_path: Path
) -> None:
    """AutoRound's config for rounded inputs, around codes that lie as GPTQ's or AWQ's."""
    config = {
        "quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": packing == "gptq",
        "packing_format": f"auto_round:auto_{packing}", "block_name_to_quantize": "model.layers",
        "act_bits": 8,
    }  # fmt: skip
    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    path = other.folder(tmp_path / "out", other.model(store), config)
    verdict = verify_artifact(path, against=source, threads=1)
    ((severity, words),) = said(verdict)
    assert severity == "warning" and "does not read" in words and words.endswith("any other's")
    dense = 2 * other.VOCABULARY * other.HIDDEN + 5 * other.HIDDEN
    blocks = 2 * sum(rows * columns for rows, columns in other.LINEARS.values())
    assert verdict.unquantized_share == pytest.approx(dense / (dense + blocks))


def test_four_bits_are_multiplied_by_floats(tmp_path: Path) -> None:
    """llm-compressor's W4AFP8 stores its codes one a byte."""
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    (group,) = other.CT["config_groups"].values()
    groups = {"group_0": {**group, "input_activations": inputs, "format": "int-quantized"}}
    config = {**other.CT, "format": "int-quantized", "config_groups": groups}

    def store(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        fours = weight.reshape(len(weight), -1, 128)
        scale = (np.abs(fours).max(axis=2) / 7).astype(np.float16)
        codes = np.rint(fours / scale[..., None]).astype(np.int8).reshape(weight.shape)
        return {f"{module}.weight": ("I8", codes), f"{module}.weight_scale": ("F16", scale)}

    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    path = other.folder(tmp_path / "out", other.model(store), config)
    assert not said(verify_artifact(path, against=source, threads=1))


@pytest.mark.parametrize("keys", [("quantization",), ("quantization", "quantization_config")])
def test_mlx_is_named_and_counted(keys: tuple[str, ...], tmp_path: Path) -> None:
    """As mlx-lm writes it: no method is named, and codes lie in words of 32 bits by rows."""

    def store(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        bits = 8 if module.endswith("v_proj") else 4
        rows, columns = weight.shape
        grid = np.ones((rows, columns // 64), np.float16)
        return {
            f"{module}.weight": ("U32", np.ones((rows, columns * bits // 32), np.uint32)),
            f"{module}.scales": ("F16", grid), f"{module}.biases": ("F16", grid),
        }  # fmt: skip

    table = {"bits": 4, "group_size": 64, "mode": "mxfp4"}  # a mode that is not decoded
    for block in range(2):
        table[f"model.layers.{block}.self_attn.v_proj"] = {"bits": 8, "group_size": 64}
    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    path = other.folder(tmp_path / "out", other.model(store), {})
    config = json.loads((path / "config.json").read_text()) | dict.fromkeys(keys, table)
    (path / "config.json").write_text(json.dumps(config))
    verdict = verify_artifact(path, against=source, threads=1)
    assert verdict.format == "mlx"
    ((severity, words),) = said(verdict)
    assert severity == "warning" and "14 matrices" in words and "stored as mlx" in words
    entries = Artifact.open(path).entries
    for name, shape in other.LINEARS.items():
        assert entries[f"model.layers.1.{name}.weight"].shape == shape
    assert "cannot be opened" not in lines(verdict)[-1]
    refused = [f.message for f in verify_artifact(path, engine="transformers").findings]
    assert any("mlx-lm reads" in words for words in refused)


def test_rotations_that_are_not_done_here_are_no_errors(tmp_path: Path) -> None:
    """As llm-compressor's QuIP stores them: matrices below the layers, and a transform_config."""
    ends = [(False, "weight_output"), (True, "output")]
    apply = [{"targets": ["Linear"], "location": where, "inverse": inverse, "ignore": ["lm_head"]}
             for inverse, where in ends]  # fmt: skip
    group = {"type": "random-hadamard", "apply": apply, "randomize": False, "head_dim": None}
    config = {**other.CT, "transform_config": {"config_groups": {"u": group}}}
    turn = np.linalg.qr(np.random.default_rng(5).standard_normal((512, 512)))[0]

    def store(module: str, weight: NDArray[np.float32]) -> other.Tensors:
        rows = len(weight)
        matrix = np.linalg.qr(turn[:rows, :rows])[0]
        stored = other.pack_quantized(module, (matrix @ weight).astype(np.float32))
        return stored | {f"{module}.u_output.weight": ("F64", matrix)}

    source = other.folder(tmp_path / "source", other.model(other.dense), {})
    path = other.folder(tmp_path / "out", other.model(store), config)
    found = said(verify_artifact(path, against=source, threads=1))
    assert {severity for severity, _ in found} == {"note"}
    assert any("not done here" in words for _, words in found)
    assert any("mean nothing" in words for _, words in found)


def test_a_source_that_is_quantized_itself_is_told_of_beside_errors(tmp_path: Path) -> None:
    model = first_blocks_of_tiny(tmp_path / "model", 1)
    four = quantize(model, "w4g128-rtn", tmp_path / "four").out
    file = tmp_path / "q8_0.gguf"
    recipe = load("q8_0")
    assert isinstance(recipe, GgufRecipe)
    run_gguf(GgufRequest("tiny", model, recipe, file, 1), Progress(quiet=True))
    verdict = verify_artifact(four, against=file, threads=1)
    assert not verdict.ok and verdict.findings[-1].message == (
        f"{file} is itself quantized (Q8_0): unless the artifact was made of just that, give the "
        "original to --against"
    )
    (one,) = check_quantized(four)
    assert f"{four} is itself quantized (awq): unless" in one.message
    assert [*check_quantized(model)] == []


def test_a_row_of_the_source_that_nothing_holds(tmp_path: Path) -> None:
    """AWQ's scales are its reciprocals. What is wrong of a sane source is the artifact's."""
    sane = first_blocks_of_tiny(tmp_path / "sane", 1)
    model = Path(shutil.copytree(sane, tmp_path / "model"))
    tensors = load_file(model / "model.safetensors")
    tensors[UP][3] *= 1e8
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text = text_file(tmp_path / "text.txt")
    sets = (f"calibration.source={text}", "calibration.samples=4", "calibration.length=64")
    out = quantize(model, "w4g128-awq", tmp_path / "out", *sets).out
    for source, told in ((model, 1), (sane, 0)):
        findings = verify_artifact(out, against=source).findings
        assert any(f.severity == "error" and UP in f.message for f in findings)
        rows = [f.message for f in findings if "row 3 of the source is " in f.message]
        assert len(rows) == told and all(f"{UP}: " in row for row in rows)
