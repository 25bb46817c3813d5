"""The coordinator's web page: its server, access rules, routes, streams, and the data that they show.

`static` has the code for the browser. The page reads the cluster through the shell. It changes the cluster only by
events that stand for users' requests, such as a cancellation. This package imports the shell and `messages`. Only
`process` imports it, and only if the coordinator serves a page.
"""

from shoal_coordinator.page.server import PageServer

__all__ = [
    "PageServer",
]
