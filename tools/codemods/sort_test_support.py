"""Codemod that sorts the modules of tests/support into packages, and has tests import them from there."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "": "chaos forms leaks pull_replies role_metrics s3_server scraping traces waiting witness",
    "clusters": "cluster_probe cluster_rig clusters coordinator_rig exact_worker fake_cluster fake_coordinator "
    "history_server shard_servers supervised",
    "faults": "checkpoint_writer half_a_push mortal_coordinator mortals store_writer",
    "programs": "broken_programs data_programs evaluated_programs model_data model_steps page_programs "
    "recovery_programs traced_programs",
    "devices": "fake_cudnn fake_cupy golden_layers gradient_check",
    "deployment": "browser compose_stack custom_resources docker_engine dockerfile manifest_checks manifest_lives "
    "manifest_network manifest_rules manifests pod_security programs promql",
}
# Whose name would say in its package what the package says.
RENAMED = {"programs": "needed_programs", "clusters": "local"}
RENAMED |= {f"{name}_programs": name for name in ("broken", "data", "evaluated", "page", "recovery", "traced")}
NEW = {
    name: ".".join(filter(None, ("support", package, RENAMED.get(name, name))))
    for package, names in PACKAGES.items()
    for name in names.split()
}


def git(*command: str) -> str:
    """What a git command prints."""
    return subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def rewritten(text: str) -> str:
    """A file that imports the modules by their packages, and names programs by them."""

    def imported(match: re.Match[str]) -> str:
        return f"{match[1]}from {NEW[match[2]]} import "

    def as_object(match: re.Match[str]) -> str:
        package, _, name = NEW[match[2]].rpartition(".")
        alias = f" as {match[2]}" if name != match[2] else ""
        return f"{match[1]}from {package} import {name}{alias}"

    names = "|".join(sorted(NEW, key=len, reverse=True))
    text = re.sub(rf"^( *)from ({names}) import ", imported, text, flags=re.M)
    text = re.sub(rf"^( *)import ({names})(?= *(#|$))", as_object, text, flags=re.M)
    programs = "|".join(PACKAGES["programs"].split())
    return re.sub(rf"(?<![\w.])({programs}):(?=[A-Za-z_{{])", lambda match: f"{NEW[match[1]]}:", text)


def main() -> None:
    """Moves the modules, and rewrites every file that names one."""
    for name, module in NEW.items():
        source = ROOT / "tests/support" / f"{name}.py"
        target = ROOT / "tests" / (module.replace(".", "/") + ".py")
        if source.exists() and source != target:
            target.parent.mkdir(exist_ok=True)
            git("mv", str(source), str(target))
    for name in filter(None, git("ls-files", "tests", "benchmarks", "docs", "CONTRIBUTING.md").split("\n")):
        file = ROOT / name
        if name.endswith((".py", ".md")) and file.is_file():
            before = file.read_text()
            text = rewritten(before) if name.endswith(".py") else before
            for old, module in NEW.items():
                text = text.replace(f"tests/support/{old}.py", f"tests/{module.replace('.', '/')}.py")
            if text != before:
                file.write_text(text)


if __name__ == "__main__":
    main()
