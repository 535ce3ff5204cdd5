"""Laws of the documents: what they name is there."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
KINDS = ("Counter", "Gauge", "Histogram", "Info", "Summary")


def test_every_metric_that_the_documents_name_is_declared() -> None:
    documents = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    named = {name for page in documents for name in re.findall(r"`(penstock_[a-z_]+)`", page.read_text())}
    declared = {name for top in ("services", "shared") for path in (ROOT / top).rglob("*.py") for name in metrics(path)}
    assert named, "expected the documents to name metrics"
    assert named - declared == set()


def metrics(path: Path) -> set[str]:
    """Return the names of the metrics that a module makes: the first argument of Counter(…) and its like."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    made = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id in KINDS]
    return {str(call.args[0].value) for call in made if isinstance(call.args[0], ast.Constant)}
