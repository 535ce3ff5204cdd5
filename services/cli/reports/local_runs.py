"""The runs of a folder such as ``runs/``, whether they are active or not, and those on the buses of the active ones."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from penstock.services.client.coordinator import (
    CoordinatorClient,
    JsonObject,
    find,
    how_ended,
    last_step,
    read_token,
    why_none,
)
from penstock.shared.errors import PenstockError
from penstock.shared.files.durable import read_object
from penstock.shared.settings import SETTINGS_FILE


def rows(folder: Path, most: int) -> list[JsonObject]:
    """Return a row of each run, as ``GET /v1/runs``, the one whose settings were written last at the end."""
    places = [path.parent for path in folder.glob(f"*/{SETTINGS_FILE}") if not path.parent.is_symlink()]
    places.sort(key=lambda place: (place / SETTINGS_FILE).stat().st_mtime)
    with ThreadPoolExecutor() as pool:  # all wait for those that hang at once
        buses = list(pool.map(lambda place: {} if how_ended(place) else _on_bus(place, most), places))
    runs: dict[str, JsonObject] = {}
    for place, of_bus in zip(places, buses, strict=True):
        runs.pop(place.name, None)  # of another's bus
        own = of_bus.pop(place.name, None) or _recorded(place)
        runs = {**of_bus, **runs, place.name: own}
    return list(runs.values())[-most:]


def _on_bus(place: Path, most: int) -> dict[str, JsonObject]:
    try:
        url = find("", place)
        items = CoordinatorClient(url, read_token(None, url, place)).items("/v1/runs", most)
        return {str(item["run_id"]): item for item in items}
    except (PenstockError, LookupError, TypeError):  # another program may have a dead coordinator's port
        return {}


def _recorded(place: Path) -> JsonObject:
    state = str(read_object(place / "summary.json").get("state", "")) if how_ended(place) else "no coordinator"
    row = {"run_id": place.name, "state": state, "step": last_step(place), "head": None, "here": False}
    return {**row, "reason": "" if how_ended(place) else why_none(place)}
