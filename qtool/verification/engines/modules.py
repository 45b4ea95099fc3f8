"""Which layers transformers takes for quantized, by the modules of its own class.

Its names are not always a checkpoint's (checkpoints.conversions), and a list of what is left
unquantized is compared with its own: what a list of compressed-tensors or bitsandbytes does not
name so, a vision tower for instance, is newly initialized instead of loaded, with a warning at
most.

Source: transformers 5.24 (quantizers_utils.should_convert_module), compressed-tensors 0.20
(quantization/lifecycle/apply, utils/match).
"""

import json
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_names import fused_tensors, layer_of
from qtool.checkpoints.hf_config import TEXT_CONFIGS
from qtool.errors import QtoolError, SourceError
from qtool.formats.bitsandbytes import skips
from qtool.formats.compressed_tensors_config import named
from qtool.formats.facts import names_of
from qtool.formats.layer_names import is_head
from qtool.formats.patterns import any_of
from qtool.streaming.weights import Weights
from qtool.verification.classes import COUNTS
from qtool.verification.engines.local import EXPERTS, instead_for_experts
from qtool.verification.engines.targets import group_of, named_in_targets, weight_arguments
from qtool.verification.engines.view import EngineView, Stored
from qtool.verification.engines.view import some as shown
from qtool.verification.finding import About, Finding, of_setting
from qtool.verification.skip_lists import GROUPS, setting

CHECK = "engine-skip-list"
BUILT, CONFIG = "engine-class", "config.json"
COMPARED = ("compressed-tensors", "bitsandbytes")


@dataclass(frozen=True)
class ClassModules:
    """A checkpoint's modules in the class that transformers has for it."""

    names: Mapping[str, str]  # of the checkpoint's modules, in the class
    linear: frozenset[str]  # of the class's own: linear layers
    fused: tuple[str, ...]  # layers of experts that the class takes all in one, and are apart
    skipped: tuple[str, ...] = ()  # what it leaves unquantized where a config has no list
    kept: tuple[str, ...] = ()  # what it leaves so in any case


def class_modules(checkpoint: Weights, view: EngineView) -> ClassModules | None:
    """None where transformers is not there, or has no such class. Builds it without weights.

    checkpoint: what config.json lies with. view: of the artifact that there is, or will be.
    """
    try:
        from torch import nn
        from transformers.quantizers.base import get_keys_to_not_convert

        from qtool.checkpoints.conversions import Conversions
        from qtool.streaming.meta_model import meta_model
        from qtool.streaming.towers import part_with_text

        method = str(view.quantization.get("quant_method") or "")
        model = _for(method, meta_model(checkpoint))
        within = part_with_text(checkpoint.config)
        conversions = Conversions.of(model, within)
    except (ImportError, QtoolError):  # or an early version of transformers
        return None
    state = model.state_dict()
    dense = {n.removesuffix(".weight") for n in view.names if n.endswith(".weight")}
    names = {}
    for module in sorted(dense | {layer.module for layer in view.quantized}):
        weight = f"{module}.weight"
        target, _ = conversions.target(weight, state)
        if target not in state and weight in state:
            target = weight
        names[module] = target.removesuffix(".weight")
    fused = fused_tensors(model, (f"{module}.weight" for module in names), within)
    layers = dict.fromkeys(layer_of(one.parts[0][0]) or "" for one in fused)
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return ClassModules(
        names, frozenset(linear), tuple(layers), tuple(get_keys_to_not_convert(model)),
        tuple(getattr(model, "_keep_in_fp32_modules", None) or ()),
    )  # fmt: skip


def build_findings(checkpoint: Checkpoint, wrong: frozenset[str]) -> Iterator[Finding]:
    """Why transformers cannot build what config.json describes, of a type that it knows.

    wrong: settings of which it is said already. Where it is built without them, or with values of
    its class in their place, they are why; in place of a count these may go with no other one.
    """
    reason = _refused(checkpoint)
    if reason is not None and wrong:
        first, reason = reason, refused_without(checkpoint, wrong, _refused)
        if reason != first and not wrong.isdisjoint(COUNTS):
            return
    if reason is not None:
        yield Finding("error", BUILT, CONFIG, reason)


def _refused(checkpoint: Checkpoint) -> str | None:
    try:
        from qtool.streaming.meta_model import meta_model

        meta_model(checkpoint)
    except SourceError as problem:
        return str(problem)
    except (ImportError, QtoolError):
        pass  # it has no such class, or not without a library that is not there
    return None


def refused_without(
    checkpoint: Checkpoint, wrong: frozenset[str], refused: Callable[[Checkpoint], str | None]
) -> str | None:
    """What `refused` says of a config.json that does not say these settings."""
    config = _without(checkpoint.config, {key.partition(".")[0] for key in wrong})
    with TemporaryDirectory(prefix="qtool-") as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config))
        reason = refused(replace(checkpoint, path=Path(folder), config=config))
        return None if reason is None else reason.replace(folder, str(checkpoint.folder))


