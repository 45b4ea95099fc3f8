"""What `verify` sees of gpt-oss's experts in MXFP4, whatever it is compared with."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf, gguf_models
from support.models import gpt_oss
from support.runs import quantizing

LAYER = "model.layers.1.mlp.experts"
State = dict[str, Any]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """plain; made of it: written; the same beside it as GGUF and once more: plain.gguf, twin."""
    from qtool.gguf.from_hf import source as from_hf

    folder = tmp_path_factory.mktemp("gpt-oss")
    quantizing.quantize(gpt_oss.plain(folder / "plain"), "mxfp4-gpt-oss", folder / "written")
    shutil.copytree(folder / "written", folder / "twin")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(from_hf, "tokenizer_metadata", lambda *_, **__: {})
        gguf_from_hf.write(folder / "plain", folder / "plain.gguf", "bf16")
    return folder


def damaged(root: Path, out: Path, damage: Callable[[State], object]) -> Path:
    """A copy without digests, with tensors changed."""
    shutil.copytree(root / "written", out)
    (out / "qtool.json").unlink()
    state = load_file(out / "model.safetensors")
    damage(state)
    save_file(state, out / "model.safetensors", {"format": "pt"})
    return out


def without(*ends: str) -> Callable[[State], object]:
    def damage(state: State) -> None:
        for name in [name for name in state if name.endswith(ends)]:
            del state[name]

    return damage


def swapped(state: State) -> None:
    for last in ("blocks", "scales"):
        name = f"{LAYER}.down_proj_{last}"
        state[name] = state[name][[1, 0, 2, 3, 4]].contiguous()


def zeroed(state: State) -> None:
    state[f"{LAYER}.down_proj_blocks"][2] = 0


def fewer(state: State) -> None:
    for name in [name for name in state if name.endswith(("_blocks", "_scales"))]:
        state[name] = state[name][:4].contiguous()


def transposed(state: State) -> None:
    name = f"{LAYER}.down_proj_blocks"
    state[name] = state[name].transpose(1, 2).contiguous()
    scales = name.replace("blocks", "scales")
    state[scales] = state[scales].transpose(1, 2).contiguous()


def copied(state: State) -> None:
    state[f"{LAYER}.down_proj"] = torch.zeros(5, 96, 64, dtype=torch.bfloat16)


def emptied(state: State) -> None:
    for last, shape in (("blocks", (5, 64, 0, 16)), ("scales", (5, 64, 0))):
        state[f"{LAYER}.down_proj_{last}"] = torch.zeros(shape, dtype=torch.uint8)


def apart(state: State) -> None:
    """Under the names that experts are seen by here, which no engine knows."""
    for last in ("blocks", "scales"):
        whole = state.pop(f"{LAYER}.down_proj_{last}")
        state |= {f"{LAYER}.{n}.down_proj.{last}": one.clone() for n, one in enumerate(whole)}


def errors(path: Path, against: Path | None = None) -> list[str]:
    found = verify_artifact(path, against=against).findings
    return [f"{one.check} {one.name} {one.message}" for one in found if one.severity == "error"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (fewer, "experts"),
        (transposed, "should be"),
        (copied, "both packed and dense"),
        (emptied, "one scale for each group"),
        (apart, "down_proj"),
        (without(f"{LAYER}.down_proj_bias"), "down_proj_bias"),
        (without("_bias"), "_bias"),
    ],
)
def test_damage_is_told_alone(
    damage: Callable[[State], object], said: str, root: Path, tmp_path: Path
) -> None:
    found = errors(damaged(root, tmp_path / "out", damage))
    assert found and any(said in one for one in found), found


@pytest.mark.parametrize("against", ["plain", "twin", "plain.gguf"])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (swapped, f"{LAYER}.0.down_proj"),
        (zeroed, f"{LAYER}.2.down_proj"),
        (without(f"{LAYER}.down_proj_bias"), "down_proj_bias"),
    ],
)
def test_damage_is_told_beside_each_kind_of_source(
    damage: Callable[[State], object], said: str, against: str, root: Path, tmp_path: Path
) -> None:
    found = errors(damaged(root, tmp_path / "out", damage), root / against)
    assert any(said in one for one in found), found


@pytest.mark.parametrize("against", ["plain", "twin", "plain.gguf"])
def test_errors_of_every_expert(against: str, root: Path) -> None:
    found = verify_artifact(root / "written", against=root / against)
    assert len(found.layers) == 20
    assert not [one for one in found.findings if one.severity == "error"]
    largest = max(layer.relative_error for layer in found.layers)
    assert largest == 0 if against == "twin" else 0.1 < largest < 0.13


def test_one_expert(tmp_path: Path) -> None:
    """A stack of one is no matrix of another model."""
    model = gguf_models.build("gpt-oss", tmp_path / "model", dtype="bfloat16")
    state = load_file(model / "model.safetensors")
    for name in [name for name in state if ".mlp." in name]:
        state[name] = state[name][:1].contiguous()
    save_file(state, model / "model.safetensors", {"format": "pt"})
    gguf_models.rewrite_config(
        model, lambda config: config.update(num_local_experts=1, num_experts_per_tok=1)
    )
    made = quantizing.quantize(quantizing.add_tokenizer(model), "mxfp4-gpt-oss", tmp_path / "out")
    assert errors(made.out) == []


def test_other_files_of_that_quant_method(root: Path, tmp_path: Path) -> None:
    """Bytes that are no stacks of experts are named, and not read."""
    from qtool.artifacts.artifact import Artifact
    from qtool.inspecting.inspect import inspect

    def others(state: State) -> None:
        for name in [name for name in state if name.endswith("self_attn.q_proj.weight")]:
            rows, columns = state.pop(name).shape
            state[name] = torch.zeros(rows, columns // 2, dtype=torch.uint8)
            state[f"{name}_scale"] = torch.zeros(rows, columns // 32, dtype=torch.uint8)

    model = damaged(root, tmp_path / "out", others)
    entry = Artifact.open(model).entry("model.layers.0.self_attn.q_proj")
    assert entry.scheme == "mxfp4" and entry.bits_per_weight == 4.25
    assert inspect(model).unquantized < inspect(root / "written").unquantized


def test_the_source_in_one_piece_and_one_by_one(root: Path) -> None:
    from qtool.quality.weights import open_weights
    from qtool.verification.against.one_by_one import one_by_one

    for name in ("twin", "plain.gguf"):
        with open_weights(root / name) as whole:
            view = one_by_one(whole)
            assert view is not whole and f"{LAYER}.gate_up_proj" not in view.tensors
            wanted = whole.float32(f"{LAYER}.gate_up_proj")[3].T
            matrix = f"{LAYER}.3.gate_up_proj.weight"
            assert np.array_equal(view.float32(matrix), wanted)
            part = view.part(matrix, 5, 9).view(np.float32).reshape(4, -1)
            assert np.array_equal(part, wanted[5:9])
            other = "model.layers.0.self_attn.q_proj.weight"
            assert np.array_equal(view.float32(other), whole.float32(other))
