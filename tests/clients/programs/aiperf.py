"""AIPerf: load of streamed chats; all are answered and measured."""

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

url, model, tokenizer = sys.argv[1:]
with TemporaryDirectory() as folder:
    options = {
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
    words = [word for pair in options.items() for word in pair]
    subprocess.run([Path(sys.executable).parent / "aiperf", "profile", "--streaming", *words], check=True)
    (report,) = Path(folder).rglob("profile_export_aiperf.json")
    metrics = json.loads(report.read_bytes())
    assert metrics["time_to_first_token"]["count"] == 12, metrics
    assert metrics["request_latency"]["count"] == 12 and not metrics.get("error_summary"), metrics
