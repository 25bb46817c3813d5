"""Distribution of training over ranks without parameter servers: collectives now, the strategies later."""
