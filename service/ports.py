"""Looks whether a port can be listened on before anything is started."""

import errno
import socket


class PortError(RuntimeError):
    """A port can't be used; the message names it and the option that changes it."""


def check_port(host: str, port: int, option: str) -> None:
    """Raise `PortError` unless `host`:`port` can be bound; `option` is what the operator would change."""
    if not 0 < port < 1 << 16:
        raise PortError(f"{option} {port} is not a port: give a number from 1 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise PortError(f"--host {host}: {error.strerror}") from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do it: connections that are just closing are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            # SO_REUSEADDR alone lets two sockets be bound, as long as neither listens.
            probe.listen(1)
        except OSError as error:
            reason = "is in use" if error.errno == errno.EADDRINUSE else f"can't be used ({error.strerror})"
            raise PortError(
                f"port {port} on {host} {reason}: stop what listens there, or give another with {option}"
            ) from error
