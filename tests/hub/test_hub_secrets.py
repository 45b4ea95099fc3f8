"""What is never printed: the user and the password in HF_ENDPOINT, and the token."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import qtool
from qtool import hub
from qtool.hub.failures import explained
from support.hub import hub_server

PACKAGES = Path(qtool.__file__).parent.parent
PASSWORD = "SECRETPW"
# huggingface_hub reads its environment when it is imported, so in a process of its own.
COMMANDS = """
import json, sys
from qtool.cli.main import main
for words in json.loads(sys.argv[1]):
    print("$", *words, flush=True)
    sys.argv = ["qtool", *words]
    try:
        main()
    except SystemExit as error:
        print("status", error.code, flush=True)
"""


def said(server: hub_server.HubServer, folder: Path, *commands: str) -> str:
    """All that the commands print."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    made = subprocess.run(
        [sys.executable, "-c", COMMANDS, json.dumps([one.split() for one in commands])],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
        env=kept
        | {
            "HF_ENDPOINT": server.endpoint.replace("://", f"://ann:{PASSWORD}@"),
            "HF_HOME": str(folder / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            "HF_TOKEN": hub_server.TOKEN,
            "QTOOL_CACHE": str(folder / "qtool"),
            "PYTHONPATH": os.pathsep.join([str(PACKAGES), kept.get("PYTHONPATH", "")]),
        },
    )
    assert made.returncode == 0, made.stderr
    return made.stdout + made.stderr


def test_the_password_of_the_endpoint(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(hub.tiny_folder(), source)
    with hub_server.serve({"ann/tiny": source, "ann/gated": source}) as server:
        server.uploads = tmp_path / "uploads"
        server.uploads.mkdir()
        # What an address with a user makes of the token: the server sees these alone.
        server.owners["Basic YW5uOlNFQ1JFVFBX"] = "ann"
        server.refusals["resolve/"] = hub_server.Refusal(503, 1)
        found = said(
            server,
            tmp_path,
            "download ann/gated",
            "download ann/nothing",
            "download ann/tiny --json",
            "quantize ann/tiny --recipe w4g128-rtn -o a --log-file log",
            "push a ann/x",
            "push a ann/x --json",
            "push a ann/tiny",
            "inspect ann/x",
            "inspect ann/nothing",
            "doctor",
            "doctor --json",
        )
        server.refusals[""] = hub_server.Refusal(500, 999)
    found += said(server, tmp_path, "download ann/other", "push a ann/x", "inspect ann/other")
    assert "is gated, and the account of your token has no access: " in found
    assert f"page ({server.endpoint}/ann/gated)" in found
    assert f'"url": "{server.endpoint}/ann/x"' in found and f"{server.endpoint}/ann/x: " in found
    assert found.count("cannot be reached") >= 1 and "ann/tiny" in (tmp_path / "log").read_text()
    for text in (found, (tmp_path / "log").read_text()):
        for secret in (PASSWORD, "YW5uOlNFQ1JFVFBX", hub_server.TOKEN):
            assert [line for line in text.splitlines() if secret in line] == []


def test_lines_of_the_library_below() -> None:
    from huggingface_hub.utils import logging as below

    said = logging.LogRecord(
        "huggingface_hub.x", logging.WARNING, "", 0, "'%s' while requesting %s",
        ("gone", f"http://ann:{PASSWORD}@127.0.0.1/x@y"), None,
    )  # fmt: skip
    below.get_logger()
    with explained(hub.HubModel("ann/x"), "ann/x"):
        handlers = logging.getLogger("huggingface_hub").handlers
        assert handlers and all(handler.filter(said) for handler in handlers)
    assert said.getMessage() == "'gone' while requesting http://127.0.0.1/x@y"
