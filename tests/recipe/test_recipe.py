"""Recipes: what ships is valid, and whatever is wrong is named with its file, line and key."""

import json
import re
from pathlib import Path

import pytest

from qtool.errors import RecipeError
from qtool.recipe import file, foreign, recipe, yaml_source
from qtool.recipe.gguf import GgufRecipe
from qtool.scheme import Scheme

SHIPPED = {
    "w2g64-gptq", "w3g128-awq", "w3g128-awq-gptq", "w3g128-gptq", "w3g128-rtn",
    "w4-channel-gptq", "w4g128-awq", "w4g128-awq-gptq", "w4g128-gptq", "w4g128-rtn",
    "w4g32-gptq", "w4g64-awq", "w4g64-gptq", "w4g64-rtn", "w8-gptq", "w8-rtn",
}  # fmt: skip
MINIMAL = "method: rtn\nformat: awq\nweights: {bits: 4, group_size: 128, symmetric: false}\n"


def test_everything_promised_ships() -> None:
    assert set(recipe.shipped()) >= SHIPPED


# What compressed-tensors and FP8 ship: scheme, activations, method.
NAMED: dict[str, tuple[str, str | None, str]] = {
    "w4a16-ct": ("w4 g128 sym", None, "gptq"),
    "w4a16-ct-awq": ("w4 g128 asym", None, "awq"),
    "w8a16-ct": ("w8 channel sym", None, "rtn"),
    "w8a8-dynamic": ("w8 channel sym", "int", "rtn"),
    "fp8-dynamic": ("fp8 e4m3 channel", "float", "rtn"),
    "w8a8-static": ("w8 channel sym", "int", "rtn"),
    "w8a8-smoothquant": ("w8 channel sym", "int", "rtn"),
    "w8a8-smoothquant-static": ("w8 channel sym", "int", "rtn"),
    "fp8-static": ("fp8 e4m3 tensor", "float", "rtn"),
    "fp8-block": ("fp8 e4m3 128x128", "float", "rtn"),
    "fp8-block-hf": ("fp8 e4m3 128x128", None, "rtn"),
    "nvfp4-w4a4": ("nvfp4 g16", "nvfp4", "rtn"),
    "mxfp4-w4a4": ("mxfp4 g32", "mxfp4", "rtn"),
    "nvfp4-w4a4-awq-gptq": ("nvfp4 g16", "nvfp4", "awq-gptq"),
    "nvfp4-awq-gptq": ("nvfp4 g16", None, "awq-gptq"),
    "mxfp4-awq-gptq": ("mxfp4 g32", None, "awq-gptq"),
    "mxfp4-gpt-oss": ("mxfp4 g32", None, "rtn"),
    "mxfp4-gpt-oss-gptq": ("mxfp4 g32", None, "gptq"),
}
STORED = ("static", "nvfp4-w4a4")  # ends of names: a scale of inputs is measured


@pytest.mark.parametrize("name", [*NAMED, "nvfp4", "mxfp4"])
def test_recipes_of_other_numbers(name: str) -> None:
    lines = recipe.shipped()[name].read_text().splitlines()
    assert len(lines) < 25 and lines[0].startswith("# ") and lines[0].endswith(".")
    loaded = recipe.load(name)
    scheme, activations, method = NAMED.get(
        name, (f"{name} g{16 if name == 'nvfp4' else 32}", None, "rtn")
    )
    assert (str(loaded.scheme), loaded.method) == (scheme, tuple(method.split("-")))
    assert (loaded.activations and loaded.activations.type) == activations
    smooth = "smooth" in name
    assert loaded.calibrates == (method != "rtn" or name.endswith(STORED) or smooth)
    assert loaded.transforms == (("smooth",) if smooth else ())
    own = {"fp8-block-hf": "fp8", "mxfp4-gpt-oss": "mxfp4", "mxfp4-gpt-oss-gptq": "mxfp4"}
    assert loaded.format == own.get(name, "compressed-tensors")
    again = recipe.parse(json.dumps(loaded.effective()), "again.json", name)
    assert again == loaded


