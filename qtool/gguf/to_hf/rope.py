"""Rope settings of config.json told by the keys and tensors of a GGUF file."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.errors import FormatError, UnsupportedError
from qtool.formats.gguf_values import Value
from qtool.gguf.architectures import Architecture
from qtool.gguf.from_hf.rope_tensors import llama3_divisors
from qtool.gguf.source import GgufSource
from qtool.gguf.to_hf.keys import WHOLE, plain

_MOST_SLOWED = 1e9  # times, by a rotation's divisor
_BY_KIND = ("olmo2", "mellum", "mimo2", "laguna")  # that are told of each kind of block
_LLAMA3_LENGTHS = tuple(1 << k for k in range(5, 20))


def put_rope(
    row: Architecture,
    config: dict[str, Any],
    given: Mapping[str, Value],
    vectors: Mapping[str, NDArray[np.float32]],
    source: GgufSource,
) -> None:
    """rope_theta and rope_scaling, spelled so that every transformers since 4.43 reads them."""
    theta = float(plain(given["rope.freq_base"])) if "rope.freq_base" in given else 10000.0
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    scaling: dict[str, Any] = {}
    kind = given.get("rope.scaling.type")
    rotated = given.get("rope.dimension_count")
    share = "rotary_pct" if row.name == "gptneox" else "partial_rotary_factor"
    setting = {key.name: key.setting for key in row.keys}.get("rope.dimension_count")
    if rotated is not None and setting == "qk_rope_head_dim":
        width = rotated.value  # what is rotated is a head of its own
    elif rotated is not None and setting == "head_dim":
        if rotated.value != width:
            config["head_dim"] = width = rotated.value
    elif rotated is not None:
        if not 0 < rotated.value <= width or rotated.value % 2:
            raise FormatError(
                f"{source.path}: {row.name}.rope.dimension_count is {rotated.value}, expected an "
                f"even number of the {width} elements of a head"
            )
        config[share] = rotated.value / width
    if row.name in ("hunyuan-dense", "hunyuan-moe") and kind is not None and kind.value == "none":
        theta, scaling = _alpha(theta, width)
    if row.name == "hunyuan_vl" and "rope.scaling.alpha" in given:
        factor, alpha = (plain(given[f"rope.scaling.{name}"]) for name in ("factor", "alpha"))
        scaling = {"rope_type": "dynamic", "factor": float(factor), "alpha": float(alpha)}
        kind = None
    config["rotary_emb_base" if row.name == "gptneox" else "rope_theta"] = theta
    _check(vectors, source)
    if not 0 < theta < math.inf:
        raise FormatError(f"{source.path}: {row.name}.rope.freq_base is {theta}")
    if "rope_freqs.weight" in vectors:
        scaling = _llama3(vectors["rope_freqs.weight"], theta, width, source)
    elif "rope_factors_long.weight" in vectors:
        scaling = {"rope_type": "longrope"}
        for name in ("long", "short"):
            factors = vectors[f"rope_factors_{name}.weight"]
            scaling[f"{name}_factor"] = [float(str(value)) for value in factors]
        if row.name == "minicpm3":
            scaling["original_max_position_embeddings"] = config["max_position_embeddings"]
    elif kind is not None and kind.value != "none":
        scaling = _named(row, kind.value, given, latent=setting == "qk_rope_head_dim")
    elif "rope_parameters" in row.defaults:
        scaling = {"rope_type": "default"}  # which the class does not take for granted
    sections = given.get("rope.dimension_sections")
    if sections is not None:
        if sections.element not in WHOLE:
            raise FormatError("metadata: rope.dimension_sections is not a list of integers")
        own: dict[str, Any] = {"mrope_section": [int(one) for one in sections.value[:3]]}
        if not row.name.startswith("glm4"):
            own["mrope_interleaved"] = True
        scaling = {"rope_type": "default", **scaling, **own}
    if row.name == "phi3":
        original = given.get("rope.scaling.original_context_length")
        if original is not None:
            config["original_max_position_embeddings"] = original.value
    if "rope.freq_base_swa" in given and row.name in _BY_KIND:
        local = float(plain(given["rope.freq_base_swa"]))
        whole, in_window = _shares(row, given, width)
        config["rope_parameters"] = {
            "full_attention": {"rope_type": "default", "rope_theta": theta, **whole, **scaling},
            "sliding_attention": {"rope_type": "default", "rope_theta": local, **in_window},
        }
    elif scaling and row.name == "mistral4":  # whose class does not know the older name
        config["rope_parameters"] = {"rope_theta": theta, **scaling}
    elif scaling:
        config["rope_scaling"] = scaling


def _check(vectors: Mapping[str, NDArray[np.float32]], source: GgufSource) -> None:
    if {*vectors} not in _ROPE_TENSORS:
        raise FormatError(
            f"{source.path}: has {', '.join(vectors)}; expected rope_freqs.weight by itself, or "
            "rope_factors_long.weight and rope_factors_short.weight"
        )
    for name, divisors in vectors.items():
        if not ((divisors > 0) & (divisors < _MOST_SLOWED)).all():
            raise FormatError(
                f"{source.path}: {name} holds {divisors.min()} to {divisors.max()}, expected "
                f"numbers above 0 and below {_MOST_SLOWED:.0e}"
            )


def _named(
    row: Architecture, kind: str, given: Mapping[str, Value], *, latent: bool
) -> dict[str, Any]:
    """The scaling that a file's keys name. latent: what is rotated is a head of its own."""
    scaling: dict[str, Any] = {"rope_type": kind}
    for key, name in _SCALING_KEYS.items():
        if f"rope.scaling.{key}" in given:
            value = plain(given[f"rope.scaling.{key}"])
            scaling[name] = value if name == "original_max_position_embeddings" else float(value)
    if row.name == "gpt-oss":  # as all of them have it; llama.cpp goes otherwise in any case
        scaling["truncate"] = False
    if "mscale_all_dim" in scaling and latent:
        # A tenth of it, in float32.
        scaling["mscale_all_dim"] = round(10 * scaling["mscale_all_dim"], 6)
        scaling["mscale"] = scaling["mscale_all_dim"]
    elif "mscale_all_dim" in scaling:
        scaling["mscale"] = 1.0
    if "attention.temperature_scale" in given:
        scaling["llama_4_scaling_beta"] = float(plain(given["attention.temperature_scale"]))
    return scaling


