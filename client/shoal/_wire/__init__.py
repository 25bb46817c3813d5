"""What travels between clients and servers: layouts, chunks and the messages around them (no sockets)."""
