"""Writing a quantized checkpoint as GGUF, block by block the same numbers.

The file is read back from its hidden name and dequantized; every matrix is compared with the
checkpoint's before the file gets its name.
"""

import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool import __version__, native_gguf
from qtool.converting import resume
from qtool.converting.blocks import MXFP4, NVFP4, Q4_0, Q4_1, Q8_0, pack, without_second
from qtool.converting.certificate import (
    Certificate,
    Converted,
    Rounded,
    Squares,
    provenance,
    source_record,
)
from qtool.converting.codes import finite
from qtool.converting.from_gguf import PROVENANCE
from qtool.converting.gguf_plan import GgufStep, gguf_plan, in_blocks
from qtool.converting.model import DTYPE_NAMES, Model, Tensor
from qtool.converting.obstacles import ANEW
from qtool.converting.pieces import dequantize, spans
from qtool.converting.request import Request, say_all
from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Value, string, u32
from qtool.formats.gguf_writer import GgufWriter, Layout, TensorSpec, lay_out, opened
from qtool.gguf.second_scales import inputs_of
from qtool.gguf.source import QUANTIZATION_VERSION, GgufSource
from qtool.gguf_mixtures.kinds import stored_shape
from qtool.gguf_mixtures.table import MOSTLY_NVFP4
from qtool.gguf_types import BlockType
from qtool.messages.progress import Progress
from qtool.runs.gguf_request import unlike_gguf
from qtool.scheme import GroupQuant
from qtool.workspaces.journal import Journal

FILE_TYPES = {Q4_0: 2, Q4_1: 3, Q8_0: 7, MXFP4: 38, NVFP4: MOSTLY_NVFP4}  # general.file_type
_LAST_BITS = 2.0**-22  # of a float32, two products of which are rounded
_AT_ONCE = 1 << 24  # bytes of plain numbers copied in one piece


def convert(request: Request, model: Model, progress: Progress) -> Converted:
    """Make the file; nothing is left under its name unless all of it succeeds."""
    if model.checkpoint is None:
        raise UnsupportedError(
            f"{model.path}: is GGUF already; `qtool quantize` makes another type of it"
        )
    with progress.stage("survey"):
        source, steps = gguf_plan(request.target, model, request.lossy, progress)
        warnings = (*source.warnings, *unlike_gguf(request.out))
        say_all(warnings, progress)
        rounded = [one for step in steps for one in _rounded(step)]
    types = Counter(step.type for step in steps if step.parts)
    layout_name = types.most_common(1)[0][0]
    certificate = Certificate(
        source=source_record(model),
        format="gguf",
        layout=", ".join(sorted(kind.name for kind in types)),
        compared=len(steps),
        matrices=len(model.quantized),
        rounded=rounded,
        dropped=(*model.dropped, *source.dropped),
        assumed=request.assume,
        last_bit=sum(len(step.parts) for step in steps if step.factors is not None),
    )
    metadata = _metadata(source, layout_name, provenance(model, certificate))
    metadata |= inputs_of({s.source.name: False for s in steps if _leaves_inputs(s, model)})
    specs = [TensorSpec(s.source.name, stored_shape(s.source.shape), s.type) for s in steps]
    layout = lay_out(metadata, specs)
    with resume.resumed_file(request, model.path, progress, layout) as (place, journal):
        with progress.stage("export"):
            _write(place.path, layout, steps, journal, progress)
        with progress.stage("verify"):
            _compare(place.path, layout, metadata, steps, progress)
        made = Converted(
            artifact=str(request.out),
            certificate=certificate,
            architecture=model.architecture,
            dtype=DTYPE_NAMES[model.dtype],
            tensors=len(steps),
            size_bytes=layout.size,
            dequantized={},
            warnings=(*model.warnings, *warnings),
        )
        place.conclude(asdict(made))
    return made


def _write(
    path: Path, layout: Layout, steps: list[GgufStep], journal: Journal, progress: Progress
) -> None:
    with opened(path, layout.size) as descriptor:
        writer = GgufWriter(descriptor, layout)
        done = resume.finished_rows(journal, writer, path)
        resume.say(progress, done, len(steps))
        for number in progress.blocks(len(steps), "tensor", first=done):
            found = 0
            for first, rows in _rows(steps[number]):
                writer.rows(number, first, rows)
                found = zlib.crc32(rows.data, found)
            journal.commit(layout.tensors[number].name, checksum=found)
        writer.finish()


def _leaves_inputs(step: GgufStep, model: Model) -> bool:
    """Whether it is NVFP4 whose inputs engines of the checkpoint do not round."""
    return step.type is NVFP4 and not any(part.name in model.rounds_inputs for part in step.parts)


def _metadata(source: GgufSource, usual: BlockType, record: dict[str, Any]) -> dict[str, Value]:
    """The keys that convert_hf_to_gguf.py writes, the file's type, and where it comes from."""
    added = {
        "general.quantization_version": u32(QUANTIZATION_VERSION),
        "general.file_type": u32(FILE_TYPES[usual]),
        "qtool.version": string(__version__),
    }
    made_of = record.get("source")
    name = made_of.get("name") if isinstance(made_of, dict) else None
    if isinstance(name, str):
        added["qtool.source"] = string(name)
    text = json.dumps(record, ensure_ascii=False, separators=(",", ":"))
    added[PROVENANCE] = string(text)
    kept = {key: value for key, value in source.metadata.items() if key not in added}
    return kept | added


