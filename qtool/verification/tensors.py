"""Nothing missing, nothing extra: the tensors against config.json, and against the source.

An architecture of the GGUF table is known to the last tensor. Of another one, the numbers of blocks
and experts are known, and that blocks of one kind are alike.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from qtool import structure
from qtool.errors import QtoolError
from qtool.formats.dtypes import FLOAT_DTYPES
from qtool.formats.safetensors_header import TensorInfo
from qtool.gguf.arch_modules import HEADS, Module
from qtool.gguf.arch_shapes import expected_shape
from qtool.gguf.architectures import TABLE, Architecture
from qtool.gguf.hf_config import complete, count
from qtool.gguf.kinds import stored_shape
from qtool.layer_names import experts_of, is_head
from qtool.verification.finding import Finding
from qtool.verification.sentences import count as counted
from qtool.verification.sentences import some
from qtool.verification.subject import Subject

CHECK = "tensors"
_INSIDE = ("language_model.", "")
_VISION = ("vision_tower.", "vision_model.", "multi_modal_projector.", "embed_vision.", "visual.")
_BUFFERS = ("inv_freq", "masked_bias", "position_ids", "causal_mask", ".attention.bias")
# Scales of attention, which belong to no matrix.
_ATTENTION = re.compile(r".*\.(?:[qkv](?:_proj)?[._](?:\w+_)?scale|kv_scale|sinks)")
_PREDICTION = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_tensors(subject: Subject) -> Iterator[Finding]:
    """Against what config.json says, without the source."""
    if subject.artifact.checkpoint.path.is_file() and not subject.config:
        yield Finding("note", CHECK, "", "no config.json, so nothing tells which tensors belong")
        return
    yield from _blocks(subject)
    yield from _experts(subject)
    row = _row(subject.config)
    if row is not None:
        yield from _by_table(subject, *row)
    else:
        yield from _alike(subject)
    yield from _prediction(subject)
    yield from check_packed(subject)


def _row(config: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]] | None:
    """The architecture's row and the completed config, where the row tells every tensor."""
    named = config.get("architectures")
    architecture = TABLE.get(str(named[0])) if isinstance(named, list) and named else None
    if architecture is None:
        return None
    try:
        whole = complete(config, architecture.defaults)
        count(whole, "num_hidden_layers")
        if any(check(whole) is not None for check in architecture.refuse):
            return None  # a variant that the table does not describe
    except QtoolError:
        return None
    return architecture, whole


def _blocks(subject: Subject) -> Iterator[Finding]:
    declared = structure.layer_count(subject.config)
    blocks = subject.blocks
    if declared is None or blocks is None:
        if declared is not None and subject.entries:
            yield Finding(
                "error", CHECK, "",
                f"config.json says {declared} blocks, and no tensor is of a numbered block",
            )  # fmt: skip
        return
    start = blocks.prefix + "."
    there = {
        int(number)
        for name in subject.present
        if name.startswith(start) and (number := name[len(start) :].split(".", 1)[0]).isdecimal()
    }
    lost = [n for n in range(min(declared, 100_000)) if n not in there]
    if lost:
        yield Finding(
            "error", CHECK, f"{blocks.prefix}.{lost[0]}",
            f"config.json says {declared} blocks, and {counted(len(lost), 'block')} "
            f"({some([f'{blocks.prefix}.{n}' for n in lost])}) are not there; fetch or make the "
            "artifact again",
        )  # fmt: skip


def _experts(subject: Subject) -> Iterator[Finding]:
    """Every expert of a layer is there, with the same tensors."""
    layers: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in subject.present:
        if found := experts_of(name):
            rest = name[len(found[0]) :].split(".", 2)[2]
            layers[found[0]][found[1]].add(rest)
    text = structure.text_config(subject.config)
    said = next((text[k] for k in _EXPERT_COUNTS if isinstance(text.get(k), int)), None)
    for layer, experts in sorted(layers.items()):
        every = set().union(*experts.values())
        runs = subject.blocks is not None and layer.startswith(subject.blocks.prefix + ".")
        number = max(max(experts) + 1, said if runs and said and said < 100_000 else 0)
        lost = [f"{layer}.{n}.{rest}" for n in range(number) for rest in sorted(every - experts[n])]
        if lost:
            yield Finding(
                "error", CHECK, layer,
                f"{layer}: {counted(len(lost), 'tensor')} of its {number} experts are missing "
                f"({some(lost)}); fetch or make the artifact again",
            )  # fmt: skip


