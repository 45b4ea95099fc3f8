"""The metadata keys that say what a model computes, checked before anything is believed.

Every key of the architecture has to be one that a checkpoint's config.json can say too, or one that
changes nothing; a key that is passed over would be another function under the same name.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Kind, Value, boolean, f32, u32
from qtool.gguf.architectures import Architecture
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.shapes import has_mlp
from qtool.gguf.source import GgufSource

WHOLE = frozenset(
    {
        Kind.UINT8, Kind.INT8, Kind.UINT16, Kind.INT16, Kind.UINT32, Kind.INT32, Kind.UINT64,
        Kind.INT64,
    }
)  # fmt: skip
_REAL = WHOLE | {Kind.FLOAT32, Kind.FLOAT64}
_NEEDED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length",
    "attention.head_count",
)  # fmt: skip
_MOST_EXPERTS = 4096
_NO_NUMBERS = {
    "use_parallel_residual": frozenset({Kind.BOOL}),
    "rope.scaling.type": frozenset({Kind.STRING}),
    "tensor_data_layout": frozenset({Kind.STRING}),
    "rope.scaling.finetuned": frozenset({Kind.BOOL}),
    "attention.sliding_window_pattern": WHOLE,  # or an array
    "attention.recurrent_layers": frozenset(),  # an array
    "attention.rope_pattern": frozenset(),
    "attention.indexer.types": frozenset(),
    "attention.compress_ratios": frozenset(),
    "swiglu_clamp_exp": frozenset(),
    "swiglu_clamp_shexp": frozenset(),
    **dict.fromkeys(
        ("ple.layers", "ple.layer_multipliers", "ple.head_offsets", "ple.head_vocab_sizes"),
        frozenset[Kind](),
    ),
    "rope.dimension_sections": frozenset(),
    "ssm.dt_b_c_rms": frozenset({Kind.BOOL}),
}
# Integers beside those of which the table says so.
_COUNTED = (
    "block_count", "context_length", "expert_gating_func", "rope.dimension_count",
    "nextn_predict_layers", "rope.scaling.original_context_length", "ssm.inner_size",
    "full_attention_interval", "feed_forward_length", "attention.head_count_kv",
    "attention.head_count", "rope.dimension_count_swa", "embedding_length_per_layer_input",
    "embedding_length_out",
)  # fmt: skip
# What counts only where images are seen: of a text alone it changes nothing.
OF_SIGHT = ("rope.dimension_sections", "n_deepstack_layers", "deepstack_mapping")
# What other writers say beyond the table, and what it has to be to change nothing.
_HARMLESS = ("tensor_data_layout", "vocab_size", "rope.scaling.finetuned")
# Of Granite 4, which says them also where no block has a state space, or experts.
_OF_OTHER_BLOCKS = ("ssm.", "expert_shared_feed_forward_length")
_BY_BLOCK = (
    "attention.head_count",
    "attention.head_count_kv",
    "feed_forward_length",
)  # that may be lists
# What llama.cpp takes where a file has no such key.
TAKEN = {
    "expert_group_count": u32(1), "expert_group_used_count": u32(1),
    "expert_weights_scale": f32(1.0), "expert_weights_norm": boolean(False),
}  # fmt: skip
# Zero there is as if they were not said.
NONE_AT_ZERO = (
    "expert_group_count", "expert_group_used_count", "expert_weights_scale",
    "rope.scaling.factor",
)  # fmt: skip
_HEAD_WIDTHS = ("rope.dimension_count", "attention.key_length", "attention.value_length")


def checked_keys(source: GgufSource, row: Architecture) -> dict[str, Value]:
    """The keys of the table by their names without the architecture's.

    FormatError for one that is missing or of a kind that makes no sense, UnsupportedError for one
    that a checkpoint cannot say.
    """
    prefix = f"{row.name}."
    given = {
        name.removeprefix(prefix): value
        for name, value in source.metadata.items()
        if name.startswith(prefix)
    }
    if row.alone:
        given = {name: value for name, value in given.items() if name not in OF_SIGHT}
    given = {
        name: value
        for name, value in given.items()
        if not (name in NONE_AT_ZERO and value.kind in _REAL and value.value == 0)
    }
    known = {key.name: key for key in row.keys}
    for name in _BY_BLOCK:
        if name in given and name in known and not known[name].listed:
            given[name] = one_for_all(given[name])
    for name, value in given.items():
        if name in known:
            real = known[name].real or (
                known[name].make is not None
                and name not in _COUNTED
                and known[name].setting not in ("sliding_window", "head_dim")
            )
            kinds = frozenset({Kind.BOOL}) if known[name].flag else _REAL if real else WHOLE
            kinds = _NO_NUMBERS.get(name, kinds)
            _check(source, prefix + name, value, kinds, listed=known[name].listed)
    for name in _NEEDED:
        if name not in given and not (name == "feed_forward_length" and not has_mlp(row.modules)):
            raise FormatError(
                f"{source.path}: lacks {prefix}{name}, without which it means nothing"
            )
        counts = name in given and name in known and known[name].setting  # where models have some
        if counts and _least(known[name], given[name]) <= 0:
            raise FormatError(f"{source.path}: {prefix}{name} is {_short(given[name])}")
    _bounded(source, prefix, known, given)
    _bounded_experts(source, prefix, known, given)
    for name, value in given.items():
        if name == "nextn_predict_layers" and value.value == 0:
            continue
        if name not in known and not _says_nothing(row, name, value, given):
            raise UnsupportedError(
                f"{source.path}: {prefix}{name} is {_short(value)}, which no setting of a Hugging "
                f"Face {row.name} checkpoint says; convert the checkpoint that it was made of"
            )
    found = {name: value for name, value in given.items() if name in known}
    return _unsaid(row, known, found) | found


def _unsaid(
    row: Architecture, known: Mapping[str, Key], given: Mapping[str, Value]
) -> dict[str, Value]:
    """What llama.cpp takes for granted where a file has no such key, and the class something else.
    Source: llama.cpp, src/llama-hparams.h and src/models/."""
    width = given["embedding_length"].value / max(1, most(given["attention.head_count"].value))
    defaults = TAKEN | {
        "leading_dense_block_count": u32(0), "attention.scale": f32(1 / math.sqrt(width or 1)),
    }  # fmt: skip
    found = {}
    for name, value in defaults.items():
        # Of groups the class that says nothing has none.
        silent = 1 if "group" in name else None
        if name in known and row.defaults.get(known[name].setting, silent) != value.value:
            found[name] = value
    return found


def plain(value: Value) -> Any:
    """A value for JSON; a float32 as the shortest decimal that means it."""
    if value.kind == Kind.FLOAT32:
        return float(str(np.float32(value.value)))
    if value.kind == Kind.ARRAY:
        return [plain(Value(value.element or Kind.INT32, item)) for item in value.value]
    return value.value


def _check(
    source: GgufSource, name: str, value: Value, kinds: frozenset[Kind], *, listed: bool
) -> None:
    pattern = listed and value.kind == Kind.ARRAY
    if value.kind not in kinds and not (pattern and value.element in (Kind.BOOL, *_REAL, *kinds)):
        raise FormatError(
            f"{source.path}: {name} is {_short(value)} ({value.kind.name.lower()}), expected "
            + " or ".join(sorted({_WORDS.get(kind, "a number") for kind in kinds}))
        )
    if isinstance(value.value, float) and not math.isfinite(value.value):
        raise FormatError(f"{source.path}: {name} is {value.value}")


_WORDS = {
    Kind.BOOL: "true or false", Kind.STRING: "text",
    **dict.fromkeys(WHOLE, "an integer"),
}  # fmt: skip


def _bounded(
    source: GgufSource, prefix: str, known: Mapping[str, Key], said: Mapping[str, Value]
) -> None:
    """Counts that decide how much work there is, against what the file holds."""
    given = {name: value for name, value in said.items() if name in known}
    blocks = given["block_count"].value
    if blocks > len(source.tensors):
        raise FormatError(
            f"{source.path}: {prefix}block_count is {blocks}, and there are only "
            f"{len(source.tensors)} tensors"
        )
    heads, width = most(given["attention.head_count"].value), given["embedding_length"].value
    listed = [given[name] for name in _BY_BLOCK if name in given and given[name].kind == Kind.ARRAY]
    if any(len(value.value) != blocks for value in listed):
        raise FormatError(
            f"{source.path}: {prefix}block_count is {blocks}, and a list has not as many numbers"
        )
    if not known["attention.head_count"].setting:
        return
    of = "attention.head_count_kv" if "attention.head_count_kv" in given else "attention.head_count"
    least = _least(known[of], given[of])
    keys = least if least <= 0 else most(given[of].value)
    if not 0 < keys <= heads <= width:
        raise FormatError(
            f"{source.path}: {heads} heads, {keys} of keys, and {width} wide; expected no more "
            "heads of keys than heads, and no more heads than the width"
        )
    experts = given.get("expert_count")
    if experts is not None and not 0 <= experts.value <= _MOST_EXPERTS:
        raise FormatError(
            f"{source.path}: {prefix}expert_count is {experts.value}, expected at most "
            f"{_MOST_EXPERTS}"
        )


def _bounded_experts(
    source: GgufSource, prefix: str, known: Mapping[str, Key], said: Mapping[str, Value]
) -> None:
    """How many experts a token visits, and of how many groups; and what makes state spaces, which
    has rows of its own."""
    given = {name: value.value for name, value in said.items() if name in known}

    def refuse(name: str, expected: str) -> None:
        found = given.get(name, "not said")
        raise FormatError(f"{source.path}: {prefix}{name} is {found}, expected {expected}")

    experts = given.get("expert_count") or 0
    used, groups = given.get("expert_used_count"), given.get("expert_group_count", 1)
    of_groups = given.get("expert_group_used_count", 1)
    if experts and "expert_used_count" in known and not (used and 0 < used <= experts):
        refuse("expert_used_count", f"1 to {experts}, as many as there are")
    if experts and groups is not None and (groups < 1 or experts % groups):
        refuse("expert_group_count", f"a number that divides the {experts} experts")
    if experts and not 0 < of_groups <= groups:
        refuse("expert_group_used_count", f"1 to {groups}, as many groups as there are")
    if not given.get("rope.scaling.factor", 1.0) > 0:
        refuse("rope.scaling.factor", "a number above 0")
    most_rows = max((max(tensor.shape, default=0) for tensor in source.tensors), default=0)
    for name in (name for name in given if name.startswith("ssm.")):
        if isinstance(given[name], int) and not 0 <= given[name] <= most_rows:
            refuse(name, f"at most {most_rows}, the longest axis of a tensor")
    if given.get("ssm.group_count", 1) * given.get("ssm.state_size", 1) > most_rows:
        refuse("ssm.group_count", "no more groups than the tensors have room for")


def _least(key: Key, value: Value) -> Any:
    """The number, or the smallest of a list that says of blocks what they have."""
    if value.kind != Kind.ARRAY:
        return value.value
    return min((one for one in value.value if one or not key.lacking), default=0)


def most(value: Any) -> Any:
    """The number, or the largest of a list."""
    return value if isinstance(value, int | float) else max(value, default=0)


def one_for_all(value: Value) -> Value:
    """The number that a list says of each block; the value as it is where it says several."""
    if value.kind != Kind.ARRAY or value.element is None or len({*value.value}) != 1:
        return value
    return Value(value.element, value.value[0])


def _says_nothing(row: Architecture, name: str, value: Value, given: Mapping[str, Value]) -> bool:
    """Whether a key beyond the table changes nothing."""
    if name in _HARMLESS or (row.name == "granite" and name.startswith(_OF_OTHER_BLOCKS)):
        return True
    heads = most(given["attention.head_count"].value)
    width = given["embedding_length"].value // max(1, heads)
    return name in _HEAD_WIDTHS and value.value == width


def _short(value: Value) -> str:
    return f"a list of {len(value.value)}" if value.kind == Kind.ARRAY else repr(value.value)[:60]
