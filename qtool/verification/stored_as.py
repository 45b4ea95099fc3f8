"""What a config says of how matrices are stored, against how they are, and against itself.

Sources: the schema of compressed-tensors (QuantizationArgs, QuantizationScheme), which formats its
compressors write; BitsAndBytesConfig of transformers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qtool.artifacts.stored_config import quantization_config
from qtool.formats.compressed_tensors_config import chosen_group, is_class
from qtool.formats.facts import names_of
from qtool.messages.printable import in_json
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.scheme import Scheme
from qtool.verification.config import conversions
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "stored-as"
_BYTES = ("F8_E4M3", "F8_E5M2")
# Of each layout: the tensor of codes, its dtypes, and type and bits of the weights.
_LAYOUTS: dict[str, tuple[str, tuple[str, ...], str, tuple[int, ...]]] = {
    "pack-quantized": ("weight_packed", ("I32",), "int", (1, 2, 3, 4, 5, 6, 7, 8)),
    "int-quantized": ("weight", ("I8",), "int", (2, 3, 4, 5, 6, 7, 8)),
    "float-quantized": ("weight", _BYTES, "float", (8,)),
    "mxfp8-quantized": ("weight", _BYTES, "float", (8,)),
    "nvfp4-pack-quantized": ("weight_packed", ("U8",), "float", (4,)),
    "mxfp4-pack-quantized": ("weight_packed", ("U8",), "float", (4,)),
}
# Inputs that share a scale, of those whose tensors are not told apart by their dtypes.
_RUNS = {"nvfp4-pack-quantized": 16, "mxfp4-pack-quantized": 32}
# In the names of classes that hold matrices: Linear, Conv1D, FusedMoE, RoutedExperts.
_CLASSES = ("Linear", "Conv", "MoE", "Expert")


def check_stored_as(subject: Subject) -> Iterator[Finding]:
    """stored-as: the tensors are stored as the config says, in a way that is read here."""
    config = quantization_config(subject.artifact.checkpoint)
    found = subject.artifact.found
    if found.format == "compressed-tensors":
        yield from _groups(subject, config)
    if found.format == "gptq":
        yield from _words(subject, config)
    if found.format == "bitsandbytes" and config.get("load_in_8bit") is config.get("load_in_4bit"):
        yield Finding(
            "error", CHECK, "config.json",
            f"load_in_8bit and load_in_4bit are both {in_json(config.get('load_in_8bit'))}, and "
            "transformers wants one of them: set that which the weights are stored in",
        )  # fmt: skip
    elif found.format == "bitsandbytes" and (other := [*_bytes(subject, config)]):
        yield from other
        return
    words = (e for e in subject.entries.values() if isinstance(e.scheme, str))
    unread = [entry for entry in words if not entry.stacked]
    if unread:
        own = subject.artifact.provenance is not None and not conversions(subject)
        read = any(isinstance(e.scheme, Scheme) for e in subject.entries.values())
        yield Finding(
            "error" if own else "note" if read else "warning", CHECK, unread[0].name,
            f"by its config {counted(len(unread), 'matrix')} ({some([e.name for e in unread])}) "
            f"stored as {found.format} in a way that this version does not read: their numbers "
            "were not checked" + ("" if read else ", nor any other's")
            + ("; qtool writes none such, so the config is of another artifact" if own else ""),
        )  # fmt: skip


def _words(subject: Subject, config: Mapping[str, Any]) -> Iterator[Finding]:
    """GPTQModel packs in words of what width pack_dtype says."""
    said = str(config.get("pack_dtype") or "int32").removeprefix("torch.")
    tensors = subject.artifact.checkpoint.tensors
    packed = [n for n, i in tensors.items() if n.endswith(".qweight") and i.dtype == "I32"]
    if said != "int32" and packed:
        yield Finding(
            "error", CHECK, "pack_dtype",
            f"config.json says pack_dtype {said[:40]}, and {counted(len(packed), 'matrix')} "
            f"({some(packed)}) are packed in int32, which GPTQModel would not read: put back int32",
        )  # fmt: skip


def _bytes(subject: Subject, config: Mapping[str, Any]) -> Iterator[Finding]:
    """Of bitsandbytes 8 and 4 bits have tensors of their own."""
    tensors = subject.artifact.checkpoint.tensors
    rows = [n.removesuffix(".SCB") for n in tensors if n.endswith(".SCB")]
    runs = [n.removesuffix(".weight.absmax") for n in tensors if n.endswith(".weight.absmax")]
    for key, kind, other in (("load_in_4bit", "int8", rows), ("load_in_8bit", "4 bits", runs)):
        if config.get(key) is True and other and not (rows and runs):
            yield Finding(
                "error", CHECK, key,
                f"config.json says {key}, and {counted(len(other), 'matrix')} ({some(other)}) "
                f"stored in {kind}: put back the config that the artifact was made with",
            )  # fmt: skip


def _groups(subject: Subject, config: Mapping[str, Any]) -> Iterator[Finding]:
    table = config.get("config_groups")
    items = table.items() if isinstance(table, Mapping) else ()
    groups = {
        str(name): group
        for name, group in items
        if isinstance(group, Mapping) and isinstance(group.get("weights"), Mapping)
    }
    written = str(config.get("format") or "")
    for name, group in groups.items():
        for why in _contradictions(group, written):
            yield Finding(
                "error", CHECK, f"config_groups.{name}",
                f"config_groups.{name}: {why}; put back the config that the artifact was made with",
            )  # fmt: skip
    targets = [t for group in groups.values() for t in names_of(group.get("targets"))]
    unknown = [t for t in targets if is_class(t) and not any(k in t for k in _CLASSES)]
    if unknown and len(unknown) == len(targets):
        yield Finding(
            "error", CHECK, "config_groups",
            f"config_groups: targets are {some(unknown)} alone, which no linear layer is, so that "
            "none is quantized; expected Linear, the class of linear layers, or names of modules",
        )  # fmt: skip
    wrong: dict[str, list[str]] = defaultdict(list)
    for module, text in _misfits(subject, list(groups.values()), written):
        wrong[text].append(module)
    for text, modules in wrong.items():
        yield Finding(
            "error", CHECK, modules[0],
            f"{counted(len(modules), 'matrix')} ({some(modules)}) {text}; fetch or make the "
            "artifact again",
        )  # fmt: skip


def _contradictions(group: Mapping[str, Any], written: str) -> Iterator[str]:
    """What no engine makes sense of in one group."""
    weights, inputs = group["weights"], group.get("input_activations")
    layout = str(group.get("format") or "")
    if layout and written in _LAYOUTS and layout != written:
        yield f"its format is {layout[:40]!r}, and that of the whole {written!r}"
    layout = layout or written
    kind, bits = str(weights.get("type") or "int"), weights.get("num_bits", 8)
    if weights.get("dynamic"):
        yield "its weights are called dynamic, and are stored with scales"
    if layout in _LAYOUTS and (kind != _LAYOUTS[layout][2] or bits not in _LAYOUTS[layout][3]):
        yield f"weights of {str(bits)[:20]}-bit {kind[:20]} cannot be stored as {layout}"
    size = weights.get("group_size")
    if type(size) is int and size != _RUNS.get(layout, size):
        yield f"weights in groups of {size} cannot be stored as {layout}, which has {_RUNS[layout]}"
    if not isinstance(inputs, Mapping):
        return
    said, dynamic = str(inputs.get("type") or "int"), inputs.get("dynamic", False)
    strategy = str(inputs.get("strategy") or "")
    if said == "float" and inputs.get("symmetric") is False:
        yield "floats of inputs have no zeros, and are called asymmetric"
    # 4-bit weights are multiplied by floats on Hopper, as llm-compressor's W4AFP8 asks.
    floats = said != "int" and bits != 4
    if (layout == "int-quantized" and floats) or (kind == "float" and said != "float"):
        yield f"inputs are {said[:20]}, and weights {kind[:20]}, which no kernel multiplies"
    if inputs.get("num_bits", 8) not in ((4, 8) if said == "float" else range(2, 9)):
        yield f"inputs of {str(inputs.get('num_bits'))[:20]}-bit {said[:20]}"
    if strategy == "token" and dynamic is False:
        yield "inputs have a scale for each token, and are called static"
    if strategy in ("channel", "block"):
        yield f"inputs cannot have a scale for each {strategy}"


def _misfits(
    subject: Subject, groups: Sequence[Mapping[str, Any]], written: str
) -> Iterator[tuple[str, str]]:
    """Modules that are stored in another way than their group says, each with what is wrong."""
    tensors = subject.artifact.checkpoint.tensors
    targets = [names_of(group.get("targets")) for group in groups]
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        if last != "weight_packed" and (last != "weight" or info.dtype not in ("I8", *_BYTES)):
            continue
        number = chosen_group(targets, module)
        if number is None:
            continue
        layout = str(groups[number].get("format") or written)
        if layout in _LAYOUTS:
            codes, dtypes, *_ = _LAYOUTS[layout]
            if last != codes or info.dtype not in dtypes:
                yield module, f"stored as {last} of {info.dtype}, and by the config {layout}"
        if layout == "pack-quantized" and f"{module}.weight_shape" not in tensors:
            yield module, "stored without weight_shape, by which compressed-tensors unpacks"
        inputs = groups[number].get("input_activations")
        scales = f"{module}.input_scale"
        if isinstance(inputs, Mapping) and inputs.get("dynamic") is True and scales in tensors:
            yield module, "stored with input_scale, and by the config with dynamic inputs"
