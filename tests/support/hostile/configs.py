"""config.json and the JSON files beside it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.hostile.headers import quantize
from support.hostile.row import Make, Row, edited, gguf_model, honest


def text(content: bytes, name: str = "config.json") -> Callable[[Path], object]:
    return lambda model: (model / name).write_bytes(content)


def run(change: Mapping[str, Any]) -> Make:
    """A recipe that runs the model, which config.json describes."""

    def make(folder: Path) -> list[object]:
        model = edited(honest(folder) / "config.json", change)
        return ["quantize", model, "--recipe", "w4g128-gptq", "--set", "weights.group_size=32",
                "--samples", 2, "--length", 16, "-o", folder / "out"]  # fmt: skip

    return make


def gguf(change: Mapping[str, Any]) -> Make:
    """A recipe that writes GGUF, whose keys come from config.json."""

    def make(folder: Path) -> list[object]:
        model = edited(gguf_model(folder) / "config.json", change)
        return ["quantize", model, "--recipe", "q8_0", "-o", folder / "out.gguf"]

    return make


def inspected(change: Mapping[str, Any]) -> Make:
    def make(folder: Path) -> list[object]:
        return ["inspect", edited(honest(folder) / "config.json", change)]

    return make


CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}

CONFIGS = [
    Row("an empty config", quantize(text(b"")), r"config\.json: not valid JSON"),
    Row("a config of NUL", quantize(text(bytes(100))), "not valid JSON"),
    Row("a config of UTF-16", quantize(text('{"a": 1}'.encode("utf-16"))), "not valid JSON"),
    Row("a config with the mark of UTF-8", quantize(text(b"\xef\xbb\xbf{}")), "the mark of UTF-8"),
    Row("a config that is null", quantize(text(b"null")), "expected a JSON object, found null"),
    Row("a config 101 deep", quantize(text(b'{"a":' * 101 + b"1" + b"}" * 101)),
        "nested more than 100 deep"),
    Row("a config of brackets", quantize(text(b'{"a":' + b"[" * 10_000)), "nested too deeply"),
    Row("a number of a million digits", quantize(text(b'{"a":' + b"9" * 10**6 + b"}")),
        "not valid JSON"),
    Row("a key twice", quantize(text(b'{"a": 1, "a": 2}')), "'a' comes twice"),
    Row("half a surrogate pair", quantize(text(b'{"a": "\\ud83d"}')), "half of a surrogate pair"),
    Row("nothing but objects", quantize(text(b'{"a":[' + b"{}," * 100_000 + b"0]}")),
        "JSON so dense"),
    Row("quantized, it says", quantize(lambda m: edited(
        m / "config.json", {"quantization_config": {"quant_method": "\x1b[31mawq"}})),
        r"already quantized .*\\x1b"),
    Row("quantized by nobody knows whom", inspected(
        {"quantization_config": {"quant_method": "awq", "bits": 10**30}}), "bits is 1000000"),
    Row("a group of no size", inspected(
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 0}}),
        "group_size is 0"),
    Row("300000 blocks to build", run({"num_hidden_layers": 300_000}),
        "config.json says 300,000 blocks, and 299,997 blocks"),
    Row("64 blocks, of a few tensors, to build", run({"num_hidden_layers": 64}),
        "config.json says 64 blocks, and 61 blocks"),
    Row("a billion labels to name", run({"num_labels": 10**9}), "num_labels is 1000000000"),
    Row("a head of 2^40", run({"head_dim": 2**40}), "config and weights are of different models"),
    Row("a vocabulary of 10^12", run({"vocab_size": 10**12}), "config and weights are of"),
    Row("no heads", run({"num_attention_heads": 0}), "cannot build the 'llama'"),
    Row("a negative width", run({"hidden_size": -64}), "cannot build the 'llama'"),
    Row("padding beyond the vocabulary", run({"pad_token_id": 10**9}), "cannot build the 'llama'"),
    Row("a model that only its own code knows", run({"model_type": "evil", "auto_map": CODE}),
        r"model_type 'evil' \(the code that comes with it, its auto_map, is never run\)"),
    Row("a model type that is a path", run({"model_type": "../../evil"}), "no causal language"),
    Row("a model type that is a number", run({"model_type": 7}), "no causal language"),
    Row("10^9 blocks in GGUF", gguf({"num_hidden_layers": 10**9}),
        "says 1000000000 blocks, and there are only"),
    Row("a width that is text", gguf({"hidden_size": "16"}), "expected a positive integer"),
    Row("a count beyond 32 bits", gguf({"max_position_embeddings": 2**40}),
        "max_position_embeddings is|does not fit|expected"),
    Row("rope settings that are a list", gguf({"rope_parameters": [1, 2]}), "rope_parameters"),
    Row("a theta of NaN", gguf({"rope_theta": float("nan")}), "rope_theta|expected a number"),
    Row("an activation nobody has", gguf({"hidden_act": "evil\n"}), r"the activation is 'evil\\n'"),
    Row("an architecture nobody has", gguf({"architectures": ["Evil"]}), "Evil"),
    Row("experts that are not there", gguf({"num_experts": 10**12}), "num_experts 1000000000000"),
    Row("provenance that is no JSON",
        lambda folder: ["reproduce", [m := honest(folder), text(b"{", "qtool.json")(m)][0]],
        r"qtool\.json: not valid JSON"),
]  # fmt: skip
