"""Whether an engine reads generation_config.json, and draws as it says.

All read it through transformers' class as they load a model, which they do not where that refuses
it. SGLang takes no top_k of 0, which is all tokens to the others.
Sources: vLLM 0.33 (transformers_utils/config), SGLang 0.5.23 (sampling/sampling_params, utils/
hf_transformers), transformers 5.24 (generation/configuration_utils), which is asked itself.
"""

from collections.abc import Iterator

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import QtoolError
from qtool.gguf.tokenizer.hf_json import read_object
from qtool.verification.classes import installed
from qtool.verification.engines import plain
from qtool.verification.finding import Finding, of_setting
from qtool.verification.generation import FILE

CHECK = "engine-generation"


def drawing_findings(
    checkpoint: Checkpoint, engine: str, who: str, wrong: frozenset[str]
) -> Iterator[Finding]:
    """wrong: settings of which it is said already that they make no sense."""
    try:
        said = read_object(checkpoint.folder / FILE)
    except QtoolError:
        return
    if engine == "sglang" and said.get("top_k") == 0:
        yield Finding(
            "error", CHECK, "top_k",
            f"{who} will refuse every request that says no top_k of its own, as {FILE} says 0, "
            "which is all tokens to others: take it out, or start it with --sampling-defaults "
            "openai",
            of_setting(f"{FILE}.top_k"),
        )  # fmt: skip
    if any(key.startswith(f"{FILE}.") for key in wrong):
        return  # which may be what it has against it
    reason = None if plain.draws(said) else _refusal(checkpoint)
    if reason is not None:
        yield Finding(
            "error", CHECK, FILE,
            f"{who} will not load the model, as {installed()} refuses its {FILE} ({reason}): put "
            "back the model's own",
        )  # fmt: skip


def _refusal(checkpoint: Checkpoint) -> str | None:
    from qtool.streaming.meta_model import refused_generation

    return refused_generation(checkpoint)
