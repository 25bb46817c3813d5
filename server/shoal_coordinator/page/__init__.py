"""The page on which browsers watch the cluster: its server, who may ask, the routes, streams, and what they read.

What runs in the browser is in `static`. The page reads the cluster through the shell, and changes it by the events of
users alone. `process` alone imports it, and only if a page is wanted; it imports the shell and `messages`.
"""

from shoal_coordinator.page.server import PageServer

__all__ = [
    "PageServer",
]
