"""GPTQ into GGUF: what the next block is fed by is what the file says, errors, kills, refusals."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from qtool.calibrating.placed import Passage
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind
from qtool.gguf.importance.imatrix import Importance
from qtool.gguf.inspect import GgufInspection
from qtool.gguf.inspect_text import summary
from qtool.gguf.open import open_source
from qtool.messages.summary import OUTPUTS, WEIGHTS
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.quantizing.gguf.gptq import sweeping, swept_site
from qtool.quantizing.gguf.gptq.sweeping import Sweeping
from qtool.quantizing.gguf.scaling import Scaling
from qtool.recipe import recipe as recipes
from qtool.recipe.gguf import GgufRecipe
from qtool.report.again import commands
from qtool.reproduce.run import Asked, reproduce
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf, gguf_models
from support.gguf.gguf_bytes import Gguf, entry
from support.gguf.gguf_runs import QUIET, begun_once, sets, without_tokenizers, write
from support.gguf.gguf_swept import TINY, check_fed, model_of
from support.models.small_models import checkpoint, models
from support.runs import quantizing
from support.runs.killed_runs import Died, damage, dying
from support.verification.verifying import but_digests

__all__ = ["models", "sets", "without_tokenizers"]


@pytest.mark.parametrize(
    ("name", "recipe", "more"),
    [
        ("llama", "q4_k_m", []),
        ("llama", "q4_0", ["transforms=[rotate, awq]"]),
        ("mixtral", "q3_k_m", []),  # experts of their own tensors
        ("phi3", "q5_k_m", []),  # q, k and v in one matrix, gate and up in another
        ("gpt_neox", "q8_0", []),  # rows of q, k and v by heads
        pytest.param("gemma3", "iq4_nl", [], marks=pytest.mark.slow),
        ("tiny", "iq3_xxs", ["transforms=[awq]"]),  # sites read by matrices of several types
        ("tiny", "iq2_s", []),
        ("tiny", "iq1_s", ["transforms=[awq]"]),
        pytest.param("tiny", "iq1_m", [], marks=pytest.mark.slow),
    ],
)
def test_later_blocks_are_fed_by_what_the_file_says(
    name: str, recipe: str, more: list[str], models: Path, sets: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    chosen = [recipe, "method=gptq", *more, *sets]
    check_fed(model_of(models, name), tmp_path / "out.gguf", chosen, monkeypatch)


def test_experts_in_one_tensor_become_what_those_apart_do(sets: list[str], tmp_path: Path) -> None:
    apart = quantizing.add_tokenizer(gguf_models.build("qwen3-moe", tmp_path / "apart"))
    fused = gguf_models.fuse_experts(apart, tmp_path / "fused")
    found = []
    for folder in (apart, fused):
        out = tmp_path / f"{folder.name}.gguf"
        made = write(folder, out, "q4_0", "method=gptq", *sets)
        assert len([one for one in made.layers if one.of == OUTPUTS and "_exps" in one.name]) == 6
        with GgufFile.open(out) as file:
            found.append({n: gguf_from_hf.raw(file, n).tobytes() for n in file.tensors})
    assert found[0] == found[1]


def test_what_does_not_fit_the_type_is_named(models: Path, sets: list[str], tmp_path: Path) -> None:
    """In the first block: what is made of it must not come to the next one."""
    model = tmp_path / "model"
    shutil.copytree(checkpoint(models, "llama", "bfloat16").path, model)
    found = load_file(model / "model.safetensors")
    found["model.layers.0.mlp.down_proj.weight"][3, 5] = 3e6
    save_file(found, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(FormatError, match=r"blk\.0\.ffn_down\.weight: .* too large for Q4_0; give"):
        write(model, tmp_path / "out.gguf", "q4_0", "method=gptq", *sets)
    assert not (tmp_path / "out.gguf").exists()


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_sites_measured_apart_give_the_same_file(
    name: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Gram matrices are large a block's inputs are measured in turns, the last ones first."""
    model = checkpoint(models, name, "bfloat16").path
    write(model, tmp_path / "together", "q4_0", "method=gptq", *sets)
    groups, counts = sweeping.groups_of, []

    def few(sites: Any, _: int) -> Any:
        found = groups(sites, 64 * 64 * 9)
        counts.append(len(found))
        return found

    monkeypatch.setattr(sweeping, "groups_of", few)
    write(model, tmp_path / "apart", "q4_0", "method=gptq", *sets)
    assert min(counts) > 1
    assert (tmp_path / "together").read_bytes() == (tmp_path / "apart").read_bytes()


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        pytest.param("gemma3", marks=pytest.mark.slow),
        pytest.param("phi3", marks=pytest.mark.slow),
        "mixtral",
    ],
)
def test_what_awq_measured_serves_the_sweep(
    name: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Gram matrices of scaled inputs are those of the others, divided: the same bytes, and no
    forward pass for what is swept."""
    model = checkpoint(models, name, "bfloat16").path
    scale, collect, measured = Scaling.scale, Passage.collect, list[int]()

    def watched(self: Passage, block: Any, sites: Any, needs: Any, **more: Any) -> Any:
        measured.extend([block.index] if "gram" in needs and sites else [])
        return collect(self, block, sites, needs, **more)

    def alone(*given: Any) -> dict[str, Any]:
        scale(*given)
        return {}

    chosen = ["transforms=[awq]", "method=gptq", *sets]
    monkeypatch.setattr(Passage, "collect", watched)
    write(model, tmp_path / "once", "q4_0", *chosen)
    once, measured[:] = measured[:], []
    assert once == sorted(set(once)) and len(once) > 1  # for scales
    monkeypatch.setattr(Scaling, "scale", alone)
    write(model, tmp_path / "twice", "q4_0", *chosen)
    assert measured == [index for index in once for _ in range(2)]
    assert (tmp_path / "once").read_bytes() == (tmp_path / "twice").read_bytes()


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow), "mixtral"]
)
def test_rows_that_are_swept_together_change_no_byte(
    name: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(models, name, "bfloat16").path
    whole = write(model, tmp_path / "whole.gguf", "q4_0", "method=gptq", *sets)
    monkeypatch.setattr(swept_site, "AT_ONCE", 5 * 64)
    parts = write(model, tmp_path / "parts.gguf", "q4_0", "method=gptq", *sets)
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "parts.gguf").read_bytes()
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert one.relative_error == pytest.approx(other.relative_error, rel=1e-5)


@pytest.mark.parametrize("recipe", [pytest.param("q4_k_m", marks=pytest.mark.slow), "iq3_xxs"])
def test_bytes_do_not_depend_on_threads_or_the_kind_of_source(
    recipe: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # this model's tokenizer is one that llama.cpp knows
    model, chosen = model_of(models, "tiny"), ["method=gptq", *sets]
    write(model, tmp_path / "two.gguf", recipe, *chosen)
    write(model, tmp_path / "one.gguf", recipe, *chosen, threads=1)
    assert (tmp_path / "two.gguf").read_bytes() == (tmp_path / "one.gguf").read_bytes()
    write(model, tmp_path / "source.gguf", "f32")
    write(tmp_path / "source.gguf", tmp_path / "three.gguf", recipe, *chosen)
    with GgufFile.open(tmp_path / "one.gguf") as one, GgufFile.open(tmp_path / "three.gguf") as two:
        for name in one.tensors:
            assert gguf_from_hf.raw(one, name).tobytes() == gguf_from_hf.raw(two, name).tobytes()


@pytest.mark.parametrize(
    ("recipe", "chain"),
    [
        pytest.param("q4_0", "", marks=pytest.mark.slow),
        pytest.param("q4_0", "awq", marks=pytest.mark.slow),
        pytest.param("iq2_m", "", marks=pytest.mark.slow),
    ],
)
def test_goes_on_after_a_kill(
    recipe: str, chain: str, models: Path, sets: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Killed at each line of the journal in turn: the same bytes, no block done twice but one."""
    model = model_of(models, "tiny" if recipe == "iq2_m" else "llama")
    chosen = (recipe, "method=gptq", f"transforms=[{chain}]", *sets)
    whole = write(model, tmp_path / "whole", *chosen)
    out, tries = tmp_path / "out", 0
    while not out.exists():
        tries += 1
        with monkeypatch.context() as patched:
            dying(1, patched)
            try:
                made = write(model, out, *chosen)
            except Died:
                assert not out.exists()
    assert tries > 4 and out.read_bytes() == (tmp_path / "whole").read_bytes()
    assert made.layers == whole.layers and made.notes == whole.notes


@pytest.mark.parametrize("what", ["swept-0", "importance-0", "hidden-1", "lacking"])
def test_what_is_damaged_is_done_again(
    what: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = ("q4_0", "method=gptq", *sets)
    out = begun_once(models, model, tmp_path, monkeypatch, *chosen)
    folder = tmp_path / ".out.partial"
    if what == "lacking":
        (folder / "swept-0").unlink()
    else:
        damage(folder / what, (folder / what).stat().st_size // 2)
    write(model, out, *chosen)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_scaled_file_is_compared_with_a_checkpoint_alone(
    models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    model = model_of(models, "tiny")
    write(model, tmp_path / "f16.gguf", "f16")
    write(model, tmp_path / "out.gguf", "q4_0", "method=gptq", "transforms=[awq]", *sets)
    verdict = verify_artifact(tmp_path / "out.gguf", against=tmp_path / "f16.gguf")
    (found,) = but_digests(verdict.findings)
    assert (found.severity, found.check) == ("note", "smoothing")
    assert "was changed by awq" in found.message and "give the folder" in found.message


def test_a_file_is_reproduced(models: Path, sets: list[str], tmp_path: Path) -> None:
    model, out = checkpoint(models, "qwen3", "bfloat16").path, tmp_path / "out.gguf"
    write(model, out, "q4_0", "method=gptq", "gptq.act_order=false", "transforms=[awq]", *sets)
    with GgufFile.open(out) as file:
        record = json.loads(str(file.metadata["qtool.recipe"].value))
    assert record["method"] == "gptq" and record["gptq"]["act_order"] is False
    again = reproduce(Asked(out, str(model), Path(sets[0].partition("=")[2]), threads=1), QUIET)
    assert again.same and again.alike and again.recorded == again.here
    other = quantizing.text_file(tmp_path / "other.txt", 6000, seed=1)
    with pytest.raises(SourceError, match=r"out\.gguf: was calibrated on another text"):
        reproduce(Asked(out, str(model), other, threads=1), QUIET)


@pytest.mark.parametrize(
    "chosen",
    [
        ["method=gptq", "transforms=[awq]", "gptq.damp_percent=0.02"],
        ["method=[gptq, tune]", "tune.steps=2"],
        ["transforms=[smooth]", "smooth.alpha=0.3", "importance=true"],
    ],
)
def test_a_report_prints_the_command_that_makes_it_again(
    chosen: list[str], models: Path, sets: list[str], tmp_path: Path
) -> None:
    model, out = checkpoint(models, "llama", "bfloat16").path, tmp_path / "out.gguf"
    write(model, out, "q4_0", *chosen, *sets)
    words = shlex.split(commands(out, "out.gguf")[-1])
    given = [word for at, word in enumerate(words) if words[at - 1] == "--set"]
    found, wanted = (recipes.load("q4_0", one).effective() for one in (given, chosen))
    for said in (found, wanted):
        del said["calibration"]
    assert found == wanted


def head_of(path: Path) -> dict[str, str]:
    with GgufFile.open(path) as file:
        return dict(summary(GgufInspection(file)))


def test_inspect_says_how_a_file_was_made(models: Path, sets: list[str], tmp_path: Path) -> None:
    model, out = checkpoint(models, "llama", "bfloat16").path, tmp_path / "out.gguf"
    write(model, out, "q4_0", "method=gptq", "transforms=[smooth, awq]", *sets)
    lines = head_of(out)
    assert lines["made by"] == "recipe q4_0: smooth, then awq, then gptq"
    assert lines["calibrated on"].startswith("8 samples of 32 tokens of ")
    write(model, out.with_name("plain.gguf"), "q4_0")
    assert head_of(out.with_name("plain.gguf"))["made by"] == "recipe q4_0"


@pytest.mark.parametrize("text", ["{", "[" * 15_000, "[]", '{"name": 3}', " " * 30_000 + "{}"])
def test_a_recipe_that_is_none_is_passed_over(text: str, tmp_path: Path) -> None:
    path, entries = tmp_path / "x.gguf", [entry("general.architecture", Kind.STRING, "llama")]
    path.write_bytes(bytes(Gguf([*entries, entry("qtool.recipe", Kind.STRING, text)])))
    assert "made by" not in head_of(path)


def test_experts_that_few_tokens_reached_are_encoded_with_importance(
    models: Path, tmp_path: Path, sets: list[str]
) -> None:
    """With eight tokens in all no expert is seen enough: the first block's experts are those of
    `importance: true`, and it is said how many they are."""
    model = checkpoint(models, "mixtral", "bfloat16").path
    few = [sets[0], "calibration.samples=1", "calibration.length=8"]
    made = write(model, tmp_path / "swept.gguf", "q4_0", "method=gptq", *few)
    write(model, tmp_path / "weighed.gguf", "q4_0", "importance=true", *few)
    assert "24 of 33 matrices were not swept, as fewer than 64 tokens" in "\n".join(made.notes)
    of = {layer.name: layer.of for layer in made.layers}
    with (
        GgufFile.open(tmp_path / "swept.gguf") as one,
        GgufFile.open(tmp_path / "weighed.gguf") as two,
    ):
        experts = [name for name in one.tensors if name.startswith("blk.0.") and "_exps" in name]
        assert len(experts) == 3
        for name in experts:
            assert gguf_from_hf.raw(one, name).tobytes() == gguf_from_hf.raw(two, name).tobytes()
            assert of[name] == WEIGHTS
        query = "blk.0.attn_q.weight"
        assert gguf_from_hf.raw(one, query).tobytes() != gguf_from_hf.raw(two, query).tobytes()
        assert of[query] == OUTPUTS


@pytest.mark.parametrize("key", ["tensors", "sums", "notes", "start"])
def test_a_line_that_lies_is_not_believed(
    key: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A right checksum of the line, and what is in it is none of ours."""
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = ("q4_0", "method=gptq", *sets)
    out = begun_once(models, model, tmp_path, monkeypatch, *chosen)
    restore, seen = Sweeping.restore, []

    def lied(self: Sweeping, kept: Any) -> bool:
        kept = json.loads(json.dumps(kept))
        first = next(iter(kept["tensors"]))
        if key == "tensors":
            del kept["tensors"][first]
        elif key == "notes":
            kept["notes"] = [3]
        else:
            kept["tensors"][first][key] = {"sums": [[1]], "start": 144}[key]
        seen.append(restore(self, kept))
        return seen[-1]

    monkeypatch.setattr(Sweeping, "restore", lied)
    write(model, out, *chosen)
    assert seen == [False] and out.read_bytes() == (tmp_path / "whole").read_bytes()


def test_a_weight_that_is_not_finite_is_named(
    models: Path, sets: list[str], tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint(models, "llama", "bfloat16").path, model)
    found = load_file(model / "model.safetensors")
    found["model.layers.0.mlp.down_proj.weight"][3, 5] = float("inf")
    save_file(found, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(SourceError, match=r"mlp.down_proj.weight' holds inf at \[3, 5\]"):
        write(model, tmp_path / "out.gguf", "q4_0", "method=gptq", *sets)
    assert not (tmp_path / "out.gguf").exists()


def test_plan_and_refusals(models: Path, sets: list[str], tmp_path: Path) -> None:
    model = TINY

    def plan(*chosen: str) -> Any:
        loaded = recipes.load("q4_k_m", [*chosen, *sets])
        assert isinstance(loaded, GgufRecipe)
        return make_gguf_plan(loaded, open_source(model), threads=1)

    weighed, swept = plan("importance=true"), plan("method=gptq")
    assert weighed.peak_rss_bytes < swept.peak_rss_bytes and weighed.seconds < swept.seconds
    assert {t.name for t in swept.tensors if t.swept} - {"token_embd.weight"} == {
        t.name for t in weighed.tensors if t.name.startswith("blk.") and len(t.shape) == 2
    }
    assert not any(t.swept for t in weighed.tensors)
    for type_ in ("tq1_0", "f16"):
        with pytest.raises(UnsupportedError, match=f"nothing to do with type {type_}"):
            plan("method=gptq", f"type={type_}")
    mixed = plan("method=gptq", "overrides=[{match: ffn_, type: tq2_0}]")
    assert any("gptq leaves 12 of 28 matrices" in one and "TQ2_0" in one for one in mixed.warnings)
    assert not plan("method=gptq", "type=iq1_m").warnings
    assert any(
        "gptq.act_order has no effect" in one for one in plan("gptq.act_order=false").warnings
    )
    loaded = recipes.load("q4_k_m", ["method=gptq", *sets])
    assert isinstance(loaded, GgufRecipe) and loaded.importance and loaded.calibrates
    found = Importance({}, {}, file="x.gguf")
    with pytest.raises(UnsupportedError, match=r"--imatrix x.gguf: recipe q4_k_m has method gptq"):
        make_gguf_plan(loaded, open_source(model), found, threads=1)
    plain = {"format": "gguf", "type": "q8_0", "method": "gptq"}
    assert GgufRecipe.model_validate(plain).importance
