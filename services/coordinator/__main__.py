"""python -m services.coordinator --config run.toml"""

from services.coordinator.service import start
from shared.service import leave, main

if __name__ == "__main__":
    leave(main("coordinator", start))
