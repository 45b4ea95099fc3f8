"""Fuzzing what reads GGUF: nothing but a QtoolError may come out, soon and in little memory.

    python tests/fuzz/fuzz_gguf.py [--seconds 60] [--seed 0] [--atheris | --measure] [FILE ...]

Files are made by `gguf_bytes` at random, true ones, and then told lies: a number of the header
replaced, pieces cut, doubled or moved, bits flipped, a hole of gigabytes behind the end. What is
accepted has to keep its promises: tensors inside the file and apart, arrays that decode and encode
to their own bytes, rows that can be read, an inspection that prints. Half of the files are whole
models with a few keys or tensors that are not as they should be, and of every model that is
accepted plans are made, config.json, tokenizer files and a checkpoint's tensors. With --atheris
libFuzzer chooses the lies by what they reach in the reader (it has to be installed for this
Python). With --measure all are such models, and transformers runs those that are accepted. A FILE
is only tried. Exit status 1 at the first failure, whose file is kept in the working directory.
"""

import argparse
import functools
import itertools
import json
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from gguf_made import lied, true_file, wrong_model

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.append(str(HERE.parents[1]))  # where no package is installed

SECONDS, BYTES = 1.0, 100e6
_TRIED: Counter[str] = Counter()
_RECIPES = ("q4_k_m", "q2_k", "iq2_xs", "f16", "q8_0")


def use(file: "object") -> None:
    """What a model is taken for by every command that reads one; QtoolErrors are answers."""
    from qtool.errors import QtoolError
    from qtool.formats.gguf_file import GgufFile
    from qtool.gguf.from_gguf import gguf_source
    from qtool.gguf.importance.measured import first_token
    from qtool.gguf.to_hf.files import side_files
    from qtool.gguf.to_hf.model import hf_model
    from qtool.gguf.to_hf.weights import with_origins
    from qtool.gguf.tokenizer.files import tokenizer_files
    from qtool.planning.gguf.plan import make_gguf_plan

    assert isinstance(file, GgufFile)
    try:
        source = gguf_source(file)
    except QtoolError as error:
        return _told(error)
    number = len(source.metadata) + len(source.tensors)  # one way for each file, of all of them
    try:
        plan = make_gguf_plan(_recipe(_RECIPES[number % len(_RECIPES)]), source, requantize=True)
        json.loads(json.dumps(plan.json()), parse_constant=_no_constant)
        assert plan.size_bytes > plan.tensor_bytes
    except QtoolError as error:
        _told(error)
    first = first_token(source)
    assert first is None or isinstance(first, int)
    try:
        tokenizer_files(source.metadata)
    except QtoolError as error:
        _told(error)
    try:
        model = hf_model(source, (None, "bfloat16", "float16")[number % 3])
        with_origins(source, model)
        json.loads(side_files(source, model)["config.json"], parse_constant=_no_constant)
        if sum(tensor.source.nbytes for tensor in model.tensors) < 1 << 20:
            for tensor in model.tensors:
                made = dict(tensor.arrays())
                lengths = [len(made[spec.name]) for spec in tensor.specs]
                assert lengths == [spec.nbytes for spec in tensor.specs]
    except QtoolError as error:
        return _told(error)
    _TRIED["converted"] += 1


@functools.cache
def _recipe(name: str) -> Any:
    from qtool.recipe.recipe import load

    return load(name)


def measured(seconds: float, seed: int, path: Path) -> None:
    """Wrong models only, and those that are accepted are run by transformers on a few tokens."""
    from qtool.errors import QtoolError
    from qtool.gguf.open import open_source
    from qtool.gguf.to_hf.weights import gguf_weights
    from qtool.messages.progress import Progress
    from qtool.quantizing.gguf.measure import measure_importance
    from qtool.recipe.recipe import Calibration

    choose = random.Random(seed)
    text = path.with_name("text.txt")
    text.write_text("ab a cd " * 300)
    given = Calibration(source=str(text), samples=1, length=8)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        content = wrong_model(choose)
        path.unlink(missing_ok=True)
        path.write_bytes(content)
        try:
            with gguf_weights(open_source(path)) as (weights, source):
                measure_importance(weights, source, given, 1, Progress(quiet=True))
            _TRIED["accepted"] += 1
        except QtoolError as error:
            _told(error)
            _TRIED["refused"] += 1
        except BaseException:
            Path("failed-measured.gguf").write_bytes(content)
            raise


