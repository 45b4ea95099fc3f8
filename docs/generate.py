"""The pages of docs/ that are made from the program itself: recipes.md and cli.md.

python docs/generate.py            write them (`make docs`)
python docs/generate.py --check    exit with 1 where they are not up to date
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.recipe import listing, recipe

HERE = Path(__file__).parent
OVERRIDES = """\
## Overrides

| | in a recipe for safetensors | in a recipe for GGUF |
|---|---|---|
| names are those | of the checkpoint: `model.layers.0.mlp.down_proj` | of the GGUF file: \
`blk.0.ffn_down.weight` |
| `match` is | a shell pattern of the whole name, with or without `.weight` | a regular expression \
found anywhere in the name; with a star in front a shell pattern of the whole |
| one kind of matrix | `"*.down_proj"` | `ffn_down` |
| the first four blocks | `"*.layers.[0-3].*"` | `blk\\.[0-3]\\.` |
| where several match | the last one counts, key by key | the first one counts |
| it says | `weights: {bits: 8}` or `dense: true` | `type: q6_k` or `dense: true` |"""
MADE = "<!-- made by `make docs`: change what it is made of -->"


def commands() -> list[str]:
    """The names, in the order of the help."""
    return list(get_command(app).commands)  # type: ignore[attr-defined]


def help_of(*words: str) -> str:
    """What --help prints at a width of 100."""
    # Click reads the width of a terminal from COLUMNS, and takes two columns for a margin.
    runner = CliRunner(env={"COLUMNS": "102", "TERM": "dumb"})
    said = runner.invoke(app, [*words, "--help"], prog_name="qtool", terminal_width=100)
    assert said.exit_code == 0, said.output
    return "\n".join(line.rstrip() for line in said.stdout.strip("\n").splitlines())


def cli_page() -> str:
    """Every command's help."""
    parts = [MADE, "# Commands", _block(help_of())]
    for name in commands():
        parts += [f"## qtool {name}", _block(help_of(name))]
    parts.append(
        "Every command but `schema` takes `--json`; `qtool schema COMMAND` prints the JSON Schema "
        "of what\nit prints then. Exit status: 0 done, 1 failed (stdout is empty, one sentence on "
        "stderr says why) or\nmeasured and found wanting (which is printed), 2 the command line "
        "itself is wrong, 130, 143 or 129\nended by a signal."
    )
    return "\n\n".join(parts) + "\n"


def recipes_page() -> str:
    """What ships, and every key that a recipe may have."""
    parts = [
        MADE,
        "# Recipes",
        "`qtool recipes NAME` prints one; a file of your own, as short as these, goes wherever a "
        "name goes.\n`--set key=value` puts a value over a recipe's own: "
        "`--set weights.group_size=64`.",
    ]
    for group, items in listing.by_group():
        parts.append(f"## {group[0].upper()}{group[1:]}")
        rows = ["| recipe | what it is for |", "|---|---|"]
        rows += [f"| `{item.name}` | {_cell(item.about)} |" for item in items]
        parts.append("\n".join(rows))
    parts.append(OVERRIDES)
    schema = recipe.schema()["$defs"]
    for title, name in (
        ("Keys of a recipe for safetensors", "Recipe"),
        ("Keys of a recipe for GGUF", "GgufRecipe"),
    ):
        parts.append(f"## {title}")
        rows = ["| key | values | default | meaning |", "|---|---|---|---|"]
        rows += [f"| {' | '.join(map(_cell, row))} |" for row in _keys(schema[name], schema, "")]
        parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _keys(
    table: dict[str, Any], schema: dict[str, Any], prefix: str
) -> Iterator[tuple[str, str, str, str]]:
    """Rows of a table: name with dots, type, default, description; tables inside it follow.

    Nothing of a key that can have no value but its default.
    """
    required = table.get("required", [])
    for key, field in table.get("properties", {}).items():
        if "const" in field and field.get("default") == field["const"]:
            continue
        inner, is_list = _table_in(field, schema)
        default = "required" if key in required else _default(field, inner is not None)
        about = field.get("description") or (inner or {}).get("description") or ""
        about = " ".join(about.split("\n\n")[0].split())
        yield f"`{prefix}{key}`", _kind(field, schema), default, about
        if inner is not None:
            yield from _keys(inner, schema, f"{prefix}{key}{'[]' if is_list else ''}.")


def _table_in(field: dict[str, Any], schema: dict[str, Any]) -> tuple[dict[str, Any] | None, bool]:
    """The table that a key holds, or of which it holds a list."""
    for one in (field, *field.get("anyOf", ()), *field.get("allOf", ())):
        if "$ref" in one:
            found = schema[one["$ref"].rpartition("/")[2]]
            if found.get("properties"):
                return found, False
        if one.get("type") == "array" and "$ref" in one.get("items", {}):
            found = schema[one["items"]["$ref"].rpartition("/")[2]]
            if found.get("properties"):
                return found, True
    return None, False


def _kind(field: dict[str, Any], schema: dict[str, Any]) -> str:
    """What values a key takes."""
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"] if value is not None)
    if "const" in field:
        return f"`{field['const']}`"
    if "$ref" in field:
        found = schema[field["$ref"].rpartition("/")[2]]
        return _kind(found, schema) if "enum" in found else "table"
    for key in ("anyOf", "allOf"):
        if key in field:
            kinds = [_kind(one, schema) for one in field[key] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(kinds))
    if field.get("type") == "array":
        items = field.get("items")
        return f"list of {_kind(items, schema)}".replace("table", "tables") if items else "list"
    bounds = [
        f"{sign} {field[name]}"
        for name, sign in (
            ("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"),
            ("maximum", "<="),
        )
        if name in field
    ]  # fmt: skip
    names = {"string": "text", "boolean": "true, false"}
    return " ".join([names.get(str(field.get("type")), str(field.get("type"))), *bounds])


def _default(field: dict[str, Any], is_table: bool) -> str:
    value = field.get("default")
    if value is None or is_table or value in ([], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _block(text: str) -> str:
    return "\n".join(f"    {line}".rstrip() for line in text.splitlines())


PAGES = {"recipes.md": recipes_page, "cli.md": cli_page}


def main() -> None:
    """Write the pages, or compare them."""
    stale = []
    for name, make in PAGES.items():
        path = HERE / name
        content = make()
        if path.is_file() and path.read_text(encoding="utf-8") == content:
            continue
        if "--check" in sys.argv:
            stale.append(name)
        else:
            path.write_text(content, encoding="utf-8")
            print(f"written: docs/{name}")
    if stale:
        sys.exit(f"docs: {', '.join(stale)} not up to date; run `make docs`")


if __name__ == "__main__":
    main()
