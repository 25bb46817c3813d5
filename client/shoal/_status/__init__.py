"""The members and the data account of `shoal.status`, from which users and roles import them."""
