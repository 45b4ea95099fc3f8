"""The compressed-tensors package reads our artifacts to the very numbers that we read.

It dequantizes in the dtype of the scales (bfloat16 for FP4): ours, exact in float32 or rounded
once, is rounded to that dtype for the comparison, and then every bit is equal.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from qtool.artifacts.artifact import Artifact
from qtool.scheme import GroupQuant

pytestmark = pytest.mark.oracle

PACK = ("w8a16-ct",)
FEW = ("calibration.samples=8", "calibration.length=128")
MIXED = 'overrides=[{match: "*.down_proj", weights: {bits: 8, group_size: -1}}, \
{match: "*.1.*.o_proj", weights: {bits: 3}}, {match: "*.2.mlp.*", dense: true}]'
CASES: dict[str, tuple[str, ...]] = {
    **{
        f"pack-{bits}-{kind}-{size}": (
            *PACK, f"weights.bits={bits}", f"weights.group_size={size}",
            f"weights.symmetric={'true' if kind == 'sym' else 'false'}",
        )
        for bits in range(2, 9) for kind in ("sym", "asym") for size in (-1, 64)
    },
    "mixed": (*PACK, "weights.bits=4", "weights.group_size=32", MIXED),
    "gptq": ("w4a16-ct", *FEW),
    "awq": ("w4a16-ct-awq", *FEW),
    "w8a8": ("w8a8-dynamic",),
    "w8a8-gptq": ("w8a8-dynamic", "method=gptq", *FEW),
    "w4a8": ("w8a8-dynamic", "weights.bits=4", "weights.group_size=128"),
    "fp8-channel": ("fp8-dynamic",),
    "fp8-tensor": ("fp8-dynamic", "weights.rows=-1"),
    "fp8-block": ("fp8-block",),
    "fp8-static": ("fp8-static", *FEW),
    "w8a8-static": ("w8a8-static", *FEW),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("mxfp4",),
    "nvfp4-w4a4": ("nvfp4-w4a4", *FEW),
    "mxfp4-w4a4": ("mxfp4-w4a4",),
    "mxfp8": ("mxfp4", "weights.type=mxfp8", "weights.bits=8"),
}  # fmt: skip
LAYOUTS = {"w8a8": "int-quantized", "w8a8-gptq": "int-quantized", "w4a8": "int-quantized",
           "fp8-channel": "float-quantized", "fp8-tensor": "float-quantized",
           "fp8-block": "float-quantized", "fp8-static": "float-quantized",
           "w8a8-static": "int-quantized", "nvfp4": "nvfp4-pack-quantized",
           "mxfp4": "mxfp4-pack-quantized", "mxfp8": "mxfp8-quantized",
           "nvfp4-w4a4": "nvfp4-pack-quantized",
           "mxfp4-w4a4": "mxfp4-pack-quantized"}  # fmt: skip

Seen = dict[str, tuple[Path, dict[str, torch.Tensor], dict[str, int]]]


@pytest.fixture(scope="module")
def seen(
    compressed_tensors: Callable[..., object],
    quantize: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Seen:
    """case -> (artifact, module -> weight, formats); one start of the oracle for all."""
    out = tmp_path_factory.mktemp("compressed_tensors")
    artifacts = {case: quantize("tiny", *arguments) for case, arguments in CASES.items()}
    request = [[str(path), str(out / f"{c}.safetensors")] for c, path in artifacts.items()]
    formats = compressed_tensors("ct_decompress.py", request)
    assert isinstance(formats, list)
    return {
        case: (path, load_file(out / f"{case}.safetensors"), used)
        for (case, path), used in zip(artifacts.items(), formats, strict=True)
    }


@pytest.mark.parametrize("case", CASES)
def test_the_package_decompresses_to_our_numbers(case: str, seen: Seen) -> None:
    path, theirs, formats = seen[case]
    artifact = Artifact.open(path)
    quantized = {e.module for e in artifact.entries.values() if e.scheme is not None}
    assert quantized == theirs.keys() and len(quantized) == (25 if case == "mixed" else 28)
    assert set(formats) == {LAYOUTS.get(case, "pack-quantized")}
    for name, weight in theirs.items():
        found = artifact.read(name)
        assert isinstance(found, GroupQuant)
        ours = torch.from_numpy(found.dequantize()).to(weight.dtype)
        assert torch.equal(ours.view(torch.uint8), weight.view(torch.uint8)), name
        assert torch.count_nonzero(ours), name
    if case == "mixed":
        kinds = {str(e.scheme) for e in artifact.entries.values() if e.scheme is not None}
        assert kinds == {"w4 g32 sym", "w3 g32 sym", "w8 channel sym"}


def test_fused_matrices_have_one_scale(seen: Seen) -> None:
    """Engines take the largest of q, k and v: it must be the scale of each."""
    for case in ("nvfp4", "fp8-tensor"):
        artifact = Artifact.open(seen[case][0])
        for block in range(4):
            prefix = f"model.layers.{block}"
            for parts in (("q", "k", "v"), ("gate", "up")):
                where = "self_attn" if "q" in parts else "mlp"
                quants = [artifact.read(f"{prefix}.{where}.{p}_proj") for p in parts]
                values = {q.outer if case == "nvfp4" else float(q.scale[0, 0]) for q in quants}
                assert len(values) == 1 and None not in values


# The dtype that a model is loaded in: scales of float16 are exact in float32 only.
LOADED = {
    "gptq": "float32",
    "w8a8": "float32",
    "fp8-channel": "bfloat16",
    "fp8-block": "bfloat16",
    "nvfp4": "bfloat16",
    "mxfp4": "bfloat16",
}


def assert_loaded(path: Path, theirs: dict[str, torch.Tensor]) -> None:
    """transformers has the weights that we read, in its dtype."""
    artifact = Artifact.open(path)
    quantized = {e.name for e in artifact.entries.values() if e.scheme is not None}
    assert quantized == theirs.keys()
    for name, weight in theirs.items():
        found = artifact.read(name)
        assert isinstance(found, GroupQuant)
        assert torch.equal(torch.from_numpy(found.dequantize()).to(weight.dtype), weight), name


def test_transformers_loads_our_artifacts(
    compressed_tensors: Callable[..., object], quantize: Callable[..., Path], tmp_path: Path
) -> None:
    paths = {case: quantize("tiny", *CASES[case]) for case in LOADED}
    request = [[str(paths[c]), dtype, str(tmp_path / c)] for c, dtype in LOADED.items()]
    compressed_tensors("transformers_weights.py", request)
    for case, path in paths.items():
        assert_loaded(path, load_file(tmp_path / case))


def test_transformers_loads_asymmetric_artifacts(
    vllm: Callable[..., object], quantize: Callable[..., Path], tmp_path: Path
) -> None:
    """vLLM's Python has compressed-tensors 0.17; since 0.19 packed zeros have other shapes."""
    path = quantize("tiny", *CASES["awq"])
    vllm("transformers_weights.py", [[str(path), "float32", str(tmp_path / "seen")]])
    assert_loaded(path, load_file(tmp_path / "seen"))


def test_transformers_loads_fp8_with_weight_scale_inv(
    gptqmodel: Callable[..., object], quantize: Callable[..., Path], tmp_path: Path
) -> None:
    """Without a GPU it dequantizes; any Python with transformers and accelerate would do."""
    path = quantize("tiny", "fp8-block-hf")
    gptqmodel("transformers_weights.py", [[str(path), "bfloat16", str(tmp_path / "seen")]])
    assert_loaded(path, load_file(tmp_path / "seen"))
