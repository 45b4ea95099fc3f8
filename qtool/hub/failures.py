"""What goes wrong between here and a hub, each as one sentence with what to do."""

from __future__ import annotations

import errno
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from qtool.errors import QtoolError, SourceError
from qtool.hub import HubModel
from qtool.hub.answers import shown

T = TypeVar("T")

PASSING = (408, 425, 429, 500, 502, 503, 504)
ATTEMPTS = 5
_USER = re.compile(r"://[^/\s]*@")
MAX_PAUSE = 330.0  # seconds; the hub counts requests in windows of five minutes


def transport_errors() -> tuple[type[Exception], ...]:
    """OSError, and the error of the HTTP library underneath, which differs between versions."""
    from huggingface_hub.errors import HfHubHTTPError

    return cast("tuple[type[Exception], ...]", HfHubHTTPError.__bases__)


def status_of(error: BaseException) -> int | None:
    """The status that a hub answered with, or None."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None


def asked_pause(error: BaseException) -> float | None:
    """Seconds that the hub asks to wait before another attempt, or None."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    after = str(headers.get("Retry-After", ""))
    if re.fullmatch(r"\d{1,6}", after, re.ASCII):
        return float(after)
    reset = re.search(r";\s*t=(\d{1,6})", str(headers.get("RateLimit", "")), re.ASCII)
    return None if reset is None else float(reset[1])


def pause_before_next(error: BaseException, failures: int) -> float | None:
    """Seconds to wait before attempt `failures` + 1, or None where none is worth it."""
    if failures >= ATTEMPTS:
        return None
    status = status_of(error)
    if status is not None and status not in PASSING:
        return None
    asked = asked_pause(error)
    pause = min(2.0 ** (failures - 1), 8.0) if asked is None else asked
    return None if pause > MAX_PAUSE else pause


def with_patience(
    ask: Callable[[], T], pause: Callable[[float, BaseException], None], attempts: int = ATTEMPTS
) -> T:
    """What `ask` returns, asked again after failures of the server that may pass."""
    from huggingface_hub.errors import HfHubHTTPError

    failures = 0
    while True:
        try:
            return ask()
        except HfHubHTTPError as error:
            failures += 1
            wait = pause_before_next(error, failures)
            if wait is None or failures >= attempts:
                raise
            pause(wait, error)


@contextmanager
def explained(model: HubModel, where: str, verb: str = "downloaded") -> Iterator[None]:
    """Inside, errors of huggingface_hub and of the network become SourceErrors."""
    from huggingface_hub import errors as hub

    for handler in logging.getLogger("huggingface_hub").handlers:
        handler.addFilter(_without_user)
    try:
        yield
    except QtoolError:
        raise
    except hub.GatedRepoError:
        raise SourceError(gated(model, where)) from None
    except hub.RevisionNotFoundError:
        raise SourceError(
            f"{where} has no revision {model.revision!r}; its branches and tags are on its page"
        ) from None
    except (hub.RepositoryNotFoundError, hub.HFValidationError):
        raise SourceError(
            f"{where} does not exist, or is private; check the spelling, and log in with "
            "`hf auth login` or set HF_TOKEN if it is yours"
        ) from None
    except hub.LocalEntryNotFoundError as error:
        raise SourceError(_not_here(where, error)) from None
    except transport_errors() as error:
        raise _of_transport(error, where, verb) from None


def gated(model: HubModel, where: str) -> str:
    """What to do about a repository that asks for its terms to be accepted."""
    from huggingface_hub import constants, get_token

    page = f"{shown(constants.ENDPOINT)}/{model.repository}"
    if get_token() is None:
        return (
            f"{where} is gated: accept its terms on its page ({page}), then log in with "
            "`hf auth login` or set HF_TOKEN"
        )
    return (
        f"{where} is gated, and the account of your token has no access: accept its terms on its "
        f"page ({page}), or use the token of an account that did"
    )


def _not_here(where: str, error: Exception) -> str:
    """The cache has no complete copy, and the hub was not asked or did not answer."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return (
            f"{where} cannot be reached: HF_HUB_OFFLINE is set, and the cache has no complete "
            "copy; download it once without HF_HUB_OFFLINE"
        )
    cause = error.__cause__
    status = None if cause is None else status_of(cause)
    if status is not None:
        return f"{where} {_of_status(status, cause)}, and the cache has no complete copy"
    return (
        f"{where} cannot be reached, and the cache has no complete copy; check the network, "
        "HF_ENDPOINT and HF_HUB_OFFLINE"
    )


def _of_status(status: int, error: BaseException | None) -> str:
    if status == 429:
        asked = None if error is None else asked_pause(error)
        wait = "" if asked is None else f" and asks to wait {asked:.0f} s"
        return (
            f"is refused for now: too many requests (status 429){wait}; try again later, or log "
            "in with `hf auth login`, which raises the limit"
        )
    if status in (401, 403):
        return (
            f"is refused (status {status}); log in with `hf auth login`, or set HF_TOKEN to a "
            "token that may do this"
        )
    if status >= 500:
        return f"fails on the server's side (status {status}); try again later"
    return f"is answered with status {status}"


def _of_transport(error: Exception, where: str, verb: str) -> Exception:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
        return SourceError(no_room(where))
    status = status_of(error)
    if status is not None:
        return SourceError(f"{where} {_of_status(status, error)}")
    if isinstance(error, ConnectionError) and "offline" in str(error).lower():
        return SourceError(f"{where} cannot be reached: HF_HUB_OFFLINE is set; unset it")
    return SourceError(
        f"{where} cannot be {verb}: {first_line(error)}; try again, what came is kept"
    )


def _without_user(line: logging.LogRecord) -> bool:
    """For huggingface_hub's own lines on stderr, some of which name an address."""
    line.msg, line.args = _USER.sub("://", line.getMessage()), ()
    return True


def first_line(error: BaseException) -> str:
    """What an error says, without the user and the password of an address in it."""
    said = (str(error).strip().splitlines() or [""])[0] or type(error).__name__
    return _USER.sub("://", said)


def no_room(where: str, needed: int | None = None, free: int | None = None) -> str:
    """The disk of the cache is full, or will be."""
    from huggingface_hub import constants

    sizes = "" if needed is None else f" ({needed:,} bytes to come, {free:,} free)"
    return (
        f"{where}: the disk is too full for it{sizes}; free some space at "
        f"{constants.HF_HUB_CACHE}, or put the cache elsewhere with HF_HOME"
    )
