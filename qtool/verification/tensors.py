"""Nothing missing, nothing extra: the tensors against config.json.

An architecture of the GGUF table is known to the last tensor. Of another one, the numbers of blocks
and experts are known, and that blocks of one kind are alike.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from qtool.artifacts.untold import said_untold, untold
from qtool.checkpoints import structure
from qtool.checkpoints.decoder_names import has_parts
from qtool.checkpoints.single_experts import single_experts
from qtool.errors import QtoolError
from qtool.formats.dtypes import FLOAT_DTYPES
from qtool.formats.layer_names import experts_of, number_of
from qtool.formats.mxfp4_experts import misnamed
from qtool.gguf.architectures import TABLE
from qtool.messages.sentences import AGAIN, some, verb
from qtool.messages.sentences import count as counted
from qtool.verification.beyond import check_beyond
from qtool.verification.by_table import (
    check_by_table,
    lost_by_table,
    named_so,
    row_of,
    said_lost,
)
from qtool.verification.finding import Finding
from qtool.verification.settings_form import class_of
from qtool.verification.sizes import check_sizes
from qtool.verification.subject import Subject
from qtool.verification.tensor_names import MTP_SETTINGS, packed_part

CHECK = "tensors"
# In the config.json of what `quantize` makes of a file alone, and warns of.
_OF_ONE_FILE = {"quantization_config", "quantization", "tie_word_embeddings"}
_FEW_EXPERTS = 1000  # whose tensors are listed however few are there
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_tensors(subject: Subject) -> Iterator[Finding]:
    """Against what config.json says, without the source."""
    if subject.artifact.checkpoint.path.is_file() and not subject.config:
        yield Finding("note", CHECK, "", "no config.json, so nothing tells which tensors belong")
        return
    there = (subject.artifact.checkpoint.folder / "config.json").is_file()
    if there and not structure.names_model(subject.config):
        made = subject.config and subject.config.keys() <= _OF_ONE_FILE
        yield Finding(
            "warning" if made else "error",
            CHECK,
            "",
            f"{structure.NAMELESS}; put the model's own beside the tensors",
        )
    if (lost := said_untold(subject.artifact)) is not None:
        yield Finding("error", CHECK, untold(subject.artifact)[0], lost)
        yield from _blocks(subject)
        return
    if others := misnamed(subject.artifact.checkpoint.tensors):
        first, wanted = next(iter(others.items()))
        yield Finding(
            "error", CHECK, first,
            f"{first} and {len(others) - 1} more hold plain numbers under names of MXFP4's blocks, "
            "as transformers 5.23 saves gpt-oss that it has dequantized; engines look for "
            f"{wanted}: save it with version 5.24 or later, or quantize it, which takes it so",
        )  # fmt: skip
    if singles := single_experts(subject.artifact.checkpoint.tensors):
        first, wanted = next(iter(singles.items()))
        yield Finding(
            "error", CHECK, first,
            f"{first} and {len(singles) - 1} more are experts one by one, as unsloth trains "
            f"gpt-oss; engines look for {wanted}: save it with unsloth's save_pretrained_merged, "
            "or quantize it, which takes it so",
        )  # fmt: skip
    yield from _blocks(subject)
    yield from _experts(subject)
    row = row_of(subject.config)
    if row is not None:
        yield from check_by_table(subject, *row)
    else:
        yield from _alike(subject)
        yield from check_sizes(subject)
    yield from _mtp(subject)
    yield from check_beyond(subject)
    yield from check_packed(subject)


def lacking(subject: Subject) -> tuple[str | None, list[str]]:
    """What a model is sure to lack, None for nothing; and what it seems to lack.

    Sure is what an architecture of the table needs, where its tensors have the names that the
    table knows, and a block between others. Of other models nobody knows how many blocks and
    experts they store of those that config.json counts.
    """
    row = row_of(subject.config)
    if row is not None and not named_so(subject, *row):
        row = None  # a model of the table by other names
    blocks = [*_lost_blocks(subject)]
    found = [*blocks, *_experts(subject)]
    found += [] if row is not None else [one for one in _alike(subject) if one.severity == "error"]
    said = [one.message.removesuffix(f"; {AGAIN}") for one in found]
    if row is not None and (lost := lost_by_table(subject, *row)):
        said.append(said_lost(lost, row[1]))
    sure = row is not None or (bool(blocks) and _has_gap(subject))
    return (said[0], []) if said and sure else (None, said)


def _has_gap(subject: Subject) -> bool:
    """Whether a block lies between others that is not there."""
    numbers = _numbers(subject) | structure.empty_blocks(subject.config)
    return bool(numbers) and max(numbers) >= len(numbers)


def _numbers(subject: Subject) -> set[int]:
    """Of the blocks that are there, if only with some of their tensors."""
    if subject.blocks is None:
        return set()
    start = subject.blocks.prefix + "."
    found = {
        name[len(start) :].split(".", 1)[0] for name in subject.present if name.startswith(start)
    }
    return {number for one in found if (number := number_of(one)) is not None}


def _blocks(subject: Subject) -> Iterator[Finding]:
    declared = structure.layer_count(subject.config)
    blocks = subject.blocks
    if declared is None or blocks is None:
        if declared is not None and subject.entries:
            yield Finding(
                "error", CHECK, "",
                f"config.json says {counted(declared, 'block')}, and no tensor is of a numbered "
                "block",
            )  # fmt: skip
        elif blocks is not None and _uncounted(subject.config):
            yield Finding(
                "error", CHECK, "num_hidden_layers",
                "config.json says no num_hidden_layers, so that engines take the number that its "
                f"class has where nothing is said; {counted(blocks.count, 'block')} "
                f"{verb(blocks.count, 'are', 'is')} there: put back the model's own",
            )  # fmt: skip
        return
    yield from _lost_blocks(subject)


def _uncounted(config: Mapping[str, Any]) -> bool:
    """Whether a known class's config.json, which always says how many blocks there are, does not.

    Those of models around a decoder may leave out what its class has by default.
    """
    row = TABLE.get(class_of(config))
    if row is None or row.remote or has_parts(config):
        return False
    try:
        return row.completed(config).get("num_hidden_layers") is None
    except QtoolError:
        return True


def _lost_blocks(subject: Subject) -> Iterator[Finding]:
    """That some of the blocks that config.json says are not there."""
    declared, blocks = structure.layer_count(subject.config), subject.blocks
    if declared is None or blocks is None:
        return
    there = _numbers(subject) | structure.empty_blocks(subject.config)
    lost = declared - sum(1 for n in there if n < declared)
    if lost:
        gaps = (f"{blocks.prefix}.{n}" for n in range(declared) if n not in there)
        first = [*islice(gaps, 3)]
        yield Finding(
            "error", CHECK, first[0],
            f"config.json says {counted(declared, 'block')}, and {counted(lost, 'block')} "
            f"({some(first, lost)}) {'is' if lost == 1 else 'are'} not there; {AGAIN}",
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
        if number > max(len(subject.present), _FEW_EXPERTS):
            yield Finding(
                "error", CHECK, layer,
                f"{layer}: {counted(len(experts), 'expert')} of {number:,} are there; {AGAIN}",
            )  # fmt: skip
            continue
        lost = [f"{layer}.{n}.{rest}" for n in range(number) for rest in sorted(every - experts[n])]
        if lost and not _lost_there(subject, lost):
            yield Finding(
                "error", CHECK, layer,
                f"{layer}: {counted(len(lost), 'tensor')} of its {number} experts "
                f"{'is' if len(lost) == 1 else 'are'} missing "
                f"({some(lost)}); {AGAIN}",
            )  # fmt: skip


def _lost_there(subject: Subject, names: Sequence[str]) -> bool:
    """Whether the source has none of these either."""
    return subject.source is not None and not any(n in subject.source.tensors for n in names)


def _alike(subject: Subject) -> Iterator[Finding]:
    """A block that lacks what all others of its kind have, as their tensors show it, and
    config.json where it says something of each block. The first one of some models lacks
    something by design (ZAYA's a scale of what a block before it handed on)."""
    if subject.blocks is None:
        return
    start = subject.blocks.prefix + "."
    blocks: dict[int, set[str]] = defaultdict(set)
    for name in subject.present:
        part, _, rest = name[len(start) :].partition(".")
        number = number_of(part) if name.startswith(start) else None
        if number is not None and number < subject.blocks.count:
            blocks[number].add(rest)
    kinds: dict[frozenset[str], list[int]] = defaultdict(list)
    for block, rests in blocks.items():
        kinds[frozenset(rests)].append(block)
    said = _said_of_each(subject.config, subject.blocks.count)

    def like(other: frozenset[str], block: int) -> bool:
        return len(kinds[other]) > 1 and any(said[one] == said[block] for one in kinds[other])

    for kind, members in kinds.items():
        larger = [other for other in kinds if kind < other and like(other, members[0])]
        if len(members) == 1 and larger:
            full = max(larger, key=lambda other: len(kinds[other]))
            lost = sorted(f"{start}{members[0]}.{rest}" for rest in full - kind)
            if 2 * len(lost) < len(full) and not _lost_there(subject, lost):
                yield Finding(
                    "error" if members[0] else "warning", CHECK, lost[0],
                    f"block {members[0]} lacks {some(lost)}, which {len(kinds[full])} other blocks "
                    f"have; {AGAIN}",
                )  # fmt: skip


def _said_of_each(config: Mapping[str, Any], blocks: int) -> list[tuple[object, ...]]:
    """What lists of config.json say of each block."""
    lists = [
        one for one in structure.text_config(config).values()
        if isinstance(one, list) and len(one) == blocks
        and all(isinstance(item, str | int | float | dict) for item in one)
    ]  # fmt: skip
    return [tuple(one[block] for one in lists) for block in range(blocks)]


def _mtp(subject: Subject) -> Iterator[Finding]:
    """Layers of multi-token prediction, which tools lose when they save what they loaded."""
    text = structure.text_config(subject.config)
    said = next((k for k in MTP_SETTINGS if isinstance(text.get(k), int) and text[k] > 0), None)
    if said is None or subject.blocks is None:
        return
    start = f"{subject.blocks.prefix}.{subject.blocks.count}."
    if not any("mtp" in name.lower() or name.startswith(start) for name in subject.present):
        yield Finding(
            "warning" if subject.source is None else "note", CHECK, said,
            f"config.json says {said} {text[said]}, and no such tensors are there; speculative "
            "decoding with the model's own draft will not work",
        )  # fmt: skip


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
            f"{verb(len(whole), 'which are', 'which is')} stored dense (as {whole[0]}.weight)"
            if whole
            else "of which there are no codes"
        )
        yield Finding(
            "error", CHECK, names[0],
            f"{counted(len(names), 'tensor')} ({some(names)}) "
            f"{verb(len(names), 'belong', 'belongs')} to "
            f"{counted(len(alone), 'quantized matrix')}, {why}; {AGAIN}",
        )  # fmt: skip


def check_dtypes(subject: Subject) -> Iterator[Finding]:
    """dtypes: no weight is of a type that the config does not explain."""
    if untold(subject.artifact):
        return  # which check_tensors says
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
            f"{counted(len(odd), 'weight')} ({some([e.name for e in odd])}) "
            f"{verb(len(odd), 'are', 'is')} stored as {odd[0].dtype}, "
            + (
                "and no quantization_config says what that stands for"
                if said == "dense"
                else f"of which the config ({said}) says nothing"
            )
            + "; engines take the bytes for numbers, or refuse them",
        )  # fmt: skip
