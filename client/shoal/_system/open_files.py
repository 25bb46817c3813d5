"""The limit of this process on open files, which bounds its connections."""

import resource

# Enough for any cluster. Without it, a hard limit of a billion would let a leak of descriptors go unnoticed for days.
MAX_OPEN_FILES = 1 << 20


def raise_open_files() -> int:
    """Raises the soft limit on open files to the hard limit, or to `MAX_OPEN_FILES` if that is lower.

    Returns:
        The soft limit that holds now.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return soft


def open_files_warning(needed: int, what: str, option: str = "") -> str:
    """Returns a warning that says what to do if the limit on open files is too low for a role, or an empty string.

    Args:
        needed: number of files that the role may open.
        what: what needs them, as a plural.
        option: the option that lowers their number; empty if there is none.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return ""
    return (
        f"the limit on open files is {soft}, but {what} need up to {needed}; raise the hard limit "
        f"(ulimit -Hn, LimitNOFILE of systemd){f', or lower {option}' if option else ''}"
    )


__all__ = ["MAX_OPEN_FILES", "open_files_warning", "raise_open_files"]
