"""Inputs that artifacts declare as rounded, ours among them, against compressed-tensors' own
emulation.

Its int8 divides by 127.5 where vLLM's kernels, and qtool, divide by 127, so symmetric int8 with
scales as inputs come is not among them.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.methods import activations
from qtool.methods.activations import Rounding
from qtool.quality.engine_inputs import declared

pytestmark = pytest.mark.oracle

FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
MX = {"type": "float", "strategy": "group", "group_size": 32, "dynamic": True,
      "scale_dtype": "torch.uint8"}  # fmt: skip
# Arguments; a global scale, a scale and a zero point where they are stored; ours.
Case = tuple[dict[str, object], float | None, float | None, int | None, Rounding]
CASES: list[Case] = [
    (FLOAT8 | {"strategy": "token", "dynamic": True}, None, None, None, activations.fp8(-1)),
    (FLOAT8 | {"strategy": "group", "group_size": 128, "dynamic": True}, None, None, None,
     activations.fp8(128)),
    (FLOAT8 | {"strategy": "tensor", "dynamic": False}, None, 0.02, None,
     activations.stored_fp8(0.02)),
    ({"num_bits": 8, "symmetric": True, "strategy": "tensor", "dynamic": False}, None, 0.03, 0,
     activations.stored_integers(8, 0.03, 0)),
    ({"num_bits": 8, "symmetric": False, "strategy": "tensor", "dynamic": False}, None, 0.03, -9,
     activations.stored_integers(8, 0.03, -9)),
    ({"num_bits": 8, "symmetric": False, "strategy": "token", "dynamic": True}, None, None, None,
     activations.integers(8, -1, False)),
    (MX | {"num_bits": 8}, None, None, None, activations.microscaling(8)),
    (MX | {"num_bits": 4}, None, None, None, activations.microscaling(4)),
    ({"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group",
      "group_size": 16, "dynamic": "local", "scale_dtype": "torch.float8_e4m3fn"}, 400.0, None,
     None, activations.nvfp4(400.0)),
]  # fmt: skip


def of_recipes(quantize: Callable[..., Path]) -> Iterator[Case]:
    """FP4 on both sides, as our artifacts of it say: a matrix of each."""
    few = ("calibration.samples=8", "calibration.length=128")
    for recipe, *sets in (("nvfp4-w4a4", *few), ("mxfp4-w4a4",)):
        path = quantize("tiny", recipe, *sets)
        config = json.loads((path / "config.json").read_text())["quantization_config"]
        arguments = config["config_groups"]["group_0"]["input_activations"]
        artifact = Artifact.open(path)
        module = "model.layers.1.self_attn.q_proj"
        outer = None
        if recipe.startswith("nvfp4"):
            outer = float(artifact.checkpoint.array(f"{module}.input_global_scale")[0])
        rounding = declared(artifact).of_matrix[f"{module}.weight"]
        yield arguments, outer, None, None, rounding


def test_inputs_are_rounded_alike(
    compressed_tensors: Callable[..., object], quantize: Callable[..., Path], tmp_path: Path
) -> None:
    """But for codes beside a tie: products and quotients are rounded in another order."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((1, 64, 512)) * np.exp2(rng.integers(-2, 3, (1, 64, 1)))
    values = torch.from_numpy(x.astype(np.float32))
    save_file({"x": values}, tmp_path / "x.safetensors")
    cases = [*CASES, *of_recipes(quantize)]
    wanted = [case[:4] for case in cases]
    compressed_tensors(
        "ct_inputs.py", [str(tmp_path / "x.safetensors"), str(tmp_path / "y.safetensors"), wanted]
    )
    theirs = load_file(tmp_path / "y.safetensors")
    for number, case in enumerate(cases):
        ours, expected = case[4].apply(values), theirs[str(number)]
        different = float(((ours - expected).abs() > 1e-5 * expected.abs()).double().mean())
        print(f"{case[4].name} {case[0]}: {different:.2%} of the numbers differ")
        assert different < 0.002
        assert float((expected - values).abs().max()) > 1e-3
