"""What a plan says of engines is what they say of the artifact: rotations that are left to them."""

import json
from pathlib import Path

import pytest

from qtool import hub
from qtool.artifacts.artifact import Artifact
from qtool.cards.planned_view import expected, planned_view
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli import main as cli
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import Recipe, load
from qtool.recipe.rotate import RotateOptions
from qtool.transforms import rotate, rotated
from qtool.verification.engines.rules import loaders, view_findings
from qtool.verification.engines.view import view_of
from support.models import arch_models, header_files
from support.models.small_models import checkpoint
from support.runs import quantizing

R4 = ("transforms=[rotate]", "rotate.r4=true")


@pytest.mark.parametrize("name", ["llama", "phi3", "gpt_neox", "opt", "mixtral"])
def test_names_tell_what_the_forward_pass_finds(name: str, tmp_path: Path) -> None:
    assert name in arch_models.CONFIGS
    source = checkpoint(tmp_path, name)
    found = rotate.prepare(rotated.untied(source), RotateOptions(r3=True, r4=True), lambda _: None)
    recipe = load("w8a16-ct", [*R4, "rotate.r3=true", "indivisible=dense"])
    assert isinstance(recipe, Recipe)
    told = expected(make_plan(recipe, source), source.config)
    assert told is not None
    inputs = {f"{module}.weight": size for module, size in told.inputs.items()}
    assert inputs == found.online.inputs
    assert {*told.heads.values()} == {*found.online.heads.values()}
    assert len(told.heads) == len(found.online.heads)


def test_plan_says_what_verify_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = quantizing.quantize(hub.tiny_folder(), "w8a8-dynamic", tmp_path / "out", *R4)
    artifact = Artifact.open(made.out)
    recipe, source = load("w8a8-dynamic", R4), Checkpoint.open(hub.tiny_folder())
    assert isinstance(recipe, Recipe)
    plan = make_plan(recipe, source)
    view = planned_view(plan, source.config, expected(plan, source.config))
    written = json.loads((made.out / "config.json").read_text())["quantization_config"]
    assert view.quantization["transform_config"] == written["transform_config"]
    for engine, tp, refused in (
        ("vllm", 1, False), ("vllm", 2, True), ("sglang", 1, True), ("transformers", 1, True),
    ):  # fmt: skip
        of_plan, of_artifact = (
            [f.message for f in view_findings(one, engine, tp) if f.check == "engine-rotation"]
            for one in (view, view_of(artifact))
        )
        assert of_plan == of_artifact and of_plan
        words = ["qtool", "plan", "tiny", "--recipe", "w8a8-dynamic", "--engine", engine]
        sets = [word for one in R4 for word in ("--set", one)]
        monkeypatch.setattr("sys.argv", [*words, "--tp", str(tp), *sets])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert int(ended.value.code or 0) == int(refused)
        assert ("error: " in capsys.readouterr().out) == refused
    card = (made.out / "README.md").read_text()
    assert "vllm serve DIR" in card and "model = AutoModel" not in card
    assert "Not with transformers: transformers reads no transform_config" in card


@pytest.mark.parametrize(
    ("recipe", "sets", "vllm"),
    [
        ("w8a8-dynamic", (), True),
        ("w8a8-dynamic", ("activations.bits=4",), False),
        ("w8a8-dynamic", ("weights.rows=-1", "activations.scale=tensor"), False),
        ("kv-fp8", (), True),
        ("kv-fp8", ("kv_cache.type=int",), False),
        ("int8-llmint8", (), False),
    ],
)
def test_the_card_advises_what_the_rules_allow(
    recipe: str, sets: tuple[str, ...], vllm: bool, tmp_path: Path
) -> None:
    from qtool.cards import modelcard

    header_files.write(tmp_path, header_files.llama(), {"num_attention_heads": 2})
    source, loaded = Checkpoint.open(tmp_path), load(recipe, sets)
    assert isinstance(loaded, Recipe)
    text = modelcard.loading(planned_view(make_plan(loaded, source), source.config))
    assert ("vllm serve DIR" in text) == vllm and "from_pretrained" in text
    assert "sglang" not in text
    assert ("Not with vLLM: " in text) == (not vllm)


@pytest.mark.parametrize(
    ("recipe", "sets", "wanted"),
    [
        ("kv-fp8", (), ["vllm", "sglang", "transformers"]),
        ("w8a8-dynamic", ("kv_cache={bits: 8, type: float, scale: head}",),
         ["vllm", "transformers", "sglang"]),
        ("kv-fp8", ("kv_cache.type=int",), ["transformers", "sglang"]),
        ("w8a8-dynamic", (), ["vllm", "sglang", "transformers"]),
        ("int8-llmint8", (), ["transformers", "sglang"]),
    ],
)  # fmt: skip
def test_who_leaves_the_cache_as_it_is_comes_last(
    recipe: str, sets: tuple[str, ...], wanted: list[str], tmp_path: Path
) -> None:
    header_files.write(tmp_path, header_files.llama(), {"num_attention_heads": 2})
    source, loaded = Checkpoint.open(tmp_path), load(recipe, sets)
    assert isinstance(loaded, Recipe)
    assert loaders(planned_view(make_plan(loaded, source), source.config)) == wanted
