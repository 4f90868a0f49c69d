"""deploy/ray_serve.py for real: streams, cancellation, a second replica under load, sessions that stay."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live import CLIENT, free_port

ROOT = Path(__file__).parent.parent


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
