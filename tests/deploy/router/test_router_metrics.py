"""Router metrics: request counts, and metrics read from servers."""

from __future__ import annotations

from quintet.deploy.router.metrics import RouterMetrics, parse_metrics
from quintet.deploy.router.request_summary import read
from quintet.deploy.router.servers import Servers


def test_server_metrics_are_read() -> None:
    text = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n'
    text += "vllm:num_requests_waiting 4\nvllm:prompt_tokens_total 10\nvllm:generation_tokens_total 5\n"
    reading = parse_metrics(text)
    assert (reading.num_running, reading.num_waiting, reading.num_tokens) == (3, 4, 15)
    assert parse_metrics("").num_tokens == 0
    for word in ("NaN", "+Inf", "-Inf", "many", "-3", "1e308"):
        odd = parse_metrics(f"vllm:num_requests_running {word}\nvllm:prompt_tokens_total {word}\n")
        assert (odd.num_running, odd.num_tokens) == (0, 0)


def test_memory_and_outputs_are_read_or_absent() -> None:
    text = 'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:kv_cache_usage_perc{engine="1"} 0.75\n'
    text += "vllm:request_generation_tokens_sum 900\nvllm:request_generation_tokens_count 9\n"
    assert (parse_metrics(text).kv_usage, parse_metrics(text).num_outputs) == (0.625, 100)
    assert (parse_metrics("").kv_usage, parse_metrics("").num_outputs) == (0.0, 0)
    for word in ("NaN", "+Inf", "-0.5", "17", "1e300", "much"):
        assert parse_metrics(f"vllm:kv_cache_usage_perc {word}\n").kv_usage == 0.0
    for word in ("NaN", "+Inf", "-5", "0", "1e-320", "0.5", "1e300", "many"):
        assert parse_metrics(text.replace("count 9", f"count {word}")).num_outputs == 0


def test_max_output_length_is_read() -> None:
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        assert read(b'{"prompt": "x", "%s": 40}' % name.encode(), "").max_outputs == 40
    for word in (b"null", b"-3", b"1e3", b"0.5", b'"7"', b"99999999999999999999"):
        assert read(b'{"prompt": "x", "max_tokens": %s}' % word, "").max_outputs == 0


def test_status_series_are_bounded() -> None:
    servers = Servers("load")
    figures = RouterMetrics(servers)
    for generation in range(20):
        servers.set_urls([f"http://10.0.{generation}.{number}:8000" for number in range(5)], 1.0)
        servers.remove_idle()
        for server in servers:
            for status in range(100, 1000):
                figures.answered(server, status)
    figures.answered(None, 503)
    lines = [
        line
        for line in figures.text().decode().splitlines()
        if line.startswith("quintet_route:requests_total")
    ]
    assert len(lines) < 5 * 70 and all("10.0.19." in line for line in lines if 'server=""' not in line)
    assert 'quintet_route:requests_total{server="",status="503"} 1.0' in lines
    others = sum(float(line.split()[1]) for line in lines if 'status="other"' in line)
    assert sum(float(line.split()[1]) for line in lines) == 5 * 900 + 1 and others > 4000


def test_undecodable_body_is_left_to_the_server() -> None:
    for body in (
        b'{"user": "\xff"}',
        b'{"prompt": "x", "cache_salt": "\xff"}',
        b'{"prompt_cache_key": "\xff"}',
    ):
        assert read(body, "s").session == "s"
    assert read(b'{"prompt": "x", "user": "u"}', "").session == "u"
    assert read(b'{"prompt": "x", "user": "u", "session_id": "i"}', "").session == "i"
