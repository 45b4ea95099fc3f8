"""Parts of layers that engines fuse: q, k and v, gate and up, w1 and w3 of each expert."""

from pathlib import Path

import pytest

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from support.models import arch_models
from support.runs import quantizing


def test_parts_have_one_scale_of_the_whole_matrix(tmp_path: Path) -> None:
    source = quantizing.build("mixtral", tmp_path / "model")
    for recipe, sets in (("nvfp4", []), ("fp8-dynamic", ["weights.rows=-1"])):
        out = quantizing.quantize(source, recipe, tmp_path / recipe, *sets).out
        artifact = Artifact.open(out)

        def whole(module: str, artifact: Artifact = artifact) -> float:
            quant = artifact.read(module)
            return quant.outer if quant.outer is not None else float(quant.scale[0, 0])

        every = set()
        for block in range(2):
            layer = f"model.layers.{block}"
            parts = [{f"self_attn.{p}_proj" for p in "qkv"}]
            parts += [{f"block_sparse_moe.experts.{e}.{w}" for w in ("w1", "w3")} for e in range(4)]
            for group in parts:
                found = {whole(f"{layer}.{module}") for module in group}
                assert len(found) == 1, (recipe, layer, group)
                every |= found
        assert len(every) == 10  # and layers, or experts, have nothing to do with each other


@pytest.mark.parametrize(
    ("name", "match"),
    [
        ("llama", "*.q_proj"),
        ("llama", "*.up_proj"),
        ("mixtral", "*.experts.1.w3"),
        ("mixtral", "*.experts.1.*"),
        ("qwen3_moe", "*.experts.0.gate_proj"),
    ],
)
@pytest.mark.parametrize("change", ["weights: {bits: 4}", "dense: true"])
def test_an_override_that_parts_them_is_told(
    name: str, match: str, change: str, tmp_path: Path
) -> None:
    source = Checkpoint.open(arch_models.build(name, tmp_path))
    sets = [f'overrides=[{{match: "{match}", {change}}}]']
    told = [w for w in make_plan(load("w8a16-ct", sets), source).warnings if "they refuse" in w]
    assert len(told) == 1 and "parts stored differently" in told[0]
    assert not [
        w for w in make_plan(load("w8a16-ct"), source).warnings if "stored differently" in w
    ]
