"""Scales of a quantized key/value cache: all there where the config promises them, and sane."""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from qtool.artifacts.cache_scales import key_heads
from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.structure import OTHER_TOWERS
from qtool.messages.sentences import count as counted
from qtool.messages.sentences import some, verb
from qtool.verification.finding import Finding
from qtool.verification.subject import Subject

CHECK = "kv-scales"
_ATTENTION = re.compile(r"(.*\.(?:self_attn|attention|attn|mixer))\.[kv]_proj\.")
_SCALE = re.compile(r"(.*\.(?:self_attn|attention|attn|mixer))\.(?:(k|v)_proj\.)?(k|v)_scale")
_ODD = re.compile(r".*\.(?:[kv]_proj\.(?:output_scale|kv_scale)|[kv]_cache_scale|[kv]_scales)")


def check_kv_scales(subject: Subject) -> Iterator[Finding]:
    """kv-scales: k_scale and v_scale in every attention layer."""
    tensors = subject.artifact.checkpoint.tensors
    config = quantization_config(subject.artifact.checkpoint)
    scheme = config.get("kv_cache_scheme")
    if isinstance(scheme, dict):
        promised = not scheme.get("dynamic")
    else:
        promised = bool(config.get("kv_cache_quant_algo"))
    there: dict[str, set[str]] = {}
    for name in tensors:
        if found := _SCALE.fullmatch(name):
            there.setdefault(found[1], set()).add(found[3])
    odd = [name for name in tensors if _ODD.fullmatch(name)]
    if odd:
        yield Finding(
            "warning", CHECK, odd[0],
            f"{counted(len(odd), 'scale')} of the cache under names that engines do not know: "
            f"{some(odd)}; they load ...self_attn.k_scale and ...self_attn.v_scale",
        )  # fmt: skip
    layers = {
        found[1]
        for name in subject.present
        if (found := _ATTENTION.match(name)) and not OTHER_TOWERS.search(name)
    }
    if promised and layers:
        lost = [f"{a}.{k}_scale" for a in sorted(layers) for k in "kv" if k not in there.get(a, ())]
        lost = [n for n in lost if n.rpartition(".")[0] + ".kv_scale" not in tensors]
        if lost:
            yield Finding(
                "error", CHECK, lost[0],
                f"the config promises {2 * len(layers)} stored scales of the cache, and "
                f"{len(lost)} of them {verb(len(lost), 'are', 'is')} missing: {some(lost)}; "
                "engines take 1.0 instead: "
                "calibrate the cache anew, or drop kv_cache_scheme",
            )  # fmt: skip
    for name, info in tensors.items():
        if _SCALE.fullmatch(name) and info.dtype in ("F32", "F16", "BF16"):
            values = subject.artifact.checkpoint.float32(name).reshape(-1)
            good = np.isfinite(values) & (values > 0)
            if not good.all():
                yield Finding(
                    "error", CHECK, name,
                    f"{name} is {float(values[np.argmin(good)])}; a scale must be finite and "
                    "positive: calibrate the cache anew",
                )  # fmt: skip
    if isinstance(scheme, dict) and scheme.get("dynamic") and there:
        yield Finding(
            "error", CHECK, "config.json",
            "kv_cache_scheme says dynamic, and scales of the cache are stored, which engines would "
            "not use; put back the config that the artifact was made with",
        )  # fmt: skip
    if isinstance(scheme, dict):
        yield from _number_of_scales(subject, scheme)
        if (why := _nobodys(scheme)) is not None:
            yield Finding(
                "error", CHECK, "config.json",
                f"kv_cache_scheme asks for {why}; put back the config that the artifact was made "
                "with",
            )  # fmt: skip


def _nobodys(scheme: Mapping[str, object]) -> str | None:
    """What no QuantizationArgs of keys and values are, with what they may be; None if all is well.

    Source: compressed-tensors' quant_args.py, where floats have 4 or 8 bits.
    """
    bits, kind = scheme.get("num_bits", 8), scheme.get("type", "int")
    said = f"{str(bits)[:20]}-bit {str(kind)[:20]}"
    if kind not in ("int", "float"):
        return f"{said}, expected int or float"
    widths = (4, 8) if kind == "float" else range(2, 9)
    if type(bits) is not int or bits not in widths:
        return f"{said}, expected {'4 or 8' if kind == 'float' else '2 to 8'} bits, an integer"
    return None


def _number_of_scales(subject: Subject, scheme: dict[str, object]) -> Iterator[Finding]:
    """One scale a layer, or one a head, as the config says."""
    each = scheme.get("strategy") == "attn_head"
    checkpoint = subject.artifact.checkpoint
    wanted = key_heads(checkpoint.config) if each else 1
    wrong = [
        (name, info.size)
        for name, info in checkpoint.tensors.items()
        if _SCALE.fullmatch(name) and wanted is not None and info.size != wanted
    ]
    if wrong:
        name, found = wrong[0]
        yield Finding(
            "error", CHECK, name,
            f"{name} has {counted(found, 'number')}, where kv_cache_scheme's strategy "
            f"{scheme.get('strategy') or 'tensor'} asks for {wanted} "
            f"({counted(len(wrong), 'such tensor')}); calibrate the cache anew",
        )  # fmt: skip
