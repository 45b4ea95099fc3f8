"""gpt-oss as GGUF: experts in MXFP4 or interleaved and transposed, their biases, what is
refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qtool import native_gguf
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.safetensors_header import TensorInfo
from qtool.gguf.from_hf.expert_rows import biases, packed_rows
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.source import SourceTensor, as_floats
from qtool.gguf_types import BY_NAME
from qtool.messages.progress import Progress
from qtool.quantizing.calibrate import calibrate, opened
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import Calibration, load
from qtool.runs.gguf_request import GgufRequest
from support.gguf import gguf_from_hf, gguf_models
from support.gguf.families import sparse
from support.gguf.gguf_from_hf import without_tokenizers
from support.runs import quantizing

__all__ = ["without_tokenizers"]


def tensors_of(folder: Path) -> dict[str, SourceTensor]:
    return {tensor.name: tensor for tensor in hf_source(Checkpoint.open(folder)).tensors}


def test_the_same_numbers_as_plain_experts(tmp_path: Path) -> None:
    """MXFP4 against the transposed float32 of its definition, any rows of it."""
    packed = gguf_models.build("gpt-oss-mxfp4", tmp_path / "packed")
    mine = tensors_of(packed)
    plain = tensors_of(sparse.unpacked(packed))
    assert mine.keys() == plain.keys()
    for name, tensor in mine.items():
        other = plain[name]
        assert tensor.shape == other.shape
        for first, last in ((0, tensor.rows), (tensor.rows // 3, tensor.rows // 2)):
            raw = np.ascontiguousarray(tensor.read(first, last))
            wanted = as_floats(other, other.read(first, last))
            assert np.array_equal(as_floats(tensor, raw), wanted), name
        experts = name.endswith("_exps.weight")
        assert (tensor.type.name == "MXFP4") == experts
        assert (other.cut is not None) == experts


@pytest.mark.parametrize(("recipe", "number"), [("f16", 38), ("bf16", 38), ("q8_0", 7)])
def test_experts_stay_as_they_were_trained(recipe: str, number: int, tmp_path: Path) -> None:
    folder = gguf_models.build("gpt-oss-mxfp4", tmp_path / "packed", dtype="bfloat16")
    file = gguf_from_hf.write(folder, tmp_path / "model.gguf", recipe)
    assert file.metadata["general.file_type"].value == number
    for name, tensor in tensors_of(folder).items():
        if name.endswith("_exps.weight"):
            assert file.tensors[name].type.name == "MXFP4"
            assert np.array_equal(gguf_from_hf.raw(file, name), tensor.read(0, tensor.rows))


def test_plain_experts_are_quantized(tmp_path: Path) -> None:
    folder = gguf_models.build("gpt-oss", tmp_path / "plain", dtype="bfloat16")
    file = gguf_from_hf.write(folder, tmp_path / "model.gguf", "q8_0")
    tensor = tensors_of(folder)["blk.1.ffn_up_exps.weight"]
    values = as_floats(tensor, tensor.read(0, tensor.rows))
    wanted = native_gguf.encode(values, BY_NAME["Q8_0"])
    assert np.array_equal(gguf_from_hf.raw(file, tensor.name), wanted)


def test_importance_of_what_lies_beside_the_experts(tmp_path: Path) -> None:
    """Measured with experts as numbers, which are written as they are."""
    folder = quantizing.add_tokenizer(
        gguf_models.build("gpt-oss-mxfp4", tmp_path / "packed", dtype="bfloat16")
    )
    text = quantizing.text_file(tmp_path / "text.txt", 4000)
    sets = ["importance=true", f"calibration.source={text}", "calibration.samples=4",
            "calibration.length=16"]  # fmt: skip
    found = []
    for name, model in (("packed", folder), ("plain", sparse.unpacked(folder))):
        quantizing.add_tokenizer(model)
        out = tmp_path / f"{name}.gguf"
        recipe = load("q4_0", sets)
        run_gguf(GgufRequest(str(model), model, recipe, out, 1), Progress(quiet=True))
        found.append(GgufFile.open(out))
    packed, plain = found
    without = gguf_from_hf.write(folder, tmp_path / "without.gguf", "q4_0")
    for name, info in packed.tensors.items():
        if not name.endswith("_exps.weight"):
            mine = gguf_from_hf.raw(packed, name)
            assert np.array_equal(mine, gguf_from_hf.raw(plain, name)), name
            weighed = not np.array_equal(mine, gguf_from_hf.raw(without, name))
            assert weighed == (".attn_" in name and info.type.name == "Q4_0"), name


def test_experts_in_mxfp4_are_not_changed(tmp_path: Path) -> None:
    folder = gguf_models.build("gpt-oss-mxfp4", tmp_path / "packed", dtype="bfloat16")
    with pytest.raises(UnsupportedError, match="make a plain checkpoint of the model first"):
        gguf_from_hf.write(folder, tmp_path / "model.gguf", "q4_k_m-awq-gptq")
    with opened(folder, None) as (weights, _), pytest.raises(UnsupportedError, match="MXFP4"):
        calibrate(weights, tmp_path / "s", Calibration(), frozenset(), 1, Progress(quiet=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, and it takes 7.0"),
        ({"attention_bias": False}, "does not go without biases"),
        ({"quantization_config": {"quant_method": "awq"}}, "this checkpoint is quantized"),
        ({"quantization_config": ["mxfp4"]}, "this checkpoint is quantized"),
        ({"num_local_experts": 3}, r"has the shape \[4, .* it should be \[3, "),
    ],
)
def test_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = gguf_models.build("gpt-oss-mxfp4", tmp_path / "packed")
    gguf_models.rewrite_config(folder, lambda config: config.update(change))
    with pytest.raises(QtoolError, match=message):
        hf_source(Checkpoint.open(folder))


def test_a_ramp_that_is_not_rounded_is_told(tmp_path: Path) -> None:
    folder = gguf_models.build("gpt-oss", tmp_path / "plain")
    assert not hf_source(Checkpoint.open(folder)).warnings

    def change(config: dict[str, Any]) -> None:
        config["rope_parameters"]["truncate"] = False

    gguf_models.rewrite_config(folder, change)
    (said,) = hf_source(Checkpoint.open(folder)).warnings
    assert said.startswith("truncate of the rope settings is false")


def test_parts_that_do_not_belong_together() -> None:
    def part(dtype: str, *shape: int) -> Any:
        return lambda a, b: np.zeros(b - a, np.uint8), TensorInfo("w", dtype, shape, 0, 0)

    for blocks, scales in (
        (part("U8", 2, 4, 3, 8), part("U8", 2, 4, 3)),
        (part("U8", 2, 4, 3, 16), part("U8", 2, 4, 2)),
        (part("U8", 2, 4, 3, 16), part("F16", 2, 4, 3)),
    ):
        with pytest.raises(FormatError, match="one scale for each group"):
            packed_rows(blocks, scales, None)
    with pytest.raises(FormatError, match="expected floats"):
        biases(part("U8", 2, 4), None)
