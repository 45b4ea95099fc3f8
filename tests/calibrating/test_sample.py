"""`sample`: texts that a model writes by itself.

What is drawn is compared with the probabilities of a whole forward pass without a cache; what is
written with the tokens that were drawn.
"""

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import qtool
from qtool.cuda.device import Device
from qtool.errors import QtoolError, SourceError, UnsupportedError, UsageError
from qtool.generating import sample as module
from qtool.generating.sample import Sampling, _draws, chosen
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.quality.engine_inputs import activations
from qtool.quality.forward import forward
from qtool.quality.weights import open_weights
from qtool.streaming.skeleton import Skeleton
from qtool.texts.source import load_text
from qtool.texts.tokenizing import decoder, tokenize
from support.cuda.cuda_device import device, emulator
from support.runs.quantizing import Call

# Names that transformers no longer wants are none of a user's business.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")

__all__ = ["device", "emulator"]

QUIET = Progress(quiet=True)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[list[list[int]]]:
    """The batches of tokens that are drawn."""
    found: list[list[list[int]]] = []
    batch = module._Drawing.batch

    def watched(self: Any, *args: Any) -> Any:
        found.append(batch(self, *args).tolist())
        return np.array(found[-1])

    monkeypatch.setattr(module._Drawing, "batch", watched)
    return found


def check(rows: list[list[int]], sampling: Sampling, slack: float) -> None:
    """That each draw lies in the stretch of its token, by a pass over whole texts."""
    with open_weights(tiny_folder()) as weights:
        skeleton = Skeleton.open(weights)
        run = forward(skeleton, activations(weights, "plain"), np.array(rows), 1, QUIET, keep=False)
        with run.logits() as head:
            for number, row in enumerate(rows):
                assert row[0] == 0  # the token that begins a text
                logits, draws = torch.as_tensor(head(run.hidden)[number]), _draws(sampling, number)
                for at in range(1, sampling.length):
                    heat = max(1.0, 2.0 - (at - 1) / 10)
                    shares = torch.softmax(logits[at - 1].double() / heat, -1)
                    below = float(shares[: row[at]].sum())
                    assert below - slack <= draws[at] <= below + float(shares[row[at]]) + slack


def test_each_token_is_drawn_from_what_the_model_predicts(
    tmp_path: Path, drawn: list[list[list[int]]]
) -> None:
    made = qtool.sample("tiny", tmp_path / "own.jsonl", samples=3, length=24, seed=5)
    check(drawn[0], Sampling(3, 24, seed=5), 1e-5)
    assert made.tokens >= 96 and made.samples == 3 and made.device == "cpu"


