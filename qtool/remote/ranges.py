"""Bytes of files on servers: connections that are kept, redirects, credentials, second attempts.

Credentials belong to one origin (scheme, host, port) and are sent nowhere else, whatever a
redirect says. Addresses in messages lack their queries and users, which may be secrets.

The standard library's client is used, as the one beneath huggingface_hub differs between versions.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from qtool.errors import SourceError
from qtool.hub.answers import PassingError, Wish, announced, body, shown

MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_SILENCE = 10.0  # seconds without a byte
_PATIENCE = 30.0  # seconds for an answer, beside those at _SLOWEST
_SLOWEST = 50_000  # bytes a second
_UNQUOTED = "%/:=&?~#+!$,;'@()*[]"


@dataclass(frozen=True)
class Part:
    """Some bytes of a file."""

    data: bytes
    total: int  # bytes of the whole file
    url: str  # where redirects led


@dataclass(frozen=True)
class _Line:
    """A connection; `proxy` are the headers for one to which whole addresses are sent."""

    connection: http.client.HTTPConnection
    proxy: Mapping[str, str] | None = None


def split(url: str) -> SplitResult:
    """The parts of an http or https address; SourceError for anything else."""
    try:
        parts = urlsplit(url)
        (parts.hostname or "").encode("idna")
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or any(ord(c) < 33 or ord(c) == 127 for c in url):
        raise SourceError(
            f"{shown(url)}: not an address that can be fetched; expected http(s)://HOST/PATH"
        )
    return parts


def origin(url: str) -> str:
    """What credentials belong to."""
    parts = split(url)
    port = parts.port or {"http": 80, "https": 443}[parts.scheme]
    return f"{parts.scheme}://{(parts.hostname or '').lower()}:{port}"


def basic(url: str) -> str | None:
    """The Authorization header for the user that an address names, if any."""
    parts = urlsplit(url)
    if parts.username is None:
        return None
    user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + b64encode(user.encode()).decode()


class _Watch:
    """Ends a connection at a deadline: a server that sends a byte now and then never times out."""

    def __init__(self, connection: http.client.HTTPConnection, deadline: float) -> None:
        self._connection, self._late = connection, threading.Event()
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._break_off)
        self._timer.daemon = True
        self._timer.start()

    def _break_off(self) -> None:
        self._late.set()
        found = self._connection.sock
        if found is not None:
            with suppress(OSError):
                socket.socket.shutdown(found, socket.SHUT_RDWR)  # TLS, too, reads an end then

    def check(self, url: str) -> None:
        """SourceError where the deadline is over."""
        if self._late.is_set():
            raise SourceError(f"{shown(url)}: too slow; no whole answer came in time")

    def end(self) -> None:
        """The answer is there."""
        self._timer.cancel()


class Server:
    """Fetches parts of files, from any address and on any thread."""

    def __init__(self, credentials: Mapping[str, str], agent: str) -> None:
        """credentials: an Authorization header for each origin that gets one."""
        self._credentials, self._agent = credentials, agent
        self._idle: dict[str, list[_Line]] = {}
        self._lock = threading.Lock()
        self.received = 0  # bytes of all bodies
        self._expected = 0  # bytes that are being fetched under a limit

    def part(self, url: str, first: int, count: int, total: int | None = None) -> Part:
        """`count` bytes from `first` on, or as many as there are up to the end. FormatError where
        the file no longer is `total` bytes long."""
        return self._twice(url, Wish(first, count, total))

    def whole(self, url: str, most: int) -> bytes:
        """A file of at most `most` bytes."""
        return self._twice(url, Wish(None, most)).data

    @contextmanager
    def reserved(self, count: int, most: int) -> Iterator[bool]:
        """Whether `count` bytes more are at most `most`, those on their way included: of several
        threads that look at once, each would find room for itself."""
        with self._lock:
            granted = self.received + self._expected + count <= most
            self._expected += count if granted else 0
        try:
            yield granted
        finally:
            with self._lock:
                self._expected -= count if granted else 0

    def close(self) -> None:
        """Close the connections that are not in use."""
        with self._lock:
            lines = [line for some in self._idle.values() for line in some]
            self._idle.clear()
        for line in lines:
            line.connection.close()

    def _twice(self, url: str, wish: Wish) -> Part:
        """One more attempt, on a new connection, where the first fails in a way that may pass."""
        try:
            return self._follow(url, wish, fresh=False)
        except PassingError as error:
            time.sleep(error.pause)
        try:
            return self._follow(url, wish, fresh=True)
        except PassingError as error:
            raise SourceError(
                f"{shown(url)}: cannot be fetched ({error}); tried twice: check the address and "
                "the network"
            ) from None

    def _follow(self, url: str, wish: Wish, fresh: bool) -> Part:
        asked = url
        for _ in range(MAX_REDIRECTS + 1):
            found = self._once(asked, wish, fresh)
            if isinstance(found, Part):
                return found
            target = _joined(asked, found)
            if split(target).scheme == "http" and split(asked).scheme == "https":
                raise SourceError(
                    f"{shown(url)}: redirected from https to {shown(target)}, where anybody on "
                    "the way could change it; refused"
                )
            asked = target
        raise SourceError(f"{shown(url)}: redirected more than {MAX_REDIRECTS} times")

    def _once(self, url: str, wish: Wish, fresh: bool) -> Part | str:
        """One request: the part, or where it is redirected to."""
        deadline = time.monotonic() + _PATIENCE + wish.count / _SLOWEST
        where = origin(url)
        line = self._line(url, fresh)
        response: http.client.HTTPResponse | None = None
        watch = _Watch(line.connection, deadline)
        try:
            headers = self._headers(url, wish) | dict(line.proxy or {})
            line.connection.request("GET", _target(url, line), headers=headers)
            response = line.connection.getresponse()
            watch.check(url)  # headers that are cut short look whole
            if response.status in _REDIRECTS:
                location = response.headers.get("Location")
                if not location:
                    raise SourceError(f"{shown(url)}: redirected to nowhere")
                if response.length == 0:
                    response.read()  # a connection is kept when its answer has been read
                return quote(location.encode("latin-1", "replace"), safe=_UNQUOTED)
            expected, total = announced(shown(url), response, wish)
            if total == 0:
                return Part(b"", 0, url)
            data = body(shown(url), response, expected, wish.count, deadline)
            with self._lock:
                self.received += len(data)
            return Part(data, len(data) if total is None else total, url)
        except PassingError:
            watch.check(url)
            raise
        except TimeoutError:
            watch.check(url)
            raise PassingError(f"{where} does not answer in time") from None
        except ssl.SSLCertVerificationError as error:
            raise SourceError(
                f"{shown(url)}: the server's certificate cannot be verified "
                f"({error.verify_message})"
            ) from None
        except OSError as error:
            watch.check(url)
            raise PassingError(error.strerror or str(error) or type(error).__name__) from None
        except http.client.HTTPException as error:
            watch.check(url)
            why = type(error).__name__
            raise PassingError(f"{where} breaks off, or does not speak HTTP: {why}") from None
        finally:
            watch.end()
            if response is not None and response.isclosed() and not response.will_close:
                with self._lock:
                    self._idle.setdefault(where, []).append(line)
            else:
                if response is not None:  # which holds the socket of what the server ends
                    response.close()
                line.connection.close()

    def _headers(self, url: str, wish: Wish) -> dict[str, str]:
        headers = {"User-Agent": self._agent, "Accept-Encoding": "identity"}
        if wish.first is not None:
            headers["Range"] = f"bytes={wish.first}-{wish.first + wish.count - 1}"
        if (secret := self._credentials.get(origin(url))) is not None:
            headers["Authorization"] = secret
        return headers

    def _line(self, url: str, fresh: bool) -> _Line:
        """An idle connection, or one that opens itself; through a proxy where there is one."""
        with self._lock:
            idle = self._idle.get(origin(url))
            if idle and not fresh:
                return idle.pop()
        parts = split(url)
        host = parts.hostname or ""
        proxy = None if proxy_bypass(host) else getproxies().get(parts.scheme)
        if proxy:
            return self._proxied(parts, proxy if "://" in proxy else f"http://{proxy}")
        if parts.scheme == "http":
            return _Line(http.client.HTTPConnection(host, parts.port, timeout=_SILENCE))
        return _Line(
            http.client.HTTPSConnection(host, parts.port, timeout=_SILENCE, context=self._context)
        )

    def _proxied(self, parts: SplitResult, proxy: str) -> _Line:
        via, secret = split(proxy), basic(proxy)
        if via.scheme != "http":
            raise SourceError(f"{shown(proxy)}: a proxy is spoken to over http:// only")
        headers = {} if secret is None else {"Proxy-Authorization": secret}
        host, port = via.hostname or "", via.port or 80
        if parts.scheme == "http":
            return _Line(http.client.HTTPConnection(host, port, timeout=_SILENCE), headers)
        tunnel = http.client.HTTPSConnection(host, port, timeout=_SILENCE, context=self._context)
        tunnel.set_tunnel(parts.hostname or "", parts.port or 443, headers=headers)
        return _Line(tunnel)

    @cached_property
    def _context(self) -> ssl.SSLContext:
        """The system's certificates, and certifi's where that is installed."""
        context = ssl.create_default_context()
        try:
            import certifi
        except ImportError:
            return context
        context.load_verify_locations(certifi.where())
        return context


def _joined(url: str, location: str) -> str:
    """Where a redirect leads."""
    try:
        return urljoin(url, location)
    except ValueError:
        raise SourceError(
            f"{shown(url)}: redirected to {shown(location)}, which is no address"
        ) from None


def _target(url: str, line: _Line) -> str:
    """What stands behind GET."""
    parts = split(url)
    path = quote(parts.path or "/", safe=_UNQUOTED)
    if parts.query:
        path += "?" + quote(parts.query, safe=_UNQUOTED)
    if line.proxy is None:
        return path
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}"
