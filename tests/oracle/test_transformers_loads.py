"""transformers loads artifacts of models that see, and of mixtures of experts: it finds every
tensor, and computes what it computes of the same model dequantized by `qtool convert --to hf`."""

from collections.abc import Callable
from pathlib import Path

import pytest

from qtool.api import convert, quantize
from support.gguf import gguf_models
from support.gguf.families import later
from support.models import gpt_oss
from support.models.unusual_decoders import SMALL, built
from support.runs import quantizing

pytestmark = pytest.mark.oracle

SEEING = (
    "llava", "pixtral", "idefics3", "smolvlm", "internvl", "lfm2-vl", "paddleocr-vl", "glm4v",
    "muse-glimmer", "kimi-k2.5", "minicpm-v-4.6",
)  # fmt: skip
# bitsandbytes has no place for experts.
PACKED = {"w8a16-ct": SEEING, "int8-llmint8": tuple(n for n in SEEING if n != "kimi-k2.5")}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_experts": 4, "head_dim": 16,
           "moe_intermediate_size": 32}  # fmt: skip
# Experts are dequantized into the dtype of their scales as they are loaded.
NEAR = {"w8a16-ct": 5e-3, "fp8-block-hf": 1e-3, "int8-llmint8": 0.5}


def asked(
    ask: Callable[..., object], quantize: Callable[..., Path], sources: dict[str, Path],
    recipe: str, dtype: str, out: Path,
) -> None:  # fmt: skip
    few = ("calibration.samples=2",) if recipe == "int8-llmint8" else ()
    packed = {name: quantize(path, recipe, *few) for name, path in sources.items()}
    plain = {name: out / name for name in packed}
    for name, path in packed.items():
        convert(path, to="hf", out=plain[name], dtype=dtype)
    answer = ask("transformers_loads.py", [[str(packed[n]), str(plain[n]), dtype] for n in packed])
    assert isinstance(answer, list)
    for name, (keys, distance) in zip(packed, answer, strict=True):
        assert not keys, (name, keys[:5])
        assert distance < NEAR[recipe], (name, distance)


@pytest.mark.parametrize("recipe", PACKED)
def test_models_that_see(
    recipe: str,
    request: pytest.FixtureRequest,
    quantize: Callable[..., Path],
    tmp_path: Path,
) -> None:
    sources = {}
    for name in PACKED[recipe]:
        sources[name] = gguf_models.build(name, tmp_path / f"{name}-source", dtype="bfloat16")
        quantizing.add_tokenizer(sources[name])
    ask = request.getfixturevalue("compressed_tensors" if recipe == "w8a16-ct" else "bitsandbytes")
    asked(ask, quantize, sources, recipe, "float32", tmp_path)


def test_formats_of_one_model(bitsandbytes: Callable[..., object], tmp_path: Path) -> None:
    """gpt-oss as qtool writes it, and DeepSeek V4 as it is released: the very same logits."""
    quantize(gpt_oss.plain(tmp_path / "model"), "mxfp4-gpt-oss", tmp_path / "gpt-oss")
    released = gguf_models.build("deepseek-v4", tmp_path / "deepseek-v4", dtype="bfloat16")
    later.as_released(released, tmp_path / "numbers")
    made = {"gpt-oss": tmp_path / "gpt-oss", "deepseek-v4": released}
    for name, path in made.items():
        convert(path, to="hf", out=tmp_path / f"{name}-hf")
    asked = [[str(path), str(tmp_path / f"{name}-hf"), "bfloat16"] for name, path in made.items()]
    assert bitsandbytes("transformers_loads.py", asked) == [[[], 0.0]] * 2


@pytest.mark.parametrize("recipe", ["w8a16-ct", "fp8-block-hf"])
def test_experts(
    recipe: str, request: pytest.FixtureRequest, quantize: Callable[..., Path], tmp_path: Path
) -> None:
    sources = {}
    for name in ("qwen3_moe", "mixtral"):
        model = built(name, tmp_path / f"{name}-source", **{**SMALL, **EXPERTS})
        model.bfloat16().save_pretrained(tmp_path / f"{name}-source")
        sources[name] = quantizing.add_tokenizer(tmp_path / f"{name}-source")
    environment = "compressed_tensors" if recipe == "w8a16-ct" else "bitsandbytes"  # accelerate
    dtype = "float32" if recipe == "w8a16-ct" else "bfloat16"
    asked(request.getfixturevalue(environment), quantize, sources, recipe, dtype, tmp_path)
