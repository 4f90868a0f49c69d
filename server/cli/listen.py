"""Listening sockets, bound before anything is loaded."""

from __future__ import annotations

import errno
import socket

from pydantic_settings import SettingsError

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as localhost's ::1 on a system without IPv6


class Listener(socket.socket):
    """A bound socket, and the claim that keeps a second server away while the first one loads."""

    claim: socket.socket | None = None


def bind(host: str, port: int) -> list[Listener]:
    """A socket for each address of the host, all on one port. They refuse connections until `listen` is called.

    Raises SettingsError for a host that is not one, ValueError where the address is taken or not this machine's.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise SettingsError(f"--host: {host} is not an address: {error}") from None
    bound: list[Listener] = []
    for family, kind, protocol, _, address in dict.fromkeys(found):
        listener = Listener(family, kind, protocol)
        try:
            _bind(listener, (address[0], bound[0].getsockname()[1] if bound else port, *address[2:]))
        except OSError as error:
            if error.errno not in _NOT_HERE or (not bound and address == found[-1][4]):
                raise ValueError(f"cannot listen on {address_text(host, port)}: {error.strerror}") from None
        else:
            bound.append(listener)
    return bound


def _bind(listener: Listener, address: tuple[str | int, ...]) -> None:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of a server before may still linger
    if listener.family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    listener.bind(address)
    listener.claim = _claim(listener)


def _claim(listener: Listener) -> socket.socket | None:
    """With SO_REUSEADDR, Linux lets several processes bind a port until one listens. So we also take an abstract Unix
    socket of the same name, which only one process can have, and which the system frees when that process ends."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    claim = socket.socket(socket.AF_UNIX)
    try:
        claim.bind("\0tokenteller " + address_text(*listener.getsockname()[:2]))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(errno.EADDRINUSE, "another tokenteller is starting or running there") from None
        return None  # not Linux
    return claim


def listen(listeners: list[Listener], backlog: int) -> None:
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
