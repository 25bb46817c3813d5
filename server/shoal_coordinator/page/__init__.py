"""The coordinator's web page: its server, access rules, routes, streams, and the data that they show.

`static` has the code for the browser. The page reads the cluster through the shell, and changes it only by the events
of users. Only `process` imports this package, and only if a page is wanted; it imports the shell and `messages`.
"""

from shoal_coordinator.page.server import PageServer

__all__ = [
    "PageServer",
]
