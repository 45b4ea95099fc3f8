"""Sections of a rotation: how many pairs of elements go by time, by height and by width.

Of a text alone all three count the same positions.
"""

from qtool.checkpoints.hf_config import Config
from qtool.errors import SettingError
from qtool.formats.gguf_values import Kind, Value, array
from qtool.gguf.architectures.keys import Key

_SECTIONS = 4  # time, height, width, and one more that llama.cpp has


def sections_of(config: Config, usual: list[int]) -> list[int]:
    """Four numbers; usual: where none are said. SourceError where they make no sense."""
    given = config["rope_parameters"]["full_attention"].get("mrope_section") or usual
    whole = isinstance(given, list) and all(type(n) is int and 0 <= n < 1 << 31 for n in given)
    if not given or not whole or len(given) > _SECTIONS:
        raise SettingError(
            "mrope_section",
            f"is {str(given)[:80]}, expected the numbers of pairs of elements that are rotated by "
            "time, height and width",
        )
    return [*given, *[0] * (_SECTIONS - len(given))]


def sections(usual: list[int]) -> Key:
    """Which share of a head is rotated by time, height and width."""

    def make(config: Config) -> Value:
        return array(Kind.INT32, sections_of(config, usual))

    return Key("rope.dimension_sections", "rope_parameters", make, listed=True)


def has_sections(config: Config) -> bool:
    return bool(config["rope_parameters"]["full_attention"].get("mrope_section"))


def _if_said(config: Config) -> Value | None:
    return array(Kind.INT32, sections_of(config, [])) if has_sections(config) else None


IF_SAID = Key("rope.dimension_sections", "rope_parameters", _if_said, listed=True)