def _told(error: Exception) -> None:
    from qtool.messages.printable import printable

    message = printable(str(error))  # as main() shows it
    assert len(message) < 2000, message


def attempt(path: Path) -> str:
    """Open the file and use it in every way; says how it went. Raises where that went wrong."""
    from qtool.errors import QtoolError
    from qtool.formats.gguf_file import GgufFile

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        with GgufFile.open(path) as file:
            keep_promises(file)
            use(file)
        outcome = "accepted"
    except QtoolError as error:
        _told(error)
        outcome = "refused"
    took = time.process_time() - start
    unit = 1 if sys.platform == "darwin" else 1024
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    assert took < SECONDS, f"{took:.2f} s"
    assert grown < BYTES, f"{grown / 1e6:.0f} MB"
    return outcome


def keep_promises(file: "object") -> None:
    """What was accepted is as the reader says."""
    from qtool.formats.gguf_arrays import StoredArray
    from qtool.formats.gguf_file import GgufFile
    from qtool.formats.gguf_values import STRUCT, Kind
    from qtool.gguf.inspect import GgufInspection, tensor_detail
    from qtool.gguf.inspect_text import detail_lines, summary, tables

    assert isinstance(file, GgufFile)
    ends = dict.fromkeys(file.files, 0)
    for one in sorted(file.tensors.values(), key=lambda tensor: tensor.start):
        assert ends[one.file] <= one.start and one.nbytes > 0
        ends[one.file] = one.start + one.nbytes
        assert ends[one.file] <= one.file.stat().st_size and one.rows * one.row_bytes == one.nbytes
        if one.nbytes < 1 << 20:
            rows = file.read_rows(one.name, 0, one.rows)
            assert rows.shape == (one.rows, one.row_bytes)
            assert all(line.isprintable() for line in detail_lines(tensor_detail(file, one.name)))
    for value in file.metadata.values():
        array = value.value
        if not isinstance(array, StoredArray):
            continue
        if array.kind is Kind.STRING:
            raw = [text.encode("utf-8", "surrogateescape") for text in array]
            again = b"".join(struct.pack("<Q", len(text)) + text for text in raw)
        else:
            again = struct.pack(f"<{len(array)}{STRUCT[array.kind]}", *array)
        # A NaN with a message comes back as some NaN.
        floats = array.kind in (Kind.FLOAT32, Kind.FLOAT64)
        assert again == array.stored or (floats and len(again) == array.nbytes)
    found = GgufInspection(file)
    json.loads(json.dumps(found.json()), parse_constant=_no_constant)
    shown = [text for line in summary(found) for text in line]
    shown += [cell for table in tables(found, True) for row in table.rows for cell in row]
    assert all(text.isprintable() for text in shown)


def _no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def _try(path: Path, content: bytes, hole: int = 0) -> str:
    """Write and try it; a failure is kept."""
    path.unlink(missing_ok=True)  # some file systems flush a file that is written over
    with open(path, "wb") as file:
        file.write(content)
        if hole:
            file.truncate(len(content) + hole)
    try:
        outcome = attempt(path)
    except BaseException:
        kept = Path(f"failed-{len(content)}-{hole}.gguf")
        kept.write_bytes(content)
        print(f"failed: {kept}, followed by a hole of {hole} bytes", file=sys.stderr)
        raise
    _TRIED[outcome] += 1
    return outcome


def own(seconds: float, seed: int, path: Path, most: int | None = None) -> None:
    """At most so many lies by chance, the same for the same seed; what was accepted is lied about
    further."""
    choose = random.Random(seed)
    pool = [true_file(choose) for _ in range(200)]
    _warm(path)
    for content in pool:
        assert _try(path, content) == "accepted" or b"split.count" in content
    end = time.monotonic() + seconds
    for _ in range(most) if most is not None else itertools.count():
        if time.monotonic() > end:
            break
        if choose.random() < 0.5:
            _try(path, wrong_model(choose))
        if choose.random() < 0.05:
            make = choose.choice([true_file, wrong_model])
            pool[choose.randrange(len(pool))] = make(choose)
        content = choose.choice(pool)
        for _ in range(choose.choice([1, 1, 1, 2, 3, 6])):
            content = lied(content, choose)
        hole = 1 << choose.randrange(20, 37) if choose.random() < 0.02 else 0
        if _try(path, content, hole) == "accepted" and choose.random() < 0.2:
            pool[choose.randrange(len(pool))] = content
        if choose.random() < 0.05:
            _try_split(path.parent, choose)