def _blocks(step: GgufStep, part: Tensor) -> NDArray[np.uint8]:
    """One matrix in its new type, rows in the file's order: uint8 [out, bytes of a row]."""
    assert part.read is not None
    value = part.read()
    obstacle = (step.against or {}).get(part.name)
    if obstacle is not None and obstacle.lossy == ANEW:
        raw = native_gguf.encode(finite(part.name, value.dequantize()), step.type)
    else:
        quant = in_blocks(value)
        assert quant is not None  # the plan saw to it
        raw = pack(quant, step.type)
    return raw if step.order is None else raw[step.order]


def _pieces(
    step: GgufStep, part: Tensor, raw: Callable[[int, int], NDArray[np.uint8]]
) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Rows in the file's order, some at a time: as the checkpoint has them, and as `raw` has. Of
    NVFP4 both without the second scale."""
    assert part.read is not None
    value = part.read()
    if step.type is NVFP4 and isinstance(value, GroupQuant):
        value = without_second(value)
    for first, last in spans(value.shape):
        rows = slice(first, last) if step.order is None else step.order[first:last]
        found = native_gguf.dequantize(raw(first, last), step.type, value.shape[1])
        yield dequantize(value, rows), found


def _rounded(step: GgufStep) -> Iterator[Rounded]:
    """What is lost of the parts that are not stored exactly."""
    if step.added is not None:
        for against in (step.against or {}).values():
            sums = Squares()
            sums.add(*step.taken_back(step.source.read(0, step.source.rows)))
            what = str(against.lossy)
            yield Rounded(against.name, what, against.reason, sums.relative_error)
    for part in step.parts:
        if (obstacle := (step.against or {}).get(part.name)) is None:
            continue
        blocks, sums = _blocks(step, part), Squares()
        for source, found in _pieces(step, part, partial(_part, blocks)):
            there = np.isfinite(source)
            if not np.isfinite(found[there]).all():
                most = float(np.abs(source[there]).max())
                raise UnsupportedError(
                    f"{part.name}: has weights up to {most:.3g}, for which "
                    f"scales of {step.type.name}, float16, do not suffice"
                )
            sums.add(source, found)
        if not sums.same:
            what = str(obstacle.lossy)
            yield Rounded(part.name, what, obstacle.reason, sums.relative_error)


def _part(blocks: NDArray[np.uint8], first: int, last: int) -> NDArray[np.uint8]:
    return blocks[first:last]


def _rows(step: GgufStep) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """What is written: rows, and the number of their first."""
    first = 0
    for part in step.parts:
        raw = _blocks(step, part)
        yield first, np.ascontiguousarray(raw)
        first += len(raw)
    if not step.parts:
        yield from _plain_rows(step)


def _plain_rows(step: GgufStep) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    source = step.source
    count = max(1, _AT_ONCE // step.type.row_bytes(source.in_features))
    for first in range(0, source.rows, count):
        last = min(source.rows, first + count)
        yield first, np.ascontiguousarray(source.read(first, last))


def _compare(
    path: Path,
    layout: Layout,
    metadata: dict[str, Value],
    steps: list[GgufStep],
    progress: Progress,
) -> None:
    """Read the file back; FormatError where anything is not what it should be."""
    with GgufFile.open(path) as file:
        found = [(t.name, t.shape, t.type, t.start) for t in file.tensors.values()]
        wanted = [
            (spec.name, spec.shape, spec.type, start)
            for spec, start in zip(layout.tensors, layout.starts, strict=True)
        ]
        if found != wanted or dict(file.metadata) != metadata:
            raise FormatError(f"{path}: its header reads back otherwise than planned")
        for number in progress.blocks(len(steps), "comparison"):
            _compare_step(file, steps[number])


def _compare_step(file: GgufFile, step: GgufStep) -> None:
    name, start = step.source.name, 0
    for part in step.parts:
        rows = part.shape[0]
        read = partial(_read, file, name, start)
        start += rows
        if part.name in (step.against or {}):
            same = np.array_equal(read(0, rows), _blocks(step, part))
        else:
            same = all(np.array_equal(*pair) for pair in _pieces(step, part, read))
        if not (same and _near(step, part, read)):
            raise FormatError(
                f"{part.name}: reads back as other numbers than the checkpoint's; this is an "
                "error of qtool"
            )
    if step.added is not None and not step.against:
        back = step.taken_back(file.read_rows(name, 0, step.source.rows))
        if not np.array_equal(*back):
            raise FormatError(f"{name}: is not the checkpoint's with {step.added.add} added")
    if not step.parts:
        for first, plain in _plain_rows(step):
            if not np.array_equal(file.read_rows(name, first, first + len(plain)), plain):
                raise FormatError(f"{name}: reads back differently; the disk or memory is faulty")


def _near(step: GgufStep, part: Tensor, read: Callable[[int, int], NDArray[np.uint8]]) -> bool:
    """Whether numbers are the checkpoint's, but for their last bit, second scale and all."""
    if step.factors is None:
        return True
    assert part.read is not None
    number = step.parts.index(part) if len(step.factors) > 1 else 0
    value, factor = part.read(), step.factors[number]
    for first, last in spans(value.shape):
        there = dequantize(
            value, slice(first, last) if step.order is None else step.order[first:last]
        )
        here = native_gguf.dequantize(read(first, last), step.type, value.shape[1]) * factor
        if not (np.abs(here - there) <= np.float32(_LAST_BITS) * np.abs(there)).all():
            return False
    return True


def _read(file: GgufFile, name: str, start: int, first: int, last: int) -> NDArray[np.uint8]:
    return file.read_rows(name, start + first, start + last)
