"""GPTAQ: the step of a matrix, what is measured for it, and whole runs."""

import argparse
import inspect
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import qtool
from qtool.blockwise.originals import Originals
from qtool.calibrating.pairs import collect_pair
from qtool.calibrating.placed import Passage, placed_block
from qtool.calibrating.sites import Site, Tracer
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import RecipeError, SourceError, UnsupportedError
from qtool.matrix.cells import cells
from qtool.methods import gptaq
from qtool.planning.plan import make_plan
from qtool.recipe.recipe import load
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.stream import LoadedBlock, Stream
from qtool.streaming.workers import Workers
from qtool.verification.run import verify_artifact
from support.runs import quantizing
from support.runs.killed_runs import Died, dying

Double = NDArray[np.float64]


def inputs(width: int, tokens: int, rng: np.random.Generator) -> tuple[Double, Double]:
    """Y of the original, X of the quantized model, [tokens, in]; one channel of X is silent."""
    original = rng.normal(size=(tokens, width)) @ rng.normal(size=(width, width))
    quantized = original + 0.3 * rng.normal(size=(tokens, width))
    quantized[:, 3] = 0
    return original, quantized


@pytest.mark.parametrize("rows", [5, 90])  # fewer and more than columns
def test_the_step_is_that_of_the_definition(rows: int) -> None:
    rng = np.random.default_rng(0)
    original, quantized = inputs(40, 200, rng)
    weight = rng.normal(size=(rows, 40))
    gram, cross = quantized.T @ quantized, (original - quantized).T @ quantized
    mean = np.diagonal(gram)[np.diagonal(gram) > 0].mean()
    damped = gram + 0.1 * mean * np.eye(40)
    wanted = weight + 0.5 * weight @ cross @ np.linalg.inv(damped)
    step = gptaq.step_of(
        torch.from_numpy(gram.astype(np.float32)),
        torch.from_numpy(cross.astype(np.float32)),
        rows,
    )
    assert len(step.factors) == (3 if rows < 40 else 1)
    found = gptaq.moved(weight.astype(np.float32), step, 0.5)
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3 * np.abs(wanted).max())
    assert np.array_equal(found[:, 3], weight.astype(np.float32)[:, 3])


def test_the_whole_way_is_least_squares() -> None:
    """Without damping W* gives the quantized input what the original input was given."""
    rng = np.random.default_rng(1)
    original, quantized = inputs(24, 400, rng)
    live = np.arange(24) != 3
    weight = rng.normal(size=(7, 24))
    target = original @ weight.T
    solved = np.linalg.lstsq(quantized[:, live], target, rcond=None)[0].T
    step = gptaq.step_of(
        torch.from_numpy((quantized.T @ quantized).astype(np.float32)),
        torch.from_numpy(((original - quantized).T @ quantized).astype(np.float32)),
        7,
    )
    parts = [gptaq.moved(weight.astype(np.float32), step, part) for part in (0.0, 0.5, 1.0)]
    lost = [float(np.square(quantized @ part.T.astype(float) - target).sum()) for part in parts]
    least = float(np.square(quantized[:, live] @ solved.T - target).sum())
    assert np.array_equal(parts[0], weight.astype(np.float32))
    assert lost[0] > lost[1] > lost[2] > least


def test_bits_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(2)
    gram, cross, weight = (rng.normal(size=(1100, 1100)).astype(np.float32) for _ in range(3))
    gram = gram @ gram.T
    found = []
    for threads in (1, 3):
        with Workers(threads) as workers:
            tensors = torch.from_numpy(gram.copy()), torch.from_numpy(cross.copy())
            step = gptaq.step_of(*tensors, 5000, workers.spread)
            found.append(gptaq.moved(weight, step, 0.5, workers.spread))
    assert np.array_equal(*found)


def test_what_is_no_gram_matrix_is_refused() -> None:
    with pytest.raises(SourceError, match="infinite or undefined"):
        gptaq.step_of(torch.full((8, 8), torch.nan), torch.zeros(8, 8), 1)


