"""`qtool eval` against transformers itself, against sums by hand, and what it refuses."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from qtool.artifacts.artifact import Artifact
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind, Value, string
from qtool.formats.gguf_writer import TensorSpec, lay_out
from qtool.gguf.importance.measured import bos_of
from qtool.gguf.tokenizer.files import tokenizer_files
from qtool.gguf.tokenizer.keys import tokenizer_metadata
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.quality import metrics
from qtool.quality.evaluate import size_of
from qtool.quality.rounded_inputs import Activations
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.streaming import skeleton
from qtool.streaming.weights import Weights
from qtool.texts import encoding
from support.models import small_tokenizers as small
from support.quality.evaluating import LENGTH, WINDOWS, against_tiny, call, evaluated, root
from support.runs.quantizing import Call

__all__ = ["call", "root"]

BOS, BOS_TEXT = 0, "<|endoftext|>"  # of tiny, whose texts begin without it


def logits_of(weights: dict[str, np.ndarray] | None, tokens: np.ndarray) -> np.ndarray:
    """Of tiny, with other weights where given: transformers' own forward pass, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32).eval()
    if weights is not None:
        state = {name: torch.from_numpy(np.array(values)) for name, values in weights.items()}
        missing, extra = model.load_state_dict(state, strict=False)
        assert not extra and set(missing) <= {"lm_head.weight"}
        model.tie_weights()
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(tokens)).logits.double().numpy()
    return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def text_tokens(root: Path) -> np.ndarray:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_folder())
    ids = tokenizer.encode((root / "text.txt").read_text(), add_special_tokens=False)
    return np.array(ids[: WINDOWS * LENGTH]).reshape(WINDOWS, LENGTH)


def by_hand(root: Path, name: str, positions: range) -> dict[str, float]:
    """The figures, from whole logits in float64."""
    tokens = text_tokens(root)
    weights = dict(Artifact.open(root / name).dequantized())
    log_p, log_q = (log_softmax(logits_of(w, tokens)) for w in (None, weights))
    kld, changes, losses, same, variation = [], [], [], [], []
    for window in range(WINDOWS):
        for at in positions:
            p, q = log_p[window, at], log_q[window, at]
            kld.append(float((np.exp(p) * (p - q)).sum()))
            variation.append(float(np.abs(np.exp(p) - np.exp(q)).sum()) / 2)
            same.append(p.argmax() == q.argmax())
            if at + 1 < LENGTH:
                following = tokens[window, at + 1]
                losses.append(-q[following])
                changes.append(math.exp(q[following]) - math.exp(p[following]))
    return {
        "perplexity": math.exp(np.mean(losses)),
        "kld": float(np.mean(kld)),
        "p99": float(np.quantile(kld, 0.99)),
        "top1_agreement": float(np.mean(same)),
        "rms_dp": math.sqrt(np.mean(np.square(changes))),
        "acceptance": 1 - float(np.mean(variation)),
    }


