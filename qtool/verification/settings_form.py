"""Settings of config.json in one form, however they are said; and those that nothing reads."""

from collections.abc import Iterable, Mapping
from typing import Any

from qtool.checkpoints.hf_config import complete
from qtool.checkpoints.structure import text_config
from qtool.errors import QtoolError
from qtool.gguf.architectures import TABLE
from qtool.gguf.architectures.sizes import inner_of_lfm2
from qtool.gguf.architectures.state_spaces import MLP, kinds_of

_OF_SIGHT = ("mrope_section", "mrope_interleaved")  # of a text alone all positions are one


def one_form(config: Mapping[str, Any], alone: bool) -> dict[str, Any]:
    """With the defaults of its class, where that is known, and rope settings in one form.

    alone: without what counts only where images are seen.
    """
    found = _whole(config)
    if found.get("block_auto_adjust_ff_dim"):  # LFM2, which may say what comes out instead
        try:
            adjusted = {"intermediate_size": inner_of_lfm2(found)}
        except QtoolError:  # what is wrong with it is said elsewhere
            return found
        found |= {**adjusted, "block_auto_adjust_ff_dim": False, "block_ff_dim": None}
    if alone:
        ropes = found["rope_parameters"].items()
        found["rope_parameters"] = {
            kind: {key: value for key, value in rope.items() if key not in _OF_SIGHT}
            for kind, rope in ropes
        }
    return found


def unread(config: Mapping[str, Any]) -> set[str]:
    """Settings that no module of such a model reads."""
    found = set()
    if config.get("use_sliding_window") is False:  # whose width some libraries write
        found.add("sliding_window")
    if class_of(config).startswith("NemotronH"):
        try:
            if MLP not in kinds_of(config):
                found.add("intermediate_size")
        except QtoolError:
            pass
    return found


def class_of(config: Mapping[str, Any]) -> str:
    named = config.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else ""


def as_written(key: str, files: Iterable[Mapping[str, Any]]) -> str:
    """The name that a rope setting of the one form has in the first of these files that has it;
    where none has, in the older form. Any other setting's as it is."""
    first, _, rest = key.partition(".")
    kind, _, last = rest.rpartition(".")
    if first != "rope_parameters":
        return key
    for text in map(text_config, files):
        if last in text:
            return last
        for name in ("rope_scaling", "rope_parameters"):
            said = text.get(name)
            if isinstance(said, Mapping) and last in said:
                return f"{name}.{last}"
            if isinstance(said, Mapping) and isinstance(said.get(kind), Mapping):
                return key
    return last if last in ("rope_theta", "partial_rotary_factor") else f"rope_scaling.{last}"


def _whole(config: Mapping[str, Any]) -> dict[str, Any]:
    """With the defaults of its class, where that is known, and rope settings in one form."""
    row = TABLE.get(class_of(config))
    if row is None:
        return complete(config, {})
    # GGUF has no key for it, so that what is made of such a file leaves it to the class.
    whole = row.completed(config)
    if not row.name.startswith("gemma"):
        return {"hidden_act": row.activations[0], **whole}
    for key in ("hidden_act", "hidden_activation"):  # Gemma's class takes null for it, too
        if whole.get(key) is None:
            whole[key] = "gelu_pytorch_tanh"
    return whole
