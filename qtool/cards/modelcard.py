"""The README.md of an artifact: what was done to which model, how to load it, how exact it is.

The front matter follows the hub's conventions for quantized models. The text depends on the plan,
the provenance and the layers' errors only, so that equal runs write equal cards.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from qtool import __version__, hub
from qtool.cards import card
from qtool.cards.planned_view import planned_view
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_names import layer_of
from qtool.engine_commands import COMMANDS
from qtool.messages.numbered import by_kind
from qtool.messages.summary import LayerReport
from qtool.planning.plan import Plan
from qtool.record import without_layers
from qtool.runs.sink import EngineRotations
from qtool.verification.engines.rules import ENGINES, loaders, view_findings
from qtool.verification.engines.view import EngineView

WORST_SHOWN = 10
_METHODS = {
    "rtn": "rounding to nearest",
    "gptq": "GPTQ rounding",
    "none": "no quantization",
    "awq": "AWQ scale search",
    "rotate": "rotation",
    "smooth": "SmoothQuant scales",
    "smooth-attention": "SmoothAttention scales",
}


def render(
    plan: Plan,
    checkpoint: Checkpoint,
    record: dict[str, Any],
    layers: Sequence[LayerReport],
    rotated: EngineRotations | None = None,
) -> str:
    """The card. rotated: what engines have to rotate."""
    parts = [
        _front_matter(plan, checkpoint, record),
        _title(plan, record),
        _what(plan, checkpoint, record),
        loading(planned_view(plan, checkpoint.config, rotated)),
        _errors(layers),
        _notes(plan, record),
        "## Provenance\n\nAlso in `qtool.json`, with the error of each layer.\n\n```json\n"
        + json.dumps(without_layers(record), indent=2, ensure_ascii=False)
        + "\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def base_model(record: dict[str, Any]) -> str | None:
    """The hub id of the source, without its revision; None for models that are not on the hub."""
    name = record["source"]["name"]
    if name is None or not hub.is_hub_id(name):
        return None
    return str(name).partition("@")[0]


def _front_matter(plan: Plan, checkpoint: Checkpoint, record: dict[str, Any]) -> str:
    lines = ["---"]
    if (base := base_model(record)) is not None:
        lines.append(f"base_model: {base}")
        if plan.format != "dense":
            lines.append("base_model_relation: quantized")
    lines += card.license_lines(checkpoint.folder)
    lines += [
        f"library_name: {'mlx' if plan.format == 'mlx' else 'transformers'}",
        f"pipeline_tag: {task(checkpoint.config)}",
        "quantized_by: qtool",
        "tags:",
        "- qtool",
    ]
    if plan.format != "dense":
        widths = sorted({tensor.scheme.bits for tensor in plan.quantized if tensor.scheme})
        lines += ["- quantized", f"- {plan.format}", *(f"- {bits}-bit" for bits in widths)]
    return "\n".join([*lines, "---"])


def _title(plan: Plan, record: dict[str, Any]) -> str:
    return f"# {record['source']['name'] or 'Model'}, {plan.recipe.name}"


def _what(plan: Plan, checkpoint: Checkpoint, record: dict[str, Any]) -> str:
    recipe = plan.recipe
    steps = [_METHODS[name] for name in recipe.transform_chain]
    searched = " with searched scales" if recipe.has_small_floats else " with clipped ranges"
    steps.append(_METHODS[recipe.rounding] + (searched if recipe.clips else ""))
    counts = plan.counts
    schemes: dict[str, int] = defaultdict(int)
    for tensor in plan.quantized:
        schemes[str(tensor.scheme)] += 1
    stored = ", ".join(f"{count} matrices {scheme}" for scheme, count in schemes.items())
    changes = "".join(f" `--set {item}`" for item in recipe.changes)
    rows = [
        ("made with", f"qtool {__version__}, recipe `{recipe.name}`{changes}"),
        ("method", ", then ".join(steps)),
        ("format", plan.format),
        ("weights", stored or "as they were"),
        ("tensors", ", ".join(f"{count} {kind}" for kind, count in counts.items())),
        (
            "size",
            f"{plan.size_bytes:,} bytes ({checkpoint.size_bytes:,} before), "
            f"{plan.bits_per_weight:.3f} bits per weight",
        ),
    ]
    calibration = record["calibration"]
    if calibration:
        rows.append(("calibration", ", ".join(f"{k} {v}" for k, v in calibration.items())))
    table = [f"| {key} | {value} |" for key, value in rows]
    return "\n".join(["| | |", "|---|---|", *table])


# What transformers loads a format with; accelerate is for device_map.
_PACKAGES = {
    "awq": "gptqmodel and accelerate", "gptq": "gptqmodel, optimum and accelerate",
    "compressed-tensors": "compressed-tensors and accelerate",
    "bitsandbytes": "bitsandbytes and accelerate", "auto-round": "auto-round and accelerate",
    "mxfp4": "kernels and accelerate",
}  # fmt: skip


def takes_images(config: Mapping[str, Any]) -> bool:
    """Whether the model is one of images and text, by its config."""
    return "vision_config" in config


def task(config: Mapping[str, Any]) -> str:
    """The hub's name for what the model is for."""
    return "image-text-to-text" if takes_images(config) else "text-generation"


