"""`qtool verify --strict` fails where something is in doubt, too."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from qtool.cli.main import app

NO_DIGEST = "--strict: fails for bytes that no digest vouches for"


def qtool(*words: object) -> Result:
    return CliRunner().invoke(app, [*map(str, words)])


@pytest.mark.parametrize(
    ("recipe", "damage", "said"),
    [
        ("w4g128-rtn", None, None),
        ("w4g128-rtn", "record", NO_DIGEST),
        ("w4g128-rtn", "model_type", "--strict: fails for 2 warnings"),
        ("q4_0", None, NO_DIGEST),
    ],
)
def test_strict_fails_for_doubts(
    recipe: str, damage: str | None, said: str | None, tmp_path: Path
) -> None:
    out = tmp_path / ("x.gguf" if recipe == "q4_0" else "x")
    assert qtool("quantize", "tiny", "--recipe", recipe, "-o", out).exit_code == 0
    if damage == "record":
        (out / "qtool.json").unlink()
    elif damage is not None:
        config = json.loads((out / "config.json").read_text()) | {damage: "foo"}
        (out / "config.json").write_text(json.dumps(config))
    loose, strict = qtool("verify", out), qtool("verify", out, "--strict")
    assert loose.exit_code == 0 and "--strict" not in loose.stdout
    assert strict.exit_code == (said is not None)
    last = strict.stdout.splitlines()[-1]
    assert last == said if said else last.endswith("nothing wrong")
    assert qtool("verify", out, "--strict", "--json").exit_code == strict.exit_code
