"""Inputs that engines round: the arithmetic against its definition, and where it is applied."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import quantizing
import torch
from quantizing import Call
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from qtool.formats.gguf_file import GgufFile
from qtool.gguf.quantize import GgufRequest, run_gguf
from qtool.gguf_types import TENSOR_TYPES
from qtool.hub import tiny_folder
from qtool.progress import Progress
from qtool.quality import activations
from qtool.quality.forward import forward
from qtool.quality.rounded_inputs import RoundedInputs, of_block_type
from qtool.quality.rounded_inputs import activations as of_weights
from qtool.quality.weights import open_weights
from qtool.recipe import load

WINDOWS, LENGTH = 3, 48
Function = Callable[[np.ndarray], np.ndarray]


def inputs(seed: int = 0) -> np.ndarray:
    """Rows of very different sizes, zeros among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((7, 512)) * np.exp2(rng.integers(-12, 9, (7, 1)))
    x[2, :256] = 0
    x[3] = 0
    x[4, 100] = 1e4
    return x.astype(np.float32)


def by_blocks(x: np.ndarray, size: int, half: bool) -> np.ndarray:
    """q8 as defined, block after block, in float64; NaN where the code is near a tie."""
    out = np.empty(x.shape)
    blocks = x.astype(np.float64).reshape(-1, size)
    for row, values in zip(out.reshape(-1, size), blocks, strict=True):
        most = np.abs(values).max()
        step = np.float64(np.float16(most / 127)) if half else most / 127
        exact = values * (127 / most) if most else values
        row[:] = np.where(np.abs(exact % 1 - 0.5) < 1e-4, np.nan, np.rint(exact) * step)
    return out


@pytest.mark.parametrize(
    ("function", "size", "half"),
    [(activations.q8_of_256, 256, False), (activations.q8_of_32, 32, True)],
)
def test_q8_is_its_definition(
    function: Callable[[torch.Tensor], torch.Tensor], size: int, half: bool
) -> None:
    x = inputs()
    found = function(torch.from_numpy(x)).double().numpy()
    expected = by_blocks(x, size, half)
    near = np.isnan(expected)
    assert near.mean() < 1e-2
    np.testing.assert_allclose(found[~near], expected[~near], rtol=3e-7)
    step = np.repeat(np.abs(x.reshape(7, -1, size)).max(-1) / 127, size, 1)
    # Scales of float16, too, some of them subnormal.
    of_scale = half * (np.abs(x) * 2**-11 + 127 * 2**-25)
    assert (np.abs(found - x) <= step * 0.501 + of_scale).all()


def test_floats() -> None:
    x = inputs()
    found = activations.half(torch.from_numpy(x)).numpy()
    np.testing.assert_array_equal(found, x.astype(np.float16).astype(np.float32))
    bits = x.view(np.uint32).astype(np.uint64)
    bits = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    expected = (bits << np.uint64(16)).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(activations.brain(torch.from_numpy(x)).numpy(), expected)


def test_which_block_types() -> None:
    """As the table of ggml-cpu.c says."""
    name_of = {
        (activations.Q8_OF_256.apply): "Q8_K",
        (activations.Q8_OF_32.apply): "Q8_0",
        (activations.F16.apply): "F16",
        (activations.BF16.apply): "BF16",
    }
    known = {type_.name: type_ for type_ in TENSOR_TYPES.values()}
    for names, expected in (
        ("Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL MXFP4 NVFP4 Q1_0 Q2_0", "Q8_0"),
        ("Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_XS IQ3_S IQ2_XXS IQ1_M TQ1_0 TQ2_0", "Q8_K"),
        ("F16", "F16"),
        ("BF16", "BF16"),
    ):
        for name in names.split():
            rounding = of_block_type(known[name])
            assert rounding is not None and name_of[rounding.apply] == expected
    assert of_block_type(known["F32"]) is None


