"""`python -m shoal_worker`: a trainer, as its daemon starts it."""

from shoal._memory import allocator, gc_control

if __name__ == "__main__":
    allocator.tune()
    with gc_control.frozen_from_gc():
        from shoal_worker.trainer import main  # it loads gRPC, which must find the allocator as it will be

    main()
