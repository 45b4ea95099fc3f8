"""A GGUF header against its architecture, and its tokenizer against the embedding."""

import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from qtool.formats.gguf_file import INTEGERS, GgufFile
from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.architectures.shapes import has_mlp
from qtool.gguf.source import GgufSource
from qtool.verification.finding import Finding
from qtool.verification.gguf.scales import check_scales
from qtool.verification.gguf.tensors import check_tensors, integer, row_of

_NEEDED = ("block_count", "embedding_length")
_NEEDED_OF_KNOWN = (*_NEEDED, "context_length", "feed_forward_length", "attention.head_count")
_EPSILONS = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")
_PAGE = 4096
_TOKENS = "tokenizer.ggml.tokens"
_OTHERS = {
    "mmproj": "an encoder of images or sounds with its projector (mmproj)",
    "adapter": "an adapter (LoRA)",
    "imatrix": "an importance matrix",
}
_WHOLE_HEADS = ("llama", "llama-embed", "deci", "falcon")
_NO_TOKEN = (-1, 0xFFFFFFFF)  # what writers say for none
_AS_LONG = ("tokenizer.ggml.scores", "tokenizer.ggml.token_type")


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
    if (other := _keys_of_another(source)) is not None:
        yield Finding(
            "error", "keys", "general.architecture",
            f"general.architecture says {source.architecture}, and the keys of the model are "
            f"{other}'s ({other}.{_NEEDED[0]}): llama.cpp does not load the file; put back {other}",
        )  # fmt: skip
        return
    row = row_of(source)
    lost = [n for n in (_NEEDED_OF_KNOWN if row else _NEEDED) if prefix + n not in source.metadata]
    if row is not None:
        needed = [key.name for key in row.keys if key.name in _EPSILONS]
        lost += [name for name in needed if prefix + name not in source.metadata]
        if not has_mlp(row.modules):  # where all is experts, it may not be said
            lost = [name for name in lost if name != "feed_forward_length"]
    without = {key.name for key in row.keys if not key.setting} if row is not None else set()
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
        if (
            short in _NEEDED_OF_KNOWN
            and short not in without
            and value.kind in INTEGERS
            and value.value <= 0
        ):
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


def _keys_of_another(source: GgufSource) -> str | None:
    """The architecture whose keys there are, where those of the file's own are not."""
    ends = [f".{name}" for name in _NEEDED]
    keys = source.metadata
    others = [key.removesuffix(ends[0]) for key in keys if key.endswith(ends[0])]
    whole = [one for one in others if all(one + end in keys for end in ends)]
    return whole[0] if len(whole) == 1 and whole[0] != source.architecture else None


def _rotated(source: GgufSource) -> Iterator[Finding]:
    """Of these architectures llama.cpp rotates whole heads or refuses the file."""
    rotated = integer(source, "rope.dimension_count")
    heads, width = integer(source, "attention.head_count"), integer(source, "embedding_length")
    if source.architecture not in _WHOLE_HEADS or rotated is None or not heads or not width:
        return
    expected = integer(source, "attention.key_length") or width // heads
    if rotated != expected:
        name = f"{source.architecture}.rope.dimension_count"
        yield Finding(
            "error", "keys", name,
            f"{name} is {rotated}, expected {expected}, the width of a head; llama.cpp refuses the "
            "file: make it again",
        )  # fmt: skip


def _values(source: GgufSource) -> Iterator[Finding]:
    """The width of a head's values is that of attn_v, shared out over the heads."""
    width = integer(source, "attention.value_length")
    grouped = f"{source.architecture}.attention.head_count_kv" in source.metadata
    # In some models layers differ in it: then it is an array, and nothing is said.
    heads = integer(source, "attention.head_count_kv" if grouped else "attention.head_count")
    if f"{source.architecture}.attention.value_length_swa" in source.metadata:
        return  # blocks have heads of two widths, and the shapes of tensors are looked at
    rows = next((t.rows for t in source.tensors if t.name.endswith(".attn_v.weight")), None)
    if width is not None and heads and rows is not None and width * heads != rows:
        name = f"{source.architecture}.attention.value_length"
        yield Finding(
            "error", "keys", name,
            f"{name} is {width}, and attn_v has {rows} rows for {heads} heads; llama.cpp refuses "
            "the file: make it again",
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
        outcome = "texts that begin with it would fail" if "bos" in key else outcome
        yield Finding(
            "error" if ends else "warning", "tokenizer", key,
            f"{key} is {value.value}, and there are {tokens} tokens; {outcome}: correct it",
        )  # fmt: skip


def check_ends(path: Path) -> Iterator[Finding]:
    """keys: no file of a model goes on behind its last tensor. path: of the first."""
    with GgufFile.open(path) as file:
        for part in file.files:
            ends = [one.start + one.nbytes for one in file.tensors.values() if one.file == part]
            more = part.stat().st_size - max(ends, default=0)
            # Few are padding, and so are zeros, however many.
            if ends and more >= max(file.alignment, _PAGE) and _any(part, max(ends)):
                yield Finding(
                    "warning", "keys", part.name,
                    f"{part.name} goes on for {more:,} bytes behind its last tensor, which nothing "
                    "reads and no writer of GGUF leaves; fetch or make it again",
                )  # fmt: skip


def _any(path: Path, start: int) -> bool:
    """Whether a byte from there on is not 0."""
    with path.open("rb") as file:
        file.seek(start)
        return any(part.strip(b"\0") for part in iter(lambda: file.read(1 << 20), b""))


def _length(metadata: Mapping[str, Value], key: str) -> int | None:
    value = metadata.get(key)
    return len(value.value) if value is not None and value.kind is Kind.ARRAY else None


CHECKS: tuple[tuple[str, Callable[[GgufSource], Iterator[Finding]]], ...] = (
    ("keys", check_keys),
    ("tensors", check_tensors),
    ("scales", check_scales),
    ("tokenizer", check_tokenizer),
)
