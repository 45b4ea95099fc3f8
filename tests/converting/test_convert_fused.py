"""Experts that were quantized one by one, and come back in the tensors that their class knows.

The oracle for numbers is the artifact, matrix by matrix; for names and shapes the source; and for
whether it can be used transformers' own loading.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.converting import from_artifact, fused
from qtool.converting.certificate import Converted
from qtool.diff.diff import diff
from qtool.errors import FormatError
from qtool.formats import safetensors_writer
from qtool.formats.safetensors_file import StreamWriter
from qtool.messages.progress import Progress
from qtool.verification.run import verify_artifact
from support.converting import converting
from support.converting.killed_conversions import killed, steps
from support.gguf import gguf_models
from support.models import arch_models
from support.models.transposed_experts import transposed
from support.runs import quantizing
from support.verification.verifying import forget_digests

RECIPE, GROUPS = "w4g64-rtn", ("weights.group_size=16", "indivisible=dense")
# Of two experts that stay dense in one matrix each.
MIXED = (
    'overrides=[{match: "*.layers.0.*.experts.1.up_proj*", dense: true}, '
    '{match: "*.layers.1.*.experts.2.down_proj*", dense: true}]'
)


@dataclass(frozen=True)
class Case:
    """How the released checkpoints of a class have the experts of block 0."""

    gate_up: str
    down: str
    transposed: bool


CASES = {
    "granite-moe": Case(
        "model.layers.{}.block_sparse_moe.input_linear.weight",
        "model.layers.{}.block_sparse_moe.output_linear.weight",
        False,
    ),
    "qwen3_vl_moe": Case(
        "model.language_model.layers.{}.mlp.experts.gate_up_proj",
        "model.language_model.layers.{}.mlp.experts.down_proj",
        True,
    ),
    "llama4": Case(
        "model.layers.{}.feed_forward.experts.gate_up_proj",
        "model.layers.{}.feed_forward.experts.down_proj",
        True,
    ),
}


@dataclass(frozen=True)
class Made:
    """A model of a case, its artifact, and what that was converted to."""

    case: Case
    source: Path
    artifact: Path
    dense: Path
    converted: Converted


def source_of(name: str, folder: Path) -> Path:
    if name == "granite-moe":
        return quantizing.add_tokenizer(gguf_models.build(name, folder, dtype="float32"))
    return transposed(name, folder)[0]


@pytest.fixture(scope="module", params=CASES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    name: str = request.param
    root = tmp_path_factory.mktemp(name)
    source = source_of(name, root / "source")
    quantizing.quantize(source, RECIPE, root / "artifact", *GROUPS, MIXED)
    said = converting.converted(root / "artifact", "hf", root / "dense", dtype="float32")
    return Made(CASES[name], source, root / "artifact", root / "dense", said)


def matrices(artifact: Path) -> dict[str, NDArray[np.float32]]:
    """Those of experts, each by itself."""
    found = converting.numbers(artifact)
    return {name: value for name, value in found.items() if ".experts." in name}


def together(apart: dict[str, NDArray[np.float32]], case: Case, block: int, kind: str) -> Any:
    """What the fused tensor of a block has to hold."""
    name = (case.gate_up if kind == "gate_up" else case.down).format(block)
    parent = name.removesuffix(".weight").rpartition(".")[0].removesuffix(".experts")
    parts = ("gate_proj", "up_proj") if kind == "gate_up" else ("down_proj",)
    count = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in apart)
    experts = [
        np.concatenate([apart[f"{parent}.experts.{e}.{part}.weight"] for part in parts])
        for e in range(count)
    ]
    stack = np.stack(experts)
    return stack.swapaxes(1, 2) if case.transposed else stack


def shapes(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    tensors = Checkpoint.open(folder).tensors
    return {name: (info.shape, info.dtype) for name, info in tensors.items()}


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    seeing = "vision_config" in (folder / "config.json").read_text()
    family = AutoModelForImageTextToText if seeing else AutoModelForCausalLM
    found: tuple[Any, dict[str, Any]] = family.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32, experts_implementation="eager"
    )
    return found


def test_names_and_shapes_are_those_of_the_source(made: Made) -> None:
    assert shapes(made.dense) == shapes(made.source)
    assert not matrices(made.dense).keys() & matrices(made.artifact).keys()


def test_every_number_is_the_artifacts(made: Made) -> None:
    apart, dense = matrices(made.artifact), converting.numbers(made.dense)
    entries = Artifact.open(made.artifact).entries
    assert {entries[name].scheme is None for name in apart} == {True, False}
    for block in (0, 1):
        for kind, name in (("gate_up", made.case.gate_up), ("down", made.case.down)):
            expected = together(apart, made.case, block, kind)
            np.testing.assert_array_equal(dense[name.format(block)], expected)


def test_what_it_says_of_itself(made: Made) -> None:
    said, entries = made.converted, Artifact.open(made.artifact).entries
    assert said.certificate.exact and said.certificate.compared == len(shapes(made.source))
    quantized = [entry for entry in entries.values() if entry.scheme is not None]
    assert said.certificate.matrices == len(quantized) == sum(said.dequantized.values())


def test_transformers_loads_it(made: Made) -> None:
    """Every key, and the logits are those of its class with the artifact's numbers for experts."""
    model, info = loaded(made.dense)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    other, _ = loaded(made.source)
    apart = matrices(made.artifact)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if parameter.ndim != 3 or ".experts." not in name:
                parameter.copy_(model.get_parameter(name))
                continue
            block = int(name.split("layers.")[1].split(".")[0])
            kind = "gate_up" if "gate_up" in name else "down"
            value = torch.from_numpy(np.ascontiguousarray(together(apart, made.case, block, kind)))
            parameter.copy_(value if value.shape == parameter.shape else value.mT)
        tokens = torch.arange(3, 40)[None] % arch_models.VOCABULARY
        found, expected = model(tokens).logits, other(tokens).logits
    assert torch.equal(found, expected) and found.std() > 0


