"""Throttles addresses that send wrong API keys."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict

FIRST_SECONDS = 0.1
LONGEST_SECONDS = 3.2
FORGET_SECONDS = 600.0
"""Time after an address's last wrong key until its count restarts."""
ADDRESSES = 4096
"""Maximum number of addresses; the one inactive for longest is evicted first."""


class WrongKeys:
    """Counts wrong keys by address."""

    def __init__(self) -> None:
        self._sent: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def record(self, address: str) -> float:
        """Counts a wrong key; returns its response's delay in seconds, which doubles each time.

        Args:
            address: the client's; IPv6 addresses are counted by /64 network.
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
        return address[:64]  # from a proxy
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)  # as a dual-stack socket reports it
    return str(ipaddress.IPv6Network((int(parsed), 64), strict=False))
