"""Which matrices of a block read which input, seen at the calls themselves.

Two notions, both found by running the block once on a small probe:

- `Site`: one distinct input, the unit of statistics. q, k and v read one tensor; so do a router and
  a shared expert. Each routed expert reads rows of its own, hence has its own site (and another
  for its down projection).
- fold group: every site whose rows come from one norm's output. What is folded into the norm has
  to be undone in all of them: router, routed and shared experts alike.

No module is asked for its kind. A TorchFunctionMode sees every F.linear (and matmul, mm, addmm)
whose weight is part of a parameter, known by storage and offset: transformers 5 calls F.linear on
slices of 3-D parameters, which have no module to hook. Inputs are compared by the bytes of their
rows, so reshaped, flattened and gathered rows are still known to be the norm's.

Blocks of the same structure have the same sites, so one trace serves them all (`Tracer`). An expert
that the probe did not reach is taken to behave as its neighbours in the same parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from qtool.calibrating.stream import Call, LoadedBlock, Stream
from qtool.names import Binding


@dataclass(frozen=True)
class Matrix:
    """The matrix of one linear call: a 2-D parameter, or one slice of a 3-D one."""

    parameter: str  # name within the block, "self_attn.q_proj.weight"
    expert: int | None  # which slice of a 3-D parameter


@dataclass(frozen=True)
class Reader:
    """One checkpoint tensor, and the rows of the call's output that it makes."""

    name: str
    rows: tuple[int, int]


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


@dataclass(frozen=True)
class _TracedCall:
    matrix: Matrix
    bias: str | None  # parameter name within the block
    rows: tuple[int, ...]  # hashes
    calls: int  # with the same rows, or one for each chunk of the rows
    seen: int  # rows in all calls
    in_features: int
    out_features: int


@dataclass(frozen=True)
class _Trace:
    """What a forward pass showed, in the block's own names."""

    tokens: int
    calls: tuple[_TracedCall, ...]  # one a matrix
    norms: tuple[tuple[str, str | None, frozenset[int]], ...]  # weight, bias, output rows


_Key = tuple[tuple[int, ...], int, int | None, str | None]


