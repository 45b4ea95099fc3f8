"""Plans: every tensor is accounted for, sizes are exact, and what cannot be is said at once."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import arch_models
import header_files
import pytest

from qtool import structure
from qtool.checkpoint import Checkpoint
from qtool.errors import FormatError, QtoolError, UnsupportedError
from qtool.plan import estimate
from qtool.plan.plan import Plan, make_plan
from qtool.plan.rows import rows, scheme_of
from qtool.recipe.recipe import load
from qtool.runs.planned_view import planned_view
from qtool.scheme import Dense, Dropped, Scheme
from qtool.verification.engine_rules import view_findings


def plan_of(
    folder: Path, shapes: header_files.Shapes, recipe: str, *sets: str, **config: Any
) -> Plan:
    header_files.write(folder, shapes, config)
    return make_plan(load(recipe, sets), Checkpoint.open(folder))


def quantized(plan: Plan) -> set[str]:
    return {tensor.module for tensor in plan.quantized}


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
    experts = {tensor for tensor in quantized(plan) if ".experts." in tensor}
    assert quantized(plan) == inside | experts
    if name in ("mixtral", "qwen3_moe"):
        sparse = {tensor.partition(".experts.")[0] for tensor in experts}
        parts = {tensor.rsplit(".", 1)[1] for tensor in experts}
        assert len(parts) == 3 and len(experts) % (len(sparse) * 3) == 0
        routers = [t for t in plan.tensors if (t.reason or "").startswith("router")]
        assert len(routers) == len(sparse)


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


def test_shared_experts_and_routers(tmp_path: Path) -> None:
    shapes = header_files.experts(1, 4) | {
        "model.layers.0.mlp.shared_expert.gate_proj.weight": (128, 256),
        "model.layers.0.mlp.shared_expert_gate.weight": (1, 256),
        "model.layers.0.router.layer.weight": (8, 256),
        "model.layers.0.ffn.gate.weight": (768, 256),  # a gate of an MLP, not of experts
        "model.layers.0.mlp.experts.gate_up_proj": (4, 256, 256),
    }
    plan = plan_of(tmp_path, shapes, "w4g128-gptq")
    dense = {t.name for t in plan.tensors if (t.reason or "").startswith("router")}
    assert dense == {
        "model.layers.0.mlp.gate.weight",
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
    with pytest.raises(UnsupportedError, match=r"already quantized.*quant_method awq"):
        plan_of(
            tmp_path,
            header_files.llama(),
            "w4g32-gptq",
            quantization_config={"quant_method": "awq"},
        )
    with pytest.raises(QtoolError, match="no numbered decoder blocks"):
        plan_of(tmp_path, {"a.weight": (4, 4)}, "w4g32-gptq")
    with pytest.raises(UnsupportedError, match="no tensor is quantized"):
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
    one = plan_of(tmp_path, shapes, "w4g128-awq", "indivisible=smaller-group")
    assert {t.scheme.group_size for t in one.quantized if t.scheme} == {64}
    dense = plan_of(tmp_path, shapes, "w4g128-gptq", "indivisible=dense")
    assert {name.rsplit(".")[-1] for name in quantized(dense)} == {"down_proj"}


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
    assert [w for w in plan.warnings if "'*norm' matches no quantized tensor" in w]
    assert not [w for w in plan.warnings if "lm_head" in w]
    with pytest.raises(FormatError, match="one width"):
        plan_of(
            tmp_path,
            header_files.llama(),
            "w4g128-awq",
            "overrides=[{match: '*.down_proj', weights: {group_size: 64}}]",
        )
    with pytest.raises(UnsupportedError, match=r"lm_head.weight stays dense"):
        plan_of(
            tmp_path, header_files.llama(), "w8-rtn",
            "overrides=[{match: lm_head, weights: {bits: 8}}]",
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
    again = make_plan(load("w8-rtn"), Checkpoint.open(tmp_path)).by_name[head].action
    assert isinstance(again, Dense) and "differs" in again.reason
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


@pytest.mark.parametrize(
    ("recipe", "sets", "words"),
    [
        ("w4g128-gptq", ["weights.symmetric=false"], "refuse asymmetric GPTQ"),
        ("w3g128-rtn", [], "no Marlin kernel"),
        ("w4g128-awq", ["awq.layout=gemv"], "AWQ layout gemv"),
        ("w4g128-gptq", ["gptq.static_groups=false"], "desc_act"),
        ("w4g128-gptq", ["weights.group_size=256", "indivisible=dense"], "group_size 256"),
        (
            "w4g128-gptq",
            ["overrides=[{match: '*.v_proj', weights: {bits: 8}}]"],
            "2 layers that vLLM and SGLang fuse have parts stored differently",
        ),
    ],
)
def test_what_engines_refuse_is_said(
    recipe: str, sets: list[str], words: str, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, header_files.llama(), recipe, *sets)
    assert [warning for warning in plan.warnings if words in warning]
    assert len(plan.warnings) == 1


def test_experts_of_a_block_are_one_layer_for_engines(tmp_path: Path) -> None:
    shapes = header_files.experts(2, 4)
    other = "overrides=[{match: 'model.layers.1.*.down_proj', weights: {bits: 8}}]"
    (said,) = plan_of(tmp_path, shapes, "w4g128-gptq", other).warnings
    assert said.startswith("1 layers that vLLM and SGLang fuse have parts stored differently")
    both = "overrides=[{match: 'model.layers.1.*experts.*', weights: {bits: 8}}]"
    assert not plan_of(tmp_path, shapes, "w4g128-gptq", both).warnings
    # One expert that does not fit leaves its whole layer dense.
    shapes["model.layers.0.mlp.experts.2.down_proj.weight"] = (36, 128)
    plan = plan_of(tmp_path, shapes, "w4g128-awq", "indivisible=dense")
    assert {name.split(".")[2] for name in quantized(plan)} == {"1"}


def test_scales_that_engines_round_are_noted(tmp_path: Path) -> None:
    header_files.write(tmp_path, header_files.llama(), dtype="BF16")
    for recipe in ("w4g128-awq", "w4g128-gptq"):
        (said,) = make_plan(load(recipe), Checkpoint.open(tmp_path)).warnings
        assert said.startswith("note: scales are stored in float16") and "bfloat16" in said
    dense = load("w4g128-awq", ["method=none", "format=dense"])
    assert not make_plan(dense, Checkpoint.open(tmp_path)).warnings


def test_marlin_note_and_missing_layers(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, header_files.llama(kv=96), "w4g128-awq", num_hidden_layers=3)
    assert "config.json says 3 layers, the checkpoint has 2" in plan.warnings[0]
    assert plan.warnings[1].startswith("note: 4 of 14 matrices are no multiples")


@pytest.mark.parametrize(
    ("recipe", "sets", "idle"),
    [
        ("w4g128-gptq", ["rtn.clip=true"], "rtn.clip"),
        ("w4g128-awq", ["method=[awq, rtn]", "awq.clip=true"], "awq.clip"),
        ("w4g128-awq-gptq", ["awq.clip=true", "gptq.layout=v2"], "gptq.layout awq.clip"),
        ("w4g128-gptq", ["awq.layout=gemv", "awq.grid=10", "awq.grid=20"], "awq.layout"),
        ("w4g128-rtn", ["gptq.mse=false", "gptq.act_order=true"], "gptq.mse"),
        ("w4g128-awq", ["method=[awq, rtn]", "awq.clip=false", "rtn.clip=true"], ""),
        ("w4g128-awq", ["awq.clip=true", "awq.grid=10", "awq.layout=gemm"], ""),
        ("w4g128-gptq", ["gptq.damp_percent=0.1", "gptq.layout=v1"], ""),
    ],
)
def test_options_that_do_nothing_are_said(
    recipe: str, sets: list[str], idle: str, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, header_files.llama(), recipe, *sets)
    said = [w.split()[0] for w in plan.warnings if "has no effect with method" in w]
    assert said == idle.split()


@pytest.mark.parametrize(
    ("recipe", "sets", "said"),
    [
        ("w4g128-awq", ["rotate.r4=true"],
         "rotate.r4 has no effect without the transform rotate: add `transforms: [rotate]`"),
        ("w8a8-smoothquant", ["rotate.seed=1"], "add `transforms: [rotate, smooth]`"),
        ("w4g128-awq", ["transforms=[smooth]", "smooth_attention.alpha=0.3"],
         "smooth_attention.alpha has no effect without the transform smooth-attention: add "
         "`transforms: [smooth, smooth-attention]`"),
        ("w8a8-dynamic", ["smooth.alpha=0.3"], "smooth.alpha has no effect without the transform"),
        ("w8a8-smoothquant", ["smooth.alpha=0.4", "smooth.grid=3"],
         "smooth.grid has no effect without smooth.alpha: search"),
        ("w4-gptq-rotated", ["rotate.steps=3"],
         "rotate.steps has no effect without rotate.kind: learned"),
    ],
)  # fmt: skip
def test_options_of_transforms_that_do_nothing_name_what_is_missing(
    recipe: str, sets: list[str], said: str, tmp_path: Path
) -> None:
    plan = plan_of(tmp_path, header_files.llama(2, 256, 512, 256), recipe, *sets)
    (found,) = (w for w in plan.warnings if "has no effect" in w)
    assert said in found


def test_codes_that_take_more_bits_than_they_have_are_said(tmp_path: Path) -> None:
    shapes = {"model.layers.0.mlp.up_proj.weight": (64, 128)}
    for sets, told in ((["weights.bits=4"], True), ([], False)):
        plan = plan_of(tmp_path, shapes, "w8a8-dynamic", *sets)
        said = [w for w in plan.warnings if "codes take 8 bits each" in w]
        assert bool(said) == told, plan.warnings
    # A byte a code, and a scale of two bytes a row of 128.
    plan = plan_of(tmp_path, shapes, "w8a8-dynamic", "weights.bits=4")
    (said,) = (w for w in plan.warnings if "codes take" in w)
    assert said.startswith("note: 4-bit codes take 8 bits each in int-quantized")
    assert said.endswith(": 8.125 bits per weight with their scales")


def test_missing_files_are_said(tmp_path: Path) -> None:
    header_files.write(tmp_path, header_files.llama())
    recipe = load("w4g128-awq")
    assert not make_plan(recipe, Checkpoint.open(tmp_path)).warnings
    (tmp_path / "tokenizer.json").unlink()
    (said,) = make_plan(recipe, Checkpoint.open(tmp_path)).warnings
    assert said.startswith("note: ") and "no tokenizer" in said
    (tmp_path / "config.json").unlink()
    said, _ = make_plan(recipe, Checkpoint.open(tmp_path)).warnings
    assert str(tmp_path) not in said and "no config.json, so engines cannot load" in said


def test_none_keeps_everything(tmp_path: Path) -> None:
    shapes = header_files.llama()
    plan = plan_of(tmp_path, shapes, "w4g128-awq", "method=none", "format=dense")
    assert plan.counts == {"quantized": 0, "dense": len(shapes), "dropped": 0}
    assert plan.bits_per_weight == 16


def test_estimates_grow_with_the_work(tmp_path: Path) -> None:
    small, deep, wide = (
        plan_of(tmp_path / str(i), header_files.llama(**kind), "w4g128-gptq")
        for i, kind in enumerate(({}, {"layers": 8}, {"hidden": 2048, "inner": 8192}))
    )
    assert small.peak_rss_bytes == deep.peak_rss_bytes < wide.peak_rss_bytes
    assert small.seconds < deep.seconds < wide.seconds
    header_files.write(tmp_path / "r", header_files.llama(hidden=2048, inner=8192))
    rtn = make_plan(load("w4g128-rtn"), Checkpoint.open(tmp_path / "r"))
    assert rtn.peak_rss_bytes < wide.peak_rss_bytes and rtn.seconds < wide.seconds


def test_estimates_count_the_proof_of_a_rotation(tmp_path: Path) -> None:
    """The proof needs torch, and two copies of a block; the head and the embedding are made."""

    def plan(name: str, recipe: str, threads: int = 1, **kind: int) -> Plan:
        header_files.write(tmp_path / name, header_files.llama(**kind))
        loaded = load(recipe, ["transforms=[rotate]"])
        return make_plan(loaded, Checkpoint.open(tmp_path / name), threads=threads)

    small, deep = plan("a", "w8a8-dynamic"), plan("b", "w8a8-dynamic", layers=8)
    plain = make_plan(load("w8a8-dynamic"), Checkpoint.open(tmp_path / "b"), threads=1)
    assert small.peak_rss_bytes == deep.peak_rss_bytes and small.seconds < deep.seconds
    assert plain.peak_rss_bytes < estimate.PROVING_PROCESS_BYTES < small.peak_rss_bytes
    assert plain.seconds + estimate.STARTUP_SECONDS[True] <= deep.seconds
    wide = plan("c", "w8a8-dynamic", hidden=2048, inner=8192)
    block = sum(4 * tensor.parameters for tensor in wide.by_block[0])
    assert wide.peak_rss_bytes > estimate.PROVING_PROCESS_BYTES + 2 * block
    one, two = (plan("d", "w8a8-dynamic", n, vocabulary=500_000) for n in (1, 2))
    table = max(tensor.parameters for tensor in one.by_block[None])
    assert one.peak_rss_bytes == estimate.PROVING_PROCESS_BYTES + 6 * table
    assert two.peak_rss_bytes == one.peak_rss_bytes + 6 * table


def test_estimates_are_for_the_cores_a_run_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.plan.estimate.os.cpu_count", lambda: 256)
    monkeypatch.setattr("qtool.plan.estimate.os.sched_getaffinity", lambda _: {3}, raising=False)
    one = plan_of(tmp_path, header_files.llama(layers=8), "w4g128-gptq")
    monkeypatch.setattr("qtool.plan.estimate.os.sched_getaffinity", lambda _: {3, 4}, raising=False)
    two = plan_of(tmp_path, header_files.llama(layers=8), "w4g128-gptq")
    assert one.seconds > two.seconds and one.peak_rss_bytes < two.peak_rss_bytes


def test_few_experts_cost_less_time_than_all(tmp_path: Path) -> None:
    shapes = header_files.experts(1, 16)
    every = plan_of(tmp_path, shapes, "w4g128-gptq", num_experts=16, num_experts_per_tok=16)
    two = plan_of(tmp_path, shapes, "w4g128-gptq", num_experts=16, num_experts_per_tok=2)
    assert two.seconds < every.seconds
    assert two.peak_rss_bytes <= every.peak_rss_bytes


def test_json_keys_and_rows(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, header_files.llama(layers=12), "w4g128-awq", tie_word_embeddings=True)
    found = json.loads(json.dumps(plan.json()))
    assert set(found) >= {"tensors", "size_bytes", "bits_per_weight", "peak_rss_bytes", "seconds"}
    assert set(found["tensors"][0]) == {"name", "shape", "scheme", "reason", "bytes"}
    by_name = {tensor["name"]: tensor for tensor in found["tensors"]}
    assert by_name["model.layers.3.mlp.up_proj.weight"]["scheme"] == "w4 g128 asym"
    assert by_name["model.layers.3.mlp.up_proj.weight"]["reason"] is None
    assert by_name["lm_head.weight"]["reason"].startswith("dropped: tied")
    assert by_name["lm_head.weight"]["bytes"] == 0
    lines = list(rows(plan.tensors, scheme_of))
    assert len(lines) == 12 and sum(line.count for line in lines) == len(plan.tensors)
    assert lines[2].name == "model.layers.{0-11}.self_attn.q_proj.weight"
    assert sum(line.nbytes for line in lines) == sum(tensor.nbytes for tensor in plan.tensors)
    assert len(list(rows(plan.tensors, scheme_of, every=True))) == len(plan.tensors)


def test_ranges_with_holes(tmp_path: Path) -> None:
    shapes = header_files.llama(layers=5)
    sets = "overrides=[{match: 'model.layers.[02].*', dense: true}]"
    plan = plan_of(tmp_path, shapes, "w4g128-awq", sets)
    lines = [row.name for row in rows(plan.tensors, scheme_of)]
    assert "model.layers.{1,3-4}.mlp.up_proj.weight" in lines
    assert "model.layers.{0,2}.mlp.up_proj.weight" in lines


def test_thousands_of_tensors_in_a_second_without_torch(tmp_path: Path) -> None:
    shapes = header_files.experts(layers=16, count=64)
    header_files.write(tmp_path, shapes, {"num_hidden_layers": 16})
    assert len(shapes) > 3000
    began = time.process_time()
    plan = make_plan(load("w4g128-gptq"), Checkpoint.open(tmp_path))
    assert time.process_time() - began < 1
    assert plan.counts["quantized"] == 16 * 64 * 3
    script = (
        "import sys; from qtool.plan.plan import make_plan;"
        "from qtool.checkpoint import Checkpoint;"
        f"from qtool.recipe.recipe import load; make_plan(load('w4g128-gptq'), "
        f"Checkpoint.open({str(tmp_path)!r})); print(sorted({{'torch', 'transformers', "
        "'huggingface_hub'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("recipe", "sets", "phrases"),
    [
        ("w8a8-dynamic", ["weights.bits=5"], ["vLLM and SGLang refuse 5-bit weights per channel"]),
        (
            "w8a8-dynamic", ["weights.rows=-1", "activations.scale=tensor"],
            ["vLLM and SGLang refuse 8-bit weights per tensor with dynamic 8-bit inputs"],
        ),
        ("w8a8-dynamic", ["activations.bits=4"], ["vLLM and SGLang refuse"]),
        ("w8a8-dynamic", ["activations.group_size=64"], ["vLLM and SGLang refuse"]),
        (
            "w8a8-dynamic", ["weights.group_size=64"],
            ["in vLLM the humming kernels alone", "in SGLang inputs are left as they are"],
        ),
        ("w8a8-dynamic", [], []),
        ("w8a8-static", [], []),
        ("fp8-static", [], []),
        ("fp8-dynamic", ["activations.scale=tensor"], ["in vLLM and SGLang inputs are"]),
        ("fp8-block", [], []),
        ("fp8-block", ["activations.group_size=-1"], ["are rounded in groups of 128, though"]),
        (
            "fp8-block", ["activations.group_size=-1", "activations.dynamic=false"],
            ["vLLM and SGLang refuse 8-bit float weights per block"],
        ),
        ("fp8-block", ["weights.group_size=64"], ["vLLM and SGLang refuse 8-bit float weights per "
         "block of 128x64 with"]),
        ("fp8-block", ["weights.group_size=64", "weights.rows=64"], ["per block of 64x64 with"]),
        ("nvfp4", [], ["SGLang refuses 4-bit float weights per group of 16"]),
        ("mxfp4", [], ["in vLLM inputs are rounded to MXFP4 too", "SGLang refuses"]),
        ("w4a16-ct", [], []),
    ],
)  # fmt: skip
def test_plan_and_verify_say_the_same_of_kernels(
    recipe: str, sets: list[str], phrases: list[str], tmp_path: Path
) -> None:
    """Without --engine, with it, and of an artifact: one set of rules."""
    plan = plan_of(tmp_path / "m", header_files.llama(2, 256, 512, 256), recipe, *sets)
    said = [w for w in plan.warnings if "inputs" in w]
    assert len(said) == len(phrases) and all(any(p in w for w in said) for p in phrases), said
    view = planned_view(plan, Checkpoint.open(tmp_path / "m").config)
    for engine, name in (("vllm", "vLLM"), ("sglang", "SGLang")):
        found = view_findings(view, engine, 1)
        refused = any(f.severity == "error" for f in found)
        assert refused == any("refuse" in w and name in w for w in said), (engine, found)
        warned = [f for f in found if f.check == "engine-inputs"]
        assert bool(warned) == any(w.startswith("in ") and name in w for w in said)


def test_blocks_and_groups_that_kernels_have_one_size_of(tmp_path: Path) -> None:
    shapes = header_files.llama(2, 256, 512, 256)
    sets = ("weights.group_size=64", "weights.rows=64")
    for size, more in ((64, sets), (128, ())):
        plan = plan_of(tmp_path / f"fp8-{size}", shapes, "fp8-block-hf", *more)
        assert any("per block of 64x64, which have no" in w for w in plan.warnings) == (size == 64)
        view = planned_view(plan, Checkpoint.open(tmp_path / f"fp8-{size}").config)
        for engine in ("vllm", "sglang"):
            refused = [f for f in view_findings(view, engine, 1) if f.severity == "error"]
            assert bool(refused) == (size == 64), refused
            assert all("FP8 in blocks of 128x128 does" in f.message for f in refused)
    for size in (-1, 64, 128):
        plan = plan_of(tmp_path / "q", shapes, "w4a8kv4-qserve", f"weights.group_size={size}")
        said = [w for w in plan.warnings if "OmniServe's kernels have groups of 128" in w]
        assert bool(said) == (size == 64)
