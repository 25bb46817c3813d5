"""Builder of the peers' virtual environments: python benchmarks/bench_peers.py, or `make bench-peers`.

A peer is a system that the benchmarks compare Shoal with (`rivals`). The environments are in .peers. git ignores this
folder, and `make bench` searches it for peers. Existing environments are kept. The script prints the environment
variables that name their interpreters. Its exit status is 1 if an environment could not be built.

The package index decides which build of torch is installed. The usual build includes CUDA, which is not needed here.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import rivals


def main() -> int:
    failed = []
    lines = []
    for name, environment in rivals.BY_NAME.items():
        folder = rivals.ENVIRONMENTS / name
        if not (folder / "bin" / "python").exists() and not build(folder, environment.packages):
            failed.append(name)
            continue
        lines.append(f"{rivals.variable(name)}={folder / 'bin' / 'python'}")
    print(*lines, sep="\n")
    for name in failed:
        print(f"{name} could not be built; pip's reason is above", file=sys.stderr)
    return 1 if failed else 0


def build(folder: Path, packages: tuple[str, ...]) -> bool:
    """Builds one environment. If the build fails, it leaves no folder behind."""
    print(f"building {folder} with {' '.join(packages)}", file=sys.stderr)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, stdout=sys.stderr)
        subprocess.run([*pip, *packages], check=True, stdout=sys.stderr)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder, ignore_errors=True)
        return False
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return True


if __name__ == "__main__":
    sys.exit(main())
