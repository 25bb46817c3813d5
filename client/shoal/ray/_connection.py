"""The connection of a process to Ray, with errors that say what to do."""

import ray

from shoal import errors


def connect() -> None:
    """Connects this process to Ray, unless it is connected. RAY_ADDRESS names the cluster.

    Without the variable, Ray takes the cluster that runs on this machine, or starts one.

    Raises:
        StartFailed: the Ray cluster has another version of Ray or Python.
        Unreachable: there is no Ray cluster at the address, or this machine is not a node of it.
    """
    if ray.is_initialized():
        return
    try:
        ray.init()
    except RuntimeError as error:
        if "ersion mismatch" not in str(error):
            raise errors.Unreachable(
                f"cannot connect to Ray: {error}. Run this on a node of the Ray cluster, such as in a job of Ray; "
                "RAY_ADDRESS names the cluster"
            ) from None
        raise errors.StartFailed(
            "the Ray cluster has another version of Ray or Python than this process; run this command with the same "
            f"versions as the cluster. {error}"
        ) from None
    except ConnectionError as error:
        raise errors.Unreachable(f"cannot connect to Ray: {error}. RAY_ADDRESS names the cluster") from None


__all__ = ["connect"]