def _by_table(
    subject: Subject, architecture: Architecture, config: dict[str, Any]
) -> Iterator[Finding]:
    """Every module of the architecture in every block, of the right shape; and no other."""
    names = {name.replace(*_INSIDE): name for name in subject.present}
    used: set[str] = set()
    lost: list[str] = []
    for module in architecture.modules:
        for block in range(config["num_hidden_layers"] if "{b}" in module.name else 1):
            for suffix in (".weight", ".bias"):
                found = _found(module, block, suffix, names, config)
                used.update(found)
                needed = suffix == ".weight" and module.needed and module.name not in HEADS
                if not found and needed:
                    lost.append(module.name.replace("{b}", str(block)) + suffix)
                if len(found) == 1 and module.each is None:
                    yield from _shape(subject, names[found[0]], module, config, suffix)
    if lost:
        yield Finding(
            "error", CHECK, lost[0],
            f"{counted(len(lost), 'tensor')} that {config['architectures'][0]} needs "
            f"{'is' if len(lost) == 1 else 'are'} missing: {some(lost)}; fetch or make the "
            "artifact again",
        )  # fmt: skip
    blocks = subject.blocks
    extra = [
        name
        for plain, name in sorted(names.items())
        if plain not in used
        and not _welcome(plain)
        # Blocks beyond those that run predict further tokens.
        and not (blocks and (role := subject.roles.get(name)) and "beyond the" in str(role.reason))
    ]
    if extra:
        yield Finding(
            "warning", CHECK, extra[0],
            f"{counted(len(extra), 'tensor')} that {config['architectures'][0]} has no place for: "
            f"{some(extra)}; engines ignore or refuse them",
        )  # fmt: skip


def _found(
    module: Module, block: int, suffix: str, names: Mapping[str, str], config: Mapping[str, Any]
) -> list[str]:
    """The names under which a module's weight or bias is there."""

    def place(name: str, part: int = 0) -> str:
        return name.replace("{b}", str(block)).replace("{i}", str(part)) + suffix

    for name in (module.name, *module.also):
        if place(name) in names:
            return [place(name)]
    if module.each is not None:
        name, setting = module.each
        try:
            parts = min(count(config, setting), len(names) + 1)
        except QtoolError:
            return []
        # A gap among experts is found elsewhere.
        if found := [place(name, i) for i in range(parts) if place(name, i) in names]:
            return found
    if module.fused is not None:
        fused = module.fused[0].replace("{b}", str(block))
        return [n for n in (fused, fused + suffix) if n in names][:1]
    return []


def _shape(
    subject: Subject, name: str, module: Module, config: Mapping[str, Any], suffix: str
) -> Iterator[Finding]:
    entry = subject.entries.get(name)
    if entry is None:
        return
    try:
        expected = expected_shape(module, config, suffix)
    except QtoolError as error:
        yield Finding("error", CHECK, name, str(error))
        return
    if expected is None or stored_shape(expected) == stored_shape(entry.shape):
        return
    yield Finding(
        "error", CHECK, name,
        f"{name} is {list(entry.shape)}, and by config.json it should be {list(expected)}; "
        "config and weights are of different models",
    )  # fmt: skip


def _welcome(name: str) -> bool:
    """Whether a tensor that no module of the table stands for may be there all the same."""
    return (
        name.removeprefix("model.").startswith(_VISION)
        or name.endswith(_BUFFERS)
        or is_head(name.removesuffix(".weight"))  # looked at by the check of heads
        or "mtp." in name
        or _ATTENTION.fullmatch(name) is not None
        or packed_part(name) is not None  # looked at below
    )


def _alike(subject: Subject) -> Iterator[Finding]:
    """A block that lacks what all others of its kind have."""
    if subject.blocks is None:
        return
    start = subject.blocks.prefix + "."
    blocks: dict[int, set[str]] = defaultdict(set)
    for name in subject.present:
        number, _, rest = name[len(start) :].partition(".")
        if name.startswith(start) and number.isdecimal() and int(number) < subject.blocks.count:
            blocks[int(number)].add(rest)
    kinds: dict[frozenset[str], list[int]] = defaultdict(list)
    for block, rests in blocks.items():
        kinds[frozenset(rests)].append(block)
    for kind, members in kinds.items():
        larger = [other for other in kinds if kind < other and len(kinds[other]) > 1]
        if len(members) == 1 and larger:
            full = max(larger, key=lambda other: len(kinds[other]))
            lost = sorted(f"{start}{members[0]}.{rest}" for rest in full - kind)
            if 2 * len(lost) < len(full):
                yield Finding(
                    "error", CHECK, lost[0],
                    f"block {members[0]} lacks {some(lost)}, which {len(kinds[full])} other blocks "
                    "have; fetch or make the artifact again",
                )  # fmt: skip


def _prediction(subject: Subject) -> Iterator[Finding]:
    """Layers that predict further tokens, which tools lose when they save what they loaded."""
    text = structure.text_config(subject.config)
    said = next((k for k in _PREDICTION if isinstance(text.get(k), int) and text[k] > 0), None)
    if said is None or subject.blocks is None:
        return
    start = f"{subject.blocks.prefix}.{subject.blocks.count}."
    if not any("mtp" in name.lower() or name.startswith(start) for name in subject.present):
        yield Finding(
            "warning" if subject.source is None else "note", CHECK, said,
            f"config.json says {said} {text[said]}, and no such tensors are there; speculative "
            "decoding with the model's own draft will not work",
        )  # fmt: skip


