"""``python -m tests.support.patient_executor …``: the executor, which waits for programs and interpreters of a busy machine."""

from penstock.services.reward.executor import program
from penstock.services.reward.executor.__main__ import main
from penstock.shared.process.service import leave
from tests.support.waits import PATIENCE_S

if __name__ == "__main__":
    program.LONGEST, program.REACTS_WITHIN_S = 1000, PATIENCE_S
    leave(main())
