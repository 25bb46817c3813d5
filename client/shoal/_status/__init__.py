"""Status of members and the data account. Users and roles import these classes from `shoal.status`."""
