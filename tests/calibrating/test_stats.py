"""Statistics against a plain float64 computation over recorded inputs; files; threads."""

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from qtool.calibrating import same_model
from qtool.calibrating.sites import Tracer
from qtool.calibrating.stats import NEEDS, SiteStats, collect, gram_of, strips
from qtool.calibrating.stats_file import StatsFile, StatsWriter
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import FormatError, SourceError, UnsupportedError
from qtool.streaming.skeleton import Skeleton
from qtool.streaming.workers import Workers
from support.calibrating.recorded_inputs import opened, recorded
from support.models.arch_models import build

KINDS = ["llama", "gpt_neox", "mixtral", "qwen3_moe"]


@pytest.mark.parametrize("name", KINDS)
def test_sums_are_those_of_the_inputs(name: str, tmp_path: Path) -> None:
    block, stream, found = opened(build(name, tmp_path))
    before = [hidden.clone() for hidden in stream.hidden]
    with Workers(2) as workers:
        stats = collect(block, stream, found.sites, NEEDS, workers)
    assert all(torch.equal(a, b) for a, b in zip(before, stream.hidden, strict=True))
    rows = recorded(block, stream)
    for site in found.sites:
        x = rows.get(site.matrix, torch.zeros(0, site.in_features))
        mine = stats[site.id]
        assert mine.count == len(x)
        if mine.count == 0:
            assert mine.gram is None
            continue
        gram = (x.T @ x).numpy()
        assert mine.gram is not None and mine.mean_abs is not None and mine.max_abs is not None
        assert np.abs(mine.gram - gram).max() <= 1e-6 * np.abs(gram).max()
        assert np.array_equal(mine.gram, mine.gram.T)
        assert np.allclose(mine.mean_abs, x.abs().mean(0).numpy(), rtol=1e-6)
        assert mine.square is not None
        assert np.allclose(mine.square, x.square().sum(0).numpy(), rtol=1e-6, atol=0)
        assert np.array_equal(mine.max_abs, x.abs().amax(0).to(torch.float32).numpy())
        # Micro-batches of two samples, the last of one: samples 0, 2 and 4 are the first half.
        if site.per_token == 1:
            first, second = x[: 6 * 40].reshape(3, 2, 40, -1).abs().amax((0, 2))
            second = torch.maximum(second, x[6 * 40 :].abs().amax(0))
            assert mine.halves is not None
            assert np.array_equal(mine.halves, torch.stack([first, second]).float().numpy())
    routed = sum(stats[s.id].count for s in found.sites if s.expert is not None and s.producer)
    if name in ("mixtral", "qwen3_moe"):
        assert routed == 2 * stream.tokens


@pytest.mark.parametrize("name", KINDS)
def test_threads_change_no_bit(name: str, tmp_path: Path) -> None:
    block, stream, found = opened(build(name, tmp_path))
    results = []
    for threads in (1, 2, 4):
        with Workers(threads) as workers:
            results.append(collect(block, stream, found.sites, NEEDS, workers))
    first = results[0]
    for other in results[1:]:
        for site, stats in first.items():
            assert other[site].count == stats.count
            for field in NEEDS:
                mine, its = getattr(stats, field), getattr(other[site], field)
                assert (mine is None and its is None) or mine.tobytes() == its.tobytes()


def test_some_sites_at_a_time_give_the_same(tmp_path: Path) -> None:
    block, stream, found = opened(build("llama", tmp_path))
    with Workers(2) as workers:
        whole = collect(block, stream, found.sites, NEEDS, workers)
        for site in found.sites:
            alone = collect(block, stream, [site], NEEDS, workers)
            assert list(alone) == [site.id]
            assert np.array_equal(alone[site.id].gram, whole[site.id].gram)


