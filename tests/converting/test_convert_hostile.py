"""Damaged artifacts: a conversion ends in a sentence, or in an artifact that says what it holds."""

import json
import random
import shutil
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from qtool.converting.certificate import Squares
from qtool.errors import QtoolError
from support.converting.converting import artifacts, converted, place, run

TO = ("awq", "awq-llm", "gptq", "gptq-v2", "compressed-tensors", "gguf", "gguf-q8_0", "hf")
CASES = {
    "awq": ("format=awq",),
    "gptq": ("format=gptq", "weights.symmetric=true"),
    "compressed-tensors": ("format=compressed-tensors",),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("artifacts")
    made = artifacts(root, CASES)
    return made | {"gguf": run(made["gptq"], "gguf", root / "file.gguf")}


def damage(path: Path, rng: random.Random) -> None:
    """A few other bytes, half of the time among the first ones, where headers are."""
    data = bytearray(path.read_bytes())
    end = len(data) if rng.random() < 0.5 else min(len(data), 6000)
    text = path.suffix == ".json"
    for _ in range(rng.randint(1, 4)):
        byte = rng.choice(b'0123456789"[]{},:-ntf') if text else rng.getrandbits(8)
        data[rng.randrange(end)] = byte
    path.write_bytes(data)


def copy_of(source: Path, to: Path, rng: random.Random) -> Path:
    if source.is_dir():
        shutil.copytree(source, to)
        damage(to / rng.choice(["model.safetensors", "config.json", "qtool.json"]), rng)
    else:
        shutil.copy(source, to)
        damage(to, rng)
    return to


@pytest.mark.parametrize(
    "count", [pytest.param(24, id="few"), pytest.param(600, marks=pytest.mark.slow, id="many")]
)
def test_damage_ends_in_a_sentence(count: int, sources: dict[str, Path], tmp_path: Path) -> None:
    rng = random.Random(count)
    ended: Counter[str] = Counter()
    for number in range(count):
        kind, to = rng.choice([*sources]), rng.choice(TO)
        folder = tmp_path / str(number)
        folder.mkdir()
        source = copy_of(sources[kind], folder / place(kind), rng)
        out = folder / place(f"{to}-out" if "gguf" not in to else "gguf-out")
        options = {"lossy": rng.random() < 0.5, "dtype": rng.choice([None, "float32", "float16"])}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                said = converted(source, to, out, **options)
            except QtoolError as error:
                assert str(error) and not out.exists()
                assert sorted(folder.iterdir()) == [source], (kind, to)
                ended["refused"] += 1
                continue
        json.dumps(said.json(), allow_nan=False)
        ended["made"] += 1
        shutil.rmtree(folder)
    assert min(ended["made"], ended["refused"]) > count // 8, ended


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("large", [2e19, 3e38])
def test_squares_beyond_float32_are_summed(large: float) -> None:
    """bfloat16 holds them, and damage makes them."""
    source = np.array([large, -large, np.inf, np.nan, 1], np.float32)
    sums = Squares()
    sums.add(source, np.array([-large, -large, np.inf, np.nan, 1], np.float32))
    assert not sums.same
    assert sums.relative_error == pytest.approx(np.sqrt(2), rel=1e-6)
