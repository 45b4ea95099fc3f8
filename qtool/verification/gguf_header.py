"""A GGUF header against its architecture, and its tokenizer against the embedding.

llama.cpp makes its tensors from the metadata, and refuses a file that lacks one, or that has one of
another shape.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qtool.errors import QtoolError
from qtool.formats.gguf_file import INTEGERS
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.architectures import TABLE, Architecture
from qtool.gguf.architectures.shapes import expected_shape
from qtool.gguf.from_hf import gguf_names
from qtool.gguf.kinds import layer_of, stored_shape
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf_config import class_of, put_layer_types
from qtool.verification.finding import Finding
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some

_NEEDED = ("block_count", "embedding_length")
_NEEDED_OF_KNOWN = (*_NEEDED, "context_length", "feed_forward_length", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SIZES = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_value_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "mtp_num_hidden_layers": "nextn_predict_layers",
}
_TOKENS = "tokenizer.ggml.tokens"
_OTHERS = {
    "mmproj": "an encoder of images or sounds with its projector (mmproj)",
    "adapter": "an adapter (LoRA)",
    "imatrix": "an importance matrix",
}
_WHOLE_HEADS = ("llama", "llama-embed", "deci", "falcon")
_NO_TOKEN = (-1, 0xFFFFFFFF)  # what writers say for none
_AS_LONG = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


def row_of(source: GgufSource) -> Architecture | None:
    """The architecture's row of the table, None for one that is not in it."""
    try:
        return TABLE[class_of(source)]
    except QtoolError:
        return None


def other_than_a_model(source: GgufSource) -> str | None:
    """What a file is that holds no language model; None for one that does."""
    kind = source.metadata.get("general.type")
    said = str(kind.value) if kind is not None else "model"
    if source.architecture == "clip":
        said = "mmproj"
    return _OTHERS.get(said)


def check_keys(source: GgufSource) -> Iterator[Finding]:
    """keys: what llama.cpp needs to know is said, and makes sense."""
    prefix = f"{source.architecture}."
    row = row_of(source)
    lost = [n for n in (_NEEDED_OF_KNOWN if row else _NEEDED) if prefix + n not in source.metadata]
    if row is not None:
        needed = [key.name for key in row.keys if key.name in _EPSILONS]
        lost += [name for name in needed if prefix + name not in source.metadata]
    for name in lost:
        yield Finding(
            "error", "keys", prefix + name,
            f"the metadata lack {prefix}{name}, without which llama.cpp does not load the file; "
            "make it again",
        )  # fmt: skip
    yield from _rotated(source)
    if row is not None:
        yield from _values(source)
    for name, value in source.metadata.items():
        short = name.removeprefix(prefix)
        if short in _NEEDED_OF_KNOWN and value.kind in INTEGERS and value.value <= 0:
            yield Finding(
                "error", "keys", name, f"{name} is {value.value}, expected at least 1"
            )  # fmt: skip
        if isinstance(value.value, float) and not math.isfinite(value.value):
            yield Finding(
                "error", "keys", name,
                f"{name} is {value.value}, expected a finite number; make the file again",
            )  # fmt: skip
        elif short in _EPSILONS and not (isinstance(value.value, float) and value.value >= 0):
            yield Finding(
                "error", "keys", name, f"{name} is {value.value}, expected a small number"
            )  # fmt: skip


def _rotated(source: GgufSource) -> Iterator[Finding]:
    """Of these architectures llama.cpp rotates whole heads or refuses the file."""
    rotated = _integer(source, "rope.dimension_count")
    heads, width = _integer(source, "attention.head_count"), _integer(source, "embedding_length")
    if source.architecture not in _WHOLE_HEADS or rotated is None or not heads or not width:
        return
    expected = _integer(source, "attention.key_length") or width // heads
    if rotated != expected:
        name = f"{source.architecture}.rope.dimension_count"
        yield Finding(
            "error", "keys", name,
            f"{name} is {rotated}, expected {expected}, the width of a head; llama.cpp refuses the "
            "file: make it again",
        )  # fmt: skip