def test_the_pass_ends_at_the_last_site_that_is_wanted(tmp_path: Path) -> None:
    block, stream, found = opened(build("llama", tmp_path))
    ran: list[str] = []
    for name in ("o_proj", "down_proj"):
        module = dict(block.module.named_modules())
        path = next(path for path in module if path.endswith(name))
        module[path].register_forward_hook(lambda *_, name=name: ran.append(name))
    with Workers(1) as workers:
        collect(block, stream, found.sites, {"mean_abs"}, workers)
    assert set(ran) == {"o_proj"}


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_one_pass_measures_and_advances(name: str, tmp_path: Path) -> None:
    """The same statistics and the same outputs as by a pass for each."""
    skeleton = Skeleton.open(Checkpoint.open(build(name, tmp_path)))
    block, stream, found = opened(tmp_path)
    _, other, _ = opened(tmp_path)
    with Workers(2) as workers:
        apart = collect(block, stream, found.sites, {"square"}, workers)
        skeleton.advance(block, stream, workers)
        assert collect(block, other, [], {"square"}, workers, advance=True) == {}
        assert all(map(torch.equal, stream.hidden, other.hidden))
        _, other, _ = opened(tmp_path)
        together = collect(block, other, found.sites, {"square"}, workers, advance=True)
    assert all(map(torch.equal, stream.hidden, other.hidden))
    for site in found.sites:
        assert np.array_equal(apart[site.id].square, together[site.id].square)


def test_only_what_is_needed_is_measured(tmp_path: Path) -> None:
    block, stream, found = opened(build("llama", tmp_path))
    with Workers(1) as workers:
        stats = collect(block, stream, found.sites, {"mean_abs"}, workers)
        assert collect(block, stream, [], NEEDS, workers) == {}
    assert all(s.gram is None and s.max_abs is None for s in stats.values())
    assert all(s.mean_abs is not None for s in stats.values())


def test_a_failure_in_one_micro_batch_ends_all(tmp_path: Path) -> None:
    """And is the one reported, though others were waiting for their turn."""
    block, stream, found = opened(build("llama", tmp_path))
    hidden: Any = [*stream.hidden]
    hidden[1] = torch.zeros(2, 40, 3)
    stream.hidden = hidden
    with Workers(3) as workers, pytest.raises(RuntimeError, match="3"):
        collect(block, stream, found.sites, NEEDS, workers)


Mlp = Callable[[torch.Tensor], torch.Tensor]


