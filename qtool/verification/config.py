"""What the quantization_config says against what is stored."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtool.artifacts.entry import Entry
from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.roles import FUSED_EXPERTS
from qtool.checkpoints.structure import text_config
from qtool.errors import QtoolError
from qtool.formats import mlx
from qtool.formats.facts import first
from qtool.formats.gptq_dynamic import entry_for, overridden
from qtool.formats.safetensors_header import read_json
from qtool.messages.printable import in_json
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.scheme import Scheme
from qtool.verification.finding import Finding, of_setting
from qtool.verification.subject import Subject

_MUCH_DENSE = 0.2  # of the linear layers' weights


def check_said(subject: Subject) -> Iterator[Finding]:
    """quantized-config: a quantized artifact says so in config.json."""
    checkpoint = subject.artifact.checkpoint
    if checkpoint.path.is_dir() and not (checkpoint.folder / "config.json").is_file():
        yield Finding(
            "error", "quantized-config", "config.json",
            "the folder has no config.json, without which no engine loads it; put the one beside "
            "the weights that they were made with",
        )  # fmt: skip
        return
    if subject.artifact.found.format != "dense" and not quantization_config(checkpoint):
        yield Finding(
            "error", "quantized-config", "config.json",
            "the tensors are quantized, and no quantization_config says how (shapes look like "
            f"{subject.artifact.found.format}); engines load it as a dense model and fail: put "
            "back the config that it was made with",
        )  # fmt: skip
        return
    beside = [name for name in _SIDE if (checkpoint.folder / name).is_file()]
    if beside and subject.artifact.found.format != "dense" and not said_inside(subject.config):
        yield Finding(
            "warning", "quantized-config", "config.json",
            f"config.json has no quantization_config, {beside[0]} alone says how the tensors are "
            "quantized; vLLM looks there, transformers does not and takes it for a dense model: "
            "put it into config.json",
        )  # fmt: skip


def said_inside(config: Mapping[str, Any]) -> bool:
    """Whether config.json itself says how tensors are quantized."""
    parts = (config, text_config(config))
    return any(part.get(k) for part in parts for k in ("quantization_config", "compression_config"))


def check_scheme(subject: Subject) -> Iterator[Finding]:
    """scheme: bits and group size of the config are those of the shapes."""
    found = subject.artifact.found
    if found.scheme is None or found.format not in ("awq", "gptq"):
        return
    wrong: dict[str, list[str]] = defaultdict(list)
    for entry in subject.entries.values():
        if not isinstance(entry.scheme, Scheme):
            continue
        said = overridden(entry.module, found)
        if not entry_for([key for key, _ in found.overrides], entry.module)[1]:
            continue
        columns = entry.shape[-1]
        if said.bits != entry.scheme.bits or said.groups(columns) != entry.scheme.groups(columns):
            text = (
                f"the config says {said.bits} bits in groups of {said.group_size}, and the shapes "
                f"{entry.scheme.bits} bits in groups of {entry.scheme.group_size}"
            )
            wrong[text].append(entry.module)
    for text, modules in wrong.items():
        yield Finding(
            "error", "scheme", modules[0],
            f"{text}: {counted(len(modules), 'matrix')} ({some(modules)}); engines believe the "
            "config: correct it",
        )  # fmt: skip


def check_share(subject: Subject) -> Iterator[Finding]:
    """unquantized: most of what could be quantized is."""
    if subject.artifact.found.format in ("dense", "mxfp4"):  # of which the latter has experts alone
        return
    kinds: Counter[str] = Counter()
    total = dense = 0
    names: dict[str, str] = {}
    for name, role in subject.roles.items():
        entry = subject.entries[name]
        if role.reason is not None and role.reason != FUSED_EXPERTS:
            continue
        total += entry.parameters
        if entry.scheme is None:
            dense += entry.parameters
            kind = _kind(entry)
            kinds[kind] += entry.parameters
            names.setdefault(kind, name)
    config = quantization_config(subject.artifact.checkpoint)
    if dense == total and config.get("kv_cache_scheme") and not config.get("config_groups"):
        return  # the cache alone
    if total and not any(entry.scheme for entry in subject.entries.values()):
        yield Finding(
            "error", "unquantized", "",
            f"the config says {subject.artifact.found.quant_method}, and nothing is quantized",
        )  # fmt: skip
    elif total and dense > _MUCH_DENSE * total:
        kind = kinds.most_common(1)[0][0]
        yield Finding(
            "warning", "unquantized", names[kind],
            f"{dense / total:.0%} of the weights in the blocks' linear layers, which alone are "
            f"counted here, are unquantized, most of them {kind} ({names[kind]}); the artifact is "
            f"larger than its {_claim(subject)} promise",
        )  # fmt: skip


def _claim(subject: Subject) -> str:
    scheme = subject.artifact.found.scheme
    return f"{scheme.bits} bits" if scheme is not None else subject.artifact.found.format


def _kind(entry: Entry) -> str:
    if "experts" in entry.name:
        return "experts"
    return entry.module.rpartition(".")[2]


# Files that tell the same as config.json, and the keys that must agree, under all their names.
SIDE = "side-config"
_SIDE = ("quantize_config.json", "quant_config.json")
_AGREE = (
    ("bits", "w_bit", "wbits"),
    ("group_size", "q_group_size"),
    ("sym",),
    ("zero_point",),
    ("desc_act",),
    ("checkpoint_format", "version"),
)


def check_side_files(subject: Subject) -> Iterator[Finding]:
    """side-config: the files beside config.json say what it says, and MLX's second table."""
    if subject.artifact.found.format == mlx.NAME:
        yield from _said_twice(subject.config)
    folder = subject.artifact.checkpoint.folder
    if not isinstance(subject.config.get("quantization_config"), Mapping):
        return
    main = subject.config["quantization_config"]
    for file in _SIDE:
        if (folder / file).is_file():
            yield from _compare(folder / file, main)