# What is measured.


def case(folder: Path) -> tuple[LoadedBlock, Stream, list[torch.Tensor], tuple[Site, ...]]:
    """The first block of `tiny`; states of a quantized model, of its original, and its sites."""
    skeleton = Skeleton.open(Checkpoint.open(quantizing.first_block_of_tiny(folder)))
    tokens = np.random.default_rng(0).integers(0, 500, size=(6, 32))
    stream = skeleton.embed(tokens, micro_batch_tokens=64)
    originals = [states.clone() for states in stream.hidden]
    for states in stream.hidden:
        states += 0.1 * states.std() * torch.randn(states.shape)
    block = skeleton.block(0)
    return block, stream, originals, Tracer().sites(block, stream).sites


@pytest.mark.parametrize(("threads", "counted"), [(1, False), (3, False), (3, True)])
def test_a_pair_is_that_of_two_passes(threads: int, counted: bool, tmp_path: Path) -> None:
    """Of an input behind a matrix that has been moved already, which the original has as it was."""
    block, stream, originals, sites = case(tmp_path / "model")
    before = placed_block(block, torch.device("cpu"))
    block.weights["model.layers.0.self_attn.v_proj.weight"].mul_(1.1)
    (site,) = [site for site in sites if site.id.endswith("o_proj.weight")]
    seen = []
    for one, states in ((block, stream.hidden), (before, originals)):
        rows: list[torch.Tensor] = []
        module = one.module.get_submodule(site.matrix.parameter.removesuffix(".weight"))
        hook = module.register_forward_pre_hook(lambda _, x, rows=rows: rows.append(x[0]))
        for hidden, call in zip(states, stream.calls[0], strict=True):
            one.passed(hidden, call)
        hook.remove()
        seen.append(torch.cat(rows).flatten(0, -2).double())
    x, y = seen
    with Workers(threads) as workers:
        other = replace(stream, hidden=originals)
        counts = torch.rand(len(x)) if counted else torch.ones(len(x))
        parts = torch.split(counts, 64) if counted else None
        pair = collect_pair(block, stream, before, other, site, workers, parts)
    root = counts.double().sqrt()[:, None]
    x, y = x * root, y * root
    torch.testing.assert_close(pair.gram.double(), x.T @ x, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(pair.cross.double(), (y - x).T @ x, rtol=1e-4, atol=1e-3)
    assert torch.equal(pair.gram, pair.gram.T)


def test_a_site_on_any_number_of_threads(tmp_path: Path) -> None:
    """The named matrices that read it alone are moved, to the same bits."""
    found = []
    for threads in (1, 3):
        block, stream, originals, sites = case(tmp_path / "model")
        torch.manual_seed(0)
        for states, original in zip(stream.hidden, originals, strict=True):
            states.copy_(original + 0.1 * original.std() * torch.randn(original.shape))
        before = placed_block(block, torch.device("cpu"))
        (site,) = [site for site in sites if site.id.endswith("gate_proj.weight")]
        with Workers(threads) as workers:
            skeleton = Skeleton.open(Checkpoint.open(tmp_path / "model"))
            (folder := tmp_path / str(threads)).mkdir()
            both = Originals.of(skeleton, Passage.of(stream, workers, None), folder)
            both = replace(both, original=replace(
                both.original, stream=replace(stream, hidden=originals)))  # fmt: skip
            made = both.compensate(block, before, site, {site.id}, 0.5)
        moved = {n for n, w in block.weights.items() if not torch.equal(w, before_of(before, n))}
        assert moved == {site.id}
        assert made.count == 6 * 32
        found.append((torch.from_numpy(made.gram), block.weights[site.id].clone()))
    assert all(map(torch.equal, *found))


def before_of(block: LoadedBlock, name: str) -> torch.Tensor:
    return block.module.get_parameter(name.removeprefix(block.prefix)).detach()


# Recipes and whole runs.


def sets(text: Path, part: float = 0.5) -> list[str]:
    return [
        f"gptq.gptaq={part}", f"calibration.source={text}",
        "calibration.samples=12", "calibration.length=64",
    ]  # fmt: skip


def test_the_first_input_is_plain_gptqs(tmp_path: Path) -> None:
    """Nothing is lost before it, but the last digits of its sums; what comes after makes up."""
    model = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    plain, other = (
        quantizing.quantize(
            model, "w4g128-awq-gptq", tmp_path / str(part), "weights.group_size=32",
            *sets(text, part),
        )
        for part in (0.0, 0.5)
    )  # fmt: skip
    for name, quant in plain.quants.items():
        same = np.mean(quant.codes == other.quants[name].codes)
        first = ".layers.0.self_attn." in name and "o_proj" not in name
        assert same > 0.999 if first else same < 0.999, name
    assert verify_artifact(other.out, against=model).ok


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["w3g128-gptq", "q2_k"])
def test_what_is_compensated_for_is_nearer(recipe: str, tmp_path: Path) -> None:
    """On text that took no part divergence from the original falls."""
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 3)
    text = tmp_path / "text.txt"
    text.write_text(inspect.getsource(argparse), encoding="utf-8")
    found = []
    for part in (0.0, 0.5):
        out = tmp_path / f"{part}{'.gguf' if recipe.startswith('q') else ''}"
        chosen = ["method=gptq", f"gptq.gptaq={part}", "calibration.samples=12",
                  "calibration.length=256"]  # fmt: skip
        qtool.quantize(model, recipe, out, changes=chosen, threads=2)
        measured = qtool.evaluate(out, text, against=model, windows=4, length=256, threads=2)
        found.append(measured.found["kld"]["mean"])
    assert found[1] < 0.98 * found[0]


