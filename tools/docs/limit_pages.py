"""The reference of the limits, from the table in `shoal._limits`."""

from markdown_text import code, page, table, text

from shoal._limits import Limit, catalogue


def pages() -> dict[str, str]:
    """Returns the page of all limits."""
    lines = [
        "# Limits",
        "",
        "This page has the limits of roles, and of messages between processes. What limits a script's own process is",
        "in the guide of the library: see [Scheduled functions](../../how-to/scheduled-functions.md#limits).",
        "",
        "Everything that a caller can make grow has a limit. A request, a call or a connection beyond it is refused,",
        "and the error names the limit. `OVERLOADED` passes with time; `LIMIT_EXCEEDED` and `MESSAGE_TOO_LARGE` do",
        "not. All three have the gRPC status RESOURCE_EXHAUSTED. `BAD_REQUEST` says that a value is out of range.",
        "",
        "A limit with an option can be changed by the operator; each option has a `SHOAL_*` variable, too",
        "([commands](../cli/index.md)). The other limits are fixed.",
        "",
        "The metrics `shoal_coordinator_limits_exceeded_total` and `shoal_server_limits_exceeded_total` count",
        "refusals. Their label `limit` has the name of the limit. The alert ShoalLimitReached fires if a role refuses",
        "something for ten minutes ([runbook](../../how-to/alerts.md#shoallimitreached)).",
        "[Decision 51](../../decisions/0051-bounded-fields-and-pages.md) says how the coordinator computes the highest",
        "step that a job can have reached (`MAX_LEAD`).",
        "",
    ]
    headings = ["limit", "default", "of", "option", "beyond it", "counted by"]
    for title, limits in catalogue.GROUPS:
        rows = ([code(it.name), _default(it), text(it.of), code(it.option), _excess(it), _roles(it)] for it in limits)
        lines += [f"## {title}", *table(headings, rows)]
    return {"reference/limits/index.md": page(lines)}


def _default(limit: Limit) -> str:
    return text(limit.shown or f"{limit.default:,} {limit.unit}")


def _excess(limit: Limit) -> str:
    return text(limit.excess) if limit.excess else f"[{code(limit.error.code)}](../errors/index.md#{limit.error.code})"


def _roles(limit: Limit) -> str:
    return ", ".join(limit.roles) or "-"
