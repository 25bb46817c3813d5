"""The reference of the errors, from the catalogue in `shoal.errors`."""

import inspect
import re

from markdown_text import code, page, table, text

from shoal import errors
from shoal._cli.output import EXIT_CODES_HELP
from shoal._system.exit_codes import exit_code

# Docstrings name a page of the documentation by its path.
_PAGE = re.compile(r"docs/([a-z/-]+\.md)")


def pages() -> dict[str, str]:
    """Returns the page of all errors."""
    rows = []
    for name in errors.__all__:
        error = getattr(errors, name)
        if error is not errors.ShoalError:
            status, exit_ = code(error.status), str(exit_code(error("")))
            anchor = f'<span id="{error.code}"></span>'
            cells = [anchor + code(f"shoal.errors.{name}"), code(error.code), status, exit_]
            rows.append([*cells, _PAGE.sub(r"[docs/\1](../../\1)", text(inspect.getdoc(error) or ""))])
    lines = [
        "# Errors",
        "",
        "Every error that Shoal raises is a class of `shoal.errors` and a subclass of",
        "[`ShoalError`](../python/shoal.md#shoal.ShoalError). The code names it on the wire, in `--json` output and in",
        "the label `code` of metrics. A code never changes, and no other error ever gets it.",
        "If a command or a role ends because of an error, its exit code is the one in that error's row.",
        *table(["class", "code", "gRPC status", "exit code", "meaning"], rows),
        "## Exit codes",
        "",
        text(EXIT_CODES_HELP),
        "",
        "If SIGTERM arrives while the first process of a container is still loading, it exits with 143.",
    ]
    return {"reference/errors/index.md": page(lines)}
