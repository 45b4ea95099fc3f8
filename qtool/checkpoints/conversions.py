"""What transformers makes of a checkpoint's names and tensors for a model, as it says itself.

It renames, and converts by operations on lists of tensors. This and names.py alone know the classes
that it has for these (of transformers 5.23 and 5.24).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Split:
    """A checkpoint tensor whose rows are those of several parameters, one after another."""

    checkpoint_name: str
    parameters: tuple[str, ...]  # in the order of their rows


@dataclass(frozen=True)
class Held:
    """The parameter that a checkpoint tensor becomes without more than being transposed."""

    parameter: str
    transposes: tuple[Any, ...] = ()  # transformers' Transpose operations, in turn


@dataclass(frozen=True)
class Conversions:
    """Those of a model, in the order in which they are tried."""

    renamings: tuple[Any, ...]
    converters: tuple[Any, ...]
    prefix: str  # of its base model, which names may lack
    within: str = ""  # what names of a checkpoint begin with that are its own

    @classmethod
    def of(cls, model: Any, within: str = "") -> "Conversions":
        """Of a transformers PreTrainedModel, or of the part of one that is called `within`."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        every = get_model_conversion_mapping(model)
        return cls(
            tuple(one for one in every if isinstance(one, WeightRenaming)),
            tuple(one for one in every if isinstance(one, WeightConverter)),
            model.base_model_prefix,
            within,
        )

    @cached_property
    def by_pattern(self) -> dict[str, Any]:
        """Converters by each pattern of names that they take."""
        return {pattern: one for one in self.converters for pattern in one.source_patterns}

    def target(self, name: str, state: dict[str, Any]) -> tuple[str, str | None]:
        """What a tensor is called in the model, and the converter's pattern that it fits, if any.
        state: the model's own names."""
        from transformers.core_model_loading import rename_source_key

        if not name.startswith(self.within):
            return name, None
        renamings, converters = [*self.renamings], [*self.converters]
        found: tuple[str, str | None] = rename_source_key(
            name.removeprefix(self.within), renamings, converters, self.prefix, state
        )
        return found

    def held(self, name: str, state: dict[str, Any]) -> Held | None:
        """The parameter that a checkpoint tensor of this name is, as it is or transposed; None
        where there is none, or what is made of it is something else. state: see target."""
        from transformers.core_model_loading import Transpose

        target, pattern = self.target(name, state)
        if target not in state:
            return None
        transposes = [] if pattern is None else self.by_pattern[pattern].operations
        if not all(isinstance(operation, Transpose) for operation in transposes):
            return None
        return Held(target, tuple(transposes))


def splits(model: Any, names: Iterable[str], within: str = "") -> list[Split]:
    """The tensors that a model has as several parameters, cut by rows and else as they are.
    within: see Conversions."""
    from transformers.core_model_loading import Chunk
    from transformers.core_model_loading import Split as SplitRows

    conversions = Conversions.of(model, within)
    if all(len(one.target_patterns) == 1 for one in conversions.converters):
        return []
    state = model.state_dict()
    found = []
    for name in names:
        target, pattern = conversions.target(name, state)
        if pattern is None:
            continue
        converter = conversions.by_pattern[pattern]
        parts: list[str] = converter.target_patterns
        cuts = [type(one) for one in converter.operations]
        if len(parts) == 1 or cuts not in ([Chunk], [SplitRows]) or converter.operations[0].dim:
            continue
        every = tuple(target.replace(parts[0], part) for part in parts)
        if all(one in state for one in every):
            found.append(Split(name, every))
    return found
