"""compressed-tensors and FP8: integers, FP8, NVFP4 and MXFP4 whose parts disagree."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.gallery.case import Broken
from support.gallery.packed import shape, values, without
from support.gallery.raw import Raw, edited, quantization

BLOCK = "model.layers.1"
DOWN, GATE, UP = (f"{BLOCK}.mlp.{name}_proj" for name in ("down", "gate", "up"))
Q = f"{BLOCK}.self_attn.q_proj"
EXPERT = f"{BLOCK}.mlp.experts.2"
E4M3_NAN, E8M0_NAN = 0x7F, 0xFF


def fill(number: float, at: int = 3) -> Callable[[NDArray[Any]], object]:
    """One number of a tensor."""

    def change(array: NDArray[Any]) -> None:
        array.reshape(-1)[at % array.size] = number

    return change


def times(factor: float) -> Callable[[NDArray[Any]], object]:
    """All numbers of a tensor."""

    def change(array: NDArray[Any]) -> None:
        array *= np.asarray(factor, array.dtype)

    return change


def weights(**changes: Any) -> Callable[[Path], None]:
    """What the config says of the weights of its first group."""

    def damage(folder: Path) -> None:
        with quantization(folder) as found:
            found["config_groups"]["group_0"]["weights"] |= changes

    return damage


def status(value: str) -> Callable[[Path], None]:
    """What compressed-tensors' config says of the state of its weights."""

    def damage(folder: Path) -> None:
        with quantization(folder) as found:
            found["quantization_status"] = value

    return damage


def ignore(*names: str) -> Callable[[Path], None]:
    """What the config leaves unquantized."""

    def damage(folder: Path) -> None:
        with quantization(folder) as found:
            found["ignore"] = list(names)

    return damage


def blocks(size: int) -> Callable[[Path], None]:
    """The size of FP8 blocks, by the config."""

    def damage(folder: Path) -> None:
        with quantization(folder) as found:
            found["weight_block_size"] = [size, size]

    return damage


def dense(*modules: str) -> Callable[[Path], None]:
    """Packed matrices replaced by float ones."""

    def damage(folder: Path) -> None:
        with edited(folder) as tensors:
            for name in [n for n in tensors if n.endswith(".weight_packed")]:
                module = name.removesuffix(".weight_packed")
                if not any(part in module for part in modules):
                    continue
                rows, columns = tensors[f"{module}.weight_shape"].array
                file = tensors[name].file
                for stored in [n for n in tensors if n.startswith(f"{module}.weight")]:
                    del tensors[stored]
                numbers = np.random.default_rng(1).standard_normal((rows, columns)) * 0.05
                data = numbers.astype("<f2").tobytes()
                tensors[f"{module}.weight"] = Raw("F16", (int(rows), int(columns)), data, file)

    return damage


def transposed(folder: Path) -> None:
    """The scales of blocks, the other way round."""
    with edited(folder) as tensors:
        name = f"{DOWN}.weight_scale_inv"
        tensors[name] = tensors[name].changed(tensors[name].array.T)


