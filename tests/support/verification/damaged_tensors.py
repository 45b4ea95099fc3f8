"""Tensors of a folder damaged at random, each in one way; see random_damage."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from support.gallery import raw
from support.gallery.raw import Raw

PAGE = 4096
_SCALES = (
    "scales", "weight_scale", "weight_scale_inv", "SCB", "s1_scales", "weight_global_scale",
)  # fmt: skip
_CODES = ("qweight", "weight_packed")
_FLOATS = ("F32", "F16", "BF16")

Draw = Callable[[random.Random, Path], str | None]  # what was damaged; None: nothing to damage


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def left_out(rng: random.Random, path: Path) -> str | None:
    with raw.edited(path) as tensors:
        name = rng.choice(sorted(tensors))
        del tensors[name]
    return name


def doubled(rng: random.Random, path: Path) -> str | None:
    with raw.edited(path) as tensors:
        name = rng.choice(sorted(tensors))
        other = rng.choice([f"{name}_copy", f"copy.{name}", name.replace("layers.0", "layers.9")])
        if other == name:
            return None
        tensors[other] = tensors[name]
    return name


def renamed(rng: random.Random, path: Path) -> str | None:
    with raw.edited(path) as tensors:
        name = rng.choice(sorted(tensors))
        tensors[f"{name}_old"] = tensors.pop(name)
    return name


def _pairs(tensors: dict[str, Raw]) -> list[tuple[str, str]]:
    found = []
    names = sorted(tensors)
    for n, one in enumerate(names):
        for other in names[n + 1 :]:
            a, b = tensors[one], tensors[other]
            if (a.dtype, a.shape) == (b.dtype, b.shape) and a.data != b.data:
                found.append((one, other))
    return found


def swapped(rng: random.Random, path: Path, *, both: bool = True) -> str | None:
    """Two stored tensors of one shape."""
    with raw.edited(path) as tensors:
        found = _pairs(tensors)
        if not found:
            return None
        one, other = rng.choice(found)
        a, b = tensors[one], tensors[other]
        tensors[one] = Raw(a.dtype, a.shape, b.data, a.file)
        if both:
            tensors[other] = Raw(b.dtype, b.shape, a.data, b.file)
    return one


def copied(rng: random.Random, path: Path) -> str | None:
    """One of them over the other."""
    return swapped(rng, path, both=False)


def _modules(tensors: dict[str, Raw]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name in sorted(tensors):
        found.setdefault(name.rpartition(".")[0], []).append(name)
    return found


def modules_swapped(rng: random.Random, path: Path) -> str | None:
    """Two modules of the same shapes, with all that belongs to them: another layer's."""
    return _modules_exchanged(rng, path, both=True)


def module_copied(rng: random.Random, path: Path) -> str | None:
    """One module over another of the same shapes: an expert twice."""
    return _modules_exchanged(rng, path, both=False)


def _modules_exchanged(rng: random.Random, path: Path, both: bool) -> str | None:
    with raw.edited(path) as tensors:
        kinds: dict[Any, list[str]] = {}
        for module, names in _modules(tensors).items():
            key = tuple((_last(n), tensors[n].dtype, tensors[n].shape) for n in names)
            kinds.setdefault(key, []).append(module)
        many = [modules for modules in kinds.values() if len(modules) > 1]
        if not many:
            return None
        one, other = rng.sample(rng.choice(many), 2)
        for name in _modules(tensors)[one]:
            there = f"{other}.{_last(name)}"
            a, b = tensors[name], tensors[there]
            tensors[name] = Raw(a.dtype, a.shape, b.data, a.file)
            if both:
                tensors[there] = Raw(b.dtype, b.shape, a.data, b.file)
    return one


def transposed(rng: random.Random, path: Path) -> str | None:
    with raw.edited(path) as tensors:
        name = rng.choice(sorted(n for n, t in tensors.items() if len(t.shape) == 2))
        tensors[name] = tensors[name].changed(tensors[name].array.T)
    return name


def relabelled(rng: random.Random, path: Path) -> str | None:
    """The same bytes under another dtype of as many."""
    alike = {"F16": "BF16", "BF16": "F16", "F32": "I32", "I32": "F32", "I8": "U8", "U8": "I8",
             "F8_E4M3": "F8_E5M2", "I16": "F16"}  # fmt: skip
    with raw.edited(path) as tensors:
        name = rng.choice(sorted(n for n, t in tensors.items() if t.dtype in alike))
        t = tensors[name]
        tensors[name] = Raw(alike[t.dtype], t.shape, t.data, t.file)
    return name


def scaled(rng: random.Random, path: Path) -> str | None:
    """Scales of a matrix times 2 or 1/2."""
    with raw.edited(path) as tensors:
        names = sorted(n for n, t in tensors.items() if _last(n) in _SCALES and t.dtype in _FLOATS)
        if not names:
            return None
        name = rng.choice(names)
        _times(tensors, name, rng.choice([2.0, 0.5]))
    return name


