"""Who may do what: two bearer tokens from files, compared in constant time.

::

    no token file        loopback address: everybody may do everything    any other address: the start is refused
    token_file           its token may read and operate
    read_token_file      its token may read: GET

A token is the first line of its file, read once at the start. Without one, requests must name this machine in ``Host``: a web page
whose own name resolves to 127.0.0.1 (DNS rebinding) would otherwise operate the run from a browser. This module answers no request.
"""

import dataclasses
import hmac
import re
from enum import StrEnum

from shared.errors import SettingsError
from shared.files.secret_file import read_secret
from shared.peers.addresses import is_loopback
from shared.settings import CoordinatorSettings


class Role(StrEnum):
    """What a caller may do."""

    READ = "read"
    OPERATE = "operate"


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """The tokens of one coordinator; without any, everybody may operate."""

    operate: bytes = b""
    read: bytes = b""

    def admits(self, hosts: list[str]) -> bool:
        """Whether a request with these ``Host`` headers may be answered; a token protects whatever the name.

        >>> [Access().admits([host]) for host in ("127.0.0.1:8000", "[::1]:8000", "localhost", "evil.example:8000")]
        [True, True, True, False]
        """
        if self.operate:
            return True
        return len(hosts) == 1 and is_loopback(re.sub(r":[0-9]*$", "", hosts[0]).strip("[]").lower())

    def role(self, authorization: bytes | None) -> Role | None:
        """Return what the bearer of an Authorization header may do; None: nothing."""
        if not self.operate:
            return Role.OPERATE
        scheme, _, token = (authorization or b"").partition(b" ")
        known = scheme.lower() == b"bearer"
        operates = hmac.compare_digest(token.strip(), self.operate)
        reads = hmac.compare_digest(token.strip(), self.read or self.operate)
        if known and operates:
            return Role.OPERATE
        return Role.READ if known and reads else None


def open_access(settings: CoordinatorSettings) -> Access:
    """Return the tokens that ``settings`` name.

    Raises:
        SettingsError: a file cannot be used, or an address that others reach would be open to all.
    """
    if settings.token_file is None:
        if not is_loopback(settings.host):
            raise SettingsError(
                f"expected a bearer token for the HTTP API on {settings.host}, which others can reach, found none: "
                "set coordinator.token_file, or coordinator.host to a loopback address"
            )
        if settings.read_token_file is not None:
            raise SettingsError(
                "expected coordinator.token_file beside coordinator.read_token_file, found none: set both or neither"
            )
        return Access()
    operate = read_secret(settings.token_file, "coordinator.token_file", "token")
    read = b""
    if settings.read_token_file is not None:
        read = read_secret(settings.read_token_file, "coordinator.read_token_file", "token")
    if operate == read:
        raise SettingsError(
            "expected different tokens to operate and to read, found the same twice: change coordinator.read_token_file"
        )
    return Access(operate, read)
