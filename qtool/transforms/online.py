"""R3 and R4: rotations of which a part is done while the model runs (`qtool.streaming.online`).

    R4    the matrix that ends an MLP, W [out, in], becomes W H; its input is rotated
    R3    queries and keys of each head are rotated; no weight changes

Engines know the function by the name `hadamard`, Sylvester's of a power of two, so H is made of
blocks as large as the width has one. Which matrix ends an MLP is told by what it reads and writes:
no norm's output, and the stream; what belongs to attention is left as it is. The choice decides
what is gained only; that nothing is lost is proved, as for the rotations of weights alone.

Source: Ashkboos et al., QuaRot, 2024, section 4; Liu et al., SpinQuant, 2024, section 3.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch.nn.functional as F

from qtool.artifacts.cache_scales import attention_of
from qtool.calibrating.sites import BlockSites, Tracer
from qtool.errors import UnsupportedError
from qtool.formats.compressed_tensors_targets import targets_of
from qtool.recipe.rotate import RotateOptions
from qtool.streaming.online import Online, block_size
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.torch_calls import TorchCalls
from qtool.transforms.proof import prove
from qtool.transforms.residual import HANDS_ON, NotRotatableError
from qtool.transforms.rotated import Rotated
from qtool.transforms.rotations import PROBE, Rotations

_SMALLEST = 8  # of the blocks of H: smaller ones spread too little
_ATTENTION = re.compile(r"attn|attention")
_EXPERT = re.compile(r"\.experts\.")


class _Heads(TorchCalls):
    """Within, how wide queries and keys of each call of attention are."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: set[int] = set()

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            self.widths.add(query.shape[-1])
        return func(*args, **kwargs)


def add(
    view: Rotated, found: Rotations, options: RotateOptions, say: Callable[[str], None]
) -> Rotations:
    """The same with what can be rotated online; the view then shows it."""
    try:
        online, left_out = _search(view, found, options)
    except NotRotatableError as why:
        online, left_out = Online(), [f"nothing is rotated while the model runs: {why}"]
    for reason in left_out:
        say(f"note: {reason}")
    both = replace(found, online=online, left_out=(*found.left_out, *left_out))
    both.apply(view)
    return both


def _search(view: Rotated, found: Rotations, options: RotateOptions) -> tuple[Online, list[str]]:
    """Choose block by block, and prove."""
    original = Skeleton.open(view.original)
    vocabulary = int(original.model.get_input_embeddings().num_embeddings)
    tokens = np.random.default_rng(0).integers(0, vocabulary, PROBE, dtype=np.int64)
    stream = original.embed(tokens)
    if not stream.layout.plain:
        raise NotRotatableError(HANDS_ON)
    exact = Skeleton.open(view.as_float32())
    tracer = Tracer()
    online, reasons = Online(), dict[str, None]()
    named = _attentions(view, reasons) if options.r3 else frozenset[str]()
    for index in range(original.count):
        block = original.block(index)
        if options.r4:
            online.inputs.update(_inputs(block, tracer.sites(block, stream), reasons))
        if options.r3:
            online.heads.update(_heads(block, stream, named, reasons))
        replace(found, online=online).apply(view)
        prove(block, stream, found.r1, exact)
    _check_names(view, online, reasons)
    replace(found, online=online).apply(view)
    if options.r4 and not online.inputs and not reasons:
        reasons["no matrix was found that ends an MLP, and whose input could be rotated"] = None
    return online, [*reasons]


def _check_names(view: Rotated, online: Online, reasons: dict[str, None]) -> None:
    """Leave out what no config could name."""
    modules = [name.removesuffix(".weight") for name in view.tensors]
    for size in {*online.inputs.values()}:
        chosen = sorted(name for name, its in online.inputs.items() if its == size)
        if targets_of([name.removesuffix(".weight") for name in chosen], modules) is None:
            for name in chosen:
                del online.inputs[name]
            reasons[
                f"inputs of {chosen[0]} and its like are not rotated: other modules are called "
                "alike, and engines may know this part of the model by another prefix"
            ] = None


def _inputs(block: LoadedBlock, found: BlockSites, reasons: dict[str, None]) -> dict[str, int]:
    """Matrices whose inputs are to be rotated, with the size of H."""
    width = _stream_width(found)
    inner = {site.id: site for site in found.sites if site.producer is None}
    chosen: dict[str, int] = {}
    for call in found.linears:
        site = inner.get(call.site)
        if site is None or call.out_features != width or len(site.readers) != 1:
            continue
        name = site.readers[0].name
        if _ATTENTION.search(name.removeprefix(block.prefix)):
            continue
        if site.stacked or call.matrix.expert is not None or _EXPERT.search(name):
            reasons["inputs of experts are not rotated: engines have no such step there"] = None
            continue
        size = block_size(site.in_features)
        if size < _SMALLEST:
            reasons[
                f"inputs of width {site.in_features} are not rotated: a power of two of "
                f"{_SMALLEST} or more does not divide it"
            ] = None
            continue
        chosen[name] = size
    return chosen


def _stream_width(found: BlockSites) -> int:
    """What matrices that read a norm are wide."""
    return next((site.in_features for site in found.sites if site.producer is not None), 0)


def _attentions(view: Rotated, reasons: dict[str, None]) -> frozenset[str]:
    """Tensors that make keys, whose modules the config can name."""
    matrices = [n for n, t in view.tensors.items() if len(t.shape) == 2]
    try:
        return frozenset(attention_of(matrices, view.config, False))
    except UnsupportedError:
        reasons[
            "queries and keys are not rotated: the matrix that makes a head's keys is not known by "
            "its name (as with latent attention), so that transform_config cannot name its module"
        ] = None
        return frozenset()


def _heads(
    block: LoadedBlock, stream: Stream, named: frozenset[str], reasons: dict[str, None]
) -> dict[int, int]:
    """The block's number and the size of H of its heads; empty without attention."""
    if not named & block.weights.keys():
        return {}
    with _Heads() as seen:
        block.run(*stream.probe(block.index))
    if len(seen.widths) != 1:
        reasons["queries and keys are not rotated: attention of this model is not one call"] = None
        return {}
    size = block_size(seen.widths.pop())
    if size < _SMALLEST:
        reasons[
            f"queries and keys are not rotated: a power of two of {_SMALLEST} or more does not "
            "divide the width of a head"
        ] = None
        return {}
    return {block.index: size}
