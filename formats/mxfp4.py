"""gpt-oss's own format: experts in MXFP4, as formats/mxfp4_experts.py describes them, all else as
it is.

    ...experts.E.gate_up_proj.blocks   uint8 [out, groups, 16]   one expert's part of
    ...experts.E.gate_up_proj.scales   uint8 [out, groups]       gate_up_proj_blocks and _scales

Gate and up stay one matrix, whose rows take turns, as the class has them. An expert is a part of
its stack's bytes, so that it is read and written alone.

config: quant_method mxfp4, modules_to_not_convert.

Source: transformers, integrations/mxfp4.py; the config.json of openai/gpt-oss-20b.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from qtool.errors import FormatError
from qtool.formats import stored_codes
from qtool.formats.facts import (
    ArtifactScheme,
    Facts,
    Look,
    Options,
    check_shape,
    find,
    first,
    names_of,
)
from qtool.formats.mxfp4_experts import BLOCKS, GROUP, SCALES
from qtool.formats.mxfp4_experts import stack_of as stored_stack
from qtool.formats.safetensors_header import TensorInfo, TensorSpec
from qtool.scheme import GroupQuant, Scheme

if TYPE_CHECKING:
    from numpy.typing import NDArray

NAME = "mxfp4"
MODEL = "gpt_oss"  # whose classes alone engines have it for
CODES = ("blocks",)
SCHEME = Scheme(4, GROUP, True, "e8m0", "e2m1")
# As released. Engines look for experts alone, and take no heed of the others.
_DENSE = ("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
_APART = re.compile(r"(.+\.experts)\.(\d{1,6})\.(gate_up_proj|down_proj)\.(blocks|scales)")


def stack_of(name: str) -> tuple[str, int] | None:
    """The stack that an expert's tensor is stored in, and the expert; None of no expert."""
    found = _APART.fullmatch(name)
    return None if found is None else (f"{found[1]}.{found[3]}_{found[4]}", int(found[2]))


def apart(tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[str, TensorInfo]]:
    """Each tensor with the name of what it is stored in: stacks as two tensors an expert.

    FormatError where a stack is damaged, or something of it is there otherwise, too.
    """
    stacks: dict[str, tuple[str, int, str]] = {}
    for name in tensors:
        if stack_of(name) is not None:
            raise FormatError(f"{name}: no engine has a tensor for each expert")
        if (stack := stored_stack(name, tensors)) is None:
            continue
        stem, (experts, _, _) = stack
        layer, _, kind = stem.rpartition(".")
        if twice := [one for one in (stem, f"{layer}.0.{kind}.weight") if one in tensors]:
            raise FormatError(f"{name} and {twice[0]} are two copies of the same")
        stacks |= {stem + end: (stem, experts, end) for end in (BLOCKS, SCALES)}
    out: dict[str, tuple[str, TensorInfo]] = {}
    for name, info in tensors.items():
        if name not in stacks:
            out[name] = name, info
            continue
        stem, experts, end = stacks[name]
        layer, _, kind = stem.rpartition(".")
        size = info.nbytes // experts
        for expert in range(experts):
            part = f"{layer}.{expert}.{kind}.{end[1:]}"
            start = info.start + expert * size
            out[part] = name, TensorInfo(part, info.dtype, info.shape[1:], start, start + size)
    return out


def detect(config: Mapping[str, Any]) -> ArtifactScheme | None:
    """The scheme that a quantization_config tells, or None."""
    if str(config.get("quant_method") or "").lower() != NAME:
        return None
    dense = names_of(first(config, "modules_to_not_convert", "ignored_layers", "ignore"))
    return ArtifactScheme(NAME, NAME, SCHEME, "", dense)


def scheme_in(module: str, look: Look, found: ArtifactScheme) -> tuple[Scheme, tuple[int, int]]:
    """The scheme and shape [out, in] of an expert's matrix; FormatError where shapes disagree."""
    blocks = find(look, f"{module}.blocks", 3)
    rows, groups, _ = blocks.shape
    scales = find(look, f"{module}.scales")
    check_shape(f"{module}.blocks", blocks.shape, (rows, groups, GROUP // 2))
    check_shape(f"{module}.scales", scales.shape, (rows, groups))
    return SCHEME, (rows, groups * GROUP)


def unpack(module: str, get: Callable[[str], NDArray[Any]], found: ArtifactScheme) -> GroupQuant:
    """Read one matrix; `get` gives a stored tensor by name, KeyError where there is none."""
    from qtool.float_codes import unpack_nibbles

    scheme, shape = scheme_in(module, stored_codes.looking(get), found)
    codes = unpack_nibbles(get(f"{module}.blocks").reshape(shape[0], shape[1] // 2))
    scale = stored_codes.scale_grid(get(f"{module}.scales"), scheme, shape)
    return GroupQuant(scheme, codes, scale, stored_codes.middle_zeros(scheme, shape))


def choose(schemes: Iterable[Scheme], layout: str | None = None) -> Options:
    """There is one layout."""
    return Options("")


def supports(scheme: Scheme, shape: tuple[int, ...], options: Options) -> str | None:
    """Why a matrix [out, in] cannot be stored, or None."""
    if scheme != SCHEME:
        return f"format mxfp4 stores {SCHEME}, not {scheme}"
    if shape[1] % GROUP:
        return f"in_features {shape[1]} is not divisible by the group size {GROUP}"
    return None


def supports_together(schemes: Iterable[Scheme]) -> str | None:
    """There is one scheme."""
    return None


def specs(
    module: str, scheme: Scheme, shape: tuple[int, ...], options: Options
) -> list[TensorSpec]:
    """The parts of stacks that store an expert's matrix [out, in]."""
    rows, columns = shape
    return [
        TensorSpec(f"{module}.blocks", "U8", (rows, columns // GROUP, GROUP // 2)),
        TensorSpec(f"{module}.scales", "U8", (rows, columns // GROUP)),
    ]


def pack(module: str, quant: GroupQuant, options: Options) -> dict[str, NDArray[Any]]:
    """The stored tensors of one matrix; FormatError where it cannot be stored exactly."""
    from qtool.float_codes import pack_nibbles

    reason = supports(quant.scheme, quant.shape, options)
    if reason:
        raise FormatError(f"{module}: {reason}")
    rows, columns = quant.shape
    blocks = pack_nibbles(quant.codes).reshape(rows, columns // GROUP, GROUP // 2)
    return {
        f"{module}.blocks": blocks,
        f"{module}.scales": stored_codes.stored_scale(module, quant),
    }


def config(facts: Facts, options: Options) -> dict[str, Any]:
    """quantization_config of config.json."""
    return {"quant_method": NAME, "modules_to_not_convert": [*_DENSE]}


def side_files(facts: Facts, options: Options) -> dict[str, dict[str, Any]]:
    """No further files."""
    return {}
