"""Which layers an engine leaves unquantized by the config's lists, against what the files hold.

    AWQ                 modules_to_not_convert   vLLM and SGLang: any entry that is a part of the
                                                 name; transformers: its start up to a dot, or its
                                                 end; none: vLLM looks at the dtypes in the headers
    GPTQ                dynamic, "-:" entries    regular expressions, from the name's start, first
                                                 match; vLLM else looks at the headers, SGLang not
    compressed-tensors  ignore, and targets      names, or regular expressions after "re:"; for
                                                 SGLang's ignore also ends of names from a dot on
    FP8                 modules_to_not_convert   whole names; SGLang: parts from dot to dot
    AutoRound           extra_config             auto_round_config

Of towers and projectors it is up to an engine's class of the model, and to its version, whether
they are asked for: in vLLM those of LLaVA, Gemma 3 and Qwen2-VL are, and what merges patches in
Mistral 3 is not; SGLang has its Qwen3-VL either way. What no list names there is a warning.

A part of a name is a trap: `mlp.gate` is also in `mlp.gate_proj`. vLLM and SGLang ask by the name
of the layer that they fuse, `mlp.gate_up_proj`; for AWQ, compressed-tensors and FP8 vLLM also asks
by the names of its parts, SGLang for compressed-tensors in some classes.
Sources: vLLM 0.33 (quant_utils.is_layer_skipped, gptq_utils, compressed_tensors/utils), SGLang
0.5.23 (awq, gptq, utils, compressed_tensors/utils), transformers 5.24 (quantizers_utils.
should_convert_module); of towers vLLM (models/llava, qwen2_vl, and pull request 10169),
llm-compressor (issues 1546 and 1652), SGLang (models/qwen2_5_vl, qwen3_vl).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from qtool.checkpoints.structure import OTHER_TOWERS
from qtool.formats import auto_round
from qtool.formats.compressed_tensors_config import named
from qtool.formats.facts import names_of
from qtool.formats.gptq_dynamic import entry_for, negative
from qtool.formats.layer_names import FUSED, experts_of
from qtool.formats.patterns import any_of
from qtool.verification.engines import auto_round_config
from qtool.verification.engines.targets import group_of, named_in_targets
from qtool.verification.engines.view import EngineView, Layer, alike, fused_layers, some
from qtool.verification.finding import About, Finding, Severity, of_setting
from qtool.verification.skip_lists import GROUPS, setting

CHECK = "engine-skip-list"
_UNKNOWN = "?"


def skip_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """Layers that the engine takes for quantized and are not, or the other way round."""
    if not view.quantized:
        return
    if view.format == auto_round.NAME:
        yield from auto_round_config.skip_findings(view, engine, who)
        return

    def wrongly_named(layer: Layer) -> str | None:
        entry = None if layer.stored is None else _entry_for(view, layer, engine)
        if entry in (None, _UNKNOWN):
            return None
        if entry.endswith(f" has {layer.module!r}") or f" has {layer.module!r}," in entry:
            advice = "take it off the list"
        else:
            advice = "write whole names, or an expression that ends with $"
        return f"{entry}, so that {who} leaves it unquantized and finds no weight for it; {advice}"

    def not_named(layer: Layer) -> str | None:
        if layer.stored is not None or not _asked(view, layer, engine):
            return None
        if _entry_for(view, layer, engine) is not None:
            return None
        asked = layer.module if engine == "transformers" else _engine_names(layer)[0]
        what = "it" if asked == layer.module else f"{asked}, which {who} asks for"
        return (
            f"{_list_of(view)} does not name {what}, so that {who} looks for codes; add that name"
        )

    lists = _lists(view)
    yield from alike("error", CHECK, view.layers, wrongly_named, "{} is quantized", lists)
    others = [layer for layer in view.layers if layer.role != "router"]
    yield from alike("error", CHECK, others, not_named, "{} is not quantized", lists)
    # Most model classes give their routers no quantization at all; whoever made a list and means
    # a class that does forgot them.
    if _names(view.quantization) or view.format == "compressed-tensors":
        routers = [layer for layer in view.layers if layer.role == "router"]
        yield from alike("warning", CHECK, routers, not_named, "{} is not quantized", lists)


def tower_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """Dense matrices of a tower, or between it and the decoder, that no list leaves unquantized."""
    sees = any(OTHER_TOWERS.search(layer.module) for layer in view.beside)
    if not view.quantized or not sees:
        return
    missed = [
        layer.module
        for layer in view.beside
        if _asked(view, layer, engine) and not _named_anyhow(view, layer, engine)
    ]
    if missed:
        them = "it" if len(missed) == 1 else "them"
        yield Finding(
            "warning", CHECK, missed[0],
            f"{some(missed)} {'is' if len(missed) == 1 else 'are'} not quantized, and "
            f"{_list_of(view)} does not name {them}: where {who} builds {them} with quantization, "
            "as many of its classes do, it looks for codes that are not there; add "
            + ("that name" if len(missed) == 1 else "such names"),
            About(_lists(view)),
        )  # fmt: skip


def fused_findings(view: EngineView, who: str) -> Iterator[Finding]:
    """Of compressed-tensors SGLang asks for a fused layer by its own name, then by its class
    (Linear), and by its parts only last and where its class of the model has a list of them."""
    if view.format != "compressed-tensors":
        return
    ignored = names_of(view.quantization.get("ignore"))
    missed, otherwise, unknown = [], [], []
    for parts in fused_layers(view.layers).values():
        fused, first = _engine_names(parts[0])[0], parts[0]
        means = (_means(entry, fused, "sglang") for entry in ignored)
        if first.expert or fused == first.module or any_of(means):
            continue
        group = group_of(view.quantization, fused)
        if group is None and named_in_targets(view.quantization, fused) is None:
            continue
        if all(part.stored is None for part in parts):
            missed += [] if group is None else [fused]
        elif first.stored is not None and group is None:
            unknown.append(fused)
        elif first.stored is not None and not _same(
            group, group_of(view.quantization, first.module)
        ):
            otherwise.append(fused)
    no_list = "where its class of the model has no list of these, as Llama's has none,"
    cases: list[tuple[Severity, str, list[str], str, str]] = [
        ("warning", CHECK, missed, "ignore names",
         f": {no_list} it looks for codes that are not there; add that name to ignore"),
        ("error", "engine-targets", otherwise, "targets name",
         ", and so takes the group that has Linear, by their class, for theirs; add that name to "
         "their targets"),
        ("warning", "engine-targets", unknown, "targets name",
         f": {no_list} it refuses the model; add that name to their targets"),
    ]  # fmt: skip
    for severity, check, names, by, so in cases:
        if names:
            said = f"{who} asks for {some(names)}, of which {by} parts alone{so}"
            about = of_setting(setting("ignore" if check == CHECK else GROUPS))
            yield Finding(severity, check, names[0], said, about)


def _means(entry: str, name: str, engine: str) -> bool | None:
    """Whether an entry of ignore means a module; of a name SGLang takes an end from a dot on."""
    end = engine == "sglang" and not entry.startswith("re:") and name.endswith(f".{entry}")
    return True if end else named(entry, name)


def _same(one: Mapping[str, Any] | None, other: Mapping[str, Any] | None) -> bool:
    keys = ("weights", "input_activations", "format")
    return one is other or (
        one is not None and other is not None and all(one.get(k) == other.get(k) for k in keys)
    )


def _named_anyhow(view: EngineView, layer: Layer, engine: str) -> bool:
    """Whether a list names a matrix of a tower, or may: engines rewrite the beginnings of names in
    lists as they do those of tensors, and some take the name of a tower for all that is in it."""
    plain = layer.module.removeprefix("model.")
    names = [layer.module, plain, f"model.{plain}"]
    if view.format in ("awq", "fp8"):
        inside = [f".{entry}." for entry in _names(view.quantization)]
        if any(entry in f".{name}." for entry in inside for name in names):
            return True
    layers = (replace(layer, module=name) for name in names)
    return any(_entry_for(view, one, engine) is not None for one in layers)


def _list_of(view: EngineView) -> str:
    return {"gptq": "dynamic", "compressed-tensors": "ignore"}.get(
        view.format, "modules_to_not_convert"
    )


def _lists(view: EngineView) -> frozenset[str]:
    """The settings that decide what is left unquantized."""
    of_any = ("modules_to_not_convert", "ignored_layers")
    there = [key for key in of_any if view.quantization.get(key) is not None]
    keys = there if _list_of(view) in of_any and there else [_list_of(view)]
    return frozenset(map(setting, keys))


def _names(quantization: Mapping[str, Any]) -> tuple[str, ...]:
    return names_of(
        quantization.get("modules_to_not_convert") or quantization.get("ignored_layers")
    )


def _asked(view: EngineView, layer: Layer, engine: str) -> bool:
    """Whether the engine takes a layer for quantized unless a list names it."""
    if layer.role == "head":
        # vLLM and SGLang ask `lm_head` of AWQ and GPTQ, and of the others the head's own name.
        return engine == "transformers" and view.format == "compressed-tensors"
    if view.format == "awq":
        return engine != "vllm" or bool(_names(view.quantization))
    if view.format == "gptq":
        return engine == "sglang"
    if view.format == "compressed-tensors":
        return group_of(view.quantization, layer.module) is not None
    return view.format == "fp8"


def _engine_names(layer: Layer) -> tuple[str, ...]:
    """What engines call a layer: the experts of a block at once, else the layer that its part is
    fused into; and in the end its own name."""
    if found := experts_of(layer.module + ".weight"):
        return (found[0],)  # no expert is asked for by its own name
    parent, _, last = layer.module.rpartition(".")
    fused = [f"{parent}.{whole}" for whole, parts in FUSED if last in parts]
    return (*fused, layer.module)


def _entry_for(view: EngineView, layer: Layer, engine: str) -> str | None:
    """The entry that leaves a layer unquantized, as the start of a sentence; None where none, and
    _UNKNOWN where that depends on an expression that is not matched here."""
    names = _engine_names(layer)
    where = _list_of(view)
    if view.format == "gptq":
        table = view.quantization.get("dynamic")
        key, known = entry_for(table if isinstance(table, dict) else {}, names[0])
        if not known:
            return _UNKNOWN
        return f"dynamic has {key!r}" if key is not None and negative(key) else None
    if view.format == "compressed-tensors":
        asked = (layer.module,) if engine == "transformers" else (*names, layer.module)
        answers = {
            entry: any_of(_means(entry, name, engine) for name in asked)
            for entry in names_of(view.quantization.get("ignore"))
        }
        if ignored := next((entry for entry, answer in answers.items() if answer), None):
            return f"{where} has {ignored!r}"
        return None if all(answer is False for answer in answers.values()) else _UNKNOWN
    if engine == "sglang" and view.format == "awq":
        names = names[:1]
    for entry in _names(view.quantization):
        if engine == "transformers":
            name = layer.module
            hit = name == entry or name.startswith(entry + ".") or name.endswith(entry)
        elif view.format == "fp8" and engine == "sglang":
            called = names[0] if layer.expert else layer.module
            hit = f".{entry.rstrip('.')}." in f".{called}."
        elif view.format == "fp8":
            hit = entry in (*names, layer.module)
        else:
            hit = any(entry in name for name in names)
        if hit:
            return f"{where} has {entry!r}, which is (a part of) its name"
    return None