@pytest.mark.parametrize(
    ("name", "protocol", "positions"),
    [("awq", "plain", range(LENGTH)), ("gptq", "llama.cpp", range(LENGTH // 2, LENGTH - 1))],
)
def test_agrees_with_transformers(
    root: Path, call: Call, name: str, protocol: str, positions: range
) -> None:
    found = evaluated(call, root, name, "--against", "tiny", "--protocol", protocol)
    expected = by_hand(root, name, positions)
    kld = found["kld"]
    assert isinstance(kld, dict)
    flat = {**found, "kld": kld["mean"], "p99": kld["p99"]}
    for key, value in expected.items():
        assert flat[key] == pytest.approx(value, rel=1e-4), key
    assert found["tokens"] == WINDOWS * len(positions)
    assert found["protocol"] == {
        "name": protocol, "text": "text.txt", "windows": WINDOWS, "length": LENGTH,
        "activations": "float32", "kv_cache": "float32",
        "not_simulated": [],
    }  # fmt: skip


def beginning_with_bos(said: str, folder: Path) -> Path:
    """tiny, with BOS before each text: as one of two files says it."""
    shutil.copytree(tiny_folder(), folder)
    name = "tokenizer.json" if said == "template" else "tokenizer_config.json"
    content = json.loads((folder / name).read_text())
    first = [{"SpecialToken": {"id": BOS_TEXT, "type_id": 0}}]
    template = {
        "type": "TemplateProcessing",
        "single": [*first, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": name, "type_id": 0}} for name in "AB"],
        "special_tokens": {BOS_TEXT: {"id": BOS_TEXT, "ids": [BOS], "tokens": [BOS_TEXT]}},
    }
    more = {"template": {"post_processor": template}, "config": {"add_bos_token": True}}
    return small.save(folder, {name: content | more[said]})


@pytest.mark.parametrize("said", ["config", "template", "gguf"])
def test_windows_begin_as_those_of_llama_perplexity(
    said: str, root: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BOS before the text, and once more in the place of what each window begins with."""
    model = beginning_with_bos("config" if said == "gguf" else said, tmp_path / "model")
    ids = [BOS, *text_tokens(root).reshape(-1)]
    tokens = np.array(ids[: WINDOWS * LENGTH]).reshape(WINDOWS, LENGTH)
    tokens[:, 0] = BOS
    log_p = log_softmax(logits_of(None, tokens))
    losses = [
        -log_p[window, at, tokens[window, at + 1]]
        for window in range(WINDOWS)
        for at in range(LENGTH // 2, LENGTH - 1)
    ]
    path = model
    # What llama.cpp rounds of a GGUF file is seen in test_activations_applied.py.
    monkeypatch.setattr("qtool.quality.evaluate.activations", lambda *_: Activations())
    if said == "gguf":
        path = tmp_path / "model.gguf"
        run_gguf(GgufRequest("tiny", model, load("f16"), path, 1), Progress(quiet=True))
    found = evaluated(call, root, str(path), "--protocol", "llama.cpp")
    assert found["perplexity"] == pytest.approx(math.exp(np.mean(losses)), rel=1e-4)
    without = evaluated(call, root, str(tiny_folder()), "--protocol", "llama.cpp")
    assert without["perplexity"] != pytest.approx(found["perplexity"], rel=1e-3)


def test_a_gguf_file_is_what_its_blocks_say(root: Path, call: Call, tmp_path: Path) -> None:
    """The file evaluated as it is, and as the checkpoint that `convert` makes of it."""
    said = call("convert", root / "q4.gguf", "--to", "hf", "--dtype", "float32", "-o",
                tmp_path / "hf")  # fmt: skip
    assert said.status == 0, said.err
    first = evaluated(call, root, "q4.gguf", "--against", "tiny")
    second = evaluated(call, root, str(tmp_path / "hf"), "--against", "tiny")
    of_size = ("artifact", "size_bytes", "speed_up")
    assert {k: v for k, v in first.items() if k not in of_size} == {
        k: v for k, v in second.items() if k not in of_size
    }
    assert first["size_bytes"] == (root / "q4.gguf").stat().st_size


def split_in_two(path: Path, folder: Path) -> list[Path]:
    """A GGUF file as two, in the form that gguf-split gives them."""
    folder.mkdir()
    with GgufFile.open(path) as file:
        names = list(file.tensors)
        for number in range(2):
            counts = {"split.no": number, "split.count": 2}
            metadata = {key: Value(Kind.UINT16, value) for key, value in counts.items()}
            metadata["split.tensors.count"] = Value(Kind.INT32, len(names))
            chosen = names[:7] if number == 0 else names[7:]
            infos = [file.tensors[name] for name in chosen]
            specs = [TensorSpec(info.name, info.shape, info.type) for info in infos]
            content = lay_out(({} if number else dict(file.metadata)) | metadata, specs).header
            for info in infos:
                raw = file.read_rows(info.name, 0, info.rows).tobytes()
                content += raw + bytes(-len(raw) % 32)
            (folder / f"m-{number + 1:05}-of-00002.gguf").write_bytes(content)
    return sorted(folder.iterdir())


def test_size_of_what_was_opened(root: Path, tmp_path: Path) -> None:
    parts = split_in_two(root / "q4.gguf", tmp_path / "split")
    both = sum(part.stat().st_size for part in parts)
    assert size_of(parts[0]) == size_of(tmp_path / "split") == both > parts[0].stat().st_size
    folder = tmp_path / "folder"
    shutil.copytree(root / "awq", folder)
    shutil.copy(root / "q4.gguf", folder)  # and another model beside it
    assert size_of(folder) == (folder / "model.safetensors").stat().st_size
    assert size_of(root / "q4.gguf") == (root / "q4.gguf").stat().st_size


def test_each_model_is_made_of_its_modules_once(
    root: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    real = skeleton.meta_model

    def counted(weights: Weights) -> object:
        made.append(weights.path.name)
        return real(weights)

    monkeypatch.setattr(skeleton, "meta_model", counted)
    evaluated(call, root, "awq", "--against", "tiny")
    assert sorted(made) == ["awq", tiny_folder().name]
    made.clear()
    evaluated(call, root, "q4.gguf")
    assert made == ["q4.gguf"]


def test_a_model_against_itself(root: Path, call: Call) -> None:
    found = evaluated(call, root, str(tiny_folder()), "--against", "tiny")
    assert found["kld"] == {"mean": 0, "median": 0, "p99": 0, "max": 0, "interval": [0, 0]}
    assert found["top1_agreement"] == found["acceptance"] == 1
    assert found["tokens_per_pass"] == {"1": 2, "2": 3, "4": 5, "8": 9}
    assert found["speed_up"] == dict.fromkeys("1248", 1)  # it costs what it saves
    assert found["perplexity"] == found["reference_perplexity"]


def test_without_a_reference_there_is_perplexity(root: Path, call: Call) -> None:
    alone, beside = evaluated(call, root, "awq"), against_tiny(call, root)
    assert alone["perplexity"] == beside["perplexity"]
    assert "kld" not in alone


def test_threads_change_nothing_that_is_shown(root: Path, call: Call) -> None:
    one, two = (
        evaluated(call, root, "awq", "--against", "tiny", "--threads", n, "--no-cache")
        for n in (1, 2)
    )
    for key in ("mean", "median", "p99", "max"):
        assert one["kld"][key] == pytest.approx(two["kld"][key], rel=1e-4)  # type: ignore[index]


def test_intervals_are_over_windows() -> None:
    loss = np.array([[1.0, 2.0], [3.0, 4.0]])
    found = metrics.summary(metrics.Measured(loss))
    half = 12.7062 * np.std([1.5, 3.5], ddof=1) / math.sqrt(2)
    assert found["perplexity"] == pytest.approx(math.exp(2.5))
    assert found["perplexity_interval"] == pytest.approx(
        [math.exp(2.5 - half), math.exp(2.5 + half)]
    )


@pytest.mark.parametrize(
    ("windows", "expected"),  # from a table of Student's t
    [(2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (8, 2.3646), (20, 2.0930), (121, 1.9799)],
)
def test_few_windows_vary_by_chance(windows: int, expected: float) -> None:
    loss = np.repeat(np.random.default_rng(0).uniform(1, 2, (windows, 1)), 3, axis=1)
    low, high = metrics.summary(metrics.Measured(loss))["perplexity_interval"]
    half = (math.log(high) - math.log(low)) / 2
    errors = np.std(loss[:, 0], ddof=1) / math.sqrt(windows)
    assert half / errors == pytest.approx(expected, rel=4e-4)


def test_one_window_tells_no_interval(root: Path, call: Call) -> None:
    common = ("eval", root / "awq", "--against", "tiny", "--text", root / "text.txt", "--windows",
              1, "--length", 32)  # fmt: skip
    found = json.loads(call(*common, "--json").out)
    assert (
        found["perplexity_interval"] is found["top1_interval"] is found["kld"]["interval"] is None
    )
    said = call(*common).out
    assert said.count("one window does not tell how certain that is") == 2
    assert call("compare", *common[1:]).status == 0


def test_speed_up_of_a_draft(root: Path, call: Call) -> None:
    found = against_tiny(call, root)
    cost = size_of(root / "awq") / size_of(tiny_folder())
    a = found["acceptance"]
    assert isinstance(a, float) and isinstance(found["speed_up"], dict)
    for k in (1, 2, 4, 8):
        expected = sum(a**n for n in range(k + 1)) / (1 + k * cost)
        assert found["speed_up"][str(k)] == pytest.approx(expected)


@pytest.mark.parametrize(
    "name",
    ["llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
     "jina-v5-nano", "tekken", "glm4", "dbrx", "qwen2", "gpt-2"],
)  # fmt: skip
def test_who_begins_with_bos(name: str, tmp_path: Path) -> None:
    """The list of llama.cpp, in an importance matrix and in a tokenizer.json alike."""
    adds = name not in ("glm4", "dbrx", "qwen2", "gpt-2")
    folder = small.save(tmp_path, {"tokenizer.json": small.bpe()})
    metadata = {"general.architecture": string("llama")}
    metadata |= tokenizer_metadata(folder, "llama", small.SIZE, {"bos_token_id": 0}, name)
    metadata.pop("tokenizer.ggml.add_bos_token", None)
    assert metadata["tokenizer.ggml.pre"] == string(name)
    assert bos_of(metadata) == (0 if adds else None)
    made = Tokenizer.from_str(tokenizer_files(metadata)["tokenizer.json"].decode())
    assert (made.encode("the").ids[0] == 0) is adds


def test_compare(root: Path, call: Call, tmp_path: Path) -> None:
    """The same figures as eval; the front is what nothing else beats; the plot is well-formed."""
    from xml.etree import ElementTree

    plot = tmp_path / "plot.svg"
    names = ("awq", "gptq", "q4.gguf")
    common = ("--against", "tiny", "--text", root / "text.txt", "--windows", 2, "--length", 32)
    said = call("compare", *(root / n for n in names), *common, "--plot", plot, "--json")
    assert said.status == 0, said.err
    rows = {Path(row["artifact"]).name: row for row in json.loads(said.out)["artifacts"]}
    assert rows.keys() == set(names)
    alone = call("eval", root / "gptq", *common, "--json")
    assert rows["gptq"]["kld"] == json.loads(alone.out)["kld"]
    for name, row in rows.items():
        beaten = [
            other for other in names
            if other != name and rows[other]["size_bytes"] <= row["size_bytes"]
            and rows[other]["kld"]["mean"] <= row["kld"]["mean"]
        ]  # fmt: skip
        assert row["front"] is not bool(beaten), name
    drawn = ElementTree.fromstring(plot.read_text())
    assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == 3
    again = call("compare", root / "awq", *common, "--plot", plot)
    assert again.status == 1 and "exists" in again.err
    assert "measuring" not in said.err + again.err
    said = call("compare", *(root / n for n in names), *common)
    assert said.status == 0 and "same top" in said.out
    steps = [line for line in said.err.splitlines() if not line.startswith("  ")]
    assert steps[0].startswith("reference: taken from ")  # and so not run
    assert steps[-3:] == [f"measuring {k} of 3: {root / n}" for k, n in enumerate(names, 1)]
    assert said.err.count("  window 2/2") == 3
    said = call("compare", root / "awq", root / "gptq", *common, "--no-cache")
    assert said.err.startswith("running the reference: ")


def test_a_text_is_read_as_far_as_its_windows(
    root: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoding, "_AT_ONCE", 4000)
    text = tmp_path / "long.txt"
    text.write_bytes(b"a word and another " * 20_000 + b"\xff")
    for windows, status in ((2, 0), (2000, 1)):
        words = ("--windows", windows, "--length", 64)
        said = call("eval", root / "awq", "--text", text, *words)
        assert said.status == status
        assert ("byte 380000 is not UTF-8" in said.err) == bool(status)


def test_ends_of_lines(root: Path, call: Call, tmp_path: Path) -> None:
    """The plain protocol does not see how a file ends its lines; that of llama.cpp does."""
    text = (root / "text.txt").read_text()
    for name, end in (("unix.txt", "\n"), ("dos.txt", "\r\n")):
        (tmp_path / name).write_bytes(text.replace("\n", end).encode())

    def perplexity(name: str, protocol: str) -> float:
        said = call("eval", root / "awq", "--text", tmp_path / name, "--windows", 2, "--length", 64,
                    "--protocol", protocol, "--json")  # fmt: skip
        return float(json.loads(said.out)["perplexity"])

    assert perplexity("unix.txt", "plain") == perplexity("dos.txt", "plain")
    assert perplexity("unix.txt", "llama.cpp") != perplexity("dos.txt", "llama.cpp")
