"""A coordinator with a page, and a server, in a process of their own: `python -m support.fuzzing.roles`.

It prints where they listen as one line of JSON, and ends at the end of its standard input.
"""

import json
import logging
import sys

from shoal._memory import allocator


def main() -> None:
    """Runs both until standard input ends."""
    allocator.tune()  # first, as the command of a role does
    import prometheus_client  # noqa: PLC0415
    import structlog  # noqa: PLC0415

    from shoal_coordinator.process import CoordinatorConfig, start_coordinator  # noqa: PLC0415
    from shoal_server.process import Server, ServerConfig  # noqa: PLC0415

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    config = CoordinatorConfig(
        listen="127.0.0.1:0", page_listen="127.0.0.1:0", heartbeat_timeout_s=600.0, heartbeat_interval_s=1.0
    )
    coordinator = start_coordinator(config, prometheus_client.CollectorRegistry())
    server = Server(ServerConfig("s", coordinator.address), prometheus_client.CollectorRegistry())
    print(json.dumps([coordinator.address, server.address, coordinator.page]), flush=True)
    sys.stdin.read()
    server.stop()
    coordinator.stop()


if __name__ == "__main__":
    main()