def _said_twice(config: Mapping[str, Any]) -> Iterator[Finding]:
    """mlx-lm writes one table under two keys. What a model had before, with a method, may be left
    under the second, which mlx-lm does not read beside the first."""
    tables = [config.get(key) for key in mlx.CONFIG_KEYS]
    one, other = (table if isinstance(table, Mapping) else {} for table in tables)
    if not (mlx.is_mlx(one) and mlx.is_mlx(other)):
        return
    here, there = _flat(one), _flat(other)
    keys = [key for key in {**here, **there} if _said_in(here, key) != _said_in(there, key)]
    if keys:
        key, (first_key, second_key) = keys[0], mlx.CONFIG_KEYS
        said = [in_json(t[key]) if key in t else "nothing" for t in (here, there)]
        yield Finding(
            "warning", SIDE, key,
            f"config.json says {key} {said[0]} in {first_key}, and {said[1]} in {second_key}, "
            "where mlx-lm writes the same: it reads the first, and other programs may the second; "
            "make them agree",
            of_setting(*(f"{first_key}.{key}" for key in keys)),
        )  # fmt: skip


def _flat(table: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a table, and those of single modules behind their names."""
    found: dict[str, Any] = {}
    for name, said in table.items():
        inner = said if isinstance(said, Mapping) else {}
        found |= {f"{name}.{key}": value for key, value in inner.items()} or {name: said}
    return found


def _said_in(table: Mapping[str, Any], key: str) -> object:
    usual = {"mode": "affine", "symmetric": False}
    last = key.rpartition(".")[2]
    return None if last == "quant_method" else table.get(key, usual.get(last))


def _compare(path: Path, main: Mapping[str, Any]) -> Iterator[Finding]:
    try:
        beside = read_json(path)
    except QtoolError as error:
        yield Finding("warning", SIDE, path.name, str(error))
        return
    for keys in _AGREE:
        one, other = first(main, *keys), first(beside, *keys)
        if one is not None and other is not None and _plain(one) != _plain(other):
            key, there = (next(k for k in keys if t.get(k) is not None) for t in (main, beside))
            yield Finding(
                "error", SIDE, path.name,
                f"config.json says {key} {one!r}, and {path.name} {there} {other!r}; engines read "
                "one or the other: make them agree",
            )  # fmt: skip


def _plain(value: object) -> object:
    return re.sub("[-_]", "", value.lower()) if isinstance(value, str) else value


def conversions(subject: Subject) -> list[Mapping[str, Any]]:
    """What `qtool convert` records of itself, the latest last."""
    listed = (subject.artifact.provenance or {}).get("conversions")
    found = listed if isinstance(listed, list) else []
    return [one for one in found if isinstance(one, Mapping)]


def side(conversion: Mapping[str, Any], which: str) -> str | None:
    """The format that a conversion was `from` or `to`."""
    told = conversion.get(which)
    named = told.get("format") if isinstance(told, Mapping) else None
    return named if isinstance(named, str) else None


def dequantized(subject: Subject) -> list[Mapping[str, Any]]:
    """Conversions to an unquantized checkpoint, the latest last."""
    return [one for one in conversions(subject) if side(one, "to") == "hf"]


def _divides(size: int, whole: object) -> bool:
    return size > 0 and isinstance(whole, int) and whole % size == 0


def check_provenance(subject: Subject) -> Iterator[Finding]:
    """provenance: qtool.json speaks of this artifact."""
    if subject.artifact.unreadable:
        yield Finding(
            "error", "provenance", "qtool.json",
            f"cannot be read ({subject.artifact.unreadable}), so that nothing says how the "
            "artifact was made; fetch or make it again",
        )  # fmt: skip
    record = subject.artifact.provenance or {}
    recipe = record.get("recipe", {})
    if not isinstance(recipe, Mapping):
        return
    found = subject.artifact.found
    changed = conversions(subject)
    said = side(changed[-1], "to") if changed else recipe.get("format")
    said = {"hf": "dense"}.get(said, said) if isinstance(said, str) else None
    if isinstance(said, str) and said != found.format:
        yield Finding(
            "error", "provenance", "qtool.json",
            f"qtool.json says format {said}, config.json {found.format}; one of them is of "
            "another artifact",
        )  # fmt: skip
    weights = recipe.get("weights")
    if not isinstance(weights, Mapping) or found.scheme is None or changed:
        return
    size = found.scheme.group_size
    if recipe.get("indivisible") == "smaller-group" and _divides(size, weights.get("group_size")):
        size = weights["group_size"]
    for key, value in (
        ("bits", found.scheme.bits),
        ("group_size", size),
        ("symmetric", found.scheme.symmetric),
    ):
        if key in weights and weights[key] != value and not recipe.get("overrides"):
            yield Finding(
                "error", "provenance", "qtool.json",
                f"qtool.json says weights.{key} {weights[key]}, config.json {value}; one of them "
                "is of another artifact",
            )  # fmt: skip
