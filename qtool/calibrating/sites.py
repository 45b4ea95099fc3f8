"""Which matrices of a block read which input, seen at the calls themselves.

Two notions, both found by running the block once on a small probe:

- `Site`: one distinct input, the unit of statistics. q, k and v read one tensor; so do a router and
  a shared expert. Each routed expert reads rows of its own, hence has its own site (and another
  for its down projection).
- fold group: every site whose rows come from one norm's output. What is folded into the norm has
  to be undone in all of them: router, routed and shared experts alike.

Calls are seen as they are made (qtool.streaming.linears) on a small input (probe_trace.py). Inputs
are compared by the bytes of their rows, so reshaped, flattened and gathered rows are still known
to be the norm's.

Blocks of the same structure have the same sites, so one trace serves them all (`Tracer`). An expert
that the probe did not reach is taken to behave as its neighbours in the same parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from qtool.calibrating.probe_trace import Trace, TracedCall, watch
from qtool.checkpoints.names import Binding
from qtool.errors import RTN_CAN, UnsupportedError
from qtool.streaming.linears import Matrix
from qtool.streaming.stream import Call, LoadedBlock, Stream, Structure


@dataclass(frozen=True)
class Reader:
    """One checkpoint tensor, and the rows of the call's output that it makes."""

    name: str
    rows: tuple[int, int]
    first: int = 0  # its own row that makes the first of them; behind them it may have more


@dataclass(frozen=True)
class LinearCall:
    """One call in the order of the forward pass: out = x W' (+ bias)."""

    matrix: Matrix
    readers: tuple[Reader, ...]  # more than one where the model fuses what the checkpoint parts
    bias: str | None  # checkpoint name
    out_features: int
    site: str  # id of the site it reads


@dataclass(frozen=True)
class Site:
    """One distinct input of a block and all that read it."""

    id: str  # checkpoint name of its first reader; name[expert] where that holds all experts
    in_features: int
    readers: tuple[Reader, ...]
    matrix: Matrix  # the first to read it: where collect() looks
    calls: int  # how often the probe called that matrix; 0 for an expert that it did not reach
    per_token: int | None  # rows it reads for each token; None where only some tokens pass
    expert: int | None  # slice of a 3-D parameter
    producer: str | None  # checkpoint name of the weight of the norm whose rows it reads
    producer_bias: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """Checkpoint names of the readers."""
        return tuple(reader.name for reader in self.readers)

    @property
    def stacked(self) -> bool:
        """Whether its reader holds a matrix for each expert."""
        return self.id != self.readers[0].name


@dataclass(frozen=True)
class BlockSites:
    """All sites of a block, in the order in which their inputs appear."""

    sites: tuple[Site, ...]
    linears: tuple[LinearCall, ...]
    unread: tuple[str, ...]  # 2-D tensors of the block that no call was seen to read

    def of(self, name: str) -> Site | None:
        """The site that a checkpoint tensor reads."""
        return next((site for site in self.sites if name in site.names), None)

    def fold_groups(self) -> dict[str, tuple[Site, ...]]:
        """Sites by the checkpoint name of the norm that feeds them; those without are left out."""
        groups: dict[str, tuple[Site, ...]] = {}
        for site in self.sites:
            if site.producer is not None:
                groups[site.producer] = (*groups.get(site.producer, ()), site)
        return groups


_Key = tuple[tuple[int, ...], int, int | None, str | None]


def trace(block: LoadedBlock, hidden: torch.Tensor, call: Call) -> BlockSites:
    """Run the block once on a small input and say what reads what."""
    return _resolve(block, watch(block, hidden, call))


