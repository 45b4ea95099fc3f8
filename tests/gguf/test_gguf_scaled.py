"""GGUF of a smoothed network in one run: the bytes of two runs, its importance, kills, `verify`."""

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from qtool.checkpoints.scaled import Factor, Scaled, check_fits, from_json, record_of, to_json
from qtool.errors import RecipeError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.from_hf.source import hf_source
from qtool.gguf.open import open_source, open_view
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.planning.duration import STARTUP_SECONDS
from qtool.planning.estimate import PROVING_PROCESS_BYTES
from qtool.planning.gguf.plan import make_gguf_plan
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.quantizing.gguf.scaling import Scaling
from qtool.recipe import recipe as recipes
from qtool.recipe.gguf import GgufRecipe
from qtool.reproduce.run import Asked, reproduce
from qtool.runs.gguf_request import GgufRequest
from qtool.transforms.rotated import Rotated
from qtool.verification.finding import Verdict
from qtool.verification.run import verify_artifact
from support.gguf import gguf_from_hf
from support.gguf.gguf_runs import QUIET, begun_once, without_tokenizers, write
from support.models.small_models import checkpoint, difference, logits, models
from support.runs import quantizing
from support.runs.killed_runs import Died, damage, dying
from support.verification.verifying import but_digests

__all__ = ["models", "without_tokenizers"]


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    text = quantizing.text_file(tmp_path_factory.mktemp("text") / "text.txt", 6000)
    return [f"calibration.source={text}", "calibration.samples=4", "calibration.length=32"]


def loud(models: Path, name: str) -> Path:
    """A model whose norms have some channels that are far larger than others: AWQ scales those."""
    folder = models / "loud" / name
    if not folder.exists():
        shutil.copytree(checkpoint(models, name, "bfloat16").path, folder)
        found = load_file(folder / "model.safetensors")
        for key in (key for key in found if key.endswith("layernorm.weight")):
            found[key][::11] *= 16
        save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(path: Path) -> dict[str, bytes]:
    with GgufFile.open(path) as file:
        return {name: gguf_from_hf.raw(file, name).tobytes() for name in file.tensors}


def two_runs(model: Path, folder: Path, recipe: str, importance: bool, sets: list[str]) -> Path:
    """The smoothed network as a checkpoint, and a GGUF file of that."""
    (folder / "dense.yaml").write_text("method: none\nformat: dense\n", encoding="utf-8")
    smoothed = quantizing.quantize(model, str(folder / "dense.yaml"), folder / "dense", *sets).out
    measured = ["importance=true", *(s for s in sets if s[:4] == "cali")] if importance else []
    write(smoothed, folder / "two.gguf", recipe, *measured)
    return folder / "two.gguf"


def said(verdict: Verdict) -> list[tuple[str, str]]:
    return [(one.severity, one.check) for one in but_digests(verdict.findings)]