@pytest.mark.parametrize("how", ["linear", "matmul", "at", "addmm", "slice"])
def test_every_way_to_multiply(how: str) -> None:
    """Only what meets the known matrix is rounded."""
    x, weight = torch.randn(5, 64), torch.randn(32, 64)
    other, bias = torch.randn(32, 64), torch.randn(32)
    expected = activations.half(x) @ weight.t()
    mode = RoundedInputs(
        lambda w: activations.F16 if w.data_ptr() == weight.data_ptr() else None, None
    )
    stack = torch.stack([other, weight])
    if how == "slice":
        weight = stack[1]
    with mode:
        found = {
            "linear": lambda: torch.nn.functional.linear(x, weight),
            "slice": lambda: torch.nn.functional.linear(x, stack[1]),
            "matmul": lambda: torch.matmul(x, weight.t()),
            "at": lambda: x @ weight.t(),
            "addmm": lambda: torch.addmm(bias, x, weight.t()) - bias,
        }[how]()
        untouched = torch.nn.functional.linear(x, other)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=2e-5)
    assert not torch.equal(x, activations.half(x))
    assert torch.equal(untouched, torch.nn.functional.linear(x, other))


def test_an_input_that_changes_is_rounded_anew() -> None:
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with RoundedInputs(lambda _: activations.F16, None):
        torch.nn.functional.linear(x, weight)
        x.mul_(3)
        found = torch.nn.functional.linear(x, weight)
    assert torch.equal(found, torch.nn.functional.linear(activations.half(x), weight))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("root")
    quantizing.text_file(folder / "text.txt")
    for recipe in ("q4_k_m", "q4_0", "f16"):
        request = GgufRequest("tiny", tiny_folder(), load(recipe), folder / f"{recipe}.gguf", 1)
        run_gguf(request, Progress(quiet=True))
    return folder


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    return quantizing.caller(monkeypatch, capfd)


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


def as_llama_cpp(folder: Path, types: dict[str, str], tokens: np.ndarray) -> np.ndarray:
    """Logits of a checkpoint in transformers, with hooks that round what modules are given."""

    def kept(module: object, query: object, key: torch.Tensor, value: torch.Tensor, *more: object,
             **options: object) -> object:  # fmt: skip
        return sdpa_attention_forward(
            module, query, key.half().float(), value.half().float(), *more, **options
        )

    AttentionInterface.register("kept", kept)
    AttentionMaskInterface.register("kept", sdpa_mask)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="kept"
    ).eval()

    def hook(type_: str) -> Callable[..., tuple[torch.Tensor, ...]]:
        def rounded(_: object, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            x = args[0].numpy()
            if type_ == "F16":
                return (torch.from_numpy(x.astype(np.float16).astype(np.float32)),)
            size = 256 if type_.endswith("_K") else 32
            blocks = x.reshape(*x.shape[:-1], -1, size)
            most = np.abs(blocks).max(-1, keepdims=True)
            codes = np.rint(blocks * (np.float32(127) / most))
            step = most / np.float32(127)
            if size == 32:
                step = step.astype(np.float16).astype(np.float32)
            return (torch.from_numpy((codes * step).reshape(x.shape)),)

        return rounded

    modules = dict(model.named_modules())
    for name, type_ in types.items():
        modules[name].register_forward_pre_hook(hook(type_))
    with torch.no_grad():
        found: np.ndarray = model(torch.from_numpy(tokens)).logits.double().numpy()
    return found


@pytest.mark.parametrize("recipe", ["q4_k_m", "q4_0", "f16"])
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
    ids = AutoTokenizer.from_pretrained(tiny_folder()).encode(text.read_text())
    # A difference in the last bit may lead to another code, and that to other codes of all later
    # tokens; in many short windows it stays where it is.
    tokens = np.array(ids[: 16 * 6]).reshape(16, 6)
    types = stored_types(file)
    assert len(types) == 1 + 7 * sum("q_proj" in name for name in types)
    with open_weights(file) as weights:
        rounded = of_weights(weights, "llama.cpp")
        run = forward(weights, rounded, tokens, 1, Progress(quiet=True), keep=False)
        with run.logits() as head:
            found = head(run.hidden).double().numpy()
    expected, exact = (as_llama_cpp(tmp_path / "hf", some, tokens) for some in (types, {}))
    ours, theirs = (np.abs(one - expected).max((1, 2)) for one in (found, exact))
    print(f"{recipe}: largest difference of a window {np.sort(ours)}, of rounding {theirs.min()}")
    assert (ours < 0.01 * theirs.min()).mean() > 0.6
