"""Norms that are not the source's, where the matrices that read them do not compensate for it.

Scales that were folded into a norm (AWQ, SmoothQuant) are in the columns of its readers, inversely.
What nothing undoes changes what the model computes as much as it likes. Where a norm's readers are
not quantized they are the source's (or `unquantized` tells), and do not compensate for anything.
"""

import math
import re
from collections import defaultdict
from collections.abc import Container, Mapping, Sequence

import numpy as np

from qtool.formats.dtypes import FLOAT_DTYPES
from qtool.gguf.architectures import TABLE, class_named
from qtool.messages.sentences import AGAIN, some, verb
from qtool.messages.sentences import count as counted
from qtool.verification import config
from qtool.verification.against.casts import only_cast, same
from qtool.verification.against.compared import Compared
from qtool.verification.against.fit import MATCH, uneven
from qtool.verification.against.folds import PLUS_ONE, block_of, idle_norms
from qtool.verification.against.pairs import heads_of
from qtool.verification.against.side_by_side import Floats
from qtool.verification.against.takers import LEAST, Answer, asked, off_channels
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "norms"
_FACTOR = math.log(1.5)  # and its inverse: smaller ones may be folds that coarse matrices hide


def check_norms(
    subject: Subject,
    compared: Sequence[Compared],
    norms: Mapping[str, Mapping[str, Floats]],
    known: Container[str] = (),
) -> tuple[list[Finding], set[str]]:
    """norms: none is 0 altogether, or unlike the source's by what nothing takes back. Returned with
    the matrices that read those with scales that are too large or too small.

    norms: old / new weight of those that differ, by block (folds.changed_norms). known: matrices of
    which is said by now that they are others.
    """
    zeros: list[str] = []
    readers: set[str] = set()
    found: dict[str, list[str]] = {"times": [], "other": [], "channels": []}
    heads = heads_of(subject.config)
    idle = idle_norms(compared, norms)
    blocks: dict[str, list[Compared]] = defaultdict(list)
    for c in compared:
        blocks[block_of(subject, c.name)].append(c)
    for block, ratios in norms.items():
        for name in (key for key in ratios if not key.endswith(PLUS_ONE)):
            if _is_zero(subject, name):
                zeros.append(name)
            elif name not in idle:
                adds = _may_add_one(subject, name)
                keys = {key: ratios[key] for key in (name + PLUS_ONE * one for one in adds)}
                near = blocks[block]
                answers = {k: asked(k, one, near, known, heads) for k, one in keys.items()}
                kind, words = _judged(subject, name, keys, ratios[name], near, answers)
                if not kind and adds == (False,) and (flipped := _flipped(subject, name)):
                    kind, words = "channels", f"{counted(flipped, 'channel')} of the other sign"
                if kind:
                    found[kind].append(f"{name} ({words})")
                    readers.update(c for answer in answers.values() for c in answer.off)
    findings: list[Finding] = []
    for names, what in (
        (zeros, "0 altogether, and not so in the source"),
        (found["times"], "the source's but for a factor that no layer compensates for"),
        (found["other"], "unlike the source's, and no layer compensates for it"),
        (found["channels"], "unlike the source's in channels where no layer compensates for it"),
    ):
        if names:
            words = f"{counted(len(names), 'norm')} {verb(len(names), 'are', 'is')} {what}: "
            said = f"{words}{some(names)}; {AGAIN}"
            findings.append(Finding("error", CHECK, names[0].split(" ")[0], said))
    return findings, readers


def _judged(
    subject: Subject,
    name: str,
    keys: Mapping[str, Floats],
    ratio: Floats,
    block: Sequence[Compared],
    answers: Mapping[str, Answer],
) -> tuple[str, str]:
    """What is wrong with a norm, and by how much; empty where nothing is, or nothing is sure.
    keys: the ratios that its readers may
    have, as `answers`; ratio: that of its weights."""
    takers = {key: answer.fine for key, answer in answers.items() if answer.fine}
    if takers:
        off = min(off_channels(key, keys[key], fine) for key, fine in takers.items())
        return ("channels", counted(off, "channel")) if off else ("", "")
    by, even = -float(np.median(np.log(ratio))), uneven(ratio) <= MATCH
    if config.dequantized(subject) or any(one.unsure for one in answers.values()):
        folded = any(c.columns is not None or c.rows is not None for c in block)
        far = even and abs(by) > _FACTOR and not folded
        return ("times", f"{math.exp(by):.3g} times") if far else ("", "")
    if not _sees_readers(subject, name, block):
        return "", ""
    gain = next((one.gain for one in answers.values() if one.gain is not None), by)
    if even and abs(gain - by) < MATCH:  # the norm itself tells its factor, the matrices about it
        gain = by
    if abs(gain) > LEAST and (gain is not by or even):
        return "times", f"{math.exp(gain):.3g} times"
    away = float(np.abs(np.log(ratio)).mean())
    return ("other", f"by {math.expm1(away):.1%} on average") if away > LEAST else ("", "")


def _sees_readers(subject: Subject, name: str, block: Sequence[Compared]) -> bool:
    """Whether all matrices of a block that may read the norm were compared, or are the source's."""
    here, source = block_of(subject, name), subject.source
    assert source is not None
    if any(block_of(subject, f"{module}.weight") == here for module in subject.broken):
        return False
    seen, width = {c.name for c in block}, subject.entries[name].shape[0]
    for other, entry in subject.entries.items():
        if other in seen or len(entry.shape) < 2 or entry.shape[-1] != width:
            continue
        if block_of(subject, other) != here:
            continue
        if other not in source.tensors or source.tensors[other].shape != entry.shape:
            return False
        if entry.scheme is not None or not (same(subject, other) or only_cast(subject, other)):
            return False
    return True


def _may_add_one(subject: Subject, name: str) -> tuple[bool, ...]:
    """Whether a norm multiplies by 1 + weight: both where the table of classes does not tell."""
    named = class_named(subject.config)
    listed = re.sub(r"\.\d+\.", ".{b}.", name.removesuffix(".weight"))
    modules = TABLE[named].modules if named in TABLE else ()
    found = {bool(module.add) for module in modules if listed in module.stored}
    return tuple(found) or (False, True)


def _flipped(subject: Subject, name: str) -> int:
    """How many weights of a norm have the other sign."""
    assert subject.source is not None
    new = subject.artifact.checkpoint.float32(subject.entries[name].stored[0])
    return int((new * subject.source.float32(name) < 0).sum())


def _is_zero(subject: Subject, name: str) -> bool:
    """Whether a vector of floats has nothing but zeros."""
    entry = subject.entries[name]
    if entry.dtype not in FLOAT_DTYPES:
        return False
    return not subject.artifact.checkpoint.float32(entry.stored[0]).any()
