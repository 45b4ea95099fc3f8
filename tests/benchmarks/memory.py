r"""Peak memory of `qtool quantize` on synthetic Llamas: flat over depth, and known at real width.

    python tests/benchmarks/memory.py [--recipe R]... [--layers 4 16 64] [--samples 16] \
        [--length 512]
    python tests/benchmarks/memory.py --wide [--recipe R]...

Without --wide: Llamas 512 wide that differ in the number of layers only; their peak resident
memory must differ by less than 5 % (exit status 1 where it does not). With --wide: two layers as
wide as Llama 7B's (4096/11008, 32 heads); prints peak memory (bar: under 6 GiB), minutes a layer,
and what `qtool plan` predicts for 32 such layers, and what `qtool verify --against` took; last, of
`qtool fit`, where a recipe calibrates. Weights are random; the
vocabulary and tokenizer are those of the shipped model, so that calibration text is at hand
offline.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

import commands
import numpy as np

import qtool
from qtool.formats.safetensors_file import (
    Layout,
    StreamWriter,
    TensorSpec,
    from_float32,
    plan_shards,
)
from qtool.recipe.recipe import load

TINY = Path(qtool.__file__).parent / "tiny"
SHARD_BYTES = 500_000_000
MOST_DIFFERENT = 0.05
MOST_AT_WIDTH = 6 << 30


def config(hidden: int, inner: int, heads: int, kv_heads: int, layers: int) -> dict[str, object]:
    """config.json of a Llama with an untied head."""
    vocabulary = json.loads((TINY / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "vocab_size": vocabulary,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


def specs(shape: dict[str, object]) -> list[TensorSpec]:
    """The tensors of such a model, in bfloat16."""
    hidden, inner, vocabulary = (
        int(str(shape[key])) for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    kv = hidden * int(str(shape["num_key_value_heads"])) // int(str(shape["num_attention_heads"]))
    found = [("model.embed_tokens", (vocabulary, hidden))]
    for layer in range(int(str(shape["num_hidden_layers"]))):
        block = f"model.layers.{layer}"
        found += [
            (f"{block}.input_layernorm", (hidden,)),
            (f"{block}.self_attn.q_proj", (hidden, hidden)),
            (f"{block}.self_attn.k_proj", (kv, hidden)),
            (f"{block}.self_attn.v_proj", (kv, hidden)),
            (f"{block}.self_attn.o_proj", (hidden, hidden)),
            (f"{block}.post_attention_layernorm", (hidden,)),
            (f"{block}.mlp.gate_proj", (inner, hidden)),
            (f"{block}.mlp.up_proj", (inner, hidden)),
            (f"{block}.mlp.down_proj", (hidden, inner)),
        ]
    found += [("model.norm", (hidden,)), ("lm_head", (vocabulary, hidden))]
    return [TensorSpec(f"{name}.weight", "BF16", size) for name, size in found]


def write_model(
    folder: Path, shape: dict[str, object], wanted: list[TensorSpec] | None = None
) -> Path:
    """A checkpoint of random numbers, one tensor in memory at a time; by default those of specs."""
    folder.mkdir(parents=True)
    wanted = wanted or specs(shape)
    rng = np.random.default_rng(0)
    with StreamWriter(folder, plan_shards(wanted, SHARD_BYTES)) as writer:
        for spec in wanted:
            values = rng.standard_normal(spec.shape, dtype=np.float32)
            values *= 0.02 if len(spec.shape) == 2 else 0.1
            if len(spec.shape) == 1:
                values += 1
            writer.add(spec.name, from_float32(values, spec.dtype, spec.name))
    return add_files(folder, shape)


def write_headers(folder: Path, shape: dict[str, object]) -> Path:
    """The same without data: enough for `qtool plan`, and no room on the disk."""
    folder.mkdir(parents=True)
    layout: Layout = plan_shards(specs(shape), SHARD_BYTES)
    for file in layout.files:
        with (folder / file.name).open("wb") as out:
            out.write(file.header)
            out.truncate(file.size)
    if layout.index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(layout.index))
    return add_files(folder, shape)


def add_files(folder: Path, shape: dict[str, object]) -> Path:
    (folder / "config.json").write_text(json.dumps(shape, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, folder / name)
    return folder


def remove(artifact: Path) -> None:
    if artifact.is_dir():
        shutil.rmtree(artifact)
    else:
        artifact.unlink()


def mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"


def depths(work: Path, recipes: list[str], layers: list[int], more: list[object]) -> bool:
    """Quantize models of several depths; whether every recipe's peaks are alike."""
    good = True
    peaks: dict[str, dict[int, int]] = {recipe: {} for recipe in recipes}
    for count in layers:
        model = write_model(work / f"{count}", config(512, 1408, 8, 4, count))
        for recipe in recipes:
            done = commands.quantize(model, recipe, work / "out", *more)
            remove(work / "out")
            peaks[recipe][count] = done.peak
            print(f"{recipe}, {count} layers: {mib(done.peak)}, {done.wall:.1f} s", flush=True)
        shutil.rmtree(model)
    for recipe, found in peaks.items():
        spread = max(found.values()) / min(found.values()) - 1
        said = "" if spread < MOST_DIFFERENT else f", more than {MOST_DIFFERENT:.0%}"
        print(f"{recipe}: peak memory differs by {spread:.1%}{said}")
        good &= spread < MOST_DIFFERENT
    return good


