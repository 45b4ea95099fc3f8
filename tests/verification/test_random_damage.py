"""Damage drawn at random: `qtool verify` finds what changes what an engine computes, by itself or
beside the source; a statement of digests finds everything; no command ends in a traceback."""

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.verify import lines
from qtool.formats.gguf_file import GgufFile
from qtool.formats.gguf_values import Kind, array, u32
from qtool.gguf.quantize import run_gguf
from qtool.gguf.request import GgufRequest
from qtool.gguf_types import FLOATS
from qtool.recipe.recipe import Recipe, load
from qtool.runs.progress import Progress
from qtool.verification.finding import Verdict
from qtool.verification.run import verify_artifact
from support.gallery.gguf import edited as edited_gguf
from support.gallery.gguf import key
from support.gallery.raw import edited, settings
from support.gguf import gguf_models
from support.runs import quantizing
from support.runs.quantizing import Called
from support.verification import damaged_settings, random_damage
from support.verification.random_damage import Damage
from support.verification.verifying import forget_digests

_FEW = ("calibration.samples=8", "calibration.length=64")
_GROUPS_OF_32 = "weights.group_size=32"
_FOUR_BITS = ("weights.bits=4", "weights.group_size=128")

# name: model, recipe, --set
ARTIFACTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "awq": ("tiny", "w4g128-rtn", ()),
    "awq-gemv": ("tiny", "w4g128-rtn", ("awq.layout=gemv",)),
    "awq-gemv-fast": ("tiny", "w4g128-rtn", ("awq.layout=gemv_fast",)),
    "llm-awq": ("tiny", "w4g128-rtn", ("awq.layout=llm_awq",)),
    "awq-searched": ("tiny", "w4g128-awq", _FEW),
    "gptq": ("tiny", "w4g128-rtn", ("format=gptq", "weights.symmetric=true")),
    "gptq-v2": ("tiny", "w4g64-rtn", ("format=gptq",)),
    "gptq-ordered": ("tiny", "w4g128-gptq", _FEW),
    "gptq-w3": ("tiny", "w3g128-rtn", ()),
    "ct": ("tiny", "w8a16-ct", _FOUR_BITS),
    "ct-asymmetric": ("tiny", "w8a16-ct", (*_FOUR_BITS, "weights.symmetric=false")),
    "int8": ("tiny", "w8a8-dynamic", ()),
    "int8-static": ("tiny", "w8a8-static", _FEW),
    "fp8": ("tiny", "fp8-dynamic", ()),
    "fp8-block": ("tiny", "fp8-block", ()),
    "fp8-block-hf": ("tiny", "fp8-block-hf", ()),
    "nvfp4": ("tiny", "nvfp4", ()),
    "mxfp4": ("tiny", "mxfp4", ()),
    "cache": ("tiny", "kv-fp8", _FEW),
    "bitsandbytes": ("tiny", "int8-llmint8", _FEW),
    "qserve": ("tiny", "w4a8kv4-qserve", (*_FEW, "method=rtn", "transforms=[]")),
    "experts": ("qwen3_moe", "w4g64-rtn", (_GROUPS_OF_32, "format=gptq")),
    "fused-experts": ("fused", "w8a16-ct", ("weights.bits=4", _GROUPS_OF_32)),
    "fused-qkv": ("phi3", "w4g64-rtn", (_GROUPS_OF_32, "format=gptq")),
    "tied-biases": ("qwen2", "w8a16-ct", ("weights.bits=4", _GROUPS_OF_32)),
    "untied": ("llama", "w4g64-rtn", (_GROUPS_OF_32,)),
    "biases": ("opt", "fp8-dynamic", ()),
}
TARGETS = ("awq", "gptq", "gptq-v2", "compressed-tensors", "gguf", "gguf-q8_0", "hf")
GGUF = ("q4_k_m", "q5_k_m", "q4_0", "q8_0", "iq3_xxs", "iq4_xs", "f16")
# Settings that change nothing, or of which verify only warns: they may be meant.
IDLE = (
    "use_cache", "initializer_range", "attention_dropout", "dropout", "dtype", "quantizer",
    "router_aux_loss_coef", "max_position_embeddings", "context_length", "vocab_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "layerdrop", "activation_dropout",
    # Of quantized heads and layers that are not there; how it was made; zeros that are stored.
    "lm_head", "ignore", "modules_to_not_convert", "llm_int8_skip_modules", "damp_percent",
    "static_groups", "quantization_status", "global_compression_ratio", "observer", "sym",
    "symmetric", "zero_point", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    "output_activations", "true_sequential", "output_router_logits",
)  # fmt: skip
# Numbers that were measured when the artifact was made: nothing else knows them.
MEASURED = ("k_scale", "v_scale", "input_scale", "input_zero_point")


