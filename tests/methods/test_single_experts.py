"""gpt-oss whose experts lie one by one, as unsloth trains them: taken as the class has them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.fused_experts import apart
from qtool.checkpoints.single_experts import single_experts, stacked
from qtool.converting.source import opened
from qtool.errors import SourceError
from qtool.quality.weights import open_weights
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf
from support.models import gpt_oss
from support.runs import quantizing
from support.verification.verifying import serious

RTN, GPTQ = "mxfp4-gpt-oss", "mxfp4-gpt-oss-gptq"
EXPERTS = "model.layers.1.mlp.experts"
State = dict[str, torch.Tensor]


def taken_apart(state: State) -> State:
    """Each expert as two linear layers, and the router inside a module of its own."""
    found: State = {}
    for name, tensor in state.items():
        stem, bias = name.removesuffix("_bias"), name.endswith("_bias")
        if not stem.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name.replace(".router.", ".router.linear.")] = tensor
            continue
        for expert, part in enumerate(tensor):
            last = "bias" if bias else "weight"
            found[f"{stem}s.{expert}.{last}"] = (part if bias else part.T).contiguous()
    return found


def saved(plain: Path, out: Path, change: Callable[[State], object] = lambda _: None) -> Path:
    """The same model so, with something changed."""
    shutil.copytree(plain, out)
    state = taken_apart(load_file(plain / "model.safetensors"))
    change(state)
    save_file(state, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gpt_oss.plain(tmp_path_factory.mktemp("gpt-oss") / "plain")


@pytest.fixture(scope="module")
def single(plain: Path) -> Path:
    return saved(plain, plain.parent / "single")


def same(first: Checkpoint, second: Checkpoint) -> None:
    """Names, shapes and every byte, of some of a tensor too."""
    assert first.tensors.keys() == second.tensors.keys()
    for name, info in first.tensors.items():
        other = second.tensors[name]
        assert (info.dtype, info.shape) == (other.dtype, other.shape)
        whole = second.raw(name)
        assert np.array_equal(first.raw(name), whole)
        each = len(whole) // info.shape[0]
        last = info.shape[0] - 1
        assert np.array_equal(first.part(name, 1, last), whole[each : last * each])
        assert first.part(name, 1, 1).size == 0
        assert np.array_equal(first.stretch(name, 3, len(whole) - 5), whole[3:-5])


def test_seen_as_the_class_has_them(plain: Path, single: Path) -> None:
    usual, view = Checkpoint.open(plain), opened(single, requantize=False)
    same(view, usual)
    assert view.digest() == Checkpoint.open(single).digest() != usual.digest()
    with open_weights(single) as weights:
        name = f"{EXPERTS}.down_proj"
        assert np.array_equal(weights.float32(name), usual.float32(name))
    assert stacked(usual) is usual


def test_matrices_one_by_one_are_read_as_they_lie(plain: Path, single: Path) -> None:
    usual, view = Checkpoint.open(plain), opened(single, requantize=False)
    same(apart(view, interleaved=True), apart(usual, interleaved=True))
    one = apart(view, {EXPERTS}.__contains__, interleaved=True)
    same(one, apart(usual, {EXPERTS}.__contains__, interleaved=True))
    assert one.tensors[f"{EXPERTS}.2.down_proj.weight"].start > 0


def test_in_several_files(plain: Path, tmp_path: Path) -> None:
    """Experts of one layer lie in different files."""
    folder = saved(plain, tmp_path / "model")
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number // 2 % 2}.safetensors" for number, name in enumerate(state)}
    assert len({files[f"{EXPERTS}.down_projs.{expert}.weight"] for expert in range(5)}) == 2
    for file in set(files.values()):
        part = {name: tensor for name, tensor in state.items() if files[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    view = opened(folder, requantize=False)
    same(view, Checkpoint.open(plain))
    same(apart(view, interleaved=True), apart(Checkpoint.open(plain), interleaved=True))


@pytest.mark.parametrize("recipe", [RTN, GPTQ])
def test_the_same_artifact(plain: Path, single: Path, tmp_path: Path, recipe: str) -> None:
    text = quantizing.text_file(tmp_path / "text.txt")
    sets = [f"calibration.source={text}", "calibration.samples=2", "calibration.length=64"]
    sets = [*sets, "gptq={guided: 0, yaqa: 0}"] if recipe == GPTQ else []
    first, second = (
        quantizing.quantize(source, recipe, tmp_path / source.name, *sets).out
        for source in (plain, single)
    )
    same(Checkpoint.open(second), Checkpoint.open(first))
    found = verify_artifact(second, against=single)
    assert len(found.layers) == 20 and not [f for f in found.findings if f.severity == "error"]


@pytest.mark.parametrize("recipe", ["bf16", "mxfp4_moe"])
def test_the_same_gguf_file(
    plain: Path, single: Path, tmp_path: Path, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf_from_hf.no_vocabulary(monkeypatch)
    first, second = (
        gguf_from_hf.write(source, tmp_path / f"{source.name}.gguf", recipe)
        for source in (plain, single)
    )
    assert first.tensors.keys() == second.tensors.keys()
    for name in first.tensors:
        assert np.array_equal(gguf_from_hf.raw(first, name), gguf_from_hf.raw(second, name))


def test_verify_names_the_case(single: Path) -> None:
    said = [one.message for one in serious(single) if "unsloth" in one.message]
    assert len(said) == 1 and "save_pretrained_merged" in said[0]
    assert "and 39 more are experts one by one" in said[0]


GONE, BIAS = f"{EXPERTS}.down_projs.3.weight", f"{EXPERTS}.gate_up_projs.2.bias"
FIRST = f"{EXPERTS}.down_projs.0.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop(GONE), rf"lacks {GONE}, where .*down_projs\.4\.weight is there"),
        (lambda state: state.update({BIAS: torch.zeros(7, dtype=torch.bfloat16)}),
         rf"{BIAS} is BF16 \[7\], where expert 0 has BF16 \[192\]"),
        (lambda state: state.update({f"{EXPERTS}.down_proj": torch.zeros(5, 96, 64)}),
         r"has both .*down_proj and .*down_projs\.\d\.weight"),
        (lambda state: state.update({FIRST: torch.zeros(0, 8, dtype=torch.bfloat16)}),
         rf"{FIRST} is \[0, 8\], expected \[out, in\] of an expert"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(
    plain: Path, tmp_path: Path, change: Callable[[State], object], said: str
) -> None:
    folder = saved(plain, tmp_path / "model", change)
    with pytest.raises(SourceError, match=said):
        opened(folder, requantize=False)


def test_codes_are_no_experts(plain: Path, tmp_path: Path) -> None:
    """As bitsandbytes packs them: refused for what they are, elsewhere."""

    def packed(state: State) -> None:
        for name in state:
            if "_projs." in name:
                state[name] = torch.zeros(8, 1, dtype=torch.uint8)

    folder = saved(plain, tmp_path / "model", packed)
    assert not single_experts(Checkpoint.open(folder).tensors)
