"""Redact secrets in text: passwords and options of URLs, headers that authorize, and paths of key files.

If a password was not percent-encoded, everything up to the last ``@`` is hidden. Options are hidden unless they are
known to be harmless. Foreign text passes through here, so no expression reads a character twice: each begins at a
separator or a name and ends before the next one.
"""

import re
from typing import Any

HIDDEN = "***"
_URL = re.compile(r"://[^\s'\"<>\\]+")
_USER = re.compile(r"://[^:/?#@]*:")
_OPTION = re.compile(r"([?&#](?!(?:db|protocol|api-version|ssl_c\w*)=)[^=&#?]*+=)[^&#]*", re.IGNORECASE)
_HEADER = re.compile(
    r"((?:authorization|cookie|password|(?:api|access|secret)[-_]?key|(?:hf|auth|access|api|session)[-_]token)(?:\\?['\"])?\s{0,4}[:=]\s{0,4}(?:\\?['\"])?)[^\s'\"\\][^'\"\\\n]*",
    re.IGNORECASE,
)
_KEY_FILE = re.compile(r"\b(file:)(?=[/~.])(?!//)[^\s'\"\\]+")
_WORD = "pass|secret|token|credential|key|sig|code|auth"
_SECRET_OPTION = re.compile(rf"[?&#](?:(?!{_WORD})[^=&#?])*+(?:{_WORD})[^=&#?]*+=[^&#]", re.IGNORECASE)
SECRET_NAME = re.compile(r"(?:.*[_-])?(?:password|passwd|secret|api[_-]?key|token|authorization|cookie)", re.IGNORECASE)
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
    """Return ``text`` with every URL, header and path of a key in it redacted.

    >>> redacted("expected a server at redis://:secret@host:1, found none")
    'expected a server at redis://:***@host:1, found none'
    >>> redacted("{'Authorization': 'Bearer secret'} of file:/run/key")
    "{'Authorization': '***'} of file:***"
    """
    text = _URL.sub(lambda match: redact(match[0]), text) if "://" in text else text
    return _KEY_FILE.sub(rf"\1{HIDDEN}", _HEADER.sub(rf"\1{HIDDEN}", text))


def redacted_values(value: Any) -> Any:
    """Return a JSON ``value`` with every text in it redacted, and those of names like ``token`` hidden.

    >>> redacted_values({"detail": "https://a/?x=secret", "fields": [{"api_key": "secret", "tokens": 3}]})
    {'detail': 'https://a/?x=***', 'fields': [{'api_key': '***', 'tokens': 3}]}
    """
    if isinstance(value, dict):
        return {
            name: HIDDEN if isinstance(part, str) and SECRET_NAME.fullmatch(name) else redacted_values(part)
            for name, part in value.items()
        }
    if isinstance(value, list):
        return [redacted_values(part) for part in value]
    return redacted(value) if isinstance(value, str) else value


def holds_secret(text: str) -> bool:
    """Whether ``text`` has a URL with a password or an option that is named like a secret, or a header that authorizes.

    >>> [holds_secret(f"http://{rest}") for rest in ("a/?code=x", "u:x@a/", "a/?api-version=1")]
    [True, True, False]
    """
    urls = [match[0] for match in _URL.finditer(text)]
    return _HEADER.search(text) is not None or any(_has_user(url) or _SECRET_OPTION.search(url) for url in urls)


def _has_user(url: str) -> bool:
    user = _USER.search(url)
    return user is not None and user.end() <= url.rfind("@")
