"""Layers that engines fuse when they load: their parts are stored alike, and share what is merged.

vLLM and SGLang make one layer of q, k and v, one of gate and up, and one of all experts, and refuse
parts of different schemes. Of NVFP4's second scales, of weights and of inputs, they take one for
all parts, whatever the others say.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping

from qtool.checkpoints.structure import fused_key
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

_MERGED = ("weight_global_scale", "weight_scale_2", "input_global_scale")


def check_fused(subject: Subject) -> Iterator[Finding]:
    """fused: parts of one scheme. Engines that load MLX fuse none."""
    if subject.artifact.found.format == "mlx":
        return
    groups: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for entry in subject.linears:
        stored = "unquantized" if entry.scheme is None else str(entry.scheme)
        groups[fused_key(entry.module)][stored].append(entry.module)
    mixed = {key: kinds for key, kinds in groups.items() if len(kinds) > 1}
    if mixed:
        key, kinds = next(iter(mixed.items()))
        example = "; ".join(f"{some(names)}: {stored}" for stored, names in kinds.items())
        yield Finding(
            "error", "fused", key,
            f"{counted(len(mixed), 'layer')} that vLLM and SGLang fuse have parts stored "
            f"differently ({example}), which they refuse to load; give the parts one scheme",
        )  # fmt: skip


def check_merged(subject: Subject) -> Iterator[Finding]:
    """global-scales: parts of a fused layer have one second scale."""
    tensors = subject.artifact.checkpoint.tensors
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for name, info in tensors.items():
        module, _, last = name.rpartition(".")
        if last in _MERGED and info.size == 1 and info.dtype in ("F32", "F16", "BF16"):
            value = float(subject.artifact.checkpoint.float32(name).reshape(-1)[0])
            key = _pair(module)
            if key is not None:
                groups[f"{key}.{last}"][module] = value
    wrong = {key: parts for key, parts in groups.items() if len(set(parts.values())) > 1}
    if wrong:
        parts: Mapping[str, float] = next(iter(wrong.values()))
        example = ", ".join(f"{module} {value:.6g}" for module, value in parts.items())
        yield Finding(
            "error", "global-scales", next(iter(parts)),
            f"{counted(len(wrong), 'layer')} that engines fuse have parts with different global "
            f"scales ({example}); engines take one of them for all: quantize the parts with one",
        )  # fmt: skip


def _pair(module: str) -> str | None:
    """The fused layer within one expert or block; None for a layer that is not fused."""
    parent, _, last = module.rpartition(".")
    for parts in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3")):
        if last in parts:
            return f"{parent}.{'+'.join(parts)}"
    return None