def loading(view: EngineView) -> str:
    """How an artifact is loaded by the engines whose rules refuse nothing of it."""
    lines = ["## Loading", ""]
    if view.format == "dense":
        return "\n".join(
            [*lines, "An ordinary checkpoint in full precision: every engine loads it."]
        )
    if view.format == "qserve":
        return "\n".join(
            [
                *lines,
                "Tensors as OmniServe's W4A8 kernels read them, on NVIDIA GPUs; group size and "
                "bits of the cache, which its command line asks for, are in `config.json` under "
                "`quantization_config`.",
            ]
        )
    if view.format == "awq" and view.layout not in ("gemm", ""):
        return "\n".join([*lines, f"AWQ layout {view.layout}: the kernels of that name."])
    loads = loaders(view)
    if not loads:
        return "\n".join(
            [*lines, "No engine that qtool knows loads it as it is; `qtool eval` measures it."]
        )
    lines += ["`DIR` is this folder.", ""]
    if loads[0] != "transformers":
        lines += [f"    {COMMANDS[loads[0]].format('DIR')}", ""]
    # Building its class to see takes longer than rounding some models.
    asks = any(layer_of(f"{layer.module}.weight") is not None for layer in view.quantized)
    if "transformers" in loads:
        family = f"AutoModelFor{'ImageTextToText' if takes_images(view.config) else 'CausalLM'}"
        only = ""
        if asks:
            only = (
                ", only where its class takes experts one by one: where it does not, it makes up "
                "their weights (`qtool verify DIR --engine transformers` tells)"
            )
        lines += [
            f"With transformers and {_PACKAGES.get(view.format, 'accelerate')}{only}:",
            "",
            f"    from transformers import {family}",
            f'    model = {family}.from_pretrained("DIR", device_map="auto")',
            "",
        ]
    for engine in ("vllm", "transformers"):
        found = view_findings(view, engine, 1)
        if found and found[0].severity == "error":
            lines += [f"Not with {ENGINES[engine]}: {found[0].message}.", ""]
    return "\n".join(lines).rstrip()


def _errors(layers: Sequence[LayerReport]) -> str:
    """Relative errors by kind of layer, and the worst layers."""
    if not layers:
        return ""
    kinds: dict[tuple[str, str], list[LayerReport]] = defaultdict(list)
    for layer in layers:
        kinds[re.sub(r"(?<=\.)\d+(?=\.)", "*", layer.name), layer.of].append(layer)
    lines = [
        "## Relative error",
        "",
        "What rounding a layer's weights does to its outputs on the calibration data, or, where no",
        "sums of its inputs were needed, to the weights.",
        "",
        "| layers | of | count | median | largest |",
        "|---|---|---|---|---|",
    ]
    for (kind, of), members in kinds.items():
        errors = sorted(member.relative_error for member in members)
        middle = errors[len(errors) // 2]
        lines.append(f"| `{kind}` | {of} | {len(errors)} | {middle:.4f} | {errors[-1]:.4f} |")
    worst = sorted(layers, key=lambda layer: (-layer.relative_error, layer.name))[:WORST_SHOWN]
    lines += ["", "| largest | scheme | of | error |", "|---|---|---|---|"]
    lines += [f"| `{w.name}` | {w.scheme} | {w.of} | {w.relative_error:.4f} |" for w in worst]
    return "\n".join(lines)


def _notes(plan: Plan, record: dict[str, Any]) -> str:
    notes = [*plan.warnings, *by_kind(record["notes"])]
    if not notes:
        return ""
    return "\n".join(["## Notes", "", *(f"- {note.removeprefix('note: ')}" for note in notes)])
