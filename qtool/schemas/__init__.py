"""JSON Schemas of what the commands print with --json, one file each (draft 2020-12)."""

from importlib.resources import files

from qtool.errors import UsageError


def names() -> list[str]:
    """What there are schemas of: commands, and `inspect-tensor` for `inspect --tensor`."""
    found = [entry.name for entry in files(__name__).iterdir()]
    return sorted(name.removesuffix(".json") for name in found if name.endswith(".json"))


def text(name: str) -> str:
    """The schema as it is in the package; UsageError where there is none."""
    if name not in names():
        raise UsageError(f"{name}: no schema of that name; there are {', '.join(names())}")
    return files(__name__).joinpath(f"{name}.json").read_text(encoding="utf-8")
