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
import math
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

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
sys.path.append(str(HERE.parents[1]))  # where no package is installed

SECONDS, BYTES = 1.0, 100e6
_TRIED: Counter[str] = Counter()
# Numbers at which readers have gone wrong.
NUMBERS = [
    *(0, 1, 2, 3, 7, 8, 9, 12, 13, 31, 32, 33, 255, 256, 4096, 65535, 65536, 2**31 - 1, 2**31),
    *(2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 32, 2**64 - 8, 2**64 - 1),
]


def true_file(choose: random.Random) -> bytes:
    """A file without a lie, of all kinds of values and types."""
    from gguf_bytes import Gguf, array, entry, info

    from qtool.formats.gguf_values import STRUCT, Kind
    from qtool.gguf_types import TENSOR_TYPES

    def value(kind: Kind) -> object:
        if kind is Kind.STRING:
            return choose.choice(["", "a", "Ġthe", "x" * choose.randrange(300), "\0", b"\xff\xc3"])
        return struct.unpack(
            "<" + STRUCT[kind],
            bytes(choose.randrange(2 if kind is Kind.BOOL else 256) for _ in range(8))[
                : struct.calcsize("<" + STRUCT[kind])
            ],
        )[0]

    keys = ["general.architecture", "general.name", "general.file_type", "general.type",
            "split.no", "split.count", "tokenizer.ggml.tokens", "tokenizer.ggml.model",
            "tokenizer.ggml.bos_token_id", "imatrix.chunk_count", "imatrix.chunk_size",
            "imatrix.datasets", "quantize.imatrix.file", "tokenizer.chat_template",
            "qtool.version"]  # fmt: skip
    kinds = [kind for kind in Kind if kind is not Kind.ARRAY]
    entries = [entry("general.architecture", Kind.STRING, "llama")]
    if choose.random() < 0.2:
        entries.append(entry("general.type", Kind.STRING, choose.choice(["imatrix", "adapter"])))
    width = 2 ** choose.randrange(8) if choose.random() < 0.2 else 32
    if width != 32:
        entries.append(entry("general.alignment", Kind.UINT32, width))
    for number in range(choose.randrange(6)):
        key = choose.choice(keys[1:]) if choose.random() < 0.5 else f"key.{number}"
        if any(key.encode() in one for one in entries):
            continue
        kind = choose.choice(kinds)
        if choose.random() < 0.4:
            entries.append(array(key, kind, [value(kind) for _ in range(choose.randrange(12))]))
        else:
            entries.append(entry(key, kind, value(kind)))
    infos, data = [], b""
    for number in range(choose.randrange(6)):
        block = choose.choice(list(TENSOR_TYPES.values()))
        shape = [choose.randrange(1, 4) for _ in range(choose.randrange(3))]
        suffix = choose.choice(["weight", "weight.counts", "weight.in_sum2"])
        shape.append(choose.randrange(1, 4) * block.weights)
        infos.append(info(f"blk.{number}.{suffix}", shape, block.number, len(data)))
        size = math.prod(shape) // block.weights * block.nbytes
        data += choose.randbytes(size) + bytes(-size % width)
    version = choose.choice([2, 3])
    return bytes(Gguf(entries, infos, data, version=version, alignment=width))


def wrong_model(choose: random.Random) -> bytes:
    """A whole model, but for some keys and tensors."""
    import gguf_small
    from gguf_small import ARCHITECTURES, TOKENIZERS

    from qtool.formats.gguf_values import STRUCT, Kind
    from qtool.gguf_types import TENSOR_TYPES

    plain = [kind for kind in Kind if kind is not Kind.ARRAY]
    blocks = choose.choice([1, 1, 2])
    tokenizer = choose.choice(list(TOKENIZERS))
    keys, tensors = gguf_small.model(choose.choice(ARCHITECTURES), tokenizer, blocks)
    types = {}

    def value(kind: Kind) -> object:
        if kind is Kind.STRING:
            words = ["", "a", "llama", "gpt2", "default", "yarn", "linear", "longrope", "0", "\0"]
            return choose.choice(words)
        if kind in (Kind.FLOAT32, Kind.FLOAT64):
            return choose.choice([0.0, 1.0, -1.0, 0.5, 4.0, 1e-30, 3e38, math.inf, math.nan])
        if kind is Kind.BOOL:
            return choose.random() < 0.5
        size = 8 * struct.calcsize(STRUCT[kind])
        number = choose.choice([0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 1000, *NUMBERS]) % 2**size
        return (
            number - 2**size
            if kind.name.startswith("INT") and number >= 2 ** (size - 1)
            else number
        )

    for _ in range(choose.choice([0, 1, 1, 1, 2, 2, 3, 6])):
        lie = choose.randrange(10)
        key = choose.choice(list(keys))
        name = choose.choice(list(tensors))
        if lie <= 2:
            same = keys[key][0] if choose.random() < 0.6 else Kind.ARRAY
            kind = choose.choice(plain) if same is Kind.ARRAY else same
            keys[key] = (kind, value(kind))
        elif lie == 3:
            kind = choose.choice(plain)
            count = choose.choice([0, 1, 2, 8, 200])
            keys[key] = (Kind.ARRAY, kind, [value(kind) for _ in range(count)])
        elif lie == 4:
            del keys[key]
        elif lie == 5:
            own = str(keys.get("general.architecture", (0, "llama"))[1])
            kind = choose.choice(plain)
            keys[choose.choice(MORE_KEYS).replace("ARCH", own)] = (kind, value(kind))
        elif lie == 6:
            del tensors[name]
        elif lie == 7:
            old = tensors.pop(name)
            instead = [name.replace("weight", "bias"), name.replace("blk.0.", "blk.1."), "x.weight",
                       "rope_freqs.weight", "rope_factors_long.weight"]  # fmt: skip
            tensors[choose.choice(instead)] = old
        elif lie == 8:
            shape = list(tensors[name])
            at = choose.randrange(len(shape))
            shape[at] = max(1, choose.choice([1, 2, 31, 32, shape[at] - 1, 2 * shape[at]]))
            extra = choose.choice([(), (), (), (1,), (3,), (1, 2)])
            tensors[name] = (*extra, *shape)[-4:]
        else:
            kind_of = choose.choice(list(TENSOR_TYPES.values()))
            if tensors[name][-1] % kind_of.weights == 0:
                types[name] = kind_of
        if not keys or not tensors:
            break
    fitting = {n: t for n, t in types.items() if n in tensors and tensors[n][-1] % t.weights == 0}
    return gguf_small.content(keys, tensors, fitting)


