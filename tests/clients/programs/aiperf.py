"""AIPerf: a load of streamed chats, all of which are answered and measured."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

url, model, tokenizer = sys.argv[1:]
with TemporaryDirectory() as folder:
    asked = {
        "--model": model,
        "--url": url,
        "--endpoint-type": "chat",
        "--concurrency": "4",
        "--request-count": "12",
        "--tokenizer": tokenizer,
        "--synthetic-input-tokens-mean": "64",
        "--output-tokens-mean": "16",
        "--ui": "none",
        "--output-artifact-dir": folder,
    }
    words = [word for pair in asked.items() for word in pair]
    subprocess.run([Path(sys.executable).parent / "aiperf", "profile", "--streaming", *words], check=True)
    (report,) = Path(folder).rglob("profile_export_aiperf.json")
    figures = json.loads(report.read_bytes())
    assert figures["time_to_first_token"]["count"] == 12, figures
    assert figures["request_latency"]["count"] == 12 and not figures.get("error_summary"), figures
