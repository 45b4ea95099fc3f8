"""What a plan says besides: what engines refuse, options without use, times, rows and JSON."""

import json
from pathlib import Path

import pytest

import qtool
from qtool.cards.planned_view import planned_view
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UsageError
from qtool.planning import duration, estimate
from qtool.planning.plan import Plan, make_plan
from qtool.planning.rows import rows, scheme_of
from qtool.recipe.recipe import load
from qtool.verification.engines.rules import ENGINES, view_findings
from support.models import header_files
from support.planning.planning import plan_of, quantized


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
    note, said = plan_of(tmp_path, shapes, "w4g128-gptq", other).warnings
    assert note.startswith("note: transformers 5 has the experts of a block in one parameter")
    assert said.startswith("1 layer that vLLM and SGLang fuse has parts stored differently")
    both = "overrides=[{match: 'model.layers.1.*experts.*', weights: {bits: 8}}]"
    assert plan_of(tmp_path, shapes, "w4g128-gptq", both).warnings == (note,)
    assert not plan_of(tmp_path, shapes, "w8a16-ct").warnings
    (grave,) = plan_of(tmp_path, shapes, "int8-llmint8").warnings
    assert grave.startswith("transformers 5 has the experts") and "w8a16-ct" in grave
    # One expert that does not fit leaves its whole layer dense.
    shapes["model.layers.0.mlp.experts.2.down_proj.weight"] = (36, 128)
    plan = plan_of(tmp_path, shapes, "w4g128-awq", "indivisible=dense")
    assert {name.split(".")[2] for name in quantized(plan)} == {"1"}


@pytest.mark.parametrize(
    ("recipe", "sets", "about"),
    [
        ("w4g128-gptq", ["weights.symmetric=false"], {"vllm", "sglang"}),
        ("w3g128-rtn", [], {"vllm", "sglang"}),
        ("w4g128-awq", ["awq.layout=gemv"], {"vllm", "sglang", "transformers"}),
        ("w4g128-gptq", ["gptq.static_groups=false"], {*ENGINES}),
        ("w4g128-gptq", ["weights.group_size=256", "indivisible=dense"], {"vllm", "sglang"}),
        ("w4g128-gptq", ["overrides=[{match: lm_head, weights: {bits: 8}}]"], {"transformers"}),
        ("w4a16-ct", ["overrides=[{match: lm_head, weights: {bits: 8}}]"], {"vllm", "sglang"}),
        ("nvfp4-w4a4", [], {"vllm", "sglang"}),
        ("w8a8-dynamic", ["activations.bits=4"], set()),
    ],
)
def test_an_engine_that_is_named_is_told_of_alone(
    recipe: str, sets: list[str], about: set[str], tmp_path: Path
) -> None:
    """What is about no engine is said with each; what the rules of --engine say, with none."""
    shapes = header_files.llama() | {"lm_head.weight": (1024, 256)}
    header_files.write(tmp_path, shapes, {"num_attention_heads": 2})

    def told(engine: str | None) -> list[str]:
        found = qtool.plan(tmp_path, recipe, changes=sets, engine=engine)
        return [one for one in (*found.warnings, *found.notes) if "tokenizer" not in one]

    said = told(None)
    assert said and {engine for engine in ENGINES if told(engine) == said} == about
    assert {engine for engine in ENGINES if told(engine)} == about


def test_scales_that_engines_round_are_noted(tmp_path: Path) -> None:
    header_files.write(tmp_path, header_files.llama(), dtype="BF16")
    for recipe in ("w4g128-awq", "w4g128-gptq"):
        (said,) = make_plan(load(recipe), Checkpoint.open(tmp_path)).warnings
        assert said.startswith("note: scales are stored in float16") and "bfloat16" in said
    dense = load("w4g128-awq", ["method=none", "format=dense"])
    assert not make_plan(dense, Checkpoint.open(tmp_path)).warnings


def test_marlin_note(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, header_files.llama(kv=96), "w4g128-awq")
    assert plan.warnings[0].startswith("note: 4 of 14 matrices are no multiples")


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