@dataclass(frozen=True)
class Made:
    """A healthy artifact and its source."""

    path: Path
    source: Path


Make = Callable[[str], Made]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    root = tmp_path_factory.mktemp("healthy")
    made: dict[str, Made] = {}

    def model(name: str) -> Path:
        folder = root / "models" / name
        if folder.exists():
            return folder
        if name == "tiny":
            return quantizing.first_block_of_tiny(folder)
        folder.parent.mkdir(exist_ok=True)
        if name == "fused":
            apart = gguf_models.build("qwen3-moe", root / "models" / "apart")
            return quantizing.add_tokenizer(gguf_models.fuse_experts(apart, folder))
        return quantizing.build(name, folder)

    def get(name: str) -> Made:
        if name in made:
            return made[name]
        source, out = model("tiny" if name in GGUF else ARTIFACTS[name][0]), root / name
        if name in GGUF:
            out = out.with_suffix(".gguf")
            recipe = load(name)
            assert not isinstance(recipe, Recipe)
            run_gguf(GgufRequest("tiny", source, recipe, out, 1), Progress(quiet=True))
        else:
            _, recipe_name, sets = ARTIFACTS[name]
            quantizing.quantize(source, recipe_name, out, *sets)
            forget_digests(out)
        return made.setdefault(name, Made(out, source))

    return get


def copy_of(healthy: Path, folder: Path) -> Path:
    path = folder / healthy.name
    shutil.copytree(healthy, path) if healthy.is_dir() else shutil.copy(healthy, path)
    return path


def forgiven(damage: Damage, name: str, stored: set[str]) -> bool:
    """Whether nothing but a digest can tell, or no engine computes anything else.

    stored: the tensors whose numbers are the source's.
    """
    kind, named = damage.kind, damage.named
    if kind == "scaled" and name == "awq-searched":
        return True  # folds are known up to a factor
    if kind == "flipped_bit":  # one code among thousands; where nothing is rounded, any is told
        return named not in stored
    if named.rpartition(".")[2] in MEASURED:
        return True
    if kind in ("quantization_changed", "config_changed", "gguf_key"):
        key = named.rpartition(".")[2]
        derived = key == "strategy left out"  # told by group_size
        return derived or key.removesuffix(" left out") in IDLE or named.startswith("general.")
    # Engines ignore or refuse tensors that they have no place for, and a head that is tied.
    return kind in ("doubled", "gguf_doubled", "head_differs", "trailing", "flipped_header")


def copied(healthy: Made) -> set[str]:
    """The tensors of an artifact that are stored as the source's are."""
    if healthy.path.is_file():
        with GgufFile.open(healthy.path) as file:
            return {name for name, info in file.tensors.items() if info.type in FLOATS}
    artifact = Artifact.open(healthy.path)
    there = artifact.checkpoint.tensors
    known = Checkpoint.open(healthy.source).tensors
    return {
        e.stored[0] for e in artifact.entries.values()
        if e.scheme is None and e.name in known and there[e.stored[0]].dtype == known[e.name].dtype
    }  # fmt: skip


def looked_at(path: Path, source: Path) -> tuple[Verdict, Verdict]:
    """Alone, and beside the source; what is printed is at most a page."""
    found = verify_artifact(path, threads=1), verify_artifact(path, against=source, threads=1)
    for verdict in found:
        printed = lines(verdict)
        assert len(printed) <= 50 and max(map(len, printed)) < 1500, printed
    return found


def damage_one(seed: int, names: tuple[str, ...], make: Make, folder: Path) -> str:
    """One artifact damaged, looked at; by what it was found."""
    rng = random.Random(seed)
    name = rng.choice(names)
    healthy = make(name)
    path = copy_of(healthy.path, folder)
    damage = random_damage.draw(rng, path)
    alone, beside = looked_at(path, healthy.source)
    where = f"seed {seed}, {name}: {damage}"
    if not alone.ok:
        return "alone"
    if not beside.ok:
        return "against"
    assert forgiven(damage, name, copied(healthy)), where
    return "digest"


def setting(key: str, value: object) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with settings(path / "config.json") as config:
            config[key] = value

    return change


def numbers(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Path], None]:
    """A stored tensor of the first block with other numbers."""

    def damage(path: Path) -> None:
        with edited(path) as tensors:
            stored = next(n for n in tensors if n.endswith(name))
            tensors[stored] = tensors[stored].changed(change(tensors[stored].array.copy()))

    return damage