def _warm(path: Path) -> None:
    """Whole models, which are imported for, and are converted without a word."""
    from support.gguf import gguf_small

    before = _TRIED["converted"]
    for architecture in gguf_small.ARCHITECTURES:
        for tokenizer in gguf_small.TOKENIZERS:
            path.write_bytes(gguf_small.content(*gguf_small.model(architecture, tokenizer)))
            with _opened(path) as file:
                use(file)
    whole = len(gguf_small.ARCHITECTURES) * len(gguf_small.TOKENIZERS)
    assert _TRIED["converted"] == before + whole


def _opened(path: Path) -> AbstractContextManager[object]:
    from qtool.formats.gguf_file import GgufFile

    return GgufFile.open(path)


def _try_split(folder: Path, choose: random.Random) -> None:
    """A true model of two parts, and lies about one of them."""
    from qtool.formats.gguf_values import Kind
    from support.gguf.gguf_bytes import Gguf, entry, info

    paths = [folder / f"s-0000{number}-of-00002.gguf" for number in (1, 2)]
    whole = []
    for number in range(2):
        entries = [
            entry("split.no", Kind.UINT16, number),
            entry("split.count", Kind.UINT16, 2),
            entry("split.tensors.count", Kind.INT32, 2),
            entry("general.architecture", Kind.STRING, "llama"),
        ]
        whole.append(bytes(Gguf(entries, [info(f"t{number}", [2, 4])])))
    for path, content in zip(paths, whole, strict=True):
        path.write_bytes(content)
    one = choose.randrange(2)
    assert _try(paths[one], whole[one]) == "accepted"
    for _ in range(20):
        paths[1 - one].unlink()
        paths[1 - one].write_bytes(lied(whole[1 - one], choose))
        _try(paths[one], whole[one])


def guided(seconds: float, seed: int, path: Path, folder: Path) -> None:
    """libFuzzer's choice of lies; never returns."""
    import atheris

    # What coverage is counted of has to be imported under its eyes.
    with atheris.instrument_imports(include=["qtool.formats", "qtool.gguf"]):
        import qtool.formats.gguf_arrays
        import qtool.formats.gguf_cursor
        import qtool.formats.gguf_file
        import qtool.formats.gguf_header
        import qtool.gguf.inspect
        import qtool.gguf.inspect_text  # noqa: F401

    choose = random.Random(seed)
    corpus = folder / "corpus"
    corpus.mkdir()
    for number in range(200):
        (corpus / f"{number}").write_bytes((true_file, wrong_model)[number % 2](choose))
    _warm(path)

    def one(data: bytes) -> None:
        _try(path, data)

    def lie(data: bytes, most: int, lie_seed: int) -> bytes:
        choice = random.Random(lie_seed)
        if choice.random() < 0.5:
            return lied(bytes(data), choice)[:most]
        mutated: bytes = atheris.Mutate(data, most)
        return mutated

    options = [f"-max_total_time={seconds:.0f}", f"-seed={seed + 1}", "-max_len=60000",
               "-timeout=10", "-print_final_stats=1"]  # fmt: skip
    atheris.Setup([sys.argv[0], *options, str(corpus)], one, custom_mutator=lie)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--measure", action="store_true", help="run the models that are accepted")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    for file in options.files:
        print(f"{file}: {attempt(file)}")
    if options.files:
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.atheris:
            guided(options.seconds, options.seed, folder / "m.gguf", folder)
        elif options.measure:
            measured(options.seconds, options.seed, folder / "m.gguf")
        else:
            own(options.seconds, options.seed, folder / "m.gguf")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    counts = ", ".join(f"{count:,} {outcome}" for outcome, count in sorted(_TRIED.items()))
    tried = _TRIED["accepted"] + _TRIED["refused"]
    print(f"{tried:,} files: {counts}; no failure; peak {peak:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
