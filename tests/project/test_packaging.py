"""What the wheel carries, and that the files which describe it agree with each other."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

import qtool
from support.places import ROOT, TESTS

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def files() -> list[str]:
    """The files of the installed package, relative to site-packages."""
    try:
        found = importlib.metadata.files("qtool")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("qtool runs from the checkout here and is not installed")
    assert found
    return [file.as_posix() for file in found if "__pycache__" not in file.as_posix()]


def under(folder: str) -> set[str]:
    """Python and data files of a folder of the checkout."""
    paths = (ROOT / folder).rglob("*")
    return {
        path.relative_to(ROOT / folder).as_posix()
        for path in paths
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


def test_wheel_maps_the_folders_into_one_package(files: list[str]) -> None:
    for folder, place in (("qtool", "qtool"), ("formats", "qtool/formats")):
        missing = {f"{place}/{name}" for name in under(folder)} - set(files)
        assert not missing
    recipes = {name for name in under("recipes") if name.endswith(".yaml")}
    assert recipes
    assert recipes == {Path(f).name for f in files if f.startswith("qtool/recipes/")}


def test_wheel_has_one_library_and_no_python_extension(files: list[str]) -> None:
    assert [f for f in files if f.endswith((".so", ".pyd", ".dylib"))] == [
        "qtool/libqtool_kernels.so"
    ]


def test_wheel_has_no_other_top_level_package(files: list[str]) -> None:
    tops = {f.split("/")[0] for f in files if not f.startswith("..")}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"qtool"}


def test_version_is_the_packages(files: list[str]) -> None:
    assert importlib.metadata.version("qtool") == qtool.__version__


def name_of(requirement: str) -> str:
    """A requirement's name as package indexes normalize it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~\[; ]", requirement)[0]).lower()


def test_constraints_pin_every_requirement() -> None:
    """One exact version each, from whatever index is configured: no addresses."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    pinned = {name_of(pin) for pin in pins}
    extras = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *extras["test"], *extras["dev"]]
    assert {name_of(requirement) for requirement in wanted} <= pinned
    assert "torch==2.13.0" in pins


def test_every_kernel_source_is_built() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    sources = {path.name for path in (ROOT / "kernels").glob("*.c")}
    assert sources == set(re.findall(r"kernels/(\w+\.c)", cmake))


def test_every_kernel_has_random_tasks() -> None:
    tables = [(ROOT / "kernels" / name).read_text() for name in ("ops.h", "gguf_ops.h")]
    kernels = set(re.findall(r"^ +X\((\w+),", "\n".join(tables), re.MULTILINE))
    cases = "".join(path.read_text() for path in (TESTS / "fuzz").glob("kernel_*.h"))
    assert len(kernels) > 10
    assert kernels <= set(re.findall(r"\bqt_(\w+)\(", cases))


def test_make_names_its_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    readme = (ROOT / "README.md").read_text()
    documented = set(re.findall(r"^ *make ([\w-]+) *(?:#|$)", readme, re.MULTILINE))
    assert {"demo", "test"} <= documented <= targets


def test_wheels_are_made_for_systems_that_it_runs_on() -> None:
    """Windows has no positioned reads and writes: WSL, until there is a way around them."""
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    made = {system for system in ("linux", "macos", "windows") if system in wheels}
    sources = [*(ROOT / "qtool").rglob("*.py"), *(ROOT / "formats").glob("*.py")]
    text = "".join(path.read_text(encoding="utf-8") for path in sources)
    posix = [name for name in ("os.pread(", "os.pwrite(", "os.preadv(") if name in text]
    assert made == {"linux", "macos"} | (set() if posix else {"windows"})
    assert ("*-win*" in wheels["skip"].split()) == bool(posix)
    systems = [line for line in PROJECT["classifiers"] if line.startswith("Operating System ::")]
    assert len(systems) == 2 and not any("Windows" in line for line in systems)
    for page in ("README.md", "CONTRIBUTING.md"):
        assert "WSL" in (ROOT / page).read_text(encoding="utf-8")
