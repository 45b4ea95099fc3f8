"""The tensors of an architecture that the GGUF table knows: every one, and of which shape."""

import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from qtool.checkpoints.decoder_names import SAVE_WITH_HEAD, has_parts, name_alone, of_tower
from qtool.checkpoints.fused_experts import PARTS, WHOLE, stack_of
from qtool.checkpoints.hf_config import count
from qtool.checkpoints.roles import is_rotation
from qtool.errors import QtoolError
from qtool.formats.layer_names import experts_of, is_head
from qtool.gguf.architectures import TABLE, Architecture, variant
from qtool.gguf.architectures.modules import HEADS, Module, spelled
from qtool.gguf.architectures.shapes import checkpoint_shape
from qtool.gguf.from_hf.expert_rows import BLOCKS, SCALES
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.messages.sentences import AGAIN, some
from qtool.messages.sentences import count as counted
from qtool.verification.finding import Finding, of_error
from qtool.verification.subject import Subject
from qtool.verification.tensor_names import BUFFERS, of_attention, packed_part

CHECK = "tensors"
# Models whose class in transformers is another model's, and whose tensors have other names.
_OTHER_NAMES = ("exaone", "sarvam_mla", "sarvam_moe")
# Types of decoders whose classes take the names inside of another model, too (transformers 5.24,
# conversion_mapping), and store them so again.
_EITHER_NAMES = (
    "gemma4_text",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "gemma3n_text",
    "apertus1p5_text",
)
OF_OTHERS = "config and weights are of different models"
ALONE = "the same tensors of other blocks are as config.json says"
_NUMBER = re.compile(r"\.\d+(?=\.)")
_EXPERTS = ".experts."
_BARE = ((".weight", ""),)  # how tensors of experts end that are no weights of modules


def row_of(config: Mapping[str, Any]) -> tuple[Architecture, dict[str, Any]] | None:
    """The architecture's row and the completed config, where the row tells every tensor."""
    named = config.get("architectures")
    if not isinstance(named, list) or not named or config.get("model_type") in _OTHER_NAMES:
        return None
    try:
        architecture = TABLE.get(variant(str(named[0]), config) or "")
        if architecture is None:
            return None
        whole = architecture.completed(config)
        count(whole, "num_hidden_layers")
        if any(check(whole) is not None for check in architecture.refuse):
            return None  # a variant that the table does not describe
    except QtoolError:
        return None
    return architecture, whole


def check_by_table(
    subject: Subject, architecture: Architecture, config: dict[str, Any]
) -> Iterator[Finding]:
    """Every module of the architecture in every block, of the right shape; and no other."""
    names = _names(subject, architecture)
    used: set[str] = set()
    places: list[_Place] = []
    others: list[OtherShape] = []
    said: set[str] = set()
    for place in _places(architecture, config, names):
        places.append(place)
        used.update(place.found)
        try:
            others += _other_shape(subject, place, names, config)
        except QtoolError as error:  # of a setting, for every tensor that it shapes
            if str(error) not in said:
                yield of_error(CHECK, names[place.found[0]], error)
            said.add(str(error))
    if (bare := bare_name(subject.present, architecture)) is not None:
        yield Finding("warning", CHECK, bare[0], said_bare(*bare))
    elif inside := _wrapped(config, names, used):
        new, old = next(iter(inside.items()))
        yield Finding(
            "error", CHECK, old,
            f"{counted(len(inside), 'tensor')} ({some([*inside.values()])}) named as in a model "
            f"around the decoder, and {config['architectures'][0]} looks for {new}: rename "
            "them, or put back the config of the model around",
        )  # fmt: skip
    if others:
        whose = f"{ALONE}: {AGAIN}" if stray(subject, others) else OF_OTHERS
        yield Finding("error", CHECK, others[0].name, f"{said_shapes(others)}; {whose}")
    used.update(_beside_modules(architecture, config, names))
    if lost := _lost(places, architecture, config, names):
        yield Finding("error", CHECK, lost[0], f"{said_lost(lost, config)}; {AGAIN}")
    if extra := _extra(subject, names, used):
        yield Finding("warning", CHECK, extra[0], said_extra(extra, config))


def extra_by_table(
    subject: Subject, architecture: Architecture, config: dict[str, Any]
) -> list[str]:
    """Tensors that the architecture has no place for."""
    names = _names(subject, architecture)
    used = {name for place in _places(architecture, config, names) for name in place.found}
    used.update(_beside_modules(architecture, config, names))
    return _extra(subject, names, used)


def _extra(subject: Subject, names: Mapping[str, str], used: Collection[str]) -> list[str]:
    blocks = subject.blocks
    return [
        name
        for plain, name in sorted(names.items())
        if plain not in used
        and not _welcome(plain)
        # Blocks beyond those that run are of multi-token prediction.
        and not (blocks and (role := subject.roles.get(name)) and "beyond the" in str(role.reason))
    ]