_PARTS = (
    "qweight", "qzeros", "scales", "scaled_zeros", "g_idx", "weight_packed", "weight_scale",
    "weight_scale_2", "weight_scale_inv", "weight_zero_point", "weight_global_scale",
    "weight_shape", "weight_g_idx", "SCB", "weight_format",
)  # fmt: skip


def packed_part(name: str) -> str | None:
    """The module whose packed matrix a stored tensor is a part of."""
    module, _, last = name.rpartition(".")
    return module if last in _PARTS else None


def check_packed(subject: Subject) -> Iterator[Finding]:
    """Scales, zeros and the like of a matrix that is not there."""
    alone: dict[str, list[str]] = defaultdict(list)
    for name, entry in subject.entries.items():
        module = packed_part(name)
        if entry.scheme is None and module is not None:
            alone[module].append(name)
    if alone:
        names = [name for group in alone.values() for name in group]
        whole = [m for m in alone if f"{m}.weight" in subject.present]
        why = (
            f"which is stored dense as {whole[0]}.weight"
            if whole
            else "of which there are no codes"
        )
        yield Finding(
            "error", CHECK, names[0],
            f"{counted(len(names), 'tensor')} ({some(names)}) belong to "
            f"{counted(len(alone), 'quantized matrix')}, {why}; fetch or make the artifact again",
        )  # fmt: skip


def check_dtypes(subject: Subject) -> Iterator[Finding]:
    """dtypes: no weight is of a type that the config does not explain."""
    odd = [
        entry
        for entry in subject.entries.values()
        if entry.scheme is None
        and entry.name.endswith(".weight")
        and len(entry.shape) == 2
        and entry.dtype not in FLOAT_DTYPES
    ]
    if odd:
        said = subject.artifact.found.format
        yield Finding(
            "error", "dtypes", odd[0].name,
            f"{counted(len(odd), 'weight')} ({some([e.name for e in odd])}) stored as "
            f"{odd[0].dtype}, "
            + (
                "and no quantization_config says what it stands for"
                if said == "dense"
                else f"of which the config ({said}) says nothing"
            )
            + "; engines take the bytes for numbers, or refuse them",
        )  # fmt: skip


def check_against(subject: Subject) -> Iterator[Finding]:
    """Against the tensors of the source."""
    if subject.source is None:
        return
    source = subject.source.tensors
    stacks = _stacks(source)
    lost = [
        name
        for name in source
        if name not in subject.present
        and not name.endswith(_BUFFERS)
        and not is_head(name.removesuffix(".weight"))
        and not _unstacked(name, subject)
    ]
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name in lost:
        found = experts_of(name)
        mtp = "mtp" in name.lower() or _beyond(name, subject)
        by_kind["multi-token prediction" if mtp else "experts" if found else ""].append(name)
    for kind, names in by_kind.items():
        yield Finding(
            "error", "against", names[0],
            f"{counted(len(names), 'tensor')} of the source{f' ({kind})' if kind else ''} "
            f"{'is' if len(names) == 1 else 'are'} not in the artifact: {some(names)}; make it "
            "again with a tool that keeps them",
        )  # fmt: skip
    extra = [
        name
        for name in sorted(subject.present)
        if name not in source
        and not is_head(name.removesuffix(".weight"))
        and _ATTENTION.fullmatch(name) is None
        and packed_part(name) is None
        and not any(name.startswith(stack) for stack in stacks)
    ]
    if extra:
        yield Finding(
            "warning", "against", extra[0],
            f"{counted(len(extra), 'tensor')} not in the source: {some(extra)}",
        )  # fmt: skip
    for name, entry in subject.entries.items():
        if name in source and tuple(source[name].shape) != entry.shape:
            yield Finding(
                "error", "against", name,
                f"{name} is {list(entry.shape)}, in the source {list(source[name].shape)}; "
                "they are different models",
            )  # fmt: skip


def _stacks(source: Mapping[str, TensorInfo]) -> tuple[str, ...]:
    """Layers of experts that the source keeps in 3-D tensors, `...experts.`."""
    found = {
        name[: name.index("experts") + 7] + "."
        for name, info in source.items()
        if "experts" in name and len(info.shape) == 3
    }
    return tuple(sorted(found))


def _unstacked(name: str, subject: Subject) -> bool:
    """Whether a 3-D tensor of the source is there as one matrix an expert."""
    if "experts" not in name or experts_of(name):
        return False
    layer = name[: name.index("experts") + 7]
    return f"{layer}.0." in subject.expert_starts


def _beyond(name: str, subject: Subject) -> bool:
    blocks = subject.blocks
    if blocks is None or not name.startswith(blocks.prefix + "."):
        return False
    number = name[len(blocks.prefix) + 1 :].split(".", 1)[0]
    return number.isdecimal() and int(number) >= blocks.count
