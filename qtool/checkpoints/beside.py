"""What lies beside a model's weights, or among them, and is no part of it: adapters, copies."""

import re

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.errors import UnsupportedError

_ADAPTER = "adapter_config.json"  # peft's
_ADAPTER_WEIGHTS = "adapter_model"
_ADAPTED = ".lora_"  # in the name of each of its matrices
_NOT_MERGED = re.compile(r"\.(lora_[AB]|base_layer)\.")  # and what is below it
_WRAPPED = "base_model.model."
_SINGLE = "model.safetensors"
_MERGE = "PeftModel.from_pretrained(MODEL, ADAPTER).merge_and_unload().save_pretrained(OUT)"


def refuse_adapter(checkpoint: Checkpoint) -> None:
    """UnsupportedError where the weights are those of an adapter, alone or not merged."""
    files = [file.name.startswith(_ADAPTER_WEIGHTS) for file in checkpoint.files]
    if (files and all(files)) or all(_ADAPTED in name for name in checkpoint.tensors):
        raise UnsupportedError(
            f"{checkpoint.path}: an adapter (LoRA), not a model; merge it into the model that it "
            f"was trained on, with peft: {_MERGE}, copy the tokenizer's files to OUT, and quantize "
            "that"
        )
    if all(name.startswith(_WRAPPED) for name in checkpoint.tensors):
        raise UnsupportedError(
            f"{checkpoint.path}: its tensors are named as peft wraps a model ({_WRAPPED}...), so "
            f"that no engine knows them; merge and save it with peft: {_MERGE}"
        )
    if apart := [name for name in checkpoint.tensors if _NOT_MERGED.search(name)]:
        more = f" and {len(apart) - 1} more" if len(apart) > 1 else ""
        raise UnsupportedError(
            f"{checkpoint.path}: holds an adapter that is not merged into the weights ({apart[0]}"
            f"{more}); merge it first, with peft: {_MERGE}"
        )


def said(checkpoint: Checkpoint) -> list[str]:
    """What lies there and is left out, though other programs load it."""
    found = [*checkpoint.remarks]
    if stray := [name for name in checkpoint.tensors if _ADAPTED in name]:
        found.append(
            f"{len(stray)} matrices of an adapter lie among the weights ({stray[0]}), which few "
            f"engines add; where they are no part of the model, merge them with peft: {_MERGE}"
        )
    if (checkpoint.folder / _ADAPTER).is_file():
        found.append(
            f"an adapter lies beside the weights ({_ADAPTER}), which is left out of what is made, "
            f"and which transformers loads with the model; merge it first, with peft: {_MERGE}, "
            "or remove it"
        )
    single = checkpoint.folder / _SINGLE
    if checkpoint.path.is_dir() and single.is_file() and single not in checkpoint.files:
        found.append(
            f"{_SINGLE} lies beside the files that the index names: these are taken, as by vLLM, "
            "and transformers takes the other; remove the one that is not meant"
        )
    return found