def test_it_is_compared_expert_by_expert(made: Made) -> None:
    found = diff(made.artifact, made.dense, Progress(quiet=True))
    numbers = [one.numbers for one in found.tensors if ".experts." in one.name]
    assert all(one is None or one.relative == 0 for one in numbers)
    assert verify_artifact(made.dense, against=made.source).ok


def test_what_is_rounded_is_said_of_the_whole_tensor(made: Made, tmp_path: Path) -> None:
    said = converting.converted(made.artifact, "hf", tmp_path / "out", dtype="bfloat16")
    rounded = {one.name: one for one in said.certificate.rounded}
    name = made.case.gate_up.format(0)
    assert name in rounded and not any(".experts.0." in one for one in rounded)
    exact = together(matrices(made.artifact), made.case, 0, "gate_up")
    found = converting.numbers(tmp_path / "out")[name]
    bits = torch.from_numpy(np.ascontiguousarray(exact)).to(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(found, bits)
    error = np.linalg.norm(exact - found) / np.linalg.norm(exact)
    assert rounded[name].relative_error == pytest.approx(error, rel=1e-4)
    assert "F32 and w4" in rounded[name].why  # one of its matrices is dense


def test_killed_within_a_fused_tensor_it_goes_on(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    order = list(shapes(made.dense))  # all are of one width, so in the order of writing

    def make() -> None:
        converting.run(made.artifact, "hf", out, dtype="float32")

    done = 0
    for before in sorted(
        order.index(name.format(1)) for name in (made.case.down, made.case.gate_up)
    ):
        killed(make, before - done)
        done = len(steps(out))
        assert done == before
    written: list[str] = []
    add = StreamWriter.add_parts

    def added(writer: StreamWriter, name: str, parts: Any) -> None:
        written.append(name)
        add(writer, name, parts)

    monkeypatch.setattr(StreamWriter, "add_parts", added)
    make()
    first = (made.case.gate_up.format(0), made.case.down.format(0))
    assert written and not set(first) & set(written)
    assert quantizing.files(out) == quantizing.files(made.dense)


def test_no_tensor_is_whole_in_memory(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[tuple[int, int]] = []  # from where, and how many bytes
    back: list[tuple[int, int]] = []
    write, read = StreamWriter._write, safetensors_writer.read_range

    def counted(writer: StreamWriter, file: str, position: int, data: memoryview) -> None:
        written.append((position, len(data)))
        write(writer, file, position, data)

    def seen(path: Path, info: Any) -> Any:
        back.append((info.start, info.nbytes))
        return read(path, info)

    monkeypatch.setattr(StreamWriter, "_write", counted)
    monkeypatch.setattr(safetensors_writer, "read_range", seen)
    monkeypatch.setattr(safetensors_writer, "_AT_ONCE", 1000)
    converting.run(made.artifact, "hf", tmp_path / "out", dtype="float32")
    found = Checkpoint.open(tmp_path / "out").tensors
    names = [made.case.gate_up.format(0), made.case.down.format(0)]
    for info in (found[name] for name in names):
        expert = info.nbytes // info.shape[0]
        for pieces, most in ((written, expert), (back, 1000)):
            inside = [size for start, size in pieces if info.start <= start < info.end]
            assert sum(inside) >= info.nbytes and max(inside) <= most


def edited(made: Made, folder: Path, drop: str, add: str | None = None) -> Path:
    """The artifact without a matrix of an expert, or with it a second time, as another one's."""
    shutil.copytree(made.artifact, folder)
    forget_digests(folder)
    state = load_file(folder / "model.safetensors")
    kept = {n: t for n, t in state.items() if drop not in n}
    if add is not None:
        more = {n.replace(drop, add): t.clone() for n, t in state.items() if drop in n}
        kept = state | more
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models that no table of qtool's knows, of which nothing is sure to be missing."""
    monkeypatch.setattr(from_artifact, "check_whole", lambda checkpoint: [])


@pytest.mark.usefixtures("untold")
@pytest.mark.parametrize("part", ["2.up_proj.", "1.down_proj.", "0."])
def test_a_layer_that_lacks_an_expert_is_refused(made: Made, part: str, tmp_path: Path) -> None:
    artifact = edited(made, tmp_path / "artifact", f"layers.1{middle(made)}.experts.{part}")
    with pytest.raises(FormatError, match=rf"has no '.*\.experts\.{part}.*weight', one of the"):
        converting.run(artifact, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("untold")
def test_an_expert_too_many_is_refused(made: Made, tmp_path: Path) -> None:
    at = f"layers.1{middle(made)}.experts."
    artifact = edited(made, tmp_path / "artifact", f"{at}3.up_proj.", f"{at}300.up_proj.")
    with pytest.raises(FormatError, match=r"experts\.300\.up_proj\.weight', an expert more"):
        converting.run(artifact, "hf", tmp_path / "out")


@pytest.mark.usefixtures("untold")
def test_experts_of_another_size_are_refused(made: Made, tmp_path: Path) -> None:
    at = f"layers.1{middle(made)}.experts.3"
    artifact = edited(made, tmp_path / "artifact", f"{at}.up_proj.")
    state = load_file(artifact / "model.safetensors")
    state |= {n.replace(f"{at}.down_proj.", f"{at}.up_proj."): t.clone() for n, t in state.items()}
    save_file(state, artifact / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"up_proj\.weight' has the shape \[64, .*has experts of"):
        converting.run(artifact, "hf", tmp_path / "out")


def middle(made: Made) -> str:
    """Between the number of a layer and `.experts`."""
    name = next(iter(matrices(made.artifact)))
    return "." + name.split("layers.")[1].partition(".")[2].partition(".experts.")[0]


@pytest.mark.parametrize("kind", ["qwen3_moe", "nobody", ""])
def test_what_no_class_is_known_of_is_written_as_it_is(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-MoE's takes experts apart; and of others transformers does not know."""
    source = quantizing.add_tokenizer(arch_models.build("qwen3_moe", tmp_path / "source"))
    artifact = quantizing.quantize(source, RECIPE, tmp_path / "artifact", *GROUPS).out
    if kind != "qwen3_moe":
        forget_digests(artifact)
        gguf_models.rewrite_config(
            artifact,
            lambda config: config.update({"model_type": kind or 5, "num_hidden_layers": 2}),
        )
    found = converting.run(artifact, "hf", tmp_path / "found")
    assert any(".experts.0.gate_proj.weight" in name for name in shapes(found))
    monkeypatch.setattr(fused, "layer_of", lambda name: None)  # as if it had no experts
    assert quantizing.files(converting.run(artifact, "hf", tmp_path / "as-before")) == (
        quantizing.files(found)
    )
