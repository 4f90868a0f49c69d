"""Listening sockets, bound before anything is loaded."""

from __future__ import annotations

import errno
import socket

from pydantic_settings import SettingsError


def bind(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the host, all on one port. They refuse connections until `listen` is called.

    Raises SettingsError for a host that is not one, ValueError where the address is taken or not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host: {host} is not an address: {error}") from None
    bound: list[socket.socket] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            listener = socket.socket(family, kind, protocol)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listener.bind((address[0], bound[0].getsockname()[1] if bound else port, *address[2:]))
            bound.append(listener)
        except OSError as error:
            fault = error
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):  # localhost on a system without IPv6
                bound.clear()
                break
    if not bound:
        raise ValueError(f"cannot listen on {address_text(host, port)}: {fault.strerror}")
    return bound


def listen(listeners: list[socket.socket], backlog: int) -> None:
    """Opens the bound sockets to clients. Raises ValueError if another process listens there by now."""
    for listener in listeners:
        try:
            listener.listen(backlog)
        except OSError as error:
            address = address_text(*listener.getsockname()[:2])
            raise ValueError(f"cannot listen on {address}: {error.strerror}") from None


def address_text(host: str, port: int) -> str:
    """host:port as a URL has it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
