"""Logging: JSON lines, or short lines at a terminal. Event text is constant, values go in ``extra``. Text is escaped
for terminals, in which files are read too.
"""

import json
import logging
import sys
import time

from penstock.shared.text.redaction import redacted
from penstock.shared.text.terminal import cut, escaped, escaped_line

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """JSON objects: time, level, logger, event, and ``extra``."""

    def __init__(self, replica: str) -> None:
        super().__init__()
        self._replica = replica

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "replica": self._replica,
            "logger": record.name,
            "event": _shown(record.getMessage()),
            **_extra(record),
        }
        if record.exc_info:
            line["traceback"] = _shown(self.formatException(record.exc_info))
        return escaped(json.dumps(line, default=str, ensure_ascii=False))


class PlainLines(logging.Formatter):
    """``12:30:01 WARNING rollout-0 entry was taken over  stream=prompts entry=17-0``."""

    def __init__(self, replica: str) -> None:
        super().__init__("%(asctime)s %(levelname)-7s " + replica + " %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        values = " ".join(f"{name}={escaped_line(cut(str(value)))}" for name, value in _extra(record).items())
        return escaped(_shown(f"{super().format(record)}  {values}".rstrip()))


def _extra(record: logging.LogRecord) -> dict[str, object]:
    return {name: _bounded(value) for name, value in vars(record).items() if name not in _STANDARD}


def _bounded(value: object) -> object:
    """Return a value as it is written: redacted, and cut if it is long."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    shown = _shown(text)
    return value if shown == text else shown


def _shown(text: str) -> str:
    return cut(redacted(text))


def set_up(level: str, replica: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainLines(replica) if sys.stderr.isatty() else JsonLines(replica))
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for noisy in ("httpx", "httpcore", "uvicorn.access", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
