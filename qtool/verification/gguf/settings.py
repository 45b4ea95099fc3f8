"""A GGUF file's metadata against the source's: what llama.cpp computes with besides weights.

A checkpoint is compared as the file that it becomes; keys that only one of the two has are not
compared, but for those whose absence means something else than the source says.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import isclose
from typing import Any

from qtool.formats.gguf_values import Kind, Value
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.keys import TAKEN
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding
from qtool.verification.unlike_settings import VOCABULARY, is_number, unlike

_SHOWN = 60  # characters of a value
_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"
_OF_TEXT = ("tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.add_space_prefix")
# What llama.cpp takes where the file says nothing.
_UNSAID = {
    "rope.freq_base": 10000.0, "rope.scaling.type": "none",
    **{name: value.value for name, value in TAKEN.items()},
}  # fmt: skip
# What may have been changed on purpose.
_CHOSEN = ("context_length", "vocab_size", "_token_id")


def check_settings(file: GgufSource, source: GgufSource) -> Iterator[Finding]:
    """settings: the metadata of the architecture say what the source's say."""
    here, there = _values(file), _values(source)
    prefix = f"{file.architecture}."
    keys = [k for k in sorted(there) if k.startswith((prefix, "tokenizer.ggml."))
            and (k.startswith(prefix) or k in _OF_TEXT or k.endswith("_token_id"))]  # fmt: skip
    here |= {prefix + name: value for name, value in _UNSAID.items() if prefix + name not in here}
    different = [k for k in keys if k in here and not _alike(here[k], there[k])]
    yield from unlike(
        different,
        _CHOSEN,
        lambda keys: _listed(keys, here, there),
        "llama.cpp computes as the file says: make it again",
        "make the file again",
    )


def _values(source: GgufSource) -> dict[str, Any]:
    return {key: value.value for key, value in source.metadata.items() if _plain(key, value)}


def _plain(key: str, value: Value) -> bool:
    return value.kind is not Kind.ARRAY or not key.startswith("tokenizer.")


def _alike(one: Any, other: Any) -> bool:
    if _is_list(one) and _is_list(other):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return is_number(one) and is_number(other) and isclose(one, other, rel_tol=1e-6)
    return bool(one == other)


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _listed(keys: Sequence[str], here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    said = some([f"{k} {str(here[k])[:_SHOWN]}, there {str(there[k])[:_SHOWN]}" for k in keys])
    verb = "differs" if len(keys) == 1 else "differ"
    return f"{counted(len(keys), 'setting')} of the metadata {verb} from the source's: {said}"


def check_vocabulary(file: GgufSource, source: GgufSource) -> Iterator[Finding]:
    """vocabulary: the source's tokens and merges, in the source's order."""
    for key, what in ((_TOKENS, "tokens"), (_MERGES, "merges")):
        one, other = file.metadata.get(key), source.metadata.get(key)
        if one is None or other is None or other.kind is not Kind.ARRAY:
            continue
        here, there = list(one.value) if one.kind is Kind.ARRAY else [], list(other.value)
        moved = [n for n, (a, b) in enumerate(zip(here, there, strict=False)) if a != b]
        if moved or len(here) < len(there):
            at = moved[0] if moved else len(here)
            found = repr(str(here[at])[:_SHOWN]) if at < len(here) else "nothing"
            yield Finding(
                "error", VOCABULARY, key,
                f"{max(len(moved), len(there) - len(here)):,} of {len(there):,} {what} are not "
                f"the source's (number {at} is {found}, there {str(there[at])[:_SHOWN]!r}); the "
                "model would read and write other words: make the file again",
            )  # fmt: skip
            return