def _times(tensors: dict[str, Raw], name: str, factor: float) -> None:
    t = tensors[name]
    if t.dtype == "BF16":
        words = t.array.astype(np.uint32) << 16
        values = (words.view(np.float32) * np.float32(factor)).view(np.uint32) >> 16
        tensors[name] = t.changed(values.astype("<u2"))
    else:
        tensors[name] = t.changed((t.array * factor).astype(t.array.dtype))


def groups_permuted(rng: random.Random, path: Path) -> str | None:
    """The scales of a matrix, by group or by row."""
    with raw.edited(path) as tensors:
        names = sorted(
            n for n, t in tensors.items() if _last(n) in _SCALES and max(t.shape, default=0) > 1
        )
        if not names:
            return None
        name = rng.choice(names)
        t = tensors[name]
        axis = rng.choice([n for n, size in enumerate(t.shape) if size > 1])
        tensors[name] = t.changed(np.roll(t.array, 1, axis=axis))
    return name


def zeros_off(rng: random.Random, path: Path) -> str | None:
    """Every zero of a matrix one more or less."""
    with raw.edited(path) as tensors:
        names = sorted(n for n, t in tensors.items() if n.endswith("qzeros") and t.dtype == "I32")
        if not names:
            return None
        name, by = rng.choice(names), rng.choice([1, 15])
        shifts = np.arange(0, 32, 4, dtype=np.uint32)
        fields = (tensors[name].array.astype("<u4")[..., None] >> shifts) & 15
        words = np.bitwise_or.reduce(((fields + by) & 15).astype(np.uint32) << shifts, axis=-1)
        tensors[name] = tensors[name].changed(words.astype("<u4").view("<i4"))
    return name


def order_lost(rng: random.Random, path: Path) -> str | None:
    """g_idx put back to k // group_size, or shuffled."""
    with raw.edited(path) as tensors:
        names = sorted(n for n in tensors if n.endswith("g_idx"))
        if not names:
            return None
        name = rng.choice(names)
        index = tensors[name].array.copy()
        shuffled = np.random.default_rng(1).permutation(index)
        changed = np.sort(index) if rng.random() < 0.5 else shuffled
        if (changed == index).all():
            return None
        tensors[name] = tensors[name].changed(changed)
    return name


def nibbles_reversed(rng: random.Random, path: Path) -> str | None:
    """Packed words whose fields of four bits stand in another order."""
    with raw.edited(path) as tensors:
        names = sorted(n for n in tensors if _last(n) in _CODES)
        if not names:
            return None
        name = rng.choice(names)
        data = np.frombuffer(tensors[name].data, np.uint8)
        t = tensors[name]
        tensors[name] = Raw(t.dtype, t.shape, ((data >> 4) | (data << 4)).tobytes(), t.file)
    return name


def dequantized(rng: random.Random, path: Path) -> str | None:
    """A matrix stored dense among quantized ones, its weights as they were."""
    from qtool.artifacts.artifact import Artifact

    artifact = Artifact.open(path)
    packed = [e for e in artifact.entries.values() if e.scheme is not None]
    if not packed:
        return None
    entry = rng.choice(packed)
    values = artifact.read(entry.name)
    dense = values.dequantize() if hasattr(values, "dequantize") else values
    with raw.edited(path) as tensors:
        file = tensors[entry.stored[0]].file
        for name in entry.stored:
            tensors.pop(name, None)
        data = np.asarray(dense, "<f2").tobytes()
        tensors[entry.name] = Raw("F16", entry.shape, data, file)
    return entry.module


def head_differs(rng: random.Random, path: Path) -> str | None:
    """A head with weights of its own."""
    with raw.edited(path) as tensors:
        name = next((n for n in tensors if n.endswith(("embed_tokens.weight", "wte.weight"))), None)
        if name is None or tensors[name].dtype not in _FLOATS:
            return None
        t = tensors[name]
        head = Raw(t.dtype, t.shape, t.data, t.file)
        tensors["lm_head.weight"] = head.changed(np.roll(head.array, 1, axis=0))
    return "lm_head.weight"


def page_within(rng: random.Random, path: Path) -> str | None:
    """Two aligned pages of one tensor exchanged."""
    with raw.edited(path) as tensors:
        names = sorted(n for n, t in tensors.items() if len(t.data) >= 2 * PAGE)
        if not names:
            return None
        name = rng.choice(names)
        content = bytearray(tensors[name].data)
        one, two = rng.sample(range(len(content) // PAGE), 2)
        a, b = (slice(n * PAGE, (n + 1) * PAGE) for n in (one, two))
        content[a], content[b] = content[b], content[a]
        t = tensors[name]
        tensors[name] = Raw(t.dtype, t.shape, bytes(content), t.file)
    return name


TENSORS: tuple[Draw, ...] = (
    left_out, doubled, renamed, swapped, copied, modules_swapped, module_copied, transposed,
    relabelled, scaled, groups_permuted, zeros_off, order_lost, nibbles_reversed, dequantized,
    head_differs, page_within,
)  # fmt: skip
