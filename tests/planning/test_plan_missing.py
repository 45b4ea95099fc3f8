"""Plans of checkpoints that lack something, or are of another model than they say."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from qtool.cards.serve import command
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.decoder_names import SAVE_WITH_HEAD
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.gguf.from_hf.source import hf_source
from qtool.hub import tiny_folder
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.verification.run import verify_artifact
from support.models import header_files
from support.models.header_files import Shapes
from support.planning.planning import plan_of
from support.runs import quantizing

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
    "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 512, "num_hidden_layers": 2,
}  # fmt: skip


def test_a_block_that_lacks_what_others_have_is_said(tmp_path: Path) -> None:
    """Of an architecture that nobody knows; the first block of some has less by design."""
    shapes = header_files.llama(layers=4)
    assert not plan_of(tmp_path, shapes, "w8-rtn", num_hidden_layers=4).warnings
    for block, said in ((0, []), (2, ["block 2 lacks model.layers.2.mlp.up_proj.weight, which 3"])):
        name = f"model.layers.{block}.mlp.up_proj.weight"
        less = {key: shape for key, shape in shapes.items() if key != name}
        plan = plan_of(tmp_path, less, "w8-rtn", num_hidden_layers=4)
        assert [one.split(" other")[0] for one in plan.warnings] == said


def test_a_tokenizer_of_another_model_is_said(tmp_path: Path) -> None:
    folder = header_files.write(tmp_path, header_files.llama(), {"num_hidden_layers": 2})
    few = [(512, []), (528, [])]  # some that were added have no rows, as in Gemma 3
    for count, said in (*few, (529, ["the tokenizer has 17 ids beyond the 512 rows of the"])):
        vocabulary = {"model": {"vocab": {f"t{n}": n for n in range(count)}}}
        (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
        found = make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings
        assert [one.split(" embedding")[0] for one in found] == said


def renamed(shapes: Shapes, before: str, after: str) -> Shapes:
    return {name.replace(before, after, 1): shape for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("shapes", "more"),
    [
        (renamed(header_files.llama(), "model.", ""), {}),  # Qwen3-Embedding's
        (renamed(header_files.llama(), "model.", "llm.model."), {}),
        (header_files.llama(), {"num_nextn_predict_layers": 0}),
        ({n: s for n, s in header_files.llama().items() if "head" not in n},
         {"tie_word_embeddings": True}),
    ],
    ids=["bare", "llm", "plain", "tied"],
)  # fmt: skip
def test_whole_models_are_not_refused(shapes: Shapes, more: dict[str, Any], tmp_path: Path) -> None:
    folder = header_files.write(tmp_path, shapes, LLAMA | more)
    assert not [
        one
        for one in make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings
        if "missing" in one or "different models" in one
    ]


def test_names_without_their_first_part(tmp_path: Path) -> None:
    """Qwen3-Embedding's class writes text, and its names are those of a model without a head."""
    folder = header_files.write(tmp_path, renamed(header_files.llama(), "model.", ""), LLAMA)
    (said,) = make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings
    assert "embed_tokens.weight in place of model.embed_tokens.weight" in said
    found = [one for one in verify_artifact(folder).findings if one.check == "tensors"]
    assert [(one.severity, one.message) for one in found] == [("warning", said)]
    with pytest.raises(FormatError) as refused:
        hf_source(Checkpoint.open(folder))
    assert all(str(one).endswith(SAVE_WITH_HEAD) for one in (said, refused.value))


def test_blocks_at_the_end_of_a_model_that_nobody_knows(tmp_path: Path) -> None:
    """distil-whisper's config counts another stack; what lies between others is lost."""
    (said,) = plan_of(tmp_path / "a", header_files.llama(2), "w8-rtn", num_hidden_layers=3).warnings
    assert said.startswith("config.json says 3 blocks") and said.endswith("of it missing?")
    gap = renamed(header_files.llama(3), "model.layers.1.", "model.layers.3.")
    gap = {name: shape for name, shape in gap.items() if ".layers.1." not in name}
    with pytest.raises(UnsupportedError, match=r"says 4 blocks, and 1 block \(model.layers.1\) is"):
        plan_of(tmp_path / "b", gap, "w8-rtn", num_hidden_layers=4)