def _shares(
    row: Architecture, given: Mapping[str, Value], width: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Of a head that is rotated, in blocks without a window and in those with one."""
    full = given.get("rope.dimension_count")
    if full is None or row.name not in ("mimo2", "laguna"):
        return {}, {}
    local = given.get("rope.dimension_count_swa", full)
    name = "partial_rotary_factor"
    return {name: full.value / width}, {name: local.value / width}


def _alpha(theta: float, width: int) -> tuple[float, dict[str, Any]]:
    """Hunyuan's base and scaling, of which a file has what the two come to.

    The roundest alpha that comes to the same.
    """
    base = 10000.0
    found = (theta / base) ** ((width - 2) / width)
    for alpha in (*(round(found, digits) for digits in range(7)), found):
        if np.float32(base * alpha ** (width / (width - 2))) == np.float32(theta):
            return base, {"rope_type": "dynamic", "factor": 1.0, "alpha": alpha}
    return theta, {}


_ROPE_TENSORS: tuple[set[str], ...] = (
    set(), {"rope_freqs.weight"}, {"rope_factors_long.weight", "rope_factors_short.weight"},
)  # fmt: skip
_SCALING_KEYS = {
    "factor": "factor", "original_context_length": "original_max_position_embeddings",
    "yarn_ext_factor": "extrapolation_factor", "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow",
    "yarn_log_multiplier": "mscale_all_dim",
}  # fmt: skip


def _llama3(
    divisors: NDArray[np.float32], theta: float, rotated: int, source: GgufSource
) -> dict[str, Any]:
    """The settings of Llama 3 that give these divisors; they are looked for among powers of two."""
    if len(divisors) != rotated // 2:
        raise FormatError(
            f"{source.path}: rope_freqs.weight holds {len(divisors)} numbers, and heads are "
            f"{rotated} wide; expected half as many"
        )
    for length in _LLAMA3_LENGTHS:
        for low in (1.0, 2.0):
            for high in (4.0, 2.0, 8.0, 1.0):
                rope = {
                    "rope_type": "llama3",
                    "factor": float(divisors.max()),
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
                if low > high:
                    continue
                with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                    made = llama3_divisors({**rope, "rope_theta": theta}, rotated)
                if np.array_equal(made, divisors):
                    return rope
    raise UnsupportedError(
        f"{source.path}: rope_freqs.weight holds no divisors that the llama3 rope settings of "
        "config.json give, so that a checkpoint cannot be told of them"
    )
