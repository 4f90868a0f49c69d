"""tokenteller on several machines: the whole server as a Ray Serve deployment.

    pip install 'tokenteller[ray]'
    TOKENTELLER_SLOTS=32 TOKENTELLER_KV_MEMORY=512MiB serve run deploy.ray_serve:app

Each replica is one server with its own pool. Ray sends requests with the same X-Session-Id to the same replica, where
the K/V of the last turn may still be cached, and spreads the others. A client that disconnects frees its slot. The
number of replicas follows the share of the pools that is in use or waited for (`replicas_wanted`); a replica that is
removed finishes its streams first. All settings come from the environment, TOKENTELLER_..., as for `tokenteller serve`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig

from tokenteller.server.settings import ServeSettings, check_environment

DEMAND = "kv_demand"  # most bytes that running and waiting requests can need, as a share of a replica's pool
TARGET = 0.7
CPUS = ServeSettings().threads or 2


def build() -> Any:
    """The app of one replica; Ray calls this in the replica's own process."""
    from tokenteller.server.api.app import create_app

    Replica.app = create_app(ServeSettings(threads=CPUS))
    return Replica.app


@serve.ingress(build)
class Replica:
    """One server. Ray asks for its health and its load."""

    app: Any = None

    def check_health(self) -> None:
        """Raises RuntimeError if the engine is dead or stuck; Ray then replaces the replica."""
        sick = Replica.app.state.service.streams.unhealthy()
        if sick:
            raise RuntimeError(sick)

    def record_autoscaling_stats(self) -> dict[str, float]:
        scheduler = Replica.app.state.service.engine.scheduler
        ledger = scheduler.ledger
        waiting = sum(ledger.layout.committed(s.request.rows_max) for s in list(scheduler.waiting))
        return {DEMAND: (scheduler.admission.peak_demand_bytes + waiting) / ledger.budget_bytes}


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many replicas as bring the current demand to TARGET of their pools."""
    demand = sum(context.aggregated_metrics.get(DEMAND, {}).values())
    wanted = max(context.capacity_adjusted_min_replicas, math.ceil(demand / TARGET))
    return min(wanted, context.capacity_adjusted_max_replicas), {}


def application(environment: Mapping[str, str] = os.environ) -> serve.Application:
    """The deployment; RAY_MIN_REPLICAS and RAY_MAX_REPLICAS bound the number of replicas."""
    check_environment(environment)
    settings = ServeSettings()
    deployment = serve.deployment(
        name="tokenteller",
        ray_actor_options={"num_cpus": CPUS},
        # our own queue refuses with 429 and Retry-After; Ray's would only grow
        max_ongoing_requests=settings.slots + settings.queue_limit + 64,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
        ),
        autoscaling_config=AutoscalingConfig(
            min_replicas=int(environment.get("RAY_MIN_REPLICAS", "1")),
            max_replicas=int(environment.get("RAY_MAX_REPLICAS", "4")),
            look_back_period_s=15,  # must exceed the 10 s between two reports
            upscale_delay_s=5,
            downscale_delay_s=120,
            policy=AutoscalingPolicy(policy_function=replicas_wanted),
        ),
    )(Replica)
    return deployment.bind()


app = application()
