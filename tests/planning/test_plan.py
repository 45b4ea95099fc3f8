"""Plans: every tensor is accounted for, sizes are exact, and what cannot be is said at once."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qtool.checkpoints import structure
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.runs.sink import artifact_facts
from qtool.scheme import Dense, Dropped, Scheme
from support.models import arch_models, header_files
from support.planning.planning import plan_of, quantized


def test_llama(tmp_path: Path) -> None:
    shapes = header_files.llama()
    plan = plan_of(tmp_path, shapes, "w4g128-awq", num_hidden_layers=2)
    assert [tensor.name for tensor in plan.tensors] == list(shapes)
    assert str(plan.blocks) == "model.layers.0-1"
    assert plan.counts == {"quantized": 14, "dense": 7, "dropped": 0}
    assert all(name.endswith("_proj") for name in quantized(plan))
    assert plan.by_name["lm_head.weight"].reason == "output head"
    assert plan.by_name["model.layers.1.mlp.up_proj.weight"].block == 1
    assert len(plan.by_block[0]) == 9 and len(plan.by_block[None]) == 3
    # By hand: [768, 256] in 4 bits, 2 groups a row, each with a 16-bit scale and a 4-bit zero.
    assert plan.by_name["model.layers.0.mlp.up_proj.weight"].nbytes == 768 * (128 + 2 * 2.5)
    weights = 2 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256)
    norms, both = 5 * 256, 2 * 512 * 256
    bits = weights * (4 + 20 / 128) + 16 * (norms + both)
    assert plan.bits_per_weight == pytest.approx(bits / (weights + norms + both))
    assert plan.warnings == ()


@pytest.mark.parametrize("name", arch_models.CONFIGS)
def test_architectures_are_read_by_structure(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = arch_models.build(name, tmp_path / name)
    checkpoint = Checkpoint.open(folder)
    plan = make_plan(load("w4g128-awq", ["indivisible=smaller-group"]), checkpoint)
    assert {tensor.name for tensor in plan.tensors} == set(checkpoint.tensors)
    # Every linear layer of every block, told from the model class, but for the routers.
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = structure.text_config(checkpoint.config)
    assert plan.blocks.count == structure.layer_count(config)
    blocks = model.get_submodule(plan.blocks.prefix.removeprefix("language_model."))
    inside = {
        f"{plan.blocks.prefix}.{path}"
        for path, module in blocks.named_modules()
        if type(module).__name__ == "Linear" and not path.endswith(("gate", "router"))
    }
    if name == "sarvam_moe":
        inside = {_as_sarvam(module) for module in inside}
    experts = {tensor for tensor in quantized(plan) if ".experts." in tensor}
    assert quantized(plan) == inside | experts
    if name in ("mixtral", "qwen3_moe", "sarvam_moe"):
        sparse = {tensor.partition(".experts.")[0] for tensor in experts}
        parts = {tensor.rsplit(".", 1)[1] for tensor in experts}
        assert len(parts) == 3 and len(experts) % (len(sparse) * 3) == 0
        routers = [t for t in plan.tensors if (t.reason or "").startswith("router")]
        assert len(routers) == len(sparse)


def _as_sarvam(module: str) -> str:
    """What its checkpoints call a module."""
    joined = re.sub(r"\.[qkv]_proj$", ".query_key_value", module)
    return joined.replace(".o_proj", ".dense").replace(".self_attn.", ".attention.")


def test_names_in_the_wild(tmp_path: Path) -> None:
    """Multimodal prefixes, buffers, blocks that the class does not run, a vision tower."""
    text = {f"language_model.{name}": shape for name, shape in header_files.llama().items()}
    shapes = {
        **text,
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq": (32,),
        "language_model.model.layers.2.eh_proj.weight": (256, 512),
        "vision_tower.encoder.layers.0.mlp.fc1.weight": (4096, 4096),
        "multi_modal_projector.mm_input_projection_weight": (64, 64),
    }
    plan = plan_of(tmp_path, shapes, "w4g64-awq", text_config={"num_hidden_layers": 2})
    assert plan.blocks.prefix == "language_model.model.layers" and plan.blocks.count == 2
    reasons = {tensor.name: tensor.reason or "" for tensor in plan.tensors}
    assert reasons["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] == "buffer"
    assert "beyond the 2" in reasons["language_model.model.layers.2.eh_proj.weight"]
    assert plan.by_name["language_model.model.layers.2.eh_proj.weight"].block is None
    assert reasons["vision_tower.encoder.layers.0.mlp.fc1.weight"] == "outside the decoder blocks"
    assert len(quantized(plan)) == 14


@pytest.mark.parametrize(
    "tower",
    ["vit.layers.0", "model.vqmodel.encoder.down.0", "model.spatial_projectors.0",
     "model.aligner.hidden_layers.0", "talker.model.layers.0", "token2wav.bigvgan.resblocks.0"],
)  # fmt: skip
def test_towers_that_are_larger_than_the_decoder(tower: str, tmp_path: Path) -> None:
    shapes = {**header_files.llama(), f"{tower}.fc1.weight": (4096, 4096)}
    plan = plan_of(tmp_path, shapes, "w4g64-awq", text_config={"num_hidden_layers": 2})
    assert plan.blocks.prefix == "model.layers" and len(quantized(plan)) == 14
    assert plan.by_name[f"{tower}.fc1.weight"].reason == "outside the decoder blocks"


def test_patches_of_images_are_embedded_by_a_linear_layer(tmp_path: Path) -> None:
    """Which loaders must be told of, unlike of tables."""
    more = {"vision_tower.embeddings.patch_embedding.weight": (64, 48),
            "vision_tower.embeddings.position_embedding.weight": (64, 64)}  # fmt: skip
    facts = artifact_facts(plan_of(tmp_path, {**header_files.llama(), **more}, "w4g64-awq"))
    assert facts is not None
    assert "vision_tower.embeddings.patch_embedding" in facts.dense
    assert "vision_tower.embeddings.position_embedding" not in facts.dense


def test_shared_experts_and_routers(tmp_path: Path) -> None:
    shapes = header_files.experts(1, 4) | {
        "model.layers.0.mlp.shared_expert.gate_proj.weight": (128, 256),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 256),
        "model.layers.0.router.layer.weight": (8, 256),
        "model.layers.0.mlp.gate.wg.weight": (128, 256),  # HunYuan's
        "model.layers.0.ffn.gate.weight": (768, 256),  # a gate of an MLP, not of experts
        "model.layers.0.mlp.experts.gate_up_proj": (4, 256, 256),
    }
    asked = 'overrides=[{match: "*.gate_up_proj", dense: true}]'
    plan = plan_of(tmp_path, shapes, "w4g128-gptq", asked)
    dense = {t.name for t in plan.tensors if (t.reason or "").startswith("router")}
    assert dense == {
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate.wg.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.router.layer.weight",
    }
    assert "model.layers.0.ffn.gate" in quantized(plan)
    assert "fused" in (plan.by_name["model.layers.0.mlp.experts.gate_up_proj"].reason or "")
    assert any("may be most of the model" in warning for warning in plan.warnings)


def test_fused_experts_are_told_by_their_shape(tmp_path: Path) -> None:
    """Of Granite's, no name says `experts`; and a run that leaves them dense says how much that is.

    A convolution's kernels are 3-D too, and no experts.
    """
    moe = "model.layers.0.block_sparse_moe"
    shapes = {
        "model.embed_tokens.weight": (512, 256),
        "model.layers.0.self_attn.q_proj.weight": (256, 256),
        "model.layers.0.mixer.conv1d.weight": (256, 1, 4),
        f"{moe}.input_linear.weight": (8, 512, 256),
        f"{moe}.output_linear.weight": (8, 256, 256),
    }
    plan = plan_of(tmp_path, shapes, "w4g128-awq")
    fused = {t.name for t in plan.tensors if (t.reason or "").startswith("experts fused")}
    assert fused == {f"{moe}.input_linear.weight", f"{moe}.output_linear.weight"}
    assert [w for w in plan.warnings if "may be most of the model" in w]
    (said,) = [w for w in plan.warnings if "stay dense" in w and "%" in w]
    assert said.startswith("96% of the weights stay dense") and "experts fused" in said
    numbers = [tensor.parameters for tensor in plan.tensors]
    assert plan.unquantized_share == pytest.approx(1 - 256 * 256 / sum(numbers))
    assert plan.json()["unquantized_share"] == plan.unquantized_share


def test_embeddings_alone_are_no_reason_to_warn(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, header_files.llama(vocabulary=50_000), "w4g128-awq")
    assert plan.unquantized_share > 0.9
    assert not [w for w in plan.warnings if "stay dense" in w]


def test_conv1d_and_quantized_sources_are_refused(tmp_path: Path) -> None:
    shapes = {
        "h.0.attn.c_attn.weight": (64, 192),
        "h.0.attn.c_attn.bias": (192,),
    }
    with pytest.raises(UnsupportedError, match=r"c_attn.weight \[64, 192\] is a Conv1D"):
        plan_of(tmp_path, shapes, "w4g32-gptq")
    with pytest.raises(
        UnsupportedError, match=r"already quantized.*quant_method awq.*convert MODEL --to hf"
    ):
        plan_of(
            tmp_path,
            header_files.llama(),
            "w4g32-gptq",
            quantization_config={"quant_method": "awq"},
        )
    with pytest.raises(QtoolError, match="no numbered decoder blocks"):
        plan_of(tmp_path, {"a.weight": (4, 4)}, "w4g32-gptq")
    with pytest.raises(UnsupportedError, match=r"no tensor is quantized \(tensors by reason: no"):
        plan_of(tmp_path, {"model.layers.0.norm.weight": (4,)}, "w4g32-gptq")


def test_indivisible(tmp_path: Path) -> None:
    shapes = header_files.llama(hidden=576, inner=1536, kv=192)
    with pytest.raises(FormatError) as caught:
        plan_of(tmp_path, shapes, "w4g128-gptq")
    said = str(caught.value)
    assert "12 of 14 matrices" in said and "down_proj" not in said
    assert "in_features 576 is not divisible by group_size 128" in said
    assert "--set weights.group_size=64" in said
    assert "--set indivisible=smaller-group (group 64 for these layers)" in said
    assert "--set indivisible=dense (leaves 75% of the weights unquantized)" in said

    smaller = plan_of(tmp_path, shapes, "w4g128-gptq", "indivisible=smaller-group")
    sizes = {t.module.rsplit(".")[-1]: t.scheme.group_size for t in smaller.quantized if t.scheme}
    assert sizes["down_proj"] == 128 and {sizes[n] for n in ("q_proj", "up_proj")} == {64}
    for recipe in ("w4g128-awq", "w4a8kv4-qserve"):  # whose formats have one for all
        one = plan_of(tmp_path, shapes, recipe, "indivisible=smaller-group")
        assert {t.scheme.group_size for t in one.quantized if t.scheme} == {64}
    dense = plan_of(tmp_path, shapes, "w4g128-gptq", "indivisible=dense")
    assert {name.rsplit(".")[-1] for name in quantized(dense)} == {"down_proj"}


@pytest.mark.parametrize(
    ("recipe", "item", "said"),
    [
        ("w4g128-awq", "weights.bits=3", "format gptq holds 2, 3, 4 and 8). Choose: --set format="),
        ("w4g128-gptq", "weights.bits=5", "Choose: another recipe, or other weights by --set: as"),
        ("w4g128-gptq", "weights.group_size=384", "Choose: --set weights.group_size=256, or "),
    ],
)
def test_each_reason_is_said_once_and_ways_that_lead_on(
    recipe: str, item: str, said: str, tmp_path: Path
) -> None:
    with pytest.raises(FormatError) as caught:
        plan_of(tmp_path, header_files.llama(hidden=256, inner=1024), recipe, item)
    found = str(caught.value)
    assert said in found and found.count(" and 6 more: ") == ("group_size" not in item)
    assert "leaves 100%" not in found and found.count("holds 4 bits only") <= 1


def test_a_block_that_is_not_square_could_be(tmp_path: Path) -> None:
    shapes = header_files.llama(hidden=576, inner=1536, kv=192)
    with pytest.raises(FormatError, match=r"Choose: --set weights\.rows=64$"):  # none would be left
        plan_of(tmp_path, shapes, "fp8-block-hf", "weights.group_size=64")
    sets = ("weights.group_size=64", "weights.rows=64")
    assert len(quantized(plan_of(tmp_path, shapes, "fp8-block-hf", *sets))) == 14


def test_columns_out_of_group_order_do_not_go_into_awq(tmp_path: Path) -> None:
    """Told by the plan, and not by the first block's packing after its calibration."""
    shapes, loose = header_files.llama(), "gptq.static_groups=false"
    with pytest.raises(FormatError) as caught:
        plan_of(tmp_path, shapes, "w4g128-awq-gptq", loose)
    assert "format awq cannot store" in str(caught.value)
    assert "--set gptq.static_groups=true" in str(caught.value)
    for way in ("gptq.act_order=false", "format=gptq", "weights.group_size=-1", "method=awq"):
        assert plan_of(tmp_path, shapes, "w4g128-awq-gptq", loose, way).quantized


