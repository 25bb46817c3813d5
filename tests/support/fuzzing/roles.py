"""A coordinator with a page, and a server, in a process of their own: `python -m support.fuzzing.roles`.

It prints where they listen as one line of JSON, and ends at the end of its standard input. With the folder of
certificates as an argument, all ports use TLS, and there is a port for /metrics and /healthz, too.
"""

import json
import logging
import sys
from pathlib import Path

from shoal._memory import allocator


def main() -> None:
    """Runs both until standard input ends."""
    allocator.tune()  # first, as the command of a role does
    import prometheus_client  # noqa: PLC0415
    import structlog  # noqa: PLC0415

    from shoal._role.http_endpoints import RoleHttpServer  # noqa: PLC0415
    from shoal._security import NO_CREDENTIALS  # noqa: PLC0415
    from shoal_coordinator.process import CoordinatorConfig, start_coordinator  # noqa: PLC0415
    from shoal_server.process import Server, ServerConfig  # noqa: PLC0415

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    of = {"coordinator": NO_CREDENTIALS, "server": NO_CREDENTIALS}
    if sys.argv[1:]:
        from support.certificates import credentials  # noqa: PLC0415

        of = {role: credentials(Path(sys.argv[1]), role) for role in of}
    config = CoordinatorConfig(
        listen="127.0.0.1:0",
        page_listen="127.0.0.1:0",
        heartbeat_timeout_s=600.0,
        heartbeat_interval_s=1.0,
        credentials=of["coordinator"],
    )
    registry = prometheus_client.CollectorRegistry()
    coordinator = start_coordinator(config, registry)
    server = Server(
        ServerConfig("s", coordinator.address, credentials=of["server"]), prometheus_client.CollectorRegistry()
    )
    endpoints = RoleHttpServer("127.0.0.1:0", registry, tls=of["server"].tls)
    endpoints.not_ready = ""
    print(json.dumps([coordinator.address, server.address, coordinator.page, endpoints.address]), flush=True)
    sys.stdin.read()
    endpoints.stop()
    server.stop()
    coordinator.stop()


if __name__ == "__main__":
    main()
