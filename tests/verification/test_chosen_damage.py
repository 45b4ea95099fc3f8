"""Damage that each check has to find, chosen one by one: alone, and beside the source."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qtool.formats.gguf_values import Kind, array, u32
from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from qtool.verification.run import verify_artifact
from support.gallery.gguf import edited as edited_gguf
from support.gallery.gguf import key
from support.gallery.raw import edited, settings
from support.verification import damaged_settings, random_damage
from support.verification.healthy_artifacts import Make, copy_of, make

__all__ = ["make"]


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
