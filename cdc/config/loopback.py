"""Whether a name can only mean this machine: what decides if traffic may go without TLS and callers without a token."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Of a host name or address. The trap: a name that merely begins like one (127.example.org) is somewhere else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
