"""llama.cpp's importance matrix: how much each input column of a matrix matters.

    weight[column] = in_sum2[column] / count        the mean of x * x over the tokens it read

A GGUF file without a model:

    general.type        "imatrix"; then imatrix.datasets (strings), .chunk_count, .chunk_size (u32)
    <weight>.in_sum2    F32 [matrices, in]   sums over tokens
    <weight>.counts     F32 [matrices, 1]    tokens; with experts, those that each one read

in the order of the weights' names. The older .dat is read too, and told apart by its first bytes.

Arithmetic is llama-quantize's, one float32 division for each value, so that an encoder gets the
same bits. An expert that no token reached has no mean: as in llama-quantize its columns all weigh
1, which is said wherever it happens (`Importance.unreached`).

Source: llama.cpp, tools/imatrix and common/imatrix-loader, of October 2026.
"""

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError, SourceError
from qtool.formats.gguf_file import GgufFile, TensorInfo
from qtool.formats.gguf_values import Kind, Value, string, strings, u32
from qtool.formats.gguf_writer import GgufWriter, TensorSpec, lay_out
from qtool.gguf.importance.imatrix_dat import check_values, read_dat
from qtool.gguf_types import F32
from qtool.record import CALIBRATION
from qtool.workspaces.staging import staged_file

Floats = NDArray[np.float32]
Counts = NDArray[np.int64]

POLICY = "their columns all weigh 1, as in llama-quantize; more calibration text would reach them"
_SUMS, _COUNTS = ".in_sum2", ".counts"
_KEYS = ("imatrix.datasets", "imatrix.chunk_count", "imatrix.chunk_size")
_MAX_COUNT = 1 << 53  # tokens; a float32 holds larger numbers, but no count does


class _Means(Mapping[str, Floats]):
    """Weights [matrices, in] by tensor, computed when asked for."""

    def __init__(self, sums: Mapping[str, Floats], counts: Mapping[str, Counts]) -> None:
        self._sums, self._counts = sums, counts

    def __getitem__(self, name: str) -> Floats:
        sums, counts = self._sums[name], self._counts[name]
        reached = counts > 0
        # A .dat that was never called keeps its values, as in llama-quantize; its count is 1 then.
        means = sums / np.maximum(counts, 1).astype(np.float32)[:, None]
        means[~reached] = 1.0
        return means

    def __iter__(self) -> Iterator[str]:
        return iter(self._sums)

    def __len__(self) -> int:
        return len(self._sums)


@dataclass(frozen=True)
class Importance:
    """An importance matrix as stored or measured; `entries` are what an encoder weighs with."""

    sums: Mapping[str, Floats] = field(repr=False)  # by GGUF tensor name, [matrices, in]
    counts: Mapping[str, Counts] = field(repr=False)  # [matrices]: tokens; in a .dat calls
    datasets: tuple[str, ...] = ()
    chunks: int = 0
    chunk_size: int = 0  # tokens; 0: not said
    file: str | None = None  # name without folder; None where it was measured in this run
    unmeasured: tuple[str, ...] = ()  # matrices of the model that a measurement never saw
    extra: Mapping[str, Value] = field(default_factory=dict)  # keys of ours, written last

    @property
    def calibration(self) -> str | None:
        """What qtool measured it over, as JSON; None where another program wrote the file."""
        found = self.extra.get(CALIBRATION)
        return found.value if found is not None and isinstance(found.value, str) else None

    @property
    def entries(self) -> Mapping[str, Floats]:
        """float32 [matrices, in] by GGUF tensor name: means, and 1 where there is none.

        A .dat does not say how many matrices there are: all its values come as one row.
        """
        return _Means(self.sums, self.counts)

    @property
    def unreached(self) -> dict[str, tuple[int, ...]]:
        """Experts that no token reached, by tensor."""
        return {
            name: tuple(np.flatnonzero(counts <= 0).tolist())
            for name, counts in self.counts.items()
            if (counts <= 0).any()
        }

    def notes(self, lacking: Sequence[str] = (), there: Collection[str] | None = None) -> list[str]:
        """Sentences on what it does not know; lacking: tensors that had to be encoded without.
        there: the model's, which are all that are spoken of."""
        said = []
        every = self.unreached.items()
        if unreached := {n: some for n, some in every if there is None or n in there}:
            shown = "; ".join(
                f"{name}: {_listed(experts)}" for name, experts in list(unreached.items())[:3]
            )
            more = f"; and in {len(unreached) - 3} more tensors" if len(unreached) > 3 else ""
            said.append(f"experts that no token reached ({shown}{more}): {POLICY}")
        if names := [*dict.fromkeys((*self.unmeasured, *lacking))]:
            what = "has nothing of" if self.file else "could not be measured for"
            said.append(
                f"{self.file or 'importance'} {what} {_named(names)}; without it all columns of "
                "a matrix count alike"
            )
        return said

    def record(self) -> dict[str, object]:
        """For --json and provenance."""
        return {
            "file": self.file,
            "entries": len(self.sums),
            "chunks": self.chunks,
            "chunk_size": self.chunk_size,
            "datasets": list(self.datasets),
            "unreached": {name: list(experts) for name, experts in self.unreached.items()},
            "unmeasured": list(self.unmeasured),
        }


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown


def _listed(experts: Sequence[int]) -> str:
    return ", ".join(map(str, experts[:8])) + (
        f" and {len(experts) - 8} more" if len(experts) > 8 else ""
    )


