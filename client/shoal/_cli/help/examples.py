"""Examples at the end of each command's `--help`: lines that a newcomer can copy."""

from collections.abc import Mapping, Sequence

EXAMPLES: Mapping[str, Sequence[str]] = {
    "shoal": [
        "shoal examples digits.py",
        "shoal up --servers 2 --workers 2",
        "shoal submit digits:Digits --workers 2 --follow",
        "shoal jobs",
    ],
    "shoal up": [
        "shoal up",
        "shoal up --servers 1 --workers 0 --listen 127.0.0.1:0",
        "shoal up --path programs --checkpoints ./checkpoints --store ./shoal.db",
    ],
    "shoal status": ["shoal status", "shoal status --all", "shoal status -c 10.0.0.5:7070 --json"],
    "shoal groups": ["shoal groups", "shoal groups --json"],
    "shoal page": ["shoal page"],
    "shoal compile": ["shoal compile /opt/kernels --level x86-64-v3"],
    "shoal version": ["shoal version", "shoal version --json"],
    "shoal examples": ["shoal examples", "shoal examples digits.py", "shoal examples --all --to my-examples"],
    "shoal submit": [
        "shoal submit digits:Digits --workers 2 --follow",
        "shoal submit digits:Digits --name night --epochs 20 --batch-size 64 --set hidden=64",
        "shoal submit digits:Digits --consistency ssp:4 --optimizer adam:learning_rate=0.003",
        "shoal submit digits:Digits --optimizer 'adam:lr=0.003,group=*bias|weight_decay=0'",
        "shoal submit digits:Digits --from night/best",
    ],
    "shoal jobs": ["shoal jobs", "shoal jobs --all", "shoal jobs --json"],
    "shoal wait": ["shoal wait night --follow", "shoal wait night --timeout 600"],
    "shoal logs": ["shoal logs night", "shoal logs night --follow"],
    "shoal metrics": ["shoal metrics night", "shoal metrics night --json"],
    "shoal data": ["shoal data night"],
    "shoal timings": ["shoal timings night", "shoal timings train --group"],
    "shoal set-learning-rate": ["shoal set-learning-rate night 0.0001"],
    "shoal cancel": ["shoal cancel night"],
    "shoal drop": ["shoal drop night"],
    "shoal pull": ["shoal pull night weights.npz"],
    "shoal checkpoint": ["shoal checkpoint night --timeout 60"],
    "shoal export": ["shoal export night/best weights.safetensors --checkpoints ./checkpoints"],
    "shoal import": ["shoal import weights.safetensors base --checkpoints ./checkpoints"],
    "shoal run": ["TF_CONFIG=... shoal run --checkpoints ./checkpoints"],
    "shoal token": ["shoal token create alice --file alice.token", "shoal token ls"],
    "shoal token create": ["shoal token create alice --role reader --days 7 --file alice.token"],
    "shoal token revoke": ["shoal token revoke alice"],
    "shoal token ls": ["shoal token ls"],
    "shoal checkpoints": ["shoal checkpoints ls --checkpoints ./checkpoints"],
    "shoal checkpoints ls": ["shoal checkpoints ls --checkpoints ./checkpoints", "shoal checkpoints ls night"],
    "shoal checkpoints show": ["shoal checkpoints show night/3 --checkpoints ./checkpoints"],
    "shoal checkpoints verify": ["shoal checkpoints verify night --checkpoints s3://bucket/prefix"],
    "shoal checkpoints rm": ["shoal checkpoints rm night/3", "shoal checkpoints rm night --all"],
    "shoal certs": ["shoal certs init certificates"],
    "shoal certs init": ["shoal certs init certificates --host node-1.example --host node-2.example"],
    "shoal certs issue": [
        "shoal certs issue submitter ann --ca certificates",
        "shoal certs issue worker gpu-2 --ca certificates --host node-2.example",
    ],
    "shoal coordinator": ["shoal coordinator --listen 127.0.0.1:7070 --store ./shoal.db --checkpoints ./checkpoints"],
    "shoal server": ["shoal server -c 127.0.0.1:7070 --checkpoints ./checkpoints"],
    "shoal worker": ["shoal worker -c 127.0.0.1:7070 --path programs"],
}

__all__ = ["EXAMPLES"]
