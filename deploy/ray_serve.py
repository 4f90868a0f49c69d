"""tokenteller beyond one machine: the whole server as a Ray Serve deployment.

    pip install 'tokenteller[ray]'
    TOKENTELLER_SLOTS=32 TOKENTELLER_KV_MEMORY=512MiB serve run deploy.ray_serve:app

Every replica is one server with its own pool. Ray routes to them: requests with the same X-Session-Id go to the same
replica, where the K/V of the last turn may still be resident; others are spread. A client that leaves frees its slot.
Replicas come and go with the share of the pools that is in use or waited for (see `replicas_wanted`); one that goes
finishes its streams first. All settings come from the environment, TOKENTELLER_..., as `tokenteller serve` reads them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig

from tokenteller.server.settings import ServeSettings, check_environment

DEMAND = "kv_demand"  # bytes that those who run and those who wait can come to need, as a share of a replica's pool
WISHED = 0.7
CPUS = ServeSettings().threads or 2


def build() -> Any:
    """The app of one replica; called in the replica's own process."""
    from tokenteller.server.api.app import create_app

    Replica.app = create_app(ServeSettings(threads=CPUS))
    return Replica.app


@serve.ingress(build)
class Replica:
    """One server. Ray asks it how it is and how busy."""

    app: Any = None

    def check_health(self) -> None:
        """Raises where the engine is dead or stuck; Ray then starts another replica in its place."""
        sick = Replica.app.state.service.streams.unhealthy()
        if sick:
            raise RuntimeError(sick)

    def record_autoscaling_stats(self) -> dict[str, float]:
        scheduler = Replica.app.state.service.engine.scheduler
        ledger = scheduler.ledger
        waiting = sum(ledger.layout.committed(s.request.rows_max) for s in list(scheduler.waiting))
        return {DEMAND: (scheduler.admission.peak_demand_bytes + waiting) / ledger.budget_bytes}


def replicas_wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """As many replicas as hold the present demand at WISHED of their pools."""
    demand = sum(context.aggregated_metrics.get(DEMAND, {}).values())
    wanted = max(context.capacity_adjusted_min_replicas, math.ceil(demand / WISHED))
    return min(wanted, context.capacity_adjusted_max_replicas), {}


def application(environment: Mapping[str, str] = os.environ) -> serve.Application:
    """The deployment with its limits; RAY_MIN_REPLICAS and RAY_MAX_REPLICAS bound the number."""
    check_environment(environment)
    settings = ServeSettings()
    deployment = serve.deployment(
        name="tokenteller",
        ray_actor_options={"num_cpus": CPUS},
        # the queue is ours: it answers 429 with a time, Ray's would only grow
        max_ongoing_requests=settings.slots + settings.queue_limit + 64,
        graceful_shutdown_timeout_s=settings.shutdown_timeout,
        request_router_config=RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
        ),
        autoscaling_config=AutoscalingConfig(
            min_replicas=int(environment.get("RAY_MIN_REPLICAS", "1")),
            max_replicas=int(environment.get("RAY_MAX_REPLICAS", "4")),
            look_back_period_s=15,  # Ray wants more than the 10 s between two reports
            upscale_delay_s=5,
            downscale_delay_s=120,
            policy=AutoscalingPolicy(policy_function=replicas_wanted),
        ),
    )(Replica)
    return deployment.bind()


app = application()
