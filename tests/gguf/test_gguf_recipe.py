"""Recipes with `format: gguf`: what ships, what the keys mean, and what is wrong with others."""

import json
import subprocess
import sys

import pytest

from qtool.errors import RecipeError
from qtool.gguf_mixtures.rules import needs_importance
from qtool.gguf_mixtures.table import FILE_TYPES, TYPES
from qtool.recipe import recipe
from qtool.recipe.gguf import GgufRecipe

MINIMAL = "format: gguf\ntype: q4_k_m\n"
SHIPPED = {name.lower() for name in FILE_TYPES}
SWEPT = {
    f"{name}-awq-gptq"
    for name in (
        "q2_k",
        "q3_k_m",
        "q4_0",
        "q4_k_m",
        "iq1_s",
        "iq1_m",
        "iq2_m",
        "iq3_xxs",
        "iq3_s",
        "iq4_xs",
    )
}


def parse(text: str = "", *sets: str) -> GgufRecipe:
    found = recipe.parse(MINIMAL + text, "r.yaml", "r", sets)
    assert isinstance(found, GgufRecipe)
    return found


def test_a_recipe_ships_for_every_file_type() -> None:
    shipped = {name: recipe.load(name) for name in recipe.shipped()}
    assert {name for name, one in shipped.items() if isinstance(one, GgufRecipe)} == SHIPPED | SWEPT


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_recipe(name: str) -> None:
    text = recipe.shipped()[name].read_text()
    first = text.splitlines()[0]
    assert first.startswith("# ") and first.endswith(".") and len(first) <= 100
    loaded = recipe.load(name)
    assert isinstance(loaded, GgufRecipe)
    assert (loaded.type, loaded.name, loaded.format) == (name, name, "gguf")
    file_type = loaded.file_type
    # Measured where llama-quantize asks for it: for the default type, or that of attn_k in iq3_xs.
    types = {file_type.default, TYPES["IQ3_XXS"] if name == "iq3_xs" else file_type.default}
    needed = any(needs_importance("blk.0.ffn_up.weight", type_, file_type) for type_ in types)
    assert loaded.importance == loaded.calibrates == needed
    assert loaded.effective() == {
        "format": "gguf", "type": name, "pure": False, "output_type": None, "embedding_type": None,
        "leave_output": False, "overrides": [], "importance": needed,
        "calibration": {"source": None, "samples": 128, "length": 512, "seed": 0},
    }  # fmt: skip
    again = recipe.parse(json.dumps(loaded.effective()), "again.json", name)
    assert again == loaded


@pytest.mark.parametrize("name", sorted(SWEPT))
def test_shipped_recipe_with_a_sweep(name: str) -> None:
    first = recipe.shipped()[name].read_text().splitlines()[0]
    assert first.startswith("# ") and first.endswith(".") and len(first) <= 100
    loaded = recipe.load(name)
    assert isinstance(loaded, GgufRecipe)
    assert (loaded.type, loaded.name) == (name.partition("-")[0], name)
    assert loaded.sweeps and loaded.importance and loaded.transforms == ("awq",)
    assert loaded.effective()["gptq"] == {
        "act_order": True, "damp_percent": 0.01, "token_damping": True, "guided": 0.5,
        "yaqa": 16,
    }  # fmt: skip
    again = recipe.parse(json.dumps(loaded.effective()), "again.json", name)
    assert again == loaded


@pytest.mark.parametrize(
    ("asked", "name"),
    [("Q4_K_M", "q4_k_m"), ("q4_k", "q4_k_m"), ("Q5_K", "q5_k_m"), ("q3_K", "q3_k_m"),
     ("IQ2_xxs", "iq2_xxs"), ("BF16", "bf16"), ("W4G128-AWQ", "w4g128-awq")],
)  # fmt: skip
def test_names_in_any_case_of_letters(asked: str, name: str) -> None:
    assert recipe.load(asked).name == name


def test_what_the_keys_mean() -> None:
    loaded = parse(
        "pure: true\noutput_type: Q8_0\nembedding_type: f16\noverrides:\n"
        "- match: Attn_V\n  type: Q6_K\n- match: '*.ffn_up.weight'\n  dense: true\n"
        "importance: true\ncalibration: {samples: 7}\n"
    )
    options = loaded.options
    assert options.file_type is FILE_TYPES["Q4_K_M"] and options.pure and not options.leave_output
    assert options.output_type is TYPES["Q8_0"] and options.embedding_type is TYPES["F16"]
    first, second = options.overrides
    assert first.type is TYPES["Q6_K"] and first.hits("blk.3.attn_v.weight")
    assert not first.hits("blk.3.attn_q.weight")
    assert second.type is None and second.hits("blk.0.ffn_up.weight")
    assert not second.hits("blk.0.ffn_up.weight_scale")
    assert loaded.calibration.samples == 7
    assert parse("", "type=Q5_K", "leave_output=true").options.leave_output
    assert parse("", "type=Q5_K").type == "q5_k_m"