# Keys that a model may have beyond its own.
MORE_KEYS = [
    *(f"ARCH.{key}" for key in (
        "attention.key_length", "attention.value_length", "attention.sliding_window",
        "attention.sliding_window_pattern", "attn_logit_softcapping", "expert_count",
        "expert_used_count", "expert_feed_forward_length", "final_logit_softcapping",
        "nextn_predict_layers", "rope.dimension_count", "rope.freq_base", "rope.freq_base_swa",
        "rope.scaling.attn_factor", "rope.scaling.factor", "rope.scaling.finetuned",
        "rope.scaling.original_context_length", "rope.scaling.type", "rope.scaling.yarn_ext_factor",
        "tensor_data_layout", "use_parallel_residual", "vocab_size", "anything")),
    *(f"tokenizer.ggml.{key}" for key in (
        "add_bos_token", "add_eos_token", "add_space_prefix", "bos_token_id", "eos_token_id",
        "eot_token_id", "merges", "model", "padding_token_id", "pre", "precompiled_charsmap",
        "remove_extra_whitespaces", "scores", "token_type", "tokens", "unknown_token_id")),
    "general.architecture", "general.name", "general.file_type", "general.alignment",
    "general.quantization_version", "general.type", "tokenizer.chat_template",
    "tokenizer.chat_template.x", "tokenizer.chat_templates", "qtool.recipe", "qtool.version",
    "quantize.imatrix.file",
]  # fmt: skip
_RECIPES = ("q4_k_m", "q2_k", "iq2_xs", "f16", "q8_0")


def use(file: "object") -> None:
    """What a model is taken for by every command that reads one; QtoolErrors are answers."""
    from qtool.errors import QtoolError
    from qtool.formats.gguf_file import GgufFile
    from qtool.gguf.convert import side_files
    from qtool.gguf.from_gguf import gguf_source
    from qtool.gguf.importance import first_token
    from qtool.gguf.plan import make_gguf_plan
    from qtool.gguf.to_hf import hf_model
    from qtool.gguf.tokenizer_files import tokenizer_files
    from qtool.gguf.weights import with_origins

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
    from qtool.calibrating import measure
    from qtool.errors import QtoolError
    from qtool.gguf.open import open_source
    from qtool.gguf.weights import gguf_weights
    from qtool.recipe.recipe import Calibration
    from qtool.runs.progress import Progress

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
                measure.measure_importance(weights, source, given, 1, Progress(quiet=True))
            _TRIED["accepted"] += 1
        except QtoolError as error:
            _told(error)
            _TRIED["refused"] += 1
        except BaseException:
            Path("failed-measured.gguf").write_bytes(content)
            raise


def _told(error: Exception) -> None:
    from qtool.printable import printable

    message = printable(str(error))  # as main() shows it
    assert len(message) < 2000, message


def lied(content: bytes, choose: random.Random) -> bytes:
    """The file with a lie more; in the header more often than behind it."""
    raw = bytearray(content)
    if not raw:
        return b"GGUF"
    at = choose.randrange(min(len(raw), choose.choice([32, 256, 2048, len(raw)])))
    kind = choose.randrange(9)
    if kind <= 3:  # a number, at any place and of any width
        number = choose.choice([*NUMBERS, len(raw), len(raw) - at, choose.getrandbits(64)])
        width = choose.choice([1, 4, 4, 8, 8])
        raw[at : at + width] = (number % 256**width).to_bytes(width, "little")
    elif kind == 4:
        raw[at] ^= 1 << choose.randrange(8)
    elif kind == 5:
        del raw[at:]
    elif kind == 6:
        del raw[at : at + choose.choice([1, 4, 8, 16, 33])]
    elif kind == 7:  # a piece once more, or another one in its place
        length = choose.choice([8, 16, 40, 100])
        to = choose.randrange(len(raw))
        raw[to : to + choose.choice([0, length])] = raw[at : at + length]
    else:
        raw[at:at] = choose.choice([b"\0" * 8, choose.randbytes(13), b"GGUF", b"\xff" * 8])
    return bytes(raw)


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
    import gguf_small

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
    from gguf_bytes import Gguf, entry, info

    from qtool.formats.gguf_values import Kind

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