def wide(work: Path, recipes: list[str], more: list[object]) -> bool:
    """Quantize two layers of Llama 7B's width; whether memory stays below the bar."""
    layers, good = 2, True
    model = write_model(work / "wide", config(4096, 11008, 32, 32, layers))
    deep = write_headers(work / "wide-32", config(4096, 11008, 32, 32, 32))
    for recipe in recipes:
        given = more if load(recipe).calibrates else []
        done = commands.quantize(model, recipe, work / "out", *given)
        against = [work / "out", "--against", model]
        verified = commands.measure([sys.executable, "-m", "qtool", "verify", *against])
        remove(work / "out")
        minutes = float(done.out["seconds"]["total"]) / layers / 60
        samples = []
        for key, value in zip(given[::2], given[1::2], strict=True):
            if key in ("--samples", "--length"):
                samples += ["--set", f"calibration.{str(key)[2:]}={value}"]
        planned = commands.run(
            [sys.executable, "-m", "qtool", "plan", deep, "--recipe", recipe, *samples, "--json"]
        ).out
        good &= done.peak < MOST_AT_WIDTH
        print(
            f"{recipe}: peak {mib(done.peak)} ({'under' if done.peak < MOST_AT_WIDTH else 'OVER'} "
            f"{mib(MOST_AT_WIDTH)}), {minutes:.2f} minutes a layer, so {32 * minutes:.0f} minutes "
            f"for 32; plan predicts {mib(planned['peak_rss_bytes'])} and "
            f"{planned['seconds'] / 60:.0f} minutes for 32\n  seconds {done.out['seconds']}\n"
            f"  verify --against: peak {mib(verified.peak)}, {verified.wall:.1f} s",
            flush=True,
        )
    if not any(load(recipe).calibrates for recipe in recipes):
        return good
    words = ["fit", model, "--bits", 4.5, *more, "-o", work / "fit.yaml", "--json"]
    done = commands.run([sys.executable, "-m", "qtool", *words])
    print(f"fit: peak {mib(done.peak)}, {done.wall / layers / 60:.2f} minutes a layer")
    return good and done.peak < MOST_AT_WIDTH


def main() -> None:
    """Run one of the two benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--recipe", action="append", help="default: w4g128-awq and w4g128-gptq")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, help="where models are made; default: a temporary one")
    given = parser.parse_args()
    recipes = given.recipe or ["w4g128-awq", "w4g128-gptq"]
    more: list[object] = ["--samples", given.samples, "--length", given.length]
    if given.threads:
        more += ["--threads", given.threads]
    with tempfile.TemporaryDirectory(dir=given.work) as name:
        work = Path(name)
        good = (
            wide(work, recipes, more) if given.wide else depths(work, recipes, given.layers, more)
        )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
