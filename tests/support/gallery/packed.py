"""AWQ and GPTQ artifacts whose numbers, tensors or configs are wrong."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.gallery.case import Broken
from support.gallery.raw import Raw, edited, quantization

BLOCK = "model.layers.1"
DOWN, GATE, Q = f"{BLOCK}.mlp.down_proj", f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.self_attn.q_proj"
EXPERT = f"{BLOCK}.mlp.experts.2"
PARTS = ("qweight", "qzeros", "scales", "g_idx")


def _nibbles(words: NDArray[Any], change: Callable[[NDArray[Any]], NDArray[Any]]) -> NDArray[Any]:
    """int32 words with every field of four bits changed."""
    shifts = np.arange(0, 32, 4, dtype=np.uint32)
    fields = (words.astype("<u4")[..., None] >> shifts) & 15
    changed = change(fields).astype(np.uint32) & 15
    return np.bitwise_or.reduce(changed << shifts, axis=-1).astype("<u4").view("<i4")


def zeros(change: Callable[[NDArray[Any]], NDArray[Any]], only: str = "") -> Callable[[Path], None]:
    """Every stored zero changed, of all matrices or of one."""

    def damage(folder: Path) -> None:
        with edited(folder) as tensors:
            for name, stored in tensors.items():
                if name.endswith(".qzeros") and only in name:
                    tensors[name] = stored.changed(_nibbles(stored.array, change))

    return damage


def values(name: str, change: Callable[[NDArray[Any]], object]) -> Callable[[Path], None]:
    """The numbers of one tensor changed in place."""

    def damage(folder: Path) -> None:
        with edited(folder) as tensors:
            array = tensors[name].array.copy()
            change(array)
            tensors[name] = tensors[name].changed(array)

    return damage


def scale(value: float) -> Callable[[Path], None]:
    """One scale of one matrix."""

    def change(scales: NDArray[Any]) -> None:
        scales[1, 7] = value

    return values(f"{DOWN}.scales", change)


def shape(name: str, rows: int) -> Callable[[Path], None]:
    """A tensor cut short."""

    def damage(folder: Path) -> None:
        with edited(folder) as tensors:
            tensors[name] = tensors[name].changed(tensors[name].array[:rows])

    return damage


def without(*ends: str) -> Callable[[Path], None]:
    """Tensors whose names contain one of these are lost."""

    def damage(folder: Path) -> None:
        with edited(folder) as tensors:
            for name in [n for n in tensors if any(end in n for end in ends)]:
                del tensors[name]

    return damage


def dense(*modules: str) -> Callable[[Path], None]:
    """Packed matrices replaced by float ones."""

    def damage(folder: Path) -> None:
        with edited(folder) as tensors:
            for module in [n.removesuffix(".qweight") for n in tensors if n.endswith(".qweight")]:
                if any(part in module for part in modules):
                    rows, columns = _shape(tensors, module)
                    file = tensors[f"{module}.qweight"].file
                    for part in PARTS:
                        tensors.pop(f"{module}.{part}", None)
                    numbers = np.random.default_rng(1).standard_normal((rows, columns)) * 0.05
                    data = numbers.astype("<f2").tobytes()
                    tensors[f"{module}.weight"] = Raw("F16", (rows, columns), data, file)

    return damage


def _shape(tensors: dict[str, Raw], module: str) -> tuple[int, int]:
    """[out, in] of a matrix of 4 bits, AWQ's or GPTQ's."""
    weight, rows = tensors[f"{module}.qweight"].shape, tensors[f"{module}.scales"].shape[1]
    return rows, weight[0] if weight[1] * 8 == rows else weight[0] * 8


def config(**changes: Any) -> Callable[[Path], None]:
    """Keys of the quantization_config; a key that is None goes."""

    def damage(folder: Path) -> None:
        with quantization(folder) as found:
            found |= changes
            for key in [key for key, value in changes.items() if value is None]:
                del found[key]

    return damage


def beside(folder: Path) -> None:
    """The file beside config.json tells another group size."""
    path = folder / "quantize_config.json"
    text = path.read_text()
    assert '"group_size": 128' in text
    path.write_text(text.replace('"group_size": 128', '"group_size": 64'))


def _off_grid(index: NDArray[Any]) -> None:
    index[5] = 99


def _uneven(index: NDArray[Any]) -> None:
    index[:64] = 1


def _backwards(index: NDArray[Any]) -> None:
    index[:] = index[::-1].copy()


def _same(words: NDArray[Any]) -> None:
    words[:] = 0x33333333


def _honestly_dense(folder: Path) -> None:
    """The experts are dense, and the config says so: smaller than the model, but not by much."""
    dense(".experts.")(folder)
    config(modules_to_not_convert=["lm_head", "mlp.gate", "mlp.experts"])(folder)


CASES = [
    Broken(
        "v2-zeros-called-v1", "vllm#38966", "gptq", zeros(lambda z: z + 1),
        "zero-convention", "q_proj", "set checkpoint_format to gptq_v2",
    ),
    Broken(
        "v1-zeros-called-v2", "vllm#26092", "gptq", config(checkpoint_format="gptq_v2"),
        "zero-convention", "_proj", "set checkpoint_format to gptq",
    ),
    Broken(
        "asymmetric-v2-called-v1", "vllm#26343", "gptq-v2", config(checkpoint_format="gptq"),
        "zero-convention", "_proj", "the zeros are gptq_v2's",
    ),
    Broken(
        "asymmetric-v1-called-v2", "vllm#38966", "gptq-v2", zeros(lambda z: z - 1),
        "zero-convention", "_proj", "the zeros are gptq's",
    ),
    Broken(
        "zero-0-stored-as-15", "GPTQModel#2350", "awq",
        zeros(lambda z: np.where(z == 0, 15, z)), "zeros", "down_proj", "ran over the end",
    ),
    Broken(
        "awq-zeros-less-one", "GPTQModel#2351", "awq", zeros(lambda z: z - 1),
        "zero-convention", "_proj", "off by one",
    ),
    Broken(
        "symmetric-with-other-zeros", "vllm#38966", "gptq",
        zeros(lambda z: np.where(z == 7, 3, z), only=Q), "zeros", Q, "says symmetric",
    ),
    Broken("nan-scale", "un-routed experts", "awq", scale(float("nan")),
           "scales", DOWN, "NaN or infinite"),
    Broken("infinite-scale", "AutoAWQ#724", "gptq", scale(float("inf")),
           "scales", DOWN, "NaN or infinite"),
    Broken("zero-scale", "AutoAWQ#458", "awq", scale(0.0), "scales", DOWN, "scales is 0"),
    Broken("negative-scale", "AutoAWQ#724", "gptq", scale(-0.01), "scales", DOWN,
           "scales is negative"),
    Broken("one-code-everywhere", "AutoAWQ#498", "gptq", values(f"{GATE}.qweight", _same),
           "codes", GATE, "every code is 3"),
    Broken(
        "expert-of-nan-scales", "llm-compressor#2826", "awq-experts",
        values(f"{EXPERT}.up_proj.scales", lambda scales: scales.fill(np.nan)),
        "scales", f"{EXPERT}.up_proj", "fetch or make the artifact again",
    ),
    Broken("norm-of-nan", "llm-compressor#1349", "awq",
           values("model.norm.weight", lambda values: values.fill(np.nan)),
           "dense-values", "model.norm.weight", "NaN|finite"),
    Broken("qweight-cut", "AutoAWQ#602", "awq", shape(f"{DOWN}.qweight", 256), "shapes", DOWN,
           "expected"),
    Broken("qzeros-cut", "AutoAWQ#602", "gptq", shape(f"{DOWN}.qzeros", 1), "shapes", DOWN,
           "expected"),
    Broken("qzeros-lost", "AutoAWQ#602", "awq", without(f"{Q}.qzeros"), "shapes", Q, "missing"),
    Broken("scales-lost", "llm-compressor#959", "gptq", without(f"{Q}.scales"), "shapes", Q,
           "missing"),
    Broken("codes-lost", "GPTQModel#2643", "gptq", without(f"{Q}.qweight"), "tensors", Q,
           "of which there are no codes"),
    Broken("order-out-of-range", "vllm#7374", "gptq", values(f"{DOWN}.g_idx", _off_grid),
           "shapes", DOWN, "outside of 0"),
    Broken("order-uneven", "vllm#7374", "gptq", values(f"{DOWN}.g_idx", _uneven),
           "g-idx", DOWN, "columns"),
    Broken("order-unsaid", "vllm#916", "gptq",
           values(f"{DOWN}.g_idx", _backwards),
           "g-idx", DOWN, "desc_act false"),
    Broken("group-size-of-config", "AutoAWQ#602", "awq", config(group_size=64), "shapes", "_proj",
           "config.group_size 64, and the shapes of 14 .* are those of 128"),
    Broken("bits-of-config", "AutoAWQ#602", "gptq", config(bits=8), "scheme", "_proj",
           "says 8 bits"),
    Broken("bits-of-awq-config", "AutoAWQ#602", "awq", config(bits=8), "shapes", "_proj",
           "config.bits 8, and the shapes of 14 .* are those of 4"),
    Broken("files-beside-disagree", "vllm#38966", "gptq", beside,
           "side-config", "quantize_config.json", "group_size 128.* 64"),
    Broken("config-forgets-method", "Model-Optimizer#1173", "awq",
           config(quant_method="gptq", desc_act=False),
           "shapes", "_proj", 'quant_method "gptq", and the shapes of 14 .* are those of "awq"'),
    Broken("called-dense-but-packed", "fused list", "awq",
           config(modules_to_not_convert=["lm_head", "self_attn.q_proj"]),
           "dense-list", "q_proj", "stored quantized"),
    Broken("substring-trap", "mlp.gate in mlp.gate_proj", "awq",
           config(modules_to_not_convert=["lm_head", "mlp.gate"]),
           "dense-list", "gate_proj", "stored quantized"),
    Broken("experts-left-dense", "Model-Optimizer#1173", "awq-experts", dense(".experts."),
           "dense-list", ".experts.", "matrices of experts are stored unquantized"),
    Broken("most-of-it-dense", "Model-Optimizer#2011", "awq-experts", _honestly_dense,
           "unquantized", ".experts.", "unquantized, most of them experts", severity="warning"),
    Broken("one-expert-dense", "GPTQModel#1680", "awq-experts", dense(f"{EXPERT}."),
           "fused", "experts", "parts stored differently"),
    Broken("expert-lost", "llm-compressor#2826", "awq-experts", without(f"{EXPERT}.down_proj."),
           "tensors", EXPERT, "of its 4 experts"),
    Broken("q-of-another-scheme", "fused shards", "gptq", dense(Q), "fused", Q.rpartition(".")[0],
           "parts stored differently"),
    Broken("gate-without-up", "fused shards", "awq", dense(GATE), "fused", BLOCK,
           "parts stored differently"),
    Broken("block-lost", "GPTQModel#2643", "awq", without(f"{BLOCK}."), "tensors", "model.layers.1",
           "says 2 blocks"),
    Broken("norm-lost", "GPTQModel#2643", "awq", without(f"{BLOCK}.input_layernorm"), "tensors",
           f"{BLOCK}.input_layernorm", "that LlamaForCausalLM needs"),
]  # fmt: skip
