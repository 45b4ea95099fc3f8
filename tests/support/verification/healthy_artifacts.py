"""Small artifacts that nothing is wrong with, to be damaged."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from qtool.messages.progress import Progress
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import Recipe, load
from qtool.runs.gguf_request import GgufRequest
from support.gguf import gguf_models
from support.runs import quantizing
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
GGUF = ("q4_k_m", "q5_k_m", "q4_0", "q8_0", "iq3_xxs", "iq4_xs", "f16")


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
