"""Muon+ against the best Muon: `python -m examples.experiments.best_muon FOLDER`."""

import sys
from pathlib import Path

from examples.experiments.best_muon import stages
from examples.trainer.system import exit_status

if __name__ == "__main__":
    exit_status.leave(exit_status.run_command(lambda: stages.main(Path(sys.argv[1]))))
