"""gptq.guided: slopes by token against torch's autograd, weighted sums, and whole runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import arch_models
import gguf_from_hf
import numpy as np
import pytest
import quantizing
import torch
from gguf_runs import models, without_tokenizers, write
from numpy.typing import NDArray
from small_models import checkpoint
from test_fit_slopes import TOKENS, likeliest
from test_resume import Died, damage, dying
from test_stats import opened, recorded
from transformers import AutoModelForCausalLM

from qtool.calibrating import guidance
from qtool.calibrating.guidance import Guidance
from qtool.calibrating.sites import Tracer
from qtool.calibrating.skeleton import Skeleton
from qtool.calibrating.stats import collect
from qtool.calibrating.workers import Workers
from qtool.checkpoint import Checkpoint
from qtool.errors import QtoolError, UnsupportedError
from qtool.formats.gguf_file import GgufFile
from qtool.gguf import kept_importance
from qtool.methods import gptq
from qtool.recipe.recipe import load
from qtool.runs.progress import Progress
from qtool.runs.workspace import Workspace, workspace
from qtool.verification.run import verify_artifact

MADE_UP = "gptq.gptaq=0.5"

__all__ = ["likeliest", "models", "without_tokenizers"]


@pytest.fixture
def space(tmp_path: Path) -> Iterator[Workspace]:
    with workspace(tmp_path / "out", is_folder=False, nbytes=0, fresh=False) as found:
        yield found
        found.artifact.write_bytes(b"")


def guidance_of(
    skeleton: Skeleton, tokens: NDArray[np.int64], space: Workspace, power: float = 0.5
) -> Guidance:
    return Guidance.of(power, skeleton, tokens, 0, space, 2, Progress(quiet=True))


def by_hand(folder: Path) -> dict[str, NDArray[np.float64]]:
    """The mean square of each token's slopes, of every nn.Linear that each token meets once."""
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    model.requires_grad_(False)
    gave: dict[str, list[torch.Tensor]] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def keep(gradient: torch.Tensor) -> None:
            gave.setdefault(name, []).append(gradient.double().square().mean(-1).flatten())

        def made(_: Any, inputs: Any, output: torch.Tensor) -> None:
            if output.requires_grad:
                output.register_hook(keep)

        module.register_forward_hook(made)

    def enter(_: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
        return output.detach().requires_grad_().clone()

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            watch(f"{name}.weight", module)
        if isinstance(module, torch.nn.Embedding):
            module.register_forward_hook(enter)
    told = model(input_ids=torch.from_numpy(TOKENS), use_cache=False).logits.log_softmax(-1)
    told.max(-1).values.sum().backward()
    return {
        name: found[0].numpy()
        for name, found in gave.items()
        if len(found) == 1 and len(found[0]) == TOKENS.size
    }


@pytest.mark.usefixtures("likeliest")
@pytest.mark.parametrize(
    "name", ["llama", pytest.param("gpt_neox", marks=pytest.mark.slow), "phi3", "mixtral"]
)
def test_slopes_are_those_of_autograd(name: str, space: Workspace, tmp_path: Path) -> None:
    folder = quantizing.add_tokenizer(arch_models.build(name, tmp_path / "model", dtype="float32"))
    skeleton = Skeleton.open(Checkpoint.open(folder))
    found = guidance_of(skeleton, TOKENS, space)
    expected = by_hand(folder)
    checked = 0
    for index in range(skeleton.count):
        for parameter, squares in (found._read(index) or {}).items():
            if parameter == "mlp.gate.weight":  # a router that is no nn.Linear
                continue
            wanted = expected[f"{skeleton.prefix}{index}.{parameter}"]
            np.testing.assert_allclose(squares, wanted, rtol=2e-3, atol=2e-5 * wanted.max())
            checked += 1
    inside = [one for one in expected if one.startswith(skeleton.prefix)]
    assert checked == len(inside) >= 4 * skeleton.count


def test_weights_count_in_sums(tmp_path: Path) -> None:
    """Micro-batches of two samples, the last of one."""
    block, stream, found = opened(quantizing.build("llama", tmp_path))
    tokens = sum(states.shape[0] * states.shape[1] for states in stream.hidden)
    assert len({len(states) for states in stream.hidden}) == 2
    rng = np.random.default_rng(0)
    sizes = [states.shape[0] * states.shape[1] for states in stream.hidden]
    weights = {
        site.id: torch.from_numpy(rng.exponential(size=tokens).astype(np.float32)).split(sizes)
        for site in found.sites[1:]
    }
    with Workers(2) as workers:
        needs = {"gram", "square"}
        stats = collect(block, stream, found.sites, needs, workers, weights=weights)
    for site in found.sites:
        x = recorded(block, stream)[site.matrix]
        own = torch.cat([*weights[site.id]]) if site.id in weights else torch.ones(tokens)
        gram = ((x * own.double()[:, None]).T @ x).numpy()
        one = stats[site.id]
        assert one.gram is not None and one.square is not None and one.count == tokens
        assert np.abs(one.gram - gram).max() <= 1e-6 * np.abs(gram).max()
        np.testing.assert_allclose(one.square, np.diagonal(gram), rtol=1e-5)


@pytest.mark.parametrize("power", [0.5, 1.0])
def test_an_input_is_split_by_matrix(power: float, space: Workspace, tmp_path: Path) -> None:
    """Matrices that one tensor is made of keep one input; experts keep theirs."""
    skeleton = Skeleton.open(Checkpoint.open(quantizing.build("mixtral", tmp_path / "model")))
    found = guidance_of(skeleton, TOKENS, space, power)
    stream = skeleton.embed(TOKENS)
    sites = Tracer().sites(skeleton.block(0), stream)
    start = f"{skeleton.prefix}0.self_attn."
    q, k, v, o = (f"{start}{one}_proj.weight" for one in "qkvo")
    together = [(k, v), (o,)]
    guided = found.split(0, sites, sites.sites, together)
    known = found._read(0)
    assert known is not None
    of = {site.id: site for site in guided.sites}
    assert len(of) == len(guided.sites) and of[k].names == (k, v) and of[q].names == (q,)
    assert guided.parents[k] == guided.parents[q] == q
    squares = {name: known[name.removeprefix(f"{skeleton.prefix}0.")] for name in (q, k, v)}
    rows = {name: skeleton.checkpoint.tensors[name].shape[0] for name in (q, k, v)}
    both = rows[k] * squares[k].astype(float) + rows[v] * squares[v]
    for name, wanted in ((q, squares[q].astype(float)), (k, both)):
        wanted = wanted**power / (wanted**power).mean()
        np.testing.assert_allclose(torch.cat([*guided.weights[name]]), wanted, rtol=1e-5)
    experts = [site for site in guided.sites if site.per_token is None]
    assert experts and not any(site.id in guided.weights for site in experts)
    assert [s for s in sites.sites if s.per_token is None] == experts


# Whole runs.


def sets(text: Path, power: float = 0.5) -> list[str]:
    return [
        f"gptq.guided={power}", f"calibration.source={text}",
        "calibration.samples=12", "calibration.length=64",
    ]  # fmt: skip


def kept_guidance(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Weighted sums of every matrix of the first block, as runs have collected them."""
    seen: list[Any] = []
    split = Guidance.split

    def watched(self: Guidance, index: int, found: Any, *rest: Any) -> guidance.Guided:
        made = split(self, index, found, *rest)
        seen.append((index, made))
        return made

    monkeypatch.setattr(Guidance, "split", watched)
    return seen


def first_grams(
    model: Path, seen: list[Any], settings: list[str], recipe: str
) -> tuple[dict[str, NDArray[np.float32]], dict[str, NDArray[np.float32]]]:
    """Weights of the first block, and the weighted Gram matrix of the input of each."""
    from qtool.calibrating.calibration import calibration_tokens

    checkpoint = Checkpoint.open(model)
    settings_of = load(recipe, settings).calibration
    skeleton = Skeleton.open(checkpoint)
    stream = skeleton.embed(calibration_tokens(settings_of, model).tokens)
    block = skeleton.block(0)
    made = next(one for index, one in seen if index == 0)
    rows = recorded(block, stream)
    grams = {}
    for site in made.sites:
        x = rows[site.matrix]
        weighted = x * torch.cat([*made.weights[site.id]]).double()[:, None]
        for name in site.names:
            grams[name] = (weighted.T @ x).float().numpy()
    return {name: checkpoint.float32(name) for name in grams}, grams


def test_codes_are_those_of_the_weighted_sums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first block, whose inputs nothing has changed; but for last digits of sums."""
    model = quantizing.build("llama", tmp_path / "model")
    text = quantizing.text_file(tmp_path / "text.txt")
    seen = kept_guidance(monkeypatch)
    settings = ["weights.group_size=32", *sets(text)]
    made = quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *settings)
    weights, grams = first_grams(model, seen, settings, "w4g128-gptq")
    assert len(grams) == 7 and len(made.quants) > 7
    for name, gram in grams.items():
        options = gptq.Options()
        factor = gptq.factor(gram, options, 12 * 64)
        quant = gptq.quantize_with(weights[name], factor, made.quants[name].scheme, options)
        assert np.mean(quant.codes == made.quants[name].codes) > 0.999, name
    plain = quantizing.quantize(
        model, "w4g128-gptq", tmp_path / "plain", "weights.group_size=32", *sets(text, 0.0)
    )
    same = [np.mean(quant.codes == made.quants[n].codes) for n, quant in plain.quants.items()]
    assert max(same) < 0.999
    assert verify_artifact(made.out, against=model).ok


@pytest.mark.parametrize("name", ["llama", "phi3", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_gguf_is_swept_with_them(name: str, models: Path, tmp_path: Path) -> None:
    """q, k and v in one tensor keep one input; experts go without."""
    model = checkpoint(models, name, "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    found = []
    for power in (0.0, 0.5):
        out = tmp_path / f"{power}.gguf"
        write(model, out, "q4_0", "method=gptq", *sets(text, power))
        assert verify_artifact(out, against=model).ok
        with GgufFile.open(out) as file:
            names = [one for one in file.tensors if one.startswith("blk.0.") and "norm" not in one]
            found.append({one: gguf_from_hf.raw(file, one).tobytes() for one in names})
    differ = {one for one in names if found[0][one] != found[1][one]}
    dense = {one for one in names if "_exps" not in one and "_inp" not in one}
    assert dense <= differ


def test_slopes_of_a_source_that_is_changed_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    chosen = ["weights.group_size=32", *sets(quantizing.text_file(tmp_path / "text.txt"))]
    keep, (file,) = Guidance._keep, model.glob("*.safetensors")

    def changing(self: Guidance, *given: Any) -> None:
        content = file.read_bytes()
        file.write_bytes(content[:-4] + bytes(4))
        keep(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(Guidance, "_keep", changing)
        with pytest.raises(QtoolError, match="changed"):
            quantizing.quantize(model, "w4g128-gptq", tmp_path / "out", *chosen)
    journal = tmp_path / ".out.partial" / guidance.FOLDER / "journal"
    assert b"states before block" in journal.read_bytes()
    assert b"tokens of block" not in journal.read_bytes()


def test_importance_stays_of_plain_sums(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the first block, which both runs read alike."""
    model = checkpoint(models, "llama", "bfloat16").path
    text = quantizing.text_file(tmp_path / "text.txt")
    keep, kept = kept_importance.keep, list[dict[tuple[str, ...], Any]]()

    def watched(space: Any, index: int, block: Any, *rest: Any, **more: Any) -> None:
        if index == 0:
            kept.append({one.names: (one.count, one.square) for one in block})
        keep(space, index, block, *rest, **more)

    monkeypatch.setattr(kept_importance, "keep", watched)
    for power in (0.0, 0.5):
        write(model, tmp_path / f"{power}.gguf", "q4_0", "method=gptq", *sets(text, power))
    plain, guided = kept
    assert plain.keys() == guided.keys() and len(plain) >= 4
    for names, (count, square) in plain.items():
        assert guided[names][0] == count
        np.testing.assert_array_equal(guided[names][1], square)


@pytest.mark.parametrize(
    ("recipe", "more"),
    [
        pytest.param(
            "w4g128-awq-gptq", ["weights.group_size=32", "awq.grid=2"], marks=pytest.mark.slow
        ),
        ("w4g128-gptq", ["weights.group_size=32", MADE_UP]),
        pytest.param("q4_0", ["method=gptq"], marks=pytest.mark.slow),
        ("q4_0", ["method=gptq", MADE_UP]),
    ],
)
def test_killed_it_goes_on_to_the_same_bytes(
    recipe: str, more: list[str], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While slopes are measured, between blocks, and where what was kept of tokens is damaged."""
    gguf = recipe.startswith("q")
    model = checkpoint(models, "llama", "bfloat16").path
    chosen = [*more, *sets(quantizing.text_file(tmp_path / "text.txt"))]

    def made(name: str, threads: int) -> dict[str, bytes]:
        out = tmp_path / name
        if gguf:
            write(model, out, recipe, *chosen, threads=threads)
            return {"": out.read_bytes()}
        quantizing.quantize(model, recipe, out, *chosen, threads=threads)
        return quantizing.files(out)

    whole = made("whole", 1)
    for after, broken in ((3, False), (9, True), (15, False), (16, True)):
        name = f"killed-{after}"
        with monkeypatch.context() as patched, pytest.raises(Died):
            dying(after, patched)
            made(name, 3)
        kept = sorted((tmp_path / f".{name}.partial" / guidance.FOLDER).glob("tokens-*"))
        if broken:
            damage(kept[0], 100)
        assert made(name, 3) == whole


def test_statistics_of_a_file_do_not_serve(tmp_path: Path) -> None:
    model = quantizing.build("llama", tmp_path / "model")
    (tmp_path / "stats").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"holds no text, over which gptq\.guided"):
        quantizing.quantize(
            model, "w4g128-gptq", tmp_path / "out", "gptq.guided=0.5", stats=tmp_path / "stats"
        )