def _values(source: GgufSource) -> Iterator[Finding]:
    """The width of a head's values is that of attn_v, shared out over the heads."""
    width = _integer(source, "attention.value_length")
    grouped = f"{source.architecture}.attention.head_count_kv" in source.metadata
    # In some models layers differ in it: then it is an array, and nothing is said.
    heads = _integer(source, "attention.head_count_kv" if grouped else "attention.head_count")
    rows = next((t.rows for t in source.tensors if t.name.endswith(".attn_v.weight")), None)
    if width is not None and heads and rows is not None and width * heads != rows:
        name = f"{source.architecture}.attention.value_length"
        yield Finding(
            "error", "keys", name,
            f"{name} is {width}, and attn_v has {rows} rows for {heads} heads; llama.cpp refuses "
            "the file: make it again",
        )  # fmt: skip


def _integer(source: GgufSource, name: str) -> int | None:
    value = source.metadata.get(f"{source.architecture}.{name}")
    return int(value.value) if value is not None and value.kind in INTEGERS else None


def sizes(source: GgufSource) -> dict[str, Any]:
    """The settings that shapes follow from, under their names in config.json."""
    found: dict[str, Any] = {}
    row = row_of(source)
    own = {} if row is None else {k.setting: k.name for k in row.keys if k.make is None}
    for setting, key in {**_SIZES, **own}.items():
        value = _integer(source, key)
        if value is not None:
            found[setting] = value
    if row is not None and row.predicts:
        found["num_hidden_layers"] -= found.get(row.predicts, 0)
    if f"{source.architecture}.attention.head_count_kv" not in source.metadata:
        found["num_key_value_heads"] = found.get("num_attention_heads")
    rows = {tensor.name: tensor.rows for tensor in source.tensors}
    found["vocab_size"] = rows.get("token_embd.weight")
    return found


def _given(source: GgufSource) -> dict[str, Value]:
    """The keys of the architecture by their names without its own."""
    prefix = f"{source.architecture}."
    return {
        name.removeprefix(prefix): value
        for name, value in source.metadata.items()
        if name.startswith(prefix)
    }


def check_tensors(source: GgufSource) -> Iterator[Finding]:
    """tensors: every block is there, and of a known architecture every tensor with its shape."""
    tensors = {tensor.name: tensor for tensor in source.tensors}
    blocks = _integer(source, "block_count")
    if blocks is None or not 0 < blocks < 1 << 16:
        return  # said by `keys`
    there = {layer_of(name) for name in tensors}
    empty = [f"blk.{n}" for n in range(blocks) if n not in there]
    lost = [] if "token_embd.weight" in tensors else ["token_embd.weight"]
    row = row_of(source)
    if row is None:
        if empty or lost:
            yield _missing([*lost, *empty], source.architecture)
        return
    settings = sizes(source)
    try:
        put_layer_types(row, settings, _given(source))
        names = gguf_names(row, settings)
    except QtoolError:
        return  # said by `keys`
    modules = {module.name: module for module in row.modules}
    for (name, block), gguf_name in names.items():
        module, first = modules[name], modules[name].ends[0][0]
        head = name in ("lm_head", "embed_out")
        needed = (module.required(settings) and not head) or (head and row.needs_head)
        # llama.cpp goes without blocks that predict further tokens.
        needed = needed and (block < settings["num_hidden_layers"] or block in there)
        if needed and gguf_name + first not in tensors and gguf_name != "token_embd":
            lost.append(gguf_name + first)
        for suffix, _ in module.ends:
            tensor = tensors.get(gguf_name + suffix)
            if tensor is None:
                continue
            try:
                expected = expected_shape(module, settings, suffix)
            except QtoolError:
                continue  # sizes that differ by block, or are not said
            if expected is not None and stored_shape(expected) != stored_shape(tensor.shape):
                yield Finding(
                    "error", "tensors", tensor.name,
                    f"{tensor.name} is {list(tensor.shape)}, and by the metadata it should be "
                    f"{list(expected)}; llama.cpp refuses it: make the file again",
                )  # fmt: skip
    if lost:
        yield _missing(lost, row.name)
    known = {name + suffix for name in names.values() for suffix in (".weight", ".bias", ".scale")}
    known |= {name + suffix for (n, _), name in names.items() for suffix, _ in modules[n].ends}
    extra = [name for name in tensors if name not in known and name not in _COMPUTED]
    beyond = [name for name in extra if layer_of(name) >= blocks]
    extra = [name for name in extra if name not in beyond]
    if beyond:
        yield Finding(
            "error", "tensors", beyond[0],
            f"{counted(len(beyond), 'tensor')} of blocks beyond the {blocks} that "
            f"{source.architecture}.block_count says: {some(beyond)}; llama.cpp refuses a file "
            "with more tensors than it asks for: make it again",
        )  # fmt: skip
    if extra:
        yield Finding(
            "warning", "tensors", extra[0],
            f"{counted(len(extra), 'tensor')} that {row.name} has no place for: {some(extra)}",
        )  # fmt: skip