@pytest.mark.parametrize(
    ("name", "item", "sentence"),
    [
        ("nvfp4", "method=[rtn, tune]", "tune moves the scales of integers in groups"),
        ("fp8-dynamic", "rtn.clip=true", "rtn.clip: scales of fp8 are those of the largest weight"),
        (
            "nvfp4-awq-gptq",
            "gptq.static_groups=false",
            "scales of nvfp4 are found before",
        ),
        ("mxfp4", "rtn.clip=true", "of mxfp4 the better of two scales is always taken"),
        ("nvfp4", "format=awq", "format: awq stores integers; weights of type nvfp4 go with"),
        ("fp8-block-hf", "activations={bits: 8, type: float}", "format fp8 does not say how"),
        ("fp8-dynamic", "activations.type=int", "int ones go with weights of type int"),
        ("mxfp4", "activations={bits: 8, type: float}", "with their own; not float with mxfp4"),
        ("mxfp4", "activations={bits: 4, type: nvfp4, group_size: 16}", "not nvfp4 with mxfp4"),
        ("nvfp4", "activations={bits: 4, type: nvfp4}", "type nvfp4 has group_size 16"),
        ("nvfp4-w4a4", "activations.bits=8", "type nvfp4 has bits 4"),
        ("nvfp4-w4a4", "activations.dynamic=false", "type nvfp4 has dynamic true"),
        ("nvfp4-w4a4", "activations.observer=mse", "nvfp4 rounds 16 together"),
        ("mxfp4-w4a4", "activations.observer=percentile", "observer is for stored scales"),
        ("fp8-dynamic", "activations.bits=4", "4 bits go with type nvfp4 or mxfp4"),
        ("w8a8-dynamic", "weights.symmetric=false", "for symmetric weights only"),
        ("w8a8-dynamic", "activations.bits=3", "activations.bits: input should be 4 or 8, found 3"),
        ("fp8-dynamic", "weights.rows=0", "rows is 0"),
        ("fp8-block", "activations.dynamic=false", "(dynamic: false) has group_size -1"),
        ("fp8-block", "weights.rows=-1", "fp8 has one scale a row (rows 1, group_size -1), one"),
        ("fp8-dynamic", "weights.group_size=64", "fp8 has one scale a row"),  # no engine loads it
        ("fp8-dynamic", "weights.rows=64", "or one a block (rows and group_size 128)"),
        ("mxfp4", "weights.group_size=64", "weights: type mxfp4 has group_size 32"),
        ("mxfp4", 'overrides=[{match: "*", weights: {bits: 8}}]', "an override can say `dense"),
        ("kv-fp8", "activations={bits: 8, type: int}", "activations: `method: none` leaves"),
        ("w8a8-smoothquant", "transforms=[smooth, smooth]", "smooth is there more than once"),
        ("w8a8-static", "activations.percentile=99", "percentile is read by observer: percentile"),
    ],
)
def test_numbers_that_do_not_go_together(name: str, item: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.load(name, [item])
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_rows_that_share_a_scale_compensate_for_nothing() -> None:
    for name in ("fp8-block", "fp8-static"):
        with pytest.raises(
            RecipeError, match=r"gptq\.yaqa: rows compensate .* several share a scale"
        ):
            recipe.load(name, ["method=gptq", "gptq.yaqa=4"])
        assert recipe.load(name, ["method=gptq", "gptq.guided=0.5"]).rounding == "gptq"


def test_values_of_other_methods_and_formats_are_idle() -> None:
    assert recipe.load(
        "kv-fp8", ["weights={bits: 8, group_size: -1, symmetric: true}"]
    ).idle_options == ["weights"]
    assert recipe.load("w8a8-dynamic", ["llm_int8.threshold=3"]).idle_options == [
        "llm_int8.threshold"
    ]
    assert recipe.load("int8-llmint8", ["llm_int8.threshold=3"]).idle_options == []


# Tested where what they make is.
ELSEWHERE = {"int8-llmint8", "kv-fp8", "w4a8kv4-qserve", "w4a8kv4-qserve-channel", "w4a4-rotated"}


def of_integers() -> list[str]:
    names = (name for name in recipe.shipped() if "-" in name and not name.startswith(("q", "iq")))
    return [name for name in names if name not in {*NAMED, *ELSEWHERE}]


@pytest.mark.parametrize("name", of_integers())
def test_shipped_recipe(name: str) -> None:
    path = recipe.shipped()[name]
    lines = path.read_text().splitlines()
    assert len(lines) < 25
    assert lines[0].startswith("# ") and lines[0].endswith(".")
    loaded = recipe.load(name)
    assert loaded.name == name
    # The name says what the file does.
    first, *methods = name.split("-")
    assert loaded.scheme.bits == int(first[1])
    assert loaded.scheme.group_size == (int(first.partition("g")[2]) if "g" in first else -1)
    said = {"channel", "rotated", "learned", "mlx"}
    assert list(loaded.method) == [word for word in methods if word not in said]
    assert ("rotate" in loaded.transforms) == ("rotated" in methods)
    if "rotated" in methods:
        assert (loaded.rotate.kind == "learned") == ("learned" in methods)
    assert recipe.load(name, ["weights.symmetric=false"]).scheme.symmetric is False
    if "mlx" in methods:
        assert loaded.format == "mlx" and not loaded.scheme.symmetric
        return
    # 4 bits go into AWQ unless GPTQ alone makes them; engines load GPTQ only when symmetric.
    in_awq = loaded.scheme.bits == 4 and loaded.method != ("gptq",)
    assert loaded.format == ("awq" if in_awq else "gptq")
    assert loaded.scheme.symmetric == (not in_awq)


def test_what_method_means() -> None:
    def of(*sets: str) -> tuple[tuple[str, ...], str, bool]:
        loaded = recipe.parse(MINIMAL, "r.yaml", "r", sets)
        return loaded.transform_chain, loaded.rounding, loaded.clips

    assert of() == ((), "rtn", False)
    assert of("rtn.clip=true") == ((), "rtn", True)
    assert of("method=awq") == (("awq",), "rtn", True)
    assert of("method=awq", "awq.clip=false") == (("awq",), "rtn", False)
    assert of("method=[awq, rtn]") == (("awq",), "rtn", False)
    assert of("method=[awq, gptq]") == (("awq",), "gptq", False)
    assert of("transforms=[awq]") == (("awq",), "rtn", False)
    assert of("transforms=[awq]", "method=[awq, gptq]") == (("awq",), "gptq", False)
    assert of("method=none", "format=dense", "transforms=[awq]") == (("awq",), "none", False)


def test_set_reaches_every_kind_of_place() -> None:
    loaded = recipe.parse(
        MINIMAL,
        "r.yaml",
        "r",
        [
            "weights.bits=3",
            "format=gptq",
            "gptq.damp_percent=1e-3",
            "calibration.source='a b.txt'",
            'overrides=[{match: "*.down_proj", weights: {bits: 8}}]',
            "overrides.0.weights.bits=2",
            "weights.bits=2",
        ],
    )
    assert loaded.scheme == Scheme(2, 128, False)
    assert loaded.gptq.damp_percent == 0.001
    assert loaded.calibration.source == "a b.txt"
    patch = loaded.overrides[0].weights
    assert patch is not None
    assert recipe.patched(loaded.scheme, patch) == Scheme(2, 128, False)


def test_options_of_the_command_line_become_sets() -> None:
    odd = 'a "quoted": #name é.txt'
    loaded = recipe.parse(MINIMAL, "r", "r", recipe.calibration_sets(odd, 3, 64, 7))
    assert loaded.calibration == recipe.Calibration(source=odd, samples=3, length=64, seed=7)
    assert recipe.calibration_sets(None, None, None, None) == []


def test_one_calibration_for_several_recipes() -> None:
    def of(name: str, more: str) -> recipe.Recipe:
        return recipe.parse(MINIMAL + more, f"{name}.yaml", name)

    same = [of("a", "calibration: {samples: 9}"), of("b", "calibration: {samples: 9, seed: 0}")]
    assert recipe.common_calibration(same, []).samples == 9
    with pytest.raises(RecipeError) as caught:
        recipe.common_calibration([*same, of("c", "calibration: {samples: 8}")], [])
    assert "recipes a and c differ in calibration.samples (9 and 8)" in str(caught.value)
    assert recipe.common_calibration([], recipe.calibration_sets(None, 3, None, 7)) == (
        recipe.Calibration(samples=3, seed=7)
    )


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("weigths: 3", "r.yaml:4: weigths: unknown key; did you mean weights? known: method"),
        ("ignore: [lm_head]", "r.yaml:4: ignore: unknown key; in a recipe of qtool it is overrides"
         ': [{match: "*.NAME", dense: true}]; embeddings and'),
        ("scheme: W4A16", "r.yaml:4: scheme: unknown key; in a recipe of qtool it is weights and"),
        ("rtn:\n  clipp: true", "r.yaml:5: rtn.clipp: unknown key; did you mean clip?"),
        ("calibration: {samples: 0}", "r.yaml:4: calibration.samples: input should be greater"),
        ("calibration: {samples: '9'}", 'calibration.samples: input should be a valid integer, '
         'found "9"'),
        ("activations: {bits: 8}", "r.yaml:4: activations.type: missing"),
        ("activations: {bits: 8, type: int}", "r.yaml:4: activations: format awq does not say how"),
        ("kv_cache: fp8", 'r.yaml:4: kv_cache: input should be a mapping, found "fp8"'),
        ("transforms: [turn]", "r.yaml:4: transforms: 'turn' is unknown; known: rotate, smooth,"),
        ("overrides:\n- match: a\n", "r.yaml:5: overrides.0: expected either `weights`"),
        ("overrides:\n- match: a\n  weights: {bots: 3}", "r.yaml:6: overrides.0.weights.bots: unk"),
        ("overrides: 3", "r.yaml:4: overrides: input should be a list, found 3"),
        ("gptq: {damp_percent: .nan}", 'should be a valid number, found ".nan"'),
        ("method: awq", "r.yaml:4: method: the key stands twice"),
        ("rtn: &a {clip: true}", "r.yaml:4: anchors and aliases are not used"),
        ("rtn: *a", "r.yaml:4: anchors and aliases are not used"),
        ("rtn: !!python/object:os.system {}", "r.yaml:4: the tag"),
        ("rtn: {", "r.yaml:4: not YAML"),
        ("gptq: {damp_percent: 1e9999}", "r.yaml:4: gptq.damp_percent: "),
        ('x: "\\ud800"', "r.yaml"),
        ("? [a]\n: b", "r.yaml:4: a key must be a word"),
        ("---\nmethod: awq", "r.yaml:4: a second document starts here"),
        ("x: " + "[" * 40 + "]" * 40, "nested more than 16 levels"),
        ("# " + "x" * yaml_source.MAX_BYTES, "a recipe has at most 65536"),
        ("x: \x00", "r.yaml: not YAML"),
    ],
)  # fmt: skip
def test_wrong_recipe_is_named_with_line_and_key(text: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.parse(MINIMAL + text, "r.yaml", "r")
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("item", "sentence"),
    [
        ("weights.bits=9", "--set weights.bits=9: weights.bits: input should be less than or"),
        ("weights.bits=true", "weights.bits: input should be a valid integer, found true"),
        ("weights.symmetric=no", 'weights.symmetric: input should be a valid boolean, found "no"'),
        ("weights.group_size=7", "expected -1 (one group per output channel) or a multiple of 8"),
        ("weights.bits.x=1", "--set weights.bits.x=1: weights.bits is a value, not a mapping"),
        ("weights=null", "weights: missing"),
        ("method=[gptq, awq]", "[gptq, awq] is no order that exists"),
        ("method=omniquant", "method: 'omniquant' is unknown; known: rtn, gptq, awq, tune, none"),
        ("method=gpqt", "method: 'gpqt' is unknown; did you mean gptq? known: rtn, gptq, awq,"),
        ("transforms=[smoth]", "'smoth' is unknown; did you mean smooth? known: rotate, smooth,"),
        ("format=gtpq", 'found "gtpq"; or gguf, which has keys of its own; did you mean gptq'),
        (
            "kv_cache={bits: 8, type: flaot}",
            "input should be 'int' or 'float', found \"flaot\"; did you mean float?",
        ),
        (
            "kv_cache={bits:4, type: int}",
            "kv_cache.bits:4: unknown key; YAML wants a blank after the colon, as in `bits: 4`; "
            "known: bits, type,",
        ),
        ("method=none", "does not go with format awq"),
        ("format=dense", "format: method rtn does not go with format dense"),
        (
            "format=exl3",
            "format: input should be 'awq', 'gptq', 'compressed-tensors', 'fp8', 'bitsandbytes', "
            "'qserve', 'mlx', 'mxfp4' or 'dense', found \"exl3\"",
        ),
        ("weights.type=fp8", "weights: type fp8 has bits 8"),
        ("weights.rows=2", "int has one scale a row; or one for the matrix"),
        ("format=fp8", "format: fp8 stores weights of type fp8, not int"),
        (
            "overrides.0.dense=true",
            "overrides has no item 0; give it as a list, such as --set 'ove",
        ),
        ("weights.bits=", "--set weights.bits=: weights.bits: input should be a valid integer"),
        ("weights", "--set weights: expected key=value"),
        ("=3", "--set =3: expected key=value"),
        ("a..b=3", "expected key=value"),
        ("weights.bits={", "--set weights.bits={: not YAML"),
    ],
)
def test_wrong_set_is_named(item: str, sentence: str) -> None:
    with pytest.raises(RecipeError) as caught:
        recipe.parse(MINIMAL, "r.yaml", "r", [item])
    assert sentence in str(caught.value)


