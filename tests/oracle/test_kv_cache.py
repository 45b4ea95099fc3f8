"""compressed-tensors finds our scales of keys and values where it puts its own, in its shapes."""

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.oracle

FEW = ("calibration.samples=4", "calibration.length=64")
HEADS = "kv_cache={bits: 8, type: float, scale: head}"
INT4 = "kv_cache={bits: 4, type: int, scale: tensor}"


def test_scales_lie_where_the_library_has_them(
    compressed_tensors: Callable[..., object], quantize: Callable[..., Path]
) -> None:
    cases = [
        quantize("tiny", "kv-fp8", *FEW),
        quantize("tiny", "w8a8-dynamic", HEADS, *FEW),
        quantize("tiny", "w8a16-ct", INT4, *FEW),
    ]
    found = compressed_tensors("ct_cache.py", [str(path) for path in cases])
    assert isinstance(found, list)
    for path, theirs in zip(cases, found, strict=True):
        stored = load_file(path / "model.safetensors")
        ours = {n: list(t.shape) for n, t in stored.items() if n.endswith(("k_scale", "v_scale"))}
        assert ours == theirs and len(ours) == 8
