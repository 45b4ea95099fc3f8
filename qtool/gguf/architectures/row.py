"""What one row of the table of architectures says."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qtool.checkpoints.hf_config import BY_BLOCK, Config, complete, count
from qtool.gguf.architectures import limits
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.limits import Limit
from qtool.gguf.architectures.modules import HEADS, Module


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    name: str  # general.architecture
    modules: tuple[Module, ...]
    keys: tuple[Key, ...]  # of two for one name the later counts, unless it says nothing
    # Of the class in transformers; a string names what stands in for null.
    defaults: Mapping[str, Any] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu",)  # that llama.cpp computes
    rope: tuple[str, ...] = ("default", "linear", "yarn", "dynamic")  # scaling it can be told of
    # It is told where YaRN's ramp lies, or `refuse` asks after it; else it has to be where usual.
    yarn: bool = False
    # Whose names of tensors it has, where the gguf package does not know it, or not all of it.
    names: str = ""
    bare: bool = False  # names of tensors lack "model.", with which some begin, or "backbone."
    # The class that computes the text by itself, where this one is multimodal.
    alone: str = ""
    needs_head: bool = False  # llama.cpp never takes the embedding
    refuse: tuple[Limit, ...] = ()
    warn: tuple[Limit, ...] = (limits.no_window, limits.no_dynamic_rope)
    mtp: str = ""  # the setting that counts the blocks of multi-token prediction, behind the others
    ahead_needed: bool = False  # llama.cpp does not go without these, where a file counts them
    # Numbers that each block has in a tensor of its own, by the key that lists them.
    learned: Mapping[str, str] = field(default_factory=dict)
    remote: bool = False  # its class comes with the checkpoint: transformers has none
    # Tensors that no checkpoint has, told by settings, by their names in a file.
    computed: Callable[[Config], Mapping[str, NDArray[np.float32]]] | None = None
    # Integers that checkpoints have in tensors, though they follow from the settings.
    constants: Callable[[Config], Mapping[str, list[int]]] | None = None
    # What else its class makes of the settings, which are its own here.
    settle: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    def completed(self, raw: Config) -> dict[str, Any]:
        """The settings of a config.json as its class has them."""
        config = complete(raw, self.defaults)
        config.pop(BY_BLOCK, None)
        return config if self.settle is None else self.settle(config)

    def blocks(self, config: Config) -> int:
        """How many a file has, those of multi-token prediction included."""
        ahead = self.mtp and config.get(self.mtp)
        return count(config, "num_hidden_layers") + (count(config, self.mtp) if ahead else 0)

    @property
    def passed_over(self) -> "Architecture":
        """The row of what may be stored and nothing computes with."""
        unread = (replace(m, blocks=m.unread) for m in self.modules if m.unread is not None)
        return replace(self, modules=tuple(unread))

    def unread(self, config: Config) -> frozenset[str]:
        """The modules of `passed_over`, as checkpoints call them."""
        return frozenset(
            module.name.replace("{b}", str(block))
            for module in self.passed_over.modules
            for block in range(self.blocks(config))
            if module.in_block(config, block)
        )

    @property
    def drops_head(self) -> bool:
        """Whether llama.cpp always takes the embedding for the head."""
        return all(module.name not in HEADS for module in self.modules)


# Defaults and settings that many rows share.
OWN_HEADS = {"num_key_value_heads": "num_attention_heads"}
LLAMA_ROPE = ("default", "linear", "yarn", "dynamic", "llama3")
GELU = ("gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast")
