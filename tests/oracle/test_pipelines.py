"""The documented pipelines beside the published schemas of GitHub's workflows and GitLab's jobs.

QTOOL_ORACLE_LINT names a Python that has check-jsonschema (0.37.4), which brings both schemas.
"""

import os
import subprocess
from pathlib import Path

import pytest

CI = Path(__file__).parents[2] / "docs" / "ci"


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("file", "options"),
    [
        ("github-actions.yml", ["--builtin-schema", "vendor.github-workflows"]),
        (
            "gitlab-ci.yml",
            ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci"],
        ),
    ],
)
def test_pipelines_fit_their_schemas(file: str, options: list[str], tmp_path: Path) -> None:
    python = os.environ.get("QTOOL_ORACLE_LINT")
    if not python:
        pytest.skip("QTOOL_ORACLE_LINT is not set: it names a Python that has check-jsonschema")

    def fits(path: Path) -> bool:
        words = [python, "-m", "check_jsonschema", *options, str(path)]
        return subprocess.run(words, capture_output=True, timeout=300).returncode == 0

    assert fits(CI / file)
    # A schema that lets everything pass would be none.
    broken = tmp_path / file
    text = (CI / file).read_text().replace("runs-on:", "run-on:").replace("  script:", "  skript:")
    broken.write_text(text)
    assert not fits(broken)
