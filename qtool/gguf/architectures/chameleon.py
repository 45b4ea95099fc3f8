"""Chameleon: each head has a norm of its own, and images are tokens that llama.cpp never gives.

llama.cpp rotates neighbouring elements of a head, so that the weights of these norms change places
as the rows of queries and keys do. Its converter takes the norm of the first head for all.
"""

from dataclasses import replace

import numpy as np

from qtool.checkpoints.hf_config import Config, head_width
from qtool.errors import SourceError
from qtool.formats.gguf_values import boolean
from qtool.gguf.architectures import keys, limits
from qtool.gguf.architectures.dense import LLAMA
from qtool.gguf.architectures.keys import Key
from qtool.gguf.architectures.modules import BLOCK, MLP, QK_NORMS, Module, block
from qtool.gguf.architectures.row import Architecture

_IMAGES = range(4, 8196)


def _in_pairs(module: Module, config: Config) -> Module:
    width = head_width(config)
    if width % 2:
        raise SourceError(f"config.json: heads of {width} elements, which are rotated in pairs")
    halves = np.arange(width, dtype=np.int64).reshape(2, width // 2)
    return replace(module, columns=halves.T.reshape(-1))


def _norms_first(config: Config) -> str | None:
    if not config.get("swin_norm"):
        return None
    return "swin_norm is true, and its MLPs then read what attention adds to the stream alone"


def _known_images(config: Config) -> str | None:
    names = config.get("vocabulary_map")
    given = names.items() if isinstance(names, dict) else ()
    images = [number for name, number in given if name.startswith("IMGIMG")]
    if sorted(images) == [*_IMAGES]:
        return None
    return f"images are not the tokens {_IMAGES[0]} to {_IMAGES[-1]}, and it never gives these"


# fmt: off
CHAMELEON: dict[str, Architecture] = {
    "ChameleonForConditionalGeneration": Architecture(
        "chameleon",
        (*LLAMA, *block(*MLP),
         *(Module(BLOCK + name, shape=(heads, "head"), fit=_in_pairs)
           for name, heads in zip(QK_NORMS, ("number of heads", "number of key heads"),
                                  strict=True))),
        (*keys.USUAL,
         Key("swin_norm", "", lambda config: boolean(bool(config["swin_norm"])), flag=True)),
        {"num_key_value_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
         "rope_theta": 1e4, "vocab_size": 65536, "swin_norm": False},
        refuse=(limits.plain_heads, limits.no_biases("attention_bias", "mlp_bias"), _norms_first,
                _known_images),
        warn=(limits.no_dynamic_rope,),
    ),
}
# fmt: on
