"""`qtool verify FILE.gguf --against SOURCE`, where scales were folded into what FILE is made of."""

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import quantizing
import torch
from converting import first_block, run
from gguf_from_hf import no_vocabulary, write
from safetensors.torch import load_file, save_file
from small_models import checkpoint

from qtool.verification.finding import Finding
from qtool.verification.run import verify_artifact

Weights = dict[str, torch.Tensor]
ATTENTION, DENSE = "model.layers.0.self_attn.", "model.layers.0.mlp."
EXPERTS = "model.layers.0.block_sparse_moe."
NORMS = ("model.layers.0.input_layernorm.weight", "model.layers.0.post_attention_layernorm.weight")


def scales(size: int, seed: int) -> torch.Tensor:
    """From a quarter to four."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(np.exp2(random.uniform(-2, 2, size)).astype(np.float32))


def times(weights: Weights, name: str, rows: object = 1, columns: object = 1) -> None:
    by = torch.as_tensor(rows).reshape(-1, 1) * torch.as_tensor(columns).reshape(1, -1)
    weights[name] = weights[name] * by


def norm_folded(weights: Weights, norm: str, readers: list[str], seed: int) -> None:
    c = scales(weights[norm].numel(), seed)
    weights[norm] = weights[norm] / c
    for name in readers:
        times(weights, name, columns=c)


def dense(weights: Weights) -> None:
    norm_folded(weights, NORMS[0], [f"{ATTENTION}{one}_proj.weight" for one in "qkv"], 1)
    norm_folded(weights, NORMS[1], [f"{DENSE}{one}_proj.weight" for one in ("gate", "up")], 2)
    up, values = scales(768, 3), scales(128, 4)
    times(weights, f"{DENSE}up_proj.weight", rows=up)
    times(weights, f"{DENSE}down_proj.weight", columns=1 / up)
    times(weights, f"{ATTENTION}v_proj.weight", rows=values)
    for_queries = (
        values.reshape(2, 1, 64).expand(2, 2, 64).reshape(-1)
    )  # of four heads, two of keys
    times(weights, f"{ATTENTION}o_proj.weight", columns=1 / for_queries)


def experts(weights: Weights) -> None:
    names = [f"{EXPERTS}experts.{n}.w{k}.weight" for n in range(4) for k in (1, 3)]
    norm_folded(weights, NORMS[1], [f"{EXPERTS}gate.weight", *names], 1)
    for n in range(4):
        own = scales(96, n)
        times(weights, f"{EXPERTS}experts.{n}.w3.weight", rows=own)
        times(weights, f"{EXPERTS}experts.{n}.w2.weight", columns=1 / own)


def found(source: Path, tmp_path: Path, change: Callable[[Weights], None]) -> list[Finding]:
    """Of a file in Q8_0 that was made of changed weights."""
    changed = shutil.copytree(source, tmp_path / "changed")
    weights = {n: t.float() for n, t in load_file(changed / "model.safetensors").items()}
    change(weights)
    weights = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(weights, changed / "model.safetensors", metadata={"format": "pt"})
    write(changed, tmp_path / "x.gguf", "q8_0")
    verdict = verify_artifact(tmp_path / "x.gguf", against=source, threads=1)
    return [f for f in verdict.findings if f.check not in ("digests", "provenance")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return first_block(tmp_path_factory.mktemp("tiny") / "tiny")


def test_scales_of_norms_and_rows(tiny: Path, tmp_path: Path) -> None:
    (note,) = found(tiny, tmp_path, dense)
    assert (note.severity, note.check) == ("note", "smoothing")
    assert "2 norms and 7 matrices have scales folded in" in note.message


def test_scales_of_experts(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its own; the router reads the norm, too."""
    no_vocabulary(monkeypatch)
    source = checkpoint(tmp_path_factory.mktemp("models"), "mixtral", "bfloat16").path
    (note,) = found(source, tmp_path, experts)
    assert note.severity == "note" and "1 norm and 4 matrices" in note.message


@pytest.mark.parametrize(
    ("name", "rows", "columns", "said"),
    [
        (f"{ATTENTION}k_proj.weight", 1, 256, "blk.0.attn_k.weight"),  # columns of its own
        (f"{DENSE}down_proj.weight", 1, 768, "blk.0.ffn_down.weight"),  # not the inverse of up's
        (f"{ATTENTION}o_proj.weight", 256, 1, "blk.0.attn_output.weight"),
    ],
)
def test_half_a_fold_is_an_error(
    tiny: Path, tmp_path: Path, name: str, rows: int, columns: int, said: str
) -> None:
    """One matrix was not scaled as its neighbours were."""

    def change(weights: Weights) -> None:
        dense(weights)
        times(weights, name, scales(rows, 7) if rows > 1 else 1, scales(columns, 8))

    errors = [f for f in found(tiny, tmp_path, change) if f.severity == "error"]
    assert [f.check for f in errors] == ["layer-error"]
    assert said in errors[0].message


def test_a_norm_that_nothing_makes_up_for(tiny: Path, tmp_path: Path) -> None:
    def change(weights: Weights) -> None:
        weights[NORMS[0]] = weights[NORMS[0]] / scales(256, 1)

    (error,) = found(tiny, tmp_path, change)
    assert error.severity == "error" and "blk.0.attn_norm.weight is off" in error.message


def test_a_converted_artifact(tmp_path: Path) -> None:
    """Scales of AWQ that the file does not record."""
    source = first_block(tmp_path / "tiny")
    artifact = quantizing.quantize(source, "mxfp4-awq-gptq", tmp_path / "out").out
    file = run(artifact, "gguf", tmp_path / "x.gguf")
    verdict = verify_artifact(file, against=source, threads=1)
    assert {f.severity for f in verdict.findings} == {"note"}
    assert any(f.check == "smoothing" for f in verdict.findings)