@dataclass
class Tracer:
    """trace(), once for each structure of block that the model has.

    stacked: where a checkpoint tensor holds a matrix for each expert, each has a site too, whose
    reader is the whole tensor. No recipe quantizes such a tensor, so that nothing else needs them.
    """

    stacked: bool = False
    _known: dict[Structure, Trace] = field(default_factory=dict)

    def sites(self, block: LoadedBlock, stream: Stream) -> BlockSites:
        """The sites of a block whose input the stream stands at."""
        key = block.structure
        if key not in self._known:
            refuse_conv1d(block.module, block.prefix[:-1])
            self._known[key] = watch(block, *stream.probe(block.index))
        return _resolve(block, self._known[key], self.stacked)


def refuse_conv1d(block: nn.Module, prefix: str) -> None:
    """UnsupportedError where matrices are kept as [in, out], which no reader below expects."""
    for name, module in block.named_modules(prefix=prefix):
        if type(module).__name__ == "Conv1D":
            raise UnsupportedError(
                f"{name}: a Conv1D, which stores its matrix transposed ([in, out]), as GPT-2 "
                "does; calibrated recipes know Linear layers only, `qtool eval` and round to "
                "nearest into GGUF take it"
            )


def _resolve(block: LoadedBlock, traced: Trace, stacked: bool = False) -> BlockSites:
    """Name what a trace showed by the checkpoint tensors of this block."""

    def readers_of(matrix: Matrix) -> tuple[Reader, ...]:
        return _readers(pieces, matrix) or (_stack(pieces, matrix) if stacked else ())

    pieces: dict[str, list[Binding]] = {}
    for binding in block.bindings.values():
        name = binding.parameter_name.removeprefix(block.prefix)
        pieces.setdefault(name, []).append(binding)

    # The first piece of a norm or bias is all of it.
    def whole(parameter: str | None) -> str | None:
        found = pieces.get(parameter) if parameter is not None else None
        return found[0].checkpoint_name if found and len(found) == 1 else None

    groups: dict[_Key, list[TracedCall]] = {}
    producers: dict[_Key, tuple[str, str | None] | None] = {}
    for call in traced.calls:
        producer = _producer(traced, call)
        complete = producer is None or len(set(call.rows)) == len(producer[2])
        # Experts that happened to get the same tokens of the probe are still apart.
        apart = call.matrix.expert
        owner = None if complete and apart is None else call.matrix.parameter.rsplit(".", 2)[0]
        key = (call.rows, call.in_features, apart, owner)
        groups.setdefault(key, []).append(call)
        producers.setdefault(key, producer[:2] if producer is not None else None)

    sites: list[Site] = []
    linears: list[LinearCall] = []
    for key, calls in groups.items():
        unique = list(dict.fromkeys((call.matrix, call.bias, call.out_features) for call in calls))
        readers = {matrix: readers_of(matrix) for matrix, _, _ in unique}
        # One tensor may be several matrices.
        every = tuple({r.name: r for group in readers.values() for r in group}.values())
        if not every:
            continue
        producer_names = producers[key]
        first = calls[0].matrix
        per_token, partial = divmod(calls[0].seen, traced.tokens)
        site = Site(
            id=_id(every[0], first, pieces),
            in_features=calls[0].in_features,
            readers=every,
            matrix=first,
            calls=calls[0].calls,
            per_token=None if partial or first.expert is not None else per_token,
            expert=first.expert,
            producer=whole(producer_names[0]) if producer_names else None,
            producer_bias=whole(producer_names[1]) if producer_names else None,
        )
        sites.append(site)
        for matrix, bias, out_features in unique:
            linears.append(LinearCall(matrix, readers[matrix], whole(bias), out_features, site.id))
    order = {call.matrix: number for number, call in reversed([*enumerate(traced.calls)])}
    _add_unreached_experts(block, pieces, readers_of, sites, linears)
    linears.sort(key=lambda linear: order.get(linear.matrix, len(order)))
    read = _read(sites)
    unread = tuple(
        name
        for name, view in block.weights.items()
        if view.ndim == 2 and name.endswith(".weight") and name not in read
    )
    return BlockSites(tuple(sites), tuple(linears), unread)


