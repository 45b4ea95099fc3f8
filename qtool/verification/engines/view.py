"""A model as engines load it: its linear layers, how each is stored, and the configs.

From names, shapes and configs alone, of an artifact that exists or of a plan of one: every rule
of every engine reads this view.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtool.artifacts.artifact import Artifact
from qtool.artifacts.entry import Entry
from qtool.artifacts.stored_config import quantization_config
from qtool.checkpoints.roles import OUTSIDE, roles_of
from qtool.checkpoints.structure import (
    AHEAD,
    BlockStack,
    expert_of,
    find_blocks,
    fused_key,
    text_config,
)
from qtool.errors import QtoolError, SourceError
from qtool.formats import auto_round, mxfp4
from qtool.formats.layer_names import is_head, is_table
from qtool.formats.safetensors_header import TensorInfo
from qtool.planned import Planned
from qtool.scheme import Dropped, Scheme
from qtool.verification.engines.targets import weight_arguments
from qtool.verification.finding import About, Finding, Severity
from qtool.verification.subject import subject_of

# Linear layers whose input is split between ranks; the output of all others is.
_ROW_PARALLEL = {
    "o_proj", "down_proj", "out_proj", "w2", "wo", "dense", "dense_4h_to_h", "fc2", "c_proj",
}  # fmt: skip
# Those between which zeros can be put in: the inner width of an MLP, not that of attention heads.
_INNER = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "fc1", "fc2", "gate_up_proj"}
# Those that every rank holds whole.
_REPLICATED = {"q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate", "router", "gate"}
# Of the first, those that end an MLP.
_LAST = {"down_proj", "w2", "dense_4h_to_h", "fc2", "c_proj"}
_ATTENTION = re.compile(r"attn|attention")
_SHOWN = 3
_BESIDE = "beside"


def ends_mlp(module: str) -> bool:
    """Whether a linear layer ends an MLP, by its name."""
    before, _, last = module.rpartition(".")
    return last in _LAST and not _ATTENTION.search(before)


@dataclass(frozen=True)
class Stored:
    """How a quantized matrix is stored."""

    kind: str  # int or float, or the name of a format whose inside is not looked at
    bits: int
    group_size: int  # input features that share a scale; -1: all of a row, or a block of rows
    symmetric: bool
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Layer:
    """A linear layer [out_features, in_features]."""

    module: str
    out_features: int
    in_features: int
    stored: Stored | None  # None: dense
    role: str = "linear"  # or router, head, beside

    @property
    def last(self) -> str:
        """The last part of its name."""
        return self.module.rpartition(".")[2]

    @property
    def expert(self) -> bool:
        """Whether it is a part of one expert."""
        return expert_of(self.module + ".weight") is not None

    @property
    def input_split(self) -> bool:
        """Whether tensor parallelism splits its input, and not its output."""
        return self.last in _ROW_PARALLEL

    @property
    def paddable(self) -> bool:
        """Whether the width that is split can be padded with zeros before quantizing."""
        return self.last in _INNER

    @property
    def whole(self) -> bool:
        """Whether tensor parallelism leaves it whole, or pads it as it does a head."""
        return self.role != "linear" or self.last in _REPLICATED


@dataclass(frozen=True)
class EngineView:
    """What the rules look at."""

    format: str  # awq, gptq, compressed-tensors, fp8, auto-round, dense, ...
    layout: str
    config: Mapping[str, Any]  # config.json
    quantization: Mapping[str, Any]  # its quantization_config
    layers: tuple[Layer, ...]
    names: frozenset[str]  # of all stored tensors
    model_dtype: str  # of most dense tensors: BF16, F16, F32
    # Dense linear layers beside the decoder: of towers, projectors. A plan's are all on its list.
    beside: tuple[Layer, ...] = ()

    @property
    def quantized(self) -> tuple[Layer, ...]:
        """The layers that have codes."""
        return tuple(layer for layer in self.layers if layer.stored is not None)

    def number(self, *keys: str) -> int | None:
        """A positive integer of the language model's config."""
        text = text_config(self.config)
        found = (text.get(key) for key in keys)
        return next((n for n in found if type(n) is int and n > 0), None)


def view_of(artifact: Artifact) -> EngineView:
    """The view of an artifact; what in it cannot be read is left out."""
    try:
        entries = artifact.entries
    except QtoolError:
        entries = subject_of(artifact.checkpoint.path, artifact, None).entries
    quantization = quantization_config(artifact.checkpoint)
    roles = _roles({name: _info(entry) for name, entry in entries.items()}, artifact)
    layers = []
    for name, entry in entries.items():
        if len(entry.shape) != 2 or not name.endswith(".weight"):
            continue
        what = "linear" if entry.scheme is not None else roles.get(name)
        if entry.scheme is not None and roles.get(name) == "head":
            what = "head"
        if what is not None:
            stored = None
            if entry.scheme is not None:
                stored = _stored(artifact.found.format, quantization, entry.module, entry.scheme)
            layers.append(Layer(entry.module, entry.shape[0], entry.shape[1], stored, what))
    dtypes = Counter(e.dtype for e in entries.values() if e.scheme is None)
    own = artifact.found.quant_method == auto_round.NAME  # engines load it by rules of its own
    return EngineView(
        auto_round.NAME if own else artifact.found.format,
        artifact.found.layout,
        artifact.checkpoint.config,
        quantization,
        tuple(layer for layer in layers if layer.role != _BESIDE),
        frozenset(artifact.checkpoint.tensors),
        dtypes.most_common(1)[0][0] if dtypes else "",
        tuple(layer for layer in layers if layer.role == _BESIDE),
    )


