"""Bytecode cut off by a full disk, and Ctrl-C before the command line is imported."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, runpy, signal, sys
class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "qtool.cli.quantize":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupts())
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["qtool", "--version"]
runpy.run_module("qtool", run_name="__main__")
"""


@pytest.mark.parametrize(
    "module", ["qtool/cli/plan.py", "qtool/recipe/recipe.py", "qtool/cli/__init__.py"]
)
@pytest.mark.parametrize("damage", [slice(0, 200), slice(0, 17)])
def test_the_folder_to_remove_is_named(module: str, damage: slice, tmp_path: Path) -> None:
    """Of a module that the command line imports, or a command when it runs."""
    words = [sys.executable, "-m", "qtool", "recipes", "--json"]
    kept = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path)}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    assert subprocess.run(words, capture_output=True, env=kept).returncode == 0
    name = module.replace(".py", f".{sys.implementation.cache_tag}.pyc")
    (file,) = (p for p in tmp_path.rglob(Path(name).name) if str(p).endswith(name))
    file.write_bytes(file.read_bytes()[damage])
    done = subprocess.run(words, capture_output=True, text=True, env=kept)
    assert (done.returncode, done.stdout) == (1, "")
    expected = f"error: {file}: Python kept this file damaged, as where the disk was full; "
    assert done.stderr == (f"{expected}remove the folder {file.parent}, which Python makes anew\n")
    file.unlink()
    assert subprocess.run(words, capture_output=True, env=kept).returncode == 0


def test_ctrl_c_while_the_command_line_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGINT, "", "")
