"""Codemod that moves the unit tests into folders that mirror the packages, and rewrites the paths to them."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXTS = (".py", ".md", ".toml", "Makefile")
# A word of a test's file name that its folder says already.
SAID = ("checkpoint_", "data_", "nn_", "page_", "role_", "coordinator_", "worker_", "shard_")
FOLDERS = {
    "shoal": "callbacks checkpoints consistency errors evaluation evaluation_docs initializers job_spec local_cluster "
    "optim partitioners public_surface status timings variables",
    "shoal/cli": "cli",
    "shoal/checkpoint": "checkpoint_catalogue checkpoint_damage checkpoint_direct checkpoint_files checkpoint_folders "
    "checkpoint_stores",
    "shoal/display": "records",
    "shoal/memory": "allocator buffers garbage leases",
    "shoal/numerics": "kernels_ahead",
    "shoal/role": "identity role role_pages",
    "shoal/tracing": "tracing",
    "shoal/training": "outbox overlap",
    "shoal/transport": "lane segment",
    "shoal/wire": "chunks framing outgoing packing",
    "shoal/data": "data_augmented data_bad_input data_sources images images_augment order read_ahead",
    "shoal_server": "call_pool memory_limit stalls server_load",
    "shoal_server/shards": "arena gate shard_state shards_together snapshot",
    "shoal_server/optimizers": "conversions idle_cores kernels update_rules",
    "shoal_server/serving": "pulls",
    "shoal_server/checkpoints": "saver",
    "shoal_coordinator": "coordinator_metrics coordinator_shell",
    "shoal_coordinator/job": "checkpointing crew evaluating jobs ledger recovery",
    "shoal_coordinator/cluster": "cluster_machine departures membership placement",
    "shoal_coordinator/effects": "checkpoint_effects performer",
    "shoal_coordinator/persistence": "durable_cluster store",
    "shoal_coordinator/page": "page_parts page_reader page_scripts",
    "shoal_worker": "arrays batches cuda daemon_machine programs trainer training worker_main worker_metrics",
    "shoal_nn": "cudnn nn_containers nn_draws nn_features nn_golden nn_gradients nn_losses nn_metrics nn_models "
    "nn_programs nn_tables nn_values",
    "project": "benchmarks chaos_harness digits_example gpu_benchmark layering leaks needed_programs",
}


def git(*command: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Moves the tests, and rewrites how many folders lie between them and the root."""
    paths: dict[str, str] = {}
    for folder, names in FOLDERS.items():
        (ROOT / "tests/unit" / folder).mkdir(parents=True, exist_ok=True)
        for name in names.split():
            said = next((word for word in SAID if name.startswith(word)), "")
            old, new = f"tests/unit/test_{name}.py", f"tests/unit/{folder}/test_{name.removeprefix(said)}.py"
            if not (ROOT / old).exists():
                continue
            git("mv", old, new)
            paths[old] = new
            file, deeper = ROOT / new, folder.count("/") + 1
            text = re.sub(r"\.parents\[(\d)\]", lambda match: f".parents[{int(match[1]) + deeper}]", file.read_text())  # noqa: B023
            file.write_text(text)
    for name in filter(None, git("ls-files").split("\n")):
        if name.endswith(TEXTS) and name != "CHANGELOG.md" and not name.startswith("tools/codemods/"):
            file = ROOT / name
            before = text = file.read_text()
            for old, new in paths.items():
                text = text.replace(old, new)
            if text != before:
                file.write_text(text)


if __name__ == "__main__":
    main()