class WeightIndex:
    """From a tensor handed to a linear call back to the block's parameter it is part of."""

    def __init__(self, module: nn.Module) -> None:
        self._owner: dict[int, tuple[str, torch.Tensor]] = {}
        for name, parameter in module.named_parameters():
            self._owner.setdefault(parameter.untyped_storage().data_ptr(), (name, parameter))

    def matrix(self, weight: torch.Tensor) -> Matrix | None:
        """The matrix that `weight` [out, in] is, or None."""
        owner = self._owner.get(weight.untyped_storage().data_ptr())
        if owner is None or weight.ndim != 2:
            return None
        name, parameter = owner
        offset = weight.storage_offset() - parameter.storage_offset()
        if weight.shape != parameter.shape[-2:] or weight.stride() != parameter.stride()[-2:]:
            return None
        if parameter.ndim == 2:
            return Matrix(name, None) if offset == 0 else None
        if parameter.ndim == 3 and offset % parameter.stride(0) == 0:
            return Matrix(name, offset // parameter.stride(0))
        return None

    def bias(self, bias: torch.Tensor | None) -> str | None:
        """The name of the 1-D parameter that `bias` is, or None."""
        if bias is None:
            return None
        owner = self._owner.get(bias.untyped_storage().data_ptr())
        return owner[0] if owner is not None and owner[1].shape == bias.shape else None


MATMULS = {
    torch.matmul,
    torch.mm,
    torch.Tensor.matmul,
    torch.Tensor.mm,
    torch.Tensor.__matmul__,
}
ADDMMS = {torch.addmm, torch.Tensor.addmm}

# What an observer is told of each call: matrix, input [..., in], bias.
Observer = Callable[[Matrix, torch.Tensor, torch.Tensor | None], None]


class ObserveLinears(TorchFunctionMode):
    """Within, `observer` hears of every linear call on the block's parameters, before it is made.

    A mode belongs to the thread that enters it.
    """

    def __init__(self, index: WeightIndex, observer: Observer) -> None:
        super().__init__()
        self._index = index
        self._observer = observer

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        seen: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None = None
        if func is F.linear:
            x, weight, bias = _linear_arguments(*args, **kwargs)
            seen = x, weight, bias
        elif func in MATMULS and len(args) == 2 and args[1].ndim == 2:
            seen = args[0], args[1].t(), None
        elif func in ADDMMS and len(args) == 3 and args[2].ndim == 2:
            seen = args[1], args[2].t(), args[0]
        if seen is not None:
            x, weight, bias = seen
            matrix = self._index.matrix(weight)
            if matrix is not None:
                self._observer(matrix, x, bias)
        return func(*args, **kwargs)


def _linear_arguments(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """F.linear's own signature, so that keywords are told apart as it does."""
    return input, weight, bias


def trace(block: LoadedBlock, hidden: torch.Tensor, call: Call) -> BlockSites:
    """Run the block once on a small input and say what reads what."""
    return _resolve(block, _watch(block, hidden, call))


@dataclass
class Tracer:
    """trace(), once for each structure of block that the model has.

    stacked: where a checkpoint tensor holds a matrix for each expert, each has a site too, whose
    reader is the whole tensor. No recipe quantizes such a tensor, so that nothing else needs them.
    """

    stacked: bool = False
    _known: dict[tuple[tuple[str, tuple[int, ...]], ...], _Trace] = field(default_factory=dict)

    def sites(self, block: LoadedBlock, stream: Stream) -> BlockSites:
        """The sites of a block whose input the stream stands at."""
        key = tuple((name, tuple(p.shape)) for name, p in block.module.named_parameters())
        if key not in self._known:
            self._known[key] = _watch(block, *stream.probe(block.index))
        return _resolve(block, self._known[key], self.stacked)


def _watch(block: LoadedBlock, hidden: torch.Tensor, call: Call) -> _Trace:
    index = WeightIndex(block.module)
    calls: dict[tuple[Matrix, str | None], _TracedCall] = {}
    norms: list[tuple[str, str | None, frozenset[int]]] = []

    def observe(matrix: Matrix, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        key = matrix, index.bias(bias)
        rows = _row_hashes(x)
        before = calls.get(key)
        if before is None:
            out_features, in_features = block.module.get_parameter(matrix.parameter).shape[-2:]
            calls[key] = _TracedCall(*key, rows, 1, len(rows), in_features, out_features)
        else:
            # Called again on the same input, or on the next chunk of it.
            whole = before.rows if rows == before.rows else before.rows + rows
            calls[key] = replace(
                before, rows=whole, calls=before.calls + 1, seen=before.seen + len(rows)
            )

    def hook(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def remember(module: nn.Module, _: Any, output: Any) -> None:
            if isinstance(output, torch.Tensor) and output.ndim > 0:
                has_bias = isinstance(getattr(module, "bias", None), nn.Parameter)
                bias = f"{path}.bias" if has_bias else None
                norms.append((f"{path}.weight", bias, frozenset(_row_hashes(output))))

        return remember

    hooks = []
    for path, module in block.module.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 1:
            hooks.append(module.register_forward_hook(hook(path)))
    try:
        with ObserveLinears(index, observe):
            block.try_out(hidden, call)
    finally:
        for handle in hooks:
            handle.remove()
    tokens = hidden.shape[0] * hidden.shape[1]
    return _Trace(tokens, tuple(calls.values()), tuple(norms))


def _row_hashes(x: torch.Tensor) -> tuple[int, ...]:
    rows = x.detach().reshape(-1, x.shape[-1]).contiguous().numpy()
    return tuple(hash(row.tobytes()) for row in rows)


def _resolve(block: LoadedBlock, traced: _Trace, stacked: bool = False) -> BlockSites:
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

    groups: dict[_Key, list[_TracedCall]] = {}
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
        every = tuple(reader for group in readers.values() for reader in group)
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
    read = {reader.name for site in sites for reader in site.readers}
    unread = tuple(
        name
        for name, view in block.weights.items()
        if view.ndim == 2 and name.endswith(".weight") and name not in read
    )
    return BlockSites(tuple(sites), tuple(linears), unread)


def _producer(traced: _Trace, call: _TracedCall) -> tuple[str, str | None, frozenset[int]] | None:
    """The last norm among whose output rows all rows of the call are."""
    rows = frozenset(call.rows)
    return next((norm for norm in reversed(traced.norms) if rows and rows <= norm[2]), None)


def _readers(pieces: Mapping[str, Sequence[Binding]], matrix: Matrix) -> tuple[Reader, ...]:
    """The checkpoint tensors that make up a matrix, by row."""
    readers: list[Reader] = []
    for binding in pieces.get(matrix.parameter, ()):
        index = binding.index
        if matrix.expert is not None:
            if not index or index[0] != matrix.expert:
                continue
            index = index[1:]
        rows = index[0] if index else slice(0, binding.shape[0])
        if isinstance(rows, slice) and len(binding.shape) == 2:
            readers.append(Reader(binding.checkpoint_name, (rows.start, rows.stop)))
    return tuple(readers)


def _stack(pieces: Mapping[str, Sequence[Binding]], matrix: Matrix) -> tuple[Reader, ...]:
    """The checkpoint tensor that is the whole parameter of an expert's matrix."""
    if matrix.expert is None:
        return ()
    return tuple(
        Reader(binding.checkpoint_name, (0, binding.shape[1]))
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
            if Matrix(parameter, expert) in called:
                continue
            copies = [(linear, Matrix(linear.matrix.parameter, expert)) for linear in its_linears]
            readers = tuple(r for _, matrix in copies for r in readers_of(matrix))
            new = Site(
                id=_id(readers[0], Matrix(parameter, expert), pieces),
                in_features=site.in_features,
                readers=readers,
                matrix=Matrix(parameter, expert),
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
