"""Runs of the whole pipeline in this process, with what was in memory kept for comparison."""

import json
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file
from safetensors.torch import save_file as save_torch

from qtool.artifacts.artifact import Artifact
from qtool.blockwise import one_block
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli import main as cli
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.messages.summary import Summary
from qtool.planning.plan import MAX_SHARD_BYTES
from qtool.quantizing import pipeline
from qtool.recipe.recipe import load
from qtool.runs.sink import Sink
from qtool.scheme import GroupQuant, joined
from support.models import arch_models

# Every character of a small vocabulary is a token, so that any model can have this tokenizer.
CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?()[]{}<>=+-*/_'\"#%\n"
)


@dataclass
class Run:
    """A finished run, and what it had in memory."""

    summary: Summary
    out: Path
    quants: dict[str, GroupQuant] = field(default_factory=dict)  # as given to the format
    weights: dict[str, NDArray[np.float32]] = field(default_factory=dict)  # of blocks, as run


def text_file(path: Path, characters: int = 40_000, seed: int = 0) -> Path:
    """Words drawn from a small dictionary: text enough, and not uniform."""
    rng = np.random.default_rng(seed)
    words = ["the", "model", "a", "weight", "is", "of", "Group", "and", "scale;", "x = 1\n", "(no)"]
    chosen = rng.choice(words, characters // 4)
    path.write_text(" ".join(chosen)[:characters], encoding="utf-8")
    return path


def add_tokenizer(folder: Path) -> Path:
    """A tokenizer.json of one id per character, for the models of arch_models."""
    vocabulary = {"<unk>": 0} | {c: number for number, c in enumerate(CHARACTERS, start=1)}
    assert len(vocabulary) <= arch_models.VOCABULARY
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated"}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": split | {"invert": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def build(name: str, folder: Path) -> Path:
    """A small random checkpoint of an architecture, with a tokenizer."""
    return add_tokenizer(arch_models.build(name, folder))


def first_block_of_tiny(folder: Path) -> Path:
    """`tiny` cut after its first block: a real tokenizer, and a quarter of the work."""
    return first_blocks_of_tiny(folder, 1)


def first_blocks_of_tiny(folder: Path, count: int) -> Path:
    """`tiny` cut after some of its blocks; made where it is not there yet."""
    if folder.exists():
        return folder
    folder.mkdir(parents=True)
    source = Checkpoint.open(tiny_folder())
    for file in source.side_files:
        (folder / file).write_bytes((source.folder / file).read_bytes())
    config = {**source.config, "num_hidden_layers": count}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = load_file(source.files[0])
    prefixes = tuple(f"model.layers.{n}." for n in range(count))
    kept = {n: t for n, t in tensors.items() if ".layers." not in n or n.startswith(prefixes)}
    save_torch(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def quantize(
    model: Path,
    recipe: str,
    out: Path,
    *sets: str,
    threads: int = 2,
    stats: Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    name: str | None = None,
) -> Run:
    """`qtool quantize` in this process; codes and final weights of the blocks are recorded."""
    request = pipeline.Request(
        model=name or str(model),
        source=model,
        recipe=load(recipe, sets),
        out=out,
        stats=stats,
        threads=threads,
        max_shard_bytes=max_shard_bytes,
    )
    parts: dict[str, list[GroupQuant]] = defaultdict(list)  # rows of each matrix, in turn
    weights: dict[str, NDArray[np.float32]] = {}
    pack, write_dense = Sink.packed, one_block._write_dense

    def record_quant(sink: Sink, planned: Any, quant: GroupQuant) -> Any:
        if planned.block is not None:
            parts[planned.name].append(quant)
        return pack(sink, planned, quant)

    def record_weights(plan: Any, index: int, block: Any, *rest: Any) -> None:
        weights.update({key: view.clone().numpy() for key, view in block.weights.items()})
        write_dense(plan, index, block, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sink, "packed", record_quant)
        patch.setattr(one_block, "_write_dense", record_weights)
        summary = pipeline.run(request, Progress(quiet=True))
    quants = {name: p[0] if len(p) == 1 else joined(p) for name, p in parts.items()}
    return Run(summary, out, quants, weights)


def assert_reads_back(run: Run) -> None:
    """Every matrix has the codes, zeros and scales that were in memory, bit for bit; but for MLX's
    head and embedding, of which rows are in memory in turn.

    A g_idx that says no more than k // group_size may be absent on either side.
    """
    artifact = Artifact.open(run.out)
    packed = {name for name, entry in artifact.entries.items() if entry.scheme is not None}
    outside = packed - run.quants.keys()
    assert run.quants and run.quants.keys() <= packed
    assert not outside or run.summary.format == "mlx"
    assert not any(".layers." in name for name in outside)
    for name, expected in run.quants.items():
        found = artifact.read(name)
        assert isinstance(found, GroupQuant) and found.scheme == expected.scheme, name
        for part in ("codes", "scale", "zero"):
            left, right = getattr(found, part), getattr(expected, part)
            assert left.dtype == right.dtype and left.tobytes() == right.tobytes(), (name, part)
            assert left.shape == right.shape, (name, part)
        assert np.array_equal(found.group_index(), expected.group_index()), name


def write_dense(artifact: Path, folder: Path) -> Path:
    """The artifact dequantized, as an ordinary checkpoint in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: np.ascontiguousarray(v) for name, v in Artifact.open(artifact).dequantized()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((artifact / "config.json").read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def files(folder: Path) -> dict[str, bytes]:
    """Every file of a folder, by its relative name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@dataclass(frozen=True)
class Called:
    """What a call of the command line said."""

    status: int
    out: str
    err: str


Call = Callable[..., Called]


def caller(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    """call("quantize", folder, ...) runs the `qtool` command's own main() in this process."""

    def call(*arguments: object) -> Called:
        monkeypatch.setattr(sys, "argv", ["qtool", *map(str, arguments)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capfd.readouterr()
        return Called(int(caught.value.code or 0), out, err)

    return call
