"""Folders in layers: each imports from those below it alone, as docs/how-it-works.md lists them."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Lowest first; a name with .py is a file beside the folders.
LAYERS = (
    "bytecode.py", "lazy_numpy.py", "errors.py", "memory.py", "gguf_types.py", "float_codes.py",
    "scheme.py", "messages", "native", "formats", "planned.py", "record.py", "gguf_mixtures",
    "recipe", "homes", "hub", "checkpoints", "workspaces", "texts", "artifacts",
    "native_gguf.py", "grid.py", "small_floats.py", "dequantize.py", "engine_commands.py",
    "cuda", "streaming", "methods", "calibrating", "transforms", "inspecting", "provenance",
    "gguf", "remote", "quality", "verification", "planning", "gradients", "diff", "runs",
    "blockwise", "doctor.py", "report", "cards", "publishing", "converting", "quantizing",
    "generating", "benching", "reproduce", "matrix", "fitting", "api", "schemas", "cli",
    "__main__.py",
)  # fmt: skip
# Whoever opens a source that is quantized already sees it as `convert` would write it.
AS_CONVERTED = "qtool.converting.source"
OPENING = (
    "gguf/open.py", "runs/zeros.py",
    "verification/against/rotated.py", "verification/gguf/checks.py",
)  # fmt: skip


def _sources() -> Iterator[tuple[str, str, ast.Module]]:
    """The layer of each file, its path below qtool/, and what it says."""
    for base in (ROOT / "qtool", ROOT / "formats"):
        for file in sorted(base.rglob("*.py")):
            path = file.relative_to(base).as_posix()
            if base.name == "formats":
                path = f"formats/{path}"
            if path not in ("__init__.py", "tiny/train.py", "tiny/__init__.py"):
                yield path.split("/")[0], path, ast.parse(file.read_text())


def _imported(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Modules of ours that are imported anywhere, and whether within a function."""
    inner = {
        id(one)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        for one in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [f"{node.module}.{name.name}" for name in node.names]
        else:
            continue
        yield from ((name, id(node) in inner) for name in found if name.startswith("qtool."))


def _layer(module: str) -> str | None:
    first = module.split(".")[1]
    return next((one for one in (first, f"{first}.py") if one in LAYERS), None)


def test_every_folder_imports_from_those_below_it() -> None:
    place = {layer: number for number, layer in enumerate(LAYERS)}
    seen, wrong = 0, []
    for layer, path, tree in _sources():
        for module, lazily in _imported(tree):
            below = _layer(module)
            if below is None:  # a name of qtool itself, such as its version
                continue
            seen += 1
            if module.startswith(AS_CONVERTED) and path in OPENING and lazily:
                continue
            if place[below] > place[layer]:
                wrong.append(f"{path} imports {module}")
    assert seen > 2000
    assert not wrong


def test_the_page_lists_them_from_the_highest() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text()
    rows = re.findall(r"^\| (`qtool/.*|`formats/.*?) \| ", page, re.MULTILINE)
    listed = [
        name
        for row in rows
        for name in re.findall(r"`(?:qtool/)?(\w+)/`", row.split(" | ")[0])
        if name != "kernels"
    ]
    folders = [layer for layer in LAYERS if "." not in layer and layer != "schemas"]
    assert listed == list(reversed(folders))
