"""The recipe to name to whoever has a model and a text to calibrate on: the first of a few that the
model's headers allow."""

from collections.abc import Iterator

from qtool.errors import QtoolError
from qtool.quantizing.plan import Asked, foresee

# The best of 4 bits for most engines; where 128 does not divide; gpt-oss with experts in numbers;
# what GGUF alone has, and last what takes gpt-oss as it is released.
_RECIPES = (
    ("w4g128-awq-gptq", ()),
    ("w4g64-awq", ()),
    ("mxfp4-gpt-oss-gptq", ()),
    ("q4_k_m-awq-gptq", ()),
    ("q4_k_m", ("importance=true",)),
)


def calibrated(model: str) -> list[str] | None:
    """What `qtool quantize` is told beside the model and the text; None where nothing is known."""
    return next((words for asked, words in _possible(model) if _is_planned(asked)), None)


def _possible(model: str) -> Iterator[tuple[Asked, list[str]]]:
    """What can be asked for, a quantized model as it is only after one that is not."""
    for recipe, sets in _RECIPES:
        for requantize in (False, True):
            words = ["--recipe", recipe]
            for one in sets:
                words += ["--set", one]
            words += ["--requantize"] * requantize
            yield Asked(model, recipe, sets, requantize=requantize), words


def _is_planned(asked: Asked) -> bool:
    try:
        foresee(asked)
    except QtoolError:
        return False
    return True
