"""Fused experts one by one, where scales are going to be found for each of them.

A scale in front of an expert's down projection is taken out of its own rows of up; and where a norm
feeds experts, router and a shared expert, all that read it are scaled together.
"""

import re

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.checkpoints.decoder_names import name_alone
from qtool.checkpoints.fused_experts import apart
from qtool.gguf.architectures import TABLE, class_named
from qtool.gguf.architectures.modules import spelled

_BLOCK = re.compile(r"(?<=\.layers\.)\d+(?=\.)")
_PARTS = ("gate_proj", "up_proj", "down_proj")


def experts_apart(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint with a matrix an expert, in the layers whose experts the table knows so."""
    row = TABLE.get(str(class_named(checkpoint.config)))
    if row is None:
        return checkpoint
    patterns = (module.each[0] for module in row.modules if module.each is not None)
    known = {name.removesuffix(".weight") for pattern in patterns for name in spelled(pattern)}

    def wanted(layer: str) -> bool:
        plain = _BLOCK.sub("{b}", name_alone(f"{layer}.weight")).removesuffix(".weight")
        return known.issuperset(f"{plain}.{{i}}.{part}" for part in _PARTS)

    return apart(checkpoint, wanted)
