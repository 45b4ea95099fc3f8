"""Small artifacts for tests: random quantized matrices, and folders that hold them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.formats import FORMATS, Facts
from qtool.formats.safetensors_file import Layout, StreamWriter, TensorSpec, plan_shards
from qtool.scheme import GroupQuant, Scheme

DTYPES = {"float32": "F32", "float16": "F16", "int32": "I32", "int64": "I64", "uint8": "U8"}


def random_quant(
    scheme: Scheme, rows: int, columns: int, seed: int = 0, act_order: bool = False
) -> GroupQuant:
    """Codes, zeros and scales from a generator; zeros in the middle where symmetric."""
    rng = np.random.default_rng(seed)
    groups = scheme.groups(columns)
    top = 1 << scheme.bits
    zero = rng.integers(0, top, (rows, groups), dtype=np.uint8)
    if scheme.symmetric:
        zero[:] = top // 2
    index = None
    if act_order:
        index = (rng.permutation(columns) // scheme.group_size).astype(np.int32)
    codes = rng.integers(0, top, (rows, columns), dtype=np.uint8)
    scale = rng.uniform(0.001, 0.1, (rows, groups)).astype(np.float16)
    return GroupQuant(scheme, codes, scale, zero, index)


def assert_same(found: GroupQuant, expected: GroupQuant) -> None:
    """Bit for bit, scheme included."""
    assert found.scheme == expected.scheme
    for name in ("codes", "scale", "zero"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == right.dtype and left.shape == right.shape, name
        assert np.array_equal(left, right), name
    assert (found.g_idx is None) == (expected.g_idx is None)
    if found.g_idx is not None and expected.g_idx is not None:
        assert np.array_equal(found.g_idx, expected.g_idx)


def write_folder(
    folder: Path,
    kind: str,
    quants: Mapping[str, GroupQuant],
    dense: Mapping[str, NDArray[Any]] | None = None,
    layout: str | None = None,
    shard_bytes: int = 10**9,
) -> tuple[Layout, dict[str, int]]:
    """An artifact of format `kind` in an existing folder; its layout and checksums."""
    module = FORMATS[kind]
    options = module.choose([q.scheme for q in quants.values()], layout)
    stored: dict[str, NDArray[Any]] = {}
    specs: list[TensorSpec] = []
    for name, quant in quants.items():
        stored |= module.pack(name, quant, options)
        specs += module.specs(name, quant.scheme, quant.shape, options)
    for name, array in (dense or {}).items():
        stored[name] = array
        specs.append(TensorSpec(name, DTYPES[str(array.dtype)], array.shape))
    planned = plan_shards(specs, shard_bytes)
    with StreamWriter(folder, planned) as writer:
        for name, array in reversed(stored.items()):  # any order will do
            writer.add(name, array)
    config: dict[str, Any] = {"model_type": "llama"}
    if quants:
        schemes = {name: quant.scheme for name, quant in quants.items()}
        orders = any(q.g_idx is not None for q in quants.values())
        linears = [n.removesuffix(".weight") for n, a in (dense or {}).items() if a.ndim == 2]
        facts = Facts(schemes, dense=linears, version="0", act_order=orders)
        config["quantization_config"] = module.config(facts, options)
        for name, content in module.side_files(facts, options).items():
            (folder / name).write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps(config))
    return planned, writer.checksums
