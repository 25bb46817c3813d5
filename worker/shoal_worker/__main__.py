"""`python -m shoal_worker`: a trainer, as its daemon starts it."""

from shoal import _allocator, _garbage

if __name__ == "__main__":
    _allocator.tune()
    with _garbage.spared():
        from shoal_worker.trainer import main  # it loads gRPC, which must find the allocator as it will be

    main()
