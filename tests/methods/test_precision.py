"""calibration.precision: which products are made in bfloat16, and what is recorded of it."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from qtool.blockwise import head, row_feedback
from qtool.calibrating import guidance, placed
from qtool.calibrating.stats_file import StatsFile
from qtool.gradients import measure as sensitivities
from qtool.messages.progress import Progress
from qtool.methods import gptq
from qtool.provenance import embedded
from qtool.streaming import precision
from qtool.streaming.precision import has_bfloat16, matmuls_in, settled
from qtool.streaming.skeleton import Skeleton
from qtool.texts.calibration import Calibration
from qtool.transforms import awq, chain
from support.methods.precise_runs import ASKED, SMALL, now
from support.runs import quantizing
from support.runs.killed_runs import Died, dying
from support.runs.quantizing import Call, first_block_of_tiny, first_blocks_of_tiny, text_file

PASSES = (
    (placed, "collect"),
    (guidance, "_gradients"),
    (row_feedback, "_sums"),
    (sensitivities, "_through_block"),
    (sensitivities, "through_head"),
    (head, "gram_of"),
    (Skeleton, "advance"),
)
SOLVES = ((gptq, "factor"), (awq, "search"), (chain, "apply_in_turn"))


@pytest.fixture
def made_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, set[str]]]:
    """The precision of products of matrices in what is called; on a CPU that is said to have
    bfloat16."""
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    found: dict[str, set[str]] = defaultdict(set)
    for owner, name in (*PASSES, *SOLVES):

        def seen(*given: Any, name: str, real: Callable[..., Any], **named: Any) -> Any:
            found[name].add(now())
            return real(*given, **named)

        real = getattr(owner, name)
        told = partialmethod if owner is Skeleton else partial
        monkeypatch.setattr(owner, name, told(seen, name=name, real=real))
    before = now()
    yield found
    assert now() == before


def test_products_are_of_the_precision_within_and_as_before_after() -> None:
    before = now()
    with matmuls_in("float32"):
        assert now() == "ieee"
    with pytest.raises(ZeroDivisionError), matmuls_in("bfloat16"):
        assert now() == "bf16"
        with matmuls_in("float32"):
            assert now() == "ieee"
        assert now() == "bf16"
        raise ZeroDivisionError
    assert now() == before


def test_a_product_is_that_of_rounded_factors_where_the_cpu_has_it() -> None:
    random = torch.Generator().manual_seed(0)
    x, w = torch.randn(96, 80, generator=random), torch.randn(48, 80, generator=random)
    with matmuls_in("bfloat16"):
        found = F.linear(x, w)
    rounded = [one.bfloat16().double() if has_bfloat16() else one.double() for one in (x, w)]
    wanted = rounded[0] @ rounded[1].T
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_sums_are_of_products_of_rounded_inputs(tmp_path: Path, call: Call) -> None:
    """The first norm's output is the same in any precision, and its Gram matrix tells."""
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    own = ("--recipe", "w4g32-gptq", "--calibration", text, *SMALL)
    for name in ("float32", "bfloat16"):
        out = ("-o", tmp_path / name, "--precision", name)
        assert call("calibrate", model, *own, *out).status == 0
    saved = {name: StatsFile.open(tmp_path / name) for name in ("float32", "bfloat16")}
    records = {name: json.loads(one.metadata["calibration"]) for name, one in saved.items()}
    assert "precision" not in records["float32"]
    said = {"precision": "bfloat16"} if has_bfloat16() else {}
    assert records["bfloat16"] == {**records["float32"], **said}

    def grams(name: str) -> list[np.ndarray[Any, Any]]:
        module = f"model.layers.0.{name}.weight"
        found = [saved[one].read(module, ["gram"]).gram for one in saved]
        assert found[0] is not None and found[1] is not None
        return [one for one in found if one is not None]

    finer, coarser = grams("self_attn.q_proj")
    apart = np.abs(finer - coarser).max() / np.abs(finer).max()
    assert (1e-6 < apart < 1e-2) if has_bfloat16() else apart == 0
    diagonal = np.diagonal(coarser).astype(np.float64)
    np.testing.assert_allclose(diagonal, np.diagonal(finer), rtol=1e-2)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        ("w4g32-gptq", ["gptq.yaqa=2", "gptq.guided=0.5", "transforms=[awq]"]),
        ("q4_k_m-awq-gptq", []),
    ],
)
def test_passes_are_made_in_it_and_solves_are_not(
    recipe: str, more: list[str], tmp_path: Path, call: Call, made_in: dict[str, set[str]]
) -> None:
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    out = tmp_path / ("out.gguf" if recipe.startswith("q4") else "out")
    sets = [part for one in (*more, ASKED) for part in ("--set", one)]
    given = ("quantize", model, "--recipe", recipe, "--calibration", text, *SMALL, "-o", out)
    made = call(*given, *sets)
    assert made.status == 0, made.err
    passes = {name for _, name in PASSES} - ({"gram_of"} if recipe.startswith("w4") else set())
    assert {name: made_in[name] for name in passes} == {name: {"bf16"} for name in passes}
    assert made_in["factor"] and made_in["search"]
    assert not {one for _, name in SOLVES for one in made_in[name]} - {"none", "ieee"}


