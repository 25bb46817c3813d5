"""Entry point of a trainer: `python -m shoal_worker`, as its daemon starts it."""

from shoal._memory import allocator, gc_control
from shoal._system import hidden

if __name__ == "__main__":
    allocator.tune()
    with gc_control.frozen_from_gc():
        with hidden("rich"):  # which structlog would use for tracebacks, in color
            import structlog  # noqa: F401

        from shoal_worker.trainer import main  # loads gRPC, so the allocator is tuned first

    main()
