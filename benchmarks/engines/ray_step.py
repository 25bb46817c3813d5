"""The speed of a step on Ray and in plain processes, by turns: python benchmarks/engines/ray_step.py.

One cluster runs on Ray. Two others are plain child processes: one with TLS, as on Ray, and one without. Each of them
trains the digits in turn, with two servers and two workers. The script prints one JSON line: the median steps a second
of each, and the median of the ratios of Ray to the two others within a turn.
"""

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

import shoal
import shoal.ray
from shoal import optim
from shoal._security import VARIABLES
from shoal._security.certificates import UP, issue_certificate, make_certificates

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZE: dict[str, Any] = {"servers": 2, "workers": 2, "path": EXAMPLES}


def steps_a_second(client: shoal.Client, hidden: int, epochs: int) -> float:
    """Trains a perceptron with this number of hidden units once, and returns the speed."""
    job = shoal.Job(
        "digits:Digits",
        settings={"hidden": hidden},
        workers=2,
        epochs=epochs,
        optimizer=optim.Adam(0.003),
        consistency=shoal.Synchronous(),
    )
    result = client.submit(job).wait()
    client.drop(result.job)
    return result.progress.steps / result.seconds


def tls_variables(folder: Path) -> dict[str, str]:
    """Returns the variables with a new certificate for all roles of a local cluster."""
    make_certificates(folder)
    certificate, key = issue_certificate(UP, UP, ca=folder)
    return dict(zip(VARIABLES, map(str, (folder / "ca.pem", certificate, key)), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=4096, help="hidden units; each has 300 bytes of variables")
    parser.add_argument("--epochs", type=int, default=20)
    given = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        clusters: dict[str, Any] = {
            "plain": shoal.LocalCluster(**SIZE),
            "plain with TLS": shoal.LocalCluster(**SIZE, env=tls_variables(folder)),
            "Ray": shoal.ray.cluster(**SIZE),
        }
        clients = {}
        for name, cluster in clusters.items():
            stack.enter_context(cluster)
            clients[name] = stack.enter_context(cluster.client())
            steps_a_second(clients[name], given.hidden, 2)
        speeds: dict[str, list[float]] = {name: [] for name in clients}
        for turn in range(given.turns):
            for name in [*clients][:: 1 if turn % 2 else -1]:
                speeds[name].append(steps_a_second(clients[name], given.hidden, given.epochs))
    found: dict[str, float] = {name: round(statistics.median(each), 1) for name, each in speeds.items()}
    for name in ("plain", "plain with TLS"):
        ratios = [mine / other for mine, other in zip(speeds["Ray"], speeds[name], strict=True)]
        found[f"Ray / {name}"] = round(statistics.median(ratios), 4)
        found[f"Ray / {name}, of medians"] = round(found["Ray"] / found[name], 4)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
