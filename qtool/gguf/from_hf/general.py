"""The general.* keys: what a model is called, how large it is, whose it is, how to sample from it.

The gguf package derives them from the model card, config.json, generation_config.json and the name
of the folder; the same rules give the same keys as convert_hf_to_gguf.py's.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

from qtool.checkpoints import front_matter
from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_values import Kind, Value
from qtool.formats.safetensors_file import parse_json
from qtool.gguf.source import SourceTensor

_MAX_CARD_BYTES = 10_000_000
# Field of gguf.Metadata -> key of generation_config.json, in which only numbers count.
_SAMPLING = {
    "sampling_top_k": "top_k",
    "sampling_top_p": "top_p",
    "sampling_min_p": "min_p",
    "sampling_xtc_probability": "xtc_probability",
    "sampling_xtc_threshold": "xtc_threshold",
    "sampling_temp": "temperature",
    "sampling_penalty_last_n": "penalty_last_n",
    "sampling_penalty_repeat": "repetition_penalty",
    "sampling_mirostat": "mirostat",
    "sampling_mirostat_tau": "mirostat_tau",
    "sampling_mirostat_eta": "mirostat_eta",
}
_WHOLE = ("sampling_top_k", "sampling_penalty_last_n", "sampling_mirostat")
_PYTHON = {Kind.STRING: str, Kind.UINT32: int, Kind.INT32: int, Kind.FLOAT32: int | float}


def general_metadata(
    folder: Path, config: Mapping[str, Any], tensors: Sequence[SourceTensor]
) -> dict[str, Value]:
    """Keys in the order of convert_hf_to_gguf.py, general.type first. config: of config.json."""
    import gguf

    total, shared, expert, experts = parameter_counts(tensors)
    label = gguf.size_label(total, shared, expert, experts)
    card = _card(folder)
    # A card or config that holds other things than it should says nothing.
    for said in ((card, dict(config)), ({}, dict(config)), ({}, {})):
        # What is raised by code that looks into values which are not what their names promise.
        with suppress(AttributeError, LookupError, TypeError, ValueError):
            return _keys(folder, *said, total, label)
    raise SourceError(f"{folder}: nothing tells what the model is called")


def _keys(
    folder: Path, card: dict[str, Any], config: dict[str, Any], total: int, label: str
) -> dict[str, Value]:
    """The same, from a card and a config as the gguf package expects them."""
    import gguf

    known = gguf.Metadata.apply_metadata_heuristic(
        gguf.Metadata(), card, config, _named(folder), total
    )
    sampling = _json(folder / "generation_config.json")
    for name, key in _SAMPLING.items():
        value = sampling.get(key)
        if isinstance(value, int if name in _WHOLE else int | float) and not isinstance(
            value, bool
        ):
            setattr(known, name, value)
    known.name = known.name if isinstance(known.name, str) else _named(folder).name
    known.name = known.name or _named(folder).name or "model"
    known.size_label = known.size_label or label
    writer = gguf.GGUFWriter(None, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    known.set_gguf_meta_model(writer)
    found = {}
    for key, item in writer.kv_data[0].items():
        value = _value(Kind(int(item.type)), item.value)
        if value is not None and key != gguf.Keys.General.ARCHITECTURE:
            found[key] = value
    return found


def parameter_counts(tensors: Sequence[SourceTensor]) -> tuple[int, int, int, int]:
    """All parameters, those outside experts, those of one expert, and how many experts."""
    total = shared = expert = counted = stacks = 0
    for tensor in tensors:
        size = prod(tensor.shape)
        total += size
        if "_exps." in tensor.name and len(tensor.shape) == 3:
            expert += size // tensor.shape[0]
            counted += tensor.shape[0]
            stacks += 1
        else:
            shared += size
    return total, shared, expert, counted // stacks if stacks else 0


def _named(folder: Path) -> Path:
    """The folder by the name that a person gave it: in a download cache it is called by a hash."""
    folder = folder.resolve()
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):
        return Path(folder.parent.parent.name.rpartition("--")[2])
    return folder


def _value(kind: Kind, value: Any) -> Value | None:
    """None for what a model card may hold and metadata cannot."""
    if kind is Kind.ARRAY:
        texts = [str(item) for item in value if isinstance(item, str | int | float)]
        return Value(Kind.ARRAY, texts, Kind.STRING)
    python = _PYTHON.get(kind)
    return Value(kind, value) if python is not None and isinstance(value, python) else None


def _json(path: Path) -> dict[str, Any]:
    """A JSON object beside the weights, {} where there is none that can be read."""
    try:
        return parse_json(path.read_bytes(), str(path)) if path.is_file() else {}
    except FormatError:
        return {}


def _card(folder: Path) -> dict[str, Any]:
    """The front matter of README.md; a card that cannot be read says nothing."""
    path = folder / "README.md"
    if not path.is_file() or path.stat().st_size > _MAX_CARD_BYTES:
        return {}
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    if not lines or lines[0] != "---":
        return {}
    end = lines.index("---", 1) if "---" in lines[1:] else len(lines)
    # A language `no` would be read as False.
    text = "\n".join(lines[1:end]).replace("\t", "  ") + "\n"
    return front_matter.read(text.replace("- no\n", '- "no"\n'))