def _without(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {
        key: _without(value, keys) if key in TEXT_CONFIGS and isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in keys
    }


def _for(method: str, model: Any) -> Any:
    """The class as it is loaded into: of some a quant_method has experts taken apart."""
    import torch
    from transformers.quantizers import base

    patches = getattr(base, "MODULES_TO_PATCH_FOR_QUANTIZATION", {})
    for name, module in [*model.named_modules()]:
        patch = patches.get(type(module).__name__)
        if patch is not None and method in [str(m.value) for m in patch["quantization_methods"]]:
            parent, _, last = name.rpartition(".")
            with torch.device("meta"):
                made = patch["module_name"](model.config.get_text_config())
            setattr(model.get_submodule(parent), last, made)
    return model


def module_findings(view: EngineView, there: ClassModules) -> Iterator[Finding]:
    """Layers that transformers takes for quantized and are not, or the other way round."""
    # Of formats of which that is said whatever the class, it is not said again.
    if there.fused and instead_for_experts(view.format, view.config) is None:
        yield Finding(
            "error", EXPERTS, there.fused[0],
            f"the class that transformers has for {view.config.get('model_type')} takes the "
            f"experts of a block in one tensor alone, and here they are one by one "
            f"({shown(there.fused)}): transformers would make up their weights; serve it with "
            + ("vLLM, or dequantize it with `qtool convert --to hf`" if view.quantized else "vLLM"),
        )  # fmt: skip
    if view.format not in COMPARED or not view.quantized:
        return
    quantized = {layer.module: layer.stored for layer in view.quantized}
    where, skipped = _list_of(view, there)
    looked_for, otherwise = [], []
    passed_over: dict[str, list[str]] = defaultdict(list)  # by the key that leaves them out
    for module, name in there.names.items():
        if name not in there.linear or (leaves := skipped(name)) is None:
            continue
        stored = quantized.get(module)
        if stored is None:
            looked_for += [] if leaves else [module]
        elif leaves:
            passed_over[_key_for(view, where, name)].append(module)
        elif _unlike(view, name, stored):
            otherwise.append(module)
    # One that is tied has no tensor, and is a layer all the same.
    tied = sorted(n for n in there.linear.difference(there.names.values()) if is_head(n))
    looked_for += [name for name in tied if skipped(name) is False]
    if looked_for:
        first = there.names.get(looked_for[0], looked_for[0])
        called = "" if first == looked_for[0] else f" as transformers does ({first})"
        yield Finding(
            "error", CHECK, looked_for[0],
            f"{shown(looked_for)} {_are(looked_for)} not quantized, and {where} does not name "
            f"{'it' if len(looked_for) == 1 else 'them'}{called}, so that transformers looks for "
            "codes, and makes up the weights or does not load the model; add "
            + ("that name" if len(looked_for) == 1 else "such names, or an expression for all"),
            About(frozenset({setting(where)}), frozenset(looked_for)),
        )  # fmt: skip
    if otherwise:
        first = there.names[otherwise[0]]
        yield Finding(
            "error", "engine-targets", otherwise[0],
            f"{shown(otherwise)} {_are(otherwise)} stored otherwise than the targets say of "
            f"{first}, as transformers calls it, which refuses that; add that name to the targets "
            "of its group",
            of_setting(setting(GROUPS)),
        )  # fmt: skip
    for key, modules in passed_over.items():
        how, advice = _left_out(view, key, there.names[modules[0]])
        yield Finding(
            "error", CHECK, modules[0],
            f"{shown(modules)} {_are(modules)} quantized, and {how}, as transformers calls it, so "
            f"that it finds no weight; {advice}",
            About(frozenset({setting(key)}), frozenset(modules)),
        )  # fmt: skip


def _key_for(view: EngineView, where: str, name: str) -> str:
    """What leaves out a quantized layer of the class: the list, or targets that do not name it."""
    listed = names_of(view.quantization.get(where))
    ignored = any_of(entry == "Linear" or named(entry, name) for entry in listed)
    return GROUPS if view.format == "compressed-tensors" and not ignored else where


def _left_out(view: EngineView, key: str, name: str) -> tuple[str, str]:
    """The same in words, and what to do."""
    if key == GROUPS:
        return f"no target names {name}", "add that name to the targets of its group"
    if name in names_of(view.quantization.get(key)):
        return f"{key} leaves out {name}", "take it off the list"
    return f"{key} leaves out {name}", "write whole names, or an expression that ends with $"


def _are(names: list[str]) -> str:
    return "is" if len(names) == 1 else "are"


def _unlike(view: EngineView, name: str, stored: Stored) -> bool:
    """Whether compressed-tensors' config says another width or group of a layer of the class."""
    if view.format != "compressed-tensors" or not stored.bits:
        return False
    said = weight_arguments(view.quantization, name)
    size = said.get("group_size")
    return bool(said) and (
        said.get("num_bits") != stored.bits
        or (type(size) is int and size > 0 and size != stored.group_size)
        or (said.get("strategy") == "channel" and stored.group_size > 0)
    )


def _list_of(view: EngineView, there: ClassModules) -> tuple[str, Callable[[str], bool | None]]:
    """The list of what is left unquantized, and whether it, or the targets, leave out a linear
    layer of the class; None where that is not known."""
    table = view.quantization
    if view.format == "compressed-tensors":
        ignored = names_of(table.get("ignore"))

        def out(name: str) -> bool | None:
            left = any_of(entry == "Linear" or named(entry, name) for entry in ignored)
            if left is False and group_of(table, name) is None:
                return None if named_in_targets(table, name) is None else True
            return left

        return "ignore", out
    listed = table.get("llm_int8_skip_modules")
    entries = (*(there.skipped if listed is None else names_of(listed)), *there.kept)
    return "llm_int8_skip_modules", lambda name: any_of(skips(entry, name) for entry in entries)
