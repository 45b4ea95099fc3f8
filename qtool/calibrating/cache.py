"""The largest keys and values that attention keeps, as it keeps them: after rotary embedding.

Seen where attention is computed by one call (torch's scaled_dot_product_attention), on the block
as it will run, its matrices quantized. Heads that were repeated for grouped queries are one head.
The largest of micro-batches is the same in any order, so no thread waits for another.

    scale = max|x| / reach      448 for float8, 127 for 8 bits, 7.5 for 4, rounded up to bfloat16
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from qtool.artifacts.cache_scales import Kept, unmeasurable
from qtool.errors import SourceError, UnsupportedError
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.torch_calls import TorchCalls
from qtool.streaming.workers import Workers

REACH = {("float", 8): 448.0, ("int", 8): 127.0, ("int", 4): 7.5}


@dataclass(frozen=True)
class Largest:
    """max|x| of each head, [heads] float32."""

    keys: torch.Tensor
    values: torch.Tensor


class _Observe(TorchCalls):
    """Within, keys and values of each call of attention are looked at; in the thread that enters
    it."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.found: list[Largest] = []

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            key, value = _keys_and_values(*args, **kwargs)
            self.found.append(Largest(self._largest(key), self._largest(value)))
        return func(*args, **kwargs)

    def _largest(self, x: torch.Tensor) -> torch.Tensor:
        """[samples, heads (or repeated ones), length, width] -> [heads]"""
        there = x.shape[-3]
        if there % self._heads:
            raise UnsupportedError(
                f"attention has {there} heads of keys, where config.json says {self._heads}; the "
                "scales of this KV cache cannot be told"
            )
        tops = (
            x.detach().abs().amax((0, -2, -1)) if x.ndim == 4 else x.detach().abs().amax((-2, -1))
        )
        return tops.reshape(self._heads, -1).amax(1)


def _keys_and_values(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the arguments of scaled_dot_product_attention."""
    return key, value


def advance_and_measure(
    block: LoadedBlock, stream: Stream, kept: Kept, workers: Workers, *, advance: bool
) -> Largest:
    """Run the block over the stream and measure what attention keeps; it comes to the host.

    advance: leave its outputs in the stream. UnsupportedError where attention is not one call.
    """

    def step(number: int) -> Largest:
        with torch.no_grad(), _Observe(kept.heads) as seen:
            output = block.passed(stream.hidden[number], stream.calls[block.index][number])
        if advance:
            stream.hidden[number] = output
        if not seen.found:
            raise unmeasurable(kept.attention)
        return _most(seen.found)

    largest = _most(workers.map(step, range(len(stream.hidden))))
    return Largest(largest.keys.cpu(), largest.values.cpu())


def _most(found: Sequence[Largest]) -> Largest:
    return Largest(
        torch.stack([one.keys for one in found]).amax(0),
        torch.stack([one.values for one in found]).amax(0),
    )


def scales(found: Largest, kept: Kept, reach: float) -> dict[str, NDArray[np.float32]]:
    """The tensors k_scale and v_scale by their names; SourceError where they are not finite."""
    made = {}
    for which, largest in (("k", found.keys), ("v", found.values)):
        tops = largest if kept.each else largest.amax(0, keepdim=True)
        if not bool(torch.isfinite(tops).all()):
            raise SourceError(
                f"{kept.attention}: what it keeps is not finite on the calibration text; the model "
                "is broken, or overflows in float32"
            )
        stored = [rounded_up(float(top) / reach) for top in tops]
        made[f"{kept.attention}.{which}_scale"] = np.array(stored, np.float32).reshape(kept.shape)
    return made


def rounded_up(scale: float) -> float:
    """To bfloat16, in which some engines keep scales: the largest stays in range. 1 for 0."""
    word = np.array([scale], np.float32).view(np.uint32) + np.uint32(0xFFFF)
    found = float((word & np.uint32(0xFFFF0000)).view(np.float32)[0])
    return found if found > 0 else 1.0
