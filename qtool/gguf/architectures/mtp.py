"""Multi-token prediction (MTP, nextn): what checkpoints call its blocks, and llama.cpp does.
llama.cpp's.

    mtp.layers.0.self_attn.q_proj    model.layers.N.self_attn.q_proj    blk.N.attn_q
    mtp.fc                           model.layers.N.eh_proj             blk.N.nextn.eh_proj

The middle ones are the table's: N is the number of blocks, and one more has a few modules of its
own.
"""

import re
from collections.abc import Iterable

from qtool.checkpoints.hf_config import Config, count
from qtool.gguf.architectures.modules import BLOCK, Module, block

MTP = "mtp_num_hidden_layers"  # the setting that counts them
_OWN = {
    "mtp.fc": "eh_proj",
    "mtp.pre_fc_norm_embedding": "enorm",
    "mtp.pre_fc_norm_hidden": "hnorm",
    "mtp.norm": "shared_head.norm",
}
_LAYER = re.compile(r"mtp\.layers\.(\d{1,4})\.")
_BLOCK = re.compile(r"model\.layers\.(\d+)\.")


def mtp_blocks(names: Iterable[str]) -> int:
    """How many such blocks a checkpoint has."""
    found = (_LAYER.match(name.removeprefix("model.")) for name in names)
    return max((int(one[1]) + 1 for one in found if one), default=0)


def name_in_table(name: str, config: Config) -> str:
    """A tensor of such a block as one of a block of the model."""
    first = count(config, "num_hidden_layers")
    plain = name.removeprefix("model.")
    stem, _, suffix = plain.rpartition(".")
    if stem in _OWN:
        return f"model.layers.{first}.{_OWN[stem]}.{suffix}"
    found = _LAYER.match(plain)
    return name if found is None else f"model.layers.{first + int(found[1])}.{plain[found.end() :]}"


def name_in_checkpoint(name: str, config: Config) -> str:
    """The inverse; other names as they are."""
    first = count(config, "num_hidden_layers")
    found = _BLOCK.match(name)
    if found is None or int(found[1]) < first:
        return name
    stem, _, suffix = name[found.end() :].rpartition(".")
    own = {theirs: mine for mine, theirs in _OWN.items()}
    if stem in own:
        return f"{own[stem]}.{suffix}"
    return f"mtp.layers.{int(found[1]) - first}.{name[found.end() :]}"


def _first_mtp(config: Config, b: int) -> bool:
    return b == count(config, "num_hidden_layers")


# As checkpoints have them that number such blocks after the others.
AHEAD = (
    *block("eh_proj", "enorm", "hnorm", "shared_head.norm"),
    *(Module(BLOCK + name, needed=False) for name in ("embed_tokens", "shared_head.head")),
)
MTP_MODULES = tuple(
    Module(BLOCK + name, called=f"nextn.{name.replace('.', '_')}", blocks=_first_mtp)
    for name in _OWN.values()
)