def test_blocks_that_have_nothing(tmp_path: Path) -> None:
    """Of DeciLM's some have neither attention nor an MLP, by config.json: all others are needed."""
    shapes = header_files.llama(4)
    there, gone = {"no_op": False}, {"no_op": True}
    has = [(there, there), (gone, gone), (there, there), (there, gone)]
    blocks = [{"attention": attention, "ffn": ffn} for attention, ffn in has]
    without = ("layers.1.", "layers.3.post_attention", "layers.3.mlp")
    less = {name: s for name, s in shapes.items() if not any(one in name for one in without)}
    said = {"num_hidden_layers": 4, "block_configs": blocks}
    assert not plan_of(tmp_path / "whole", less, "w8-rtn", **said).warnings
    found = verify_artifact(tmp_path / "whole").findings
    assert not [one for one in found if "not there" in one.message or "lacks" in one.message]
    lost = {name: shape for name, shape in less.items() if "layers.2." not in name}
    with pytest.raises(UnsupportedError, match=r"1 block \(model.layers.2\) is not there"):
        plan_of(tmp_path / "lost", lost, "w8-rtn", **said)


def test_experts_that_are_missing(tmp_path: Path) -> None:
    """Of an architecture of the table an error; of others some may be pruned."""
    shapes = header_files.experts(2, 4)
    less = {name: shape for name, shape in shapes.items() if "experts.3.up" not in name}
    (said,) = plan_of(tmp_path, less, "w8-rtn", num_hidden_layers=2, num_experts=4).warnings[:1]
    assert "1 tensor of its 4 experts is missing" in said
    for block in range(2):
        there, small = f"model.layers.{block}", {"k": 128, "v": 128}
        norms = ("input_layernorm", "post_attention_layernorm")
        less |= {f"{there}.{norm}.weight": (256,) for norm in norms}
        less |= {f"{there}.self_attn.{part}_norm.weight": (64,) for part in "qk"}
        less |= {f"{there}.self_attn.{p}_proj.weight": (small.get(p, 256), 256) for p in "qkv"}
        less[f"{there}.self_attn.o_proj.weight"] = (256, 256)
    less |= {"model.norm.weight": (256,), "lm_head.weight": (512, 256)}
    config = LLAMA | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    config |= {"head_dim": 64, "num_experts": 4, "moe_intermediate_size": 128}
    config |= {"norm_topk_prob": True}
    folder = header_files.write(tmp_path / "known", less, config)
    with pytest.raises(UnsupportedError, match="1 tensor of its 4 experts is missing"):
        make_plan(load("w8-rtn"), Checkpoint.open(folder))
    names = [f"model.layers.{block}.mlp.experts.3.up_proj.weight" for block in range(2)]
    header_files.write(tmp_path / "whole", less | dict.fromkeys(names, (128, 256)), config)
    make_plan(load("w8-rtn"), Checkpoint.open(tmp_path / "whole"))


HEADLESS = {n: s for n, s in header_files.llama().items() if "head" not in n}
UNTIED: dict[str, Any] = LLAMA | {"tie_word_embeddings": False}


@pytest.mark.parametrize(
    ("config", "says"),
    [(UNTIED, "says tie_word_embeddings false"), (LLAMA, "does not say tie_word_embeddings, ")],
)
def test_a_head_that_is_missing(config: dict[str, Any], says: str, tmp_path: Path) -> None:
    folder = header_files.write(tmp_path, HEADLESS, config)
    with pytest.raises(UnsupportedError, match="or, where its embedding is its head, corr") as said:
        make_plan(load("w8-rtn"), Checkpoint.open(folder))
    assert says in str(said.value)
    found = [one for one in verify_artifact(folder).findings if one.check == "head"]
    assert [one.severity for one in found] == ["error"] and says in found[0].message


