"""The hub of this process: huggingface_hub reads its environment once, when it is imported."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.hub import hub_server


@contextmanager
def hub_here(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    repositories: dict[str, Path],
    commits: dict[str, str] | None = None,
) -> Iterator[hub_server.HubServer]:
    """A server that is the hub, with an empty cache at tmp_path/cache and nobody logged in."""
    from huggingface_hub import constants

    for key in ("http_proxy", "HTTP_PROXY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setenv("QTOOL_CACHE", str(tmp_path / "qtool"))
    with hub_server.serve(repositories, commits) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.endpoint)
        template = constants.HUGGINGFACE_CO_URL_TEMPLATE.partition("{repo_id}")
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{server.endpoint}/{''.join(template[1:])}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nonexistent/token")
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", "/nonexistent/tokens")
        yield server
