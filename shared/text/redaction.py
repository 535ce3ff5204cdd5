"""Redact passwords in URLs, in the user part or an option such as ``?password=``.

If a password was not percent-encoded, everything up to the last ``@`` is hidden. Foreign text passes through here, so
no expression reads a character twice: each begins at a separator and ends before the next one.
"""

import re

HIDDEN = "***"
_URL = re.compile(r"://[^\s'\"<>\\]+")
_USER = re.compile(r"://[^:/?#@]*:")
_WORD = "pass|secret|token|credential|api_?key"
_OPTION = re.compile(rf"([?&](?:(?!{_WORD})[^=&#?])*+(?:{_WORD})[^=&#?]*+=)[^&#]*", re.IGNORECASE)
SECRET_NAME = re.compile(r"(?:.*_)?(?:password|passwd|secret|api_?key|token)", re.IGNORECASE)
"""Secret names in other programs' tables."""


def redact(url: str) -> str:
    """Return ``url`` without its passwords.

    >>> redact("redis://user:a/b@c@host:1/0?sentinel_password=x&db=2")
    'redis://user:***@host:1/0?sentinel_password=***&db=2'
    """
    last, user = url.rfind("@"), _USER.search(url)
    if user is not None and user.end() <= last:
        url = f"{url[: user.end()]}{HIDDEN}{url[last:]}"
    return _OPTION.sub(rf"\g<1>{HIDDEN}", url)


def redacted(text: str) -> str:
    """Return ``text`` with every URL in it redacted.

    >>> redacted("expected a server at redis://:secret@host:1, found none")
    'expected a server at redis://:***@host:1, found none'
    """
    return _URL.sub(lambda match: redact(match[0]), text) if "://" in text else text
