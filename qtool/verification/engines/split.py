"""What tensor parallelism asks of shapes: heads, widths, groups and blocks that can be shared out.

vLLM and SGLang give each of N ranks 1/N of the query heads and of every width between two
matrices; a rank must get whole groups, whole words and whole FP8 blocks. The vocabulary is padded.
Sources: vLLM 0.33 (ModelConfig.verify_with_parallel_config, models/llama, marlin_utils,
fp8_utils.validate_fp8_block_shape, verify_group_size_divides_partition), SGLang (gptq, awq, fp8).
"""

from collections.abc import Iterator

from qtool.checkpoints import padding
from qtool.verification.engines.targets import weight_arguments
from qtool.verification.engines.view import EngineView, Layer, alike
from qtool.verification.finding import Finding

GROUP_SIZES = (-1, 32, 64, 128)  # that Marlin takes
_FOLLOWED = {"q_proj", "k_proj", "gate_proj", "w1", "q_a_proj"}  # by another part of a fused layer


def split_findings(view: EngineView, who: str, tp: int) -> Iterator[Finding]:
    """All that one more rank may break."""
    yield from _heads(view, who, tp)
    yield from alike(
        "error", "engine-split", _split_layers(view, tp), lambda layer: _width(layer, tp),
        who + " will refuse {}",
    )  # fmt: skip
    heads = view.number("num_attention_heads") or 0
    yield from alike(
        "error", "engine-group-split", view.quantized, lambda layer: _group(view, layer, tp, heads),
        who + " will refuse {}",
    )  # fmt: skip
    yield from alike(
        "error", "engine-packing", view.quantized, lambda layer: _words(view, layer, tp),
        who + " will refuse {}",
    )  # fmt: skip
    yield from alike(
        "error", "engine-block-split", view.quantized, lambda layer: _blocks(view, layer, tp),
        who + " will refuse {}",
    )  # fmt: skip


def ranks_of(view: EngineView, layer: Layer, tp: int) -> int:
    """Between how many ranks a layer is split; keys and values of few heads are repeated."""
    key_heads = view.number("num_key_value_heads")
    if layer.whole:
        return 1
    if layer.last in ("k_proj", "v_proj") and key_heads is not None:
        return min(tp, key_heads)
    return tp


def _split_layers(view: EngineView, tp: int) -> list[Layer]:
    return [layer for layer in view.layers if ranks_of(view, layer, tp) == tp and tp > 1]


def _heads(view: EngineView, who: str, tp: int) -> Iterator[Finding]:
    heads, keys = view.number("num_attention_heads", "n_head"), view.number("num_key_value_heads")
    if heads is not None and heads % tp:
        fewer = max(n for n in range(1, tp) if heads % n == 0 and _repeats(keys or heads, n))
        yield Finding(
            "error", "engine-heads", "",
            f"{who} will refuse the model: its {heads} attention heads cannot be shared out "
            f"between {tp} ranks; use --tp {fewer}",
        )  # fmt: skip
    elif keys is not None and not _repeats(keys, tp):
        yield Finding(
            "error", "engine-heads", "",
            f"{who} will refuse the model: its {keys} key and value heads can neither be shared "
            f"out nor repeated evenly between {tp} ranks; use a --tp that divides {keys} or that "
            f"{keys} divides",
        )  # fmt: skip


def _repeats(keys: int, tp: int) -> bool:
    """Whether key and value heads are shared out, or repeated, evenly."""
    return (keys % tp if keys >= tp else tp % keys) == 0


def _width(layer: Layer, tp: int) -> str | None:
    what, width = "out_features", layer.out_features
    if layer.input_split:
        what, width = "in_features", layer.in_features
    if width % tp == 0:
        return None
    size = max(1, layer.stored.group_size) if layer.stored is not None else 1
    pad = f", or {padding.advice(size * tp)}" if layer.paddable else ""
    return f"{what} {width} is not divisible by {tp}; use fewer ranks{pad}"


def _group(view: EngineView, layer: Layer, tp: int, heads: int) -> str | None:
    stored, width = layer.stored, layer.in_features
    if stored is None or not layer.input_split or width % tp:
        return None
    size = stored.group_size
    if size <= 0 or size >= width or width // tp % size == 0 or tp == 1:
        return None
    ways = []
    keys = view.number("num_key_value_heads") or heads
    fewer = [
        n
        for n in range(2, tp)
        if width % n == 0
        and width // n % size == 0
        and heads % n == 0
        and (not keys or _repeats(keys, n))
    ]
    ways.append(f"use --tp {max(fewer, default=1)}")
    smaller = [n for n in GROUP_SIZES if 0 < n < size and width // tp % n == 0]
    if smaller and stored.kind == "int":
        ways.append(f"quantize with group_size {max(smaller)}")
    if layer.paddable:
        ways.append(padding.advice(size * tp, width))
    return (
        f"in_features {width} / {tp} = {width // tp} is not a multiple of {size}, its group size; "
        f"{', or '.join(ways)}"
    )


def _words(view: EngineView, layer: Layer, tp: int) -> str | None:
    """Codes or zeros are packed along the output in AWQ and GPTQ: a rank gets whole words."""
    stored = layer.stored
    if (
        view.format not in ("awq", "gptq", "auto-round")
        or stored is None
        or stored.bits not in (2, 4, 8)
    ):
        return None
    in_word = 32 // stored.bits
    ranks = 1 if layer.input_split else ranks_of(view, layer, tp)
    if layer.out_features % ranks or layer.out_features // ranks % in_word == 0:
        return None
    per_rank = f" / {ranks} = {layer.out_features // ranks}" if ranks > 1 else ""
    return (
        f"out_features {layer.out_features}{per_rank} is not a multiple of {in_word}, the codes in "
        "a word; leave it dense, or use fewer ranks"
    )


def block_size(view: EngineView, layer: Layer) -> tuple[int, int] | None:
    """[out, in] of a block of a layer's FP8 weights."""
    size = view.quantization.get("weight_block_size")
    if view.format == "compressed-tensors":
        size = weight_arguments(view.quantization, layer.module).get("block_structure")
    if isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size):
        return size[0], size[1]
    return None


def _blocks(view: EngineView, layer: Layer, tp: int) -> str | None:
    """A rank's share ends with a whole block, and so does every part of a fused layer but the
    last."""
    block = block_size(view, layer)
    if block is None:
        return None
    ranks = ranks_of(view, layer, tp)
    what, width, size = "out_features", layer.out_features, block[0]
    if layer.input_split:
        what, width, size = "in_features", layer.in_features, block[1]
    bound = ranks > 1 or (not layer.input_split and (layer.last in _FOLLOWED or layer.expert))
    if not bound or width % ranks or width // ranks % size == 0:
        return None
    per_rank = f" / {ranks} = {width // ranks}" if ranks > 1 else ""
    ways = ["use fewer ranks"] if ranks > 1 else []
    ways.append("quantize with one scale a channel")
    if layer.paddable:
        ways.append(padding.advice(size * ranks, width))
    return (
        f"{what} {width}{per_rank} is not a multiple of {size}, its FP8 blocks; "
        f"{', or '.join(ways)}"
    )
