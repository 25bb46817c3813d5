"""The state machine of one job's life."""