@pytest.mark.parametrize(
    ("shapes", "named", "config", "lists"),
    [
        (renamed(HEADLESS, "model.", ""), "LlamaForCausalLM", UNTIED, False),  # Qwen3-Embedding-8B
        (HEADLESS, "LlamaForCausalLM", UNTIED, True),
        (HEADLESS, "LlamaModel", UNTIED, False),
        (HEADLESS, "LlamaForSequenceClassification", UNTIED, False),
        (HEADLESS, "LlamaForCausalLM", UNTIED | {"tie_word_embeddings": True}, False),
    ],
    ids=["bare", "sentence-transformers", "backbone", "classes", "tied"],
)
def test_models_that_need_no_head(
    shapes: Shapes, named: str, config: dict[str, Any], lists: bool, tmp_path: Path
) -> None:
    folder = header_files.write(tmp_path, shapes, config | {"architectures": [named]})
    if lists:
        (folder / "modules.json").write_text("[]")
    said = make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings
    assert not [one for one in said if "no output head" in one]
    assert not [
        one
        for one in verify_artifact(folder).findings
        if one.check == "head" and one.severity == "error"
    ]


def test_a_head_of_a_class_that_nobody_knows_is_said(tmp_path: Path) -> None:
    config = UNTIED | {"architectures": ["FooForCausalLM"], "model_type": "foo"}
    folder = header_files.write(tmp_path, HEADLESS, config)
    (said,) = make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings
    assert "there is no output head; is a part of it missing?" in said


def test_a_matrix_that_the_class_has_no_place_for(tmp_path: Path) -> None:
    """The sentence is that of `qtool verify`."""
    more = header_files.llama() | {"model.layers.1.mlp.foo.weight": (256, 256)}
    folder = header_files.write(tmp_path, more, LLAMA)
    (said,) = make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings
    assert said.startswith("1 tensor that LlamaForCausalLM has no place for: model.layers.1.mlp")
    assert said in [one.message for one in verify_artifact(folder).findings]


def test_blocks_that_the_config_does_not_count(tmp_path: Path) -> None:
    """Those with tensors of their own predict further tokens."""
    shapes = header_files.llama(3)
    folder = header_files.write(tmp_path, shapes, LLAMA)
    said = make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings[0]
    assert said.startswith("9 tensors of blocks beyond the 2 that config.json says")
    assert said in [one.message for one in verify_artifact(folder).findings]
    more = {"model.layers.2.eh_proj.weight": (256, 512)}
    for config, has in ((LLAMA, more), (LLAMA | {"num_nextn_predict_layers": 1}, {})):
        header_files.write(tmp_path, shapes | has, config)
        said = make_plan(load("w8-rtn"), Checkpoint.open(folder)).warnings[0]
        assert "of the weights stay dense" in said


def test_missing_layers(tmp_path: Path) -> None:
    folder = header_files.write(tmp_path, header_files.llama(), LLAMA | {"num_hidden_layers": 3})
    with pytest.raises(UnsupportedError, match=r"says 3 blocks, and 1 block \(model.layers.2\) is"):
        make_plan(load("w4g128-awq"), Checkpoint.open(folder))