def test_indivisible_with_no_way_but_dense(tmp_path: Path) -> None:
    shapes = header_files.llama(hidden=336)  # 16 x 21
    with pytest.raises(FormatError) as caught:
        plan_of(tmp_path, shapes, "w4g128-awq")
    assert "smaller-group" not in str(caught.value) and "indivisible=dense" in str(caught.value)
    with pytest.raises(FormatError, match="even with a smaller group"):
        plan_of(tmp_path, shapes, "w4g128-awq", "indivisible=smaller-group")


def test_parts_of_a_fused_layer_follow_each_other(tmp_path: Path) -> None:
    shapes = header_files.llama(kv=36)  # k and v cannot be packed by 8 outputs, q could
    plan = plan_of(tmp_path, shapes, "w4g128-awq", "indivisible=dense")
    names = {name.rsplit(".")[-1] for name in quantized(plan)}
    assert names == {"o_proj", "gate_proj", "up_proj", "down_proj"}
    assert "fuse" in (plan.by_name["model.layers.0.self_attn.q_proj.weight"].reason or "")


def test_overrides(tmp_path: Path) -> None:
    sets = [
        "overrides=[{match: '*.down_proj', weights: {bits: 8}}, {match: '*.1.*', dense: true}, "
        "{match: lm_head, dense: true}, {match: '*norm', weights: {bits: 8}}]"
    ]
    plan = plan_of(tmp_path, header_files.llama(), "w4g128-gptq", *sets)
    assert plan.by_name["model.layers.0.mlp.down_proj.weight"].action == Scheme(8, 128, True)
    assert plan.by_name["model.layers.0.mlp.up_proj.weight"].action == Scheme(4, 128, True)
    assert {name.split(".")[2] for name in quantized(plan)} == {"0"}
    assert plan.by_name["model.layers.1.mlp.up_proj.weight"].reason == "override '*.1.*'"
    (told,) = [w for w in plan.warnings if "'*norm' matches no quantized tensor" in w]
    assert told.endswith(
        ", but model.layers.0.input_layernorm.weight and 4 more, which stay dense: norm"
    )
    assert not [w for w in plan.warnings if "lm_head" in w]
    sets = [
        "overrides=[{match: '*.1.*', dense: true}, {match: '*.1.*_proj', weights: {bits: 8}}, "
        "{match: '*.1.*.k_proj', weights: {group_size: 64}}, {match: '*.v_proj', dense: true}]"
    ]
    later = plan_of(tmp_path / "later", header_files.llama(), "w4g128-gptq", *sets)
    assert later.by_name["model.layers.1.mlp.up_proj.weight"].action == Scheme(8, 128, True)
    assert later.by_name["model.layers.1.self_attn.k_proj.weight"].action == Scheme(8, 64, True)
    assert later.by_name["model.layers.1.self_attn.v_proj.weight"].reason == "override '*.v_proj'"
    assert not [w for w in later.warnings if "matches no quantized" in w]
    with pytest.raises(FormatError, match="one width"):
        plan_of(
            tmp_path,
            header_files.llama(),
            "w4g128-awq",
            "overrides=[{match: '*.down_proj', weights: {group_size: 64}}]",
        )
    with pytest.raises(FormatError, match="for all modules at once whether weights are symmetric"):
        plan_of(
            tmp_path,
            header_files.llama(),
            "w4g128-awq",
            "overrides=[{match: '*.down_proj', weights: {symmetric: true}}]",
        )
    with pytest.raises(UnsupportedError, match=r"embed_tokens.weight stays dense"):
        plan_of(
            tmp_path, header_files.llama(), "w8-rtn",
            "overrides=[{match: model.embed_tokens, weights: {bits: 8}}]",
        )  # fmt: skip


