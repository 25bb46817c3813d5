"""The command `placement`, which shows on which servers the variables of a job are."""

from collections import Counter

from shoal._cli import options
from shoal._cli.output import Output, Row
from shoal._display import counted, records


@options.connected
def placement(
    connect: options.Connect,
    job: options.JobArgument,
    as_json: options.JsonOption = False,
) -> None:
    """Shows on which server each variable of a job is, and how many bytes of values each server has.

    A large variable may be divided by rows among servers. Its rows then have a line for each part: [0, 500) are the
    first 500 rows. The bytes are those of the values, without the slots of the optimizer.
    """
    columns = ["variable", "rows", "bytes", "shard", "server", "address"]
    with Output(as_json) as out, connect() as client:
        placed = client.job(job).placement()
        if as_json:
            out.record(records.placement(job, placed))
            return
        rows: list[tuple[list[str], Row]] = [
            (
                [
                    it.variable,
                    "all" if it.whole else f"[{it.start:,}, {it.stop:,})",
                    f"{it.nbytes:,}",
                    str(it.shard),
                    it.server,
                    it.address,
                ],
                {},
            )
            for it in placed
        ]
        sizes: Counter[str] = Counter()
        for it in placed:
            sizes[it.server] += it.nbytes
        variables, servers = counted(len({it.variable for it in placed}), "variable"), counted(len(sizes), "server")
        notes = [f"{server}: {counted(size, 'byte')}" for server, size in sorted(sizes.items())]
        out.rows(f"{job}: {variables} on {servers}", columns, rows, optional=["address", "shard"], notes=notes)


__all__ = ["placement"]