@pytest.mark.parametrize(
    ("name", "recipe", "chain", "more"),
    [
        pytest.param("llama", "q8_0", "smooth", [], marks=pytest.mark.slow),
        pytest.param("llama", "q4_0", "awq", [], marks=pytest.mark.slow),
        ("llama", "q4_k_m", "rotate, smooth, smooth-attention", ["smooth.sites=all"]),
        ("qwen3", "q3_k_m", "smooth, awq", ["importance=true", "smooth.alpha=search"]),
        ("phi3", "q5_0", "smooth", ["smooth.sites=all"]),
        ("mixtral", "q4_0", "smooth, smooth-attention", ["importance=true"]),
    ],
)
def test_one_run_gives_what_two_give(
    name: str, recipe: str, chain: str, more: list[str], models: Path, sets: list[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    """The scaled network as a checkpoint, and that as GGUF: every tensor has the same bytes, those
    encoded with importance too."""
    model = loud(models, name) if "awq" in chain else checkpoint(models, name, "bfloat16").path
    chosen = [f"transforms=[{chain}]", *more, *sets]
    write(model, tmp_path / "one.gguf", recipe, *chosen)
    if "awq" in chain or "search" in str(more):
        loaded = recipes.load(recipe, chosen)
        assert isinstance(loaded, GgufRecipe) and loaded.rounds_as is not None
        rounds = json.dumps(loaded.rounds_as.model_dump())
        chosen.append(f"weights={rounds}")
    importance = "importance=true" in chosen
    for_dense = [item for item in chosen if item != "importance=true"]
    two = tensors(two_runs(model, tmp_path, recipe, importance, for_dense))
    found = tensors(tmp_path / "one.gguf")
    assert found == two
    write(model, tmp_path / "plain.gguf", recipe)
    plain = tensors(tmp_path / "plain.gguf")
    assert any(plain[key] != found[key] for key in plain if key.endswith("norm.weight"))
    verdict = verify_artifact(tmp_path / "one.gguf", against=model)
    wanted = [("note", "rotation")] * ("rotate" in chain) + [("note", "smoothing")]
    assert said(verdict) == wanted and verdict.layers
    # Without the scales the source is another network's.
    assert ("error", "layer-error") in said(verify_artifact(tmp_path / "two.gguf", against=model))


@pytest.mark.parametrize(
    ("name", "chain", "dtype"),
    [
        pytest.param("llama", "smooth, smooth-attention", "float16", marks=pytest.mark.slow),
        ("llama", "rotate, smooth, smooth-attention", "float32"),
        pytest.param("qwen2", "smooth, smooth-attention", "bfloat16", marks=pytest.mark.slow),
        ("gemma3", "smooth", "bfloat16"),  # of 1 + weight, bfloat16 holds no half
        ("mixtral", "smooth, smooth-attention", "bfloat16"),
        ("gpt_neox", "smooth, smooth-attention", "float32"),
        pytest.param("stablelm", "smooth, smooth-attention", "float32", marks=pytest.mark.slow),
    ],
)
def test_the_network_stays_what_it_was(
    name: str, chain: str, dtype: str, models: Path, sets: list[str], tmp_path: Path
) -> None:
    """Bar of exactness: the file's logits in float32 within 1e-4 of their range of the source's."""
    source = checkpoint(models, name, dtype)
    out = tmp_path / "out.gguf"
    made = write(source.path, out, "f32", f"transforms=[{chain}]", "smooth.sites=all", *sets)
    assert any(note.startswith("smoothed: the inputs of ") for note in made.notes)
    with gguf_weights(open_source(out)) as (weights, _):
        assert difference(logits(source), logits(weights)) < 1e-4  # type: ignore[arg-type]
    changed = tensors(out)
    write(source.path, tmp_path / "plain.gguf", "f32")
    plain = tensors(tmp_path / "plain.gguf")
    assert sum(changed[key] != plain[key] for key in plain) > len(plain) // 3


def test_dying_after_every_step(
    models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scales are kept with their block: none is found twice, and the file is the same."""
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = ("q3_k_m", "transforms=[smooth, awq]", "importance=true", *sets)
    write(model, tmp_path / "whole", *chosen)
    blocks: list[int] = []
    scale = Scaling.scale

    def counted(self: Scaling, block: object, *rest: object) -> None:
        blocks.append(block.index)  # type: ignore[attr-defined]
        scale(self, block, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Scaling, "scale", counted)
    out, tries = tmp_path / "out", 0
    while not out.exists():
        tries += 1
        assert tries < 50
        with monkeypatch.context() as patched:
            dying(1 if tries < 6 else 9, patched)
            try:
                write(model, out, *chosen, threads=1)
            except Died:
                assert not out.exists()
    # The last thing that each try does is lost: a try that keeps a block has begun the next.
    assert blocks == [0, 1, 1, 2, 2] and tries > 6
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("what", ["journal", "importance-0", "hidden-1", "scales"])
def test_what_is_damaged_is_done_again(
    what: str, models: Path, sets: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = ("q4_0", "transforms=[smooth]", *sets)
    out = begun_once(models, model, tmp_path, monkeypatch, *chosen)
    folder = tmp_path / ".out.partial"
    assert (folder / "importance-0").is_file()
    if what == "scales":  # a line with a right checksum that is none of ours
        monkeypatch.setattr("qtool.quantizing.gguf.scaling.from_json", _refuse(1))
    else:
        damage(folder / what, (folder / what).stat().st_size // 2)
    write(model, out, *chosen)
    assert out.read_bytes() == (tmp_path / "whole").read_bytes()


def _refuse(times: int) -> Callable[[object], dict[str, Scaled]]:
    left = times

    def read(found: object) -> dict[str, Scaled]:
        nonlocal left
        left -= 1
        if left >= 0:
            raise ValueError("damaged")
        return from_json(found)

    return read


def test_verify_finds_damage(models: Path, sets: list[str], tmp_path: Path) -> None:
    """A scale that is not the one of the weights, a record that is none, weights, a norm."""
    model, out = checkpoint(models, "llama", "bfloat16").path, tmp_path / "out.gguf"
    write(model, out, "q8_0", "transforms=[smooth]", *sets)
    whole = out.read_bytes()
    with GgufFile.open(out) as file:
        text = str(file.metadata["qtool.scales"].value)
        places = {name: file.tensors[name].start for name in file.tensors}
    record = json.loads(text)

    def verdict(raw: bytes) -> list[tuple[str, str]]:
        out.write_bytes(raw)
        return said(verify_artifact(out, against=model))

    assert verdict(whole) == [("note", "smoothing")]
    # One exponent: of a norm and all that read it.
    codes = record["exponents"]
    other = "A" if codes[40] != "A" else "B"
    changed = json.dumps(record | {"exponents": codes[:40] + other + codes[41:]},
                         separators=(",", ":"))  # fmt: skip
    assert len(changed) == len(text)
    found = verdict(whole.replace(text.encode(), changed.encode()))
    assert ("error", "layer-error") in found and ("warning", "provenance") in found
    for was, now in (('"tensors"', '"tensorS"'), (f"[{record['lengths'][0]},", "[ 1,"),
                     ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_prog")):  # fmt: skip
        assert was in text
        found = verdict(whole.replace(text.encode(), text.replace(was, now).encode()))
        assert ("error", "smoothing") in found
    # The scale of a block of weights becomes a large one; and a norm's gain another.
    for name, place in (("blk.1.ffn_up.weight", 1), ("blk.0.attn_norm.weight", 2)):
        raw = bytearray(whole)
        raw[places[name] + place] ^= 0x40
        assert verdict(bytes(raw)) != [("note", "smoothing")]


def test_a_file_is_reproduced(models: Path, sets: list[str], tmp_path: Path) -> None:
    model, out = checkpoint(models, "qwen3", "bfloat16").path, tmp_path / "out.gguf"
    write(model, out, "q4_0", "transforms=[rotate, smooth]", "smooth.alpha=0.3", *sets)
    text = Path(sets[0].partition("=")[2])
    again = reproduce(Asked(out, str(model), text, threads=1), QUIET)
    assert again.same and again.alike and again.recorded == again.here


def test_plan_tells_of_the_forward_passes(models: Path, sets: list[str]) -> None:
    path = checkpoint(models, "llama").path

    def plan(*chosen: str, measured: bool = True) -> tuple[int, float]:
        loaded = recipes.load("q4_0", [*chosen, *(sets if measured else ())])
        assert isinstance(loaded, GgufRecipe)
        view = open_view(path, loaded, None)
        source = open_source(path) if view is None else hf_source(view)
        made = make_gguf_plan(loaded, source, threads=1)
        assert not [one for one in made.warnings if "no effect" in one]
        return made.peak_rss_bytes, made.seconds

    plain, weighed = plan(measured=False), plan("importance=true")
    smoothed, searched = plan("transforms=[smooth]"), plan("transforms=[awq]")
    assert plain < weighed and weighed[0] == smoothed[0] < searched[0]
    assert weighed[1] <= smoothed[1] <= searched[1]
    rotated = plan("transforms=[rotate]", measured=False)
    assert rotated[0] > PROVING_PROCESS_BYTES > plain[0]
    assert rotated[1] >= plain[1] + STARTUP_SECONDS[True] - STARTUP_SECONDS[False]


@pytest.mark.parametrize(
    ("name", "chain", "where"),
    [
        pytest.param("llama", "smooth", "norms", marks=pytest.mark.slow),
        ("llama", "rotate, smooth, smooth-attention", "all"),
        ("mixtral", "smooth", "norms"),
        ("phi3", "smooth", "all"),
    ],
)
def test_a_plan_counts_the_record_of_scales(
    name: str, chain: str, where: str, models: Path, sets: list[str], tmp_path: Path
) -> None:
    path, out = checkpoint(models, name, "bfloat16").path, tmp_path / "out.gguf"
    chosen = [f"transforms=[{chain}]", f"smooth.sites={where}", *sets]
    write(path, out, "q8_0", *chosen)
    with GgufFile.open(out) as file:
        record = len(str(file.metadata["qtool.scales"].value))
    loaded = recipes.load("q8_0", chosen)
    assert isinstance(loaded, GgufRecipe)
    view = open_view(path, loaded, None)
    assert view is not None
    made = make_gguf_plan(loaded, hf_source(view), threads=1)
    assert abs(made.scales_bytes - record) < 0.1 * record, (made.scales_bytes, record)
    assert abs(made.size_bytes - out.stat().st_size) < 0.1 * record + 700  # and other keys
    idle = recipes.load("q8_0", sets)
    assert isinstance(idle, GgufRecipe)
    assert make_gguf_plan(idle, hf_source(view), threads=1).scales_bytes == 0


def test_what_does_not_go_together(models: Path, sets: list[str], tmp_path: Path) -> None:
    for chosen, why in (
        (["transforms=[smooth, rotate]"], "rotate changes the whole network and comes first"),
        (["transforms=[smooth, smooth]"], "smooth is there more than once"),
        (["type=f16", "transforms=[awq]"], "type f16 has no such groups"),
        (["type=tq1_0", "transforms=[smooth]", "smooth.alpha=search"], "type tq1_0 has no such"),
        (
            ["method=awq"],
            r"'gptq' or \[gptq, tune\], found \"awq\"; AWQ's scales are `transforms: \[awq\]`",
        ),
    ):
        with pytest.raises(RecipeError, match=why):
            recipes.load("q4_0", chosen)
    model = checkpoint(models, "llama").path
    smooth = recipes.load("q4_0", ["transforms=[smooth]", *sets])
    request = GgufRequest(str(model), model, smooth, tmp_path / "a", 1, imatrix=tmp_path / "x")
    with pytest.raises(UnsupportedError, match="which changes what matrices read"):
        run_gguf(request, QUIET)
    write(model, tmp_path / "plain.gguf", "f16")
    with pytest.raises(UnsupportedError, match="qtool convert FILE --to hf"):
        write(tmp_path / "plain.gguf", tmp_path / "b", "q4_0", "transforms=[smooth]", *sets)
    idle = recipes.load("q4_0", ["smooth.alpha=0.3", *sets])
    assert isinstance(idle, GgufRecipe)
    with closing(open_source(tmp_path / "plain.gguf")) as file:
        made = make_gguf_plan(idle, file)
    assert [one for one in made.warnings if "smooth" in one] == [
        "smooth.alpha has no effect without the transform smooth: add `transforms: [smooth]`"
    ]


def test_a_record_there_and_back() -> None:
    up, down = np.array([2, 4, 0.5], np.float32), np.array([0.5, 8], np.float32)
    record = record_of(
        [
            Factor("a", up, True),
            Factor("a", down, False),
            Factor("a", up, True),
            Factor("norm", 1 / up, False, True),
        ]
    )
    for by in (3.0, 2.0**61):
        with pytest.raises(UnsupportedError, match="powers of two up to"):
            record_of([Factor("a", np.array([1, by], np.float32), True)])
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert (record["a"].of(values, 0) == values * up * up * down[:, None]).all()
    assert (record["a"].of(values[1:], 1) == values[1:] * up * up * 8).all()
    gain = np.array([0.5, -0.25, 3], np.float32)
    assert (record["norm"].of(gain, 0) == (1 + gain) / up - 1).all()
    found = json.loads(json.dumps(to_json(record)))
    again = from_json(found)
    assert json.dumps(to_json(again)) == json.dumps(to_json(record))
    assert found["lengths"] == [3, 2, 3]  # of the norm, whose readers have others here
    check_fits(again, {"a": (2, 3), "norm": (3,)})
    for shapes in ({"a": (2, 3)}, {"a": (3, 3), "norm": (3,)}, {"a": (2, 2), "norm": (3,)}):
        with pytest.raises(ValueError, match="of"):
            check_fits(again, shapes)


@pytest.mark.parametrize(
    "wrong",
    [None, [], {}, {"exponents": "?"}, {"exponents": "AA=="}, {"lengths": [3]}, {"lengths": [-1]},
     {"tensors": []}, {"tensors": {"a": [0, 9, False]}}, {"tensors": {"a": [0, -1, False]}},
     {"tensors": {"a": [True, None, False]}}, {"tensors": {"a": [0, None]}},
     {"tensors": {"a": [0, None, 1]}}],
)  # fmt: skip
def test_records_that_are_none(wrong: object) -> None:
    good = to_json({"a": Scaled(np.array([1, 2], np.int8), None)})
    assert from_json(good)["a"].columns is not None
    found = good | wrong if isinstance(wrong, dict) and wrong else wrong
    with pytest.raises(ValueError, match=r"\w"):
        from_json(found)


def test_a_view_shows_vectors_exactly(models: Path) -> None:
    view = open_view(
        checkpoint(models, "gemma3", "bfloat16").path,
        recipes.load("q4_0", ["transforms=[smooth]"]),  # type: ignore[arg-type]
        None,
    )
    assert isinstance(view, Rotated)
    dtypes = {len(info.shape): info.dtype for info in view.tensors.values()}
    assert dtypes == {1: "F32", 2: "BF16"}
