"""What lies in deploy/ is checked by its own tools, and its tables say what the code says.

`python tests/test_deploy.py --write` writes the tables of deploy/README.md anew.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from live import CLIENT, Live, process, serve  # noqa: E402

from tokenteller.model.kv_memory import KVLayout  # noqa: E402
from tokenteller.server import errors  # noqa: E402
from tokenteller.server.gauges import Levels  # noqa: E402
from tokenteller.server.metrics import Metrics, Served  # noqa: E402
from tokenteller.server.planning import make_plan  # noqa: E402
from tokenteller.server.settings import ServeSettings  # noqa: E402

# The tables


def settings_table() -> str:
    lines = ["| flag | environment | default | meaning |", "|---|---|---|---|"]
    for name, field in ServeSettings.model_fields.items():
        flag = name.replace("_", "-")
        default = "" if field.default in (None, ()) else f"`{field.default}`"
        lines.append(f"| `--{flag}` | `TOKENTELLER_{name.upper()}` | {default} | {field.description} |")
    return "\n".join(lines)


def errors_table() -> str:
    told = re.findall(r"[├└]── (\w+) +(?:(\d+) +)?(.+)", errors.__doc__ or "")
    lines = ["| code | status | type | when |", "|---|---|---|---|"]
    for name, _, meaning in told:
        kind = getattr(errors, name)
        lines.append(f"| `{kind.code}` | {kind.status} | `{kind.type}` | {meaning} |")
    return "\n".join(lines)


def metrics_table() -> str:
    lines = ["| name | kind | labels | meaning |", "|---|---|---|---|"]
    for family in example_metrics().registry.collect():
        if family.name.startswith("process_"):
            continue
        suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
        labels = sorted({label for sample in family.samples for label in sample.labels} - {"le", "model_name"})
        shown = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{family.name}{suffix}` | {family.type} | {shown} | {family.documentation} |")
    return "\n".join(lines)


def example_metrics() -> Metrics:
    """Families with a sample each, so that their labels show."""
    metrics = Metrics("toy")
    served = Served("id", "chat", 1, 0, 2, 2, ("length",), None, 0, 0.1, 0.2, 0.1, 0.1, 0.3)
    metrics.served(served)
    metrics.responded("/generate", 200)
    levels = Levels(1, {"slot": 0}, 0, {"free": 1}, 4096, 0, 0, 0, 0, 0, healthy=True, draining=False)
    metrics.show_levels(lambda: levels, {"version": "0", "model": "toy", "weights": "fp16"}, KVLayout(1, 1, 64, 64))
    return metrics


TABLES = {"settings": settings_table, "metrics": metrics_table, "errors": errors_table}


def with_tables(text: str) -> str:
    """The README with every table as the code has it."""
    for name, table in TABLES.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        before, rest = text.split(start)
        text = before + start + table() + "\n" + end + rest.split(end, 1)[1]
    return text


def test_the_tables_of_the_readme_say_what_the_code_says() -> None:
    text = (DEPLOY / "README.md").read_text()
    assert with_tables(text) == text, "run: python tests/test_deploy.py --write"


def test_every_error_has_its_line_in_the_tree_with_its_true_status() -> None:
    told = {name: status for name, status, _ in re.findall(r"[├└]── (\w+) +(?:(\d+) +)?(.+)", errors.__doc__ or "")}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ApiError)]
    assert told.keys() == {kind.__name__ for kind in kinds} - {"ApiError"}
    assert all(not status or int(status) == getattr(errors, name).status for name, status in told.items())


# Each file by its own tool


def tool(*command: str) -> None:
    if shutil.which(command[0]) is None and not (Path(sys.executable).parent / command[0]).exists():
        pytest.skip(f"{command[0]} is not installed here")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, env={"PATH": path, "HOME": "/tmp"})
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_follows_its_schema() -> None:
    tool("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml")


def test_the_kubernetes_manifests_follow_theirs() -> None:
    tool("kubernetes-validate", "--strict", "kubernetes.yaml")


def test_prometheus_takes_its_configuration_and_rules() -> None:
    tool("promtool", "check", "config", "--syntax-only", "monitoring/prometheus.yml")
    tool("promtool", "check", "rules", "monitoring/alerts.yml")


def test_the_dockerfile_passes_hadolint() -> None:
    tool("hadolint", str(ROOT / "Dockerfile"))


def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))


def test_every_setting_that_a_file_names_exists() -> None:
    known = {f"TOKENTELLER_{name.upper()}" for name in ServeSettings.model_fields}
    own = {"TOKENTELLER_IMAGE", "TOKENTELLER_MEMORY"}  # of compose.yaml itself
    for file in ("compose.yaml", "kubernetes.yaml", "ray_serve.py", "README.md"):
        named = set(re.findall(r"TOKENTELLER_[A-Z_]*[A-Z]", (DEPLOY / file).read_text()))
        assert named <= known | own, (file, named - known - own)


def test_kubernetes_sets_no_variable_of_ours_for_a_service_of_our_name() -> None:
    assert manifests()[0]["spec"]["template"]["spec"]["enableServiceLinks"] is False


def test_streams_have_time_to_end_before_the_kill() -> None:
    pod = manifests()[0]["spec"]["template"]["spec"]
    container = pod["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    shutdown = int(environment["TOKENTELLER_SHUTDOWN_TIMEOUT"])
    before = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] >= before + shutdown + 5
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server-1"]
    grace = int(server["stop_grace_period"].removesuffix("s"))
    assert grace >= int(server["environment"]["TOKENTELLER_SHUTDOWN_TIMEOUT"]) + 5


def test_the_memory_limits_hold_weights_pool_and_process() -> None:
    container = manifests()[0]["spec"]["template"]["spec"]["containers"][0]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    settings = ServeSettings(
        model=environment["TOKENTELLER_MODEL"],
        slots=environment["TOKENTELLER_SLOTS"],
        kv_memory=environment["TOKENTELLER_KV_MEMORY"],
    )
    plan = make_plan(settings)[2]
    needed = plan.weight_bytes + plan.pool_bytes + 512 * 2**20
    for bound in ("requests", "limits"):
        assert int(container["resources"][bound]["memory"].removesuffix("Mi")) * 2**20 >= needed


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


# nginx over two servers


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@contextmanager
def nginx(directory: Path, *servers: Live) -> Iterator[str]:
    """The nginx.conf of deploy/ over these servers, on a port of its own."""
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed here: apt-get install nginx-light")
    port, text = free_port(), (DEPLOY / "nginx.conf").read_text()
    for at, server in enumerate(servers, start=1):
        text = text.replace(f"server-{at}:8000", server.url.removeprefix("http://"))
    text = text.replace("listen 8080", f"listen 127.0.0.1:{port}").replace("/tmp/nginx", f"{directory}/nginx")
    (directory / "nginx.conf").write_text(text)
    command = ["nginx", "-c", str(directory / "nginx.conf"), "-p", str(directory), "-g", "daemon off;"]
    with subprocess.Popen(command) as popen:
        try:
            while True:
                with suppress(httpx.TransportError):
                    CLIENT.get(f"http://127.0.0.1:{port}/health")
                    break
                assert popen.poll() is None
                time.sleep(0.05)
            yield f"http://127.0.0.1:{port}"
        finally:
            popen.terminate()


@pytest.fixture(scope="module")
def pair(rand: Path) -> Iterator[tuple[Live, Live]]:
    with serve(model=str(rand), slots=4) as one, serve(model=str(rand), slots=4) as two:
        yield one, two


def served(pair: tuple[Live, Live]) -> list[int]:
    return [live.service.metrics.requests_served for live in pair]


def test_nginx_keeps_a_session_on_one_server_where_its_prefix_is(pair: tuple[Live, Live], tmp_path: Path) -> None:
    with nginx(tmp_path, *pair) as url:
        homes = []
        for session in range(16):
            headers, before, cached = {"X-Session-Id": f"session-{session}"}, served(pair), []
            for turn in range(3):
                body = {"prompt": f"session {session}: " + "and so on " * (3 + turn), "max_tokens": 4, "stream": False}
                answer = CLIENT.post(url + "/generate", json=body, headers=headers).json()
                cached.append(answer["usage"]["cached_tokens"])
            grown = [after - then for after, then in zip(served(pair), before, strict=True)]
            assert sorted(grown) == [0, 3]
            assert cached[1] > 0 and cached[2] > 0
            homes.append(grown.index(3))
        assert 0 < sum(homes) < 16  # and sessions are spread
        before = served(pair)
        for _ in range(16):
            CLIENT.post(url + "/generate", json={"prompt": "x", "max_tokens": 1, "stream": False})
        assert min(after - then for after, then in zip(served(pair), before, strict=True)) > 0


def test_nginx_passes_each_token_at_once_and_a_client_that_leaves_frees_its_slot(
    pair: tuple[Live, Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for live in pair:
        run = live.service.engine.runner.run
        monkeypatch.setattr(live.service.engine.runner, "run", lambda step, run=run: (time.sleep(0.02), run(step))[1])
    body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True}
    with nginx(tmp_path, *pair) as url:
        with CLIENT.stream("POST", url + "/generate", json=body) as response:
            arrivals = [time.monotonic() for _ in response.iter_raw()]
        assert len(arrivals) > 20 and arrivals[len(arrivals) // 2] - arrivals[0] > 0.5  # not all at the end
        with CLIENT.stream("POST", url + "/generate", json=body) as response:
            next(chunks := response.iter_raw())
            assert sum(len(live.service.streams) for live in pair) == 1
            del chunks
        for live in pair:
            live.wait_idle(5)


def test_nginx_asks_the_other_server_while_one_drains(
    pair: tuple[Live, Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = pair[0]
    monkeypatch.setattr(one.service.streams, "drain_until", time.monotonic() + 60)
    before = served(pair)
    with nginx(tmp_path, *pair) as url:
        for session in range(8):
            headers = {"X-Session-Id": f"session-{session}"}
            body = {"prompt": "x", "max_tokens": 1, "stream": False}
            assert CLIENT.post(url + "/generate", json=body, headers=headers).status_code == 200
    assert served(pair) == [before[0], before[1] + 8]


def test_nginx_passes_a_refusal_on_and_never_makes_a_502_of_it(
    pair: tuple[Live, Live], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served(pair)
    with nginx(tmp_path, *pair) as url:

        def ask(at: int) -> int:
            body = {"prompt": "x", "max_tokens": 1, "stream": False}
            headers = {"X-Session-Id": f"session-{at}", "X-Request-Id": f"theirs-{at}"}
            answer = CLIENT.post(url + "/generate", json=body, headers=headers)
            assert answer.headers["x-request-id"] == f"theirs-{at}"
            return answer.status_code

        monkeypatch.setattr(pair[0].service.streams, "queue_limit", -100)
        assert {ask(at) for at in range(12)} == {200}  # the other has room
        assert served(pair) == [before[0], before[1] + 12]
        monkeypatch.setattr(pair[1].service.streams, "queue_limit", -100)
        assert {ask(at) for at in range(12)} == {429}
        monkeypatch.undo()
        assert {ask(at) for at in range(12)} == {200}  # at once


# Soak, Prometheus and Ray, for real


@pytest.mark.slow
def test_a_short_soak_finds_nothing_that_grows_or_is_untrue() -> None:
    with process("--slots", "8", "--queue-limit", "8", "--threads", "1") as server:
        command = [sys.executable, str(DEPLOY / "soak.py"), "--url", server.url, "--minutes", "0.3", "--clients", "24"]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout[done.stdout.index("{") :])
    assert told["clients_saw"]["finished"] > 10 and told["clients_saw"]["left"] > 3 and told["checks"] > 50


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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ray_serve_streams_cancels_scales_up_and_keeps_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'tokenteller[ray]'")
    serve_ray = pytest.importorskip("ray.serve")
    environment = {"SLOTS": "4", "KV_MEMORY": "2MiB", "THREADS": "1", "MODEL": "toy"}
    for name, value in environment.items():
        monkeypatch.setenv(f"TOKENTELLER_{name}", value)
    for name, value in {"RAY_MAX_REPLICAS": "2", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    try:
        serve_ray.start(http_options={"host": "127.0.0.1", "port": port})
        from deploy.ray_serve import application

        serve_ray.run(application(), name="test", route_prefix="/")
        check_ray(f"http://127.0.0.1:{port}", lambda: running_replicas(serve_ray))
    finally:
        serve_ray.shutdown()
        ray.shutdown()


def running_replicas(serve_ray: Any) -> int:
    states = serve_ray.status().applications["test"].deployments["tokenteller"].replica_states
    return int(states.get("RUNNING", 0))


def check_ray(url: str, replicas: Callable[[], int]) -> None:
    body = {"prompt": "ROMEO:", "max_tokens": 60, "ignore_eos": True}
    with CLIENT.stream("POST", url + "/generate", json=body) as response:
        assert len(list(response.iter_raw())) > 30  # token by token
    with CLIENT.stream("POST", url + "/generate", json=body | {"max_tokens": 900}) as response:
        chunks = response.iter_raw()
        next(chunks)
        assert busy(url) == 1
        del chunks
    began = time.monotonic()
    while busy(url):
        assert time.monotonic() - began < 5
    print(f"cancel to free: {time.monotonic() - began:.3f} s")

    stop, began = threading.Event(), time.monotonic()

    def load(_: int) -> None:
        while not stop.is_set():
            with CLIENT.stream("POST", url + "/generate", json=body | {"max_tokens": 300}) as response:
                for _ in response.iter_raw():
                    if stop.is_set():
                        return

    with ThreadPoolExecutor(10) as threads:
        loads = [threads.submit(load, at) for at in range(10)]
        try:
            while replicas() < 2:
                assert time.monotonic() - began < 180, "no second replica came"
                time.sleep(0.5)
            print(f"a second replica after {time.monotonic() - began:.1f} s")
        finally:
            stop.set()
    for one in loads:
        one.result()
    while busy(url):
        time.sleep(0.1)

    homes = set()
    for session in range(12):
        headers, answers = {"X-Session-Id": f"session-{session}"}, []
        for _ in range(3):
            prompt = {"prompt": f"session {session} " * 8, "max_tokens": 1, "stream": False}
            answers.append(CLIENT.post(url + "/generate", json=prompt, headers=headers).json()["usage"])
        assert answers[1]["cached_tokens"] > 0 and answers[2]["cached_tokens"] > 0
        text = CLIENT.get(url + "/metrics", headers=headers).text
        homes.add(re.search(r"^process_start_time_seconds (\S+)", text, re.MULTILINE)[1])  # type: ignore[index]
    assert len(homes) == 2


def busy(url: str) -> int:
    while (answer := CLIENT.get(url + "/slots")).status_code == 503:
        time.sleep(0.2)  # on a busy machine the engine may not answer within 2 s
    return sum(slot["state"] == "running" for slot in answer.json()["slots"])


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


if __name__ == "__main__" and sys.argv[1:] == ["--write"]:
    readme = DEPLOY / "README.md"
    readme.write_text(with_tables(readme.read_text()))