def said_extra(extra: list[str], config: Mapping[str, Any]) -> str:
    """That they are there."""
    return (
        f"{counted(len(extra), 'tensor')} that {config['architectures'][0]} has no place for: "
        f"{some(extra)}; engines ignore or refuse them"
    )


def said_bare(name: str, whole: str) -> str:
    """The sentence on names that lack their first part. Source: vLLM 0.33, models/adapters.py."""
    return (
        f"tensors are named as where a model was saved without its head ({name} in place of "
        f"{whole}): vLLM finds them where the model makes embeddings, and not where it writes "
        f"text; for that {SAVE_WITH_HEAD}"
    )


def named_so(subject: Subject, architecture: Architecture, config: dict[str, Any]) -> bool:
    """Whether anything in a block has the name that the table gives it."""
    places = _places(architecture, config, _names(subject, architecture))
    return any(place.found and "{b}" in place.module.name for place in places)


def lost_by_table(
    subject: Subject, architecture: Architecture, config: dict[str, Any]
) -> list[str]:
    """Tensors that the architecture needs and that are not there."""
    names = _names(subject, architecture)
    return _lost(_places(architecture, config, names), architecture, config, names)


def _lost(
    places: Iterable["_Place"],
    architecture: Architecture,
    config: dict[str, Any],
    names: Collection[str],
) -> list[str]:
    lost = []
    for place in places:
        module = place.module
        # Experts that come packed never come without their biases.
        first = place.suffix == module.ends[0][0] or module.packed
        if not place.found and first and module.required(config) and module.name not in HEADS:
            name = (module.within if module.packed else None) or module.name
            lost.append(name.replace("{b}", str(place.block)) + place.end)
    return list(dict.fromkeys(lost)) + [
        one for one in _learned(architecture, config, names) if one not in names
    ]


def said_lost(lost: list[str], config: dict[str, Any]) -> str:
    """That they are missing."""
    return (
        f"{counted(len(lost), 'tensor')} that {config['architectures'][0]} needs "
        f"{'is' if len(lost) == 1 else 'are'} missing: {some(lost)}"
    )


def _learned(
    architecture: Architecture, config: dict[str, Any], names: Collection[str]
) -> list[str]:
    """What the table has in every block beside modules."""
    blocks = range(_blocks(config, names))
    return [n.replace("{b}", str(b)) for n in architecture.learned.values() for b in blocks]


def _beside_modules(
    architecture: Architecture, config: dict[str, Any], names: Collection[str]
) -> list[str]:
    """The same, and what follows from config.json."""
    constants = {} if architecture.constants is None else architecture.constants(config)
    return [*_learned(architecture, config, names), *constants]


@dataclass(frozen=True)
class OtherShape:
    """A tensor of another shape than config.json gives it."""

    name: str
    found: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"{self.name} is {list(self.found)}, and by config.json it should be "
            f"{list(self.expected)}"
        )


def said_shapes(others: list[OtherShape]) -> str:
    """That tensors have other shapes."""
    if len(others) == 1:
        return str(others[0])
    more = some([one.name for one in others[1:]])
    return f"{counted(len(others), 'tensor')} of other shapes: {others[0]}; also {more}"


def stray(subject: Subject, others: list[OtherShape]) -> bool:
    """Whether it is these tensors that are wrong, and not the config: of each kind others fit."""
    wrong = {one.name for one in others}
    fit = {_NUMBER.sub(".#", name) for name in subject.entries if name not in wrong}
    return all(_NUMBER.sub(".#", name) in fit for name in wrong)


def other_shapes(
    subject: Subject, architecture: Architecture, config: dict[str, Any]
) -> Iterator[OtherShape]:
    """Tensors that have other shapes than the architecture gives them."""
    names = _names(subject, architecture)
    for place in _places(architecture, config, names):
        with suppress(QtoolError):
            yield from _other_shape(subject, place, names, config)


@dataclass(frozen=True)
class _Place:
    """Where the architecture has a tensor, and the names under which that is there."""

    module: Module
    block: int
    suffix: str
    end: str
    found: list[str]


def _names(subject: Subject, architecture: Architecture) -> dict[str, str]:
    """Stored names by those of the architecture, whether a model is around it or the first part of
    each is lacking."""
    names = {name_alone(name): name for name in subject.present}
    bare = bare_name(names, architecture)
    if bare is None:
        return names
    first = bare[1].removesuffix(bare[0])
    return {
        name if is_head(name.removesuffix(".weight")) else first + name: stored
        for name, stored in names.items()
    }


def bare_name(names: Collection[str], architecture: Architecture) -> tuple[str, str] | None:
    """A tensor outside of blocks that lacks the first part of its name, as where a class without a
    head was saved (Qwen3-Embedding), and the whole name."""
    outer = (module for module in architecture.modules if "{b}" not in module.name)
    for name in (f"{stored}.weight" for module in outer for stored in module.stored):
        bare = name.partition(".")[2]
        if "." in bare and bare in names and name not in names:
            return bare, name
    return None