def test_missing_files_are_said(tmp_path: Path) -> None:
    header_files.write(tmp_path, header_files.llama())
    recipe = load("w4g128-awq")
    assert not make_plan(recipe, Checkpoint.open(tmp_path)).warnings
    (tmp_path / "tokenizer.json").unlink()
    (said,) = make_plan(load("w4g128-rtn"), Checkpoint.open(tmp_path)).warnings
    assert said.startswith("the model has no tokenizer; engines cannot take text: put")
    (tmp_path / "tokenizer_config.json").write_text("{}")  # which holds no vocabulary
    assert make_plan(load("w4g128-rtn"), Checkpoint.open(tmp_path)).warnings == (said,)
    assert make_plan(recipe, Checkpoint.open(tmp_path), from_stats=True).warnings == (said,)
    (said,) = make_plan(recipe, Checkpoint.open(tmp_path)).warnings
    assert "no tokenizer, and `qtool quantize` needs one" in said
    (tmp_path / "config.json").unlink()
    with pytest.raises(SourceError, match=r"has no config\.json, without which no engine"):
        make_plan(recipe, Checkpoint.open(tmp_path))
    said, _ = make_plan(recipe, Checkpoint.open(tmp_path / "model.safetensors")).warnings
    assert str(tmp_path) not in said and "no config.json, so engines cannot load" in said


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 2}, {"architectures": []}])
def test_a_config_that_names_no_model_is_refused(config: dict[str, Any], tmp_path: Path) -> None:
    """As `verify` does with what would be made of it."""
    header_files.write(tmp_path, header_files.llama())
    (tmp_path / "config.json").write_text(json.dumps(config))
    for source in (tmp_path, tmp_path / "model.safetensors"):
        with pytest.raises(SourceError, match="neither model_type nor architectures, so no engine"):
            make_plan(load("w8-rtn"), Checkpoint.open(source))
    (found,) = [one for one in verify_artifact(tmp_path).findings if "neither" in one.message]
    assert found.severity == "error"


def test_what_is_made_of_a_file_alone_is_warned_of(tmp_path: Path) -> None:
    """By `quantize` and by `verify`, which end well; and no engine is named that would load it."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / "model.safetensors"
    shutil.copy(tiny_folder() / "model.safetensors", file)
    made = quantizing.quantize(file, "w8-rtn", tmp_path / "out").summary
    assert any("engines cannot load" in one for one in made.warnings)
    verdict = verify_artifact(tmp_path / "out")
    assert verdict.ok
    (found,) = [one for one in verdict.findings if "neither" in one.message]
    assert found.severity == "warning"
    assert command(tmp_path / "out") is None


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w4g128-awq"])
def test_a_config_of_another_model_is_refused(recipe: str, tmp_path: Path) -> None:
    """What is rounded to nearest needs no forward pass that would fail, and no engine loads it."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256,
        "intermediate_size": 768, "num_attention_heads": 2, "num_key_value_heads": 1,
        "num_hidden_layers": 2, "vocab_size": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "max_position_embeddings": 64,
    }  # fmt: skip
    header_files.write(tmp_path, header_files.llama(), config)
    assert make_plan(load(recipe), Checkpoint.open(tmp_path)).tensors
    for key, value, name in (
        ("hidden_size", 128, "embed_tokens"),
        ("vocab_size", 64, "embed_tokens"),
        ("num_key_value_heads", 2, "layers.0.self_attn.k_proj"),
    ):
        header_files.write(tmp_path, header_files.llama(), config | {key: value})
        with pytest.raises(UnsupportedError, match=rf"{name}.weight is .* of different models"):
            make_plan(load(recipe), Checkpoint.open(tmp_path))


def test_adapters_alone_are_no_models(tmp_path: Path) -> None:
    """Rank 64 divides by groups: a LoRA became an artifact of 4 bits."""
    rows = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    lora = header_files.write(tmp_path, {rows.format("A"): (64, 256), rows.format("B"): (256, 64)})
    (lora / "adapter_config.json").write_text("{}")
    for change in (lambda: None, (lora / "config.json").unlink):
        change()
        with pytest.raises(UnsupportedError, match=r"an adapter \(LoRA\), not a model; merge it"):
            make_plan(load("w4g64-rtn"), Checkpoint.open(lora))
    header_files.write(lora, {**header_files.llama(), rows.format("A"): (64, 256)})
    (lora / "model.safetensors").rename(lora / "adapter_model.safetensors")
    with pytest.raises(UnsupportedError, match="an adapter"):  # with modules that are saved whole
        make_plan(load("w4g64-rtn"), Checkpoint.open(lora))
    with pytest.raises(UnsupportedError, match="an adapter"):
        hf_source(Checkpoint.open(lora))
