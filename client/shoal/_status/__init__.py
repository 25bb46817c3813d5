"""Parts of `shoal.status`, which is where users and roles import them from: `members` and `data`."""
