"""calibration.precision in commands that keep, compare and repeat what others have made."""

import json
import threading
from pathlib import Path

import pytest
import torch

from qtool.blockwise import row_feedback
from qtool.blockwise.row_rounding import RowFactor
from qtool.errors import FormatError
from qtool.fitting.costs import precision_of
from qtool.provenance import embedded
from qtool.streaming import precision
from qtool.streaming.precision import has_bfloat16, matmuls_in
from support.inspecting.reported_again import again
from support.methods.precise_runs import ASKED, SMALL, now
from support.models.small_models import checkpoint
from support.runs import quantizing
from support.runs.killed_runs import Died, dying
from support.runs.quantizing import Call, first_block_of_tiny, first_blocks_of_tiny, text_file

OWN = ("--calibration", "text.txt", *SMALL)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """model/ and text.txt in the working folder, and a CPU that is said to have bfloat16."""
    first_block_of_tiny(tmp_path / "model")
    text_file(tmp_path / "text.txt", 8000)
    (tmp_path / "again").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    return tmp_path


def has(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    monkeypatch.setattr(precision, "has_bfloat16", lambda: there)


def test_a_matrix_keeps_no_artifacts_of_other_products(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = ("matrix", "model", "--recipes", "w4g32-gptq,iq4_nl", "-o", "m", *OWN)
    given = (*given, "--json")

    def made(*more: str) -> dict[str, tuple[str, str]]:
        found = json.loads(call(*given, *more).out)["artifacts"]
        return {one["recipe"]: (one["status"], one.get("error") or "") for one in found}

    assert {status for status, _ in made().values()} == {"made"}
    status, error = made("--set", ASKED)["w4g32-gptq"]
    assert status == "failed"
    assert "matmuls in float32, and this run makes them in bfloat16" in error
    assert made("--set", ASKED)["iq4_nl"][0] == "kept"
    has(monkeypatch, False)
    assert made("--set", ASKED)["w4g32-gptq"][0] == "kept"
    has(monkeypatch, True)
    for name in ("w4g32-gptq", "iq4_nl"):
        path = here / "m" / (name if name.startswith("w") else f"{name}.gguf")
        path.rename(here / path.name)
    assert made("--set", ASKED)["w4g32-gptq"][0] == "made"
    record = json.loads((here / "m" / "w4g32-gptq" / "qtool.json").read_text())
    assert record["calibration"]["precision"] == "bfloat16"
    assert made("--set", ASKED)["w4g32-gptq"][0] == "kept"
    assert "in bfloat16, and this run makes them in float32" in made()["w4g32-gptq"][1]


def test_a_matrix_takes_up_statistics_of_the_same_products(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qtool.matrix import shared
    from qtool.matrix.cells import cells
    from qtool.messages.progress import Progress

    def taken_up(*sets: str) -> bool:
        (cell,) = cells(["w4g32-gptq"], here / "m", sets, share=True, error_aware=False)
        place, quiet = here / "statistics", Progress(quiet=True)
        found = shared.measure([cell], here / "model", place, 2, quiet)
        assert found.calibration.get("precision") == (
            "bfloat16" if sets[-1] == ASKED and precision.has_bfloat16() else None
        )
        return found.taken_up

    small = ("calibration.source=text.txt", "calibration.samples=4", "calibration.length=64")
    assert [taken_up(*small, *more) for more in ([ASKED], [ASKED], [], [])] == [
        False, True, False, True,
    ]  # fmt: skip
    has(monkeypatch, False)
    assert taken_up(*small, ASKED)  # those of float32, as there are no others


def test_costs_of_a_fit_serve_what_they_are_as_exact_as(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(number: int, costs: str, *more: str) -> quantizing.Called:
        out = ("-o", f"{number}.yaml")
        return call("fit", "model", "--bits", 5, "--costs", costs, *out, *OWN, *more)

    asked = ("--set", ASKED)
    assert fit(1, "coarse", *asked).status == 0
    assert precision_of(Path("coarse")) == "bfloat16"
    has(monkeypatch, False)  # elsewhere
    kept = fit(2, "coarse", *asked)
    assert kept.status == 0 and "costs taken from" in kept.err
    assert "bfloat16" in Path("2.yaml").read_text()
    other = fit(3, "coarse")
    assert other.status == 1 and "precision was bfloat16" in other.err
    first = fit(4, "fine", *asked)
    assert first.status == 0 and "calibration.precision has no effect" in first.err
    assert precision_of(Path("fine")) == "float32"
    for there in (False, True):
        has(monkeypatch, there)
        kept = fit(5 + there, "fine", *asked)
        assert kept.status == 0 and "costs taken from" in kept.err


def test_a_card_says_it(here: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    made = call("quantize", "model", "--recipe", "w4g32-gptq", "--set", ASKED, *OWN, "-o", "out")
    assert made.status == 0, made.err
    assert any("bfloat16" in line for line in again("out", call, monkeypatch))
    monkeypatch.chdir(here)
    said = call("calibrate", "model", "--recipe", "w4g32-gptq", "--precision", "bfloat16", *OWN,
                "-o", "stats")  # fmt: skip
    assert said.status == 0, said.err
    made = call("quantize", "model", "--recipe", "w4g32-gptq", "--stats", "stats", "-o", "of-stats")
    assert made.status == 0, made.err
    lines = again("of-stats", call, monkeypatch)
    assert any("--precision bfloat16" in line for line in lines)


def test_a_record_may_lie(here: Path, call: Call) -> None:
    made = call("quantize", "model", "--recipe", "w4g32-gptq", *OWN, "-o", "out")
    assert made.status == 0, made.err
    file = here / "out" / "qtool.json"
    record = json.loads(file.read_text())
    record["calibration"]["precision"] = [7]
    file.write_text(json.dumps(record))
    with pytest.raises(FormatError, match=r"precision is \[7\]; expected float32 or bfloat16"):
        embedded.read(here / "out")


def test_a_wrong_model_is_told_in_other_environments_too(
    here: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing changes the weights before they are quantized, their checksum is theirs."""
    from safetensors.torch import load_file, save_file

    made = call("quantize", "model", "--recipe", "q4_k_m", "--set", "method=gptq", "--set", ASKED,
                *OWN, "-o", "a.gguf")  # fmt: skip
    assert made.status == 0, made.err
    has(monkeypatch, False)
    given = ("reproduce", "a.gguf", "--model", "model", "--calibration", "text.txt")
    assert "another environment (matmuls bfloat16 there, float32 here)" in call(*given).out
    weights = load_file("model/model.safetensors")
    weights["model.layers.0.self_attn.q_proj.weight"] *= 1.5
    save_file(weights, "model/model.safetensors", {"format": "pt"})
    said = call(*given)
    assert said.status == 1 and "its weights are not those that a.gguf was made of" in said.err


def test_factors_of_experts_are_of_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are made while the block is where it passes."""
    monkeypatch.setattr(precision, "has_bfloat16", lambda: True)
    model, text = checkpoint(tmp_path, "mixtral", "bfloat16").path, tmp_path / "text.txt"
    quantizing.add_tokenizer(model)
    text_file(text)
    found = []
    factored = RowFactor.of.__func__  # type: ignore[attr-defined]

    def of(*given: object) -> RowFactor:
        found.append(now())
        made = factored(RowFactor, *given)
        assert isinstance(made, RowFactor)
        return made

    monkeypatch.setattr(row_feedback.RowFactor, "of", of)
    sets = ["gptq.yaqa=4", "weights.group_size=32", ASKED, f"calibration.source={text}"]
    sets += ["calibration.samples=12", "calibration.length=64"]
    quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *sets)
    assert "bf16" not in found and "ieee" in found


def test_threads_and_kills_change_no_byte(
    tmp_path: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the products that this CPU has."""
    model, text = first_blocks_of_tiny(tmp_path / "model", 2), text_file(tmp_path / "t", 8000)
    own = ("--set", ASKED, "--set", "gptq.yaqa=4", "--calibration", text, "--samples", 9)
    given = ("quantize", model, "--recipe", "w4g32-gptq", *own, "--length", 200)
    for threads in (1, 3):
        assert call(*given, "--threads", threads, "-o", tmp_path / f"{threads}").status == 0
    with monkeypatch.context() as patch, pytest.raises(Died):
        dying(6, patch)
        call(*given, "-o", tmp_path / "killed")
    assert (tmp_path / ".killed.partial").is_dir()
    assert call(*given, "-o", tmp_path / "killed").status == 0
    first, *others = (quantizing.files(tmp_path / name) for name in ("1", "3", "killed"))
    assert all(other == first for other in others)
    assert (b'"precision": "bfloat16"' in first["qtool.json"]) or not has_bfloat16()


def test_products_of_another_thread_wait() -> None:
    begun, seen, before = threading.Event(), [], now()

    def other() -> None:
        begun.set()
        with matmuls_in("float32"):
            seen.append(now())

    with matmuls_in("bfloat16"):
        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        thread.join(0.05)
        assert not seen and now() == "bf16"
    thread.join()
    assert seen == ["ieee"] and now() == before
    assert torch.get_float32_matmul_precision() == "highest"