def test_what_other_programs_call_a_key_leads_to_one_that_is_there() -> None:
    for table, model in ((foreign._SAFETENSORS, recipe.Recipe), (foreign._GGUF, GgufRecipe)):
        for theirs, ours in table.items():
            keys = file._keys(model, ())
            assert theirs not in keys, "then nobody is pointed elsewhere"
            first = re.split(r"[.:, ]", ours)[0]
            assert first in keys, ours


def test_missing_key_and_no_mapping() -> None:
    with pytest.raises(RecipeError, match=r"r.yaml:1: format: missing"):
        recipe.parse("method: rtn", "r.yaml", "r")
    with pytest.raises(RecipeError, match="a recipe is a mapping of keys"):
        recipe.parse("- rtn", "r.yaml", "r")


def test_files_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    assert recipe.load(str(path)).name == "mine"
    with pytest.raises(RecipeError, match=r"did you mean w4g128-awq"):
        recipe.load("w4g128_awq")
    with pytest.raises(RecipeError, match="no such recipe file"):
        recipe.load(str(tmp_path / "other.yaml"))
    (tmp_path / "some").mkdir()
    with pytest.raises(RecipeError, match=r"/some: is a folder, not a recipe; name a .yaml file, "):
        recipe.load(f"{tmp_path}/some/")
    monkeypatch.chdir(tmp_path.parent)
    with pytest.raises(RecipeError, match=r"/: is a folder.*a .yaml file in it, such as mine.yaml"):
        recipe.load(f"{tmp_path.name}/")
    path.write_bytes(b"method: \xff")
    with pytest.raises(RecipeError, match=r"not UTF-8 text \(byte 8\)"):
        recipe.load(str(path))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None), ("~", None), ("null", None), ("true", True), ("no", "no"), ("on", "on"),
        ("-1", -1), ("+3", 3), ("1:30", "1:30"), ("0x10", "0x10"), ("1e-3", 0.001), (".5", 0.5),
        ("1.", 1.0), ("1_000", "1_000"), ("2024-01-01", "2024-01-01"), ("9" * 30, 1e30),
    ],
)  # fmt: skip
def test_scalars_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = yaml_source.scalar(text)
    assert found == value and type(found) is type(value)


