"""What qtool.json says of inputs and the cache, against config.json: no tensor tells these apart.

How the weights are stored is compared in `config`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from qtool.artifacts.stored_config import quantization_config
from qtool.formats.compressed_tensors_config import cache_config, inputs_config
from qtool.messages.printable import in_json
from qtool.verification.config import conversions
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "provenance"
_SHOWN = 160  # characters of a setting
_UNUSED = ("observer",)  # how a scale was found


def check_recorded(subject: Subject) -> Iterator[Finding]:
    """provenance: inputs and the cache are those of the recipe."""
    recipe = (subject.artifact.provenance or {}).get("recipe")
    format_ = subject.artifact.found.format
    if not isinstance(recipe, Mapping) or recipe.get("format") != format_ or conversions(subject):
        return
    config = quantization_config(subject.artifact.checkpoint)
    pairs: list[tuple[str, Any, Any]] = []
    try:
        if format_ == "compressed-tensors":
            inputs = inputs_config(_table(recipe, "activations"))
            groups = config.get("config_groups")
            pairs = [
                (f"config_groups.{name}.input_activations", inputs, group.get("input_activations"))
                for name, group in (groups.items() if isinstance(groups, Mapping) else ())
                if isinstance(group, Mapping) and group.get("weights")
            ]
            cache = cache_config(_table(recipe, "kv_cache"))
            pairs.append(("kv_cache_scheme", cache, config.get("kv_cache_scheme")))
        elif format_ == "qserve":
            for table, key in (("activations", "activations"), ("kv_cache", "kv_cache_scheme")):
                said = config.get(key)
                known = said if isinstance(said, Mapping) else {}
                for name, ours in (("num_bits", "bits"), ("type", "type")):
                    if recipe[table] is not None:
                        pairs.append((f"{key}.{name}", recipe[table][ours], known.get(name)))
        elif format_ == "bitsandbytes":
            key = "llm_int8_threshold"
            pairs = [(key, recipe["llm_int8"]["threshold"], config.get(key))]
    except (KeyError, TypeError):
        return  # a record of another version
    for key, recorded, said in pairs:
        if _plain(recorded) != _plain(said):
            yield Finding(
                "error", CHECK, key,
                f"by the recipe in qtool.json {key} is {_short(recorded)}, in config.json "
                f"{_short(said)}; one of them is of another artifact",
            )  # fmt: skip


def _table(recipe: Mapping[str, Any], key: str) -> Mapping[str, object] | None:
    table: Mapping[str, object] | None = recipe[key]
    return table


def _plain(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {k: v for k, v in value.items() if v is not None and k not in _UNUSED}


def _short(value: Any) -> str:
    return in_json(_plain(value), _SHOWN)