def _wrapped(
    config: Mapping[str, Any], names: Mapping[str, str], used: Collection[str]
) -> dict[str, str]:
    """Tensors of a decoder alone under names that it has inside of another model, by their own."""
    if has_parts(config) or "ForConditionalGeneration" in config["architectures"][0]:
        return {}
    if config.get("model_type") in _EITHER_NAMES:
        return {}
    return {new: old for new, old in sorted(names.items()) if new != old and new in used}


def _blocks(config: Mapping[str, Any], names: Collection[str]) -> int:
    # That more blocks are lost than tensors are there is said elsewhere.
    return int(min(config["num_hidden_layers"], len(names) + 1))


def _places(
    architecture: Architecture, config: dict[str, Any], names: Mapping[str, str]
) -> Iterator[_Place]:
    for module in architecture.modules:
        for block in range(_blocks(config, names) if "{b}" in module.name else 1):
            if module.in_block(config, block):
                for suffix, end in module.ends:
                    found = _found(module, block, end, names, config)
                    yield _Place(module, block, suffix, end, found)


def _found(
    module: Module, block: int, end: str, names: Mapping[str, str], config: Mapping[str, Any]
) -> list[str]:
    """The names under which a module's weight or bias is there."""

    def place(name: str, part: int = 0) -> str:
        return name.replace("{b}", str(block)).replace("{i}", str(part)) + end

    for name in module.stored:
        if place(name) in names:
            return [place(name)]
        if module.packed and place(name) + BLOCKS in names:  # its scales are looked at elsewhere
            return [n for n in (place(name) + BLOCKS, place(name) + SCALES) if n in names]
    if module.each is not None:
        name, setting = module.each
        try:
            parts = min(count(config, setting), len(names) + 1)
        except QtoolError:
            return []
        # A gap among experts is found elsewhere.
        apart = (place(one, i) for i in range(parts) for one in spelled(name))
        if found := [one for one in apart if one in names]:
            return found
    stems = (place(name).removesuffix(end) for name in module.stored)
    stack = next(filter(None, map(stack_of, stems)), None)
    in_one = not _apart(module) or _EXPERTS not in module.name
    if stack is not None and in_one and not end.endswith("bias"):
        # Experts that a checkpoint keeps fused, one by one (checkpoints.fused_experts).
        layer, kind = stack
        for own in (PARTS[kind], WHOLE[kind]):
            each = ([f"{layer}.{i}.{part}.weight" for part in own] for i in itertools.count())
            there = itertools.takewhile(lambda some: set(some) <= names.keys(), each)
            if found := list(itertools.chain.from_iterable(there)):
                return found
    if module.fused is not None:
        fused = module.fused[0].replace("{b}", str(block))
        return [n for n in (fused, fused + end) if n in names][:1]
    return []


def _apart(module: Module) -> bool:
    """Whether a checkpoint has its matrices one by one."""
    return module.cut is None and module.ends != _BARE


def _other_shape(
    subject: Subject, place: _Place, names: Mapping[str, str], config: Mapping[str, Any]
) -> list[OtherShape]:
    """QtoolError where the config does not tell the shape."""
    if place.found and experts_of(place.found[0]) is not None:
        return _other_experts(subject, place, names, config)
    if len(place.found) != 1 or place.module.each is not None:
        return []
    name = names[place.found[0]]
    entry = subject.entries.get(name)
    if entry is None or isinstance(entry.scheme, str):
        return []  # how a matrix that is not read is shaped is not known
    expected = checkpoint_shape(place.module, config, place.suffix, place.block)
    if expected is None or stored_shape(expected) == stored_shape(entry.shape):
        return []
    return [OtherShape(name, entry.shape, expected)]


def _other_experts(
    subject: Subject, place: _Place, names: Mapping[str, str], config: Mapping[str, Any]
) -> list[OtherShape]:
    """The same of gpt-oss's experts one by one, whose table has them in one tensor."""
    expected = checkpoint_shape(place.module, config, place.suffix, place.block)
    if not place.module.packed or expected is None or len(expected) != 3:
        return []
    wanted = (expected[2], expected[1])
    there = (subject.entries.get(names[one]) for one in place.found)
    return [OtherShape(e.name, e.shape, wanted) for e in there if e and e.shape != wanted]


def _welcome(name: str) -> bool:
    """Whether a tensor that no module of the table stands for may be there all the same."""
    return (
        of_tower(name)
        or name.endswith(BUFFERS)
        or is_head(name.removesuffix(".weight"))  # looked at by the check of heads
        or "mtp." in name
        or of_attention(name)
        or is_rotation(name)
        or packed_part(name) is not None  # looked at below
    )
