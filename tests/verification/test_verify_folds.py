"""verify --against: folds of all chains of transforms are accounted for, and lone halves told."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import qtool
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.main import main
from qtool.verification.against.compared import Compared
from qtool.verification.against.fit import fit
from qtool.verification.against.pairs import Heads, unpaired
from qtool.verification.against.side_by_side import Floats, SideBySide, rows_of_array
from qtool.verification.run import verify_artifact
from support.runs.quantizing import build, first_blocks_of_tiny, quantize, text_file
from support.verification.verifying import forget_digests

STATIC = ("w8a8-smoothquant-static",)
KEYS = ("w8a8-dynamic", "transforms=[smooth-attention]")
FOUR = ("w4a16-ct", "transforms=[rotate, smooth-attention]", "weights.group_size=32")


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("llama", KEYS),
        ("llama", FOUR),
        pytest.param("phi3", STATIC, marks=pytest.mark.slow),
        ("phi3", KEYS),
        ("gpt_neox", STATIC),
        pytest.param("gpt_neox", KEYS, marks=pytest.mark.slow),
        ("opt", STATIC),
        pytest.param("opt", FOUR, marks=pytest.mark.slow),
        ("mixtral", ("w8a8-smoothquant", "transforms=[smooth, smooth-attention]")),
        ("llama", ("w4g64-awq", "transforms=[smooth-attention]", "weights.group_size=32")),
        ("llama", ("none", "transforms=[smooth-attention]")),
    ],
)
def test_what_transforms_fold_is_found_again(
    name: str, chosen: tuple[str, ...], tmp_path: Path
) -> None:
    model = build(name, tmp_path / "m")
    text = text_file(tmp_path / "text.txt", 6000)
    given = [f"calibration.source={text}", "calibration.samples=4", "calibration.length=32"]
    recipe, *sets = chosen
    if recipe == "none":  # its keys are scaled, and nothing is quantized but the cache
        recipe = str(tmp_path / "r.yaml")
        Path(recipe).write_text(
            "# of a test\nmethod: none\nformat: compressed-tensors\n"
            "kv_cache: {bits: 8, type: float, scale: tensor}\n"
        )
    else:
        sets.append("indivisible=dense")
    quantize(model, recipe, tmp_path / "out", *given, *sets)
    verdict = verify_artifact(tmp_path / "out", against=model, threads=1)
    assert not [f for f in verdict.findings if f.severity != "note"]
    if chosen[0] == "none":
        key = "model.layers.0.self_attn.k_proj.weight"
        before, after = (Checkpoint.open(f).float32(key) for f in (model, tmp_path / "out"))
        assert not np.allclose(before, after, rtol=0.1)
    else:
        assert any("scales folded in" in f.message for f in verdict.findings)


# Halves, by hand. Four heads of queries share two of keys, each 8 wide.

HEADS = Heads(8, 4, 2)


def found(name: str, columns: Floats | None = None, rows: Floats | None = None) -> Compared:
    return Compared(name, 0.01, 0.5, 0.01, 0.02, columns, rows, None, 0, 0, 1)


def scales(count: int, seed: int = 0) -> Floats:
    return np.exp2(np.random.default_rng(seed).uniform(-1, 1, count)).astype(np.float32)


def test_queries_and_keys_are_halves_of_one_fold() -> None:
    s = scales(16)
    spread = s.reshape(2, 8).repeat(2, axis=0).reshape(-1)
    queries, keys = found("a.q_proj.weight", rows=spread), found("a.k_proj.weight", rows=1 / s)
    assert not unpaired(keys, [keys, queries], HEADS)
    assert not unpaired(queries, [keys, queries], HEADS)
    assert unpaired(keys, [keys], HEADS) and unpaired(queries, [queries], HEADS)
    wrong = replace(queries, rows=1 / spread)
    assert unpaired(keys, [keys, wrong], HEADS)


@pytest.mark.parametrize("heads_together", [False, True])
def test_parts_of_one_matrix(heads_together: bool) -> None:
    """Queries and keys in one matrix meet each other, its values what reads them."""
    s, v = scales(16), scales(16, 1)
    parts = [s.reshape(2, 8).repeat(2, axis=0), 1 / s.reshape(2, 8), 1 / v.reshape(2, 8)]
    if heads_together:  # two of queries, one of keys, one of values; and again
        parts = [np.concatenate([parts[0][2 * g :][:2], parts[1][g : g + 1], parts[2][g : g + 1]])
                 for g in range(2)]  # fmt: skip
    fused = found("a.qkv_proj.weight", rows=np.concatenate(parts).reshape(-1).astype(np.float32))
    reader = found("a.o_proj.weight", v.reshape(2, 8).repeat(2, axis=0).reshape(-1))
    if heads_together:  # no model is known to have values so: theirs stay, and are told of
        assert unpaired(fused, [fused], HEADS)
        return
    assert not unpaired(fused, [fused, reader], HEADS)
    assert not unpaired(reader, [fused, reader], HEADS)
    assert unpaired(fused, [fused], HEADS)  # its values
    half = replace(fused, rows=np.where(np.arange(64) < 32, 1, fused.rows).astype(np.float32))
    assert unpaired(half, [half, reader], HEADS)  # its keys


def test_gate_and_up_in_one() -> None:
    s = scales(48)
    rows = np.concatenate([np.ones(48), 1 / s]).astype(np.float32)
    both, down = found("m.gate_up_proj.weight", rows=rows), found("m.down_proj.weight", s)
    assert not unpaired(both, [both, down], HEADS) and not unpaired(down, [both, down], HEADS)
    assert unpaired(both, [both], HEADS)
    more = replace(both, rows=np.concatenate([scales(48, 2), 1 / s]).astype(np.float32))
    assert unpaired(more, [more, down], HEADS)  # its gate


def test_a_factor_of_all_rows_is_told_of() -> None:
    whole = found("a.q_proj.weight", rows=np.full(32, 2, np.float32))
    assert unpaired(whole, [whole], HEADS)
    # Unless it may be that of a norm whose scales were about even: AWQ's often are.
    assert not unpaired(replace(whole, could=frozenset({"norm"})), [whole], HEADS)


def test_one_factor_is_of_columns_as_well_as_of_rows() -> None:
    """Columns that are scaled about alike are fitted by one factor of all rows."""
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((96, 48)).astype(np.float32)
    s = (0.5 * scales(48) ** 0.15).astype(np.float32)
    noise = 0.25 * np.float32(0.5) * generator.standard_normal(weight.shape).astype(np.float32)
    fitted = fit(pair(weight * s + noise, weight), {})
    assert fitted.columns is None and fitted.rows is not None
    down = replace(found("m.down_proj.weight", rows=fitted.rows), as_columns=fitted.as_columns)
    up = found("m.up_proj.weight", rows=1 / s)
    assert not unpaired(down, [down, up], HEADS) and not unpaired(up, [down, up], HEADS)
    assert unpaired(down, [down], HEADS) and unpaired(up, [up], HEADS)
    for other in (replace(up, rows=1.5 / s), replace(up, name="a.up_proj.weight")):
        assert unpaired(down, [down, other], HEADS) and unpaired(other, [down, other], HEADS)


@pytest.mark.parametrize("bits", [3, 4])
def test_columns_that_were_scaled_about_alike(bits: int, tmp_path: Path) -> None:
    """As AWQ does where one channel is far larger than all others; and halves of it alone."""
    model = first_blocks_of_tiny(tmp_path / "model", 1)
    tensors = load_file(model / "model.safetensors")
    up, down = (f"model.layers.0.mlp.{one}_proj.weight" for one in ("up", "down"))
    s = torch.from_numpy(0.4 * scales(tensors[up].shape[0]) ** 0.15)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "# of a test\nmethod: rtn\nformat: gptq\n"
        f"weights: {{bits: {bits}, group_size: 64, symmetric: true}}\n"
    )

    def told(*halves: str) -> list[str]:
        shutil.copytree(model, tmp_path / "folded", dirs_exist_ok=True)
        folded = {up: tensors[up].float() / s[:, None], down: tensors[down].float() * s}
        folded = {n: t.to(tensors[n].dtype) for n, t in folded.items() if n in halves}
        save_file(tensors | folded, tmp_path / "folded" / "model.safetensors", {"format": "pt"})
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        quantize(tmp_path / "folded", str(recipe), out)
        findings = verify_artifact(out, against=model, threads=1).findings
        return [f.name for f in findings if f.severity != "note"]

    assert not told(up, down)
    assert told(down) == [down] and told(up) == [up]


def pair(stored: Floats, source: Floats) -> SideBySide:
    return SideBySide((len(source), source.shape[1]), rows_of_array(stored), rows_of_array(source))


def test_scales_of_few_rows_are_found_and_columns_that_were_rounded_away() -> None:
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((96, 64)).astype(np.float32)
    rows = np.where(np.arange(96) < 60, 1, scales(96)).astype(np.float32)
    result = fit(pair(rows[:, None] * weight, weight), {})
    assert result.columns is None and result.rows is not None
    assert np.abs(result.rows - rows).max() < 1e-5
    columns = scales(64)
    columns[7] = 1e-4
    stored = np.round(weight * columns * 100) / np.float32(100)  # nothing is left of column 7
    assert not stored[:, 7].any()
    left = fit(pair(stored, weight), {}).left
    assert left < columns[columns > 0.1].min() * np.linalg.norm(weight[:, 7]) * 1.01


CHAIN = """# of a test
method: gptq
format: compressed-tensors
weights: {bits: 4, group_size: 64, symmetric: true}
"""
ALL = "smooth.sites=all"
COARSE = [
    ("chain", "transforms=[rotate, smooth]", "smooth.alpha=search", ALL),
    ("w2g64-gptq", "transforms=[smooth]", ALL),
    ("chain", "transforms=[rotate, smooth, smooth-attention]", "weights.bits=2", ALL),
    ("mxfp4", "transforms=[smooth]", "smooth.alpha=1", ALL),
]


@pytest.mark.parametrize(
    "chosen", [pytest.param(c, marks=[pytest.mark.slow] if c in COARSE[1:] else []) for c in COARSE]
)
def test_scales_behind_coarse_codes(chosen: tuple[str, ...], tmp_path: Path) -> None:
    """No sound artifact is accused, errors are those of rounding; a norm that only was divided is
    found."""
    recipe, *sets = chosen
    if recipe == "chain":
        recipe = str(tmp_path / "chain.yaml")
        Path(recipe).write_text(CHAIN)
    out, model = tmp_path / "out", first_blocks_of_tiny(tmp_path / "model", 2)
    qtool.quantize(model, recipe, out, changes=sets, samples=4, length=128)
    verdict = verify_artifact(out, against=model, threads=1)
    assert not [f for f in verdict.findings if f.severity != "note"]
    assert max(one.relative_error for one in verdict.layers) < 0.7
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    norm = "model.layers.1.post_attention_layernorm.weight"
    by = torch.exp(torch.randn(tensors[norm].shape, generator=torch.Generator().manual_seed(0)))
    tensors[norm] = (tensors[norm].float() * by).to(tensors[norm].dtype)
    save_file(tensors, file, {"format": "pt"})
    verdict = verify_artifact(out, against=model, threads=1)
    assert [f.check for f in verdict.findings if f.severity == "error" and f.check == "folds"]


def test_what_was_dequantized_with_scales_in_it(tmp_path: Path) -> None:
    """Norms differ then for a reason; a matrix that is another one is found all the same."""
    out, back = tmp_path / "out", tmp_path / "back"
    model = first_blocks_of_tiny(tmp_path / "model", 2)
    qtool.quantize(model, "w4a8kv4-qserve", out, samples=4, length=128)
    run(["qtool", "convert", str(out), "--to", "hf", "-o", str(back)])
    verdict = verify_artifact(back, against=model, threads=1)
    assert not [f for f in verdict.findings if f.severity != "note"]
    assert any(
        "scales were folded before it was dequantized" in f.message for f in verdict.findings
    )
    (file,) = back.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.q_proj.weight"] *= -1
    save_file(tensors, file, {"format": "pt"})
    forget_digests(back)
    verdict = verify_artifact(back, against=model, threads=1)
    (said,) = [f.message for f in verdict.findings if f.severity == "error"]
    assert said.startswith("1 matrix with nothing in common with the source: model.layers.1.self_")


def run(line: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", line)
        with pytest.raises(SystemExit) as caught:
            main()
    assert not caught.value.code


def test_dense_matrices_tell_few_scales_from_damage(tmp_path: Path) -> None:
    """Powers of two, as an unquantized reader makes AWQ fold, and 1 for most inputs; values and
    what they read have both."""
    model, out = first_blocks_of_tiny(tmp_path / "model", 1), tmp_path / "out"
    folded = first_blocks_of_tiny(tmp_path / "folded", 1)
    names = {n.split(".")[-2]: n for n in Checkpoint.open(model).tensors if ".layers.0." in n}
    gate, v, norm = (names[n] for n in ("gate_proj", "v_proj", "post_attention_layernorm"))
    tensors = load_file(folded / "model.safetensors")
    for first, step, readers in (
        ("input_layernorm", 4, ("q_proj", "k_proj", "v_proj")),
        ("post_attention_layernorm", 8, ("gate_proj", "up_proj")),
    ):
        tensors[names[first]][::step] /= 2
        for reader in readers:
            tensors[names[reader]][:, ::step] *= 2
    rows = torch.ones(128)
    rows[::16] = 0.5
    tensors[v] *= rows[:, None]
    heads = rows.reshape(2, 64).repeat_interleave(2, dim=0)  # two of queries read one of values
    tensors[names["o_proj"]] /= heads.reshape(-1)
    save_file(tensors, folded / "model.safetensors", {"format": "pt"})
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "# of a test\nmethod: rtn\nformat: compressed-tensors\n"
        "weights: {bits: 4, group_size: 64, symmetric: false}\n"
        "overrides:\n- {match: '*gate*', dense: true}\n- {match: '*v_proj*', dense: true}\n"
    )
    quantize(folded, str(recipe), out)

    def told() -> list[str]:
        findings = verify_artifact(out, against=model, threads=1).findings
        return [f.message for f in findings if f.severity == "error" and f.check != "fused"]

    assert not told()
    (file,) = out.glob("*.safetensors")
    healthy = load_file(file)
    for name, number in ((gate, (5, 8)), (gate, (5, 7)), (v, (16, 3)), (norm, (7,))):
        damaged = {n: t.clone() for n, t in healthy.items()}
        damaged[name][number] *= 1.5
        save_file(damaged, file, {"format": "pt"})
        (said,) = [message for message in told() if name in message]
        assert "with the source's numbers, but for some" in said


def test_slight_factors_of_rows_and_their_bias(tmp_path: Path) -> None:
    """Of a matrix in four bits the bias alone tells them; a bias with other ones is told."""
    model = build("qwen2", tmp_path / "m")
    key, reader = (f"model.layers.0.self_attn.{one}_proj" for one in "vo")
    state = load_file(model / "model.safetensors")
    torch.manual_seed(0)
    state[f"{key}.weight"] = torch.randn_like(state[f"{key}.weight"])
    state[f"{key}.bias"] = torch.randn_like(state[f"{key}.bias"])
    save_file(state, model / "model.safetensors", {"format": "pt"})
    keys = len(state[f"{key}.bias"])
    factors = 1 + 0.05 * (2 * torch.rand(keys) - 1)
    wide = state[f"{reader}.weight"].shape[1]
    shutil.copytree(model, tmp_path / "folded")
    repeated = factors.reshape(-1, 1, 8).expand(-1, wide // keys, 8).reshape(-1)
    folded = state | {
        f"{key}.weight": state[f"{key}.weight"] * factors[:, None],
        f"{key}.bias": state[f"{key}.bias"] * factors,
        f"{reader}.weight": state[f"{reader}.weight"] / repeated,
    }
    save_file(folded, tmp_path / "folded" / "model.safetensors", {"format": "pt"})
    quantize(tmp_path / "folded", "w4a16-ct", tmp_path / "out", "weights.group_size=32",
             "method=rtn", "indivisible=dense")  # fmt: skip

    def biases() -> list[str]:
        verdict = verify_artifact(tmp_path / "out", against=model, threads=1)
        return [f.name for f in verdict.findings if "unlike the source's" in f.message]

    assert not biases()
    file = tmp_path / "out" / "model.safetensors"
    state = load_file(file)
    state[f"{key}.bias"] = state[f"{key}.bias"].flip(0)
    save_file(state, file, {"format": "pt"})
    assert biases() == [f"{key}.bias"]


def test_biases_of_what_was_dequantized_after_scales_were_folded(tmp_path: Path) -> None:
    """Sound: its matrices are rounded, so that the factors of their rows are not looked for."""
    model = build("qwen2", tmp_path / "m")
    sets = (f"calibration.source={text_file(tmp_path / 'text.txt')}", "calibration.samples=8",
            "calibration.length=32", "indivisible=smaller-group")  # fmt: skip
    quantize(model, "w4g128-awq", tmp_path / "awq", *sets)
    qtool.convert(tmp_path / "awq", "hf", tmp_path / "hf")
    verdict = verify_artifact(tmp_path / "hf", against=model, threads=1)
    assert verdict.ok
    (said,) = [one for one in verdict.findings if one.name.endswith("v_proj.bias")]
    assert said.severity == "note" and "before it was dequantized" in said.message
    file = tmp_path / "hf" / "model.safetensors"
    state = load_file(file)
    state["model.layers.0.self_attn.q_proj.bias"].neg_()
    save_file(state, file, {"format": "pt"})
    forget_digests(tmp_path / "hf")
    verdict = verify_artifact(tmp_path / "hf", against=model, threads=1)
    (said,) = [one for one in verdict.findings if one.name.endswith("q_proj.bias")]
    assert said.severity == "error" and "of layers that were not scaled" in said.message
