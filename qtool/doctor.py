"""What is installed, what of the machine is used, and what is missing: for `qtool doctor`.

Nothing heavy is imported: versions come from the packages' metadata, libraries are looked for and
not opened, and of a token only whether there is one is known.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import shutil
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from qtool import __version__
from qtool.errors import UnsupportedError
from qtool.memory import memory

_PACKAGES = (
    "torch", "transformers", "huggingface-hub", "hf-xet", "safetensors", "tokenizers", "gguf",
    "numpy", "pydantic", "pyarrow", "zstandard",
)  # fmt: skip
_OPTIONAL = ("hf-xet", "pyarrow", "zstandard")  # without which the rest does what it does
_ENGINES = ("vllm", "sglang", "gptqmodel", "compressed-tensors", "exllamav2", "mlx-lm")
_PROGRAMS = {
    "llama.cpp": ("llama-server", "llama-cli"),
    "ollama": ("ollama",),
    "lm studio": ("lms",),
}
_LITTLE_DISK = 20 << 30
_LITTLE_MEMORY = 4 << 30


@dataclass(frozen=True)
class Simd:
    """Instruction sets, the best one last; `library` is None where the kernels are missing."""

    library: str | None
    used: str | None
    available: list[str]
    threads: int
    amx: bool  # whether the CPU has products of bfloat16
    problem: str | None = None


@dataclass(frozen=True)
class Gpu:
    """What CUDA needs, as far as files tell."""

    driver: bool
    nvrtc: bool
    devices: list[str]


@dataclass(frozen=True)
class Hub:
    """How models are downloaded."""

    endpoint: str
    cache: str
    writable: bool
    offline: bool
    token: bool
    free_bytes: int


@dataclass(frozen=True)
class Examined:
    """All of it."""

    python: str
    platform: str
    packages: dict[str, str | None]
    simd: Simd
    gpu: Gpu
    engines: dict[str, str | None]  # a version, or the path of a program
    hub: Hub
    free_bytes: int  # in the working folder
    memory_bytes: int | None
    available_memory_bytes: int | None
    advice: list[str]

    def json(self) -> dict[str, Any]:
        """For --json."""
        return {"qtool": __version__, **asdict(self)}

    def rows(self) -> list[tuple[str, str]]:
        """For people."""
        simd, gpu, hub = self.simd, self.gpu, self.hub
        there = {name: found for name, found in self.engines.items() if found is not None}
        others = [name for name, found in self.engines.items() if found is None]
        devices = ", ".join(gpu.devices) or ("driver, no device seen" if gpu.driver else "none")
        memory = "not known"
        if self.memory_bytes is not None:
            memory = f"{_gb(self.memory_bytes)}, {_gb(self.available_memory_bytes or 0)} available"
        return [
            ("qtool", f"{__version__}, Python {self.python}, {self.platform}"),
            ("packages", ", ".join(f"{n} {v or 'missing'}" for n, v in self.packages.items())),
            (
                "kernels",
                simd.problem
                or f"{simd.used} of {', '.join(simd.available)}; {simd.threads} threads"
                + ("; the CPU has AMX" if simd.amx else ""),
            ),
            ("CUDA", f"{devices}; NVRTC {'found' if gpu.nvrtc else 'not found'}"),
            ("engines", ", ".join(f"{n} {v}" for n, v in there.items()) or "none"),
            ("not installed", ", ".join(others) or "-"),
            (
                "hub",
                f"{hub.endpoint}, token {'yes' if hub.token else 'no'}"
                + (", offline (HF_HUB_OFFLINE)" if hub.offline else ""),
            ),
            (
                "hub cache",
                f"{hub.cache}, {_gb(hub.free_bytes)} free"
                + ("" if hub.writable else ", not writable"),
            ),
            ("working folder", f"{_gb(self.free_bytes)} free"),
            ("memory", memory),
        ]


def examined() -> Examined:
    """Look at this machine."""
    packages = {name: _version(name) for name in _PACKAGES}
    simd, gpu, hub = _simd(), _gpu(), _hub()
    engines: dict[str, str | None] = {"transformers": packages["transformers"]}
    engines |= {name: _version(name) for name in _ENGINES}
    for name, programs in _PROGRAMS.items():
        paths = (shutil.which(program) for program in programs)
        engines[name] = next((path for path in paths if path is not None), None)
    free = shutil.disk_usage(Path.cwd()).free
    total, available = memory()
    found = Examined(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages=packages,
        simd=simd,
        gpu=gpu,
        engines=engines,
        hub=hub,
        free_bytes=free,
        memory_bytes=total,
        available_memory_bytes=available,
        advice=[],
    )
    found.advice.extend(_advice(found))
    return found


def _gb(nbytes: int) -> str:
    return f"{nbytes / 2**30:.1f} GiB"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _simd() -> Simd:
    from qtool.native import library

    threads = library.default_threads()
    try:
        path = library.library()._name
        return Simd(str(path), library.selected(), library.available(), threads, _amx())
    except (UnsupportedError, OSError) as error:
        return Simd(None, None, [], threads, _amx(), problem=str(error))


def _amx() -> bool:
    """Whether the system says that there are products of bfloat16 tiles."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return "amx_bf16" in said.split()


