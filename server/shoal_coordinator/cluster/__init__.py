"""The state machine of the cluster: members, scheduling, placement."""
