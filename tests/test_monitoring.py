"""Dashboard and alerts ask for metrics that exist; Prometheus scrapes a server for real."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from live import CLIENT, Live, free_port, serve
from test_tables import example_metrics

DEPLOY = Path(__file__).parent.parent / "deploy"


def expressions() -> list[str]:
    """Every PromQL expression of the dashboard and the alerts, with the dashboard's variables filled in."""
    panels = json.loads((DEPLOY / "monitoring/dashboard.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    filled = [text.replace("$__rate_interval", "10s").replace("$instance", ".*") for text in asked]
    rules = yaml.safe_load((DEPLOY / "monitoring/alerts.yml").read_text())["groups"][0]["rules"]
    return filled + [rule["expr"] for rule in rules]


def test_every_metric_that_is_drawn_or_alerts_exists() -> None:
    text = example_metrics().text().decode()
    known = set(re.findall(r"^([a-zA-Z_:][\w:]*)[ {]", text, re.MULTILINE)) | {"up"}
    for expression in expressions():
        bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]|\b(by|ignoring) ?\([^)]*\)', "", expression)
        words = re.findall(r"[a-zA-Z_][\w:]*", bare)
        names = {word for word in words if word == "up" or ("_" in word and word != "histogram_quantile")}
        assert names and names <= known, (expression, names - known)


@pytest.mark.slow
def test_prometheus_scrapes_a_server_and_every_panel_has_data(rand: Path, tmp_path: Path) -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed here: apt-get install prometheus")
    port = free_port()
    with serve(model=str(rand), slots=2, queue_limit=1) as live:
        config = yaml.safe_load((DEPLOY / "monitoring/prometheus.yml").read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(DEPLOY / "monitoring/alerts.yml")]
        config["scrape_configs"][0]["static_configs"] = [{"targets": [live.url.removeprefix("http://")]}]
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
        url = f"http://127.0.0.1:{port}"
        command = ["prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
        log = open(tmp_path / "log", "w")  # noqa: SIM115
        with subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stderr=log) as popen:
            try:
                traffic(live, seconds=15)
                missing = [text for text in expressions() if not has_data(url, text) and not is_quiet(text)]
                assert not missing
                up = CLIENT.get(url + "/api/v1/query", params={"query": "up"}).json()["data"]["result"]
                assert [sample["value"][1] for sample in up] == ["1"]
                alerts = CLIENT.get(url + "/api/v1/alerts").json()["data"]["alerts"]
                firing = {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}
                assert not firing & {"TokentellerDown", "TokentellerEngineSick", "TokentellerPoolBeyondBudget"}
            finally:
                popen.terminate()


def traffic(live: Live, seconds: float) -> None:
    """Requests of every fate: finished, queued, refused, cancelled, with a prefix in common."""
    end = time.monotonic() + seconds

    def work(at: int) -> None:
        while time.monotonic() < end:
            body = {"prompt": "a prefix in common, long enough to be copied " * 2, "max_tokens": 20, "ignore_eos": True}
            with CLIENT.stream("POST", live.url + "/generate", json=body) as response:
                for _ in response.iter_raw():
                    if at == 0:
                        break  # this client leaves

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))


def is_quiet(expression: str) -> bool:
    """Alerts and the share of 5xx have nothing to say when all is well."""
    return any(sign in expression for sign in (" == 0", "> 0.1", "> 10", "> ignoring", "log_lines_dropped"))


def has_data(url: str, expression: str) -> bool:
    command = ["promtool", "query", "instant", "--format=json", url, expression]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return bool(json.loads(done.stdout))