def test_artifacts_say_so_and_are_reproduced(tmp_path: Path, call: Call) -> None:
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    own = ("--calibration", text, *SMALL)
    for recipe, name in (("w4g32-gptq", "folder"), ("q4_k_m-awq-gptq", "file.gguf")):
        out = tmp_path / name
        made = call("quantize", model, "--recipe", recipe, "--set", ASKED, *own, "-o", out)
        assert made.status == 0, made.err
        assert ("precision has no effect: this CPU" in made.err) == (not has_bfloat16())
        again = call("reproduce", out, "--model", model, "--calibration", text)
        assert again.status == 0, again.err
        record = embedded.read(out)
        assert record.recipe["calibration"]["precision"] == "bfloat16"
        assert record.calibration is not None
        assert record.calibration.get("precision") == ("bfloat16" if has_bfloat16() else None)


def test_other_products_are_another_environment(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    own = ("--calibration", text, *SMALL)
    for recipe, name in (("w4g32-gptq", "folder"), ("q4_k_m-awq-gptq", "file.gguf")):
        out = tmp_path / name
        monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
        made = call("quantize", model, "--recipe", recipe, "--set", ASKED, *own, "-o", out)
        assert made.status == 0, made.err
        monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
        again = call("reproduce", out, "--model", model, "--calibration", text, "--json")
        assert again.out, again.err
        said = json.loads(again.out)["environment"]
        assert said["recorded"] == {**said["here"], "matmuls": "bfloat16"}
        assert said["here"]["matmuls"] == "float32"


def test_a_run_goes_on_with_the_products_that_it_had(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = first_blocks_of_tiny(tmp_path / "model", 2)
    text = text_file(tmp_path / "text.txt", 8000)
    own = ("--set", ASKED, "--calibration", text, *SMALL)
    for recipe, name in (("w4g32-gptq", "folder"), ("q4_k_m-awq-gptq", "file.gguf")):
        given = ("quantize", model, "--recipe", recipe, *own, "-o", tmp_path / name)
        monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
        with monkeypatch.context() as patch, pytest.raises(Died):
            dying(2, patch)
            call(*given)
        monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
        other = call(*given)
        assert other.status == 1 and "precision of matmuls was bfloat16, is float32" in other.err
        assert "on a CPU with AMX, as where it was begun, it can be finished" in other.err
        monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
        assert call(*given).status == 0
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    given = (*given[:-1], tmp_path / "other.gguf")
    with monkeypatch.context() as patch, pytest.raises(Died):
        dying(2, patch)
        call(*given)
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    assert "on a CPU without AMX, as where it was begun, it can be finished" in call(*given).err


def test_without_it_records_say_nothing_of_it(tmp_path: Path, call: Call) -> None:
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    own = ("--calibration", text, *SMALL)
    given = ("quantize", model, "--recipe", "w4g32-gptq", *own)
    assert call(*given, "-o", tmp_path / "a").status == 0
    said = ("--set", "calibration.precision=float32")
    assert call(*given, *said, "-o", tmp_path / "b").status == 0
    first, second = (quantizing.files(tmp_path / name) for name in ("a", "b"))
    assert first["model.safetensors"] == second["model.safetensors"]
    assert b"precision" not in first["qtool.json"]


def test_statistics_of_it_say_so_in_what_is_made_of_them(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    model, text = first_block_of_tiny(tmp_path / "model"), text_file(tmp_path / "text.txt", 8000)
    stats, out = tmp_path / "stats", tmp_path / "out"
    asked = ("--recipe", "w4g32-gptq", "--precision", "bfloat16", "--calibration", text, *SMALL)
    assert call("calibrate", model, "-o", stats, *asked).status == 0
    made = call("quantize", model, "--recipe", "w4g32-gptq", "--stats", stats, "-o", out)
    assert made.status == 0, made.err
    record = json.loads((out / "qtool.json").read_text())
    assert record["calibration"]["precision"] == "bfloat16"
    assert record["recipe"]["calibration"]["precision"] == "bfloat16"
    given = ("reproduce", out, "--model", model, "--calibration", text)
    again = call(*given)
    assert again.status == 0, again.err
    lying = json.loads(StatsFile.open(stats).metadata["calibration"]) | {"precision": [7]}
    with safe_open(stats, "np") as file:
        metadata = file.metadata() | {"calibration": json.dumps(lying)}
    save_file(load_file(stats), stats, metadata)
    out = tmp_path / "other"
    said = call("quantize", model, "--recipe", "w4g32-gptq", "--stats", stats, "-o", out)
    assert said.status == 1 and "calibration: precision is [7]" in said.err


def test_what_has_no_effect_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = Progress()
    monkeypatch.setattr(precision, "has_bfloat16", lambda: False)
    assert settled("float32", None, progress) == "float32"
    assert not capsys.readouterr().err
    assert settled("bfloat16", None, progress) == "float32"
    assert "has no effect: this CPU multiplies in float32" in capsys.readouterr().err
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    assert settled("bfloat16", None, progress) == "bfloat16"
    assert not capsys.readouterr().err


def test_a_wrong_one_is_told(call: Call, tmp_path: Path) -> None:
    said = call("calibrate", "tiny", "-o", tmp_path / "s", "--precision", "bfloat")
    assert said.status == 2 and "--precision" in said.err and "'bfloat16'" in said.err


def test_a_record_has_it_where_it_is_another() -> None:
    tokens = np.zeros((2, 3), np.int64)
    assert "precision" not in Calibration(tokens, "file", 0).record()
    assert Calibration(tokens, "file", 0, "bfloat16").record()["precision"] == "bfloat16"
