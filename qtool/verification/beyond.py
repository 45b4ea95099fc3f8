"""Blocks that are there, and that config.json does not count."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from qtool.checkpoints import structure
from qtool.formats.layer_names import number_of
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject
from qtool.verification.tensor_names import MTP_SETTINGS

CHECK = "tensors"


def check_beyond(subject: Subject) -> Iterator[Finding]:
    """Blocks beyond those that config.json says, and beyond its layers for further tokens."""
    if subject.blocks is not None and (beyond := _names_beyond(subject)):
        yield Finding("warning", CHECK, beyond[0], _said_beyond(beyond, subject.blocks.count))


def _names_beyond(subject: Subject) -> list[str]:
    text = structure.text_config(subject.config)
    said = next((text[k] for k in MTP_SETTINGS if isinstance(text.get(k), int)), 0)
    if subject.blocks is None or structure.layer_count(subject.config) is None:
        return []
    first = subject.blocks.count + said
    return [n for n in sorted(subject.present) if (b := _block_of(subject, n)) and b[0] >= first]


def _block_of(subject: Subject, name: str) -> tuple[int, str] | None:
    """The block that a tensor belongs to, of those that run or behind them, and its name there."""
    start = "" if subject.blocks is None else subject.blocks.prefix + "."
    part, _, rest = name[len(start) :].partition(".")
    number = number_of(part) if start and name.startswith(start) else None
    return None if number is None else (number, rest)


def _said_beyond(names: Sequence[str], blocks: int) -> str:
    return (
        f"{counted(len(names), 'tensor')} of blocks beyond the {blocks} that config.json says: "
        f"{some(names)}; engines ignore or refuse them: correct the config, or leave them out"
    )


def blocks_not_counted(subject: Subject) -> str | None:
    """That blocks which are like those that run lie behind them; None where there is none, and of
    multi-token prediction, which has tensors of its own."""
    blocks: dict[int, set[str]] = defaultdict(set)
    for name in subject.present if subject.blocks is not None else ():
        if (found := _block_of(subject, name)) is not None:
            blocks[found[0]].add(found[1])
    if subject.blocks is None or max(blocks, default=0) < subject.blocks.count:
        return None
    kinds = {frozenset(rests) for number, rests in blocks.items() if number < subject.blocks.count}
    beyond = [
        name for name in _names_beyond(subject)
        if (found := _block_of(subject, name)) and frozenset(blocks[found[0]]) in kinds
    ]  # fmt: skip
    return _said_beyond(beyond, subject.blocks.count) if beyond else None
