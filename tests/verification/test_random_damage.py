"""Damage drawn at random: `qtool verify` finds what changes what an engine computes, by itself or
beside the source; a statement of digests finds everything; no command ends in a traceback."""

import random
import shutil
from pathlib import Path

import pytest

from qtool.artifacts.artifact import Artifact
from qtool.checkpoints.checkpoint import Checkpoint
from qtool.cli.verify import lines
from qtool.formats.gguf_file import GgufFile
from qtool.gguf_types import FLOATS
from qtool.verification.finding import Verdict
from qtool.verification.run import verify_artifact
from support.runs import quantizing
from support.runs.quantizing import Called
from support.verification import random_damage
from support.verification.healthy_artifacts import ARTIFACTS, GGUF, Made, Make, copy_of, make
from support.verification.random_damage import Damage

__all__ = ["make"]

TARGETS = ("awq", "gptq", "gptq-v2", "compressed-tensors", "gguf", "gguf-q8_0", "hf")
# Settings that change nothing, or of which verify only warns: they may be meant.
IDLE = (
    "use_cache", "initializer_range", "attention_dropout", "dropout", "dtype", "quantizer",
    "router_aux_loss_coef", "max_position_embeddings", "context_length", "vocab_size",
    "bos_token_id", "eos_token_id", "pad_token_id", "layerdrop", "activation_dropout",
    # Of quantized heads and layers that are not there; how it was made; zeros that are stored.
    "lm_head", "ignore", "modules_to_not_convert", "llm_int8_skip_modules", "damp_percent",
    "static_groups", "quantization_status", "global_compression_ratio", "observer", "sym",
    "symmetric", "zero_point", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
    "output_activations", "true_sequential", "output_router_logits",
)  # fmt: skip
# Numbers that were measured when the artifact was made: nothing else knows them.
MEASURED = ("k_scale", "v_scale", "input_scale", "input_zero_point")


def forgiven(damage: Damage, name: str, stored: set[str]) -> bool:
    """Whether nothing but a digest can tell, or no engine computes anything else.

    stored: the tensors whose numbers are the source's.
    """
    kind, named = damage.kind, damage.named
    if kind == "scaled" and name == "awq-searched":
        return True  # folds are known up to a factor
    if kind == "flipped_bit":  # one code among thousands; where nothing is rounded, any is told
        return named not in stored
    if named.rpartition(".")[2] in MEASURED:
        return True
    if kind in ("quantization_changed", "config_changed", "gguf_key"):
        key = named.rpartition(".")[2]
        derived = key == "strategy left out"  # told by group_size
        return derived or key.removesuffix(" left out") in IDLE or named.startswith("general.")
    # Engines ignore or refuse tensors that they have no place for, and a head that is tied.
    return kind in ("doubled", "gguf_doubled", "head_differs", "trailing", "flipped_header")


def copied(healthy: Made) -> set[str]:
    """The tensors of an artifact that are stored as the source's are."""
    if healthy.path.is_file():
        with GgufFile.open(healthy.path) as file:
            return {name for name, info in file.tensors.items() if info.type in FLOATS}
    artifact = Artifact.open(healthy.path)
    there = artifact.checkpoint.tensors
    known = Checkpoint.open(healthy.source).tensors
    return {
        e.stored[0] for e in artifact.entries.values()
        if e.scheme is None and e.name in known and there[e.stored[0]].dtype == known[e.name].dtype
    }  # fmt: skip


def looked_at(path: Path, source: Path) -> tuple[Verdict, Verdict]:
    """Alone, and beside the source; what is printed is at most a page."""
    found = verify_artifact(path, threads=1), verify_artifact(path, against=source, threads=1)
    for verdict in found:
        printed = lines(verdict)
        assert len(printed) <= 50 and max(map(len, printed)) < 1500, printed
    return found


def damage_one(seed: int, names: tuple[str, ...], make: Make, folder: Path) -> str:
    """One artifact damaged, looked at; by what it was found."""
    rng = random.Random(seed)
    name = rng.choice(names)
    healthy = make(name)
    path = copy_of(healthy.path, folder)
    damage = random_damage.draw(rng, path)
    alone, beside = looked_at(path, healthy.source)
    where = f"seed {seed}, {name}: {damage}"
    if not alone.ok:
        return "alone"
    if not beside.ok:
        return "against"
    assert forgiven(damage, name, copied(healthy)), where
    return "digest"


@pytest.mark.filterwarnings("error")
def test_a_little_damage(make: Make, tmp_path: Path) -> None:
    found = set()
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        found.add(damage_one(seed, ("awq", "q4_0"), make, folder))
    assert found >= {"alone", "against"}


@pytest.mark.slow
@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("chunk", range(8))
def test_much_damage(chunk: int, make: Make, tmp_path: Path) -> None:
    for seed in range(1000 + 100 * chunk, 1100 + 100 * chunk):
        folder = tmp_path / str(seed)
        folder.mkdir()
        damage_one(seed, (*ARTIFACTS, *GGUF), make, folder)
        shutil.rmtree(folder)


def sentence_or_nothing(called: Called) -> bool:
    """Whether a command did its work, or said in one sentence why not, and on a page at most."""
    lines_ = called.out.splitlines()
    assert "Traceback" not in called.err and len(lines_) <= 90, called
    assert max(map(len, lines_), default=0) < 2000, called
    if called.status:
        told_ = [line for line in called.err.splitlines() if line.startswith("error: ")]
        assert called.status in (1, 2) and len(told_) == 1, called
    return called.status == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("chunk", range(4))
def test_no_command_ends_in_a_traceback(
    chunk: int,
    make: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And what convert makes of a damaged artifact says no more than that it has its numbers."""
    call = quantizing.caller(monkeypatch, capfd)
    text = quantizing.text_file(tmp_path / "text.txt", 4000)
    for seed in range(5000 + 25 * chunk, 5025 + 25 * chunk):
        rng = random.Random(seed)
        healthy = make(rng.choice((*ARTIFACTS, *GGUF)))
        folder = tmp_path / str(seed)
        folder.mkdir()
        path = copy_of(healthy.path, folder)
        random_damage.draw(rng, path)
        to = rng.choice(TARGETS)
        other = folder / ("other.gguf" if "gguf" in to else "other")
        sentence_or_nothing(call("inspect", path))
        sentence_or_nothing(call("diff", path, healthy.source))
        if sentence_or_nothing(call("convert", path, "--to", to, "-o", other)):
            assert call("diff", path, other).status == 0
        else:
            assert not other.exists()
        if rng.random() < 0.3:
            sentence_or_nothing(
                call("eval", path, "--against", healthy.source, "--text", text,
                     "--windows", 1, "--length", 32)
            )  # fmt: skip
        shutil.rmtree(folder)
