"""What a newcomer waits for: time to ready and to the first token, at the first start and later, and memory.

    python deploy/first_minute.py                                    the toy and SmolLM2, by default settings
    python deploy/first_minute.py --serve "--model smollm2 --slots 4"
    python deploy/first_minute.py --checkout ../before --module server --json

Runs a fresh clone of the checkout's last commit with this Python and an empty numba cache; later starts use what the
first one compiled. Times count from the start of the process. Peak memory is read when the server is ready, before
any request, and includes its child processes; CPU is the server's own. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import httpx
from measure.arguments import number
from rich.console import Console
from rich.table import Table

FIGURES = {"ready_s": "ready s", "first_token_s": "first token s", "cpu_s": "CPU s", "peak_mib": "peak MiB"}
REQUEST = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}


def clone(checkout: Path, folder: Path) -> dict[str, str]:
    """Clones into the folder. Returns the environment in which the clone is imported and compiled anew."""
    source = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", checkout, source], check=True)
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TOKENTELLER_")}
    paths = f"{source / '.ci/src'}:{source}"
    return inherited | {"PYTHONPATH": paths, "NUMBA_CACHE_DIR": str(folder / "numba")}


def start(command: list[str], env: dict[str, str], timeout: float) -> dict[str, float]:
    """Starts a server, waits for a token and stops it. Raises RuntimeError when it ends or takes too long."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen([*command, "--port", str(port)], env=env, stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=timeout, trust_env=False) as client:
                peak = wait_until_ready(client, server, began + timeout)
                report = {"ready_s": time.perf_counter() - began, "peak_mib": peak / 2**20, "cpu_s": cpu_s(server.pid)}
                with client.stream("POST", "/generate", json=REQUEST) as answer:
                    next(line for line in answer.iter_lines() if '"type":"token"' in line)
                return report | {"first_token_s": time.perf_counter() - began}
        except (TimeoutError, StopIteration, httpx.HTTPError) as error:
            log.seek(0)
            raise RuntimeError(f"{shlex.join(command)}: {error or 'no token'}\n{log.read()[-2000:]}") from None
        finally:
            server.terminate()
            server.wait()


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes], deadline: float) -> int:
    """Returns the peak memory in bytes. Memory of child processes is sampled, as often as /ready is asked."""
    peak = 0
    while server.poll() is None and time.perf_counter() < deadline:
        peak = max(peak, sum(memory(pid, "VmRSS") for pid in family(server.pid)))
        try:
            if client.get("/ready").is_success:
                return max(peak, memory(server.pid, "VmHWM"))
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise TimeoutError("not ready in time" if server.returncode is None else f"ended with {server.returncode}")


def family(pid: int) -> Iterator[int]:
    yield pid
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            yield from family(int(child))


def memory(pid: int, field: str) -> int:
    """Bytes, by /proc/PID/status; 0 for a process that has just ended."""
    try:
        found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime


def measure(options: argparse.Namespace, arguments: str) -> list[dict[str, Any]]:
    """One row for the first start, one for the median of the later ones."""
    command = [sys.executable, "-P", "-m", options.module, "serve", *shlex.split(arguments)]
    with tempfile.TemporaryDirectory() as folder:
        env = clone(options.checkout, Path(folder))
        starts = [start(command, env, options.timeout) for _ in range(1 + options.later)]
    rows = {"first": starts[:1], "later": starts[1:]}
    return [
        {"serve": arguments or "(defaults)", "start": name}
        | {figure: round(median(one[figure] for one in several), 2) for figure in FIGURES}
        for name, several in rows.items()
    ]


def main(argv: list[str] | None = None) -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument
    add("--serve", action="append", metavar="ARGS", help="arguments of serve; may be given again")
    add("--later", type=number(1), default=3, metavar="N", help="later starts; their median is shown (%(default)s)")
    add("--checkout", type=Path, default=Path(__file__).parents[1], metavar="PATH", help="(this one)")
    add("--module", default="tokenteller.server", help="what `python -m` runs (%(default)s)")
    add("--timeout", type=number(1, float), default=300.0, metavar="S", help="of a start (%(default)g)")
    add("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(argv)
    try:
        rows = [row for arguments in options.serve or ["", "--model smollm2"] for row in measure(options, arguments)]
    except (RuntimeError, subprocess.CalledProcessError) as error:
        print(f"first_minute: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(rows))
        return 0
    table = Table("serve", "start")
    for heading in FIGURES.values():
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(row["serve"], row["start"], *(f"{row[name]:.2f}" for name in FIGURES))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
