"""What comes before the blocks: from gradients by it to those by the rows of tables.

Hidden states come of an embedding, and in some models so does what each block is given for itself
(Gemma's per-layer embeddings). The model's own code makes them, and torch backpropagates through
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.gradients.passing import Passing
from qtool.gradients.sensitivity import Sensitivity
from qtool.streaming.arguments import tensors_in
from qtool.streaming.skeleton import LookedUp, Skeleton


@dataclass(frozen=True)
class Before:
    """Of one text."""

    skeleton: Skeleton
    batches: tuple[NDArray[np.int64], ...]  # tokens of each micro-batch
    given: tuple[tuple[int, ...], ...]  # of tensors_in() each block's call, those that come of rows

    @classmethod
    def of(cls, skeleton: Skeleton, tokens: NDArray[np.int64], samples: Sequence[int]) -> "Before":
        """tokens [n, length], which have been embedded. samples: of each micro-batch."""
        ends = list(accumulate(samples))
        given: list[tuple[int, ...]] = []

        def see(_: int, looked: LookedUp) -> None:
            for call in looked.calls:
                tensors = enumerate(tensors_in(call))
                given.append(tuple(place for place, t in tensors if t.requires_grad))

        skeleton.looked_up([tokens[:1]], see)
        starts = [0, *ends[:-1]]
        batches = tuple(tokens[start:end] for start, end in zip(starts, ends, strict=True))
        return cls(skeleton, batches, tuple(given))

    def tables(
        self,
        gradients: Passing,
        given: Callable[[int, int], Sequence[torch.Tensor]],
    ) -> dict[str, Sensitivity]:
        """Of each table: by its columns the mean over tokens of squares of gradients by what is
        looked up, by its rows the chance that a token asks for them.

        gradients: by states before the first block, a micro-batch each. given: by what each block
        is given, of a block and a micro-batch.
        """
        sums: dict[str, torch.Tensor] = {}
        asked: dict[str, NDArray[np.int64]] = {}

        def go_back(number: int, looked: LookedUp) -> None:
            results, by_results = [looked.states], [gradients[number]]
            for block, (call, places) in enumerate(zip(looked.calls, self.given, strict=True)):
                tensors = [*tensors_in(call)]
                results += [tensors[place] for place in places]
                by_results += given(block, number)
            there = [n for n, one in enumerate(results) if one.requires_grad]
            rows = [row for _, _, row in looked.rows]
            if not there or not rows:
                return
            by_rows = torch.autograd.grad(
                [results[n] for n in there], rows, [by_results[n] for n in there],
                materialize_grads=True,
            )  # fmt: skip
            for (name, ids, _), by_row in zip(looked.rows, by_rows, strict=True):
                flat = by_row.reshape(-1, by_row.shape[-1])
                squares = flat.square().sum(0, dtype=torch.float64)
                sums[name] = sums[name] + squares if name in sums else squares
                size = self.skeleton.checkpoint.tensors[name].shape[0]
                times = np.bincount(ids.reshape(-1).numpy(), minlength=size)
                asked[name] = asked[name] + times if name in asked else times

        self.skeleton.looked_up(self.batches, go_back)
        count = sum(tokens.size for tokens in self.batches)
        return {
            name: Sensitivity(_chances(asked[name]), found.numpy() / count, int(asked[name].sum()))
            for name, found in sums.items()
        }


def _chances(asked: NDArray[np.int64]) -> NDArray[np.float64]:
    """How likely each row is asked for next, [rows], where it was so often.

    Rows that were not asked for have together the share of those that were once, each of them
    alike; of a text so short that it tells nothing, half.
    Source: Good, The Population Frequencies of Species and the Estimation of Population Parameters,
    1953.
    """
    count, new = int(asked.sum()), asked == 0
    share = min(0.5, float((asked == 1).sum()) / count) if new.any() else 0.0
    found = asked.astype(np.float64) * ((1 - share) / count)
    found[new] = share / max(1, int(new.sum()))
    return found
