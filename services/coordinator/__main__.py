"""python -m services.coordinator --config run.toml"""

import sys

from services.coordinator.service import start
from shared.service import main

if __name__ == "__main__":
    sys.exit(main("coordinator", start))