def test_draws_follow_the_probabilities() -> None:
    """The oracle is a count; and no probability of nought is ever drawn."""
    shares = torch.tensor([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    draws = np.random.default_rng(0).random(20_000)
    logits = shares.log().repeat(len(draws), 1)
    counts = Counter(chosen(logits, draws).tolist())
    assert set(counts) == {1, 3, 4}
    assert all(abs(counts[i] / len(draws) - float(shares[i])) < 0.01 for i in counts)
    edges = np.array([0.0, 0.5 - 1e-6, 0.5 + 1e-6, np.nextafter(1.0, 0.0)])
    assert chosen(shares.log().repeat(4, 1), edges).tolist() == [1, 1, 3, 4]


def test_a_line_is_cut_into_the_tokens_that_were_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, drawn: list[list[list[int]]]
) -> None:
    """Special tokens are spelled, and a character that is cut in two is left out."""
    batch = module._Drawing.batch

    def with_ends(self: Any, *args: Any) -> Any:
        rows = batch(self, *args)
        rows[:, 5] = 0  # one text ends there, and the next begins
        return rows

    monkeypatch.setattr(module._Drawing, "batch", with_ends)
    out = tmp_path / "own.jsonl"
    made = qtool.sample("tiny", out, samples=2, length=32)
    (rows,) = drawn
    lines = [json.loads(line)["text"] for line in out.read_text().splitlines()]
    assert made.texts == len(lines) == len(rows) == 3
    for row, line in zip(rows, lines, strict=True):
        row[5] = 0
        assert line.startswith("<|endoftext|>") and line.count("<|endoftext|>") >= 2
        again = tokenize(line, tiny_folder()).tolist()
        assert again[0] == 0 and decoder(tiny_folder())(again) == decoder(tiny_folder())(row)
    read = (part for piece in load_text(str(out)).pieces() for part in piece)
    assert "".join(read) == "\n".join(lines)


def test_a_text_is_the_same_whatever_else_is_written(
    tmp_path: Path, drawn: list[list[list[int]]]
) -> None:
    """The draws are; the tokens of `tiny` are, too, as far as last digits let them."""
    assert _draws(Sampling(3, 16), 1).tolist() == _draws(Sampling(9, 16), 1).tolist()
    assert _draws(Sampling(3, 16), 1).tolist() != _draws(Sampling(3, 16), 0).tolist()
    assert _draws(Sampling(3, 16), 1).tolist() != _draws(Sampling(3, 16, 1), 1).tolist()
    one, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for out in (one, other):
        qtool.sample("tiny", out, samples=2, length=16, threads=1)
    assert one.read_bytes() == other.read_bytes()


def test_a_killed_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call, drawn: list[list[list[int]]]
) -> None:
    monkeypatch.setattr(module, "AT_ONCE", 2)
    asked = ("tiny", "--samples", 5, "--length", 12, "--threads", 1)
    assert call("sample", *asked, "-o", tmp_path / "whole.jsonl").status == 0
    whole = [len(rows) for rows in drawn]
    assert sum(whole[:3]) == 6 and min(whole) > 0
    drawn.clear()
    step, steps = module.Ready.step, iter(range(1000))

    def ending(self: Any, *args: Any) -> Any:
        if next(steps) == 15:  # in the second batch
            signal.raise_signal(signal.SIGTERM)
        return step(self, *args)

    out = tmp_path / "own.jsonl"
    monkeypatch.setattr(module.Ready, "step", ending)
    said = call("sample", *asked, "-o", out)
    assert said.status == 143 and not out.exists()
    assert "what is finished is kept (1 step)" in said.err
    monkeypatch.setattr(module.Ready, "step", step)
    other = call("sample", *asked, "--seed", 1, "-o", out)
    assert other.status == 1 and "seed was 0, is 1" in other.err
    drawn.clear()
    again = call("sample", *asked, "-o", out)
    assert again.status == 0 and "going on with an earlier run: 1 of 3 steps" in again.err
    assert [len(rows) for rows in drawn] == whole[1:]
    assert out.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not (tmp_path / ".own.jsonl.partial").exists()


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "own.jsonl"
    with pytest.raises(UsageError, match=r"9999 tokens \(length\) are more than the 512 pos"):
        qtool.sample("tiny", out, samples=1, length=9999)
    for wrong, said in (
        ({"samples": 0}, "samples 0: expected 1 or more"),
        ({"seed": 2**32}, "seed 4294967296: expected less than"),
        ({"out": tmp_path / "own.txt"}, 'own.txt": the texts are lines of JSON; name it'),
    ):
        with pytest.raises(UsageError, match=said):
            qtool.sample("tiny", **{"out": out, **wrong})  # type: ignore[arg-type]
    with pytest.raises(QtoolError, match="no such"):
        qtool.sample(str(tmp_path / "none"), out)
    monkeypatch.setattr(module, "decoder", lambda *_, **__: lambda ids: " ")
    with pytest.raises(SourceError, match="is tokens without text"):
        qtool.sample("tiny", out, samples=1, length=8)
    monkeypatch.undo()
    nan = module.Ready.step

    def broken(self: Any, *args: Any) -> Any:
        logits, cache = nan(self, *args)
        return logits * float("nan"), cache

    monkeypatch.setattr(module.Ready, "step", broken)
    with pytest.raises(SourceError, match="after 1 tokens is not a finite number"):
        qtool.sample("tiny", out, samples=1, length=8)
    assert list(tmp_path.iterdir()) == []
    out.write_text("mine")
    with pytest.raises(UnsupportedError, match="exists; remove it or choose another out"):
        qtool.sample("tiny", out)


