"""What the shell offers for a word that is begun: names of recipes, models, engines, schemas.

`qtool --install-completion` writes it into the shell's settings; `qtool --show-completion` prints
it. Each function takes the word so far, imports as little as it can, and is quick.
"""

from pathlib import Path


def recipe_names(incomplete: str) -> list[str]:
    """Shipped recipes; a list with commas is completed at its end."""
    import qtool

    before, comma, word = incomplete.rpartition(",")
    folders = [Path(root) / "recipes" for root in qtool.__path__]
    names = {path.stem for folder in folders for path in folder.glob("*.yaml")}
    return [before + comma + name for name in sorted(names) if name.startswith(word.lower())]


def models(incomplete: str) -> list[str]:
    """Names that qtool knows; folders and files are the shell's own."""
    from qtool.hub import ALIASES, TINY

    return [name for name in (TINY, *ALIASES) if name.startswith(incomplete)]


def engines(incomplete: str) -> list[str]:
    """Engines whose rules qtool knows."""
    names = ("vllm", "sglang", "transformers", "llama.cpp", "exllama", "mlx-lm")
    return [name for name in names if name.startswith(incomplete)]


def targets(incomplete: str) -> list[str]:
    """What `qtool convert` makes."""
    from qtool.converting.targets import TARGETS

    return sorted(name for name in TARGETS if name.startswith(incomplete))


def schemas(incomplete: str) -> list[str]:
    """What `qtool schema` prints."""
    from qtool import schemas as known

    return [name for name in known.names() if name.startswith(incomplete)]