def test_what_others_would_load_with_the_weights_is_said(tmp_path: Path) -> None:
    folder = header_files.write(tmp_path, header_files.llama())
    recipe = load("w4g128-awq")
    (folder / "adapter_config.json").write_text("{}")
    (said,) = make_plan(recipe, Checkpoint.open(folder)).warnings
    assert "an adapter lies beside the weights" in said and str(folder) not in said
    (folder / "adapter_config.json").unlink()
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(header_files.llama(), "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert not make_plan(recipe, Checkpoint.open(folder)).warnings
    header_files.write(folder, header_files.llama(layers=1))
    (said,) = make_plan(recipe, Checkpoint.open(folder)).warnings
    assert said.startswith("model.safetensors lies beside the files that the index names")


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


@pytest.mark.parametrize(
    ("recipe", "trials"), [("mxfp4", duration.POWER_TRIALS), ("nvfp4", duration.LADDER_TRIALS)]
)
def test_estimates_count_the_scales_that_are_tried(
    recipe: str, trials: float, tmp_path: Path
) -> None:
    """Of FP8's rows it is one."""
    wide = header_files.llama(hidden=4096, inner=16384)
    once, more = (plan_of(tmp_path / one, wide, one) for one in ("fp8-dynamic", recipe))
    weights = sum(tensor.parameters for tensor in more.quantized)
    extra = (trials - 1) * weights / duration.ROUNDED_PER_CORE / more.memory.setting.threads
    written = (more.size_bytes - once.size_bytes) / duration.STORAGE_BYTES_PER_SECOND
    assert more.seconds - once.seconds == pytest.approx(extra + written, abs=0.1)
    assert extra > 0.3


def test_estimates_count_the_proof_of_a_rotation(tmp_path: Path) -> None:
    """The proof needs torch, and two copies of a block."""

    def plan(name: str, recipe: str, threads: int = 1, **kind: int) -> Plan:
        header_files.write(tmp_path / name, header_files.llama(**kind))
        loaded = load(recipe, ["transforms=[rotate]"])
        return make_plan(loaded, Checkpoint.open(tmp_path / name), threads=threads)

    small, deep = plan("a", "w8a8-dynamic"), plan("b", "w8a8-dynamic", layers=8)
    plain = make_plan(load("w8a8-dynamic"), Checkpoint.open(tmp_path / "b"), threads=1)
    assert small.peak_rss_bytes == deep.peak_rss_bytes and small.seconds < deep.seconds
    assert plain.peak_rss_bytes < estimate.PROVING_PROCESS_BYTES < small.peak_rss_bytes
    torch = duration.STARTUP_SECONDS[True] - duration.STARTUP_SECONDS[False]
    assert plain.seconds + torch <= deep.seconds
    wide = plan("c", "w8a8-dynamic", hidden=2048, inner=8192)
    block = sum(4 * tensor.parameters for tensor in wide.by_block[0])
    assert wide.peak_rss_bytes > estimate.PROVING_PROCESS_BYTES + 2 * block
    many, few = (plan("d", "w8a8-dynamic", vocabulary=words) for words in (500_000, 10_000))
    assert many.peak_rss_bytes == few.peak_rss_bytes  # they are made in parts


def test_estimates_are_for_the_cores_a_run_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qtool.native.library.os.cpu_count", lambda: 256)
    affinity = "qtool.native.library.os.sched_getaffinity"
    monkeypatch.setattr(affinity, lambda _: {3}, raising=False)
    one = plan_of(tmp_path, header_files.llama(layers=8), "w4g128-gptq")
    monkeypatch.setattr(affinity, lambda _: {3, 4}, raising=False)
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
            ["in vLLM the humming kernels alone", "SGLang refuses 8-bit weights per group with"],
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
        ("nvfp4", [], []),
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
            found = view_findings(view, engine, 1)
            refused = [f for f in found if f.severity == "error"]
            assert bool(refused) == (size == 64 and engine == "vllm"), refused
            assert all("FP8 in blocks of 128x128 does" in f.message for f in refused)
            slow = [f for f in found if "Triton's kernels" in f.message]
            assert bool(slow) == (size == 64 and engine == "sglang")
    for size in (-1, 64, 128):
        plan = plan_of(tmp_path / "q", shapes, "w4a8kv4-qserve", f"weights.group_size={size}")
        said = [w for w in plan.warnings if "OmniServe's kernels have groups of 128" in w]
        assert bool(said) == (size == 64)


def test_samples_longer_than_the_model(tmp_path: Path) -> None:
    """As the run says, before it; rounding to nearest reads none."""
    for recipe, length, told in (
        ("w4g128-gptq", 513, True), ("w4g128-gptq", 512, False), ("w4g128-rtn", 513, False),
    ):  # fmt: skip
        changed = f"calibration.length={length}"
        plan = plan_of(tmp_path, header_files.llama(), recipe, changed, max_position_embeddings=512)
        assert told == any(
            "of 513 tokens" in one and "512 positions" in one for one in plan.warnings
        )


def test_engines_in_any_case() -> None:
    said = [qtool.plan("tiny", "w3g128-rtn", engine=name).findings for name in ("sglang", "SGLang")]
    assert said[0] == said[1] and "SGLang will refuse" in said[0][0].message
    with pytest.raises(UsageError, match="engine is 'tgi'; there are vllm"):
        qtool.plan("tiny", "w3g128-rtn", engine="TGI")