def in_chunks(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    """Once on the probe, twice on a micro-batch."""
    return torch.cat([mlp(part) for part in x.flatten(0, 1).split(40)]).view(x.shape)


def in_halves(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([mlp(part) for part in x.split(20, dim=1)], dim=1)


def of_first_sample(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    """Of the probe that is all of it."""
    return torch.cat([mlp(x[:1]), x[1:]])


def of_some_tokens(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
    """As an expert that is a module of its own; in some micro-batches it is never called."""
    chosen = x[..., 0] > 0
    chosen &= bool(x.flatten()[-1] > 0) or x.shape[0] == 1
    out = x.clone()
    if chosen.any():
        out[chosen] = mlp(x[chosen])
    return out


def patched(folder: Path, way: Callable[[Mlp, torch.Tensor], torch.Tensor]) -> Any:
    """A block whose MLP is called in another way."""
    block, stream, _ = opened(folder)
    mlp: Any = block.module.get_submodule("mlp")
    plain = mlp.forward
    mlp.forward = lambda x: way(plain, x)
    return block, stream, Tracer().sites(block, stream)


@pytest.mark.parametrize("way", [in_chunks, in_halves, of_first_sample, of_some_tokens])
def test_linears_that_are_called_in_parts(
    way: Callable[[Mlp, torch.Tensor], torch.Tensor], tmp_path: Path
) -> None:
    """However often a pass calls a linear, nobody waits for ever and every row counts once."""
    block, stream, found = patched(build("llama", tmp_path), way)
    rows = recorded(block, stream)
    results = []
    for threads in (1, 3):
        with Workers(threads) as workers:
            results.append(collect(block, stream, found.sites, NEEDS, workers))
    assert len(found.sites) == 4 and found.unread == ()
    for site in found.sites:
        x, (one, three) = rows[site.matrix], (result[site.id] for result in results)
        assert one.count == three.count == len(x) > 0
        gram = (x.T @ x).numpy()
        assert np.abs(one.gram - gram).max() <= 1e-6 * np.abs(gram).max()
        assert one.gram.tobytes() == three.gram.tobytes()
    mlp = rows[next(site.matrix for site in found.sites if "gate_proj" in site.id)]
    partial = way in (of_first_sample, of_some_tokens)
    assert (len(mlp) < stream.tokens) == partial


def test_more_rows_than_the_probe_had_are_refused(tmp_path: Path) -> None:
    def twice(mlp: Mlp, x: torch.Tensor) -> torch.Tensor:
        return mlp(x) if x.shape[0] == 1 else mlp(torch.cat([x, -x]))[: x.shape[0]]

    block, stream, found = patched(build("llama", tmp_path), twice)
    with Workers(3) as workers, pytest.raises(UnsupportedError, match=r"gate_proj.* the 1 rows"):
        collect(block, stream, found.sites, NEEDS, workers)


@pytest.mark.parametrize("width", [1, 64, 128, 129, 576, 1536, 11008])
def test_strips_cover_the_columns_and_save_work(width: int) -> None:
    found = strips(width)
    assert found[0][0] == 0 and found[-1][1] == width
    assert all(a[1] == b[0] for a, b in pairwise(found))
    work = sum((stop - start) * (width - start) for start, stop in found)
    if width >= 1536:
        assert work < 0.6 * width * width


def test_a_gram_matrix_of_several_strips(tmp_path: Path) -> None:
    from qtool.calibrating.stats import _add, _Sum
    from qtool.streaming.turns import Turns

    total, turns = _Sum(300, NEEDS), Turns()
    x = torch.randn(50, 300, generator=torch.Generator().manual_seed(0))
    for number in range(2):
        _add(total, x[number * 25 : number * 25 + 25], 13, "s", number, turns, True)
    stats = total.result()
    exact = (x.double().T @ x.double()).numpy()
    assert stats.gram is not None
    assert np.abs(stats.gram - exact).max() <= 1e-6 * np.abs(exact).max()
    assert np.array_equal(stats.gram, stats.gram.T)


def test_rows_that_come_a_micro_batch_at_a_time() -> None:
    """As what a head reads does."""
    rows = list(torch.randn(7, 30, 200, generator=torch.Generator().manual_seed(1)))
    found = []
    for threads in (1, 3):
        with Workers(threads) as workers:
            found.append(gram_of(rows.__getitem__, len(rows), 200, workers))
    one, several = (stats.gram for stats in found)
    assert one is not None and several is not None and found[0].count == 210
    whole = torch.cat(rows).double()
    np.testing.assert_allclose(one, (whole.T @ whole).numpy(), rtol=0, atol=1e-3)
    np.testing.assert_array_equal(one, one.T)
    np.testing.assert_array_equal(one, several)
    with Workers(3) as workers, pytest.raises(IndexError):
        gram_of(rows.__getitem__, 9, 200, workers)


def test_files_give_back_what_was_saved(tmp_path: Path) -> None:
    block, stream, found = opened(build("mixtral", tmp_path))
    with Workers(1) as workers:
        stats = collect(block, stream, found.sites, NEEDS, workers)
    path = tmp_path / "stats.safetensors"
    never = SiteStats(0)
    kept = {**stats, found.sites[-1].id: never}
    with StatsWriter(path, {"model": "abc", "calibration": "def"}, len(found.sites)) as writer:
        for site in found.sites:
            writer.add(site, kept[site.id])
    assert [p.name for p in tmp_path.glob("stats*")] == ["stats.safetensors"]
    # Other people's reader takes it too.
    q = "model.layers.0.self_attn.q_proj.weight"
    assert np.array_equal(load_file(path)[f"site.{q}.gram"], stats[q].gram)
    file = StatsFile.open(path)
    assert file.metadata == {"model": "abc", "calibration": "def"}
    for site in found.sites:
        for name in site.names:
            again = file.read(name, NEEDS)
            assert again.count == kept[site.id].count
            for field in NEEDS:
                mine, its = getattr(kept[site.id], field), getattr(again, field)
                assert (mine is None and its is None) or np.array_equal(mine, its)


def test_a_missing_statistic_names_the_command(tmp_path: Path) -> None:
    block, stream, found = opened(build("llama", tmp_path))
    path = tmp_path / "stats.safetensors"
    with Workers(1) as workers, StatsWriter(path, {}, len(found.sites)) as writer:
        stats = collect(block, stream, found.sites, {"mean_abs"}, workers)
        for site in found.sites:
            writer.add(site, stats[site.id])
    file = StatsFile.open(path)
    name = "model.layers.0.self_attn.v_proj.weight"
    assert file.read(name, {"mean_abs"}).mean_abs is not None
    with pytest.raises(SourceError, match=r"no gram .*v_proj.*qtool calibrate"):
        file.read(name, {"gram"})
    with pytest.raises(SourceError, match="qtool calibrate"):
        file.read("model.layers.9.self_attn.v_proj.weight", {"mean_abs"})


def test_other_safetensors_files_are_no_statistics(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({"x": np.zeros(1, np.float32)}, path)
    with pytest.raises(FormatError, match="not a statistics file"):
        StatsFile.open(path)
    path.write_bytes(b"GGUF\3\0\0\0" + bytes(64))
    with pytest.raises(
        FormatError, match="a GGUF file; an importance matrix is given by --imatrix"
    ):
        StatsFile.open(path)


GATE = "model.layers.0.mlp.gate_proj.weight"


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("count", np.zeros(0, np.int64), r"count' is I64 \[0\], expected I64 \[1\]"),
        ("count", np.array([-1]), "count' is -1, a number of tokens"),
        ("count", np.ones(1, np.float32), "count' is F32"),
        ("gram", np.ones((8, 8), np.float32), r"gram' is F32 \[8, 8\], expected F32 \[64, 64\]"),
        ("gram", np.ones((64, 64), np.float16), "gram' is F16"),
        ("gram", np.full((64, 64), np.nan, np.float32), "gram' has values that are not finite"),
        ("mean_abs", np.ones((64, 1), np.float32), r"mean_abs' is F32 \[64, 1\]"),
        ("mean_abs", np.full(64, np.inf, np.float32), "mean_abs' has values that are not finite"),
    ],
)
def test_what_cannot_be_a_statistic_is_refused(
    field: str, value: np.ndarray[Any, Any], said: str, tmp_path: Path
) -> None:
    block, stream, found = opened(build("llama", tmp_path))
    path, bad = tmp_path / "stats.safetensors", tmp_path / "bad.safetensors"
    with Workers(1) as workers, StatsWriter(path, {}, len(found.sites)) as writer:
        stats = collect(block, stream, found.sites, NEEDS, workers)
        for site in found.sites:
            writer.add(site, stats[site.id])
    file = StatsFile.open(path)
    assert file.read(GATE, NEEDS, 64).gram is not None
    readers = json.dumps({site.id: list(site.names) for site in found.sites})
    save_file(load_file(path) | {f"site.{GATE}.{field}": value}, bad, {"qtool.statistics": readers})
    with pytest.raises(FormatError, match=said):
        StatsFile.open(bad).read(GATE, NEEDS, 64)


@pytest.mark.parametrize(
    ("calibration", "said"),
    [
        ("{", "calibration: not valid JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "source is null"),
        ('{"source": "file", "samples": "six"}', 'samples is "six"'),
    ],
)
def test_a_damaged_record_is_refused(calibration: str, said: str, tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(build("llama", tmp_path))
    path = tmp_path / "stats.safetensors"
    metadata = {"model_digest": checkpoint.digest(), "calibration": calibration}
    with StatsWriter(path, metadata, 0):
        pass
    with pytest.raises(FormatError, match=said):
        same_model.check_same_model(StatsFile.open(path), checkpoint)


def test_a_failure_leaves_no_file(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    with pytest.raises(RuntimeError), StatsWriter(path, {}, 1):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
