"""The server's port."""

import socket

from rapid_llm.entrypoints.server.settings import ServerConfig
from rapid_llm.errors import ConfigError

_BACKLOG = 2048


def listen(config: ServerConfig) -> socket.socket:
    """Open the port; clients that come before the server runs wait.

    Raises: ConfigError when that cannot be.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address, family=family, backlog=_BACKLOG)
    except OSError as error:
        got, change = error.strerror or str(error), "choose another host or port"
        raise ConfigError(f"cannot listen on {config.host}:{config.port}", got=got, change=change) from None
