"""Authorization: two bearer tokens from files, compared in constant time, and browser sessions.

::

    no token file        loopback: every caller may operate    other address: start refused
    token_file           its token may read and operate
    read_token_file      its token may GET

A browser exchanges a signed code for a session: an HttpOnly cookie and a ticket, both required. Servers on other ports
may see the cookie, never the ticket.

A token is its file's first line, read at the start. Without one, ``Host`` must name this machine, against DNS
rebinding.
"""

import dataclasses
import hmac
import re
import secrets
from collections.abc import Iterator
from enum import StrEnum

from penstock.shared.errors import SettingsError
from penstock.shared.files.secret_file import read_secret
from penstock.shared.peers import tickets
from penstock.shared.peers.addresses import is_loopback
from penstock.shared.settings.run import CoordinatorSettings

_SESSION_S = 43_200.0


class Role(StrEnum):
    """A caller's permissions."""

    READ = "read"
    OPERATE = "operate"


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    operate: bytes = b""
    read: bytes = b""

    def admits(self, hosts: list[str]) -> bool:
        """Return whether these ``Host`` headers are allowed; with a token, any are.

        >>> [Access().admits([host]) for host in ("127.0.0.1:8000", "[::1]:8000", "localhost", "evil.example:8000")]
        [True, True, True, False]
        """
        if self.operate:
            return True
        return len(hosts) == 1 and is_loopback(re.sub(r":[0-9]*$", "", hosts[0]).strip("[]").lower())

    def role(self, authorization: str, cookie: str = "") -> Role | None:
        if not self.operate:
            return Role.OPERATE
        scheme, _, given = authorization.partition(" ")
        given = given.strip() if scheme.lower() == "bearer" else ""
        for token, role in self._tokens():
            is_token = hmac.compare_digest(given.encode("latin-1"), token)
            if is_token or (cookie and tickets.is_valid(given, token, _session(cookie))):
                return role
        return None

    def enter(self, code: str) -> tuple[str, str] | None:
        """Exchange a link's code for cookie and ticket; None: invalid or expired."""
        for token, _ in self._tokens():
            if tickets.is_valid(code, token, tickets.PAGE):
                cookie = secrets.token_urlsafe(24)
                return cookie, tickets.issue(token, _session(cookie), _SESSION_S)
        return None

    def _tokens(self) -> Iterator[tuple[bytes, Role]]:
        if self.operate:
            yield self.operate, Role.OPERATE
        if self.read:
            yield self.read, Role.READ


def _session(cookie: str) -> str:
    return f"session {cookie}"


def open_access(settings: CoordinatorSettings) -> Access:
    if settings.token_file is None:
        if not is_loopback(settings.host):
            raise SettingsError(
                f"the HTTP API on {settings.host}, which other machines can reach, needs a bearer token: "
                "set coordinator.token_file, or coordinator.host to a loopback address"
            )
        if settings.read_token_file is not None:
            raise SettingsError(
                "coordinator.read_token_file is set without coordinator.token_file: set both or neither"
            )
        return Access()
    operate = read_secret(settings.token_file, "coordinator.token_file", "token")
    read = b""
    if settings.read_token_file is not None:
        read = read_secret(settings.read_token_file, "coordinator.read_token_file", "token")
    if operate == read:
        raise SettingsError(
            "expected different tokens to operate and to read, but both are the same: change "
            "coordinator.read_token_file"
        )
    return Access(operate, read)
