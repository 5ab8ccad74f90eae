"""Slows down addresses that send wrong API keys."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 3.2
FORGET_SECONDS = 600.0
"""After the last wrong key of an address."""
ADDRESSES = 4096
"""How many are remembered; the one that is forgotten first has been quiet for longest."""


class WrongKeys:
    """Who sent wrong keys, and how many."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def record(self, address: str) -> float:
        """Counts a wrong key; the seconds that its response has to wait: twice as many each time.

        Args:
            address: of the client; of IPv6, the network of 64 bits counts.
        """
        now = time.monotonic()
        name = _network(address)
        count, last = self._sent.pop(name, (0, now))
        if now - last > FORGET_SECONDS:
            count = 0
        self._sent[name] = (count + 1, now)
        if len(self._sent) > ADDRESSES:
            self._sent.popitem(last=False)
        return float(min(LONGEST_SECONDS, FIRST_SECONDS * 2 ** min(count, 64)))


def _network(address: str) -> str:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address[:64]  # what a proxy says
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)  # as a socket for both shows it
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