def _gpu() -> Gpu:
    proc = Path("/proc/driver/nvidia/gpus")
    names = []
    for file in sorted(proc.glob("*/information")):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "Model":
                names.append(value.strip())
    driver = ctypes.util.find_library("nvcuda" if sys.platform == "win32" else "cuda") is not None
    nvrtc = ctypes.util.find_library("nvrtc") is not None or any(
        (Path(root) / "nvrtc.py").is_file() or any(Path(root).glob("**/libnvrtc.so*"))
        for root in _package_folders("nvidia.cuda_nvrtc", "nvidia.cu13", "cuda.bindings")
    )
    return Gpu(driver or bool(names), nvrtc, names)


def _package_folders(*names: str) -> list[str]:
    """Where packages lie that are installed, without importing them themselves."""
    folders: list[str] = []
    for name in names:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            continue
        folders += [] if spec is None else list(spec.submodule_search_locations or ())
    return folders


def _hub() -> Hub:
    from huggingface_hub import constants, get_token

    from qtool.hub.answers import shown

    cache = Path(constants.HF_HUB_CACHE)
    there = next((folder for folder in (cache, *cache.parents) if folder.is_dir()), Path("/"))
    return Hub(
        endpoint=shown(constants.ENDPOINT),
        cache=str(cache),
        writable=os.access(there, os.W_OK),
        offline=bool(constants.HF_HUB_OFFLINE),
        token=get_token() is not None,
        free_bytes=shutil.disk_usage(there).free,
    )


def _advice(found: Examined) -> list[str]:
    """One sentence for each thing that will stand in the way."""
    said = []
    there = found.packages
    missing = [name for name in there if there[name] is None and name not in _OPTIONAL]
    if missing:
        said.append(f"{', '.join(missing)}: not installed; `pip install qtool` brings them")
    simd, hub = found.simd, found.hub
    if simd.library is None:
        said.append("without the kernel library nothing is quantized; see the line kernels")
    elif simd.used != simd.available[-1]:
        said.append(f"QTOOL_SIMD chooses {simd.used}, and {simd.available[-1]} is faster; unset it")
    elif simd.used == "scalar":
        said.append(
            "this processor has neither AVX2 nor NEON: quantizing takes several times longer"
        )
    if simd.amx:
        said.append(
            "this CPU has AMX: with torch 2.9 or later recipes that are calibrated are faster with "
            "`--set calibration.precision=bfloat16`"
        )
    if not hub.writable:
        said.append(f"{hub.cache} cannot be written; put the cache elsewhere with HF_HOME")
    if hub.offline:
        said.append("HF_HUB_OFFLINE is set: only models that are in the cache can be used")
    elif not hub.token:
        said.append(
            "nobody is logged in at the hub: gated models need `hf auth login` or HF_TOKEN, and "
            "the limit of requests is lower"
        )
    for what, free in (("the hub cache", hub.free_bytes), ("the working folder", found.free_bytes)):
        if free < _LITTLE_DISK:
            said.append(
                f"{what} has {_gb(free)} free; a model of 7 billion weights takes 13 GiB to "
                "download and 4 GiB quantized to 4 bits"
            )
    available = found.available_memory_bytes
    if available is not None and available < _LITTLE_MEMORY:
        said.append(
            f"{_gb(available)} of memory are available; `--max-ram` bounds what a run takes, and "
            "`qtool plan` says what it needs"
        )
    if found.gpu.driver and not found.gpu.nvrtc:
        said.append("there is a GPU and no NVRTC; CUDA kernels are compiled with it")
    return said
