"""How engines are started with an artifact, and which is named first."""

COMMANDS = {
    "vllm": "vllm serve {}",
    "sglang": "python -m sglang.launch_server --model-path {}",
    "llama.cpp": "llama-server -m {}",
    "transformers": "transformers serve {}",
    "mlx-lm": "mlx_lm.server --model {}",
}


def order(format_: str) -> tuple[str, ...]:
    """Engines of checkpoints, those that a format was made for first."""
    if format_ == "bitsandbytes":
        return ("transformers", "sglang", "vllm")
    if format_ == "mlx":
        return ("mlx-lm",)
    return ("vllm", "sglang", "transformers")