def read_importance(path: Path) -> Importance:
    """Read either layout; FormatError or SourceError, in a sentence, where it is neither."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise SourceError(f"{path}: not a file; expected an importance matrix")
        with open(path, "rb") as file:
            magic, more = file.read(4), file.read(5)
            if more.endswith(b"{"):  # safetensors, such as `qtool calibrate -o` writes
                raise FormatError(
                    f"{path}: a safetensors file; expected an importance matrix, such as "
                    "`qtool calibrate MODEL --imatrix OUT.gguf` makes"
                )
            file.seek(4)
            if magic != b"GGUF":
                sums, counts, chunks, datasets = read_dat(path, file, magic)
                return Importance(sums, counts, datasets, chunks, 0, path.name)
    except OSError as error:
        raise SourceError(f"{path}: cannot be read ({error.strerror})") from None
    with GgufFile.open(path) as gguf:
        return _read_gguf(path, gguf)


def _read_gguf(path: Path, file: GgufFile) -> Importance:
    kind = file.metadata.get("general.type")
    if kind is not None and kind.value != "imatrix":
        raise FormatError(
            f"{path}: a GGUF file of general.type {str(kind.value)[:40]!r}, not an importance "
            "matrix; make one with `qtool calibrate MODEL --imatrix OUT.gguf`"
        )
    pairs: dict[str, dict[str, TensorInfo]] = {}
    for info in file.tensors.values():
        for suffix in (_SUMS, _COUNTS):
            if info.name.endswith(suffix):
                pairs.setdefault(info.name.removesuffix(suffix), {})[suffix] = info
    if not pairs or kind is None:
        raise FormatError(
            f"{path}: not an importance matrix (it has no tensors named *{_SUMS} and *{_COUNTS}, "
            "or no general.type); make one with `qtool calibrate MODEL --imatrix OUT.gguf`"
        )
    datasets, chunks, chunk_size = (_key(path, file, key) for key in _KEYS)
    sums: dict[str, Floats] = {}
    counts: dict[str, Counts] = {}
    for name, pair in sorted(pairs.items()):
        if len(pair) != 2:
            present, missing = (_SUMS, _COUNTS) if _SUMS in pair else (_COUNTS, _SUMS)
            raise FormatError(f"{path}: has {name + present!r} without {name + missing!r}")
        found = _floats(path, file, pair[_COUNTS])
        if found.max() >= _MAX_COUNT:
            raise FormatError(f"{path}: {name + _COUNTS!r} has {found.max()}, a number of tokens")
        # Half away from zero, as lround.
        counts[name] = np.floor(found.astype(np.float64) + 0.5).astype(np.int64)
        values = _floats(path, file, pair[_SUMS])
        if values.size % found.size:
            raise FormatError(
                f"{path}: {name + _SUMS!r} has {values.size} values for {found.size} counts; "
                "expected as many for each"
            )
        sums[name] = values.reshape(found.size, -1)
    ours = {key: value for key, value in file.metadata.items() if key.startswith("qtool.")}
    return Importance(
        sums,
        counts,
        tuple(datasets.value),
        chunks.value,
        chunk_size.value,
        path.name,
        extra=ours,
    )


def _key(path: Path, file: GgufFile, key: str) -> Value:
    value = file.metadata.get(key)
    if value is None:
        raise FormatError(f"{path}: lacks {key!r}, without which llama.cpp reads it neither")
    expected = (Kind.ARRAY, Kind.STRING) if key == _KEYS[0] else (Kind.UINT32, None)
    if (value.kind, value.element) != expected:
        raise FormatError(
            f"{path}: {key!r} is of kind {value.kind.name}, expected "
            f"{'an array of strings' if key == _KEYS[0] else 'UINT32'}"
        )
    return value


def _floats(path: Path, file: GgufFile, info: TensorInfo) -> Floats:
    """A tensor's values, none of them negative; [size]."""
    if info.type != F32:
        raise FormatError(f"{path}: {info.name!r} is {info.type.name}, expected F32")
    rows = prod(info.shape[:-1])
    values: Floats = file.read_rows(info.name, 0, rows).reshape(-1).view("<f4")
    check_values(path, info.name, values)
    return values


def write_importance(path: Path, importance: Importance) -> None:
    """Write the GGUF layout, byte for byte as llama-imatrix does; whole or not at all.

    UnsupportedError where `path` is there already: nothing of the user's is ever overwritten.
    """
    arrays: list[Floats] = []
    tensors: list[TensorSpec] = []
    for name in sorted(importance.sums, key=str.encode):
        counts = importance.counts[name].astype(np.float32)[:, None]
        for suffix, values in ((_SUMS, importance.sums[name]), (_COUNTS, counts)):
            # ggml drops the axes of one.
            shape = values.shape if len(values) > 1 else values.shape[1:]
            tensors.append(TensorSpec(name + suffix, shape, F32))
            arrays.append(np.ascontiguousarray(values, dtype="<f4"))
    metadata = {
        "general.type": string("imatrix"),
        _KEYS[0]: strings(importance.datasets),
        _KEYS[1]: u32(importance.chunks),
        _KEYS[2]: u32(importance.chunk_size),
        **importance.extra,
    }
    layout = lay_out(metadata, tensors)
    with staged_file(path, layout.size) as (_, descriptor):
        try:
            writer = GgufWriter(descriptor, layout)
            for number, (tensor, values) in enumerate(zip(tensors, arrays, strict=True)):
                rows = values.reshape(tensor.rows, -1).view(np.uint8)
                writer.rows(number, 0, rows)
            writer.finish()
            os.fsync(descriptor)
        except OSError as error:
            raise SourceError(f"{path}: cannot be written ({error.strerror})") from error