def planned_layers(
    format_: str, tensors: Sequence[Planned], quantization: Mapping[str, Any]
) -> tuple[Layer, ...]:
    """The layers of what a plan will write."""
    layers = []
    for tensor in tensors:
        if len(tensor.shape) != 2 or not tensor.name.endswith(".weight"):
            continue
        reason = tensor.reason or ""
        head = is_head(tensor.module)
        if isinstance(tensor.action, Dropped) or (tensor.block is None and not head):
            continue
        if reason.startswith(("norm", "embedding", "buffer")):
            continue
        stored = None
        if tensor.scheme is not None:
            stored = _stored(format_, quantization, tensor.module, tensor.scheme)
        what = "head" if head else "router" if reason.startswith("router") else "linear"
        layers.append(Layer(tensor.module, *tensor.shape, stored, what))
    return tuple(layers)


def view_of_plan(
    format_: str,
    layout: str,
    tensors: Sequence[Planned],
    config: Mapping[str, Any],
    quantization: Mapping[str, Any],
) -> EngineView:
    """The view of what a plan will write."""
    dtypes = Counter(tensor.dtype for tensor in tensors)
    layers = planned_layers(format_, tensors, quantization)
    names = {spec.name for tensor in tensors for spec in tensor.outputs}
    if format_ == mxfp4.NAME:  # experts lie in one tensor, of which nothing is known to be refused
        layers = tuple(layer for layer in layers if not layer.expert)
        stacks = ((name, mxfp4.stack_of(name)) for name in names)
        names = {name if stack is None else stack[0] for name, stack in stacks}
    return EngineView(
        format_,
        layout,
        config,
        quantization,
        layers,
        frozenset(names),
        dtypes.most_common(1)[0][0] if dtypes else "",
    )


def _info(entry: Entry) -> TensorInfo:
    return TensorInfo(entry.name, "F16" if entry.scheme else entry.dtype, entry.shape, 0, 0)


def _roles(infos: Mapping[str, TensorInfo], artifact: Artifact) -> dict[str, str]:
    """linear, router, head or beside (the decoder), by name; other tensors are not there."""
    try:
        blocks = find_blocks(infos, artifact.checkpoint.config)
    except SourceError:
        blocks = BlockStack("", 0)
    found = {}
    for name, what in roles_of(infos, blocks).items():
        if what.reason is None:
            found[name] = "linear"
        elif what.reason.startswith("router"):
            found[name] = "router"
        elif what.reason == "output head":
            found[name] = "head"
        elif (
            what.reason == OUTSIDE
            and not AHEAD.search(name)
            and not is_table(name.removesuffix(".weight"))
        ):
            found[name] = _BESIDE
    return found


def _stored(
    format_: str, quantization: Mapping[str, Any], module: str, scheme: Scheme | str
) -> Stored:
    if isinstance(scheme, Scheme):
        kind = "float" if scheme.is_float else "int"
        size = scheme.group_size if scheme.rows == 1 else -1
        return Stored(kind, scheme.bits, size, scheme.symmetric, str(scheme))
    arguments = weight_arguments(quantization, module)
    bits, given = arguments.get("num_bits"), arguments.get("group_size")
    if type(bits) is not int:
        return Stored(format_, 0, -1, True, scheme)
    kind = "float" if arguments.get("type") == "float" else "int"
    size = given if type(given) is int and given > 0 else -1
    symmetric = arguments.get("symmetric") is not False
    return Stored(kind, bits, size, symmetric, str(Scheme(bits, size, symmetric)))


def fused_layers(layers: Iterable[Layer]) -> dict[str, list[Layer]]:
    """The linear layers that engines make one of: q/k/v, gate/up, the experts of a block."""
    groups: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        if layer.role == "linear":
            groups[fused_key(layer.module)].append(layer)
    return groups


def mixed_parts(layers: Iterable[Layer]) -> list[dict[str, str]]:
    """Of each layer that engines fuse of parts stored differently: the ways, each with a part."""
    found = []
    for parts in fused_layers(layers).values():
        ways: dict[str, str] = {}
        for layer in parts:
            ways.setdefault("dense" if layer.stored is None else str(layer.stored), layer.module)
        if len(ways) > 1:
            found.append(ways)
    return found


def alike(
    severity: Severity,
    check: str,
    layers: Iterable[Layer],
    why: Callable[[Layer], str | None],
    opening: str,
    lists: frozenset[str] | None = None,
) -> Iterator[Finding]:
    """A finding for each reason that `why` gives, with the layers that it is given for.

    opening: the sentence up to the reason, with {} for the layers. lists: the settings that decide
    about them, where it is told what lists say.
    """
    reasons: dict[str, list[Layer]] = defaultdict(list)
    for layer in layers:
        if (reason := why(layer)) is not None:
            reasons[reason].append(layer)
    for reason, same in reasons.items():
        first = same[0].module
        more = f" and {len(same) - 1} more" if len(same) > 1 else ""
        modules = frozenset(layer.module for layer in same)
        about = About() if lists is None else About(lists, modules)
        yield Finding(severity, check, first, f"{opening.format(first + more)}: {reason}", about)


def some(names: Sequence[str]) -> str:
    """A few names of many."""
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
