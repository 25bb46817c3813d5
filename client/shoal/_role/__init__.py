"""The process of a role: its identity, flags, signals, logs and pages."""