def _missing(names: list[str], architecture: str) -> Finding:
    return Finding(
        "error", "tensors", names[0],
        f"{counted(len(names), 'tensor')} that {architecture} needs "
        f"{'is' if len(names) == 1 else 'are'} missing: {some(names)}; fetch or make the file "
        "again",
    )  # fmt: skip


def check_tokenizer(source: GgufSource) -> Iterator[Finding]:
    """tokenizer: as many tokens as the embedding has rows, and no id beyond them."""
    metadata = source.metadata
    model = metadata.get("tokenizer.ggml.model")
    tokens = _length(metadata, _TOKENS)
    if model is None or tokens is None:
        if model is None or str(model.value) not in ("none", "no_vocab"):
            yield Finding(
                "warning", "tokenizer", _TOKENS,
                "the file has no tokenizer; llama.cpp cannot take text with it",
            )  # fmt: skip
        return
    rows = next((t.rows for t in source.tensors if t.name == "token_embd.weight"), None)
    if rows is not None and rows != tokens:
        yield Finding(
            "error", "tokenizer", _TOKENS,
            f"{_TOKENS} has {tokens} tokens, and token_embd.weight {rows} rows; llama.cpp "
            "refuses the file: make it again with the model's own tokenizer",
        )  # fmt: skip
    for key in _AS_LONG:
        length = _length(metadata, key)
        if length is not None and length != tokens:
            yield Finding(
                "error", "tokenizer", key,
                f"{key} has {length} values for {tokens} tokens; make the file again",
            )  # fmt: skip
    for key, value in metadata.items():
        if not (key.startswith("tokenizer.ggml.") and key.endswith("_token_id")):
            continue
        ends = any(part in key for part in ("bos", "eos", "eot", "eom"))
        none = value.value in _NO_TOKEN and not ends
        if value.kind not in INTEGERS or none or 0 <= value.value < tokens:
            continue
        outcome = "generation would never end, or fail" if ends else "llama.cpp ignores it"
        yield Finding(
            "error" if ends else "warning", "tokenizer", key,
            f"{key} is {value.value}, and there are {tokens} tokens; {outcome}: correct it",
        )  # fmt: skip


def _length(metadata: Mapping[str, Value], key: str) -> int | None:
    value = metadata.get(key)
    return len(value.value) if value is not None and value.kind is Kind.ARRAY else None


CHECKS: tuple[tuple[str, Callable[[GgufSource], Iterator[Finding]]], ...] = (
    ("keys", check_keys),
    ("tensors", check_tensors),
    ("tokenizer", check_tokenizer),
)