def test_quoted_scalars_are_strings() -> None:
    assert yaml_source.parse("a: '3'\nb: \"true\"", "r").value == {"a": "3", "b": "true"}


def test_schema_accepts_what_loads() -> None:
    both = json.loads(json.dumps(recipe.schema()))
    schema = both["$defs"]["Recipe"]
    assert both["else"] == {"$ref": "#/$defs/Recipe"}
    assert set(schema["properties"]) == set(recipe.Recipe.model_fields)
    assert schema["required"] == ["method", "format"]
    assert schema["additionalProperties"] is False
    assert "gptq" in schema["properties"]["method"]["anyOf"][0]["enum"]


def test_effective_recipe_says_every_key() -> None:
    effective = recipe.load("w4g128-awq").effective()
    assert effective["weights"] == {
        "bits": 4, "group_size": 128, "symmetric": False, "type": "int", "rows": 1,
    }  # fmt: skip
    assert effective["awq"]["grid"] == 20
    assert effective["calibration"]["samples"] == 128
    again = recipe.parse(json.dumps(effective), "again.json", "w4g128-awq")
    assert again == recipe.load("w4g128-awq")


@pytest.mark.parametrize("table", ["weights.type", "activations.type", "kv_cache.type"])
@pytest.mark.parametrize("name", ["fp8_e5m2", "float8_e5m2", "E5M2"])
def test_e5m2_is_refused_with_what_engines_load(table: str, name: str) -> None:
    with pytest.raises(RecipeError, match=f"{table}: float8_e5m2 is in no format that engines"):
        recipe.load("fp8-static" if table != "kv_cache.type" else "kv-fp8", [f"{table}={name}"])