def test_routed_experts_go_without(tmp_path: Path) -> None:
    """Either model chooses its own rows; attention makes up all the same."""
    model = quantizing.build("qwen3_moe", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    made = quantizing.quantize(
        model, "w4g128-gptq", tmp_path / "out", "weights.group_size=32", *sets(text)
    )
    assert verify_artifact(made.out, against=model).ok


def test_statistics_of_a_file_do_not_serve(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    (tmp_path / "stats").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"holds no text, which recipe .* compensate for"):
        quantizing.quantize(
            model, "w4g128-gptq", tmp_path / "out", "gptq.gptaq=0.5", stats=tmp_path / "stats"
        )


@pytest.mark.parametrize(
    ("key", "read", "measures"),
    [("gptaq", "compensates", "itself"), ("guided", "guides", "shared")],
)
def test_recipes(key: str, read: str, measures: str, tmp_path: Path) -> None:
    """The keys that say what GPTQ goes by."""
    assert getattr(load("w4g128-gptq", [f"gptq.{key}=0.25"]), read) == 0.25
    for name in ("w4g128-rtn", "w4g128-awq", "fp8-dynamic", "mxfp4", "kv-fp8"):
        assert load(name, [f"gptq.{key}=0.5"]).idle_options == [f"gptq.{key}"]
    assert key not in str(load("q3_k_m", ["method=gptq"]).effective())
    with pytest.raises(RecipeError, match=rf"gptq\.{key}: .*less than or equal to 1|at most 1"):
        load("w4g128-gptq", [f"gptq.{key}=1.5"])
    own = tmp_path / "own.yaml"
    own.write_text(
        "method: gptq\nformat: gptq\nweights: {bits: 4, group_size: 128, symmetric: true}\n"
        f"gptq: {{{key}: 0.5}}\n"
    )
    found = cells(["w4g128-gptq", str(own)], tmp_path, [], share=True, error_aware=False)
    assert [cell.calibrated for cell in found] == ["shared", measures]


def test_the_plan_knows_what_it_takes(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(quantizing.build("llama", tmp_path / "model"))
    many = ["weights.group_size=32", "calibration.samples=8192"]
    plain = make_plan(load("w4g128-gptq", many), checkpoint, threads=2)
    other = make_plan(load("w4g128-gptq", [*many, "gptq.gptaq=0.5"]), checkpoint, threads=2)
    assert other.disk_bytes == 2 * plain.disk_bytes > 0
    assert other.peak_rss_bytes > plain.peak_rss_bytes
    assert 2 * plain.seconds < other.seconds < 4 * plain.seconds  # 2.7 times on `tiny`, measured
    assert other.layout == plain.layout


@pytest.mark.slow
@pytest.mark.parametrize("tunes", [False, True])
def test_killed_it_goes_on_to_the_same_bytes(
    tunes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After any block, on another number of threads; with tune, which wants the same originals."""
    model = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    chosen = ["weights.group_size=32", *sets(text)]
    chosen += ["method=[awq, gptq, tune]", "tune.steps=2"] if tunes else []

    def made(name: str, threads: int) -> dict[str, bytes]:
        out = tmp_path / name
        quantizing.quantize(model, "w4g128-awq-gptq", out, *chosen, threads=threads)
        return quantizing.files(out)

    whole = made("whole", 1)
    for after in (1, 2):
        with monkeypatch.context() as patched, pytest.raises(Died):
            dying(after, patched)
            made(f"killed-{after}", 3)
        assert made(f"killed-{after}", 3) == whole


@pytest.mark.slow
def test_a_gguf_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 2)
    text = quantizing.text_file(tmp_path / "text.txt")
    chosen = ["method=gptq", *sets(text)]

    def made(name: str, threads: int) -> bytes:
        qtool.quantize(model, "q4_0", tmp_path / name, changes=chosen, threads=threads)
        return (tmp_path / name).read_bytes()

    whole = made("whole.gguf", 1)
    with monkeypatch.context() as patched, pytest.raises(Died):
        dying(1, patched)
        made("killed.gguf", 2)
    assert made("killed.gguf", 2) == whole


@pytest.mark.parametrize(
    ("block", "chosen"),
    [
        (0, "dense: true"),
        pytest.param(1, "weights: {bits: 8}", marks=pytest.mark.slow),
        pytest.param(1, "dense: true", marks=pytest.mark.slow),
        pytest.param(0, "weights: {bits: 8}", marks=pytest.mark.slow),
    ],
)
def test_blocks_of_their_own_bits(block: int, chosen: str, tmp_path: Path) -> None:
    """One without a matrix to quantize passes the original's states on, too; one of many bits is
    farther from the source than these explain, which is a note."""
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 2)
    text = quantizing.text_file(tmp_path / "text.txt")
    changes = [*sets(text), f'overrides=[{{match: "model.layers.{block}.*", {chosen}}}]']
    losses = []
    for part in (0.0, 0.5):
        out = tmp_path / str(part)
        more = [*changes, f"gptq.gptaq={part}"]
        qtool.quantize(model, "w3g128-gptq", out, changes=more, threads=2)
        measured = qtool.evaluate(out, text, against=model, windows=4, length=64, threads=2)
        losses.append(measured.found["kld"]["mean"])
        verdict = verify_artifact(out, against=model)
        assert verdict.ok, verdict.findings
    assert losses[1] < 1.5 * losses[0]


def test_a_gguf_of_mixed_bits_is_verified(tmp_path: Path) -> None:
    model = quantizing.first_blocks_of_tiny(tmp_path / "model", 2)
    text = quantizing.text_file(tmp_path / "text.txt")
    changes = ["method=gptq", *sets(text), "overrides=[{match: 'blk\\.1\\.', type: q8_0}]"]
    qtool.quantize(model, "q2_k", tmp_path / "out.gguf", changes=changes, threads=2)
    verdict = verify_artifact(tmp_path / "out.gguf", against=model)
    assert verdict.ok, verdict.findings
    assert any("compensate for" in finding.message for finding in verdict.findings)
