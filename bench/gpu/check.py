"""Run the GPU checklist of docs/gpu.md and keep what it found.

    python bench/gpu/check.py            # every row that exists
    python bench/gpu/check.py -k models  # one row

Writes ``bench/results/gpu-<date>.json``: the GPU, versions, commit, and each test's outcome and seconds. Exit status 1 when
a row failed, 2 when there is no GPU.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    """Run the rows, print a line for each, write the file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", dest="only", default="", help="run only the rows whose name contains this")
    arguments = parser.parse_args()

    import torch

    if not torch.cuda.is_available():
        print("No GPU: torch sees no CUDA device. The checklist needs one; the CPU's tests are `make test`.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        only = ["-k", arguments.only] if arguments.only else []
        status = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "tests/gpu",
                "-o",
                "addopts=-q --import-mode=importlib",
                f"--junitxml={report}",
                *only,
            ],
            cwd=ROOT,
            check=False,
        ).returncode
        cases = [
            {
                "test": case.get("name"),
                "seconds": float(case.get("time", 0)),
                "outcome": "passed" if len(case) == 0 else case[0].tag,
            }
            for case in ET.parse(report).iter("testcase")
        ]
    today = datetime.date.today().isoformat()
    result = {
        "date": today,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
        ).stdout.strip(),
        "rows": cases,
    }
    target = ROOT / "bench" / "results" / f"gpu-{today}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    for case in cases:
        print(f"{case['outcome']:8} {case['seconds']:7.1f} s  {case['test']}")
    print(f"Written: {target.relative_to(ROOT)}. Copy the outcome into docs/gpu.md.")
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