def test_set_reaches_every_kind_of_place() -> None:
    text = "overrides:\n- match: a\n  type: q8_0\n"
    loaded = parse(text, "overrides.0.type=q5_0", "calibration.samples=3", "type=q2_k")
    assert loaded.overrides[0].type == "q5_0"
    assert (loaded.type, loaded.calibration.samples) == ("q2_k", 3)
    assert loaded.changes == ("overrides.0.type=q5_0", "type=q2_k")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("out_type: q8_0", "r.yaml:3: out_type: unknown key; did you mean output_type? known: for"),
        ("groups: 4", "r.yaml:3: groups: unknown key; known: format, type, method, pure, outp"),
        ("bits: 4", "r.yaml:3: bits: unknown key; in a recipe of qtool it is type, such as q4_k_m"),
        ("pure: yes", 'r.yaml:3: pure: input should be a valid boolean, found "yes"'),
        ("output_type: zzz", 'r.yaml:3: output_type: expected one of q4_0, q4_1,'),
        ("embedding_type: q4_k_m", 'type: no such type, found "q4_k_m"; did you mean q4_k, q'),
        ("method: [awq, gptq]", "method: as a list it is [gptq, tune]; AWQ's scales are"),
        ("method: [tune]", "method: as a list it is [gptq, tune]"),
        (
            "method: awq",
            "method: input should be 'rtn' or 'gptq' or [gptq, tune], found \"awq\"; AWQ's scales",
        ),
        ("method: gptq\nimportance: false", "r.yaml:4: importance: method gptq measures what matr"),
        ("output_type: q8_0\nleave_output: true", "r.yaml:4: leave_output: does not go with outp"),
        ("overrides: {match: a}", "r.yaml:3: overrides: input should be a list"),
        ("overrides:\n- match: a", "r.yaml:4: overrides.0: expected either `type` or `dense: t"),
        ("overrides:\n- match: a\n  type: q8_0\n  dense: true", "overrides.0: expected either"),
        ("overrides:\n- match: ''\n  dense: true", "r.yaml:4: overrides.0.match: string should"),
        ("overrides:\n- match: (\n  dense: true", "overrides.0.match: no regular expression: mis"),
        ("overrides:\n- match: a\n  typ: q8_0", "r.yaml:5: overrides.0.typ: unknown key; did you"),
        ("overrides:\n- match: a\n  type: q8", "r.yaml:5: overrides.0.type: no such type, found"),
        ("importance: 1", "r.yaml:3: importance: input should be a valid boolean, found 1"),
        ("calibration: {sample: 3}", "calibration.sample: unknown key; did you mean samples?"),
    ],
)  # fmt: skip
def test_wrong_recipe_is_named_with_line_and_key(text: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse(text)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("type=qq", "--set type=qq: type: expected one of f32, f16, bf16, q4_0,"),
        ("type=q4_k_mm", 'type: no such type, found "q4_k_mm"; did you mean q4_k_m'),
        ("type=4", "type: input should be a valid string, found 4"),
        ("format=ggfu", "--set format=ggfu: format: input should be 'awq', 'gptq', "
         "'compressed-tensors', 'fp8', 'bitsandbytes', 'qserve', 'mlx', 'mxfp4' or 'dense', "
         'found "ggfu"; or gguf, which has keys of its own'),
        ("overrides.3.type=q8_0", "--set overrides.3.type=q8_0: overrides has no item 3"),
    ],
)  # fmt: skip
def test_wrong_set_is_named(item: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse("overrides: []", item)
    assert sentence in str(caught.value)


def test_a_missing_type_and_a_name_that_does_not_exist() -> None:
    with pytest.raises(RecipeError, match=r"^r\.yaml:1: type: missing; a recipe must say it$"):
        recipe.parse("format: gguf", "r.yaml", "r")
    with pytest.raises(RecipeError, match=r"did you mean .*q4_k_m"):
        recipe.load("q4km")


def test_the_schema_knows_both_kinds() -> None:
    schema = recipe.schema()
    assert schema["if"]["properties"]["format"] == {"const": "gguf"}
    gguf = schema["$defs"]["GgufRecipe"]
    assert set(gguf["properties"]) == set(GgufRecipe.model_fields)
    assert gguf["required"] == ["format", "type"] and gguf["additionalProperties"] is False
    references = set()

    def walk(value: object) -> None:
        if isinstance(value, dict):
            references.update(text for key, text in value.items() if key == "$ref")
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    walk(schema)
    assert {text.removeprefix("#/$defs/") for text in references} == schema["$defs"].keys()


def test_a_gguf_recipe_loads_quickly_and_without_torch() -> None:
    code = (
        "import sys; from qtool.recipe.recipe import load; load('q4_k_m');"
        "heavy = {'torch', 'transformers', 'numpy', 'gguf'} & sys.modules.keys();"
        "assert not heavy, heavy; import time; print(time.process_time())"
    )
    seconds = []  # of the CPU, which others do not lengthen
    for _ in range(3):
        line = [sys.executable, "-c", code]
        ended = subprocess.run(line, check=True, timeout=60, capture_output=True, text=True)
        seconds.append(float(ended.stdout))
    assert min(seconds) < 1.0  # 0.18 s on an idle machine
