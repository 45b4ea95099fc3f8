"""Nothing missing, nothing extra: the tensors against those of the source."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.lost import reason as dropped_as
from qtool.checkpoints.decoder_names import is_alone, of_tower
from qtool.checkpoints.gguf_models import is_gguf
from qtool.checkpoints.roles import is_rotation
from qtool.checkpoints.structure import text_config
from qtool.formats.layer_names import experts_of, is_head, number_of
from qtool.formats.safetensors_header import TensorInfo
from qtool.gguf.open import open_source
from qtool.gguf_types import FLOATS
from qtool.messages.sentences import AGAIN, some
from qtool.messages.sentences import count as counted
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject
from qtool.verification.tensor_names import BUFFERS, MTP_SETTINGS, of_attention, packed_part

_MOST_LOST = 0.5  # of the tensors


def check_quantized(against: Path) -> Iterator[Finding]:
    """That the source is quantized itself: errors against it may be its own."""
    if is_gguf(against):
        with closing(open_source(against)) as file:
            kinds = Counter(t.type.name for t in file.tensors if t.type not in FLOATS)
        how = ", ".join(kind for kind, _ in kinds.most_common(2))
    else:
        how = Artifact.open(against).found.format.removeprefix("dense")
    if how:
        yield Finding(
            "note", "against", "",
            f"{against} is itself quantized ({how}): unless the artifact was made of just that, "
            "give the original to --against",
        )  # fmt: skip


def check_against(subject: Subject) -> Iterator[Finding]:
    """Against the tensors of the source."""
    if subject.source is None:
        return
    source = subject.source.tensors
    stacks = _stacks(source)
    ahead = any(text_config(subject.config).get(key) for key in MTP_SETTINGS)
    lost = [
        name
        for name in source
        if name not in subject.present
        and not name.endswith(BUFFERS)
        and not is_head(name.removesuffix(".weight"))
        and not _unstacked(name, subject)
        and dropped_as(name) is None  # of a source that is quantized
    ]
    if is_alone(subject.config, subject.source.config) and (others := list(filter(of_tower, lost))):
        lost = [name for name in lost if not of_tower(name)]
        yield Finding(
            "note", "against", others[0],
            "the artifact is the source's decoder alone, without "
            f"{counted(len(others), 'tensor')} of the source's vision or audio: {some(others)}",
        )  # fmt: skip
    if len(lost) > _MOST_LOST * len(source):
        yield Finding(
            "error", "against", lost[0],
            f"{len(lost):,} of the {len(source):,} tensors of the source are not in the artifact: "
            f"{some(lost)}; it was made of another model",
        )  # fmt: skip
        lost = []
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name in lost:
        found = experts_of(name)
        mtp = "mtp" in name.lower() or (ahead and _beyond(name, subject))
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
        and not of_attention(name)
        and not is_rotation(name)
        and packed_part(name) is None
        and not any(name.startswith(stack) for stack in stacks)
    ]
    if extra:
        yield Finding(
            "warning", "against", extra[0],
            f"{counted(len(extra), 'tensor')} not in the source: {some(extra)}; "
            + _advice(extra),
        )  # fmt: skip
    others = [
        entry.name
        for entry in subject.entries.values()
        if entry.name in source
        and not isinstance(entry.scheme, str)  # not read: how it is shaped is not known
        and tuple(source[entry.name].shape) != entry.shape
    ]
    if others:
        first = others[0]
        yield Finding(
            "error", "against", first,
            f"{counted(len(others), 'tensor')} of other shapes than the source's: {first} is "
            f"{list(subject.entries[first].shape)}, there {list(source[first].shape)}"
            + (f"; also {some(others[1:])}" if len(others) > 1 else "")
            + "; they are different models",
        )  # fmt: skip


def _advice(extra: list[str]) -> str:
    """What to do about tensors that the source lacks."""
    if all(name.endswith(".bias") for name in extra):
        return (
            "engines add them where the architecture or config.json says that there are biases: "
            "unless whoever made the artifact says that they compensate for what was lost, "
            f"{AGAIN}"
        )
    return f"was the artifact made of another model? Remove them, or {AGAIN}"


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
    if "experts" not in name or experts_of(name) or name.endswith("bias"):
        return False
    layer = name[: name.index("experts") + 7]
    return f"{layer}.0." in subject.expert_starts


def _beyond(name: str, subject: Subject) -> bool:
    blocks = subject.blocks
    if blocks is None or not name.startswith(blocks.prefix + "."):
        return False
    number = number_of(name[len(blocks.prefix) + 1 :].split(".", 1)[0])
    return number is not None and number >= blocks.count
