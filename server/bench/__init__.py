"""tokenteller bench: how fast this machine runs the model without HTTP, and where the time of a step goes.

The real engine runs on its own thread, and its readers make SSE frames and drop them.
"""

from tokenteller.server.bench.report import bench_text
from tokenteller.server.bench.run import bench

__all__ = ["bench", "bench_text"]
