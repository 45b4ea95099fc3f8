"""What smoothing is worth where activations have outliers that were put there on purpose.

    python tests/benchmarks/outliers.py MODEL TEXT [--calibration TEXT] [--sweep OUT.html]

A copy of a Llama, in float32, in which 4 channels of each norm of a block are 50 times as large and
what reads them is divided by 50: the function is the same, the inputs are not. It is quantized to
W8A8 with one stored scale an input, without smoothing and with it, from the same statistics. Mean
KL divergences from the original are printed, and their ratio (bar: at least 20; exit status 1 where
it is less).

--sweep also quantizes it with exponents 0.0, 0.1 ... 1.0, prints the divergence of each (bar: the
best between 0.3 and 0.8), and has `qtool report` draw them.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import commands
import numpy as np

from qtool.checkpoints.checkpoint import Checkpoint
from qtool.formats.safetensors_file import (
    Layout,
    StreamWriter,
    TensorSpec,
    from_float32,
    plan_shards,
)

CHANNELS, FACTOR = 4, 50.0
LEAST_RATIO = 20.0
SWEET = (0.3, 0.8)
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def plant(model: Path, out: Path) -> Path:
    """The copy with outliers."""
    checkpoint = Checkpoint.open(model)
    random = np.random.default_rng(0)
    factors: dict[str, np.ndarray] = {}
    for name, info in checkpoint.tensors.items():
        for norm, readers in READERS.items():
            prefix, found, _ = name.partition(f"{norm}.weight")
            if found:
                factor = np.ones(info.shape, np.float32)
                factor[random.choice(info.shape[0], CHANNELS, replace=False)] = FACTOR
                factors[name] = factor
                factors |= {f"{prefix}{reader}.weight": 1 / factor for reader in readers}
    shutil.copytree(model, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = "float32"
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    layout: Layout = plan_shards(
        [TensorSpec(name, "F32", info.shape) for name, info in checkpoint.tensors.items()], 1 << 33
    )
    writer = StreamWriter(out, layout)
    for name in checkpoint.tensors:
        values = checkpoint.float32(name) * factors.get(name, np.float32(1))
        writer.add(name, from_float32(values.astype(np.float32), "F32", name))
    writer.close()
    return out


def divergences(model: Path, artifacts: list[Path], given: argparse.Namespace) -> Path:
    """The JSON of `qtool compare`, in a file."""
    found = commands.run(
        [sys.executable, "-m", "qtool", "compare", *artifacts, "--against", model, "--text",
         given.text, "--windows", given.windows, "--no-cache", "--json"]
    )  # fmt: skip
    path = artifacts[0].parent / "compared.json"
    path.write_text(json.dumps(found.out), encoding="utf-8")
    return path


def klds(path: Path) -> dict[str, float]:
    """By the name of the artifact."""
    rows = json.loads(path.read_text(encoding="utf-8"))["artifacts"]
    return {Path(row["artifact"]).name: row["kld"]["mean"] for row in rows}


def main() -> None:
    """Print the figures, and say by the exit status whether they are good."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--sweep", type=Path, help="HTML page to draw exponents on")
    parser.add_argument("--set", action="append", default=[], help="of all recipes")
    given = parser.parse_args()
    good = True
    with tempfile.TemporaryDirectory() as folder:
        planted, stats = plant(given.model, Path(folder) / "planted"), Path(folder) / "stats"
        smooth = "w8a8-smoothquant-static"
        more: list[object] = ["--samples", given.samples, "--length", 256]
        more += ["--calibration", given.calibration] if given.calibration else []
        commands.run(
            [sys.executable, "-m", "qtool", "calibrate", planted, "-o", stats, "--recipe", smooth,
             *more, "--json"]
        )  # fmt: skip
        more = ["--stats", stats]
        more += [word for item in given.set for word in ("--set", item)]
        artifacts = [Path(folder) / name for name in ("w8a8-static", smooth)]
        for out in artifacts:
            commands.quantize(planted, out.name, out, *more)
        found = klds(divergences(given.model, artifacts, given))
        ratio = found["w8a8-static"] / found[smooth]
        good &= ratio >= LEAST_RATIO
        for name, kld in found.items():
            print(f"{name}: KLD {kld:.5f}")
        print(
            f"without smoothing {ratio:.1f} times that with it (bar: {LEAST_RATIO:g})", flush=True
        )
        if given.sweep is not None:
            swept = []
            for step in range(11):
                swept.append(Path(folder) / f"alpha-{step / 10:.1f}")
                alpha = f"smooth.alpha={step / 10:.1f}"
                commands.quantize(planted, smooth, swept[-1], *more, "--set", alpha)
            compared = divergences(given.model, swept, given)
            found = klds(compared)
            for name, kld in found.items():
                print(f"{name}: KLD {kld:.5f}")
            best = float(min(found, key=lambda name: found[name]).removeprefix("alpha-"))
            good &= SWEET[0] <= best <= SWEET[1]
            print(f"best exponent {best} (bar: {SWEET[0]} to {SWEET[1]})", flush=True)
            commands.measure(
                [sys.executable, "-m", "qtool", "report", *swept, "--eval", compared, "-o",
                 given.sweep]
            )  # fmt: skip
            if "What smooth.alpha does" not in given.sweep.read_text(encoding="utf-8"):
                good = False
                print(f"{given.sweep}: no sweep is drawn")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
