"""`penstock up` with the scripts of a folder as its services, for ``tests/up``.

    python -m tests.support.scripts_of_up FOLDER CONFIG [FLAG…]
    python -m tests.support.scripts_of_up FOLDER resume --resume RUN [FLAG…]

The first form starts a run, the second resumes one.
"""

import os
import sys
from pathlib import Path

from penstock.services.up.display import watch
from penstock.services.up.plan import ProcessPlan, current_environment, executor
from penstock.services.up.prepare import Prepared, prepare
from penstock.services.up.process import Restarts
from penstock.services.up.run import go
from penstock.shared.settings import Settings


def main(scripts: Path, config: str, *flags: str) -> int:
    watch.POLL_S = 0.1
    if "NEEDS_EXECUTOR" in os.environ:
        Settings.needs_executor = True  # type: ignore[method-assign, assignment]

    def plans(run: Prepared, url: str) -> list[ProcessPlan]:
        environment = current_environment() | {"RUN": str(run.folder), "PENSTOCK__BUS__URL": url}
        return executor(run.settings, run.config, environment) + [
            ProcessPlan(
                script.stem, script.stem.split("-")[0], (sys.executable, str(script)), environment, stop_s=180.0
            )
            for script in sorted(scripts.glob("*.py"))
        ]

    if config == "resume":
        run = prepare(None, Path(flags[1]), list(flags[2:]))
    else:
        run = prepare(Path(config), None, list(flags))
    long_life_s = float(os.environ.get("LONG_LIFE_S", "600"))
    restarts = Restarts(first_s=0.1, longest_s=0.4, well_after_s=0.0, give_up=3, stuck=4, long_life_s=long_life_s)
    ending = go(run, plans, restarts)
    print("ENDING", ending.code, ending.sentence, flush=True)
    return ending.code


if __name__ == "__main__":
    folder, *words = sys.argv[1:]
    sys.exit(main(Path(folder), *words))
