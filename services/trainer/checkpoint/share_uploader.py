"""Upload the files of this host's ranks, on hosts other than the first.

::

    run folder, which hosts share ──▶ newest checkpoint ──▶ this host's files ──▶ object storage
                                                                                       │
    rank 0 (``uploader``): its own files ── waits for those, or sends them itself ── manifest

A host that is killed or slow loses nothing: its files are sent later, or by rank 0.
"""

import contextlib
import logging
import threading
from collections.abc import Iterator

from penstock.services.trainer.checkpoint import local_store
from penstock.services.trainer.checkpoint.local_store import Checkpoint
from penstock.services.trainer.checkpoint.remote_store import CheckpointStore, open_store
from penstock.shared.backoff import Backoff
from penstock.shared.errors import StoreError
from penstock.shared.files.checkpoint_folder import CHECKPOINTS
from penstock.shared.settings import Settings

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_BACKOFF = Backoff(1.0, longest_s=60.0)


@contextlib.contextmanager
def uploading_share(settings: Settings) -> Iterator[None]:
    """Upload within the block, on a thread, and at its end what is new, for at most ``bus.drain_s``."""
    store = open_store(settings) if settings.trainer.node else None
    if store is None:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_follow, args=(settings, store, ended), name="share of checkpoints", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(settings.bus.drain_s)


def _follow(settings: Settings, store: CheckpointStore, ended: threading.Event) -> None:
    """Upload the newest checkpoint's share whenever there is a new one, and once more after ``ended``."""
    root, failures = settings.run_folder / CHECKPOINTS, 0
    sent: Checkpoint | None = None
    while True:
        is_last = ended.is_set()
        try:
            newest = local_store.newest(root)
            if newest is not None and newest != sent:
                nbytes = store.put_share(newest)
                sent, failures = newest, 0
                log.info("share of a checkpoint stored", extra={"folder": str(newest.folder), "bytes": nbytes})
        except (StoreError, OSError) as error:
            failures += 1
            log.warning("share of a checkpoint not stored", extra={"failures": failures, "error": str(error)})
        if is_last:
            return
        ended.wait(_BACKOFF.wait_s(failures) if failures else _LOOK_S)
