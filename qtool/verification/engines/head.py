"""A quantized output head: engines load it by rules of its own.

    vLLM, SGLang     AWQ and GPTQ have a key for it, lm_head; compressed-tensors has to name it in
                     targets. It is as long as the vocabulary, which is padded to a multiple of 64:
                     tensors that have it as their second axis are copied only where it is one, and
                     zero points are packed along it in words of 32 bits
    transformers     leaves the head out of AWQ and GPTQ, and initializes it anew

    Scales of blocks of rows have an axis of another length, which neither server copies.

Sources: vLLM 0.33 (vocab_parallel_embedding.py; #37291 of March 2026), SGLang 0.5.23
(compressed_tensors.py; #35228 of August 2026), transformers 5.24 (quantizer_awq.py), optimum's GPTQ
quantizer, which converts blocks alone.
"""

from collections.abc import Iterator

from qtool.verification.engines.split import block_size
from qtool.verification.engines.targets import named_in_targets
from qtool.verification.engines.view import EngineView
from qtool.verification.finding import Finding, Severity

CHECK = "engine-head"
PADDED = 64


def length_refused(
    format_: str, rows: int, bits: int, symmetric: bool, in_blocks: bool = False
) -> str | None:
    """Why vLLM and SGLang do not load a head of so many rows; None where they do.

    in_blocks: whether some rows share a scale."""
    if format_ == "compressed-tensors" and in_blocks:
        return (
            "its scales are for blocks of rows, which they do not share out; give it one scale a "
            "row by an override, or leave it dense"
        )
    if format_ in ("awq", "gptq") and rows % PADDED:
        return (
            f"its {rows:,} rows are no multiple of {PADDED}, to which they pad the head, and they "
            f"copy no shorter one of {format_}; take compressed-tensors, symmetric"
        )
    if format_ == "compressed-tensors" and not symmetric and rows * bits % 32:
        return (
            f"zero points of its {rows:,} rows fill no whole words; make it symmetric, or leave "
            "the head dense"
        )
    return None


def head_findings(view: EngineView, engine: str, who: str) -> Iterator[Finding]:
    """What `engine` makes of the head, if it is quantized."""
    heads = [layer for layer in view.layers if layer.role == "head" and layer.stored is not None]
    if not heads:
        return
    head, name = heads[0], heads[0].module

    def found(severity: Severity, message: str) -> Finding:
        return Finding(severity, CHECK, name, message)

    if engine == "transformers":
        if view.format in ("awq", "gptq"):
            yield found(
                "error",
                f"{who} will not load {name}: it takes no quantized head of {view.format} and "
                "makes one of random numbers; leave the head dense, or take compressed-tensors",
            )
        return
    stored = head.stored
    assert stored is not None
    in_blocks = block_size(view, head) is not None
    why = length_refused(view.format, head.out_features, stored.bits, stored.symmetric, in_blocks)
    if view.config.get("tie_word_embeddings") is True:
        yield found(
            "warning",
            f"{who} will not load {name}: config.json ties it to the embedding; drop it, or set "
            "tie_word_embeddings to false",
        )
    elif view.format in ("awq", "gptq") and view.quantization.get("lm_head") is not True:
        yield found(
            "error",
            f"{who} will refuse {name}: it is quantized, and quantization_config does not say "
            "lm_head: true; add that, or leave the head dense",
        )
    elif view.format == "compressed-tensors" and named_in_targets(view.quantization, name) is False:
        yield found(
            "error",
            f"{who} will refuse {name}: it is quantized, and targets of config_groups mean it by "
            "its class Linear alone, which a head is not there; name it in targets, or leave it "
            "dense",
        )
    elif why is not None:
        yield found("error", f"{who} will refuse {name}: {why}")
    elif view.format == "compressed-tensors" and engine == "sglang":
        yield found(
            "warning",
            f"{who} before August 2026 (#35228) does not read {name}, which is quantized, and "
            "answers nonsense without an error; take a later one, or leave the head dense",
        )
