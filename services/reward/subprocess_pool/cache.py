"""Cache of recent scores, for equal answers and retried groups."""

import hashlib

from penstock.shared.bus.messages import Score


class Recent:
    """LRU cache of at most ``size`` scores, keyed by a digest of their texts."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._scores: dict[bytes, Score] = {}

    def get(self, *texts: str) -> Score | None:
        key = _digest(texts)
        score = self._scores.pop(key, None)
        if score is not None:
            self._scores[key] = score
        return score

    def put(self, score: Score, *texts: str) -> None:
        self._scores[_digest(texts)] = score
        if len(self._scores) > self._size:
            del self._scores[next(iter(self._scores))]


def _digest(texts: tuple[str, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for text in texts:
        content = text.encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "big") + content)
    return digest.digest()
