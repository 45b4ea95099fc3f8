"""What rounding a matrix costs the whole network, from one forward and one backward pass.

A matrix W becomes W + D. To second order the KL divergence from the original's predictions to the
changed model's, in nats a token, is half the mean of (g' D x)^2, where x is what the matrix reads
at a token and g the gradient, by what it gives, of log p(y) summed over the text, each y drawn from
the model's own predictions p: of such gradients the mean of the products is the Fisher information,
which is the second derivative of the divergence. With inputs and gradients taken for independent of
each other and of their neighbours, and errors likewise,

    loss = 1/2 sum of rows[o] * columns[k] * D[o, k]^2
    rows[o] = sum over tokens of g[o]^2 / tokens of the text     columns[k] = mean of x[k]^2

An expert's sums are over the tokens that it read. An embedding is a matrix that reads one row at a
time: each counts as often as the text is likely to ask for it, and its columns count as the
gradient by them says, which is backpropagated through all that is computed from them before the
blocks.

The forward pass keeps the hidden states before each block on the disk, the backward pass takes
the blocks from the last to the first: one block in memory at a time, and a micro-batch a thread.
Micro-batches are a thread's work each, and sums are added in their order, whatever the number of
threads.

Source: Amari, Natural Gradient Works Efficiently in Learning, 1998; Martens and Grosse, Optimizing
Neural Networks with Kronecker-factored Approximate Curvature, 2015, of which these are diagonals.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from errno import EIO

import numpy as np
import torch
from numpy.typing import NDArray

from qtool.calibrating.placed import Passage
from qtool.calibrating.sites import BlockSites, Tracer, refuse_conv1d
from qtool.cuda.device import Device
from qtool.gradients.before import Before
from qtool.gradients.head import through_head
from qtool.gradients.kept import Block, Kept, gradients_at, keep_all, states_at, take_all
from qtool.gradients.passing import Passing
from qtool.gradients.sensitivity import Sensitivities, Sensitivity, joined
from qtool.gradients.sensitivity_file import Named
from qtool.gradients.sums import Seen, Sums, add, observed
from qtool.messages.progress import Progress
from qtool.planning.fitting import TOGETHER
from qtool.recipe.file import Precision
from qtool.streaming.allocator import give_back
from qtool.streaming.arguments import tensors_in, with_tensors
from qtool.streaming.layout import Stored
from qtool.streaming.linears import WeightIndex
from qtool.streaming.precision import matmuls_in
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.workers import Workers
from qtool.workspaces.workspace import Workspace

HEAD = ""  # the name of the head's matrix, which may be the embedding's, too


def measure(
    skeleton: Skeleton,
    tokens: NDArray[np.int64],
    seed: int,
    space: Workspace,
    threads: int,
    progress: Progress,
    behind: Callable[[int, Passing], None] | None = None,
    together: int = TOGETHER,
    device: Device | None = None,
    precision: Precision = "float32",
) -> Sensitivities:
    """Sensitivities of all matrices over tokens [samples, length].

    seed: of the tokens that are drawn. space: where what is finished is kept. behind: is told of
    each block, from the last to the first, what the gradients by what it gives are, before it
    counts as passed; no others are found then. together: tokens of a micro-batch. device: where
    blocks are passed, forwards and backwards; None is the CPU. precision: of matmuls, as settled.
    SourceError where logits are not finite, NoGradientError where torch has no gradient, or one
    that is not finite.
    """
    count = skeleton.count
    with Workers(threads) as workers:
        for index, module in enumerate(skeleton.blocks):
            refuse_conv1d(module, f"{skeleton.prefix}{index}")
        states = Passing(states_at(space, 0))
        stream = skeleton.embed(tokens, together, states, space.folder)
        before = Before.of(skeleton, tokens, [shape[0] for shape in states.shapes])
        passage = Passage.of(stream, workers, device, precision)
        way = _Way(skeleton, passage, Kept(space, states, workers), progress)
        way.kept.keep_states(0)
        found, gradients = _finished(way.kept, count)
        if gradients is None:
            way.before(count)
            gradients = Passing(gradients_at(space, count))
            with matmuls_in(precision):
                own, unrelated = through_head(
                    skeleton, stream, tokens, seed, gradients, workers, progress, behind is not None
                )
            named: Named = [] if own is None else [(HEAD, -1, own)]
            found = [way.kept.keep_sensitivities(count, named, gradients, [], unrelated)]
        elif len(found) > 1:
            progress.say(f"going on with an earlier run, at block {count + 1 - len(found)}")
        tracer = Tracer(stacked=True)
        for done in progress.blocks(count, "block backwards", first=len(found) - 1):
            index = count - 1 - done
            give_back()
            way.before(index)
            block = skeleton.block(index)
            sites = tracer.sites(block, stream)
            if behind is not None:
                behind(index, gradients)
            gradients.go_to(gradients_at(space, index))
            with passage.placed(block) as (there, passing, turn):
                seen, given = _through_block(
                    there, passing, gradients, before.given[index], turn, behind is not None
                )
                named = _named(block, sites, seen, tokens.size)
            gradients.turn()
            found.append(way.kept.keep_sensitivities(index, named, gradients, given))
            del block, given

        if behind is not None:
            return Sensitivities()

        def given_to(index: int, number: int) -> list[torch.Tensor]:
            return way.kept.read_given(index, found[count - index], number)

        tables = before.tables(gradients, given_to)
    keep_all(space, count, tables)
    return _gathered(found, tables)


def finished(space: Workspace) -> Sensitivities | None:
    """What measure() found in an earlier run that came to its end."""
    found = take_all(space)
    return None if found is None else _gathered(*found)


def _gathered(found: Sequence[Block], tables: dict[str, Sensitivity]) -> Sensitivities:
    """found: of the head, then of the blocks from the last to the first."""
    sensitivities = Sensitivities(tables=tables, unrelated=found[0].unrelated)
    for name, number, sensitivity in (one for block in found for one in block.named):
        if name == HEAD:
            sensitivities.head = sensitivity
            continue
        known = sensitivities.matrices.setdefault(name, {}).get(number)
        sensitivities.matrices[name][number] = (
            sensitivity if known is None else joined(known, sensitivity)
        )
    return sensitivities


@dataclass(frozen=True)
class _Way:
    """The forward pass."""

    skeleton: Skeleton
    passage: Passage
    kept: Kept
    progress: Progress

    def before(self, index: int) -> None:
        """Bring the stream before a block, from the nearest states that are kept."""
        states, space = self.kept.states, self.kept.space
        start = next((n for n in range(index, -1, -1) if self.kept.take_states(n)), None)
        if start is None:  # those before the first block were written by this very run
            raise OSError(EIO, "what was written reads otherwise", str(states_at(space, 0)))
        for number in self.progress.blocks(index, "block forwards", first=start):
            give_back()
            states.go_to(states_at(space, number + 1))
            with self.passage.placed(self.skeleton.block(number)) as (block, stream, workers):
                self.skeleton.advance(block, stream, workers)
            states.turn()
            self.kept.keep_states(number + 1)


def _finished(kept: Kept, count: int) -> tuple[list[Block], Passing | None]:
    """Of the head and the last blocks, what an earlier run has found, and how far the gradients
    have come; None where it has found nothing."""
    found: list[Block] = []
    while len(found) <= count and (one := kept.take_sensitivities(count - len(found))) is not None:
        found.append(one)
    while found:
        if (gradients := kept.take_gradients(count + 1 - len(found))) is not None:
            return found, gradients
        found.pop()
    return [], None


def _named(block: LoadedBlock, sites: BlockSites, seen: Seen, tokens: int) -> Named:
    """Sensitivities of a block's matrices, under the names that the checkpoint has for their
    rows."""
    by_id = {site.id: site for site in sites.sites}
    reached = {
        matrix.parameter
        for matrix, sums in seen.items()
        if matrix.expert is not None and sums.rows is not None
    }
    found: dict[tuple[str, int], Sensitivity] = {}
    unknown: set[tuple[str, int]] = set()
    for linear in sites.linears:
        site = by_id[linear.site]
        sensitivity = seen.get(linear.matrix, Sums()).sensitivity(tokens)
        if sensitivity is None and linear.matrix.parameter in reached:
            # An expert that no token reached costs nothing here.
            sensitivity = Sensitivity(np.zeros(linear.out_features), np.ones(site.in_features), 0)
        number = linear.matrix.expert if site.stacked else None
        for reader in linear.readers:
            key = reader.name, -1 if number is None else number
            if sensitivity is None:  # what no gradient passes is not known to cost nothing
                unknown.add(key)
                continue
            own = Sensitivity(
                sensitivity.rows[slice(*reader.rows)], sensitivity.columns, sensitivity.count
            )
            if linear.matrix.rows is not None:  # of several that one tensor is
                rows = np.zeros(len(block.weights[reader.name]))
                rows[slice(*linear.matrix.rows)] = own.rows
                rows += found[key].rows if key in found else 0
                own = replace(own, rows=rows)
            found[key] = own
    return [(*key, own) for key, own in found.items() if key not in unknown]


def _through_block(
    block: LoadedBlock,
    stream: Stream,
    gradients: Passing,
    given: Sequence[int],
    workers: Workers,
    back_alone: bool,
) -> tuple[Seen, list[list[torch.Tensor]]]:
    """Sums of a block's matrices, and gradients by what it is given beside states; those by its
    states take the place of those by what it hands on.

    back_alone: there are no sums. given: which of tensors_in() its call. Gradients by these are by
    micro-batch.
    """
    index = WeightIndex(block.module)

    def one(number: int) -> tuple[Seen, list[torch.Tensor]]:
        states = stream.hidden[number].detach().requires_grad_()
        call = stream.calls[block.index][number]
        tensors = [t.read() if isinstance(t, Stored) else t for t in tensors_in(call)]
        own = [tensors[place].detach().requires_grad_() for place in given]
        for place, tensor in zip(given, own, strict=True):
            tensors[place] = tensor
        seen: Seen = {}
        try:
            observing = nullcontext() if back_alone else observed(index, seen)
            with torch.enable_grad(), observing:
                # Some blocks add to what they are given in place, which a leaf does not allow.
                parts = iter([t.clone() if t.requires_grad else t for t in tensors])
                output = block.outputs(block.module, states.clone(), with_tensors(call, parts))
            by_output = gradients[number].to(stream.place)
            found = torch.autograd.grad(output, (states, *own), by_output, materialize_grads=True)
        except RuntimeError as error:
            so = "what its errors cost cannot be told"
            raise block.no_gradient(error, so) from error
        found = tuple(gradient.cpu() for gradient in found)
        gradients[number] = found[0]
        if not all(bool(torch.isfinite(gradient).all()) for gradient in found):
            raise block.not_finite()
        return seen, list(found[1:])

    sums: Seen = {}
    by_given: list[list[torch.Tensor]] = []
    count = len(stream.hidden)
    for first in range(0, count, workers.threads):
        for seen, found in workers.map(one, range(first, min(count, first + workers.threads))):
            add(sums, seen)
            by_given.append(found)
    return sums, by_given
