"""The YAML at the head of a model card, read within bounds: what is beyond them says nothing.

People write it, so it is forgiven where a recipe is not; but it comes with a download, and YAML can
name one value a thousand million times, nest without an end, and hold dates that no calendar has.
"""

from typing import Any

MAX_CHARACTERS = 1 << 18
MAX_EVENTS = 50_000  # of the parser: a value is one, a list or a mapping two
MAX_DEPTH = 50


def read(text: str) -> dict[str, Any]:
    """The mapping that a text holds; {} where it is none, or cannot be read."""
    import yaml

    if len(text) > MAX_CHARACTERS:
        return {}
    # libyaml's, where PyYAML has it, is ten times as fast; it must never see deep nesting.
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        depth = 0
        for number, event in enumerate(yaml.parse(text, Loader=loader)):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            aliased = isinstance(event, yaml.AliasEvent)
            if aliased or depth > MAX_DEPTH or number > MAX_EVENTS:
                return {}
        found = yaml.load(text, Loader=loader)
    # The other two come from dates and characters that there are not.
    except (yaml.YAMLError, ValueError, OverflowError):
        return {}
    return found if isinstance(found, dict) else {}
