"""Vision and audio towers of multimodal models. Text needs none of them: they are built, and never
run."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import RLock
from typing import Any

from torch import nn

_BUILDING = RLock()  # what is changed meanwhile is of the process
_SENSES = re.compile("vision|image|video|audio|speech")  # in the names of parts of a config


def part_with_text(config: Mapping[str, Any]) -> str:
    """What names begin with of the part that writes text, of models that also speak: there are
    several decoders in Qwen2.5-Omni and Qwen3-Omni. Empty where that is the whole model."""
    return "thinker." if "thinker_config" in config else ""


def attention_of_parts(config: Any, attention: str) -> str | dict[str, str]:
    """What a class is to be built with where its decoder has this attention: eager in towers, of
    which some have nothing else (Gemma 4's of audio)."""
    parts = getattr(config, "sub_configs", None)
    if not parts:
        return attention
    towers = dict.fromkeys((key for key in parts if _SENSES.search(key)), "eager")
    return {"": attention, **dict.fromkeys(parts, attention), **towers}


@contextmanager
def left_out_where_libraries_are_missing(whole: Any) -> Iterator[None]:
    """Within, a model of config `whole` is built without parts that need what is not installed
    (timm for Gemma 3n's vision tower); their tensors are then unknown. ImportError where that is
    its decoder."""
    from transformers import AutoModel

    try:
        decoder = type(whole.get_text_config(decoder=True))
    except ValueError:  # there are several
        decoder = type(whole)

    def built(config: Any, **options: Any) -> nn.Module:  # some give it by its name
        try:
            found: nn.Module = build(config, **options)
        except ImportError:
            if isinstance(config, decoder):
                raise
            return nn.Module()
        return found

    with _BUILDING:
        build: Any = AutoModel.from_config
        own = vars(AutoModel)["from_config"]
        # setattr: the class has no types for it.
        setattr(AutoModel, "from_config", staticmethod(built))  # noqa: B010
        try:
            yield
        finally:
            setattr(AutoModel, "from_config", own)  # noqa: B010
