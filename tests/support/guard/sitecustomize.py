"""Refuses every connection that leaves the machine: in the tests, and in the processes they start.

Python imports this file by itself where its folder is on PYTHONPATH. What was refused is written to
the file that QTOOL_TEST_GUARD names, for a caller that goes on after an OSError.
"""

import ipaddress
import os
import sys

_EVENTS = {
    "socket.connect": 1,
    "socket.sendto": 1,
    "socket.sendmsg": 1,
    "socket.getaddrinfo": 0,
    "socket.gethostbyname": 0,
}
_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "")


def _is_here(address: object) -> bool:
    """Whether an address, or a host's name, means this machine."""
    if isinstance(address, tuple) and address:
        address = address[0]
    if isinstance(address, bytes):
        address = address.decode("ascii", "replace")
    if address is None or not isinstance(address, str):
        return True  # no address at all, or one of a family without hosts
    if address in _NAMES or address.startswith(("/", "\0")):
        return True
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def refuse(event: str, arguments: tuple[object, ...]) -> None:
    """The audit hook."""
    place = _EVENTS.get(event)
    if place is None:
        return
    log = os.environ.get("QTOOL_TEST_GUARD")
    if not log or _is_here(arguments[place]):
        return
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{event} {arguments[place]!r} in {' '.join(sys.argv[:3])!r}\n")
    raise ConnectionRefusedError(f"{event} {arguments[place]!r}: the tests stay on this machine")


sys.addaudithook(refuse)
