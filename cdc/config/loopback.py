"""Loopback addresses: only for these may connections go without TLS and callers without a token."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host name or address is loopback. The trap: a name like 127.example.org is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
