"""Signatures of markers and manifests: HMAC-SHA256 with a secret key of the run (docs/operations.md, "Trust in
checkpoints").
"""

import dataclasses
import hashlib
import hmac
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.shared.errors import SettingsError
from penstock.shared.files.secret_file import read_private
from penstock.shared.settings import Settings

FIELD = "signature"
_SHORTEST = 32


@dataclasses.dataclass(frozen=True, slots=True)
class Signer:
    run_id: str = ""
    keys: tuple[bytes, ...] = dataclasses.field(default=(), repr=False)

    def signed(self, content: Mapping[str, Any]) -> dict[str, Any]:
        return {**content, FIELD: self._sign(self.keys[0], content)} if self.keys else dict(content)

    def refusal(self, content: Mapping[str, Any]) -> str:
        if not self.keys:
            return ""
        signature = content.get(FIELD)
        if not isinstance(signature, str):
            return f"it has no signature, and trainer.signing_key_file requires one by run {self.run_id}"
        if not any(hmac.compare_digest(self._sign(key, content).encode(), signature.encode()) for key in self.keys):
            return f"its signature is not by run {self.run_id} with a key of trainer.signing_key_file"
        return ""

    def _sign(self, key: bytes, content: Mapping[str, Any]) -> str:
        plain = {name: value for name, value in content.items() if name != FIELD}
        text = json.dumps({"run": self.run_id, "content": plain}, sort_keys=True)
        return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


UNSIGNED = Signer()


def open_signer(settings: Settings) -> Signer:
    path = settings.trainer.signing_key_file
    return Signer(settings.run.id, _keys(path) if path is not None else ())


def _keys(path: Path) -> tuple[bytes, ...]:
    lines = read_private(path, "trainer.signing_key_file", "key").splitlines()
    keys = tuple(key for line in lines if (key := line.strip()))
    if not keys or min(map(len, keys)) < _SHORTEST:
        raise SettingsError(
            f"expected one key of at least {_SHORTEST} characters per line in {path} (openssl rand -hex 32), found "
            f"{'a shorter one' if keys else 'no key'}: change trainer.signing_key_file"
        )
    return keys
