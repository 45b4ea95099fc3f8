"""What can be converted to: the names that `--to` takes."""

from dataclasses import dataclass

from qtool.errors import UsageError


@dataclass(frozen=True)
class Target:
    """A format, and its layout where it has several."""

    name: str  # as --to has it
    format: str  # awq, gptq, compressed-tensors, gguf, hf
    layout: str | None = None


_TARGETS = (
    Target("awq", "awq", "gemm"),
    Target("awq-gemv", "awq", "gemv"),
    Target("awq-gemv-fast", "awq", "gemv_fast"),
    Target("awq-llm", "awq", "llm_awq"),
    Target("gptq", "gptq", "v1"),
    Target("gptq-v2", "gptq", "v2"),
    Target("compressed-tensors", "compressed-tensors"),
    Target("mlx", "mlx"),
    Target("gguf", "gguf"),
    Target("gguf-q8_0", "gguf", "Q8_0"),
    Target("hf", "hf"),
)
TARGETS = {target.name: target for target in _TARGETS}
# Other names in use for the same.
_SYNONYMS = {
    "awq-gemm": "awq",
    "llm-awq": "awq-llm",
    "gptq-v1": "gptq",
    "ct": "compressed-tensors",
    "dense": "hf",
}


def target(name: str) -> Target:
    """The target of this name; UsageError names those that exist."""
    plain = name.lower().replace("_", "-").replace("gguf-q8-0", "gguf-q8_0")
    found = TARGETS.get(_SYNONYMS.get(plain, plain))
    if found is None:
        from qtool.recipe.file import did_you_mean

        near = did_you_mean(plain, TARGETS)
        near = f"; {near}" if near else ""
        raise UsageError(f"--to {name}: expected {', '.join(TARGETS)}{near}")
    return found