def lost(name: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        with edited(path) as tensors:
            del tensors[next(n for n in tensors if n.endswith(name))]

    return damage


def quantization(where: str, value: object) -> Callable[[Path], None]:
    """A key inside quantization_config; of the first group where it begins with `.`."""

    def change(path: Path) -> None:
        with settings(path / "config.json") as config:
            keys = where.removeprefix(".").split(".")
            table = config["quantization_config"]
            if where.startswith("."):
                table = table["config_groups"]["group_0"]
            for key in keys[:-1]:
                table = table[key]
            assert table[keys[-1]] != value
            table[keys[-1]] = value

    return change


def drawn(kind: Callable[[random.Random, Path], str | None]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        assert kind(random.Random(5), path) is not None

    return damage


def _one_bit(words: NDArray[Any]) -> NDArray[Any]:
    words.reshape(-1)[77] ^= 1
    return words


# What no header tells: artifact, damage, the check that finds it beside the source, its words.
BESIDE: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("awq", setting("rope_theta", 1e5), "settings", "rope_theta 100000.0, there"),
    ("awq", setting("rms_norm_eps", 1e-3), "settings", "rms_norm_eps 0.001, there 1e-05"),
    ("awq", setting("hidden_act", None), "settings", "hidden_act nothing"),
    ("awq", setting("rms_norm_eps", 10**400), "model-settings", "rms_norm_eps 1000"),
    ("awq", drawn(damaged_settings.tokens_exchanged), "vocabulary", "under other ids"),
    ("awq", numbers("q_proj.scales", lambda s: s * 2), "layer-error", "about 2.0 times as"),
    ("awq", numbers("down_proj.scales", lambda s: s * 2), "layer-error", "about 2.0 times as"),
    ("awq", numbers("q_proj.scales", lambda s: np.roll(s, 1, 1)), "layer-error", "unlike the s"),
    ("ct", numbers("up_proj.weight_packed", lambda w: np.concatenate([w[64:96], w[32:]])),
     "layer-error", "parts with nothing in common"),
    ("awq", numbers("embed_tokens.weight", _one_bit), "layer-error", "1 of 524,288"),
    ("awq", numbers("model.norm.weight", _one_bit), "layer-error", "1 of 256"),
    ("biases", numbers("v_proj.bias", lambda b: b[::-1]), "layer-error", "v_proj.bias"),
    ("experts", numbers("q_proj.g_idx", lambda g: g * 0), "g-idx", "does not give every group"),
    ("f16", drawn(damaged_settings.gguf_tokens), "vocabulary", "tokens are not the source's"),
    ("f16", key("tokenizer.ggml.merges", u32(3)), "vocabulary", "merges are not the source's"),
    ("q4_0", drawn(damaged_settings.gguf_page), "layer-error", "parts that are not the source's"),
    ("f16", drawn(random_damage.flipped_bit), "layer-error", "1 of "),
]  # fmt: skip


# What the artifact tells by itself: the check, and its words.
ALONE: list[tuple[str, Callable[[Path], None], str, str]] = [
    ("ct", quantization(".format", "int-quantized"), "stored-as", "that of the whole"),
    ("ct", quantization(".weights.type", "float"), "stored-as", "4-bit float cannot be stored"),
    ("ct", quantization(".weights.dynamic", True), "stored-as", "called dynamic"),
    ("ct", lost("q_proj.weight_shape"), "stored-as", "without weight_shape"),
    ("ct", quantization(".targets", ["Lineer"]), "stored-as", "targets are Lineer alone"),
    ("nvfp4", quantization(".weights.symmetric", False), "stored-as", "does not read"),
    ("fp8", quantization(".input_activations.type", "int"), "stored-as", "no kernel multiplies"),
    ("fp8", quantization(".input_activations.symmetric", False), "stored-as", "have no zeros"),
    ("fp8", quantization(".input_activations.strategy", "channel"), "stored-as", "each channel"),
    ("fp8-block", quantization(".input_activations.group_size", 64), "provenance", "64"),
    ("int8", quantization(".input_activations.symmetric", False), "provenance", "by the recipe"),
    ("q4_0", key("llama.attention.value_length", u32(32)), "keys", "attn_v has 128 rows"),
    ("int8-static", quantization(".input_activations.dynamic", True), "stored-as", "with dynamic"),
    ("cache", quantization("kv_cache_scheme.dynamic", True), "kv-scales", "says dynamic"),
    ("cache", quantization("kv_cache_scheme.type", "int"), "provenance", "by the recipe"),
    ("bitsandbytes", quantization("load_in_4bit", True), "stored-as", "are both true"),
    ("bitsandbytes", quantization("llm_int8_threshold", 0.0), "provenance", "threshold is 6.0"),
    ("qserve", quantization("activations.num_bits", 4), "provenance", "activations.num_bits is 8"),
    ("qserve", quantization("activations", "int8"), "provenance", "activations.num_bits is 8"),
]  # fmt: skip
# Other models than the shipped one, and calibration, take seconds.
_SLOW = ("biases", "experts", "int8-static", "cache", "bitsandbytes", "qserve")


def numbered(cases: list[tuple[str, Callable[[Path], None], str, str]]) -> list[Any]:
    """Their numbers, those of slow artifacts marked so."""
    marks = [[pytest.mark.slow] if case[0] in _SLOW else [] for case in cases]
    return [pytest.param(n, marks=mark) for n, mark in enumerate(marks)]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", numbered(ALONE))
def test_it_is_found_alone(number: int, make: Make, tmp_path: Path) -> None:
    name, damage, check, words = ALONE[number]
    path = copy_of(make(name).path, tmp_path)
    damage(path)
    alone = verify_artifact(path, threads=1)
    found = [f.message for f in alone.findings if f.check == check and f.severity == "error"]
    assert any(words in message for message in found), alone.findings


@pytest.mark.parametrize(("rows", "told"), [(3, False), (12, True)])
def test_single_parts_of_two_bits_may_be_far_off(
    rows: int, told: bool, make: Make, tmp_path: Path
) -> None:
    """As GPTQ leaves those of inputs that hardly count; a page of a file has more of them."""
    source, out, recipe = make("q4_0").source, tmp_path / "out.gguf", load("q2_k")
    assert not isinstance(recipe, Recipe)
    run_gguf(GgufRequest("tiny", source, recipe, out, 1), Progress(quiet=True))
    with edited_gguf(out) as (_, tensors):
        found = tensors["blk.0.ffn_up.weight"]
        data = found.data.copy()
        data[:rows] = data[64 : 64 + rows]
        found.data = data
    said = [f.message for f in verify_artifact(out, against=source, threads=1).findings]
    assert any("parts that are not the source's" in message for message in said) is told


def test_heads_of_each_layer_are_no_damage(make: Make, tmp_path: Path) -> None:
    """As files of models have them whose layers differ: what attn_v has is not known then."""
    path = copy_of(make("q4_0").path, tmp_path)
    key("llama.attention.head_count_kv", array(Kind.UINT32, [2, 2, 2, 2]))(path)
    found = [f.message for f in verify_artifact(path, threads=1).findings]
    assert not [message for message in found if "attn_v" in message]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("number", numbered(BESIDE))
def test_it_is_found_beside_the_source(number: int, make: Make, tmp_path: Path) -> None:
    name, damage, check, words = BESIDE[number]
    healthy = make(name)
    path = copy_of(healthy.path, tmp_path)
    damage(path)
    beside = verify_artifact(path, against=healthy.source, threads=1)
    found = [f.message for f in beside.findings if f.check == check and f.severity == "error"]
    assert any(words in message for message in found), beside.findings


@pytest.mark.filterwarnings("error")
def test_a_little_damage(make: Make, tmp_path: Path) -> None:
    found = set()
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found.add(damage_one(seed, ("awq", "q4_0"), make, folder))
    assert found >= {"alone", "against"}


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("chunk", range(8))
def test_much_damage(chunk: int, make: Make, tmp_path: Path) -> None:
    for seed in range(1000 + 100 * chunk, 1100 + 100 * chunk):
        folder = tmp_path / str(seed)
        folder.mkdir()
        damage_one(seed, (*ARTIFACTS, *GGUF), make, folder)
        shutil.rmtree(folder)


def sentence_or_nothing(called: Called) -> bool:
    """Whether a command did its work, or said in one sentence why not, and on a page at most."""
    lines_ = called.out.splitlines()
    assert "Traceback" not in called.err and len(lines_) <= 90, called
    assert max(map(len, lines_), default=0) < 2000, called
    if called.status:
        told_ = [line for line in called.err.splitlines() if line.startswith("error: ")]
        assert called.status in (1, 2) and len(told_) == 1, called
    return called.status == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("chunk", range(4))
def test_no_command_ends_in_a_traceback(
    chunk: int,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And what convert makes of a damaged artifact says no more than that it has its numbers."""
    call = quantizing.caller(monkeypatch, capfd)
    text = quantizing.text_file(tmp_path / "text.txt", 4000)
    for seed in range(5000 + 25 * chunk, 5025 + 25 * chunk):
        rng = random.Random(seed)
        healthy = make(rng.choice((*ARTIFACTS, *GGUF)))
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = copy_of(healthy.path, folder)
        random_damage.draw(rng, path)
        to = rng.choice(TARGETS)
        other = folder / ("other.gguf" if "gguf" in to else "other")
        sentence_or_nothing(call("inspect", path))
        sentence_or_nothing(call("diff", path, healthy.source))
        if sentence_or_nothing(call("convert", path, "--to", to, "-o", other)):
            assert call("diff", path, other).status == 0
        else:
            assert not other.exists()
        if rng.random() < 0.3:
            sentence_or_nothing(
                call("eval", path, "--against", healthy.source, "--text", text,
                     "--windows", 1, "--length", 32)
            )  # fmt: skip
        shutil.rmtree(folder)
