"""What AutoRound writes in its own format is read to the codes, zeros, scales and float16 weights
that its own torch layers make of it; verify, diff and convert take it for what it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from qtool.artifacts.artifact import Artifact
from qtool.hub import resolve
from qtool.scheme import GroupQuant
from qtool.verification.run import verify_artifact
from support.converting.converting import converted

pytestmark = [pytest.mark.oracle, pytest.mark.slow]

DENSE = {"bits": 16}
LAYERS = {
    "down_proj": {"bits": 8}, "layers.1.*o_proj": DENSE, "lm_head": {"bits": 8, "group_size": 64},
}  # fmt: skip


def case(bits: int, packing: str, *, sym: bool, size: int = 128, **more: Any) -> list[Any]:
    return [{"bits": bits, "group_size": size, "sym": sym, **more}, packing]


CASES: dict[str, list[Any]] = {
    **{f"w{bits}": case(bits, "auto_round", sym=True) for bits in (2, 3, 4, 8)},
    **{f"w{bits}-zeros": case(bits, "auto_round", sym=False) for bits in (2, 3, 8)},
    "w4-zeros": case(4, "auto_round:gptqmodel", sym=False),
    "w4-channel": case(4, "auto_round", sym=True, size=-1),
    "w4-zeros-less": case(4, "auto_round:auto_gptq", sym=False, size=64),
    "awq": case(4, "auto_round:auto_awq", sym=False),
    "awq-sym": case(4, "auto_round:auto_awq", sym=True, size=64),
    "mixed": case(4, "auto_round", sym=True, layer_config=LAYERS),
}
Seen = dict[str, tuple[Path, dict[str, np.ndarray]]]


@pytest.fixture(scope="module")
def seen(auto_round: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """case -> (artifact, what AutoRound's layers make of it); one start of the oracle for all."""
    out = tmp_path_factory.mktemp("auto_round")
    request = {"model": str(resolve("tiny")), "out": str(out), "cases": CASES}
    places = auto_round("auto_round_weights.py", request, {"AR_ALLOW_W8_ASYM": "1"})
    return {name: (Path(path), load_file(out / f"{name}.safetensors"))
            for name, path in places.items()}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_same_codes_zeros_and_weights(name: str, seen: Seen) -> None:
    path, theirs = seen[name]
    artifact = Artifact.open(path)
    found = 0
    for module in {key.rpartition(".")[0] for key in theirs}:
        ours = artifact.read(f"{module}.weight")
        assert isinstance(ours, GroupQuant)
        zero, scale = (each[:, ours.group_index()] for each in (ours.zero, ours.scale))
        weight, steps = (theirs[f"{module}.{what}"].T for what in ("weight", "steps"))
        np.testing.assert_array_equal(zero, theirs[f"{module}.zero"].T, err_msg=module)
        np.testing.assert_array_equal(ours.codes.astype(int) - zero, steps, err_msg=module)
        np.testing.assert_array_equal(scale * steps, weight, err_msg=module)
        np.testing.assert_array_equal(ours.dequantize().astype(np.float16), weight, err_msg=module)
        found += 1
    assert found == sum(isinstance(e.scheme, object) and e.scheme is not None
                        for e in artifact.entries.values()) >= 25  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_wrong_with_them(name: str, seen: Seen) -> None:
    verdict = verify_artifact(seen[name][0], against=resolve("tiny"), threads=1)
    assert not [f for f in verdict.findings if f.severity == "error"], verdict.findings


@pytest.mark.parametrize(
    ("name", "to"),
    [("w4", "gptq"), ("w4", "awq"), ("w4", "gguf"), ("awq", "gptq-v2"), ("w3-zeros", "gptq-v2"),
     ("w8", "compressed-tensors"), ("w2-zeros", "compressed-tensors")],
)  # fmt: skip
def test_conversion_changes_no_number(name: str, to: str, seen: Seen, tmp_path: Path) -> None:
    out = tmp_path / ("out.gguf" if to == "gguf" else "out")
    converted(seen[name][0], to, out)
    if to == "gguf":
        converted(out, "hf", out := tmp_path / "out", dtype="float32")
    found, expected = (dict(Artifact.open(path).dequantized()) for path in (out, seen[name][0]))
    assert found.keys() == expected.keys()
    for tensor, weight in expected.items():
        np.testing.assert_array_equal(found[tensor], weight, err_msg=tensor)
