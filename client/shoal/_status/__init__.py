"""Status of members, groups of ranks and a job's data. Users and roles import these classes from `shoal.status`."""
