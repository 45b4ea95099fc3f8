"""The tokenizer of a Hugging Face folder as the metadata keys of a GGUF file.

Written are the keys that llama.cpp's converter writes, in its order; plain JSON is read, and no
tokenizer library. Which of the forms that a folder may hold is taken, and what is written beside
it, depends on the architecture: POLICIES. Source: llama.cpp, conversion/*.py (set_vocab).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtool.formats.gguf_values import Value, boolean
from qtool.gguf.tokenizer_bpe import PREFIX, bpe_metadata
from qtool.gguf.tokenizer_json import CONFIG, model_of, read_object
from qtool.gguf.tokenizer_special import special_metadata


@dataclass(frozen=True)
class Policy:
    """How the tokenizer of one family of architectures is written."""

    llama: bool = False  # tokenizer_config.json's add_prefix_space is written too


LLAMA = Policy(llama=True)
POLICIES = {"llama": LLAMA, "granite": LLAMA, "granitemoe": LLAMA, "smollm3": LLAMA, "arcee": LLAMA}
_GRANITE_SMALL = 49152


def tokenizer_metadata(
    folder: Path,
    arch: str,
    vocab_size: int,
    config: Mapping[str, Any],
    pre: str | None = None,
) -> dict[str, Value]:
    """Every tokenizer key of a checkpoint's folder, in the order of writing.

    arch: general.architecture; vocab_size: rows of the embedding; config: config.json; pre: the
    name of the pre-tokenizer, where it is known better than by the folder.
    """
    policy = POLICIES.get(arch, Policy())
    tokenizer_config = read_object(folder / CONFIG)
    keys: dict[str, Value] = {}
    prefix = tokenizer_config.get("add_prefix_space")
    if policy.llama and isinstance(prefix, bool):
        keys[PREFIX + "add_space_prefix"] = boolean(prefix)
    data = model_of(folder)
    keys |= bpe_metadata(folder, data, tokenizer_config, vocab_size, pre)
    keys |= special_metadata(folder, data, tokenizer_config, config, None)
    if policy.llama and vocab_size == _GRANITE_SMALL:
        # SmolLM and Granite: their post-processors may say otherwise, and the models want none.
        keys[PREFIX + "add_bos_token"] = boolean(False)
    return keys
