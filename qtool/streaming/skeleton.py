"""A forward pass of any decoder-only transformers model with one block of weights in memory.

    skeleton = Skeleton.open(checkpoint)           all modules, no weights (torch's meta device)
    stream = skeleton.embed(tokens)                hidden states before block 0, and each block's
                                                   own arguments as the model's loop passes them
    for i in range(skeleton.count):
        block = skeleton.block(i)                  float32 weights of this block only
        ...                                        collect statistics, write into block.weights
        skeleton.advance(block, stream, workers)   hidden states before block i + 1

The model's code is transformers' own and is only observed: the blocks are the outermost ModuleList
that holds most parameters, and embed() runs the outer forward with each block's forward replaced by
a recorder that returns its input.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from qtool.checkpoints.conversions import splits
from qtool.checkpoints.names import Binding, Names, bind
from qtool.errors import RTN_CAN, QtoolError, SourceError, UnsupportedError
from qtool.streaming.arguments import Arguments
from qtool.streaming.handed_on import layout_of, mark_common
from qtool.streaming.hidden import OnDisk
from qtool.streaming.joined_rows import join
from qtool.streaming.layout import Layout
from qtool.streaming.meta_model import fill_buffers, find_blocks, meta_model, tensors_of
from qtool.streaming.online import Online
from qtool.streaming.outer_forward import past_blocks, recorded
from qtool.streaming.reading import EmbeddingRows, OnHost, Reading, Table
from qtool.streaming.stream import CPU, Call, InMemory, LoadedBlock, States, Stream
from qtool.streaming.towers import part_with_text
from qtool.streaming.weights import Weights
from qtool.streaming.workers import Workers

# Twice as many leave caches, take more memory and occupy half as many cores; half are no faster.
MICRO_BATCH_TOKENS = 1024
PROBE_TOKENS = 64


@dataclass(frozen=True)
class LookedUp:
    """What comes of some rows of tables."""

    states: torch.Tensor  # before the first block
    calls: list[Call]  # of each block
    # By table, [...] which rows, and the rows [..., width].
    rows: list[tuple[str, torch.Tensor, torch.Tensor]]


@dataclass(eq=False)
class Skeleton:
    """A transformers model without weights, and the way to give them to it piece by piece."""

    checkpoint: Weights
    model: Any  # a PreTrainedModel on the meta device
    prefix: str  # of the blocks, "model.layers."
    blocks: nn.ModuleList
    names: Names
    online: Online  # of weights that stand for the network only with rotated inputs
    _results: int = field(default=0, init=False)  # of a block, as the model's loop has them
    _layout: Layout = field(default=Layout(()), init=False)  # of the text that was last embedded

    @classmethod
    def open(cls, checkpoint: Weights) -> "Skeleton":
        """Build the modules from config.json and bind the checkpoint's tensors to them.

        UnsupportedError where transformers has no such decoder, SourceError where a block's
        parameter has no tensor.
        """
        model = meta_model(checkpoint)
        prefix, blocks = find_blocks(model)
        # A rotated view and an artifact have it, other weights need none.
        online = getattr(checkpoint, "online", Online())
        part = part_with_text(checkpoint.config)
        joined = join(model, splits(model, checkpoint.tensors, part), prefix)
        names = bind(model, checkpoint.tensors, joined, part)
        skeleton = cls(checkpoint, model, prefix, blocks, names, online)
        fill_buffers(model, skeleton.names)
        for index in range(len(blocks)):
            skeleton._check_block(index)
        return skeleton

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.blocks)

    @property
    def one_call(self) -> bool:
        """Whether attention is one call, in which keys and values can be seen."""
        return getattr(self.model.config, "_attn_implementation", None) == "sdpa"

    @property
    def unknown(self) -> tuple[str, ...]:
        """Checkpoint tensors that the model class has no place for (MTP blocks, extra heads)."""
        return self.names.unknown

    def pieces(self, parameter: str) -> Sequence[Binding] | None:
        """What a parameter is made of, or the one that it is tied to; None where nothing is."""
        return next(iter(self.stored(parameter)), None)

    def stored(self, parameter: str) -> list[Sequence[Binding]]:
        """The same of either: a checkpoint may have both, which are then alike."""
        tied = getattr(self.model, "all_tied_weights_keys", None) or {}
        known = self.names.of_parameter
        found = (known.get(name) for name in (parameter, tied.get(parameter, "")))
        return [pieces for pieces in found if pieces]

    def lacks(self, parameter: str) -> QtoolError:
        """The error of a parameter without pieces."""
        if (why := self.names.why_refused(parameter)) is not None:
            return UnsupportedError(why)
        if self.pieces(parameter) is not None:
            return UnsupportedError(
                f"{parameter!r}: {type(self.model).__name__} has the same weights in several "
                f"blocks; {RTN_CAN}"
            )
        return SourceError(
            f"{self.checkpoint.path}: no tensor for {parameter!r}, which "
            f"{type(self.model).__name__} needs; the checkpoint is incomplete or config.json is of "
            "another model"
        )

    def block_tensors(self, index: int) -> tuple[str, ...]:
        """Checkpoint names of what a block is made of."""
        prefix = f"{self.prefix}{index}."
        return tuple(
            piece.checkpoint_name
            for name, pieces in self.names.of_parameter.items()
            if name.startswith(prefix)
            for piece in pieces
        )

    def block(self, index: int, reading: Reading | None = None) -> LoadedBlock:
        """Read one block's weights, in float32. Its memory is free once it is dropped.

        reading: to where, by default onto the CPU.
        """
        reading = reading or OnHost(self.checkpoint)
        prefix = f"{self.prefix}{index}."
        # Its configuration is shared with the skeleton, its modules are not.
        config = self.model.config
        module = copy.deepcopy(self.blocks[index], {id(config): config})
        bindings: dict[str, Binding] = {}
        weights: dict[str, torch.Tensor] = {}
        for owner, attribute, name in tensors_of(module, prefix):
            pieces = self.names.of_parameter.get(name)
            if pieces is None:
                continue  # a buffer that no checkpoint holds; open() has seen to parameters
            tensor = read_parameter(owner, attribute, pieces, reading)
            for piece in pieces:
                bindings[piece.checkpoint_name] = piece
                weights[piece.checkpoint_name] = piece.view(tensor)
        move(module, reading.place)
        return LoadedBlock(index, prefix, module.eval(), bindings, weights, self.online)

    def embed(
        self,
        tokens: NDArray[np.int64],
        micro_batch_tokens: int = MICRO_BATCH_TOKENS,
        states: States | None = None,
        folder: Path | None = None,
    ) -> Stream:
        """States before the first block, and every block's arguments; tokens [n, length].

        states: where the states go; empty. By default into memory. folder: where large arguments
        go; by default that of states, and where these are in memory there, too.
        """
        samples, length = tokens.shape
        size = max(1, -(-micro_batch_tokens // length))
        kept = Arguments(states.folder if isinstance(states, OnDisk) else folder)
        with self._outer_weights(), EmbeddingRows(self.checkpoint, self._tables(), tokens):
            hidden: States = InMemory() if states is None else states
            calls: list[list[Call]] = [[] for _ in range(self.count)]
            for start in range(0, samples, size):
                part = tokens[start : start + size]
                first, its_calls = self._record(part, kept, length if start == 0 else None)
                hidden.append(self._layout.first(first))
                for per_block, call in zip(calls, its_calls, strict=True):
                    per_block.append(call)
            probe_tokens = min(length, PROBE_TOKENS)
            _, probe_calls = self._record(tokens[:1, :probe_tokens], kept)
        return Stream(hidden, self._layout, calls, probe_calls, probe_tokens)

    def looked_up(
        self, batches: Sequence[NDArray[np.int64]], use: Callable[[int, LookedUp], None]
    ) -> None:
        """Call use(number, micro-batch) with each of some [n, length] before the first block, as
        torch can backpropagate through what comes before it. Tables are read once."""
        every = np.concatenate([tokens.reshape(-1) for tokens in batches])
        with (
            self._outer_weights(),
            EmbeddingRows(self.checkpoint, self._tables(), every) as tables,
        ):
            for number, tokens in enumerate(batches):
                rows: list[tuple[str, torch.Tensor, torch.Tensor]] = []
                tables.looked_up = rows
                first, calls, _ = recorded(self.model, self.prefix, self.blocks, tokens, None)
                use(number, LookedUp(self._layout.first(first), calls, rows))

    def advance(self, block: LoadedBlock, stream: Stream, workers: Workers) -> None:
        """Replace the stream's states by those behind the block."""

        def step(number: int) -> None:
            output = block.passed(stream.hidden[number], stream.calls[block.index][number])
            stream.hidden[number] = output

        workers.map(step, range(len(stream.hidden)))

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Final norm and head: logits [samples, length, vocabulary] of the states behind the last
        block, or of their hidden states."""
        with self.open_head() as head:
            return head(states)

    @contextmanager
    def open_head(
        self, reading: Reading | None = None
    ) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """head() for many calls, where `reading` places it: its weights are read at the first one.

        On the CPU, several threads may call it from then on; blocks do not run within.
        """
        place = reading.place if reading is not None else CPU
        rows = partial(EmbeddingRows, self.checkpoint, self._tables())
        passing_by = past_blocks(self.model, self.blocks, self._results, self._layout, rows)
        with self._outer_weights(reading), passing_by as head, place:
            yield lambda states: head(states.to(place))

    def logits(self, tokens: NDArray[np.int64], workers: Workers) -> torch.Tensor:
        """The whole forward pass, block by block: logits [n, length, vocabulary]."""
        stream = self.embed(tokens)
        for index in range(self.count):
            self.advance(self.block(index), stream, workers)
        with self.open_head() as head:
            return torch.cat([head(hidden) for hidden in stream.hidden])

    def _check_block(self, index: int) -> None:
        prefix = f"{self.prefix}{index}."
        for owner, attribute, name in tensors_of(self.blocks[index], prefix):
            if attribute in owner._parameters and name not in self.names.of_parameter:
                raise self.lacks(name)

    @contextmanager
    def _outer_weights(self, reading: Reading | None = None) -> Iterator[None]:
        """Within, a module outside of the blocks reads its own weights when first called."""
        source = reading or OnHost(self.checkpoint)
        filled: list[tuple[nn.Module, str, torch.Tensor]] = []

        def fill(owner: nn.Module, path: str) -> None:
            for attribute in (*owner._parameters, *owner._buffers):
                meta = getattr(owner, attribute)
                if meta is None or meta.device == source.place:
                    continue
                if meta.device.type != "meta":  # a buffer that no checkpoint holds
                    filled.append((owner, attribute, meta))
                    owner._buffers[attribute] = meta.to(source.place)
                    continue
                if isinstance(owner, nn.Embedding) and attribute == "weight":
                    continue  # EmbeddingRows reads the rows that are looked up
                name = f"{path}.{attribute}" if path else attribute
                pieces = self.pieces(name)
                if pieces is None:
                    raise self.lacks(name)
                filled.append((owner, attribute, meta))
                read_parameter(owner, attribute, pieces, source)

        hooks = [
            module.register_forward_pre_hook(lambda owner, _, path=path: fill(owner, path))
            for path, module in self.model.named_modules()
            if not f"{path}.".startswith(self.prefix)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            for owner, attribute, meta in filled:
                group = owner._parameters if attribute in owner._parameters else owner._buffers
                group[attribute] = meta  # type: ignore[assignment]

    def _tables(self) -> dict[int, Table]:
        """Embedding tables, by the id of the parameter."""
        return {
            id(module.weight): tuple(
                piece.checkpoint_name for piece in self.names.of_parameter[f"{path}.weight"]
            )
            for path, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and f"{path}.weight" in self.names.of_parameter
        }

    def _record(
        self, tokens: NDArray[np.int64], kept: Arguments, length: int | None = None
    ) -> tuple[torch.Tensor, list[Call]]:
        """The first hidden states of one micro-batch, and all blocks' arguments.

        length: of the text, where the layout of its states is to be found out.
        """
        first, seen, self._results = recorded(
            self.model, self.prefix, self.blocks, tokens, kept, to_head=length is not None
        )
        seen, common = mark_common(seen)
        if length is not None:
            samples = len(tokens)
            self._layout = layout_of(self.model, self.blocks, seen, first, common, samples, length)
        return first, [replace(call, layout=self._layout) for call in seen]


def read_parameter(
    owner: nn.Module, attribute: str, pieces: Sequence[Binding], reading: Reading
) -> torch.Tensor:
    """Put the checkpoint's values, in float32, where the module expects its parameter."""
    meta = getattr(owner, attribute)
    dtype = torch.float32 if meta.is_floating_point() else meta.dtype
    tensor = torch.empty(meta.shape, dtype=dtype, device=reading.place)
    for piece in pieces:
        reading.copy(piece.checkpoint_name, piece.view(tensor))
    if attribute in owner._parameters:
        owner._parameters[attribute] = nn.Parameter(tensor, requires_grad=False)
    else:
        owner._buffers[attribute] = tensor
    return tensor


def move(module: nn.Module, place: torch.device) -> None:
    """Bring the buffers of a module, and tensors that it keeps as plain attributes, to a place."""
    for part in module.modules():
        for kept in (part._buffers, vars(part)):
            for key, value in kept.items():
                if isinstance(value, torch.Tensor) and value.device.type != "meta":
                    kept[key] = value.to(place)