def test_tied_head(tmp_path: Path) -> None:
    head = "lm_head.weight"
    plan = plan_of(tmp_path, header_files.llama(), "w8-rtn", tie_word_embeddings=True)
    assert plan.by_name[head].action == Dropped(
        "tied to model.embed_tokens.weight, of which it is a copy"
    )
    assert plan.by_name[head].outputs == ()
    assert head not in plan.layout.files[0].tensors
    # One bit of difference, at the very end, and it is kept.
    info = Checkpoint.open(tmp_path).tensors[head]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(info.end - 1)
        file.write(b"\x01")
    assert not [said for said in plan.warnings if "tie_word_embeddings" in said]
    kept = make_plan(load("w8-rtn"), Checkpoint.open(tmp_path))
    again = kept.by_name[head].action
    assert isinstance(again, Dense) and "differs" in again.reason
    (said,) = (said for said in kept.warnings if "tie_word_embeddings" in said)
    assert "transformers takes the head, other engines the embedding" in said
    untied = plan_of(tmp_path, header_files.llama(), "w8-rtn", tie_word_embeddings=False)
    assert untied.by_name[head].reason == "output head"


def test_a_large_tied_head_is_not_read_by_the_plan(tmp_path: Path) -> None:
    """Four gigabytes of zeros that take no room: a plan reads the ends, a run everything."""
    shapes = header_files.llama(vocabulary=4_000_000)
    began = time.process_time()
    plan = plan_of(tmp_path, shapes, "w8-rtn", tie_word_embeddings=True)
    assert time.process_time() - began < 0.5
    assert isinstance(plan.by_name["lm_head.weight"].action, Dropped)
    shapes = header_files.llama(vocabulary=10_000)
    header_files.write(tmp_path, shapes, {"tie_word_embeddings": True})
    checkpoint = Checkpoint.open(tmp_path)
    info = checkpoint.tensors["lm_head.weight"]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.seek(info.start + info.nbytes // 2)
        file.write(b"\x01")
    sampled = make_plan(load("w8-rtn"), checkpoint)
    assert isinstance(sampled.by_name["lm_head.weight"].action, Dropped)
    whole = make_plan(load("w8-rtn"), checkpoint, compare_all=True)
    kept = whole.by_name["lm_head.weight"].action
    assert isinstance(kept, Dense) and "differs" in kept.reason


def test_size_is_that_of_the_files(tmp_path: Path) -> None:
    for max_shard in (10**9, 300_000):
        header_files.write(tmp_path, header_files.llama())
        plan = make_plan(load("w4g128-gptq"), Checkpoint.open(tmp_path), max_shard)
        placed = {name for file in plan.layout.files for name in file.tensors}
        assert placed == {spec.name for tensor in plan.tensors for spec in tensor.outputs}
        assert plan.size_bytes == sum(file.size for file in plan.layout.files)
        assert plan.size_bytes > sum(tensor.nbytes for tensor in plan.tensors)
    assert len(plan.layout.files) > 2


def test_none_keeps_everything(tmp_path: Path) -> None:
    shapes = header_files.llama()
    plan = plan_of(tmp_path, shapes, "w4g128-awq", "method=none", "format=dense")
    assert plan.counts == {"quantized": 0, "dense": len(shapes), "dropped": 0}
    assert plan.bits_per_weight == 16


def test_thousands_of_tensors_in_a_second_without_torch(tmp_path: Path) -> None:
    shapes = header_files.experts(layers=16, count=64)
    header_files.write(tmp_path, shapes, {"num_hidden_layers": 16})
    assert len(shapes) > 3000
    began = time.process_time()
    plan = make_plan(load("w4g128-gptq"), Checkpoint.open(tmp_path))
    assert time.process_time() - began < 1
    assert plan.counts["quantized"] == 16 * 64 * 3
    script = (
        "import sys; from qtool.planning.plan import make_plan;"
        "from qtool.checkpoints.checkpoint import Checkpoint;"
        f"from qtool.recipe.recipe import load; make_plan(load('w4g128-gptq'), "
        f"Checkpoint.open({str(tmp_path)!r})); print(sorted({{'torch', 'transformers', "
        "'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")
