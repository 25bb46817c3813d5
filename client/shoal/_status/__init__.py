"""Status of members and of a job's data. Users and roles import these classes from `shoal.status`."""
