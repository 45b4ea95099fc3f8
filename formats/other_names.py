"""Names that transformers gives to modules of multimodal models, where a checkpoint has
others.

    multi_modal_projector.linear_1                model.multi_modal_projector.linear_1
    language_model.lm_head                        lm_head
    language_model.model.layers.0.mlp.down_proj   model.language_model.layers.0.mlp.down_proj

A list of what is left unquantized that names these as the checkpoint does means nothing there: the
projector is taken for a quantized one, none of its codes is found, and it stays as it was made up.
So such lists get what means the same modules under either name. vLLM has names of its own, and
rewrites whole names as it does those of tensors, but no expression.

Source: transformers 5.23 (conversion_mapping), compressed-tensors 0.20 (utils/match: an expression
has to match from the start of a name), quantizers_utils.should_convert_module (start or end).
"""

from collections.abc import Iterable, Sequence
from itertools import accumulate

from qtool.formats.compressed_tensors_targets import targets_of
from qtool.formats.facts import Facts
from qtool.formats.layer_names import is_head

HEAD = "lm_head"
# Names that are no part's own, whatever lies under them.
_WIDE = ("model", "language_model", "transformer", "thinker", "base_model")
# What lies between a tower and the decoder, which some checkpoints call otherwise altogether
# (vit_large_projector, mlp_AR, mm_projector).
_BETWEEN = ("multi_modal_projector", "projector")
# The second in a class for text alone (Llama 4).
_BEFORE, _SINCE = "language_model.model.", ("model.language_model.", "model.")


def expressions(facts: Facts) -> list[str]:
    """For an `ignore` of compressed-tensors: the dense modules, whatever their names begin with.

    None for a model that is a decoder alone and calls its head lm_head: nearly all of these have
    the same names everywhere. What a class calls otherwise within blocks stays as it is.
    """
    heads, inner, parts = _split(facts)
    if not _differs(heads, parts):
        return []
    found = [HEAD] if heads and HEAD not in heads else []
    found += targets_of(inner, [*facts.quantized, *inner]) or []
    lasts = "|".join(map(_escaped, _last(parts, facts)))
    return [*found, f"re:(?:.*\\.)?(?:{lasts})(?:\\..*)?$"] if parts else found


def names(facts: Facts) -> list[str]:
    """The same for lists of names, which transformers takes for the start or the end of one."""
    heads, inner, parts = _split(facts)
    if not _differs(heads, parts):
        return []
    found = [HEAD] if heads and HEAD not in heads else []
    ends = [name.removeprefix(_BEFORE) for name in inner if name.startswith(_BEFORE)]
    found += [before + end for before in _SINCE for end in ends]
    between = _BETWEEN if parts else ()
    found += [f"model.{part}" for part in (*parts, *between) if not part.startswith("model.")]
    return list(dict.fromkeys(found))


def _differs(heads: Sequence[str], parts: Sequence[str]) -> bool:
    return bool(parts) or any(head != HEAD for head in heads)


def _split(facts: Facts) -> tuple[list[str], list[str], list[str]]:
    """The dense modules: heads, those of the quantized blocks, and what is dense as a whole, by
    the shortest beginnings that no quantized module has."""
    begun = {start for name in facts.quantized for start in _starts(name)}
    heads, inner, parts = [], [], dict[str, None]()
    for name in facts.dense:
        alone = (start for start in _starts(name) if start not in begun)
        start = next((s for s in alone if s.rpartition(".")[2] not in _WIDE), name)
        if is_head(name):
            heads.append(name)
        elif any(part.isdecimal() for part in start.split(".")):
            inner.append(name)
        else:
            parts[start] = None
    return heads, inner, list(parts)


def _starts(name: str) -> Iterable[str]:
    """`a`, `a.b`, `a.b.c`."""
    return accumulate(name.split("."), lambda before, part: f"{before}.{part}")


def _last(parts: Sequence[str], facts: Facts) -> list[str]:
    """Their last names, where no quantized module has one like it, else the whole."""
    taken = {part for name in facts.quantized for part in name.split(".")}
    lasts = [part if (last := part.rpartition(".")[2]) in taken else last for part in parts]
    return list(dict.fromkeys([*lasts, *(name for name in _BETWEEN if name not in taken)]))


def _escaped(name: str) -> str:
    return name.replace(".", r"\.")
