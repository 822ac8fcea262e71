"""How much memory is free, amounts of it in words, and what does not fit."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from infoflow_lens.foundation.errors import InfoFlowError, first_line

_WORKER_BYTES = 5 * 2**27  # of a process that has imported everything and trained nothing


def free_on(device: str) -> int | None:
    """Return the bytes that are free for this process on a device; None if it does not tell.

    Args:
        device: as PyTorch names it; the memory of others than CUDA's is the machine's.
    """
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory()


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that are free for this process, by the machine and by control groups.

    None if the system does not tell. Memory that holds cached files counts as free.

    Args:
        root: where the system's files are.
    """
    free = [_free_on_machine(root), *_free_in_groups(root)]
    known = [value for value in free if value is not None]
    return max(0, min(known)) if known else None


def _free_on_machine(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    try:  # without this entry, the whole memory of the machine
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def _free_in_groups(root: Path) -> Iterator[int]:
    """Yield what this process's control groups, and those around them, leave; both versions."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounted = root / "sys/fs/cgroup"
            limit, usage, cache = "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mounted = root / "sys/fs/cgroup/memory"
            limit, usage, cache = (
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        group = mounted / path.strip("/")
        # in a container the path may be the host's; then only the root group is visible
        for folder in (group, *group.parents):
            allowed, used = (_number(folder / name) for name in (limit, usage))
            if allowed is not None and used is not None:
                stat = dict(row.split(" ", 1) for row in _lines(folder / "memory.stat"))
                yield allowed - used + int(stat.get(cache, 0))
            if folder == mounted:
                break


def _lines(path: Path) -> list[str]:
    """Return the lines of one of the system's files; none where there is no such file."""
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    """Read the number that a file holds; None for another text, such as "max"."""
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def bytes_in(value: Any) -> int:
    """Return the bytes of all tensors in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, Mapping):
        return sum(map(bytes_in, value.values()))
    return sum(map(bytes_in, value)) if isinstance(value, (list, tuple)) else 0


def format_bytes(n_bytes: int) -> str:
    """Return an amount of memory as text, in MiB or GiB."""
    if n_bytes < 2**30:
        return f"{n_bytes / 2**20:.0f} MiB"
    return f"{n_bytes / 2**30:.1f} GiB"


def check_device(device: Any) -> str:
    """Return the name of a device if numbers can be put on it.

    Raises:
        InfoFlowError: with what it answered.
    """
    try:
        torch.empty(1, device=device)
        kind = torch.device(device).type
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        raise InfoFlowError(
            f"device is {device!r}, which does not answer ({first_line(error)}): expected "
            "cpu, or an accelerator that this PyTorch sees, such as cuda:0"
        ) from error
    if kind == "meta":
        raise InfoFlowError("device 'meta' holds no numbers: expected cpu, or an accelerator")
    return str(device)


def check_memory(needed_bytes: int, device: str, jobs: int = 1) -> None:
    """Refuse runs that do not fit in the free memory, before work starts.

    If the free memory is unknown, no run is refused.

    Args:
        needed_bytes: what one run takes.
        device: where runs train, as PyTorch names it; the memory of others than CUDA's is the
            machine's.
        jobs: runs at a time, each in a process of its own if there are several.

    Raises:
        InfoFlowError: with what is needed and what is free; or for a device that is not there.
    """
    check_device(device)
    needed = needed_bytes * jobs
    if jobs > 1:
        needed += _WORKER_BYTES * jobs
    free = free_on(device)
    if free is None or needed <= free:
        return
    runs = f"{jobs} runs at a time need" if jobs > 1 else "a run needs"
    fewer = "fewer jobs, or " if jobs > 1 else ""
    raise InfoFlowError(
        f"{runs} about {format_bytes(needed)} of memory on {device}, but {format_bytes(free)} is "
        f"free: expected it to fit; choose {fewer}a smaller preset"
    )
