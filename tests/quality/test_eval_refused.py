"""What `qtool eval` keeps of a reference, what it refuses, and what it does not let pass."""

import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import IO

import numpy as np
import pytest
import torch

from qtool.errors import SourceError
from qtool.hub import tiny_folder
from qtool.quality import metrics
from qtool.quality.conditions import FIGURES, OF_A_REFERENCE, parse_condition
from qtool.quality.evaluate import Evaluation
from qtool.quality.pareto import front
from support.models import small_tokenizers as small
from support.quality.evaluating import LENGTH, WINDOWS, against_tiny, call, evaluated, root
from support.runs import quantizing
from support.runs.quantizing import Call

__all__ = ["call", "root"]


def test_the_cache_is_bounded_and_named(
    root: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache/reference"
    common = ("eval", root / "awq", "--against", "tiny", "--text", root / "text.txt", "--windows",
              2, "--length")  # fmt: skip
    first = call(*common, 16)
    (kept,) = folder.iterdir()
    assert f"reference: kept in {kept}" in first.err
    assert f"reference: taken from {kept}" in call(*common, 16).err
    monkeypatch.setattr("qtool.quality.forward._CACHE_BYTES", 2 * 24 * 256 * 4 + 200)
    call(*common, 24)
    assert kept not in folder.iterdir() and len(list(folder.iterdir())) == 1
    said = call(*common, 48)
    assert said.status == 0 and "reference:" not in said.err
    assert len(list(folder.iterdir())) == 1


def overflowing(name: str, folder: Path) -> Path:
    """tiny with one tensor that is too large to be computed with."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_folder(), folder)
    state = load_file(folder / "model.safetensors")
    state[name] = torch.full_like(state[name], 3e38)
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model.layers.2.post_attention_layernorm.weight", "output of block 2 is not finite"),
        ("model.norm.weight", "says of token 0 of window 0 is not a finite number"),
    ],
)
def test_a_broken_artifact_does_not_pass(
    name: str, said: str, root: Path, call: Call, tmp_path: Path
) -> None:
    broken = overflowing(name, tmp_path / "broken")
    common = ("--text", root / "text.txt", "--windows", 2, "--length", 16, "--json")
    for more in (("--fail-if", "perplexity>50"), ("--against", "tiny", "--fail-if", "kld>0.05")):
        found = call("eval", broken, *common, *more)
        assert found.status == 1 and found.out == ""
        assert f"{broken}: " in found.err and said in found.err
    found = call("compare", broken, "--against", "tiny", *common)
    assert found.status == 1 and found.out == "" and said in found.err
    found = call("compare", broken, root / "awq", "--against", "tiny", *common)
    measured = json.loads(found.out)  # the others are
    assert found.status == 1 and [Path(a["artifact"]).name for a in measured["artifacts"]] == [
        "awq"
    ]
    (failed,) = measured["failed"]
    assert failed["artifact"] == str(broken) and said in failed["error"]
    plain = call("compare", root / "awq", broken, "--against", "tiny", *common[:-1])
    assert plain.status == 1 and str(root / "awq") in plain.out and str(broken) not in plain.out
    assert plain.err.splitlines()[-1].startswith("error: ") and said in plain.err.splitlines()[-1]


def test_what_is_not_finite_fails() -> None:
    with pytest.raises(SourceError, match="a loss of 800 nats a token has no perplexity"):
        metrics.summary(metrics.Measured(np.full((2, 3), 800.0)))
    for value in (math.nan, math.inf, -math.inf):
        for text in ("perplexity>50", "perplexity<1"):
            assert parse_condition(text).holds({"perplexity": value}) is not None
    good, bad, worse = (
        Evaluation(str(kld), 10, {"kld": {"mean": kld}}) for kld in (0.1, math.nan, math.inf)
    )
    assert front([good, bad, worse]) == {good.artifact}


def test_what_the_reference_computed_is_kept(root: Path, call: Call, tmp_path: Path) -> None:
    first = evaluated(call, root, "awq", "--against", "tiny")
    (kept,) = (tmp_path / "cache/reference").iterdir()
    hidden = np.load(kept)
    assert hidden.shape[:2] == (WINDOWS, LENGTH)
    assert evaluated(call, root, "awq", "--against", "tiny") == first
    np.save(kept, hidden * 0)  # proves that it is used
    assert evaluated(call, root, "awq", "--against", "tiny") != first
    kept.write_bytes(kept.read_bytes()[:100])  # cut short: computed again
    assert evaluated(call, root, "awq", "--against", "tiny") == first
    np.save(kept, hidden * 0)
    assert evaluated(call, root, "awq", "--against", "tiny", "--no-cache") == first


@pytest.mark.parametrize(
    ("error", "status"), [(OSError(28, "No space left on device"), 0), (KeyboardInterrupt(), 130)]
)
def test_nothing_unfinished_stays_in_the_cache(
    error: BaseException,
    status: int,
    root: Path,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "cache/reference"
    folder.mkdir(parents=True)
    for name, age in (("killed.part", 90_000), ("running.part", 60)):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (time.time() - age,) * 2)

    def fail(file: IO[bytes], _: object) -> None:
        file.write(b"some")
        raise error

    monkeypatch.setattr("qtool.quality.forward.np.save", fail)
    said = call("eval", root / "awq", "--against", "tiny", "--text", root / "text.txt", "--windows",
                2, "--length", 16)  # fmt: skip
    assert said.status == status
    assert [path.name for path in folder.iterdir()] == ["running.part"]


def test_another_transformers_computes_again(
    root: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated(call, root, "awq", "--against", "tiny")
    monkeypatch.setattr("qtool.quality.forward.version", lambda _: "0.0")
    evaluated(call, root, "awq", "--against", "tiny")
    assert len(list((tmp_path / "cache/reference").iterdir())) == 2


@pytest.mark.parametrize(
    ("condition", "status"),
    [("kld>0.0001", 1), ("kld>5", 0), ("kld.p99>=0", 1), ("top1_agreement<0.01", 0),
     ("perplexity<=1e9", 1)],
)  # fmt: skip
def test_fail_if(root: Path, call: Call, condition: str, status: int) -> None:
    said = call("eval", root / "awq", "--against", "tiny", "--text", root / "text.txt", "--windows",
                "2", "--length", "16", "--json", "--fail-if", condition)  # fmt: skip
    assert said.status == status
    found = json.loads(said.out)
    assert len(found["failed"]) == status
    assert ("failed: " in said.err) is bool(status)


@pytest.mark.parametrize(
    "text", ["kld", "kld=0.1", "kld>", "kld>abc", ">0.1", "kld>1e", "kld>1e999"]
)
def test_conditions_that_say_nothing(text: str, root: Path, call: Call) -> None:
    said = call("eval", root / "awq", "--text", root / "text.txt", "--fail-if", text)
    assert said.status == 2 and f"--fail-if {text}: expected" in said.err


def test_figures_are_those_of_a_run(root: Path, call: Call) -> None:
    def figures(found: dict[str, object], prefix: str = "") -> set[str]:
        names = set()
        for key, value in found.items():
            if isinstance(value, dict):
                names |= figures(value, f"{prefix}{key}.") | ({key} if "mean" in value else set())
            elif isinstance(value, int | float):
                names.add(prefix + key)
        return {name for name in names if not name.startswith(("protocol", "size_bytes"))}

    assert figures(evaluated(call, root, "awq")) == FIGURES
    assert figures(against_tiny(call, root)) == FIGURES | OF_A_REFERENCE


class _NeverRun:
    """Stands where a model would be run."""

    def __init__(self, *_: object) -> None:
        raise AssertionError("a block was run")


def test_what_a_header_tells_is_told_before_any_block_is_run(
    root: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.quality.forward.Workers", _NeverRun)
    common = ("--text", root / "text.txt", "--windows", 2, "--length", 16)
    other = quantizing.build("llama", tmp_path / "llama")
    spelled = tmp_path / "spelled"
    shutil.copytree(tiny_folder(), spelled)
    tokenizer = json.loads((spelled / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["Ġthe"], vocab["Ġof"] = vocab["Ġof"], vocab["Ġthe"]
    small.save(spelled, {"tokenizer.json": tokenizer})
    for words, said in (
        (("eval", root / "awq", "--fail-if", "kld>0.05"), "'kld'; with --against it is known"),
        (("eval", root / "awq", "--fail-if", "kl>0.05"), "no figure 'kl'; did you mean kld? kno"),
        (("eval", root / "awq", "--fail-if", "PPL>50"), "'PPL'; did you mean perplexity? known: p"),
        (("eval", root / "awq", "--fail-if", "same_top<1"), "did you mean top1_agreement? known:"),
        (("eval", root / "awq", "--fail-if", "wer>1"), "tokens; with --against also acceptance, "),
        (("eval", other, "--against", "tiny"), "a vocabulary of 96, the reference has 2048"),
        (("eval", spelled, "--against", "tiny"), "cuts the text into other tokens"),
        (("compare", root / "awq", other, "--against", "tiny"), "a vocabulary of 96"),
        (("compare", root / "awq", "--against", "tiny", "--plot", tmp_path / "none/x.svg"),
         "x.svg: no file can be made in this folder"),
    ):  # fmt: skip
        found = call(*words, *common)
        assert (
            found.status == (2 if "--fail-if" in words else 1)
            and found.out == ""
            and said in found.err
        ), words
    with pytest.raises(AssertionError, match="a block was run"):
        call("eval", root / "awq", *common)


def test_refusals(root: Path, call: Call, tmp_path: Path) -> None:
    text = root / "text.txt"

    def refused(*arguments: object) -> str:
        said = call("eval", *arguments)
        assert said.status == (2 if "other" in arguments else 1) and said.out == ""
        return str(said.err)

    assert "no such text file" in refused(root / "awq", "--text", tmp_path / "none.txt")
    assert "expected plain or llama.cpp" in refused(
        root / "awq", "--text", text, "--protocol", "other"
    )
    (tmp_path / "mix.yaml").write_text("texts: []\n" * 100)
    assert "mix.yaml: YAML, which names several texts" in refused(
        root / "awq", "--text", tmp_path / "mix.yaml"
    )
    (tmp_path / "empty.txt").write_text("")
    assert "0 bytes, too few for a window of 512 tokens; give a longer text" in refused(
        root / "awq", "--text", tmp_path / "empty.txt"
    )
    assert "a folder; name a text file" in refused(root / "awq", "--text", tmp_path)
    (tmp_path / "short.txt").write_text("a few words " * 60)
    assert "enough for 0 windows of 512" in refused(root / "awq", "--text", tmp_path / "short.txt")
    other = quantizing.build("llama", tmp_path / "llama")
    said = refused(root / "awq", "--against", other, "--text", text, "--length", "16")
    assert "they are not of one model" in said or "cannot be compared" in said
    broken = tmp_path / "broken"
    shutil.copytree(root / "awq", broken)
    config = json.loads((broken / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors"}
    (broken / "config.json").write_text(json.dumps(config))
    assert "cannot run" in refused(broken, "--text", text)
