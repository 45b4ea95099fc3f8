"""A matrix under another one's name is told by what it is."""

from pathlib import Path

import pytest
from gallery import raw
from quantizing import quantize
from verifying import forget_digests

from qtool import tiny
from qtool.verification.run import verify_artifact

TINY = Path(tiny.__file__).parent
Q, OUT = "model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.o_proj"


def exchange(folder: Path, *modules: str) -> None:
    """Each of the modules gets the tensors of the one before it."""
    with raw.edited(folder) as tensors:
        parts = [
            {n[len(m) :]: tensors[n] for n in tensors if n.startswith(m + ".")} for m in modules
        ]
        for module, part in zip(modules, [parts[-1], *parts[:-1]], strict=True):
            for end, tensor in part.items():
                tensors[module + end] = tensor


@pytest.mark.parametrize("recipe", ["w4g128-rtn", "w2g64-gptq", "fp8-dynamic", "w4g128-awq"])
def test_what_it_is_instead(recipe: str, tmp_path: Path) -> None:
    out = tmp_path / "x"
    few = [] if recipe in ("w4g128-rtn", "fp8-dynamic") else ["samples=4", "length=64"]
    quantize(TINY, recipe, out, *(f"calibration.{one}" for one in few))
    forget_digests(out)
    healthy = verify_artifact(out, against=TINY)
    assert "swapped" in healthy.checks and not [f for f in healthy.findings if f.check == "swapped"]
    exchange(out, Q.format(0), Q.format(2), OUT.format(1))
    (one,) = [f for f in verify_artifact(out, against=TINY).findings if f.check == "swapped"]
    assert one.severity == "error"
    assert one.message.startswith("3 matrices stand under names of another: ")
    for here, there in ((Q.format(0), OUT.format(1)), (Q.format(2), Q.format(0))):
        assert f"{here}.weight is the source's {there}.weight" in one.message