def test_of_a_gguf_file(tmp_path: Path, drawn: list[list[list[int]]]) -> None:
    """The same model, so that its texts are nearly sure to be the same."""
    file = tmp_path / "tiny.gguf"
    qtool.quantize("tiny", "f32", file)
    for model in ("tiny", file):
        qtool.sample(model, tmp_path / f"{Path(model).name}.jsonl", samples=2, length=12)
    assert drawn[0] == drawn[1]


def test_on_a_device(tmp_path: Path, device: Device, drawn: list[list[list[int]]]) -> None:
    """Products are of float16 there."""
    sampling = Sampling(2, 10)
    out = tmp_path / "own.jsonl"
    made = module.sample(tiny_folder(), out, sampling, device, QUIET, model="tiny")
    assert made.device == device.name
    check(drawn[0], sampling, 0.01)


def test_calibrating_on_it(tmp_path: Path, call: Call) -> None:
    out = tmp_path / "own.jsonl"
    said = call("sample", "tiny", "-o", out, "--samples", 6, "--length", 64, "--json")
    found = json.loads(said.out)
    assert found["texts"] == len(out.read_text().splitlines()) and found["tokens"] >= 7 * 64
    assert found["texts"] == 7
    again = call("sample", "tiny", "-o", tmp_path / "b.jsonl", "--samples", 1, "--length", 8)
    assert " tokens in 2 texts (1 more than asked for, since a text that is cut" in again.out
    asked = ("--recipe", "w4g128-gptq", "--calibration", out, "--samples", 6, "--length", 64)
    assert call("quantize", "tiny", *asked, "-o", tmp_path / "out").status == 0


def test_a_calibration_finds_as_many_samples_as_were_asked_for(
    tmp_path: Path, drawn: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cut into tokens again has fewer: one text in sixteen more is drawn, and then, where
    that was not enough, as many as are missing."""
    monkeypatch.setattr(module, "_MARGIN", 10**9)  # one more in all
    seen = module.tokenized

    def few(text: Any, folder: Path) -> Any:
        return [one[:40] for one in seen(text, folder)] if len(drawn) == 1 else seen(text, folder)

    monkeypatch.setattr(module, "tokenized", few)
    out = tmp_path / "own.jsonl"
    made = qtool.sample("tiny", out, samples=4, length=32)
    assert [len(rows) for rows in drawn] == [5, 4] and made.texts == 9
    text = "\n".join(json.loads(line)["text"] for line in out.read_text().splitlines())
    assert len(tokenize(text, tiny_folder())) >= 4 * 32


def test_a_model_that_repeats_itself(
    tmp_path: Path, drawn: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "tokenized", lambda *_: [np.zeros(3, np.int64)])
    with pytest.raises(SourceError, match="is cut into 3 again: it repeats itself"):
        qtool.sample("tiny", tmp_path / "own.jsonl", samples=2, length=8)
    assert sum(map(len, drawn)) > 12 and list(tmp_path.iterdir()) == []


def test_how_much_is_written_at_once() -> None:
    """Keys and values of Llama-2-7B: 1 MiB a token in float32, so 8 texts of 512."""
    llama = {"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096}
    assert module._at_once(llama, 512) == (8, 4 << 30)
    assert module._at_once({**llama, "num_key_value_heads": 8}, 512) == (32, 4 << 30)
    assert module._at_once(llama, 1 << 20)[0] == 1
    assert module._at_once({"text_config": {**llama, "head_dim": 64}}, 512)[0] == 16


def test_the_token_that_begins_a_text(tmp_path: Path) -> None:
    first = module._first
    assert first({"bos_token_id": 5, "eos_token_id": 7}, tmp_path) == 5
    assert first({"text_config": {"bos_token_id": None}, "eos_token_id": [7, 8]}, tmp_path) == 7
    assert first({}, tmp_path) is None
    (tmp_path / "generation_config.json").write_text('{"bos_token_id": 9}')
    assert first({"eos_token_id": 7}, tmp_path) == 9