def _read(sites: Sequence[Site]) -> set[str]:
    """Tensors that some site reads, each matrix of which reads that one."""
    found: set[str] = set()
    for site in sites:
        for name in site.names:
            if name in found and not site.stacked:
                raise UnsupportedError(
                    f"{name}: it is several matrices above one another, which read different "
                    f"inputs; {RTN_CAN}"
                )
            found.add(name)
    return found


def _producer(traced: Trace, call: TracedCall) -> tuple[str, str | None, frozenset[int]] | None:
    """The last norm among whose output rows all rows of the call are."""
    rows = frozenset(call.rows)
    return next((norm for norm in reversed(traced.norms) if rows and rows <= norm[2]), None)


def _readers(pieces: Mapping[str, Sequence[Binding]], matrix: Matrix) -> tuple[Reader, ...]:
    """The checkpoint tensors that make up a matrix, by row."""
    readers: list[Reader] = []
    for binding in pieces.get(matrix.parameter, ()):
        index = binding.index
        if matrix.expert is not None:
            if not index or index[0] != matrix.expert or binding.transposed != matrix.transposed:
                continue
            index = index[2:] if matrix.transposed else index[1:]
        rows = index[0] if index else slice(0, binding.shape[0])
        if not isinstance(rows, slice) or len(binding.shape) != 2:
            continue
        own, first = (rows.start, rows.stop), 0
        if matrix.rows is not None:  # of the parameter, which is this tensor
            own, first = (0, matrix.rows[1] - matrix.rows[0]), matrix.rows[0]
        readers.append(Reader(binding.checkpoint_name, own, first))
    return tuple(readers)


def _stack(pieces: Mapping[str, Sequence[Binding]], matrix: Matrix) -> tuple[Reader, ...]:
    """The checkpoint tensor that is the whole parameter of an expert's matrix."""
    if matrix.expert is None:
        return ()
    return tuple(
        Reader(
            binding.checkpoint_name,
            (0, binding.shape[1 + (binding.transposed != matrix.transposed)]),
        )
        for binding in pieces.get(matrix.parameter, ())
        if not binding.index and len(binding.shape) == 3
    )


def _id(reader: Reader, matrix: Matrix, pieces: Mapping[str, Sequence[Binding]]) -> str:
    stack = reader in _stack(pieces, matrix)
    return f"{reader.name}[{matrix.expert}]" if stack else reader.name


def _add_unreached_experts(
    block: LoadedBlock,
    pieces: Mapping[str, Sequence[Binding]],
    readers_of: Callable[[Matrix], tuple[Reader, ...]],
    sites: list[Site],
    linears: list[LinearCall],
) -> None:
    """Give every slice of a 3-D parameter the site that a slice which was called has."""
    called = {linear.matrix for linear in linears}
    patterns: dict[str, tuple[Site, list[LinearCall]]] = {}
    for site in sites:
        if site.expert is not None and site.matrix.parameter not in patterns:
            patterns[site.matrix.parameter] = (
                site,
                [linear for linear in linears if linear.site == site.id],
            )
    for parameter, (site, its_linears) in patterns.items():
        for expert in range(block.module.get_parameter(parameter).shape[0]):
            own = replace(site.matrix, expert=expert)
            if own in called:
                continue
            copies = [(linear, replace(linear.matrix, expert=expert)) for linear in its_linears]
            readers = tuple(r for _, matrix in copies for r in readers_of(matrix))
            new = Site(
                id=_id(readers[0], own, pieces),
                in_features=site.in_features,
                readers=readers,
                matrix=own,
                calls=0,
                per_token=None,
                expert=expert,
                producer=site.producer,
                producer_bias=site.producer_bias,
            )
            sites.append(new)
            for linear, matrix in copies:
                linears.append(
                    LinearCall(matrix, readers_of(matrix), None, linear.out_features, new.id)
                )
