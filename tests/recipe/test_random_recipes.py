"""Recipes drawn at random: what `plan` takes is made, passes `verify`, is read, measured, made
again and converted; what it refuses `quantize` refuses in the same words and leaves nothing."""

import json
import random
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from qtool import schemas
from qtool.errors import QtoolError
from qtool.recipe.recipe import load
from support.recipe import random_recipes
from support.runs import quantizing
from support.runs.quantizing import Call, Called

ARCHITECTURES = (
    "llama", "qwen3", "gemma3", "phi3", "opt", "gpt_neox", "mixtral", "qwen3_moe", "stablelm",
)  # fmt: skip
TARGETS = ("awq", "gptq", "gptq-v2", "compressed-tensors", "gguf", "gguf-q8_0", "hf")
# What plans cannot know.
_LATER = "was never seen in calibration"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    quantizing.text_file(folder / "text.txt")
    return folder


def model_of(root: Path, name: str) -> Path:
    folder = root / "models" / name
    if not folder.exists():
        if name == "tiny":
            return quantizing.first_block_of_tiny(folder)
        folder.parent.mkdir(exist_ok=True)
        quantizing.build(name, folder)
    return folder


def gguf_of(root: Path, call: Call) -> Path:
    """The same as model_of(root, "tiny"), as a GGUF file."""
    out = root / "tiny.gguf"
    if not out.exists():
        done = call("quantize", model_of(root, "tiny"), "--recipe", "f32", "-o", out)
        assert done.status == 0, done.err
    return out


def recipe_file(rng: random.Random, path: Path) -> Mapping[str, Any]:
    """The first recipe drawn that makes sense by itself."""
    while True:
        drawn = random_recipes.drawn(rng)
        path.write_text(yaml.safe_dump(drawn, sort_keys=False), encoding="utf-8")
        try:
            load(str(path))
        except QtoolError:
            continue
        return drawn


def said(command: str, called: Called) -> dict[str, Any]:
    """What --json says, which keeps to its schema."""
    found: dict[str, Any] = json.loads(called.out)
    jsonschema.validate(found, json.loads(schemas.text(command)))
    return found


def errors_of(verified: Called) -> list[str]:
    """Which checks of `verify --json` failed."""
    findings = said("verify", verified)["findings"]
    return [found["check"] for found in findings if found["severity"] == "error"]


def sentences(failed: Called) -> int:
    """How many say what is wrong; other lines say how far it came."""
    lines = failed.err.strip().splitlines()
    assert failed.status in (1, 2) and lines[-1].startswith("error: "), failed.err
    return sum(line.startswith("error: ") for line in lines)


def follow(seed: int, root: Path, call: Call, tmp_path: Path) -> str:
    """One recipe's way; `made` or `refused`."""
    rng = random.Random(seed)
    path, text = tmp_path / "recipe.yaml", root / "text.txt"
    drawn = recipe_file(rng, path)
    name = "tiny" if rng.random() < 0.5 else rng.choice(ARCHITECTURES)
    from_gguf = name == "tiny" and rng.random() < 0.3
    model = gguf_of(root, call) if from_gguf else model_of(root, name)
    is_gguf = drawn["format"] == "gguf"
    calibration = ["--calibration", text] if load(str(path)).calibrates else []

    folder = tmp_path / "made"
    folder.mkdir()
    out = folder / ("out.gguf" if is_gguf else "out")
    planned = call("plan", model, "--recipe", path, "--json")
    done = call(
        "quantize", model, "--recipe", path, "-o", out, *calibration,
        "--threads", rng.choice([1, 2]), "--json",
    )  # fmt: skip
    if done.status:
        assert (planned.status, done.status) in {(1, 1), (2, 2)} or _LATER in done.err, done.err
        assert planned.status == 0 or planned.err == done.err
        assert sentences(done) == 1 and not list(folder.iterdir())
        return "refused"
    assert planned.status == 0, planned.err
    expected, made = said("plan", planned)["size_bytes"], said("quantize", done)["size_bytes"]
    assert expected == made or is_gguf  # whose calibration and scales are recorded in the file

    against = ["--against", model] if name == "tiny" else []  # random weights say too little
    found = errors_of(call("verify", out, *against, "--json"))
    # Overrides may split what engines fuse: the plan warned.
    assert not found or (set(found) == {"fused"} and "fuse" in done.out), found
    assert said("inspect", call("inspect", out, "--json"))["size_bytes"]
    if rng.random() < 0.3:
        measured = call(
            "eval", out, "--against", model, "--text", text, "--windows", 2, "--length", 48,
            "--json",
        )  # fmt: skip
        assert measured.status == 0 and said("eval", measured), measured.err
    if rng.random() < 0.3:
        again = call("reproduce", out, "--model", model, *calibration, "--json")
        assert again.status == 0 and said("reproduce", again), (again.out, again.err)
    to = rng.choice(TARGETS)
    other = folder / ("other.gguf" if "gguf" in to else "other")
    lossy = rng.choice([[], ["--lossy"]])
    converted = call("convert", out, "--to", to, "-o", other, *lossy, "--json")
    if converted.status == 0:
        assert said("convert", converted)["compared"]
        assert {*errors_of(call("verify", other, "--json"))} <= {*found}
    else:
        assert sentences(converted) == 1 and not other.exists()
    return "made"


def sweep(seeds: range, root: Path, call: Call, tmp_path: Path) -> list[str]:
    """Several, each in a folder of its own."""
    ended = []
    for seed in seeds:
        folder = tmp_path / str(seed)
        folder.mkdir()
        try:
            ended.append(follow(seed, root, call, folder))
        except AssertionError as error:
            error.add_note(f"seed {seed}: {(folder / 'recipe.yaml').read_text()}")
            raise
        shutil.rmtree(folder)
    return ended


@pytest.mark.filterwarnings("error")
def test_a_few_random_recipes(root: Path, call: Call, tmp_path: Path) -> None:
    ended = sweep(range(1, 9), root, call, tmp_path)
    assert {*ended} == {"made", "refused"}


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("chunk", range(8))
def test_many_random_recipes(chunk: int, root: Path, call: Call, tmp_path: Path) -> None:
    ended = sweep(range(1000 + 40 * chunk, 1040 + 40 * chunk), root, call, tmp_path)
    assert min(ended.count("made"), ended.count("refused")) > 5
