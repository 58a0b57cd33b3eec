"""Which hosts other machines cannot reach."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Returns whether a host is this machine only: `localhost`, 127.0.0.0/8 or ::1."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
