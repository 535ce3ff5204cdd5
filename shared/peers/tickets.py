"""Signed, expiring texts for clients without the secret, such as browsers.

::

    <Unix time of its end, hexadecimal>.<nonce>.<HMAC-SHA256 of the purpose and both, under the secret>
"""

import base64
import hashlib
import hmac
import secrets
import time

PAGE = "page"
"""For links to the coordinator's page."""
PAGE_S = 300.0
_NONCE_BYTES = 9
_PROOF_BYTES = 18


def issue(secret: bytes, purpose: str, life_s: float) -> str:
    body = f"{int(time.time() + life_s):x}.{secrets.token_urlsafe(_NONCE_BYTES)}"
    return f"{body}.{_proof(secret, purpose, body)}"


def is_valid(ticket: str, secret: bytes, purpose: str) -> bool:
    body, _, proof = ticket.rpartition(".")
    if not hmac.compare_digest(proof.encode(), _proof(secret, purpose, body).encode()):
        return False
    return int(body.partition(".")[0], 16) > time.time()


def _proof(secret: bytes, purpose: str, body: str) -> str:
    proof = hmac.digest(secret, f"penstock {purpose}\n{body}".encode(), hashlib.sha256)[:_PROOF_BYTES]
    return base64.urlsafe_b64encode(proof).decode()
