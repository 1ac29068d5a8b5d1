"""benchmarks/lab_studies.sh, with a command in place of farspan that is stopped in training."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "lab_studies.sh"
STOPPED = """#!/bin/bash
while [ "$1" != -o ]; do shift; done
if [ "$3" = --report-only ]; then
    ls "$2"/cells/*.json > /dev/null || exit 2
    echo "1 of 1 models learned their task." > "$2/tables.md"
    echo '{"settings": {"study": {}}, "cells": []}' > "$2/record.json"
else
    mkdir -p "$2/cells"
    if [ -n "$FINISHED" ]; then touch "$2/cells/model.json"; fi
    exit 75
fi
"""


@pytest.mark.parametrize("finished", ["", "yes"])
def test_stopped_studies_can_be_resumed(tmp_path, finished):
    command = tmp_path / "farspan"
    command.write_text(STOPPED)
    command.chmod(0o755)
    settings = {"FARSPAN": str(command), "PYTHON": sys.executable, "FINISHED": finished}
    arguments = ["bash", str(SCRIPT), str(tmp_path / "out")]
    result = subprocess.run(
        arguments, env={**os.environ, **settings, "STEPS": "grid"}, capture_output=True, text=True
    )
    assert result.returncode == 75, result.stderr
    assert (tmp_path / "out" / "records" / "lab-grid.jsonl").exists() == bool(finished)
