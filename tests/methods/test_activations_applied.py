"""Where inputs are rounded: whole forward passes against hooks on every module of transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qtool.artifacts.artifact import Artifact
from qtool.float_codes import TABLES, encode
from qtool.formats.gguf_file import GgufFile
from qtool.gguf.open import open_source
from qtool.gguf.to_hf.weights import gguf_weights
from qtool.hub import tiny_folder
from qtool.messages.progress import Progress
from qtool.quality.engine_inputs import activations as of_weights
from qtool.quality.forward import forward
from qtool.quality.rounded_inputs import RoundedInputs
from qtool.quality.weights import open_weights
from qtool.quantizing import pipeline
from qtool.quantizing.gguf.quantize import run_gguf
from qtool.recipe.recipe import load
from qtool.runs.gguf_request import GgufRequest
from qtool.runs.request import Request
from qtool.streaming.skeleton import Skeleton
from support.gguf import gguf_from_hf
from support.models import arch_models
from support.runs import quantizing
from support.runs.quantizing import Call

Function = Callable[[np.ndarray], np.ndarray]


WINDOWS, LENGTH = 3, 48


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    quantizing.text_file(folder / "text.txt")
    for recipe in ("q4_k_m", "q4_0", "f16"):
        request = GgufRequest("tiny", tiny_folder(), load(recipe), folder / f"{recipe}.gguf", 1)
        run_gguf(request, Progress(quiet=True))
    return folder


_PLACES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def stored_types(file: Path) -> dict[str, str]:
    """Module -> block type."""
    with GgufFile.open(file) as opened:
        types = {name: info.type.name for name, info in opened.tensors.items()}
    head = types.get("output.weight", types["token_embd.weight"])
    found = {"lm_head": head}
    for name, type_ in types.items():
        _, _, rest = name.partition("blk.")
        layer, _, module = rest.partition(".")
        for theirs, ours in _PLACES.items():
            if module == f"{ours}.weight":
                found[f"model.layers.{layer}.{theirs}"] = type_
    return found


def hooked(
    folder: Path, functions: dict[str, Function], kept: Function, tokens: np.ndarray,
    state: dict[str, np.ndarray] | None = None,
) -> np.ndarray:  # fmt: skip
    """Logits of transformers, with hooks that round what modules and attention are given."""

    def attention(module: object, query: object, key: torch.Tensor, value: torch.Tensor,
                  *more: object, **options: object) -> object:  # fmt: skip
        key, value = (torch.from_numpy(kept(x.numpy())) for x in (key, value))
        return sdpa_attention_forward(module, query, key, value, *more, **options)

    AttentionInterface.register("kept", attention)
    AttentionMaskInterface.register("kept", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="kept"
    ).eval()
    if state is not None:
        weights = {name: torch.from_numpy(np.array(values)) for name, values in state.items()}
        missing, extra = model.load_state_dict(weights, strict=False)
        assert not extra and set(missing) <= {"lm_head.weight"}
    modules = dict(model.named_modules())
    for name, function in functions.items():
        modules[name].register_forward_pre_hook(
            lambda _, args, function=function: (torch.from_numpy(function(args[0].numpy())),)
        )
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(tokens)).logits.double().numpy()
    return found


def half(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float16).astype(np.float32)


def of_llama_cpp(type_: str) -> Function:
    """What it does with the input of such a matrix, in float32 as it does."""
    if type_ == "F16":
        return half
    size = 256 if type_.endswith("_K") else 32

    def rounded(x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(*x.shape[:-1], -1, size)
        most = np.abs(blocks).max(-1, keepdims=True)
        step = most / np.float32(127)
        codes = np.rint(blocks * (np.float32(127) / most))
        return (codes * (half(step) if size == 32 else step)).reshape(x.shape)

    return rounded


def text_windows(text: Path) -> np.ndarray:
    """Many short windows: a difference in the last bit may lead to another code, and that to other
    codes of all later tokens of its window."""
    ids = AutoTokenizer.from_pretrained(tiny_folder()).encode(text.read_text())
    return np.array(ids[: 16 * 6]).reshape(16, 6)


def logits_here(path: Path, protocol: str, tokens: np.ndarray) -> np.ndarray:
    with open_weights(path) as weights:
        rounded = of_weights(weights, protocol)
        run = forward(Skeleton.open(weights), rounded, tokens, 1, Progress(quiet=True), keep=False)
        with run.logits() as head:
            found: np.ndarray = head(run.hidden).double().numpy()
    return found


def check_logits(found: np.ndarray, expected: np.ndarray, exact: np.ndarray) -> None:
    """In most windows nothing differs, where rounding itself makes a difference in each."""
    ours, theirs = (np.abs(one - expected).max((1, 2)) for one in (found, exact))
    print(f"largest difference of a window {np.sort(ours)}, of rounding {theirs.min()}")
    assert (ours < 0.01 * theirs.min()).mean() > 0.6


@pytest.mark.parametrize("recipe", ["q4_k_m", pytest.param("q4_0", marks=pytest.mark.slow), "f16"])
def test_the_forward_pass_rounds_every_input(
    recipe: str, root: Path, call: Call, tmp_path: Path
) -> None:
    """--protocol llama.cpp on a GGUF file, against transformers with hooks on every module."""
    file, text = root / f"{recipe}.gguf", root / "text.txt"
    said = call("eval", file, "--text", text, "--windows", WINDOWS, "--length", LENGTH,
                "--protocol", "llama.cpp", "--json")  # fmt: skip
    assert said.status == 0, said.err
    protocol = json.loads(said.out)["protocol"]
    assert protocol["kv_cache"] == "f16"
    assert protocol["activations"] == ("f16" if recipe == "f16" else "q8")
    said = call("convert", file, "--to", "hf", "--dtype", "float32", "-o", tmp_path / "hf")
    assert said.status == 0, said.err
    tokens, types = text_windows(text), stored_types(file)
    assert len(types) == 1 + 7 * sum("q_proj" in name for name in types)
    functions = {name: of_llama_cpp(type_) for name, type_ in types.items()}
    expected = hooked(tmp_path / "hf", functions, half, tokens)
    exact = hooked(tmp_path / "hf", {}, half, tokens)
    check_logits(logits_here(file, "llama.cpp", tokens), expected, exact)


def per_token(x: np.ndarray, most: float) -> np.ndarray:
    scale: np.ndarray = np.abs(x).max(-1, keepdims=True) / np.float32(most)
    return scale


def int8_tokens(x: np.ndarray) -> np.ndarray:
    return np.rint(x / per_token(x, 127)) * per_token(x, 127)


def to_e4m3(x: np.ndarray) -> np.ndarray:
    clipped = np.clip(x, -448, 448).astype(np.float32)
    return TABLES["e4m3"][encode(clipped, "e4m3")]


def fp8_tokens(x: np.ndarray) -> np.ndarray:
    return to_e4m3(x / per_token(x, 448)) * per_token(x, 448)


def fp8_blocks(x: np.ndarray) -> np.ndarray:
    return fp8_tokens(x.reshape(*x.shape[:-1], -1, 128)).reshape(x.shape)


def quantized(recipe: str, folder: Path) -> Path:
    request = Request("tiny", tiny_folder(), load(recipe), folder, None, 1, 1 << 30)
    pipeline.run(request, Progress(quiet=True))
    return folder


def modules_of(path: Path) -> list[str]:
    found = [e.module for e in Artifact.open(path).entries.values() if e.scheme is not None]
    assert len(found) == 28
    return found


def same(x: np.ndarray) -> np.ndarray:
    return x


@pytest.mark.parametrize(
    ("recipe", "name", "function"),
    [
        ("w8a8-dynamic", "int8", int8_tokens),
        ("fp8-dynamic", "fp8", fp8_tokens),
        ("fp8-block", "fp8", fp8_blocks),
        pytest.param("fp8-block-hf", "fp8", fp8_blocks, marks=pytest.mark.slow),
    ],
)
def test_inputs_that_an_artifact_declares(
    recipe: str, name: str, function: Function, root: Path, call: Call, tmp_path: Path
) -> None:
    artifact, text = quantized(recipe, tmp_path / "artifact"), root / "text.txt"
    said = call("eval", artifact, "--text", text, "--windows", 2, "--length", 16, "--json")
    assert said.status == 0, said.err
    protocol = json.loads(said.out)["protocol"]
    assert protocol["activations"] == name and protocol["kv_cache"] == "float32"
    assert protocol["not_simulated"] == []
    tokens = text_windows(text)
    state = dict(Artifact.open(artifact).dequantized())
    functions = dict.fromkeys(modules_of(artifact), function)
    expected = hooked(tiny_folder(), functions, same, tokens, state)
    exact = hooked(tiny_folder(), {}, same, tokens, state)
    check_logits(logits_here(artifact, "plain", tokens), expected, exact)


def with_stored_scales(artifact: Path, key: float, value: float) -> dict[str, float]:
    """The artifact says that inputs, keys and values have stored scales; those of inputs."""
    state = load_file(artifact / "model.safetensors")
    modules = modules_of(artifact)
    scales = {module: 0.01 * (number + 1) for number, module in enumerate(modules)}
    for module, scale in scales.items():
        state[f"{module}.input_scale"] = torch.tensor([scale])
        if module.endswith("k_proj"):
            block = module.removesuffix(".k_proj")
            state |= {
                f"{block}.k_scale": torch.tensor(key),
                f"{block}.v_scale": torch.tensor(value),
            }
    save_file(state, artifact / "model.safetensors", {"format": "pt"})
    config = json.loads((artifact / "config.json").read_text())
    quantization = config["quantization_config"]
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    quantization["config_groups"]["group_0"]["input_activations"] = static
    quantization["kv_cache_scheme"] = static | {"symmetric": True}
    (artifact / "config.json").write_text(json.dumps(config))
    return scales


def test_stored_scales_and_the_cache(root: Path, call: Call, tmp_path: Path) -> None:
    artifact, text = quantized("fp8-dynamic", tmp_path / "artifact"), root / "text.txt"
    scales = with_stored_scales(artifact, 0.02, 0.02)
    common = ("eval", artifact, "--text", text, "--windows", 2, "--length", 16, "--json")
    protocol = json.loads(call(*common).out)["protocol"]
    assert protocol["activations"] == protocol["kv_cache"] == "fp8"
    tokens = text_windows(text)
    state = dict(Artifact.open(artifact).dequantized())
    weights = {name: values for name, values in state.items() if not name.endswith("_scale")}

    def with_scale(scale: float) -> Function:
        return lambda x: to_e4m3(x / np.float32(scale)) * np.float32(scale)

    functions = {module: with_scale(scale) for module, scale in scales.items()}
    expected = hooked(tiny_folder(), functions, with_scale(0.02), tokens, weights)
    no_cache = hooked(tiny_folder(), functions, same, tokens, weights)
    check_logits(logits_here(artifact, "plain", tokens), expected, no_cache)
    # A scale that is promised and not there: of keys engines take 1.0, and that is said.
    stored = load_file(artifact / "model.safetensors")
    assert protocol["not_simulated"] == []
    for name in ("0.self_attn.k_scale", "1.self_attn.k_scale", "1.self_attn.v_scale"):
        del stored[f"model.layers.{name}"]
    save_file(stored, artifact / "model.safetensors", {"format": "pt"})
    assert json.loads(call(*common).out)["protocol"]["not_simulated"] == [
        "the KV cache: no k_scale in block 0, 1: 1.0 taken, as engines do",
        "the KV cache: no v_scale in block 1: 1.0 taken, as engines do",
    ]
    missing = "model.layers.1.mlp.up_proj.input_scale"
    del stored[missing]
    save_file(stored, artifact / "model.safetensors", {"format": "pt"})
    said = call(*common)
    assert said.status == 1 and f"no {missing}" in said.err
    said = call(*common[:-1], "--against", "tiny")
    assert said.status == 1 and f"no {missing}" in said.err and "block" not in said.err


def test_what_is_not_simulated_is_said(root: Path, call: Call, tmp_path: Path) -> None:
    artifact = quantized("w8a8-dynamic", tmp_path / "artifact")
    config = json.loads((artifact / "config.json").read_text())
    quantization = config["quantization_config"]
    quantization["config_groups"]["group_0"]["input_activations"]["strategy"] = "channel"
    quantization["kv_cache_scheme"] = {"num_bits": 8, "type": "int", "dynamic": True}
    (artifact / "config.json").write_text(json.dumps(config))
    common = ("eval", artifact, "--text", root / "text.txt", "--windows", 2, "--length", 16)
    protocol = json.loads(call(*common, "--json").out)["protocol"]
    assert protocol["activations"] == protocol["kv_cache"] == "float32"
    expected = "dynamic 8-bit int per channel"
    kept = "the KV cache: dynamic 8-bit int per tensor"
    assert protocol["not_simulated"] == [expected, kept]
    assert f"not simulated: {expected}" in call(*common).out
    said = call("compare", *common[1:], "--against", "tiny")
    assert f"{artifact}: not simulated: {expected}" in said.out and "inputs" not in said.out


def test_compare_shows_what_is_rounded(root: Path, call: Call) -> None:
    files = [root / "q4_0.gguf", root / "f16.gguf"]
    said = call("compare", *files, "--against", "tiny", "--text", root / "text.txt", "--windows", 2,
                "--length", 16, "--protocol", "llama.cpp")  # fmt: skip
    rows = [line.split() for line in said.out.splitlines() if ".gguf" in line]
    assert {Path(row[0]).name: row[-1] for row in rows} == {"q4_0.gguf": "q8", "f16.gguf": "f16"}


@pytest.mark.parametrize(("name", "exact"), [("mixtral", {(4, 64)}), ("phi3", set())])
def test_experts_and_fused_matrices(
    name: str, exact: set[tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only routers, which a GGUF file keeps in float32, read inputs that are not rounded."""
    gguf_from_hf.no_vocabulary(monkeypatch)
    gguf_from_hf.write(arch_models.build(name, tmp_path / "m"), tmp_path / "m.gguf", "q8_0")
    seen: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}

    class Watched(RoundedInputs):
        def _rounded(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            seen[self._find(weight) is not None].add(tuple(weight.shape))
            return super()._rounded(x, weight)

    monkeypatch.setattr("qtool.quality.rounded_inputs.RoundedInputs", Watched)
    monkeypatch.setattr(
        "qtool.gguf.to_hf.weights.side_files",
        lambda _, model: {"config.json": json.dumps(model.config).encode()},
    )
    with gguf_weights(open_source(tmp_path / "m.gguf")) as (weights, _):
        rounded, tokens = of_weights(weights, "llama.cpp"), np.arange(32).reshape(2, 16)
        run = forward(Skeleton.open(weights), rounded, tokens, 1, Progress(quiet=True), keep=False)
        with run.logits() as head:
            head(run.hidden)
    assert seen[False] == exact and len(seen[True]) > 3
