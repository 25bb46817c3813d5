"""The coordinator: membership, placement, jobs and the data ledger."""