CASES = [
    Broken("nvfp4-gate-unlike-up", "vllm#54974", "nvfp4",
           values(f"{GATE}.weight_global_scale", times(2)), "global-scales", GATE,
           "different global scales"),
    Broken("nvfp4-expert-gate-unlike-up", "vllm#55073", "nvfp4-experts",
           values(f"{EXPERT}.gate_proj.weight_global_scale", times(0.5)), "global-scales",
           f"{EXPERT}.gate_proj", "different global scales"),
    Broken("nvfp4-global-scale-of-nan", "llm-compressor#2827", "nvfp4-experts",
           values(f"{EXPERT}.down_proj.weight_global_scale", fill(np.nan)), "scales",
           f"{EXPERT}.down_proj", "scale of the whole matrix is nan"),
    Broken("nvfp4-global-scale-of-0", "llm-compressor#2826", "nvfp4",
           values(f"{DOWN}.weight_global_scale", fill(0.0)), "scales", DOWN,
           "scale of the whole matrix is 0"),
    Broken("nvfp4-scale-of-nan", "AutoAWQ#724", "nvfp4",
           values(f"{DOWN}.weight_scale", fill(E4M3_NAN)), "scales", DOWN, "NaN"),
    Broken("mxfp4-scale-of-nan", "AutoAWQ#724", "mxfp4",
           values(f"{DOWN}.weight_scale", fill(E8M0_NAN)), "scales", DOWN, "NaN"),
    Broken("fp8-weight-of-nan", "AutoAWQ#724", "fp8", values(f"{DOWN}.weight", fill(E4M3_NAN)),
           "codes",
           DOWN, "NaN"),
    Broken("fp8-scale-of-0", "AutoAWQ#724", "fp8", values(f"{DOWN}.weight_scale", fill(0)),
           "scales", DOWN,
           "scales is 0"),
    Broken("fp8-scale-lost", "llm-compressor#959", "fp8", without(f"{Q}.weight_scale"), "shapes", Q,
           "weight_scale: missing"),
    Broken("int8-scale-of-infinity", "AutoAWQ#724", "int8",
           values(f"{Q}.weight_scale", fill(np.inf)),
           "scales", Q, "infinite"),
    Broken("block-scales-lost", "llm-compressor#959", "fp8-block",
           without(f"{DOWN}.weight_scale_inv"),
           "shapes", DOWN, "weight_scale_inv: missing"),
    Broken("block-scales-transposed", "llm-compressor#959", "fp8-block", transposed, "shapes", DOWN,
           r"is \[3, 2\]; expected \[2, 3\]"),
    Broken("blocks-of-another-size", "llm-compressor#959", "fp8-block", blocks(64), "shapes", DOWN,
           r"is \[2, 3\]; expected \[4, 6\]"),
    Broken("blocks-and-ranks", "vllm#5675", "fp8-block", lambda folder: None, "engine-block-split",
           "model.layers.0.mlp.down_proj", "384 / 2 = 192 is not a multiple of 128, its FP8",
           engine="vllm", tp=2),
    Broken("packed-cut", "AutoAWQ#602", "ct", shape(f"{DOWN}.weight_packed", 200), "shapes", DOWN,
           r"expected \[200, 3\]"),
    Broken("shape-of-another", "AutoAWQ#602", "ct", values(f"{DOWN}.weight_shape", fill(999, 1)),
           "shapes",
           DOWN, "999"),
    Broken("packed-scales-lost", "llm-compressor#959", "ct", without(f"{Q}.weight_scale"), "shapes",
           Q,
           "weight_scale: missing"),
    Broken("zero-points-lost", "vllm#38966", "ct-skewed", without(f"{Q}.weight_zero_point"),
           "shapes", Q,
           "weight_zero_point: missing"),
    Broken("called-symmetric", "vllm#38966", "ct-skewed", weights(symmetric=True), "zeros",
           "_proj", "symmetric"),
    Broken("bits-of-another", "AutoAWQ#602", "ct", weights(num_bits=8), "shapes", "_proj",
           "weights.num_bits 8, and the shapes of 14 .* are those of 4"),
    Broken("groups-of-another", "AutoAWQ#602", "ct", weights(group_size=64), "shapes", "_proj",
           "weights.group_size 64, and the shapes of 14 .* are those of 128"),
    Broken("ignore-hits-too-much", "mlp.gate in mlp.gate_proj", "ct",
           ignore("lm_head", r"re:.*mlp\.gate"), "dense-list", "gate_proj", "stored quantized"),
    Broken("ignore-forgets-experts", "llm-compressor#2060", "ct-experts", dense(".experts."),
           "dense-list", ".experts.", "experts are stored unquantized"),
    Broken("q-dense-in-compressed-tensors", "fused shards", "ct", dense(Q), "fused", "q_proj",
           "parts stored differently"),
    Broken("order-given-up", "vllm#7374", "ct", weights(actorder="group"), "engine-scheme", "_proj",
           "actorder group", engine="vllm"),
    Broken("never-said-to-be-packed", "saved by hand", "ct", status("frozen"), "engine-format", "",
           "by that of 'frozen': set quantization_status", engine="transformers"),
]  # fmt: skip
