"""GPTQModel and compressed-tensors read our files to the same numbers as we do.

Everything here is exact: a code minus a zero times a float16 scale is exact in float32, and its
float16 rounding is what a float16 kernel computes.
"""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from qtool.artifacts.artifact import Artifact

pytestmark = pytest.mark.oracle

SYMMETRIC, ASYMMETRIC = "weights.symmetric=true", "weights.symmetric=false"


def gptq(bits: int, *sets: str) -> tuple[str, ...]:
    """Round to nearest in GPTQ's layout: no calibration needed to test a file format."""
    return ("w4g128-rtn", "format=gptq", f"weights.bits={bits}", *sets)


FEW = ("calibration.samples=8", "calibration.length=128")
CASES: dict[str, tuple[str, ...]] = {
    **{f"gptq-v1-{bits}": gptq(bits, SYMMETRIC) for bits in (2, 3, 4, 8)},
    **{f"gptq-v2-{bits}": gptq(bits, ASYMMETRIC) for bits in (2, 3, 4, 8)},
    "gptq-v1-g32": gptq(4, SYMMETRIC, "weights.group_size=32"),
    "gptq-v1-channel": gptq(4, SYMMETRIC, "weights.group_size=-1"),
    "gptq-v2-g64": gptq(4, ASYMMETRIC, "weights.group_size=64"),
    "awq-asymmetric": ("w4g128-rtn", ASYMMETRIC),
    "awq-symmetric": ("w4g128-rtn", SYMMETRIC),
    "awq-g32": ("w4g128-rtn", "weights.group_size=32"),
    "awq-channel": ("w4g128-rtn", "weights.group_size=-1"),
    "awq-searched": ("w4g64-awq", *FEW),
    "gptq-act-order": ("w4g64-gptq", "gptq.act_order=true", "gptq.static_groups=false", *FEW),
}


def quantized_modules(artifact: Path) -> list[str]:
    """Names of the modules that have a qweight, from the header alone."""
    names = []
    for file in sorted(artifact.glob("*.safetensors")):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        names += [key.removesuffix(".qweight") for key in header if key.endswith(".qweight")]
    assert names, f"nothing is quantized in {artifact}"
    return names


@pytest.fixture(scope="module")
def seen_by_gptqmodel(
    gptqmodel: Callable[..., object],
    quantize: Callable[..., Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, tuple[Path, dict[str, np.ndarray]]]:
    """case -> (artifact, module name -> float16 [in, out]); one start of the oracle for all."""
    out = tmp_path_factory.mktemp("gptqmodel")
    artifacts = {case: quantize("tiny", *arguments) for case, arguments in CASES.items()}
    request = [
        [str(path), f"{case.split('-')[0]}_torch", str(out / f"{case}.safetensors")]
        for case, path in artifacts.items()
    ]
    gptqmodel("gptqmodel_weights.py", request)
    return {c: (path, load_file(out / f"{c}.safetensors")) for c, path in artifacts.items()}


@pytest.mark.parametrize("case", CASES)
def test_gptqmodel_dequantizes_to_the_same_float16(
    case: str, seen_by_gptqmodel: dict[str, tuple[Path, dict[str, np.ndarray]]]
) -> None:
    path, theirs = seen_by_gptqmodel[case]
    modules = quantized_modules(path)
    assert sorted(theirs) == sorted(modules)
    artifact = Artifact.open(path)
    for name in modules:
        ours = artifact.read(f"{name}.weight").dequantize()
        np.testing.assert_array_equal(ours.astype(np.float16), theirs[name].T, err_msg=name)
        assert np.count_nonzero(ours), name


def test_the_act_order_case_has_unordered_groups(quantize: Callable[..., Path]) -> None:
    """Otherwise the case above would not test g_idx."""
    path = quantize("tiny", *CASES["gptq-act-order"])
    indices = [
        value
        for file in path.glob("*.safetensors")
        for name, value in load_file_of_integers(file, ".g_idx").items()
    ]
    assert any(np.any(np.diff(index) < 0) for index in indices)


def load_file_of_integers(file: Path, suffix: str) -> dict[str, np.ndarray]:
    """The int32 tensors whose name ends so."""
    raw = file.read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    found = {}
    for name, info in json.loads(raw[8:start]).items():
        if name.endswith(suffix):
            begin, end = info["data_offsets"]
            data = np.frombuffer(raw[start + begin : start + end], dtype="<i4")
            found[name] = data.reshape(info["shape"])
    return found


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_compressed_tensors_unpacks_symmetric_gptq(
    bits: int,
    compressed_tensors: Callable[..., object],
    quantize: Callable[..., Path],
    tmp_path: Path,
) -> None:
    path = quantize("tiny", *CASES[f"gptq-v1-{bits}"])
    files = list(path.glob("*.safetensors"))
    assert len(files) == 1
    out = tmp_path / "seen.safetensors"
    count = compressed_tensors("ct_weights.py", [str(files[0]), bits, str(out)])
    modules = quantized_modules(path)
    assert count == len(modules)
    theirs = load_file(out)
    artifact = Artifact.open(path)
    for name in modules:
        ours = artifact.read(f"{name}.weight")
        signed = ours.codes.astype(np.int16) - (1 << (bits - 1))
        np.testing.assert_array_equal(signed, theirs[f"{name}.codes"], err_msg=name)
        np.testing.assert_array_equal(ours.dequantize(), theirs[f"{name}.weight"], err_msg=name)
