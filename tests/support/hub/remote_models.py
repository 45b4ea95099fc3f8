"""Models on a server of this machine that is also the hub."""

from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from qtool.cli.main import app
from qtool.errors import QtoolError
from qtool.formats.safetensors_file import TensorSpec, lay_out
from qtool.remote.open import opened
from support.hub import range_server
from support.hub.range_server import RangeServer, Virtual

SMALL = lay_out("m", [TensorSpec("a.weight", "F16", (4, 8)), TensorSpec("b", "F32", (2,))])
SAFETENSORS = Virtual(SMALL.header, SMALL.size)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[RangeServer]:
    """One that is also the hub."""
    for key in ("http_proxy", "HTTP_PROXY", "HF_TOKEN"):
        monkeypatch.delenv(key, raising=False)
    with range_server.serve({}) as running:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{repo_id}")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{running.url}/{''.join(template[1:])}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        yield running


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["inspect", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refusal(address: str) -> str:
    with pytest.raises(QtoolError) as caught, opened(address):
        pass
    return str(caught.value)
