"""AutoRound's own config (quant_method auto-round): which of the layouts read here it means.

    packing_format                                        stored as
    auto_round:auto_gptq, auto_round:gptq, auto, none     GPTQ, zeros less one (v1)
    auto_round, auto_round:gptqmodel, :exllamav2, ...     GPTQ, zeros as they are (v2)
    auto_round:auto_awq, auto_round:awq                   AWQ gemm

There is a g_idx with gptqmodel alone. Up to version 0.4 the key is `backend`, and the method
intel/auto-round. Layers that differ stand in `extra_config`, each under its name or under an
expression that is looked for anywhere in a name; a name counts before all expressions, of which the
first counts; more than 8 bits: left dense. Outside of the blocks that block_name_to_quantize
(to_quant_block_names) begins the names of, only what extra_config gives bits is quantized.

Recognised, not decoded: rounded or rotated inputs, floats (MXFP4, NVFP4, FP8), MLX's words, and 5
to 7 bits.

Sources: AutoRound 0.2 to 0.16 (export_to_autoround, inference/convert_model, torch QuantLinear),
AutoRoundConfig of transformers 5.24.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from qtool.formats import gptq_zeros
from qtool.formats.facts import ArtifactScheme, Writer, first, group_size_of, whole
from qtool.formats.gptq_dynamic import entry_for
from qtool.formats.layer_names import is_head
from qtool.scheme import Scheme

NAME = "auto-round"
_SPECIAL = re.compile(r"[*+?^$()\[\]{}|\\]")  # what makes a key an expression
_AS_THEY_ARE = ("auto_round", "exllamav2", "gptqmodel", "torch", "triton", "tritonv2")
_WIDTHS = (2, 3, 4, 8)
_DENSE = 8  # more bits than this


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None. `format` and `layout` are of how
    matrices are stored, `quant_method` is of who reads the config."""
    method = str(config.get("quant_method") or "").lower().replace("_", "-")
    if method.removeprefix("intel/") != NAME:
        return None
    packing = packing_of(config)
    stored = _stored_as(packing)
    extra = table(config)
    if stored is None or (why := _unread(config, extra)):
        text = packing if stored is None else f"{packing} with {why}"
        return ArtifactScheme(NAME, NAME, None, text)
    width = whole(config.get("bits"), "bits", 2, 8)
    size = group_size_of(config.get("group_size"))
    return ArtifactScheme(
        stored[0],
        NAME,
        Scheme(width, size, config.get("sym") is not False),
        stored[1],
        tuple(key for key, entry in extra.items() if _is_dense(entry)),
        tuple((key, entry) for key, entry in extra.items() if not _is_dense(entry)),
        writer=Writer(gptq_zeros.AUTO_ROUND),
    )


def packing_of(config: Mapping[str, Any]) -> str:
    """The packing format, of old configs too; what is not said is what readers take it for."""
    said = str(config.get("packing_format") or "")
    backend = str(config.get("backend") or "")
    if not said and backend.startswith(("auto_round", "auto_gptq", "gptq", "awq", "auto_awq")):
        said = backend
    return said if said not in ("", "auto") else "auto_round:auto_gptq"


def _stored_as(packing: str) -> tuple[str, str] | None:
    """Format and layout; None for a packing that is not read here."""
    parts = packing.lower().split(":")
    if any(part in ("awq", "auto_awq") for part in parts):
        return "awq", "gemm"
    if any(part in ("gptq", "auto_gptq") for part in parts):
        return "gptq", "v1"
    return ("gptq", "v2") if all(part in _AS_THEY_ARE for part in parts) else None


def _unread(config: Mapping[str, Any], extra: Mapping[str, Mapping[str, Any]]) -> str:
    """What of a config is not decoded here, in words; empty where all is."""
    if config.get("rotation_config") or config.get("spinquant_config"):
        return "rotated inputs"
    for keys in (config, *(entry for entry in extra.values() if not _is_dense(entry))):
        kind, inputs, bits = (keys.get(key) for key in ("data_type", "act_bits", "bits"))
        if not str(kind or "int").startswith("int"):
            return f"weights of {str(kind)[:40]}"
        if type(inputs) is int and inputs <= _DENSE:
            return f"inputs of {inputs} bits"
        if type(bits) is int and bits in range(2, 9) and bits not in _WIDTHS:
            return f"weights of {bits} bits"
    return ""


def _is_dense(entry: Mapping[str, Any]) -> bool:
    bits = entry.get("bits")
    return type(bits) is int and bits > _DENSE


def table(config: Mapping[str, Any], *, entire: bool = False) -> dict[str, dict[str, Any]]:
    """extra_config as a table of expressions, matched from the start of a name, of which the first
    counts; a name may lack its beginning. entire: names and expressions are matched from end to
    end, as SGLang has it."""
    said = config.get("extra_config")
    entries = said.items() if isinstance(said, Mapping) else ()
    known = [
        (str(key), {name: value for name, value in entry.items() if value is not None})
        for key, entry in entries
        if isinstance(entry, Mapping)
    ]
    start = "" if entire else r"(?:.*\.)?"
    found = {f"{start}{re.escape(key)}$": entry for key, entry in known if not is_expression(key)}
    expressions = [(key, entry) for key, entry in known if is_expression(key)]
    for key, entry in expressions:
        found[f"(?:{key})$" if entire else f".*(?:{key})"] = entry
    return found


def is_expression(key: str) -> bool:
    """Whether a key of extra_config is an expression, and not a name."""
    return _SPECIAL.search(key) is not None


def left_dense(config: Mapping[str, Any], module: str, *, entire: bool = False) -> bool | None:
    """Whether the config leaves a linear layer unquantized; None where that depends on an
    expression that is not matched here."""
    extra = table(config, entire=entire)
    key, known = entry_for(extra, module)
    if not known:
        return None
    if key is not None and type(extra[key].get("bits")) is int:
        return _is_dense(extra[key])
    if blocks := tuple(_blocks(first(config, "block_name_to_quantize", "to_quant_block_names"))):
        return not module.startswith(blocks)
    return is_head(module)


def _blocks(said: object) -> Iterator[str]:
    """How the names of quantized blocks begin: a list, in older configs of lists or with commas."""
    if isinstance(said, str):
        yield from (name for part in said.split(",") if (name := part.strip()))
    elif isinstance(said, list):
        for part in said:
            names = part if isinstance(part, list) else [part]
            yield from (name for name in names if isinstance(name, str) and name)
