"""How bytes travel to a server: shared memory, lanes (sockets with frames) and gRPC streams."""
