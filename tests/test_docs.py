"""Laws of the documents: what they name is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_metric_that_the_documents_name_is_declared() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in documents for name in re.findall(r"`(penstock_[a-z_]+)`", page.read_text())}
    code = "".join(path.read_text() for top in ("services", "shared") for path in (ROOT / top).rglob("*.py"))
    assert named, "expected the documents to name metrics"
    assert {name for name in named if f'"{name}"' not in code} == set()
