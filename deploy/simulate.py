"""Compare admission rules on the real scheduler and ledger, with a runner that computes nothing.

    python deploy/simulate.py                                    the five mixes under every rule
    python deploy/simulate.py --mix full --rule peak --requests 100000
    python deploy/simulate.py --trace requests.csv               columns: arrival, prompt, max_tokens, output

Requests of a mix arrive as fast as the queue takes them, those of a trace at their time in seconds. `optimistic` and
`restart` model servers that admit what fits now and evict the youngest when the pool is full: the evicted text is
computed again, or lost and generated anew.

The columns: sequences at once and share of the pool held (means), steps, sequence steps stalled, requests rejected and
evicted, starts later than reported, wait / reported wait of those that had to wait, simulated seconds in all and in the
queue, and what the simulation made per second of CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from measure.arguments import number
from simulation.jobs import MIXES, Job, TraceError, mix_jobs, trace_jobs
from simulation.servers import EvictingServer, Figures, Machine, RealScheduler

from tokenteller.model.kv_memory import KVLayout

RULES = ("reserve", "peak", "learned", "optimistic", "restart")
HEADINGS = (
    *("mix", "rule", "at once", "pool used", "steps", "stalled %", "rejected", "evicted", "late"),
    *("ratio p50", "p90", "time", "queue p50", "p99", "req/s", "tokens/s"),
)


def run(server: RealScheduler | EvictingServer, jobs: Iterator[Job], machine: Machine) -> Figures:
    """Feeds the jobs to the server, each at its arrival or as soon as the queue has room, until all are done."""
    figures, began = server.figures, time.process_time()
    fitting = _that_fit(jobs, machine, figures)
    job = next(fitting, None)
    while job or server.busy():
        while job and job.arrival <= figures.time and server.queue_length() < machine.queue:
            server.submit(job)
            job = next(fitting, None)
        if job and not server.busy():
            figures.time = job.arrival
            continue
        server.step()
    figures.cpu_s = time.process_time() - began
    return figures


def _that_fit(jobs: Iterator[Job], machine: Machine, figures: Figures) -> Iterator[Job]:
    """Drops and counts the jobs that a server would reject, as neither context nor pool can ever hold them."""
    most = machine.layout.tokens_that_fit(machine.pool_bytes)
    for job in jobs:
        if job.prompt + job.max_tokens <= most:
            yield job
        else:
            figures.rejected += 1


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw, allow_abbrev=False)
    add = parser.add_argument_group("requests").add_argument
    add("--mix", choices=MIXES, nargs="+", default=list(MIXES), help="(all)")
    add("--trace", metavar="FILE", help="a CSV file in place of the mixes")
    add("--requests", type=number(1), default=1000, help="of each mix (%(default)s)")
    add("--seed", type=int, default=0, help="of the mixes (%(default)s)")
    add = parser.add_argument_group("server").add_argument
    add("--rule", choices=RULES, nargs="+", default=list(RULES), help="(all)")
    add("--slots", type=number(1), default=64, help="(%(default)s)")
    add("--queue", type=number(1), default=64, help="requests that wait at once (%(default)s)")
    add("--pool-rows", type=number(16), default=16384, help="size of the K/V pool (%(default)s)")
    add("--max-context", type=number(2), default=2600, help="(%(default)s)")
    add("--chunk", type=number(1), default=192, help="prompt rows per step (%(default)s)")
    add = parser.add_argument_group("time").add_argument
    add("--step-ms", type=number(0, float), default=1000.0, help="of a step; 1,000 makes seconds steps (%(default)g)")
    add("--row-us", type=number(0, float), default=0.0, help="of each row in a step (%(default)g)")
    return parser.parse_args(argv)


def machine(options: argparse.Namespace) -> Machine:
    layout = KVLayout(1, 1, 64, options.max_context)  # one layer, one head: a page holds 16 rows
    return Machine(
        layout,
        layout.committed(16) * options.pool_rows // 16,
        options.slots,
        options.queue,
        options.chunk,
        options.step_ms / 1e3,
        options.row_us / 1e6,
    )


def row(figures: Figures, pool_bytes: int) -> tuple[str, ...]:
    steps, cpu_s = max(1, figures.steps), max(figures.cpu_s, 1e-9)
    ratios, queued = sorted(figures.wait_ratios), sorted(figures.queued)
    return (
        f"{figures.running / steps:.1f}",
        f"{figures.held_bytes / steps / pool_bytes:.2f}",
        f"{figures.steps:,}",
        f"{100 * figures.stalled / max(1, figures.running):.3f}",
        f"{figures.rejected:,}",
        f"{figures.evicted:,}",
        f"{figures.late}",
        *(f"{ratios[len(ratios) * percent // 100]:.2f}" if ratios else "" for percent in (50, 90)),
        f"{figures.time:,.0f}",
        *(f"{queued[len(queued) * percent // 100]:,.0f}" if queued else "" for percent in (50, 99)),
        f"{len(queued) / cpu_s:,.0f}",
        f"{figures.tokens / cpu_s:,.0f}",
    )


def simulate(options: argparse.Namespace) -> None:
    """Prints the table row by row. Raises TraceError before its headings if the trace is wrong from the start."""
    where = machine(options)
    table = [HEADINGS]
    for name in [options.trace] if options.trace else options.mix:
        for rule in options.rule:
            jobs = trace_jobs(name) if options.trace else mix_jobs(name, options.requests, options.seed)
            evicts = rule in ("optimistic", "restart")
            server = EvictingServer(where, rule == "optimistic") if evicts else RealScheduler(where, rule)
            table.append((Path(name).name, rule, *row(run(server, jobs, where), where.pool_bytes)))
            while table:
                print("".join(f"{cell:>12}" for cell in table.pop(0)), flush=True)


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    try:
        simulate(options)
    except TraceError as error:
        print(f"simulate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
